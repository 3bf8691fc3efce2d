"""Where the command begins, before anything is imported: Ctrl-C ends it with exit code 130 and without a traceback."""

import gc
import os
import signal
from typing import Any, NoReturn


def start() -> NoReturn:
    """Entry point of the installed command. Exits with the code of the command."""
    signal.signal(signal.SIGINT, leave)
    gc.set_threshold(20_000, 20, 20)  # modules and arrays are no garbage: looking for it took 6 % of a short command
    from planner.commands.main import main_entry  # a tenth of a second, in which nothing is half done

    main_entry(leave)


def leave(number: int, _: Any) -> NoReturn:
    """End the process as a signal does in shells, and do nothing else."""
    os._exit(128 + number)
