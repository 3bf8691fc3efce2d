"""What every rank measures by itself, all at the same time, and the slowest counts (torch).

GPUs of a node share its air, the power of the chassis, host memory and PCIe switches: a clock and a copy next to seven idle
neighbours are not those of a job.
"""

from collections.abc import Callable

from planner.errors import PlannerError
from planner.lab.profile import compute_points, compute_timing
from planner.lab.profile.collective_timing import NotMeasuredError
from planner.lab.profile.overlap_timing import square
from planner.lab.profile.points import Measured, Point, Timing
from planner.lab.profile.rank_groups import Ranks
from planner.lab.profile.timing import measure, slowest_of, summarise

SIDE = {"cpu": 256, "cuda": 8192}
SECONDS = {"cpu": 0.2, "cuda": 10.0}
"""Of the product that all ranks run at once: a GPU that has rested is cold, and a power limit shows after seconds."""
MARGIN = 60.0  # Seconds beyond its own until a point has hung


def rank_point(device: str) -> Point:
    """The same product on every rank at the same time."""
    return Point.of("ranks", m=SIDE[device], dtype=compute_points.DTYPE[device])


def shared_points(world: int) -> list[Point]:
    """On GPUs what neighbours have a part in: the clock of a long product, copies from and to the host."""
    wanted = [point for point in compute_points.machine("cuda") if point.family in ("sustained", "host_copy")]
    return [Point.of(point.family, **point.values, ranks=world) for point in wanted]


def measure_ranks(point: Point, ranks: Ranks) -> Measured:
    """Seconds of one product of random operands on the slowest rank while all ranks run it; details name it and compare it with
    the median. On a GPU the last second of ten counts."""
    side, dtype, seconds = point["m"], point["dtype"], SECONDS[ranks.device]
    own = Point.of("sustained", dtype=dtype, m=side, n=side, k=side, seconds=seconds)

    def run() -> Timing:
        if ranks.device == "cuda":
            return compute_timing.measure_compute(own, "cuda", seconds)
        return measure(square(side, dtype, "cpu"), device="cpu", clock="cpu", budget_s=seconds)

    found = _slowest(point, run, ranks, seconds, "a product on every rank")
    return summarise([found.median], found.clock).measured(point, **found.details)


def measure_shared(point: Point, ranks: Ranks, budget_s: float) -> Measured:
    """A point of ``shared_points`` on all ranks at once: what the slowest measured, which rank that is, and how far it is off."""
    seconds = float(point.values.get("seconds", budget_s))

    def run() -> Timing:
        return compute_timing.measure_compute(point, ranks.device, budget_s)

    return _slowest(point, run, ranks, seconds, f"{point.label}, all ranks at once")


def _slowest(point: Point, run: Callable[[], Timing], ranks: Ranks, seconds: float, doing: str) -> Measured:
    """What ``run`` gave on the slowest rank. Raises NotMeasuredError on all ranks where it failed on one, once all have ended."""
    found: Timing | PlannerError
    with ranks.watch.doing(doing, list(range(ranks.world)), ranks.timeout + seconds + MARGIN):
        ranks.barrier()
        try:
            found = run()
        except compute_timing.DeviceLostError:
            raise
        except PlannerError as error:
            found = error
        every = ranks.collect(found)
    for rank, one in enumerate(every):
        if isinstance(one, PlannerError):
            raise NotMeasuredError(f"{point.label}: rank {rank} ({ranks.hosts[rank]}): {one}")
    slowest, ratio = slowest_of([one.median for one in every])
    worst: Timing = every[slowest]
    return worst.measured(point, slowest=slowest, host=ranks.hosts[slowest], over_median=ratio, ranks=len(every))
