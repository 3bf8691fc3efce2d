"""Where the command begins, before anything is imported: Ctrl-C ends it with exit code 130 and without a traceback."""

import os
import signal
from typing import Any, NoReturn


def start() -> NoReturn:
    """Entry point of the installed command. Exits with the code of the command."""
    signal.signal(signal.SIGINT, leave)
    from planner.commands.main import main_entry  # a tenth of a second, in which nothing is half done

    main_entry(leave)


def leave(number: int, _: Any) -> NoReturn:
    """End the process as a signal does in shells, and do nothing else."""
    os._exit(128 + number)
