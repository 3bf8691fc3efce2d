"""Charts of the choice: the layouts beside the plan, scaling, and how well runs like it were predicted."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from planner.analysis.evidence import Evidence, evidence
from planner.analysis.landscape import LEAST_SPEED, Cell, Point
from planner.analysis.pull import CLEAR, MOST, Pull, Side, pulls
from planner.analysis.scaling import Scaling
from planner.explain import COMPONENT_TEXT, degrees_text, layout_text, levers
from planner.report.document import Chart, Column, Value, chart, shown
from planner.report.subject import Subject
from planner.search import SAFE
from planner.units import GIB

LISTED = 5
"""Plans in the list of alternatives."""
STILL = 0.001
"""A number that moves the step time by less than this part, and the choice not at all, is not drawn."""
UNSAFE = "may run out of memory"
"""What layouts are called whose chance of that is above SAFE, and those beyond the card's memory."""
MOST_SOURCES = 14
"""Sources of published runs that get a row of their own."""


def plural(number: int, word: str) -> str:
    """'1 cell', '3 cells'."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


# ------------------------------------------------------------------------------------------------ TP x PP


def heatmap_chart(about: Subject) -> Chart:
    """The best step time of every TP x PP, and why there is none."""
    limit = about.plan.prediction.memory_limit_gib
    best = min(cell.best.step_time_s for cell in about.landscape.cells if cell.best and cell.best.fits) if any(
        cell.best and cell.best.fits for cell in about.landscape.cells
    ) else None  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for cell in about.landscape.cells:
        state, text, why = _cell(cell, limit)
        mine = (cell.tp, cell.pp) == (about.plan.layout.tp, about.plan.layout.pp)
        time = cell.best.step_time_s if cell.best and state == "fits" else None
        layout = layout_text(cell.best.layout) if cell.best else ""
        behind = None if time is None or best is None else time / best - 1.0
        rows.append((cell.tp, cell.pp, state, time, behind, text, why, layout, mine))
    return chart(
        "heatmap", "The best step time by tensor and pipeline parallel degree", _heatmap_reading(about, rows),
        (
            Column(key="tp", title="tp", kind="count"), Column(key="pp", title="pp", kind="count"),
            Column(key="state", title="state", kind="text", in_table=False),
            Column(key="step_s", title="best step time", kind="seconds"),
            Column(key="behind", title="behind the best", kind="share"),
            Column(key="label", title="label", kind="text", in_table=False),
            Column(key="why", title="why not", kind="text"), Column(key="layout", title="layout", kind="text"),
            Column(key="plan", title="this plan", kind="flag", in_table=False),
        ),
        rows,
        notes=(
            "Each cell is the best of all layouts with these two degrees: data, context and expert parallel, micro batch, "
            "schedule, recompute and (where nothing fits without it) offload vary. Cells more than 25 % behind are priced with "
            "the closed form and even stages: 8 % too fast to 12 % too slow.",
        ),
    )  # fmt: skip


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
    columns = (
        Column(key="memory_gib", title="memory of the worst stage", kind="gib"),
        Column(key="rate", title="tokens/s/GPU", kind="rate"), Column(key="step_s", title="step", kind="seconds"),
        Column(key="chance", title="runs out", kind="share"),
        Column(key="group", title="group", kind="text", in_table=False),
        Column(key="layout", title="layout", kind="text"),
    )  # fmt: skip

    def row(one: Point) -> tuple[Value, ...]:
        group = "this plan" if one is land.plan else "front" if id(one) in front else "fits" if one.fits else UNSAFE
        return (
            one.memory_gib, one.tokens_per_second_per_gpu, one.step_time_s, one.out_of_memory_probability, group,
            layout_text(one.layout),
        )  # fmt: skip

    points = list({id(one): one for one in (*land.points, *land.front, land.plan)}.values())
    facts = {"limit_gib": about.plan.prediction.memory_limit_gib, "legal": land.legal, "priced": land.priced,
             "fitting": land.fitting}  # fmt: skip
    drawn = len(points)
    notes = [
        f"{land.legal:,} layouts without recompute and offload are legal; with these {land.priced:,} were priced, {land.fitting:,} "
        f"of them fit, and {drawn:,} are drawn: one for each small square of the picture, and the front. Below "
        f"{100 * LEAST_SPEED:.0f} % of the best throughput nothing is drawn. A layout fits where its chance of running out of "
        f"memory is at most {100 * SAFE:.0f} %, which needs some room below the limit."
    ]
    shown_front = [row(one) for one in land.front]
    return chart(
        "pareto", "Throughput against memory", _pareto_reading(about), columns, [row(one) for one in points], facts=facts,
        notes=tuple(notes), table=shown_front, table_columns=columns,
    )  # fmt: skip


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
            f"{number}" + (" (this plan)" if mine else ""), degrees_text(layout), ", ".join(levers(layout)),
            float(found.step_time[0]), float(found.step_time[0]) / first - 1.0, float(found.mfu[0]),
            float(found.memory_peak[0]) / GIB, float(found.out_of_memory_probability[0]),
        ))  # fmt: skip
    return chart(
        "alternatives", "The best plans of this job", "",
        (
            Column(key="rank", title="#", kind="text"), Column(key="layout", title="layout", kind="text"),
            Column(key="levers", title="to save memory", kind="text"), Column(key="step_s", title="step", kind="seconds"),
            Column(key="behind", title="behind", kind="share"), Column(key="mfu", title="MFU", kind="share"),
            Column(key="memory_gib", title="memory", kind="gib"), Column(key="chance", title="runs out", kind="share"),
        ),
        rows,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ scaling


def scaling_chart(about: Subject, scaled: Scaling) -> Chart:
    """Throughput per GPU over the size of the cluster, strong and weak."""
    rows: list[tuple[Value, ...]] = []
    for kind, points in (("strong", scaled.strong), ("weak", scaled.weak)):
        rows += [
            (
                kind, one.num_gpus, one.num_nodes, one.global_batch_size, one.tokens_per_second_per_gpu, one.efficiency,
                one.tokens_per_second, one.step_time_s, one.mfu, one.memory_peak_gib,
                "" if one.layout is None else layout_text(one.layout), one.why_not,
            )
            for one in points
        ]  # fmt: skip
    return chart(
        "scaling", "From one node to beyond the cluster", _scaling_reading(about, scaled),
        (
            Column(key="kind", title="batch", kind="text"), Column(key="gpus", title="GPUs", kind="count"),
            Column(key="nodes", title="nodes", kind="count", in_table=False),
            Column(key="sequences", title="sequences per step", kind="count"),
            Column(key="rate", title="tokens/s/GPU", kind="rate"),
            Column(key="efficiency", title="efficiency", kind="share"),
            Column(key="total_rate", title="tokens/s", kind="number"), Column(key="step_s", title="step", kind="seconds"),
            Column(key="mfu", title="MFU", kind="share"), Column(key="memory_gib", title="memory", kind="gib", in_table=False),
            Column(key="layout", title="best layout", kind="text"), Column(key="why", title="why not", kind="text"),
        ),
        rows, facts={"gpus": about.gpus},
        notes=(
            "Each point is a search of its own: the best layout at that size. Strong: the same batch at every size. Weak: the "
            "batch grows with the GPUs. Efficiency: throughput per GPU over that of the smallest size that fits.",
        ),
    )  # fmt: skip


def _scaling_reading(about: Subject, scaled: Scaling) -> str:
    strong = [one for one in scaled.strong if one.tokens_per_second_per_gpu is not None]
    if not strong:
        return f"Nothing fits at any size from {scaled.strong[0].num_gpus} to {scaled.strong[-1].num_gpus} GPUs."
    missing = [
        one.num_gpus
        for one in scaled.strong
        if one.tokens_per_second_per_gpu is None and one.num_gpus < strong[0].num_gpus
    ]
    text = f"Of the sizes looked at, {plural(strong[0].num_gpus, 'GPU')} is the smallest that fits. " if missing else ""
    own = next((one for one in strong if one.num_gpus == about.gpus), None)
    last = strong[-1]
    if own is not None and last is not own:
        assert own.tokens_per_second_per_gpu and last.tokens_per_second_per_gpu
        ratio = last.tokens_per_second_per_gpu / own.tokens_per_second_per_gpu
        text += (
            f"With the same batch, {last.num_gpus:,} GPUs ({last.num_gpus // about.gpus} times as many) train "
            f"{last.tokens_per_second / own.tokens_per_second:.2f} times as fast" if last.tokens_per_second and own.tokens_per_second
            else ""
        ) + f": each GPU does {shown(ratio, 'share')} of its work"  # fmt: skip
    if own is not None and own is not strong[0]:
        text += f". At {about.gpus:,} GPUs each does {shown(own.efficiency, 'share')} of what it does at {strong[0].num_gpus:,}"
    weak = [one for one in scaled.weak if one.tokens_per_second_per_gpu is not None]
    if weak and weak[-1].num_gpus != about.gpus:
        base = next((one for one in weak if one.num_gpus == about.gpus), None)
        if base is not None and base.tokens_per_second_per_gpu and weak[-1].tokens_per_second_per_gpu:
            kept = weak[-1].tokens_per_second_per_gpu / base.tokens_per_second_per_gpu
            text += f". With a batch that grows along, {shown(kept, 'share')}"
    return text.strip() + "."


# ------------------------------------------------------------------------------------------------ sensitivity


def sensitivity_chart(about: Subject) -> Chart:
    """How far each number of the profile moves the step time, and where the choice should change."""
    near = sorted(
        (one for one in about.landscape.points if one.step_time_s < 1.5 * about.landscape.plan.step_time_s),
        key=lambda one: (not one.fits, one.step_time_s),
    )  # fmt: skip
    others = [*about.finding.layouts, *(one.layout for one in near)]
    found = pulls(about.resolved, about.plan.layout, about.estimate, others)
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
        "sensitivity", "What the step time and the choice hang on", _sensitivity_reading(about, found),
        (
            Column(key="what", title="number of the profile", kind="text"), Column(key="origin", title="known from", kind="text"),
            Column(key="factor", title="if it were", kind="text"), Column(key="step_s", title="step", kind="seconds"),
            Column(key="change", title="change", kind="signed_share"),
            Column(key="less", title="less", kind="flag", in_table=False),
            Column(key="fits", title="fits", kind="flag", in_table=False),
            Column(key="flip", title="choice changes at", kind="text"), Column(key="winner", title="to", kind="text"),
            Column(key="measure", title="measured by", kind="text"),
        ),
        rows,
        notes=(
            f"Each number is halved and doubled, as far as physics allows, the layout kept. The choice changes where another of "
            f"the {min(len(others), MOST):,} good layouts around it would be {100 * CLEAR:.0f} % faster, or where the plan no longer fits; "
            "`plan sensitivity` searches all layouts at each step.",
            *([f"These move the step by less than {100 * STILL:.1f} %: {', '.join(still)}."] if still else []),
        ),
    )  # fmt: skip


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
    if not about.fits:
        return f"{text}."
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
    rows: list[tuple[Value, ...]] = []
    shown_sources = found.sources[:MOST_SOURCES]
    rest = [error for one in found.sources[MOST_SOURCES:] for error in one.errors]
    for one in shown_sources:
        rows += [(one.source, error) for error in one.errors]
    other = f"{len(found.sources) - MOST_SOURCES} others"
    rows += [(other, error) for error in rest]
    table = [
        (one.source, len(one.errors), one.median, float(np.median(one.errors)), one.where) for one in found.sources
    ]  # fmt: skip
    facts = {"runs": len(found.errors), "sources": len(found.sources), "median": found.median, "bias": found.bias,
             "close": found.close, "memory_runs": len(memory.errors), "memory_median": memory.median,
             "memory_bias": memory.bias, "class": found.bar.basis, "low": found.bar.low, "high": found.bar.high}  # fmt: skip
    return chart(
        "accuracy", "How well runs like this were predicted", _accuracy_reading(found, memory),
        (Column(key="source", title="source", kind="text"), Column(key="error", title="error", kind="signed_share")),
        rows, facts=facts, table=table,
        table_columns=(
            Column(key="source", title="source", kind="text"), Column(key="runs", title="runs", kind="count"),
            Column(key="median", title="median error", kind="share"), Column(key="bias", title="bias", kind="signed_share"),
            Column(key="where", title="published in", kind="text"),
        ),
        notes=(
            "Error: predicted / measured - 1 of the step time; positive is predicted too slow. One tick is one run, the diamond "
            "the median of its source.",
            f"The interval of the heading, {100 * (found.bar.low - 1):+.0f} % to {100 * (found.bar.high - 1):+.0f} %, is set so that it "
            "holds nine of ten runs of sources that were left out: the fewer sources, and the more they differ, the wider.",
        ),
    )  # fmt: skip


def _accuracy_reading(found: Evidence, memory: Evidence) -> str:
    words = " ".join(word for word in (found.bar.code_base, found.bar.arch, found.bar.kind) if word)
    what = f"of the class '{words}'" if words else "of all trainers and GPUs, as none is closer to this job"
    side = "too fast" if found.bias < 0 else "too slow"
    return (
        f"{plural(len(found.errors), 'published run')} from {plural(len(found.sources), 'source')} {what}: the median error of the step time "
        f"is {shown(found.median, 'share')}, {shown(found.close, 'share')} are within 10 %, and the middle one was predicted "
        f"{shown(abs(found.bias), 'share')} {side}. Peak memory: median error {shown(memory.median, 'share')} over "
        f"{plural(len(memory.errors), 'run')}."
    )
