"""Times of collectives as a training job sees them: all groups of a pattern at once, the slowest rank counts (torch).

A sample is a block of back-to-back runs between two readings of the clock, as in nccl-tests: on a GPU device events around the
block, on a CPU the monotonic clock; all ranks leave a barrier before each block. The sample is the longest over all ranks of
block / runs. The median, its interval and the outliers are of these samples.
"""

import math
from statistics import median

import torch

from planner import units
from planner.errors import PlannerError
from planner.lab.profile.patterns import Pattern, factor, in_words, pattern_of
from planner.lab.profile.points import Measured, Point, Run, Taker, Value
from planner.lab.profile.rank_groups import Buffers, Operation, Ranks
from planner.lab.profile.timing import FEWEST, ahead_of, precise, slowest_group, summarise, taker

PRECISION = 0.05  # Half the interval of the median over the median at which a point is done
BLOCK_SECONDS = {"cpu": 2e-3, "cuda": 5e-4}
"""A block repeats a short collective until it lasts this long: processes leave a barrier tenths of a millisecond apart, devices
microseconds."""
LEAST, MOST = 7, 200
"""Samples of a point; a single run longer than a third of the budget is sampled at least three times."""
LONGEST_BLOCK = {"cpu": 500, "cuda": 64}
"""Runs in a block; the queue of a GPU, some thousand entries, has to hold all that one of NCCL's operations puts there."""
CANNOT = (
    "not implemented", "not supported", "unsupported", "does not support", "invalid scalar type", "invalid data type",
)  # fmt: skip
"""Words in an exception that say that the library has no such collective: the same on every rank, before anything is sent."""
NONE_SUCH = "the library has none such"


class NotMeasuredError(PlannerError):
    """A point that cannot be measured, as all ranks have found together; the others still can."""


class NoSuchCollectiveError(NotMeasuredError):
    """The library cannot run a collective with this type or backend; the others can still be measured."""


def measure_collective(point: Point, ranks: Ranks, buffers: Buffers, budget_s: float) -> Measured | None:
    """One collective, on all ranks together; the result on every rank, None where the pattern leaves no group.

    Raises PlannerError on every rank where a result was wrong. What hangs or dies ends in ``ranks.watch``.
    """
    pattern = pattern_of(point)
    everyone = pattern.groups(ranks.world)
    if not everyone:
        return None
    op, size, dtype = point.each("op", "size", "dtype")
    with ranks.watch.doing(in_words(point), everyone[0]):
        group = ranks.group(pattern)
        operation = Operation(op, size, dtype, group, buffers) if group else None
        check(operation, ranks, point)
        if operation:
            operation.calm()
        samples, own, details = sample(operation, ranks, budget_s, taker_of(operation, ranks))
        ranks.watch.again()
        check(operation, ranks, point)
        if len(everyone) >= FEWEST and size >= units.MIB:  # a slow link shows in the group that it is in
            details["slowest_group"], details["over_median"] = slowest_group(everyone, ranks.collect(median(own)))
    found = summarise(samples, "cuda_events" if ranks.device == "cuda" else "wall")
    return found.measured(point, bus_bandwidth=size / found.median * factor(op, pattern.n), **details)


def check(operation: Operation | None, ranks: Ranks, point: Point) -> None:
    """Runs it once on a known content and compares every element; the first run also makes the connections."""
    wrong = ""
    if operation:
        operation.fill()
        try:
            operation.run()
            if ranks.device == "cuda":
                torch.cuda.synchronize()
            wrong = operation.wrong()
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            if not any(word in str(error).lower() for word in CANNOT):
                raise
            wrong = f"{NONE_SUCH}: {str(error).strip().splitlines()[0][:200]}"
    if ranks.slowest([float(bool(wrong))])[0]:
        texts = {rank: text for rank, text in enumerate(ranks.collect(wrong)) if text}
        rank, text = next(iter(texts.items()))
        if all(one.startswith(NONE_SUCH) for one in texts.values()):
            raise NoSuchCollectiveError(f"{in_words(point)}: {text}")
        raise PlannerError(
            f"{in_words(point)} returned wrong data on {ranks.watch.where(rank)}: {text}; "
            "the profile is void until the cause is found"
        )


def taker_of(operation: Operation | None, ranks: Ranks, *, ahead: bool = True, run: Run | None = None) -> Taker:
    """Samples of this rank, of ``run`` where that is not the operation itself. All ranks leave a barrier before each.

    On a GPU that is an all-reduce of one element queued before the first event, so that the devices start together, and the device
    spins before it until the host has queued the sample; without ``ahead`` it does not. A collective makes the current stream
    wait for its own.
    """
    run = run or (operation.run if operation else lambda: None)
    if ranks.device != "cuda":
        return taker(run, "wall", ranks.barrier)
    one, everyone = torch.zeros(1, device="cuda"), ranks.group(Pattern(n=ranks.world, stride=1))
    return taker(run, "cuda_events", lambda: torch.distributed.all_reduce(one, group=everyone), ahead=ahead)


def sample(
    operation: Operation | None, ranks: Ranks, budget_s: float, timed: Taker, most: int | None = None
) -> tuple[list[float], list[float], dict[str, Value]]:
    """Samples of the slowest rank, those of this one, and details; all ranks decide alike, by the slowest's. ``most`` runs in a
    sample at most."""

    full = True  # the queue of a GPU, before each sample

    def agree(late: float) -> float:
        return ranks.slowest([late])[0] if ranks.device == "cuda" else late

    def take(count: int, inner: int) -> list[float]:
        nonlocal full
        found, full = ahead_of(timed, count, inner, agree) if full else (timed(count, inner), False)
        return [one if operation else 0.0 for one in found]

    pilot = ranks.slowest(take(2, 1))
    inner = math.ceil(BLOCK_SECONDS[ranks.device] / max(min(pilot), 1e-9))
    inner = max(1, min(most or LONGEST_BLOCK[ranks.device], inner))
    samples: list[float] = []
    own: list[float] = []
    spent = sum(pilot)
    while len(samples) < MOST:
        ranks.watch.again()
        mine = take(3 if len(samples) < LEAST else min(len(samples), 25), inner)
        new = ranks.slowest(mine)
        own += mine
        samples += new
        spent += inner * sum(new)
        enough = len(samples) >= (LEAST if 3.0 * max(new) * inner < budget_s else 3)
        if precise(samples, PRECISION) or (spent > budget_s and enough):
            break
    return samples, own, {} if full else {"queued": False}
