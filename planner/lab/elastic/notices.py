"""How many GPUs there are, and whether the machine is about to be taken away: asked of files and commands that the user names."""

import contextlib
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from planner import library
from planner.detect import asked_driver
from planner.errors import PlannerError, shown

LIMIT = 20.0
"""Seconds that a command of the user's may take to answer."""


def _asked(source: str) -> tuple[int, str]:
    """(exit code, first line) of a command, or (0 where it is there, text) of a file."""
    if library.is_file(source):
        return 0, library.read_text(Path(source)).strip()
    words = shlex.split(source)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return 127, ""
    except (OSError, subprocess.SubprocessError):
        return 126, ""
    return done.returncode, (done.stdout.strip().splitlines() or [""])[0][:200]


def gpus_here(source: str | None, most: int) -> Callable[[], int]:
    """Asks how many GPUs may be used on this node, at most ``most``: ``source`` names a file with the number, or a command that
    prints it; None = those of the driver, ``most`` where it shows none. The answer before counts while there is none. The first
    question raises PlannerError where there is no answer."""
    last: list[int] = []

    def ask() -> int:
        if source is None:
            count = len(asked_driver().names) or most
        else:
            code, text = _asked(source)
            found = re.fullmatch(r"\s*(\d{1,6})\s*", text)
            if code == 0 and found:
                count = int(found[1])
            elif last:
                count = last[0]
            else:
                raise PlannerError(
                    f"--world {source}: gave {shown(text)} (exit code {code}); it must be a file with the number of GPUs, or a "
                    "command that prints it"
                )
        last[:] = [min(count, most)]
        return last[0]

    return ask


def taken_away(source: str | None, every: float) -> Callable[[], str]:
    """Asks whether a notice has come, at most every so many seconds: the file ``source`` is there, or the command ends with 0. ""
    = no."""
    asked, said = [float("-inf")], [""]

    def ask() -> str:
        if source is None or said[0] or time.monotonic() - asked[0] < every:
            return said[0]
        asked[0] = time.monotonic()
        with contextlib.suppress(PlannerError, ValueError):
            code, text = _asked(source)
            if code == 0:
                said[0] = text or "a notice has come"
        return said[0]

    return ask
