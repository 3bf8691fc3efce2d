"""Ranks whose devices have made names: what ``plan profile`` does on machines that differ. On gloo."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any


def as_kinds(place: Any, say: Callable[[Any], None], names: tuple[str, ...], output: str, delay: float = 0.0) -> None:
    """The whole profile; rank r is on a device called ``names[r]``, and each run of equal names is a node. What the ranks of the
    second kind send takes ``delay`` longer."""
    from planner.lab.launch import meeting
    from planner.lab.launch.meeting import UnlikeRanksError
    from planner.lab.profile import kinds, rank_groups
    from planner.lab.profile.points import Settings
    from planner.lab.profile.worker import work

    first = [number for number, name in enumerate(names) if not number or names[number - 1] != name]
    node = sum(one <= place.rank for one in first) - 1
    place = dataclasses.replace(place, node=node, local_rank=place.rank - first[node])
    real = meeting._mine
    meeting._mine = lambda place, device: {**real(place, device), "name": names[rank_of[0]]}
    rank_of = [place.rank]
    rank_groups.processor = lambda: names[rank_of[0]]
    if delay:
        once = kinds._once

        def late(operation: Any, device: str) -> float:
            taken = once(operation, device)
            return taken + delay if operation is not None else taken

        kinds._once = late
    settings = Settings(output=output, device="cpu", models=(), resume=False, only=("collectives", "compute", "memory"),
                        budget=1.0, timeout=30.0, largest=2.0**14)  # fmt: skip
    try:
        work(settings, place)
        say("alike")
    except UnlikeRanksError as unlike:
        begun = time.monotonic()
        found = kinds.work_by_kind(settings, place, unlike)
        say(None if found is None else (found.to_dict(), time.monotonic() - begun))
