"""One rank of level ``full`` as torchrun starts it: ``torchrun ... -m planner.lab.run settings.json``."""

import sys

from planner.lab.launch.place import Place
from planner.lab.launch.torchrun import as_rank, leave
from planner.lab.run.levels import task_of_rank


def train(settings: str, place: Place) -> None:
    """Trains as this rank."""
    from planner.lab.run.full_rank import work  # torch takes seconds; the process that started this knows it by now

    work(task_of_rank(settings, place), place, lambda *_: None)


if __name__ == "__main__":
    leave(as_rank("validate", sys.argv[1], train))
