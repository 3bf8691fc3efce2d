"""One rank as torchrun starts it: ``torchrun ... -m planner.lab.profile settings.json``, or planner.lab.run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.lab.launch.place import Place, place_from
from planner.lab.launch.torchrun import DIRECTORY


def as_rank(command: str, settings: str, work: Callable[[str, Place], object]) -> int:
    """Does ``work(text of the settings, place)``; a PlannerError becomes the last words for the process that started torchrun.

    ``command`` is the one that a user should have started instead. Returns the exit code.
    """
    place = place_from(os.environ)
    if place is None or DIRECTORY not in os.environ:
        raise SystemExit(f"this is one rank of `plan {command}`; start that, or torchrun")
    directory = Path(os.environ[DIRECTORY])
    library.write_whole(directory / f"pid-{place.rank}", str(os.getpid()))
    try:
        work(Path(settings).read_text(encoding="utf-8"), place)
    except PlannerError as error:
        if not (directory / "failure.txt").exists():
            library.write_whole(directory / "failure.txt", str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
