"""A card or link that is slower than its like stands out: rates of every rank, times of every group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.lab.profile.points import Measured, Point
from planner.lab.profile.timing import measure, middle, summarise

if TYPE_CHECKING:  # the assembly of the file needs no torch
    from planner.lab.profile.rank_groups import Ranks

SLOW_RANK, SLOW_GROUP = 1.10, 1.5
"""Time over that of the median rank, and of the median group, from which a note names it."""
FEWEST = 3
"""Of fewer nothing stands out."""
SIDE = {"cpu": 256, "cuda": 8192}
SECONDS = {"cpu": 0.2, "cuda": 2.0}


def rank_point(device: str) -> Point:
    """The same product on every rank at the same time."""
    return Point.of("ranks", m=SIDE[device], dtype="bf16" if device == "cuda" else "fp32")


def measure_ranks(point: Point, ranks: Ranks) -> Measured:
    """Seconds of one product on the slowest rank while all ranks run it; details name it and compare it with the median.

    On a CPU by processor time: cores are shared.
    """
    import torch

    from planner.lab.profile.operations import DTYPES

    side, dtype = int(point["m"]), DTYPES[str(point["dtype"])]
    a, b = (torch.ones(side, side, dtype=dtype, device=ranks.device) for _ in range(2))
    with ranks.watch.doing(
        "a product on every rank", list(range(ranks.world)), ranks.timeout + 10.0 * SECONDS[ranks.device]
    ):
        ranks.barrier()
        found = measure(
            lambda: torch.mm(a, b), device=ranks.device, clock="cpu" if ranks.device == "cpu" else "cuda_events",
            budget_s=SECONDS[ranks.device],
        )  # fmt: skip
        all_ranks = ranks.collect(found.median)
    slowest, ratio = odd_one(all_ranks)
    samples = summarise([all_ranks[slowest]], found.clock)
    return samples.measured(
        point, slowest=slowest, host=ranks.hosts[slowest], over_median=ratio, ranks=len(all_ranks),
    )  # fmt: skip


def odd_one(seconds: Sequence[float]) -> tuple[int, float]:
    """Place of the longest, and its ratio to the median of the others."""
    slowest = max(range(len(seconds)), key=lambda place: seconds[place])
    others = sorted(value for place, value in enumerate(seconds) if place != slowest)
    return slowest, seconds[slowest] / middle(others) if others and middle(others) > 0 else 1.0


def odd_group(groups: Sequence[Sequence[int]], seconds: Sequence[float]) -> tuple[str, float]:
    """The group with the longest time on any of its ranks, as text, and its ratio to the median of the other groups."""
    slowest, ratio = odd_one([max(seconds[rank] for rank in group) for group in groups])
    return " ".join(map(str, groups[slowest])), ratio
