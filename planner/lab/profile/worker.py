"""One rank of a profile: joins the others, measures with them what is planned, and keeps it in the journal (torch)."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from planner import detect, units
from planner.errors import PlannerError
from planner.lab.launch.place import Place
from planner.lab.launch.state import State, Teller
from planner.lab.profile import compute_points as shapes
from planner.lab.profile import compute_timing, patterns, timing
from planner.lab.profile.all_ranks import measure_ranks, measure_shared, rank_point, shared_points
from planner.lab.profile.collective_forms import measure_form
from planner.lab.profile.collective_timing import NoSuchCollectiveError, NotMeasuredError, measure_collective
from planner.lab.profile.node_state import conditions, unlike
from planner.lab.profile.overlap_timing import measure_overlap
from planner.lab.profile.patterns import in_words
from planner.lab.profile.points import LOST, Journal, Measured, Point, Settings, Value
from planner.lab.profile.rank_groups import Buffers, Ranks, at_work, header

T = TypeVar("T")
SHARE = 0.5  # Part of the budget for what one rank measures alone, where both are wanted
LEAST_SECONDS, MOST_SECONDS = 5e-3, 2.0  # Budget of one point
ALONE_SECONDS = 60.0
"""A point that one rank measures alone has hung after this and the timeout; the longest heats the device for 20 s."""
LEFT_OUT = "left out: the budget was spent"
MEMORY_FAMILIES = ("bytes", "host_copy", "host_stream", "cpu_adam")
GUESS = "h100-sxm"  # Whose search decides which shapes matter where the library does not know the device
OVERLAP_LARGEST = {"cpu": 16.0 * units.MIB, "cuda": 256.0 * units.MIB}
NEEDED = ("gemm", "attention", "memory_bound", "launch", "bytes", "yardstick", "layer")
"""Without one point of each kind of these families a profile is none, whatever the budget: memory, launches, products, attention,
an addition (of what moves bytes), and a whole layer, which says how far off the sum of its operators is."""


@dataclass(kw_only=True)
class Run:
    """A profile in progress on one rank."""

    settings: Settings
    ranks: Ranks
    journal: Journal
    teller: Teller
    begun: float
    cannot: set[tuple[Value, ...]] = field(default_factory=set)
    """Collectives that the library does not have, found out on all ranks together."""

    def show(self, part: str, doing: str, done: int, points: int) -> None:
        """Shows where rank 0 is."""
        if self.ranks.first:
            spent, budget = time.monotonic() - self.begun, self.settings.budget
            self.teller.tell(State(part=part, doing=doing, done=done, points=points, spent=spent, budget=budget))

    def left(self, of: float = 1.0) -> float:
        """Seconds left of a part of the budget."""
        return of * self.settings.budget - (time.monotonic() - self.begun)

    def alone(self, point: Point, seconds: float) -> Measured:
        """Measures a point on this rank alone. Raises PlannerError where it cannot be."""
        ranks = self.ranks
        with ranks.watch.doing(point.label, [ranks.place.rank], ALONE_SECONDS + ranks.timeout):
            return compute_timing.measure_compute(point, self.settings.device, seconds)


def _fair(left: float, points: int) -> float:
    """Seconds for the next of so many points."""
    return min(max(left / points, LEAST_SECONDS), MOST_SECONDS)


def work(
    settings: Settings, place: Place, show: Callable[[State], object] | None = None, finish: Callable[[], T] | None = None
) -> T | None:  # fmt: skip
    """Measures as this rank; rank 0 keeps the journal and calls ``finish``, whose result is returned. The others wait for it:
    an agent of torchrun whose ranks left in order would wait minutes for one whose rank did not. Ends the process where a
    rank or link fails."""
    journal: list[Journal] = []

    def keep() -> None:
        if journal:
            journal[0].write()

    with at_work(settings, place, show or (lambda _: None), keep) as (ranks, shown):
        kept = _journal(settings, ranks)
        journal.append(kept)
        kept.header["cpu_pressure"] = detect.pressure()
        kept.header |= _conditions(ranks)
        run = Run(
            settings=settings, ranks=ranks, journal=kept, teller=Teller(shown if ranks.first else None),
            begun=time.monotonic(),
        )  # fmt: skip
        with kept:
            _measure(run)
        with ranks.watch.doing("writing the profile", list(range(ranks.world)), ranks.timeout + ALONE_SECONDS):
            made = finish() if finish and ranks.first else None
            ranks.from_first([0.0])
    with contextlib.suppress(Exception):  # everything is measured and kept; nothing here can lose it
        dist.destroy_process_group()
    return made


def _conditions(ranks: Ranks) -> dict[str, Any]:
    """Of the first node, and what other nodes have otherwise."""
    with ranks.watch.doing("asking the driver for clocks and links", list(range(ranks.world)), 3.0 * detect.PATIENT):
        first_of_node = ranks.place.rank % ranks.local == 0
        nodes = ranks.collect(conditions(ranks.device) if first_of_node else None)
    known = {ranks.hosts[rank]: one for rank, one in enumerate(nodes) if one is not None}
    return {"conditions": nodes[0], "unlike": unlike(known)}


def _journal(settings: Settings, ranks: Ranks) -> Journal:
    """Rank 0's journal, new or read; the other ranks learn from it what is measured already."""
    mine, problem = header(ranks), ""
    kept = Journal(settings.journal if ranks.first else None, mine)
    if ranks.first and settings.resume:
        try:
            kept = Journal.resume(settings.journal, mine)
        except PlannerError as error:
            problem = str(error)
    problem, known = ranks.collect((problem, kept.of()))[0]
    if problem:
        raise PlannerError(problem)
    if not ranks.first:
        for one in known:
            kept.add(one)
    return kept


def _measure(run: Run) -> None:
    """What rank 0 measures alone, the weightiest first, while the others wait; then what all measure together."""
    settings, cuda = run.settings, run.settings.device == "cuda"
    parts = [part for part in ("compute", "memory") if part in settings.only]
    together = "collectives" in settings.only and run.ranks.world > 1
    shared = shared_points(run.ranks.world) if cuda and run.ranks.world > 1 else []
    points: list[Point] = []
    if parts and run.ranks.first:
        guess = settings.base or detect.profile_of(run.ranks.names[0]) or GUESS
        points = [
            point for point in shapes.compute_points(settings.models, guess, settings.device)
            if _part(point) in parts and point not in run.journal and not (shared and point.family == "sustained")
        ]  # fmt: skip
    any_alone = run.ranks.from_first([float(len(points))])[0] > 0
    run.begun = time.monotonic()
    if points:
        _alone(run, points, SHARE if together else 1.0)
    busy = any_alone and not cuda and not run.ranks.first
    run.ranks.from_first([0.0], compute_timing.layers(settings.models) if busy else None)
    _shared(run, [point for point in shared if _part(point) in parts and point not in run.journal])
    if together:
        _together(run)


def _part(point: Point) -> str:
    """Of what one device does: compute or memory."""
    return "memory" if point.family in MEMORY_FAMILIES else "compute"


def _shared(run: Run, points: Sequence[Point]) -> None:
    """What all ranks measure by themselves at the same time, while the budget lasts."""
    for number, point in enumerate(points):
        [go_on] = run.ranks.from_first([run.left() > 0])
        if not go_on:
            run.journal.fail(point, LEFT_OUT)
            continue
        run.show("compute", f"{point.label}, all ranks at once", number, len(points))
        try:
            run.journal.add(measure_shared(point, run.ranks, MOST_SECONDS))
        except NotMeasuredError as error:
            run.journal.fail(point, str(error)[:300])


def _alone(run: Run, points: Sequence[Point], share: float) -> None:
    """Measures on rank 0, after a warm-up in rounds, until its share of the budget is spent; the least that makes a profile
    always."""
    journal, device = run.journal, run.settings.device
    if device == "cuda":  # Adam in host memory has all cores of the node; launchers give a rank one thread
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    if any(point.family in timing.IN_ROUNDS for point in points):
        warm_up = shapes.warm_up_point(device)
        journal.add(run.alone(warm_up, timing.WARM_UP_SHARE * max(run.left(share), 0.0)))

    def reference(point: Point) -> Measured | None:
        try:
            return run.alone(point, timing.DRIFT_SECONDS)
        except compute_timing.DeviceLostError:
            raise
        except (PlannerError, MemoryError):
            return None

    done, due = timing.Rounds(), timing.Due(run.left(share))
    failed = {point for point, _ in journal.failed}  # broke the device before --resume
    visits = timing.schedule(points, timing.ROUNDS[device])
    for number, point in enumerate(visits):
        left, first = run.left(share), point not in done
        if left > 0 and due.now():
            due.done(timing.measure_again(timing.references_alone(journal), journal, reference))
        if point in failed:
            continue
        if left <= 0 and not (first and _needed(point, journal)):
            if first and point not in journal:
                journal.fail(point, LEFT_OUT)
            continue
        run.show("compute", point.label, len(done), len(points))
        try:
            journal.add(done.add(run.alone(point, _fair(left, len(visits) - number))))
        except compute_timing.DeviceLostError as error:
            journal.fail(point, LOST + str(error))
            raise
        except (PlannerError, MemoryError) as error:  # no such kernel here, no room: kept with its reason
            failed.add(point)
            if first:
                journal.fail(point, (str(error).strip() or repr(error)).splitlines()[0][:300])


def _needed(point: Point, journal: Journal) -> bool:
    """Whether a profile needs a point like this one (NEEDED) and has none."""

    def kind(one: Point) -> list[Value | None]:
        return [one.values.get(name) for name in ("kind", "name", "op", "pass")]

    wanted = point.family in NEEDED and point.values.get("op") in (None, "elementwise")
    return wanted and all(kind(one.point) != kind(point) for one in journal.of(point.family))


def _together(run: Run) -> None:
    """Collectives and overlap: rank 0 says which point comes next and how long it may take."""
    ranks, journal = run.ranks, run.journal
    largest = run.settings.largest or patterns.largest_buffer(run.settings.models, ranks.device)
    octaves = patterns.sizes(largest)
    points, least = _together_points(ranks, octaves)
    missing = [point for point in points if point not in journal]
    with ranks.watch.doing(f"setting up buffers of {units.format_bytes(octaves[-1])}", list(range(ranks.world))):
        buffers = Buffers(octaves[-1], ranks.device)
        ranks.barrier()
    if rank_point(ranks.device) not in journal:
        journal.add(measure_ranks(rank_point(ranks.device), ranks))
    references, due = timing.references_together(points[:least]), timing.Due(run.left())
    always = set(points[:least])

    def reference(point: Point) -> Measured | None:
        return measure_collective(point, ranks, buffers, timing.DRIFT_SECONDS) if point in journal else None

    for turn, point in enumerate(missing):
        left = run.left()
        said = [left > 0 or point in always, _fair(left, len(missing) - turn), left > 0 and due.now()]
        go_on, budget, once_more = ranks.from_first(said)
        if once_more:
            due.done(timing.measure_again(references, journal, reference))
        if not go_on:
            journal.fail(point, LEFT_OUT)
            continue
        run.show("collectives", in_words(point), turn, len(missing))
        kind = (point.family, point["op"], point["dtype"])  # what a library can or cannot do
        if kind in run.cannot:
            continue
        measure = {"overlap": measure_overlap, "collective_form": measure_form}.get(point.family, measure_collective)
        try:
            found = measure(point, ranks, buffers, budget)
        except NoSuchCollectiveError as error:  # whatever its size
            journal.fail(point, str(error)[:300])
            run.cannot.add(kind)
            continue
        except NotMeasuredError as error:
            journal.fail(point, str(error)[:300])
            continue
        if found:
            journal.add(found)
    if ranks.device == "cuda":
        _communicator(run)


def _together_points(ranks: Ranks, octaves: Sequence[int]) -> tuple[list[Point], int]:
    """What all ranks measure, and how many of it whatever the budget: the ends and the middle of the first round's sizes."""
    main, other = ("bf16", "fp32") if ranks.device == "cuda" else ("fp32", "bf16")
    points = patterns.collective_points(ranks.world, ranks.local, octaves[-1], main=main, other=other)
    largest = int(min(octaves[-1], OVERLAP_LARGEST[ranks.device]))
    overlaps = patterns.overlap_points(ranks.world, ranks.local, largest, main, weight=0.9)
    forms = patterns.form_points(ranks.world, ranks.local, octaves, main, weight=0.5) if ranks.device == "cuda" else []
    first = sum(point.weight >= 1.0 for point in points)
    return points[:first] + overlaps + forms + points[first:], first * len(patterns.coarse_first(len(octaves))[0]) // len(
        octaves
    )


def _communicator(run: Run) -> None:
    """Device memory that one further NCCL communicator takes: the most of any rank, by its first all-reduce or exchange."""
    ranks = run.ranks
    for name in ("communicator", "expert_communicator"):
        point = Point.of("bytes", name=name)
        if point in run.journal:
            continue
        with ranks.watch.doing(f"measuring the memory of a {name}", list(range(ranks.world))):
            data = torch.zeros(ranks.world * 65536, dtype=torch.uint8, device="cuda")
            result = torch.empty_like(data)
            torch.cuda.synchronize()
            ranks.barrier()
            before = torch.cuda.mem_get_info()[0]
            group = dist.new_group(backend="nccl")
            if name == "communicator":
                dist.all_reduce(data, group=group)
            else:
                dist.all_to_all_single(result, data, group=group)
            torch.cuda.synchronize()
            taken = ranks.slowest([float(max(before - torch.cuda.mem_get_info()[0], 0))])[0]
            dist.destroy_process_group(group)
        run.journal.add(Measured.fact(point, taken, details={"source": "device memory before and after"}))
