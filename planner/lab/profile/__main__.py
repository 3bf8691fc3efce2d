"""One rank of a profile as torchrun starts it: ``torchrun ... -m planner.lab.profile settings.json``."""

import json
import sys

from planner.lab.launch.place import Place
from planner.lab.launch.torchrun import as_rank, leave
from planner.lab.profile.points import Settings


def measure(settings: str, place: Place) -> None:
    """Measures as this rank."""
    from planner.lab.profile import health, worker  # torch takes seconds; the process that started this knows it by now

    given = Settings(**json.loads(settings))
    if given.health:
        health.work(given, place)
    else:
        worker.work(given, place)


if __name__ == "__main__":
    leave(as_rank("profile", sys.argv[1], measure))
