"""The cost model's answer to measured runs.

Rows that share model, sequence length, precision, trainer and hardware are priced in one call of the cost model.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from planner.arrays import Floats
from planner.cost.estimate import estimate
from planner.errors import PlannerError
from planner.layout import Layout, Recompute
from planner.record import record
from planner.runs import Run, flop_per_token

Item = TypeVar("Item")
MAY_FIT = 0.5
"""Chance of running out of memory below which a layout that a row leaves open is taken to fit."""
MEMORY = {"allocated": "memory_allocated", "reserved": "memory_reserved", "device": "memory_peak"}
"""Which column of the estimate a measured peak is compared with."""


@record
class Predicted:
    """What the cost model says about one run; None where it could not be priced."""

    step_time: float | None = None
    """Seconds."""
    memory: float | None = None
    """Peak of the kind that was measured (allocated when none was), bytes."""
    out_of_memory: float | None = None
    """Chance of running out of memory, 0 to 1."""
    rule: float | None = None
    """Seconds by the one-line rule, see ``one_line_rule``."""
    layout: Layout | None = None
    """The layout that was priced: of those that the row leaves open the fastest that fits."""
    refused: str = ""
    """Why the cost model could not price it; '' = it could."""


@record
class Pair:
    """A run with its answer."""

    run: Run
    predicted: Predicted

    @property
    def time_error(self) -> float | None:
        """Predicted / measured - 1 of the step time; None when one of them is missing."""
        return _error(self.predicted.step_time, self.run.measured.step_time)

    @property
    def memory_error(self) -> float | None:
        """The same of the peak memory."""
        return _error(self.predicted.memory, self.run.measured.memory)

    @property
    def rule_error(self) -> float | None:
        """The same of the one-line rule."""
        return _error(self.predicted.rule, self.run.measured.step_time)

    @property
    def counts(self) -> bool:
        """In the overall figures: nothing of the layout was assumed, and the source does not call it broken."""
        return self.run.stated and self.run.representative


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    """Every run with its answer."""
    return [
        Pair(run=run if answer.layout is None else replace(run, layout=answer.layout), predicted=answer)
        for run, answer in zip(runs, predict(runs), strict=True)
    ]


def predict(runs: Sequence[Run]) -> list[Predicted]:
    """The cost model's answer to every run, in their order; a run that is not supported gets an empty answer."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        if not run.unsupported:
            groups[_group(run)].append(index)
    answers = [Predicted(refused=run.unsupported) for run in runs]
    for members in groups.values():
        for index, answer in zip(members, _price([runs[i] for i in members]), strict=True):
            answers[index] = answer
    return answers


def _group(run: Run) -> tuple[object, ...]:
    """What one call of the cost model shares; profiles, trainers and models are built once each: identity will do."""
    workload, cluster = run.workload, run.cluster
    assert workload is not None and cluster is not None
    adapters = (workload.lora_rank, workload.lora_targets, workload.lora_whole, workload.frozen_weights, workload.document_length)
    shared = (workload.sequence_length, workload.precision, workload.optimizer, *adapters)
    return (id(workload.model), id(cluster.hardware), id(run.trainer), *shared)


def _price(runs: list[Run]) -> list[Predicted]:
    """Runs of one group in one call; when the cost model refuses the group, every run carries the reason."""
    first = runs[0]
    assert first.workload is not None and first.cluster is not None and first.trainer is not None
    layouts = [layout for run in runs for layout in (run.layout, *run.others) if layout is not None]
    try:
        found = estimate(first.workload, first.cluster, first.trainer, Layout.stack(layouts))
    except PlannerError as error:
        return [Predicted(refused=str(error)) for _ in runs]
    named = ("step_time", "out_of_memory_probability", "first_reserved", *MEMORY.values())
    columns = {name: getattr(found, name) for name in named}
    answers = []
    start = 0
    for run in runs:
        stop = start + 1 + len(run.others)
        index = _taken(columns["step_time"][start:stop], columns["out_of_memory_probability"][start:stop]) + start
        start, layout = stop, layouts[index]
        kind = run.measured.memory_kind or "allocated"
        memory_name = "first_reserved" if run.measured.first_stage and kind == "reserved" else MEMORY[kind]
        step, chance, memory = (
            float(columns[name][index]) for name in ("step_time", "out_of_memory_probability", memory_name)
        )
        if all(map(math.isfinite, (step, memory, chance))) and step > 0 and memory > 0:
            rule = one_line_rule(run, layout, found.peak_flops)
            answers.append(Predicted(step_time=step, memory=memory, out_of_memory=chance, rule=rule, layout=layout))
        else:
            answers.append(Predicted(refused="the cost model has no finite answer for this layout"))
    return answers


def _taken(times: Floats, chances: Floats) -> int:
    """Of the layouts that a row may have run with the fastest that fits; where none does the usual one, which is the first."""
    fits = chances < MAY_FIT
    return int(np.argmin(np.where(fits, times, np.inf))) if fits.any() else 0


def one_line_rule(run: Run, layout: Layout, peak: float) -> float:
    """Seconds of a step by what everybody can work out in the head: FLOP / (peak / 2) (1 + (p - 1) / (v m)).

    FLOP per GPU as 6 N + 12 L a d s per token, a third more when all layers are recomputed, a third less for adapters;
    ``peak`` is the dense one of the precision, FLOP/s. A cost model that this beats is none.
    """
    workload = run.workload
    assert workload is not None
    recomputed = int(layout.recompute) == Recompute.FULL and not int(layout.recompute_layers)
    flop = flop_per_token("palm", workload.model, workload.sequence_length, recomputed=recomputed)
    flop *= workload.tokens / int(layout.num_gpus) * (2.0 / 3.0 if workload.lora_rank else 1.0)
    bubble = (int(layout.pp) - 1) / (int(layout.vpp) * int(layout.num_microbatches))
    return flop / (0.5 * peak) * (1.0 + bubble)


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Items by a key, keys in the order of their text."""
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return {name: groups[name] for name in sorted(groups, key=str)}
