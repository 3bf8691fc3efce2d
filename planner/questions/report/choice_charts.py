"""Charts of the choice: every tensor and pipeline degree, throughput against memory, the alternatives."""

from collections import Counter
from typing import Any

from planner.explain import COMPONENT_TEXT, degrees_text, layout_text, memory_options
from planner.questions.report import specs
from planner.questions.report.document import Chart, Spec, Value, chart, columns, shown
from planner.questions.report.landscape import LEAST_SPEED, Cell, Point
from planner.questions.report.specs import BARE, BLUE, BOLD_RED, GREY, RED, TEAL, WIDTH, layer
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
        "heatmap", "Best step time by tensor and pipeline degree", _heatmap_reading(about, rows),
        columns(
            "tp count, pp count, -state text, step_s seconds best step time, behind share behind the best, "
            "-label text, why text why not, layout text, -plan flag this plan"
        ),
        rows, spec=_heatmap_spec,
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


def _heatmap_spec(chart: Chart) -> Spec:
    tips = specs.tip(tp_text="tensor parallel", pp_text="pipeline parallel", step_s_text="best step time",
                     behind_text="behind the best", why="why not", layout="layout")  # fmt: skip
    cell: Spec = {"x": specs.step("tp", "tensor parallel", axis={"labelAngle": 0, "orient": "top", **BARE}),
            "y": specs.step("pp", "pipeline parallel", axis=BARE)}  # fmt: skip
    fits, out = "datum.state == 'fits'", "datum.state != 'fits'"
    nearness = specs.number("distance", scale={"domain": [0, 0.7], "range": [0.95, 0.12], "clamp": True}, legend=None)
    frame = {"cornerRadius": 3, "filled": False, "stroke": "currentColor", "strokeWidth": 2.5}
    failing = {"fontSize": 11, "lineBreak": "\n", "dy": -6, "opacity": 0.85, "limit": 82}
    label: Spec = {**cell, "text": {"field": "label"}}
    return {
        "width": {"step": 84}, "height": {"step": 44},
        "layer": [
            layer("rect", {"cornerRadius": 3, "color": TEAL}, [fits, {"distance": "log(1 + datum.behind)"}], **cell, tooltip=tips,
                  opacity=nearness),
            layer("rect", {"cornerRadius": 3, "color": RED, "opacity": 0.14}, [out], **cell, tooltip=tips),
            layer("rect", frame, ["datum.plan"], **cell, tooltip=tips),
            layer("text", {"fontSize": 13, "fontWeight": "bold", "tooltip": None}, [fits], **label),
            layer("text", failing, [out], **label),
        ],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ memory and throughput


def pareto_chart(about: Subject) -> Chart:
    """Throughput against memory: all legal layouts, the front, the plan."""
    land = about.landscape
    front = {id(one) for one in land.front}
    drawn = columns(
        "memory_gib gib memory of the worst stage, rate rate tokens/s/GPU, step_s seconds step, "
        "chance share runs out, -group text, layout text"
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
    notes = [
        f"{land.legal:,} layouts without recompute and offload are legal; with these {land.priced:,} were priced, {land.fitting:,} "
        f"of them fit, and {len(points):,} are drawn: one for each small square of the picture, and the front. Below "
        f"{100 * LEAST_SPEED:.0f} % of the best throughput nothing is drawn. A layout fits where its chance of running out of "
        f"memory is at most {100 * SAFE:.0f} %, which needs some room below the limit."
    ]
    return chart(
        "pareto", "Throughput against memory", _pareto_reading(about), drawn, [row(one) for one in points], facts=facts,
        notes=tuple(notes), table=[row(one) for one in land.front], table_columns=drawn, spec=_pareto_spec,
    )  # fmt: skip


def _pareto_spec(chart: Chart) -> Spec:
    limit = float(chart.facts["limit_gib"])
    loose = {"zero": False, "nice": True}
    x = specs.number("memory_gib", "memory of the worst stage, GiB", scale=loose, axis={"grid": False})
    y = specs.number("rate", "tokens/s/GPU", scale=loose, axis={"tickCount": 6})
    tips = specs.tip(layout="layout", rate_text="tokens/s/GPU", step_s_text="step", memory_gib_text="memory",
                     chance_text="runs out of memory", group="which")  # fmt: skip
    colour = specs.hue("group", {"this plan": RED, "front": TEAL, "fits": BLUE, UNSAFE: GREY})

    def points(group: str, **style: Any) -> Spec:
        return layer(
            "point", {"filled": True, **style}, [f"datum.group == '{group}'"], x=x, y=y, tooltip=tips, color=colour
        )

    words = {"align": "left", "dx": 5, "baseline": "top", **BOLD_RED}
    line = {"interpolate": "step-after", "strokeWidth": 1.5, "color": TEAL}
    return {
        "width": WIDTH, "height": 360,
        "layer": [
            layer("rule", {"strokeWidth": 2, "color": RED}, alone=True, x=specs.at(limit)),
            layer("text", words, alone=True, x=specs.at(limit), y={"value": 4}, text={"value": f"usable: {limit:.1f} GiB"}),
            points(UNSAFE, size=14, opacity=0.5, shape="cross"), points("fits", size=18, opacity=0.45),
            layer("line", line, ["datum.group == 'front' || (datum.group == 'this plan')"], x=x, y=y),
            points("front", size=55, opacity=1), points("this plan", size=190, opacity=1, shape="diamond"),
        ],
    }  # fmt: skip


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
    return chart(
        "alternatives", "The best plans of this job", "",
        columns(
            "rank text #, layout text, levers text to save memory, step_s seconds step, behind share, mfu share MFU, "
            "memory_gib gib memory, chance share runs out"
        ),
        rows,
    )  # fmt: skip
