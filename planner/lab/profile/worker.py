"""One rank of a profile: joins the others, measures with them what is planned, and keeps it in the journal (torch)."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from planner import detect, library, units
from planner.errors import PlannerError
from planner.lab.launch.place import Place
from planner.lab.launch.state import State, Teller, to_file
from planner.lab.launch.torchrun import DIRECTORY
from planner.lab.launch.watch import heed_signals
from planner.lab.profile import compute_points as shapes
from planner.lab.profile import compute_timing, patterns, rounds
from planner.lab.profile.collective_timing import NoSuchCollectiveError, measure_collective, measure_ranks, rank_point
from planner.lab.profile.journal import Journal
from planner.lab.profile.operations import Buffers, quiet
from planner.lab.profile.overlap_timing import measure_overlap
from planner.lab.profile.patterns import in_words
from planner.lab.profile.points import Identity, Measured, Point, Value
from planner.lab.profile.rank_groups import Ranks, header, join
from planner.lab.profile.settings import Settings

SHARE = 0.5  # Part of the budget for what one rank measures alone, where both are wanted
LEAST_SECONDS, MOST_SECONDS = 5e-3, 2.0  # Budget of one point
ALONE_SECONDS = 60.0
"""A point that one rank measures alone has hung after this and the timeout; the longest heats the device for 20 s."""
LEFT_OUT = "left out: the budget was spent"
MEMORY_FAMILIES = ("bytes", "host_copy", "host_stream", "cpu_adam")
GUESS = "h100-sxm"  # Whose search decides which shapes matter where the library does not know the device
OVERLAP_LARGEST = 16.0 * units.MIB
NEEDED: dict[str, tuple[str, ...]] = {
    "gemm": (), "attention": ("pass",), "memory_bound": ("op",), "launch": ("kind",), "bytes": ("name",),
    "yardstick": ("kind",), "layer": ("pass",), "chain": ("op", "pass"),
}  # fmt: skip
"""Without one point of each of these a profile is none, whatever the budget: families, and the values in which points differ.
Memory, launches, a product, attention both ways, a stream, a whole layer both ways, which says how far off the sum of its operators
is, and the chains of its plain kernels."""


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
    settings: Settings, place: Place, show: Callable[[State], object] | None = None,
    finish: Callable[[], object] | None = None,
) -> None:  # fmt: skip
    """Measures as this rank; rank 0 keeps the journal, and ``finish``es. Ends the process where a rank or link fails.

    The others wait until it has finished: where that fails, all fail together. An agent of torchrun whose ranks left in order
    would wait minutes for the one whose rank did not.
    """
    quiet()
    directory = os.environ.get(DIRECTORY)
    if directory:
        show = to_file(Path(directory) / "state.json")
    journal: list[Journal] = []

    def ended(sentence: str) -> None:
        if journal:
            journal[0].write()
        if sentence:
            _last_words(sentence, directory)

    ranks = join(place, settings.device, settings.timeout, ended)
    heed_signals(ranks.watch)
    try:
        kept = _journal(settings, ranks)
        journal.append(kept)
        kept.header["cpu_pressure"] = detect.pressure()
        run = Run(
            settings=settings, ranks=ranks, journal=kept, teller=Teller(show if ranks.first else None),
            begun=time.monotonic(),
        )  # fmt: skip
        with kept:
            _measure(run)
        with ranks.watch.doing("writing the profile", list(range(ranks.world)), ranks.timeout + ALONE_SECONDS):
            if finish and ranks.first:
                finish()
            ranks.word([0.0])
        ranks.watch.done()
    except KeyboardInterrupt:
        ranks.watch.silence()
        raise
    except Exception as error:
        ranks.watch.fail(error)
        raise
    if directory:
        (Path(directory) / f"done-{place.rank}").touch()
    with contextlib.suppress(Exception):  # everything is measured and kept; nothing here can lose it
        dist.destroy_process_group()


def _last_words(sentence: str, directory: str | None) -> None:
    """To the process that started torchrun, or to the terminal."""
    if directory:
        library.write_whole(Path(directory) / "failure.txt", sentence)
    else:
        print(f"error: {sentence}", file=sys.stderr, flush=True)


def _journal(settings: Settings, ranks: Ranks) -> Journal:
    """Rank 0's journal, new or read; the other ranks learn from it what is measured already."""
    mine = header(ranks)
    problem = ""
    if ranks.first:
        try:
            kept = Journal.resume(settings.journal, mine) if settings.resume else Journal(settings.journal, mine)
        except PlannerError as error:
            kept, problem = Journal(None, mine), str(error)
    else:
        kept = Journal(None, mine)
    problem, known = ranks.collect((problem, [one.to_dict() for one in kept.of()]))[0]
    if problem:
        raise PlannerError(problem)
    if not ranks.first:
        for entry in known:
            kept.add(Measured.from_dict(entry))
    return kept


def _measure(run: Run) -> None:
    alone = [part for part in ("compute", "memory") if part in run.settings.only]
    together = "collectives" in run.settings.only and run.ranks.world > 1
    points = _alone_points(run, alone) if alone and run.ranks.first else []
    any_alone = run.ranks.word([float(len(points))])[0] > 0
    run.begun = time.monotonic()
    if points:
        _alone(run, points, SHARE if together else 1.0)
    busy = any_alone and run.settings.device == "cpu" and not run.ranks.first
    run.ranks.word([0.0], compute_timing.layers(run.settings.models) if busy else None)
    if together:
        _together(run)


def _alone_points(run: Run, parts: Sequence[str]) -> list[Point]:
    """What rank 0 measures while the others wait, the weightiest first."""
    guess = run.settings.base or detect.profile_of(run.ranks.names[0]) or GUESS
    return [
        point for point in shapes.compute_points(run.settings.models, guess, run.settings.device)
        if ("memory" if point.family in MEMORY_FAMILIES else "compute") in parts and point not in run.journal
    ]  # fmt: skip


def _alone(run: Run, points: Sequence[Point], share: float) -> None:
    """Measures on rank 0 until its share of the budget is spent, and whatever it is the least that makes a profile.

    After a warm-up in rounds (``rounds.schedule``). What one round has is kept when the next one ends early.
    """
    journal, device = run.journal, run.settings.device
    if device == "cuda":  # Adam in host memory has all cores of the node; launchers give a rank one thread
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    done = rounds.Rounds()
    if any(point.family in rounds.IN_ROUNDS for point in points):
        warm_up = shapes.warm_up_point(device)
        journal.add(run.alone(warm_up, rounds.WARM_UP_SHARE * max(run.left(share), 0.0)))
    failed: set[Identity] = set()
    visits = rounds.schedule(points, rounds.ROUNDS[device])
    due = rounds.Due(run.left(share))
    for number, point in enumerate(visits):
        left, first = run.left(share), point not in done
        if left > 0 and due.now():
            due.done(_references_alone(run))
        if point.identity in failed:
            continue
        if left <= 0 and not (first and _needed(point, journal)):
            if first and point not in journal:
                journal.fail(point, LEFT_OUT)
            continue
        run.show("compute", point.label, len(done), len(points))
        try:
            journal.add(done.add(run.alone(point, _fair(left, len(visits) - number))))
        except (PlannerError, MemoryError) as error:  # no such kernel here, no room: kept with its reason
            failed.add(point.identity)
            if first:
                said = str(error).strip()
                journal.fail(point, said.splitlines()[0][:300] if said else repr(error))


def _references_alone(run: Run) -> float:
    """A round of the references that rank 0 measures alone; the seconds that it took."""
    begun = time.monotonic()
    for point in rounds.references_alone(run.journal):
        with contextlib.suppress(PlannerError, MemoryError):
            found = run.alone(point, rounds.DRIFT_SECONDS)
            run.journal.add(replace(found, point=rounds.again(point, run.journal)))
    return time.monotonic() - begun


def _needed(point: Point, journal: Journal) -> bool:
    """Whether a profile needs a point like this one (NEEDED) and has none."""
    if point.family not in NEEDED or (point.family == "memory_bound" and point["op"] != "elementwise"):
        return False
    names = NEEDED[point.family]
    return not any(all(one.point[name] == point[name] for name in names) for one in journal.of(point.family))


def _together(run: Run) -> None:
    """Collectives and overlap: rank 0 says which point comes next and how long it may take."""
    ranks, journal = run.ranks, run.journal
    largest = run.settings.largest or patterns.largest_buffer(run.settings.models, run.settings.device)
    octaves = patterns.sizes(largest)
    points, least = _together_points(run, octaves)
    missing = [number for number, point in enumerate(points) if point not in journal]
    with ranks.watch.doing(f"setting up buffers of {units.format_bytes(octaves[-1])}", list(range(ranks.world))):
        buffers = Buffers(octaves[-1], ranks.device)
        ranks.barrier()
    if rank_point(ranks.device) not in journal:
        journal.add(measure_ranks(rank_point(ranks.device), ranks))
    references = rounds.references_together([point for point in points if point.identity in least])
    due = rounds.Due(run.left())
    for turn, number in enumerate(missing):
        left = run.left()
        go_on = left > 0 or points[number].identity in least
        once_more = left > 0 and due.now()
        fair = _fair(left, len(missing) - turn)
        said, budget, again = ranks.word([float(number) if go_on else -1.0, fair, float(once_more)])
        if again:
            due.done(_references_together(run, references, buffers))
        if said < 0:
            journal.fail(points[number], LEFT_OUT)
            continue
        point = points[int(said)]
        run.show("collectives", in_words(point), turn, len(missing))
        kind = (point.family, point["op"], point["dtype"])  # what a library can or cannot do
        if kind in run.cannot:
            continue
        measure = measure_overlap if point.family == "overlap" else measure_collective
        try:
            found = measure(point, ranks, buffers, budget)
        except NoSuchCollectiveError as error:  # whatever its size
            journal.fail(point, str(error)[:300])
            run.cannot.add(kind)
            continue
        if found:
            journal.add(found)
    if ranks.device == "cuda":
        _communicator(run)


def _together_points(run: Run, octaves: Sequence[int]) -> tuple[list[Point], set[Identity]]:
    """What all ranks measure, and what of it whatever the budget: the ends and the middle of the first round's sizes."""
    ranks = run.ranks
    main, other = ("bf16", "fp32") if ranks.device == "cuda" else ("fp32", "bf16")
    points = patterns.collective_points(ranks.world, ranks.local, octaves[-1], main=main, other=other)
    overlaps = patterns.overlap_points(
        ranks.world, ranks.local, int(min(octaves[-1], OVERLAP_LARGEST)), main, weight=0.9
    )
    first = sum(point.weight >= 1.0 for point in points)
    points = points[:first] + overlaps + points[first:]
    return points, {
        point.identity for point in points[: first * len(patterns.coarse_first(len(octaves))[0]) // len(octaves)]
    }


def _references_together(run: Run, references: Sequence[Point], buffers: Buffers) -> float:
    """A round of the collectives that are references; the seconds that it took."""
    begun = time.monotonic()
    for point in references:
        found = measure_collective(point, run.ranks, buffers, rounds.DRIFT_SECONDS) if point in run.journal else None
        if found:
            run.journal.add(replace(found, point=rounds.again(point, run.journal)))
    return time.monotonic() - begun


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
        source = (("source", "device memory before and after"),)
        run.journal.add(Measured.fact(point, taken, details=source))
