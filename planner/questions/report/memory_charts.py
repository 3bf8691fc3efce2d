"""Charts of where the memory goes: every pipeline stage at its peak, the worst one over one step."""

from planner.cost.memory.states import COMPONENTS
from planner.explain import COMPONENT_TEXT
from planner.questions.report.document import Chart, Value, chart, columns, shown
from planner.questions.report.subject import Subject
from planner.timeline.stage_memory import STATIC, MemoryTimeline, memory_of_ranks, memory_over_time
from planner.timeline.step_slices import Timeline
from planner.units import GIB

MOST_MOMENTS = 600
"""Moments of the memory timeline that are drawn; each stands for the highest of those it replaces."""


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
    where = f"Stage {worst.rank} of {len(ranks)} needs most," if len(ranks) > 1 else "A GPU needs"
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
        "memory", "Memory of every pipeline stage", f"{reading}.",
        columns("stage count, component text, gib gib GiB, peak_gib gib peak, margin_gib gib margin"),
        rows, facts={"limit_gib": limit, "stages": len(ranks), "worst": worst.rank}, notes=tuple(notes), table=table,
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
        for start, end, work, held in _moments(over)
    ]  # fmt: skip
    top = max(rows, key=lambda row: row[5])
    first = next(
        one.start for one in over.moments if one.activations + one.workspace >= 0.9999 * (over.peak - static * GIB)
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
    drawn = columns(
        "start_s seconds from, end_s seconds to, static_gib gib states and buffers, workspace_gib gib workspace, "
        "activations_gib gib activations, total_gib gib together, margin_gib gib margin"
    )
    highest = sorted(rows, key=lambda row: -row[5])[:12]
    return chart(
        "memory-timeline", f"Memory of stage {over.rank} over one step", reading,
        drawn, rows, facts={"limit_gib": limit, "end_s": over.end, "stage": over.rank, "peak_gib": top[5]},
        notes=(f"What stays: {states}.",), table=sorted(highest), table_columns=drawn,
        more_rows=[(rows[-1][1], *rows[-1][1:])],  # the last moment lasts to the end: areas need a point there
    )  # fmt: skip


def _moments(over: MemoryTimeline) -> list[tuple[float, float, float, float]]:
    """Start, end, workspace and activations (GiB) of what is drawn: of many moments the highest of each slice of time."""
    ends = [one.start for one in over.moments[1:]] + [over.end]
    found = [
        (one.start, end, one.workspace / GIB, one.activations / GIB)
        for one, end in zip(over.moments, ends, strict=True) if end > one.start
    ]  # fmt: skip
    if len(found) <= MOST_MOMENTS:
        return found
    highest: dict[int, tuple[float, float, float, float]] = {}
    for one in found:
        first, last = (min(int(time / over.end * MOST_MOMENTS), MOST_MOMENTS - 1) for time in (one[0], one[1]))
        for slot in range(first, last + 1):
            if slot not in highest or one[2] + one[3] > highest[slot][2] + highest[slot][3]:
                highest[slot] = one
    each = over.end / MOST_MOMENTS
    return [(slot * each, (slot + 1) * each, one[2], one[3]) for slot, one in sorted(highest.items())]
