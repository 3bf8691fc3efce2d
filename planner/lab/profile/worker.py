"""One rank of a profile: joins the others, measures with them what is planned, and keeps it in the journal (torch)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner import detect, library, units
from planner.errors import PlannerError
from planner.lab.launch.place import Place
from planner.lab.launch.state import State, Teller, to_file
from planner.lab.launch.torchrun import DIRECTORY
from planner.lab.launch.watch import heed_signals
from planner.lab.profile import drift
from planner.lab.profile.collective_timing import NoSuchCollectiveError, measure_collective
from planner.lab.profile.journal import Journal
from planner.lab.profile.machine_facts import header
from planner.lab.profile.operations import Buffers, quiet
from planner.lab.profile.outliers import measure_ranks, rank_point
from planner.lab.profile.overlap_timing import measure_overlap, overlap_points
from planner.lab.profile.patterns import coarse_first, collective_points, in_words, sizes
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.rank_groups import Ranks, join
from planner.lab.profile.rounds import IN_ROUNDS, ROUNDS, WARM_UP_SHARE, Rounds, schedule
from planner.lab.profile.settings import Settings
from planner.lab.profile.sizes import largest_buffer

SHARE = 0.5
"""Part of the budget for what one rank measures alone, where both are wanted."""
LEAST_SECONDS, MOST_SECONDS = 5e-3, 2.0
"""Budget of one point."""
ALONE_SECONDS = 60.0
"""A point that one rank measures alone has hung after this and the timeout; the longest heats the device for 20 s."""
LEFT_OUT = "left out: the budget was spent"
MEMORY_FAMILIES = ("bytes", "host_copy", "host_stream", "cpu_adam")
GUESS = "h100-sxm"
"""Whose search decides which shapes matter where the library does not know the device."""
OVERLAP_LARGEST = 16.0 * units.MIB


@dataclass(kw_only=True)
class Run:
    """A profile in progress on one rank."""

    settings: Settings
    ranks: Ranks
    journal: Journal
    teller: Teller
    begun: float
    cannot: set[tuple[object, ...]] = field(default_factory=set)
    """Collectives that the library does not have, found out on all ranks together."""

    def tell(self, part: str, doing: str, done: int, points: int) -> None:
        """Shows where rank 0 is."""
        if self.ranks.first:
            spent = time.monotonic() - self.begun
            self.teller.tell(
                State(part=part, doing=doing, done=done, points=points, spent=spent, budget=self.settings.budget)
            )

    def left(self, of: float = 1.0) -> float:
        """Seconds left of a part of the budget."""
        return of * self.settings.budget - (time.monotonic() - self.begun)


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
    run.ranks.word([0.0], _neighbour(run) if any_alone else None)
    if together:
        _together(run)


def _neighbour(run: Run) -> Callable[[], object] | None:
    """What another rank does while rank 0 measures alone: on a CPU it computes, see ``neighbours``."""
    if run.settings.device != "cpu" or run.ranks.first:
        return None
    from planner.lab.profile import busy_neighbours as neighbours

    return neighbours.layers(run.settings.models)


def _alone_points(run: Run, parts: Sequence[str]) -> list[Point]:
    """What rank 0 measures while the others wait, the weightiest first."""
    from planner.lab.profile.compute_profile import compute_points

    guess = run.settings.base or detect.profile_of(run.ranks.names[0]) or GUESS
    return [
        point for point in compute_points(run.settings.models, guess, run.settings.device)
        if ("memory" if point.family in MEMORY_FAMILIES else "compute") in parts and point not in run.journal
    ]  # fmt: skip


def _alone(run: Run, points: Sequence[Point], share: float) -> None:
    """Measures on rank 0 until its share of the budget is spent, and whatever it is the least that makes a profile.

    After a warm-up in rounds (``rounds.schedule``). What one round has is kept when the next one ends early.
    """
    from planner.lab.profile.compute_profile import measure_compute
    from planner.lab.profile.extra_points import warm_up_point

    if run.settings.device == "cuda":  # Adam in host memory has all cores of the node; launchers give a rank one thread
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    rounds = Rounds()
    begin = warm_up_point(run.settings.device)
    if any(point.family in IN_ROUNDS for point in points):
        with run.ranks.watch.doing(begin.label, [run.ranks.place.rank], ALONE_SECONDS + run.ranks.timeout):
            run.journal.add(measure_compute(begin, run.settings.device, WARM_UP_SHARE * max(run.left(share), 0.0)))
    failed: set[object] = set()
    visits = schedule(points, ROUNDS[run.settings.device])
    turns = drift.Rounds(run.left(share))
    for number, point in enumerate(visits):
        left, first = run.left(share), point not in rounds
        if left > 0 and turns.due():
            turns.done(_once_more(run))
        if point.identity in failed:
            continue
        if left <= 0 and not (first and _needed(point, run.journal)):
            if first and point not in run.journal:
                run.journal.fail(point, LEFT_OUT)
            continue
        run.tell("compute", point.label, len(rounds), len(points))
        fair = min(max(left / (len(visits) - number), LEAST_SECONDS), MOST_SECONDS)
        try:
            with run.ranks.watch.doing(point.label, [run.ranks.place.rank], ALONE_SECONDS + run.ranks.timeout):
                found = measure_compute(point, run.settings.device, fair)
            run.journal.add(rounds.add(found))
        except (PlannerError, MemoryError) as error:  # no such kernel here, no room: kept with its reason
            failed.add(point.identity)
            if first:
                said = str(error).strip()
                run.journal.fail(point, said.splitlines()[0][:300] if said else repr(error))


def _once_more(run: Run) -> float:
    """A round of the references that rank 0 measures alone; the seconds that it took."""
    from planner.lab.profile.compute_profile import measure_compute

    begun = time.monotonic()
    for point in drift.alone(run.journal):
        with contextlib.suppress(PlannerError, MemoryError):
            with run.ranks.watch.doing(point.label, [run.ranks.place.rank], ALONE_SECONDS + run.ranks.timeout):
                found = measure_compute(point, run.settings.device, drift.SECONDS)
            run.journal.add(dataclasses.replace(found, point=drift.again(point, run.journal)))
    return time.monotonic() - begun


def _needed(point: Point, journal: Journal) -> bool:
    """Whether a profile needs a point like this one and has none: memory, launches, a product, attention both ways, a stream, a
    whole layer both ways, which says how far off the sum of its operators is, and the chains of its plain kernels."""
    each = {
        "gemm": (), "attention": ("pass",), "memory_bound": ("op",), "launch": ("kind",), "bytes": ("name",),
        "yardstick": ("kind",), "layer": ("pass",), "chain": ("op", "pass"),
    }  # fmt: skip
    names = each.get(point.family)
    if names is None or (point.family == "memory_bound" and point["op"] != "elementwise"):
        return False
    return not any(all(one.point[name] == point[name] for name in names) for one in journal.of(point.family))


def _together(run: Run) -> None:
    """Collectives and overlap: rank 0 says which point comes next and how long it may take."""
    ranks = run.ranks
    largest = run.settings.largest or largest_buffer(run.settings.models, run.settings.device)
    top = sizes(largest)[-1]
    main, other = ("bf16", "fp32") if ranks.device == "cuda" else ("fp32", "bf16")
    points = collective_points(ranks.world, ranks.local, largest, main=main, other=other)
    beside = overlap_points(ranks.world, ranks.local, int(min(top, OVERLAP_LARGEST)), main, weight=0.9)
    first_round = sum(point.weight >= 1.0 for point in points)
    octaves = len(sizes(largest))  # of the first round, the ends and the middle are measured whatever the budget
    points = points[:first_round] + beside + points[first_round:]
    missing = [number for number, point in enumerate(points) if point not in run.journal]
    with ranks.watch.doing(f"setting up buffers of {units.format_bytes(top)}", list(range(ranks.world))):
        buffers = Buffers(top, ranks.device)
        ranks.barrier()
    least = {point.identity for point in points[: first_round * len(coarse_first(octaves)[0]) // octaves]}
    if ranks.world > 1 and rank_point(ranks.device) not in run.journal:
        run.journal.add(measure_ranks(rank_point(ranks.device), ranks))
    references = drift.together([point for point in points if point.identity in least])
    rounds = drift.Rounds(run.left())
    for turn, number in enumerate(missing):
        left = run.left()
        go_on = left > 0 or points[number].identity in least
        fair = min(max(left / (len(missing) - turn), LEAST_SECONDS), MOST_SECONDS)
        once_more = left > 0 and rounds.due()
        said, budget, again = ranks.word([float(number) if go_on else -1.0, fair, float(once_more)])
        if again:
            rounds.done(_together_once_more(run, references, buffers))
        if said < 0:
            run.journal.fail(points[number], LEFT_OUT)
            continue
        point = points[int(said)]
        run.tell("collectives", in_words(point), turn, len(missing))
        if _kind(point) in run.cannot:
            continue
        try:
            found = _one(point, ranks, buffers, budget)
        except NoSuchCollectiveError as error:
            _no_collective(run, point, error)
            continue
        if found:
            run.journal.add(found)
    if ranks.device == "cuda":
        _communicator(run)


def _together_once_more(run: Run, references: Sequence[Point], buffers: Buffers) -> float:
    """A round of the collectives that are references; the seconds that it took."""
    begun = time.monotonic()
    for point in references:
        found = measure_collective(point, run.ranks, buffers, drift.SECONDS) if point in run.journal else None
        if found:
            run.journal.add(dataclasses.replace(found, point=drift.again(point, run.journal)))
    return time.monotonic() - begun


def _one(point: Point, ranks: Ranks, buffers: Buffers, budget: float) -> Measured | None:
    measure: Any = measure_overlap if point.family == "overlap" else measure_collective
    found: Measured | None = measure(point, ranks, buffers, budget)
    return found


def _no_collective(run: Run, point: Point, error: NoSuchCollectiveError) -> None:
    """Kept with its reason, and said of all sizes that come: the library has no such operation, whatever its size."""
    run.journal.fail(point, str(error)[:300])
    run.cannot.add(_kind(point))


def _kind(point: Point) -> tuple[object, ...]:
    """What a library can or cannot do."""
    return point.family, *(point[name] for name in ("op", "dtype"))


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
        run.journal.add(
            Measured(point=point, median=taken, low=taken, high=taken, repetitions=1, confidence=0.0,
                     details=(("source", "device memory before and after"),))
        )  # fmt: skip
