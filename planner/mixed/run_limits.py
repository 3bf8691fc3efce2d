"""The search within what the user fixed, and of what it finds, what the job's trainer runs as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from planner.mixed.mixed_axes import SMALL, MixedPins
from planner.mixed.mixed_estimate import estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_search import MixedFinding, kinds_of, search_mixed
from planner.trainer_options import spelled

FEW = 8
"""Layouts that the trainer runs that are priced, where none of the best is one."""
MOST = 24
"""Best layouts of which those are taken that the trainer runs."""
FREE = ("torchtitan", "fsdp")
"""Trainers whose jobs the PyTorch export runs, with unequal shares and recompute by stage."""


def limited(pins: MixedPins, trainer: str) -> MixedPins:
    """The pins with what the exports of a trainer ask for."""
    free = spelled(trainer)[0] in FREE
    return replace(pins, equal_tp=True, equal_shares=not free, equal_recompute=not free, runnable=True)


def search_within(
    job: MixedJob, trainer: str, pins: MixedPins, top: int, progress: Callable[[str], None] = lambda _: None
) -> MixedFinding:  # fmt: skip
    """The search with what is fixed: where only what the trainer runs is wanted, the best of that."""
    finding = search_mixed(job, pins, MOST if pins.runnable else top, progress=progress)
    return only_run(job, trainer, finding, top) if pins.runnable else finding


def runs(job: MixedJob, trainer: str, layouts: Iterable[MixedLayout]) -> Iterator[MixedLayout]:
    """Of some layouts those that an export of the trainer runs as they are, each looked at when it is asked for."""
    from planner.mixed.export.export_job import MixedExport
    from planner.mixed.export.who_runs import runners

    return (one for one in layouts if runners(MixedExport(job=job, layout=one, trainer=trainer))[0])


def only_run(job: MixedJob, trainer: str, finding: MixedFinding, top: int) -> MixedFinding:
    """What was found without what the trainer does not run."""
    left = list(runs(job, trainer, [one for one, _ in finding.best]))
    best = [pair for pair in finding.best if pair[0] in left]
    if len(best) < top:
        more = [one for one in itertools.islice(runs(job, trainer, finding.found), MOST) if one not in left]
        best += [pair for pair in ((one, estimate_mixed(job, one)) for one in more) if pair[1].fits]
        best.sort(key=lambda pair: pair[1].step_time)
    mixed = next((pair for pair in best if len(kinds_of(pair[0])) > 1), None)
    return replace(finding, best=best[:top], mixed=mixed)


def run_as_well(
    job: MixedJob, trainer: str, finding: MixedFinding, shown: list[MixedLayout], pins: MixedPins
) -> list[MixedLayout]:  # fmt: skip
    """The fastest over several kinds that the trainer runs, where none of those that are shown is one.

    On small clusters it is searched for, on large ones it is the best of those that were cut anyway.
    """
    if finding.mixed is None or any(runs(job, trainer, [one for one in shown if len(kinds_of(one)) > 1])):
        return []
    every = list(finding.found)
    if job.cluster.num_gpus <= SMALL:
        own = search_mixed(job, limited(pins, trainer), 1)
        every = [*(one for one, _ in own.best), *own.found, *every]
    found = itertools.islice(runs(job, trainer, [one for one in every if len(kinds_of(one)) > 1]), FEW)
    fitting = [pair for pair in ((one, estimate_mixed(job, one)) for one in found) if pair[1].fits]
    return [min(fitting, key=lambda pair: pair[1].step_time)[0]] if fitting else []
