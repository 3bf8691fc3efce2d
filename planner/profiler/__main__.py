"""One rank as torchrun starts it: ``torchrun ... -m planner.profiler settings.json``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from planner.errors import PlannerError
from planner.profiler.launch import DIRECTORY
from planner.profiler.place import place_from
from planner.profiler.settings import Settings
from planner.profiler.worker import work


def main(path: str) -> int:
    """Runs this rank; a PlannerError becomes the last words for the process that started torchrun."""
    place = place_from(os.environ)
    if place is None:
        raise SystemExit("this is one rank of `plan profile`; start that, or torchrun")
    try:
        work(Settings.from_json(Path(path).read_text(encoding="utf-8")), place)
    except PlannerError as error:
        directory = os.environ.get(DIRECTORY)
        failure = Path(directory) / "failure.txt" if directory else None
        if failure and not failure.exists():
            failure.write_text(str(error), encoding="utf-8")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
