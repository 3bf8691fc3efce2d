"""One rank of rung ``full`` as torchrun starts it: ``torchrun ... -m planner.validator settings.json``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.launch.place import place_from
from planner.launch.torchrun import DIRECTORY
from planner.validator.orders import Orders


def main(path: str) -> int:
    """Runs this rank; a PlannerError becomes the last words for the process that started torchrun."""
    place = place_from(os.environ)
    if place is None or DIRECTORY not in os.environ:
        raise SystemExit("this is one rank of `plan validate`; start that, or torchrun")
    directory = Path(os.environ[DIRECTORY])
    library.write_whole(directory / f"pid-{place.rank}", str(os.getpid()))
    from planner.validator.full_rank import work  # torch takes seconds; the process that started this knows it by now

    try:
        work(Orders.from_json(Path(path).read_text(encoding="utf-8")), place, lambda *_: None)
    except PlannerError as error:
        if not (directory / "failure.txt").exists():
            library.write_whole(directory / "failure.txt", str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
