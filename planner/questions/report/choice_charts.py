"""Charts of the choice: every tensor and pipeline degree, throughput against memory, the alternatives."""

from collections import Counter

from planner.explain import COMPONENT_TEXT, degrees_text, layout_text, memory_options
from planner.questions.report.document import Chart, Value, chart, shown
from planner.questions.report.landscape import LEAST_SPEED, Cell, Point
from planner.questions.report.subject import Subject
from planner.search import SAFE
from planner.units import GIB

LISTED = 5
"""Plans in the list of alternatives."""
UNSAFE = "may run out of memory"
"""What layouts are called whose chance of that is above SAFE, and those beyond the card's memory."""


def plural(number: int, word: str) -> str:
    """'1 cell', '3 cells'."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


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
