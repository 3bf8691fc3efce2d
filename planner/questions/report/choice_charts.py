"""Charts of the choice: every tensor and pipeline degree, throughput against memory, the alternatives; and of what lies ahead:
other sizes of the cluster, numbers that are off, how well runs like it were predicted."""

import math
from collections import Counter
from typing import Any

import numpy as np

from planner.explain import COMPONENT_TEXT, degrees_text, layout_text, memory_options
from planner.gains import Gain, held_back
from planner.questions.best_plan import Best
from planner.questions.report.document import Chart, Value, chart, shown
from planner.questions.report.evidence import Evidence, evidence
from planner.questions.report.landscape import LEAST_SPEED, Cell, Point
from planner.questions.report.scaling import Size
from planner.questions.report.subject import Subject
from planner.questions.sensitivity.pull import CLEAR, MOST, Pull, Side, pulls
from planner.search import SAFE
from planner.units import GIB, plural

LISTED = 5
"""Plans in the list of alternatives."""
UNSAFE = "may run out of memory"
"""What layouts are called whose chance of that is above SAFE, and those beyond the card's memory."""
STILL = 0.001
"""A number that moves the step time by less than this part, and the choice not at all, is not drawn."""
MOST_SOURCES = 14
"""Sources of published runs that get a row of their own."""
HELD_BACK = "Offload that saves less than a tenth is not taken: it hangs on the host's memory and PCIe."
CLOSE = 0.1
"""Errors up to this count as close."""


# ------------------------------------------------------------------------------------------------ TP x PP


def heatmap_chart(about: Subject) -> Chart:
    """The best step time of every TP x PP, and why there is none."""
    limit = about.plan.prediction.memory_limit_gib
    times = [cell.best.step_time_s for cell in about.landscape.cells if cell.best and cell.best.fits]
    rows: list[tuple[Value, ...]] = []
    for cell in about.landscape.cells:
        state, text, why = _cell(cell, limit)
        mine = (cell.tp, cell.pp) == (about.plan.layout.tp, about.plan.layout.pp)
        time = cell.best.step_time_s if cell.best and state == "fits" else None
        layout = layout_text(cell.best.layout) if cell.best else ""
        behind = None if time is None else time / min(times) - 1.0
        rows.append((cell.tp, cell.pp, state, time, behind, text, why, layout, mine))
    return chart("heatmap", _heatmap_reading(about, rows), rows)


def _cell(cell: Cell, limit: float) -> tuple[str, str, str]:
    """State, label and reason of a cell: a label has at most two short lines."""
    if cell.best is None:
        return "illegal", f"rule:\n{cell.rule}", f"not legal: every layout breaks a rule, most of them '{cell.rule}'"
    if cell.best.fits:
        return "fits", shown(cell.best.step_time_s, "seconds"), ""
    over = cell.best.memory_gib - limit
    component = COMPONENT_TEXT[cell.best.largest]
    if over > 0:
        return (
            "memory", f"+{over:,.{0 if over >= 9.95 else 1}f} GiB\n{component}",
            f"does not fit: the leanest layout needs {cell.best.memory_gib:,.1f} GiB, {over:,.1f} more than the card has; "
            f"most of it {component}",
        )  # fmt: skip
    if cell.best.out_of_memory_probability > SAFE:
        chance = shown(cell.best.out_of_memory_probability, "share")
        return "memory", f"risk {chance}\n{component}", f"may run out of memory: {chance}, above {100 * SAFE:.0f} %"
    return "memory", "host\nmemory", "the node's host memory does not hold what is offloaded"


def _heatmap_reading(about: Subject, rows: list[tuple[Value, ...]]) -> str:
    fitting = sorted((row for row in rows if row[2] == "fits"), key=lambda row: float(row[3] or 0))
    out = [row for row in rows if row[2] == "memory"]
    if not fitting:
        return (
            f"Nothing fits in any of the {plural(len(rows), 'cell')}: each says by how much the leanest layout misses."
        )
    first = fitting[0]
    text = f"tp {first[0]} x pp {first[1]} is the fastest with {shown(first[3], 'seconds')}"
    if len(fitting) > 1:
        text += f"; tp {fitting[1][0]} x pp {fitting[1][1]} takes {shown(fitting[1][4], 'share')} longer"
        if len(fitting) > 2:
            text += f", the slowest cell that fits (tp {fitting[-1][0]} x pp {fitting[-1][1]}) {_times(fitting[-1][4])}"
    if out:
        parts = Counter(
            COMPONENT_TEXT[cell.best.largest] for cell in about.landscape.cells if cell.best and not cell.best.fits
        )
        text += f". {len(out)} of {plural(len(rows), 'cell')} do not fit, most for {parts.most_common(1)[0][0]}"
    return text + "."


def _times(behind: Value) -> str:
    assert isinstance(behind, float)
    return f"{shown(behind, 'share')} longer" if behind < 1 else f"{1 + behind:.1f} times as long"


# ------------------------------------------------------------------------------------------------ memory and throughput


def pareto_chart(about: Subject) -> Chart:
    """Throughput against memory: all legal layouts, the front, the plan."""
    land = about.landscape
    front = {id(one) for one in land.front}

    def row(one: Point) -> tuple[Value, ...]:
        group = "this plan" if one is land.plan else "front" if id(one) in front else "fits" if one.fits else UNSAFE
        return (
            one.memory_gib, one.tokens_per_second_per_gpu, one.step_time_s, one.out_of_memory_probability, group,
            layout_text(one.layout),
        )  # fmt: skip

    points = list({id(one): one for one in (*land.points, *land.front, land.plan)}.values())
    facts = {"limit_gib": about.plan.prediction.memory_limit_gib, "legal": land.legal, "priced": land.priced,
             "fitting": land.fitting}  # fmt: skip
    notes = [
        f"{land.legal:,} layouts without recompute and offload are legal; with these {land.priced:,} were priced, {land.fitting:,} "
        f"of them fit, and {len(points):,} are drawn: one for each small square of the picture, and the front. Below "
        f"{100 * LEAST_SPEED:.0f} % of the best throughput nothing is drawn. A layout fits where its chance of running out of "
        f"memory is at most {100 * SAFE:.0f} %, which needs some room below the limit."
    ]
    table = [row(one) for one in land.front]
    return chart("pareto", _pareto_reading(about), [row(one) for one in points], notes, facts=facts, table=table)


def _pareto_reading(about: Subject) -> str:
    land, plan = about.landscape, about.landscape.plan
    if not land.front:
        return "No layout of this job fits on these GPUs; the points show how far each is beyond the limit."
    fastest = land.front[-1]
    if not plan.fits:
        return (
            f"The plan lies beyond what is safe. The fastest layout that fits ({layout_text(fastest.layout)}) gives "
            f"{shown(fastest.tokens_per_second_per_gpu, 'rate')} tokens/s/GPU in {shown(fastest.memory_gib, 'gib')}."
        )
    if fastest is plan or fastest.tokens_per_second_per_gpu <= plan.tokens_per_second_per_gpu * 1.0005:
        text = "No layout that fits is faster than this plan"
    else:
        gain = fastest.tokens_per_second_per_gpu / plan.tokens_per_second_per_gpu - 1
        text = f"A layout that fits is {shown(gain, 'share')} faster: {layout_text(fastest.layout)}"
    leaner = [
        one for one in land.front
        if one is not plan and one.memory_gib < plan.memory_gib - 0.02 * about.estimate.usable_memory / GIB
        and one.tokens_per_second_per_gpu < plan.tokens_per_second_per_gpu
    ]  # fmt: skip
    if leaner:
        one = leaner[-1]
        loss = 1 - one.tokens_per_second_per_gpu / plan.tokens_per_second_per_gpu
        text += (
            f". The next step down the front saves {shown(plan.memory_gib - one.memory_gib, 'gib')} for {shown(loss, 'share')} "
            f"of the throughput ({layout_text(one.layout)})"
        )
    return text + "."


# ------------------------------------------------------------------------------------------------ alternatives


def alternatives_chart(about: Subject) -> Chart:
    """The best plans that a search of the job finds."""
    finding = about.finding
    first = float(finding.estimates[0].step_time[0]) if finding.estimates else 0.0
    rows: list[tuple[Value, ...]] = []
    shown_ones = list(zip(finding.layouts, finding.estimates, strict=True))[:LISTED]
    for number, (layout, found) in enumerate(shown_ones, 1):
        mine = layout.to_dict() == about.plan.layout.to_dict()
        rows.append((
            f"{number}" + (" (this plan)" if mine else ""), degrees_text(layout), ", ".join(memory_options(layout)),
            float(found.step_time[0]), float(found.step_time[0]) / first - 1.0, float(found.mfu[0]),
            float(found.memory_peak[0]) / GIB, float(found.out_of_memory_probability[0]),
        ))  # fmt: skip
    return chart("alternatives", "", rows)


# ------------------------------------------------------------------------------------------------ scaling


def scaling_chart(about: Subject, scaled: list[Size]) -> Chart:
    """Throughput per GPU over the size of the cluster, strong and weak; ``scaled`` smallest first."""
    rows: list[tuple[Value, ...]] = []
    rates: dict[str, dict[int, float]] = {"strong": {}, "weak": {}}  # tokens/s/GPU by GPUs, where something fits
    for kind, best in zip(rates, zip(*scaled, strict=True), strict=True):
        for one in best:
            job, found = one.resolved.job, one.prediction if one.fits else None
            values: tuple[Value, ...] = (None,) * 6
            held = _held_back(one)
            if found is not None:
                rate = rates[kind][job.cluster.num_gpus] = found.tokens_per_second_per_gpu
                efficiency = rate / next(iter(rates[kind].values()))
                values = rate, efficiency, one.tokens_per_second, found.step_time_s, found.mfu, found.memory_peak_gib
            layout = layout_text(one.layout) if one.layout and found else ""
            sizes = job.cluster.num_gpus, job.cluster.num_nodes, job.workload.global_batch_size
            rows.append((kind, *sizes, *values, layout, None if held is None else held[1], one.why_not))
    counts = [int(row[1] or 0) for row in rows if row[0] == "strong"]
    reading = _scaling_reading(about.plan.num_gpus, counts, rates["strong"], rates["weak"])
    kept = [(one.resolved.job.cluster.num_gpus, *held) for one, _ in scaled if (held := _held_back(one))]
    if kept:
        gpus, gain, _ = max(kept, key=lambda one: one[1].gain)
        those = " and ".join(f"{one[0]:,}" for one in kept)
        reading += (
            f" At {those} GPUs with the same batch the search holds a faster plan back (hollow points), most at {gpus:,}: "
            f"{gain.flag} would take {shown(gain.gain, 'share')} less time per step. {HELD_BACK}"
        )
    return chart("scaling", reading.strip(), rows, facts={"gpus": about.plan.num_gpus})


def _held_back(one: Best) -> tuple[Gain, float] | None:
    """What the search of a size knows to be faster and does not take, and its tokens/s per GPU."""
    found = held_back(one.finding) if one.finding is not None and one.fits else []
    if not found:
        return None
    job = one.resolved.job
    return found[0], job.workload.tokens / found[0].step_time_s / job.cluster.num_gpus


def _scaling_reading(own: int, counts: list[int], strong: dict[int, float], weak: dict[int, float]) -> str:
    """``own`` GPUs of the plan among ``counts``; tokens/s/GPU by GPUs, where something fits."""
    if not strong:
        return f"Nothing fits at any size from {counts[0]:,} to {counts[-1]:,} GPUs."
    first, last = min(strong), max(strong)
    sentences = []
    if first != counts[0]:
        sentences.append(f"Of the sizes looked at, {plural(first, 'GPU')} is the smallest that fits.")
    if own not in strong:
        return " ".join([*sentences, f"At {plural(own, 'GPU')} no layout fits."])
    if last != own:
        kept = strong[last] / strong[own]
        sentences.append(
            f"With the same batch, {last:,} GPUs ({last // own} times as many) train {kept * last / own:.2f} times as fast, "
            f"{shown(kept, 'share')} of the throughput per GPU"
        )
        if own in weak and last in weak:
            sentences[-1] += f"; with a batch that grows along, {shown(weak[last] / weak[own], 'share')}"
        sentences[-1] += "."
    if own != first:
        sentences.append(
            f"From {first:,} to {own:,} GPUs at the same batch, {shown(strong[own] / strong[first], 'share')} of "
            "the throughput per GPU is kept."
        )
    return " ".join(sentences)


# ------------------------------------------------------------------------------------------------ sensitivity


def sensitivity_chart(about: Subject) -> Chart:
    """How far each number of the profile moves the step time, and where the choice should change."""
    others = [*about.finding.layouts, *about.landscape.near]
    found = pulls(about.resolved, about.plan.layout, about.estimate, others, settled=_settled(about))
    rows: list[tuple[Value, ...]] = []
    still = []
    for one in found:
        if one.largest < STILL and all(side.flip is None for side in one.sides):
            still.append(one.quantity.text)
            continue
        for side in one.sides:
            if abs(math.log(side.factor)) < 0.001:
                continue
            wins = "" if side.winner is None else layout_text(side.winner)
            rows.append((
                one.quantity.text, one.origin, _factor(side.factor), side.step_time_s, side.change,
                side.factor < 1, side.fits or not about.fits,
                "" if side.flip is None else _factor(side.flip), wins, one.quantity.measure,
            ))  # fmt: skip
    return chart(
        "sensitivity", _sensitivity_reading(about, found), rows,
        notes=(
            f"Each number is halved and doubled, as far as physics allows, the layout kept. The choice changes where another of "
            f"the {min(len(others), MOST):,} good layouts around it would be {100 * CLEAR:.0f} % faster, or where the plan no "
            "longer fits; `plan sensitivity` searches all layouts at each step.",
            *([f"These move the step by less than {100 * STILL:.1f} %: {', '.join(still)}."] if still else []),
        ),
    )  # fmt: skip


def _settled(about: Subject) -> bool:
    """No plan that fits is clearly faster than this one, which fits."""
    best = float(about.finding.estimates[0].step_time[0]) if about.finding.fit else math.inf
    return about.fits and about.plan.prediction.step_time_s < best * (1.0 + CLEAR)


def _factor(value: float) -> str:
    return f"x {value:.2f}"


def _sensitivity_reading(about: Subject, found: tuple[Pull, ...]) -> str:
    moving = [one for one in found if one.quantity.unit != "size"]
    first = moving[0]
    side = max(first.sides, key=lambda one: abs(one.change))
    text = (
        f"The step time hangs most on {first.quantity.text} ({first.origin}): at {_factor(side.factor)} of what the profile says "
        f"the step takes {_longer(side)}"
    )
    if len(moving) > 1 and moving[1].largest > 0.01:
        other = max(moving[1].sides, key=lambda one: abs(one.change))
        text += f"; next is {moving[1].quantity.text}, {_longer(other)} at {_factor(other.factor)}"
    if not _settled(about):
        return f"{text}. Another plan is the better choice already."
    flips = [(abs(math.log(side.flip)), one, side) for one in found for side in one.sides if side.flip]
    if not flips:
        return f"{text}. No number within a factor of 2 would make another of the good plans clearly faster."
    _, one, side = min(flips, key=lambda flip: flip[0])
    what = "another plan would be clearly faster" if side.fits else "the plan would no longer fit"
    return f"{text}. The choice itself changes first with {one.quantity.text}: at {_factor(side.flip or 1)} {what}."


def _longer(side: Side) -> str:
    return f"{shown(abs(side.change), 'share')} {'longer' if side.change > 0 else 'less'}"


# ------------------------------------------------------------------------------------------------ accuracy


def accuracy_chart(about: Subject) -> Chart:
    """Errors of the step time on published runs of this trainer, generation of GPU and kind, source by source."""
    job = about.resolved.job
    found = evidence("step_time", job.trainer, job.cluster.hardware, about.resolved.kind)
    memory = evidence("memory", job.trainer, job.cluster.hardware, about.resolved.kind)
    named = {one.source for one in found.sources[:MOST_SOURCES]}
    other = f"{len(found.sources) - MOST_SOURCES} others"
    rows: list[tuple[Value, ...]] = [
        (one.source if one.source in named else other, error) for one in found.sources for error in one.percent
    ]
    table = [
        (one.source, len(one.percent), _typical(one.percent), float(np.median(one.percent)), one.where) for one in found.sources
    ]  # fmt: skip
    facts = {"runs": len(found.errors), "sources": len(found.sources), "median": _typical(found.errors),
             "bias": float(np.median(found.errors)), "close": float(np.mean(np.abs(found.errors) <= CLOSE)),
             "memory_runs": len(memory.errors), "memory_median": _typical(memory.errors),
             "memory_bias": float(np.median(memory.errors)), "class": found.bar.basis, "low": found.bar.low,
             "high": found.bar.high}  # fmt: skip
    note = (
        f"The interval of the heading, {100 * (found.bar.low - 1):+.0f} % to {100 * (found.bar.high - 1):+.0f} %, is set so that "
        "it holds nine of ten runs of sources that were left out: the fewer sources, and the more they differ, the wider."
    )
    return chart("accuracy", _accuracy_reading(found, facts), rows, [note], facts=facts, table=table)


def _typical(errors: tuple[float, ...]) -> float:
    """Median of the errors without their sign."""
    return float(np.median(np.abs(errors)))


def _accuracy_reading(found: Evidence, facts: dict[str, Any]) -> str:
    words = " ".join(word for word in (found.bar.user, found.bar.code_base, found.bar.model, found.bar.arch) if word)
    what = f"of the class '{words}'" if words else "of all trainers and GPUs, as none is closer to this job"
    return (
        f"{plural(facts['runs'], 'published run')} from {plural(facts['sources'], 'source')} {what}: the median error of "
        f"the step time is {shown(facts['median'], 'share')}, {shown(facts['close'], 'share')} are within 10 %, and the middle one "
        f"was {shown(abs(facts['bias']), 'share')} too {'fast' if facts['bias'] < 0 else 'slow'}. Peak memory: median error "
        f"{shown(facts['memory_median'], 'share')} over {plural(facts['memory_runs'], 'run')}."
    )
