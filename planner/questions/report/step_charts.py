"""Charts of one step: where its time goes, every action of the pipeline, the memory of every stage and over time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.cost.estimate import HIDDEN, PARTS
from planner.cost.memory.states import COMPONENTS
from planner.explain import COMPONENT_TEXT, PART_TEXT
from planner.plan_file import Prediction
from planner.questions.report.document import Chart, Value, chart, columns, shown
from planner.questions.report.subject import Subject
from planner.timeline.stage_memory import STATIC, MemoryTimeline, memory_of_ranks, memory_over_time
from planner.timeline.step_slices import Timeline
from planner.units import GIB

UNSEEN = 0.001
"""Parts of the step below this share are not worth a word."""
NOTHING = 1e-9
"""Parts of the step below this share are rounding."""
MOST_ACTIONS = 10_000
"""Actions that the page holds; of longer steps the begin and the end."""
VISIBLE = 48
"""Actions of a rank that a window shows at first: more are too narrow to be seen."""
KIND_TEXT = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MOST_INTERVALS = 600
"""Intervals of the memory timeline that are drawn, about; each stands for the highest of those it replaces."""
KERNELS = "kernels below the peak"
KERNEL_TEXT = {
    "shapes": "matrix product shapes", "precision": "products in more bits", "imbalance": "the busiest experts",
    "attention": "attention kernels", "scans": "scans of linear attention", "memory_bound": "memory-bound operators",
    "clock": "clock under load (power)", "uneven": "surplus of slowest stage",
}  # fmt: skip
"""What keeps computation from the peak of the GPU, by timeline.operator_times.LOSSES."""
LOSS_TEXT = PART_TEXT | {"ideal": "model FLOP at peak"} | KERNEL_TEXT
MOST_OPERATORS = 14
"""Operators that are drawn; the others are one bar."""


def waterfall(one: Prediction, losses: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """Name, seconds, start and end of bars that sum to the step time.

    ideal     F / P = MFU * T: model FLOP of the step on one GPU over the dense peak
    losses    what computation takes longer, compute - F / P, by its causes (``operator_times``)
    then      every other part of ``one.time_s``, zeros included

    Communication is what is exposed; what hides behind computation is not part of the step. Below 0 can be ``uneven``, where
    the slowest stage computes less than the mean, and the loss of kernels whose measured rate is above the stated peak.
    """
    ideal = one.mfu * one.step_time_s
    seconds = {"ideal": ideal, **losses, **{part: one.time_s[part] for part in PARTS[1:]}}
    ends = np.cumsum(list(seconds.values())).tolist()
    return [(name, value, start, end) for (name, value), start, end in zip(seconds.items(), [0.0, *ends], ends, strict=False)]


def waterfall_chart(about: Subject) -> Chart:
    """The step time from computation at the peak rate to the whole, loss by loss."""
    one, lost = about.plan.prediction, about.computation.losses
    step = one.step_time_s
    bars = waterfall(one, lost)
    rows = [
        (name, LOSS_TEXT[name], value, value / step, start, end)
        for name, value, start, end in bars if name == "ideal" or abs(value) > NOTHING * step
    ]  # fmt: skip
    rows.append(("step", "step time", step, 1.0, 0.0, step))
    reading = (
        f"Of {shown(step, 'seconds')} per step, {shown(bars[0][1], 'seconds')} ({shown(one.mfu, 'share')}) would be needed at "
        f"the peak rate of the GPU. {_largest_losses(one, lost)}"
    )
    hidden = {name: one.hidden_s[name] for name in HIDDEN if one.hidden_s[name] > UNSEEN * step}
    notes = []
    if hidden:
        listed = ", ".join(
            f"{name} {shown(value, 'seconds')}" for name, value in sorted(hidden.items(), key=lambda x: -x[1])
        )
        notes.append(f"Communication that runs during the computation and costs no time of its own: {listed}.")
    return chart("waterfall", reading, rows, notes)


def _largest_losses(one: Prediction, lost: Mapping[str, float]) -> str:
    """The two largest losses in a sentence, kernels below the peak as one, with what it is made of."""
    step = one.step_time_s
    losses = {KERNELS: sum(lost.values()), **{LOSS_TEXT[part]: one.time_s[part] for part in PARTS[1:]}}
    (first, most), (second, next_most) = sorted(losses.items(), key=lambda loss: -loss[1])[:2]

    def text(name: str, value: float) -> str:
        causes = sorted(lost.items(), key=lambda loss: -loss[1]) if name == KERNELS else []
        of = [f"{KERNEL_TEXT[cause]} {shown(part, 'seconds')}" for cause, part in causes if part > 0.01 * value]
        return f"{name} with {shown(value, 'seconds')} ({shown(value / step, 'share')}{f': {_and(of)}' if of else ''})"

    found = f"The largest loss is {text(first, most)}"
    return f"{found}, then {text(second, next_most)}." if next_most > 0.005 * step else f"{found}."


def _and(words: list[str]) -> str:
    """'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def operators_chart(about: Subject) -> Chart:
    """The computation of a step operator by operator, with the part of the peak that each reaches."""
    found, step = about.computation.operators, about.plan.prediction.step_time_s
    every, first = sum(one.seconds for one in found), found[0]
    drawn = min(MOST_OPERATORS, sum(one.seconds > UNSEEN * every for one in found))
    rows: list[tuple[Value, ...]] = [
        (one.name.replace("_", " "), one.kind, one.seconds, one.seconds / step, one.at_peak, one.at_peak / one.seconds)
        for one in found[:drawn]
    ]  # fmt: skip
    rest = found[drawn:]
    if others := sum(one.seconds for one in rest):
        ideal = sum(one.at_peak for one in rest)
        rows.append((f"others ({len(rest)})", "several", others, others / step, ideal, ideal / others))
    products = [one for one in found if one.kind == "matrix product"]
    reached = sum(one.at_peak for one in products) / max(sum(one.seconds for one in products), 1e-30)
    moved = sum(one.seconds for one in found if one.kind == "memory-bound")
    reading = (
        f"Of {shown(every, 'seconds')} of computation, {first.name.replace('_', ' ')} takes most, "
        f"{shown(first.seconds, 'seconds')} ({shown(first.seconds / every, 'share')}). All matrix products together reach "
        f"{shown(reached, 'share')} of the peak; memory-bound operators take {shown(moved, 'seconds')} "
        f"({shown(moved / every, 'share')})."
    )
    return chart("operators", reading, rows)


def pipeline_chart(about: Subject, step: Timeline) -> Chart:
    """Every action of every stage, and what stands around the pipeline."""
    actions, gap, notes = drawn_actions(step.actions)
    rows: list[tuple[Value, ...]] = [
        (one.rank, KIND_TEXT[one.kind], one.stage // step.ranks, one.microbatch, one.start, one.end) for one in actions
    ]
    rows += [
        (one.rank, one.kind, -1, -1, one.start, one.end)
        for one in step.around if not one.hidden and one.end - one.start > 1e-4 * step.step_time and one.microbatch < 0
    ]  # fmt: skip
    totals = [step.totals(rank) for rank in range(step.ranks)]
    counts = Counter(one.rank for one in step.actions)
    idle = [one["bubble"] / step.step_time for one in totals]
    most, least = int(np.argmax(idle)), int(np.argmin(idle))
    chunks = step.stages // step.ranks
    table = [
        (
            rank, counts[rank], one["compute"] + one["recompute"],
            sum(value for name, value in one.items() if "communication" in name), one["bubble"], idle[rank],
        )
        for rank, one in enumerate(totals)
    ]  # fmt: skip
    back = next((one.end for one in step.actions if one.rank == 0 and one.kind != "F"), step.step_time)
    facts = {
        "step_s": step.step_time, "ranks": step.ranks, "chunks": chunks, "actions": len(step.actions),
        "window_s": window_of(len(step.actions) / step.ranks, back, step.step_time),
        "gap_from_s": None if gap is None else gap[0], "gap_to_s": None if gap is None else gap[1],
    }  # fmt: skip
    reading = _pipeline_reading(step, chunks, idle, most, least)
    return chart("pipeline", reading, rows, notes, facts=facts, table=table)


def drawn_actions(every: Sequence[Any]) -> tuple[list[Any], tuple[float, float] | None, list[str]]:
    """Actions of a step (with a start and an end in seconds) that are drawn, the time between, and a note on it."""
    if len(every) <= MOST_ACTIONS:
        return list(every), None, []
    starts, ends = (np.sort([getattr(one, side) for one in every]) for side in ("start", "end"))
    low, high = float(starts[MOST_ACTIONS // 2]), float(ends[len(ends) - MOST_ACTIONS // 2])
    between = f"{shown(low, 'seconds')} to {shown(high, 'seconds')}"
    note = f"Of {len(every):,} actions the begin and the end are drawn; the steady state from {between} is left out."
    return [one for one in every if one.start < low or one.end > high], (low, high), [note]


def window_of(each: float, back: float, step: float) -> float:
    """Seconds that the window shows at first: VISIBLE of ``each`` actions of a lane, and the first backward pass, which ends at
    ``back``."""
    return step if each <= 1.5 * VISIBLE else min(max(step * VISIBLE / each, 1.7 * back), step)


def _pipeline_reading(step: Timeline, chunks: int, idle: list[float], most: int, least: int) -> str:
    each = f"{step.num_microbatches:,} microbatch" + ("es" if step.num_microbatches != 1 else "")
    if step.ranks == 1:
        return f"Without a pipeline one stage runs {each}, forward and backward in turn, and never waits for another."
    virtual = f", each with {chunks} virtual stages," if chunks > 1 else ""
    text = f"{step.ranks} stages{virtual} work on {each}"
    if idle[most] - idle[least] < 0.002:
        return f"{text}; every stage idles {shown(idle[most], 'share')} of the step."
    return (
        f"{text}; stage {most} idles most, {shown(idle[most], 'share')} of the step, stage {least} least with "
        f"{shown(idle[least], 'share')}."
    )


def memory_chart(about: Subject) -> Chart:
    """Peak memory of every pipeline stage by component against what the card has."""
    limit = about.plan.prediction.memory_limit_gib
    ranks = memory_of_ranks(about.priced)
    rows: list[tuple[Value, ...]] = []
    table: list[tuple[Value, ...]] = []
    for one in ranks:
        peak = one.peak / GIB
        for name in COMPONENTS:
            rows.append((one.rank, COMPONENT_TEXT[name], one.memory[name] / GIB, peak, limit - peak))
        parts = [one.memory[name] / GIB for name in COMPONENTS]
        table.append((one.rank, one.layers, one.in_flight, *parts, peak, limit - peak))
    worst = max(ranks, key=lambda one: one.peak)
    leanest = min(ranks, key=lambda one: one.peak)
    largest = max(worst.memory, key=lambda name: worst.memory[name])
    margin = limit - worst.peak / GIB
    left = f"a margin of {shown(margin, 'gib')}" if margin >= 0 else f"{shown(-margin, 'gib')} too much"
    where = f"Of stages 0 to {len(ranks) - 1} stage {worst.rank} needs most," if len(ranks) > 1 else "A GPU needs"
    reading = (
        f"{where} {shown(worst.peak / GIB, 'gib')} against {shown(limit, 'gib')} usable: {left}. The largest part is "
        f"{COMPONENT_TEXT[largest]} with {shown(worst.memory[largest] / GIB, 'gib')}"
    )
    if len(ranks) > 1 and leanest.peak < 0.98 * worst.peak:
        reading += f"; stage {leanest.rank}, the leanest, needs {shown(leanest.peak / GIB, 'gib')}"
    chance = about.plan.prediction.out_of_memory_probability
    notes = [
        f"With the spread of measured memory around predictions, the chance of running out is {shown(chance, 'share')}."
    ]
    if len(ranks) <= 24:
        notes.append("The number above a bar, where there is room, is what is left to the limit in GiB.")
    given = worst.given_back / GIB
    if given > 0.05:
        notes.append(f"{shown(given, 'gib')} of the fragmentation is given back before an allocation fails.")
    gib = ", ".join(f"{name} gib {COMPONENT_TEXT[name]}" for name in COMPONENTS)
    return chart(
        "memory", f"{reading}.", rows, notes, facts={"limit_gib": limit, "stages": len(ranks), "worst": worst.rank}, table=table,
        table_columns=columns(
            f"stage count, layers count, in_flight number microbatches in flight, {gib}, peak_gib gib peak, margin_gib gib margin"
        ),
    )  # fmt: skip


def memory_timeline_chart(about: Subject, step: Timeline) -> Chart:
    """Memory of the worst stage over one step."""
    over = memory_over_time(about.priced, step)
    limit = about.plan.prediction.memory_limit_gib
    static = sum(over.static.values()) / GIB
    rows = [
        (start, end, static, work, held, static + work + held, limit - static - work - held)
        for start, end, work, held in _intervals(over)
    ]  # fmt: skip
    top = max(rows, key=lambda row: row[5])
    first = next(
        one.start for one in over.intervals if one.activations + one.workspace >= 0.9999 * (over.peak - static * GIB)
    )
    above = sum(row[1] - row[0] for row in rows if row[5] >= 0.98 * top[5]) / over.end
    states = ", ".join(
        f"{COMPONENT_TEXT[name]} {shown(over.static[name] / GIB, 'gib')}"
        for name in STATIC
        if over.static[name] >= 0.05 * GIB
    )
    reading = (
        f"Stage {over.rank} first reaches its peak of {shown(top[5], 'gib')} after {shown(first, 'seconds')} of "
        f"{shown(over.end, 'seconds')} and is within 2 % of it for {shown(above, 'share')} of the step. "
        f"{shown(static, 'gib')} stay the whole time; activations come and go with {shown(max(row[4] for row in rows), 'gib')} "
        "at most."
    )
    highest = sorted(rows, key=lambda row: -row[5])[:12]
    facts = {"limit_gib": limit, "end_s": over.end, "stage": over.rank, "peak_gib": top[5]}
    return chart("memory-timeline", reading, rows, [f"What stays: {states}."], facts=facts, table=sorted(highest))


def _intervals(over: MemoryTimeline) -> list[tuple[float, float, float, float]]:
    """Start, end, workspace and activations (GiB) of what is drawn: of many neighbours the highest."""
    ends = [one.start for one in over.intervals[1:]] + [over.end]
    found = [
        (one.start, end, one.workspace / GIB, one.activations / GIB)
        for one, end in zip(over.intervals, ends, strict=True) if end > one.start
    ]  # fmt: skip
    each = -(-len(found) // MOST_INTERVALS)
    groups = [found[at : at + each] for at in range(0, len(found), each)]
    return [(group[0][0], group[-1][1], *max(group, key=lambda one: one[2] + one[3])[2:]) for group in groups]
