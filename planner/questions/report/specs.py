"""Every chart as a Vega-Lite specification: one description for the page and for pictures.

A specification names its data ``rows``; the page and the picture fill in the rows of the document. Colours are of a middle
brightness, text and axes are ``currentColor``: both hold on a light and on a dark ground.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.cost.memory.states import COMPONENTS
from planner.explain import COMPONENT_TEXT
from planner.questions.report.choice_charts import UNSAFE
from planner.questions.report.document import Chart, Value, shown

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
WIDTH = 900
"""Pixels of a picture, and of the page before it knows its own width."""
FEW_TEXTS = 4000
"""Up to this many rows each number comes with its text for people; of more, tooltips format the number themselves."""
CANVAS = 2500
"""Rows from which a chart is drawn on a canvas: so many elements make a page slow."""
FAINT = "#8888884d"
RED, BLUE, GREEN, ORANGE, VIOLET, TEAL, GREY = (
    "#d1495b", "#4878a8", "#4f9d5d", "#d98c35", "#8f6bb1", "#2a9d8f", "#8d929b",
)  # fmt: skip
COMPONENT_COLOURS = dict(zip(COMPONENTS, (BLUE, TEAL, VIOLET, ORANGE, GREEN, GREY, "#c76f8f", "#b3a17d"), strict=True))
GROUPS = {
    "ideal": ("ideal", TEAL), "kernels": ("computation", ORANGE), "recompute": ("computation", ORANGE),
    "host": ("computation", ORANGE), "tensor_communication": ("communication", RED),
    "context_communication": ("communication", RED), "expert_communication": ("communication", RED),
    "data_communication": ("communication", RED), "pipeline_communication": ("communication", RED),
    "bubble": ("waiting", GREY), "stragglers": ("waiting", GREY), "optimizer": ("end of the step", VIOLET),
    "offload": ("end of the step", VIOLET), "overhead": ("end of the step", VIOLET), "step": ("step time", BLUE),
}  # fmt: skip
"""What each bar of the waterfall belongs to."""
KIND_COLOURS = {
    "forward": BLUE, "backward": GREEN, "input gradient": GREEN, "weight gradient": "#8fb94b",
    "gather weights": RED, "reduce gradients": RED, "stragglers": GREY, "optimizer": VIOLET,
    "optimizer on host": VIOLET, "overhead": "#b3a17d",
}  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def config() -> Spec:
    """What all charts share."""
    plain = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12, "titleFontSize": 12,
             "titleFontWeight": "normal"}  # fmt: skip
    return {
        "font": FONT, "view": {"stroke": None},
        "axis": {**plain, "gridColor": FAINT, "domainColor": FAINT, "tickColor": FAINT, "labelLimit": 230},
        "legend": {**plain, "orient": "bottom", "title": None, "symbolType": "square", "labelLimit": 220, "columns": 4,
                   "symbolOpacity": 1},
        "text": {"color": "currentColor", "fontSize": 12}, "rule": {"color": "currentColor"},
    }  # fmt: skip


def drawing(chart: Chart) -> Spec:
    """The specification of a chart, without its rows."""
    body = _SPECS[chart.name](chart)
    return {
        "$schema": SCHEMA, "description": f"{chart.title}. {chart.reading}", "data": {"name": "rows"},
        "autosize": {"type": "pad", "contains": "padding"}, "config": config(), "background": None, **body,
    }  # fmt: skip


def data(chart: Chart) -> dict[str, Any]:
    """The rows that the specification draws, as columns; with the text of every number where there are few."""
    columns = [column.key for column in chart.columns]
    rows: list[list[Value]] = [list(row) for row in chart.rows]
    if len(rows) <= FEW_TEXTS and chart.name != "accuracy":
        texted = [(at, column) for at, column in enumerate(chart.columns) if column.kind not in ("text", "flag")]
        columns += [f"{column.key}_text" for _, column in texted]
        rows = [[*row, *(shown(row[at], column.kind) for at, column in texted)] for row in rows]
    if chart.name == "memory-timeline" and rows:  # the last moment lasts to the end: areas need a point there
        rows.append([rows[-1][1], *rows[-1][1:]])
    if chart.name == "waterfall":
        columns.append("group")
        rows = [[*row, GROUPS[str(row[0])][0]] for row in rows]
    return {"columns": columns, "rows": rows}


def filled(chart: Chart) -> Spec:
    """The specification with its rows: what a renderer outside the page draws."""
    table = data(chart)
    records = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return {**drawing(chart), "datasets": {"rows": records}}


def on_canvas(chart: Chart) -> bool:
    """So many marks that the page draws them on a canvas."""
    return len(chart.rows) > CANVAS


def tip(*fields: tuple[str, str]) -> list[Spec]:
    """Tooltip of fields with their titles."""
    return [{"field": field, "title": title, "type": "nominal"} for field, title in fields]


def _seconds_axis(title: str, end: float) -> Spec:
    unit, factor = ("s", "") if end >= 1 else ("ms", " * 1000")
    return {"title": f"{title}, {unit}", "labelExpr": f"format(datum.value{factor}, '~g')", "tickCount": 6}


def _waterfall(chart: Chart) -> Spec:
    end = max(float(row[5] or 0) for row in chart.rows)
    used = list(dict.fromkeys(GROUPS[str(row[0])] for row in chart.rows))
    y = {"field": "part", "type": "nominal", "sort": None, "title": None, "axis": {"domain": False, "ticks": False}}
    x = {"field": "start", "type": "quantitative", "scale": {"domain": [0, end], "nice": False},
         "axis": _seconds_axis("time", end)}  # fmt: skip
    tips = tip(
        ("part", "part"),
        ("seconds_text", "time"),
        ("share_text", "of the step"),
        ("start_text", "from"),
        ("end_text", "to"),
    )
    return {
        "width": WIDTH, "height": 26 * len(chart.rows),
        "layer": [
            {"mark": {"type": "bar", "cornerRadius": 2, "minBandSize": 4},
             "encoding": {"y": y, "x": x, "x2": {"field": "end"}, "tooltip": tips, "color": {
                 "field": "group", "type": "nominal",
                 "scale": {"domain": [name for name, _ in used], "range": [colour for _, colour in used]}}}},
            *(
                {"transform": [{"filter": where}],
                 "mark": {"type": "text", "align": align, "dx": dx, "color": colour},
                 "encoding": {"y": y, "x": {"field": field, "type": "quantitative"}, "text": {"field": "seconds_text"}}}
                for where, align, dx, field, colour in (
                    (f"datum.end <= {0.7 * end}", "left", 5, "end", "currentColor"),
                    (f"datum.end > {0.7 * end} && datum.start > {0.3 * end}", "right", -5, "start", "currentColor"),
                    (f"datum.end > {0.7 * end} && datum.start <= {0.3 * end}", "right", -6, "end", "white"),
                )
            ),
        ],
    }  # fmt: skip


def _limit_rule(limit: float) -> list[Spec]:
    """A line at what the card has, and its name above the picture, where no bar lies behind it."""
    words = {"type": "text", "align": "right", "baseline": "bottom", "dy": -5, "fontWeight": "bold", "color": RED}
    return [
        {"data": {"values": [{}]}, "mark": {"type": "rule", "strokeWidth": 2, "color": RED},
         "encoding": {"y": {"datum": limit, "type": "quantitative"}}},
        {"data": {"values": [{}]}, "mark": words,
         "encoding": {"y": {"value": 0}, "x": {"value": "width"}, "text": {"value": f"red line: {limit:.1f} GiB usable"}}},
    ]  # fmt: skip


def _memory(chart: Chart) -> Spec:
    limit, stages = float(chart.facts["limit_gib"]), int(chart.facts["stages"])
    peak = max(float(row[3] or 0) for row in chart.rows)
    names = [COMPONENT_TEXT[name] for name in COMPONENTS]
    top = max(limit * 1.1, peak * 1.05)
    tips = tip(("stage_text", "stage"), ("component", "part"), ("gib_text", "needs"), ("peak_gib_text", "peak of the stage"),
               ("margin_gib_text", "left to the limit"))  # fmt: skip
    bars: Spec = {
        "mark": {"type": "bar"},
        "transform": [{"calculate": f"indexof({names!r}, datum.component)", "as": "order"}],
        "encoding": {
            "x": {"field": "stage", "type": "ordinal", "title": "pipeline stage",
                  "axis": {"labelAngle": 0, "domain": False, "ticks": False, "labelOverlap": True},
                  "scale": {"paddingInner": 0.18 if stages > 1 else 0.6, "paddingOuter": 0.1 if stages > 2 else 0.5}},
            "y": {"field": "gib", "type": "quantitative", "title": "GiB per GPU", "scale": {"domain": [0, top], "nice": False}},
            "color": {"field": "component", "type": "nominal",
                      "scale": {"domain": names, "range": list(COMPONENT_COLOURS.values())}},
            "order": {"field": "order", "type": "quantitative"}, "tooltip": tips,
        },
    }  # fmt: skip
    margin = {
        "transform": [{"filter": f"datum.component == {names[0]!r}"},
                      {"calculate": "(datum.margin_gib >= 0 ? '' : '-') + format(abs(datum.margin_gib), '.1f')"
                       + (" + (datum.margin_gib >= 0 ? ' GiB left' : ' GiB')" if stages <= 4 else ""), "as": "left"}],
        "mark": {"type": "text", "baseline": "bottom", "dy": -4, "fontSize": 11},
        "encoding": {"x": bars["encoding"]["x"], "y": {"field": "peak_gib", "type": "quantitative"}, "text": {"field": "left"}},
    }  # fmt: skip
    margins = [{**margin, "name": "wide" if stages > 8 else "margin"}] if stages <= 24 else []
    return {"width": WIDTH, "height": 300, "layer": [bars, *margins, *_limit_rule(limit)]}


def _memory_timeline(chart: Chart) -> Spec:
    limit, end = float(chart.facts["limit_gib"]), float(chart.facts["end_s"])
    top = max(limit * 1.1, float(chart.facts["peak_gib"]) * 1.05)
    x = {"field": "start_s", "type": "quantitative", "scale": {"domain": [0, end], "nice": False},
         "axis": _seconds_axis("time in the step", end)}  # fmt: skip
    tips = tip(("start_s_text", "from"), ("end_s_text", "to"), ("activations_gib_text", "activations"),
               ("workspace_gib_text", "workspace"), ("static_gib_text", "states and buffers"), ("total_gib_text", "together"),
               ("margin_gib_text", "left to the limit"))  # fmt: skip
    layers = [("static", "states and buffers", BLUE, "0", "datum.static_gib"),
              ("workspace", "workspace", GREEN, "datum.static_gib", "datum.static_gib + datum.workspace_gib"),
              ("activations", "activations", ORANGE, "datum.static_gib + datum.workspace_gib", "datum.total_gib")]  # fmt: skip
    scale = {"domain": [name for _, name, *_ in layers], "range": [colour for _, _, colour, *_ in layers]}
    y_scale = {"domain": [0, top], "nice": False}
    areas = [
        {"transform": [{"calculate": low, "as": f"{key}_low"}, {"calculate": high, "as": f"{key}_high"},
                       {"calculate": f"'{name}'", "as": "layer"}],
         "mark": {"type": "area", "interpolate": "step-after", "line": False},
         "encoding": {"x": x, "y": {"field": f"{key}_low", "type": "quantitative", "title": "GiB", "scale": y_scale},
                      "y2": {"field": f"{key}_high"}, "color": {"field": "layer", "type": "nominal", "scale": scale}}}
        for key, name, _, low, high in layers
    ]  # fmt: skip
    areas.append(
        {"transform": [{"calculate": "0", "as": "zero"}], "mark": {"type": "rect", "opacity": 0}, "encoding": {
            "x": x, "x2": {"field": "end_s"}, "y": {"field": "zero", "type": "quantitative", "scale": y_scale},
            "y2": {"field": "total_gib"}, "tooltip": tips}}
    )  # fmt: skip
    return {"width": WIDTH, "height": 240, "layer": [*areas, *_limit_rule(limit)]}


def _pipeline(chart: Chart) -> Spec:
    facts = chart.facts
    step, ranks, chunks = float(facts["step_s"]), int(facts["ranks"]), int(facts["chunks"])
    height = max(7, min(32, 480 // ranks)) * ranks
    kinds = list(dict.fromkeys(str(row[1]) for row in chart.rows))
    unit, factor = ("s", 1) if step >= 1 else ("ms", 1000)
    format_time = "format({0} * " + str(factor) + ", '.4~r') + ' " + unit + "'"
    texts = [
        {"calculate": format_time.format("datum.start_s"), "as": "from"},
        {"calculate": format_time.format("datum.end_s"), "as": "to"},
        {"calculate": "(datum.end_s - datum.start_s) >= 1 ? format(datum.end_s - datum.start_s, '.4~r') + ' s' : "
                      "format((datum.end_s - datum.start_s) * 1000, '.4~r') + ' ms'", "as": "takes"},
        {"calculate": "datum.microbatch < 0 ? 'none: once per step' : format(datum.microbatch, 'd')", "as": "mb"},
        {"calculate": "datum.chunk < 0 ? 'all' : format(datum.chunk, 'd')", "as": "virtual"},
    ]  # fmt: skip
    virtual = (("virtual", "virtual stage"),) if chunks > 1 else ()
    tips = tip(
        ("kind", "action"),
        ("stage", "stage"),
        *virtual,
        ("mb", "microbatch"),
        ("from", "from"),
        ("to", "to"),
        ("takes", "takes"),
    )
    colour = {"field": "kind", "type": "nominal",
              "scale": {"domain": kinds, "range": [KIND_COLOURS.get(kind, GREY) for kind in kinds]}}  # fmt: skip
    opacity = {"field": "chunk", "type": "quantitative", "legend": None,
               "scale": {"domain": [-1, max(chunks - 1, 1)], "range": [1, 0.5 if chunks > 1 else 1]}}  # fmt: skip
    y = {"field": "stage", "type": "ordinal", "title": "pipeline stage", "scale": {"paddingInner": 0.12},
         "axis": {"ticks": False, "domain": False, "labelOverlap": True}}  # fmt: skip
    detail = {
        "width": WIDTH, "height": height, "transform": [
            {"filter": "!isDefined(window.start_s) || (datum.end_s >= window.start_s[0] && datum.start_s <= window.start_s[1])"},
            *texts],
        "mark": {"type": "rect", "clip": True},
        "encoding": {
            "x": {"field": "start_s", "type": "quantitative", "axis": _seconds_axis("time in the step", step),
                  "scale": {"domain": {"param": "window"}, "nice": False}},
            "x2": {"field": "end_s"}, "y": y, "color": colour, "opacity": opacity, "tooltip": tips,
        },
    }  # fmt: skip
    overview = {
        "width": WIDTH, "height": max(28, min(64, 4 * ranks)),
        "params": [{"name": "window", "select": {"type": "interval", "encodings": ["x"], "mark": {
                        "fill": "currentColor", "fillOpacity": 0.12, "stroke": RED, "strokeWidth": 2, "strokeOpacity": 1}},
                    "value": {"x": [0, float(facts["window_s"])]}}],
        "mark": {"type": "rect", "clip": True},
        "encoding": {
            "x": {"field": "start_s", "type": "quantitative", "scale": {"domain": [0, step], "nice": False},
                  "axis": _seconds_axis("the whole step: drag to move or to draw the window above", step)},
            "x2": {"field": "end_s"},
            "y": {"field": "stage", "type": "ordinal", "axis": None}, "color": colour, "opacity": opacity,
        },
    }  # fmt: skip
    return {"vconcat": [detail, overview], "resolve": {"scale": {"color": "shared"}}}


def _heatmap(chart: Chart) -> Spec:
    x = {
        "field": "tp",
        "type": "ordinal",
        "title": "tensor parallel",
        "axis": {"labelAngle": 0, "orient": "top", "domain": False, "ticks": False},
    }
    y = {"field": "pp", "type": "ordinal", "title": "pipeline parallel", "axis": {"domain": False, "ticks": False}}
    tips = tip(("tp_text", "tensor parallel"), ("pp_text", "pipeline parallel"), ("step_s_text", "best step time"),
               ("behind_text", "behind the best"), ("why", "why not"), ("layout", "layout"))  # fmt: skip
    return {
        "width": {"step": 84}, "height": {"step": 44},
        "layer": [
            {"transform": [{"filter": "datum.state == 'fits'"}, {"calculate": "log(1 + datum.behind)", "as": "distance"}],
             "mark": {"type": "rect", "cornerRadius": 3, "color": TEAL},
             "encoding": {"x": x, "y": y, "tooltip": tips, "opacity": {
                 "field": "distance", "type": "quantitative", "scale": {"domain": [0, 0.7], "range": [0.95, 0.12], "clamp": True},
                 "legend": None}}},
            {"transform": [{"filter": "datum.state != 'fits'"}],
             "mark": {"type": "rect", "cornerRadius": 3, "color": RED, "opacity": 0.14},
             "encoding": {"x": x, "y": y, "tooltip": tips}},
            {"transform": [{"filter": "datum.plan"}],
             "mark": {"type": "rect", "cornerRadius": 3, "filled": False, "stroke": "currentColor", "strokeWidth": 2.5},
             "encoding": {"x": x, "y": y, "tooltip": tips}},
            {"transform": [{"filter": "datum.state == 'fits'"}],
             "mark": {"type": "text", "fontSize": 13, "fontWeight": "bold", "tooltip": None},
             "encoding": {"x": x, "y": y, "text": {"field": "label"}}},
            {"transform": [{"filter": "datum.state != 'fits'"}],
             "mark": {"type": "text", "fontSize": 11, "lineBreak": "\n", "dy": -6, "opacity": 0.85, "limit": 82},
             "encoding": {"x": x, "y": y, "text": {"field": "label"}}},
        ],
    }  # fmt: skip


def _pareto(chart: Chart) -> Spec:
    limit = float(chart.facts["limit_gib"])
    groups = {"this plan": RED, "front": TEAL, "fits": BLUE, UNSAFE: GREY}
    y = {
        "field": "rate",
        "type": "quantitative",
        "title": "tokens/s/GPU",
        "scale": {"zero": False, "nice": True},
        "axis": {"tickCount": 6},
    }
    x = {
        "field": "memory_gib",
        "type": "quantitative",
        "title": "memory of the worst stage, GiB",
        "scale": {"zero": False, "nice": True},
        "axis": {"grid": False},
    }
    tips = tip(("layout", "layout"), ("rate_text", "tokens/s/GPU"), ("step_s_text", "step"), ("memory_gib_text", "memory"),
               ("chance_text", "runs out of memory"), ("group", "which"))  # fmt: skip

    def points(group: str, mark: Spec) -> Spec:
        return {"transform": [{"filter": f"datum.group == '{group}'"}], "mark": {"type": "point", "filled": True, **mark},
                "encoding": {"x": x, "y": y, "tooltip": tips, "color": {
                    "field": "group", "type": "nominal",
                    "scale": {"domain": list(groups), "range": list(groups.values())}}}}  # fmt: skip

    return {
        "width": WIDTH, "height": 360,
        "layer": [
            {"data": {"values": [{}]}, "mark": {"type": "rule", "strokeWidth": 2, "color": RED},
             "encoding": {"x": {"datum": limit, "type": "quantitative"}}},
            {"data": {"values": [{}]},
             "mark": {"type": "text", "align": "left", "dx": 5, "baseline": "top", "fontWeight": "bold", "color": RED},
             "encoding": {"x": {"datum": limit, "type": "quantitative"}, "y": {"value": 4},
                          "text": {"value": f"usable: {limit:.1f} GiB"}}},
            points(UNSAFE, {"size": 14, "opacity": 0.5, "shape": "cross"}),
            points("fits", {"size": 18, "opacity": 0.45}),
            {"transform": [{"filter": "datum.group == 'front' || (datum.group == 'this plan')"}],
             "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5, "color": TEAL},
             "encoding": {"x": x, "y": y}},
            points("front", {"size": 55, "opacity": 1}),
            points("this plan", {"size": 190, "opacity": 1, "shape": "diamond"}),
        ],
    }  # fmt: skip


def _scaling(chart: Chart) -> Spec:
    counts = sorted({int(row[1]) for row in chart.rows if isinstance(row[1], (int, float))})
    kinds = {"strong": BLUE, "weak": ORANGE}
    x = {"field": "gpus", "type": "quantitative", "title": "GPUs",
         "scale": {"type": "log", "base": 2, "domain": [counts[0], counts[-1]], "nice": False, "padding": 14},
         "axis": {"values": counts, "format": ",d", "grid": False, "labelOverlap": True}}  # fmt: skip
    y = {"field": "rate", "type": "quantitative", "title": "tokens/s/GPU", "scale": {"zero": True}}
    colour = {"field": "kind", "type": "nominal", "scale": {"domain": list(kinds), "range": list(kinds.values())}}
    tips = tip(("gpus_text", "GPUs"), ("kind", "batch"), ("sequences_text", "sequences per step"), ("rate_text", "tokens/s/GPU"),
               ("efficiency_text", "efficiency"), ("total_rate_text", "tokens/s"), ("step_s_text", "step"),
               ("mfu_text", "MFU"), ("memory_gib_text", "memory"), ("layout", "best layout"))  # fmt: skip
    missing = tip(("gpus_text", "GPUs"), ("kind", "batch"), ("why", "why not"))
    return {
        "width": WIDTH, "height": 260,
        "layer": [
            {"data": {"values": [{}]}, "mark": {"type": "rule", "strokeDash": [4, 4], "opacity": 0.6},
             "encoding": {"x": {"datum": chart.facts["gpus"], "type": "quantitative"}}},
            {"data": {"values": [{}]}, "mark": {"type": "text", "align": "left", "dx": 5, "baseline": "top", "opacity": 0.8},
             "encoding": {"x": {"datum": chart.facts["gpus"], "type": "quantitative"}, "y": {"value": 2},
                          "text": {"value": "this plan"}}},
            {"transform": [{"filter": "isValid(datum.rate)"}], "mark": {"type": "line", "strokeWidth": 2},
             "encoding": {"x": x, "y": y, "color": colour}},
            {"transform": [{"filter": "isValid(datum.rate)"}], "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
             "encoding": {"x": x, "y": y, "color": colour, "tooltip": tips}},
            {"transform": [{"filter": "!isValid(datum.rate) && datum.kind == 'strong'"}],
             "mark": {"type": "text", "text": "does not fit", "angle": 270, "align": "left", "dx": 4, "color": RED},
             "encoding": {"x": x, "y": {"datum": 0}, "tooltip": missing}},
        ],
    }  # fmt: skip


def _sensitivity(chart: Chart) -> Spec:
    names = list(dict.fromkeys(str(row[0]) for row in chart.rows))
    changes = [float(row[4] or 0) for row in chart.rows]
    low, high = min([*changes, -0.02]), max([*changes, 0.02])
    span = high - low
    x = {"field": "change", "type": "quantitative", "title": "change of the step time",
         "scale": {"domain": [low - 0.26 * span, high + 0.22 * span], "nice": False},
         "axis": {"format": "+.0%", "tickCount": 6}}  # fmt: skip
    y = {"field": "what", "type": "nominal", "sort": names, "title": None, "axis": {"domain": False, "ticks": False},
         "scale": {"paddingInner": 0.25}}  # fmt: skip
    tips = tip(("what", "number"), ("origin", "known from"), ("factor", "if it were"), ("step_s_text", "step"),
               ("change_text", "change"), ("flip", "choice changes at"), ("winner", "to"), ("measure", "measured by"))  # fmt: skip
    named = [{"calculate": "datum.less ? 'less' : 'more'", "as": "way"}]
    colour = {"field": "way", "type": "nominal", "scale": {"domain": ["less", "more"], "range": [ORANGE, BLUE]},
              "legend": {"labelExpr": "datum.label == 'less' ? 'if it is less' : 'if it is more'"}}  # fmt: skip
    offset = {"field": "way", "type": "nominal", "sort": ["less", "more"]}
    return {
        "width": WIDTH, "height": 34 * len(names),
        "layer": [
            {"transform": named, "mark": {"type": "bar", "minBandSize": 5},
             "encoding": {"x": x, "y": y, "yOffset": offset, "color": colour, "tooltip": tips}},
            *(
                {"name": f"wide_{align}", "transform": [*named, {"filter": f"datum.change {sign} 0"},
                               {"calculate": "datum.factor + ': ' + datum.change_text + (datum.fits ? '' : ', does not fit')",
                                "as": "both"}],
                 "mark": {"type": "text", "fontSize": 11, "align": align, "dx": dx},
                 "encoding": {"x": x, "y": y, "yOffset": offset, "text": {"field": "both"}}}
                for sign, align, dx in ((">=", "left", 4), ("<", "right", -4))
            ),
            {"data": {"values": [{}]}, "mark": {"type": "rule", "opacity": 0.6},
             "encoding": {"x": {"datum": 0, "type": "quantitative"}}},
        ],
    }  # fmt: skip


def _accuracy(chart: Chart) -> Spec:
    names = list(dict.fromkeys(str(row[0]) for row in chart.rows))
    errors = [abs(float(row[1] or 0)) for row in chart.rows]
    reach = min(max(0.2, max(errors) * 1.05), 1.0)
    x = {"field": "error", "type": "quantitative", "title": "predicted / measured - 1 of the step time",
         "scale": {"domain": [-reach, reach], "clamp": True, "nice": False},
         "axis": {"format": "+.0%", "tickCount": 7}}  # fmt: skip
    y = {"field": "source", "type": "nominal", "sort": names, "title": None, "axis": {"domain": False, "ticks": False}}
    return {
        "width": WIDTH, "height": 24 * len(names),
        "layer": [
            {"data": {"values": [{}]}, "mark": {"type": "rect", "color": GREEN, "opacity": 0.13},
             "encoding": {"x": {"datum": -0.1, "type": "quantitative"}, "x2": {"datum": 0.1}}},
            {"data": {"values": [{}]}, "mark": {"type": "rule", "opacity": 0.6},
             "encoding": {"x": {"datum": 0, "type": "quantitative"}}},
            {"transform": [{"calculate": "format(datum.error, '+.1%')", "as": "text"}],
             "mark": {"type": "tick", "thickness": 2, "color": BLUE, "opacity": 0.6, "size": 16},
             "encoding": {"x": x, "y": y, "tooltip": tip(("source", "source"), ("text", "error"))}},
            {"transform": [{"aggregate": [{"op": "median", "field": "error", "as": "middle"},
                                          {"op": "count", "as": "runs"}], "groupby": ["source"]},
                           {"calculate": "format(datum.middle, '+.1%')", "as": "text"}],
             "mark": {"type": "point", "filled": True, "shape": "diamond", "size": 90, "color": RED, "opacity": 1},
             "encoding": {"x": {"field": "middle", "type": "quantitative"}, "y": y,
                          "tooltip": tip(("source", "source"), ("text", "median"), ("runs", "runs"))}},
        ],
    }  # fmt: skip


_SPECS: dict[str, Callable[[Chart], Spec]] = {
    "waterfall": _waterfall, "memory": _memory, "memory-timeline": _memory_timeline, "pipeline": _pipeline,
    "heatmap": _heatmap, "pareto": _pareto, "scaling": _scaling, "sensitivity": _sensitivity,
    "accuracy": _accuracy,
}  # fmt: skip
CHARTS = tuple(_SPECS)
"""Names of the charts, in the order of the page."""


__all__ = ["CHARTS", "WIDTH", "data", "drawing", "filled", "on_canvas"]
