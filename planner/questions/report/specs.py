"""Charts as Vega-Lite specifications: one description for the page and for pictures, and the few words that make it.

A specification names its data ``rows``; the page and the picture fill in the rows of the document. Colours are of a middle
brightness, text and axes are ``currentColor``: both hold on a light and on a dark ground.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.questions.report.document import Chart, Spec, Value, shown

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
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
BARE = {"domain": False, "ticks": False}
"""An axis of names alone."""
BOLD_RED = {"fontWeight": "bold", "color": RED}

# ------------------------------------------------------------------------------------------------ the whole chart


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
    assert chart.spec is not None
    return {
        "$schema": SCHEMA, "description": f"{chart.title}. {chart.reading}", "data": {"name": "rows"},
        "autosize": {"type": "pad", "contains": "padding"}, "config": config(), "background": None, **chart.spec(chart),
    }  # fmt: skip


def data(chart: Chart) -> dict[str, Any]:
    """The rows that the specification draws, as columns; with the text of every number where there are few."""
    columns = [column.key for column in chart.columns]
    rows: list[list[Value]] = [list(row) for row in (*chart.rows, *chart.more_rows)]
    if len(rows) <= FEW_TEXTS and chart.with_texts:
        texted = [(at, column) for at, column in enumerate(chart.columns) if column.kind not in ("text", "flag")]
        columns += [f"{column.key}_text" for _, column in texted]
        rows = [[*row, *(shown(row[at], column.kind) for at, column in texted)] for row in rows]
    return {"columns": columns, "rows": rows}


def filled(chart: Chart) -> Spec:
    """The specification with its rows: what a renderer outside the page draws."""
    table = data(chart)
    records = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return {**drawing(chart), "datasets": {"rows": records}}


def on_canvas(chart: Chart) -> bool:
    """So many marks that the page draws them on a canvas."""
    return len(chart.rows) > CANVAS


# ------------------------------------------------------------------------------------------------ its words


def number(field: str, title: str | None = "", **more: Any) -> Spec:
    """A channel that shows a quantity; '' = Vega-Lite's own title."""
    return _channel(field, "quantitative", title, more)


def name(field: str, title: str | None = "", **more: Any) -> Spec:
    """A channel that shows names in no order of their own."""
    return _channel(field, "nominal", title, more)


def step(field: str, title: str | None = "", **more: Any) -> Spec:
    """A channel that shows ordered steps: stages, degrees."""
    return _channel(field, "ordinal", title, more)


def _channel(field: str, kind: str, title: str | None, more: Mapping[str, Any]) -> Spec:
    return {"field": field, "type": kind, **({} if title == "" else {"title": title}), **more}


def hue(field: str, colours: Mapping[str, str], **more: Any) -> Spec:
    """A channel that colours each name."""
    return name(field, scale={"domain": list(colours), "range": list(colours.values())}, **more)


def at(value: Any) -> Spec:
    """A channel that stands at one number of its axis."""
    return {"datum": value, "type": "quantitative"}


def span(low: float, high: float, **more: Any) -> Spec:
    """A scale between two numbers, as they are."""
    return {"domain": [low, high], "nice": False, **more}


def tip(**fields: str) -> list[Spec]:
    """Tooltip of fields with their titles."""
    return [name(field, title) for field, title in fields.items()]


def layer(
    mark: str,
    style: Spec | None = None,
    steps: Sequence[str | Mapping[str, str]] = (),
    alone: bool = False,
    **encoding: Any,
) -> Spec:
    """One mark for each row: ``steps`` are filters (text) and new fields (name: expression); ``alone``: one mark, no rows."""
    made: Spec = {"mark": {"type": mark, **(style or {})}, "encoding": encoding}
    if alone:
        made["data"] = {"values": [{}]}
    if steps:
        made["transform"] = transforms(steps)
    return made


def transforms(steps: Sequence[str | Mapping[str, str]]) -> list[Spec]:
    """Filters and new fields as Vega-Lite has them."""
    found: list[Spec] = []
    for one in steps:
        if isinstance(one, str):
            found.append({"filter": one})
        else:
            found += [{"calculate": expression, "as": field} for field, expression in one.items()]
    return found


def seconds_axis(title: str, end: float) -> Spec:
    """An axis of time up to ``end`` seconds, in s or ms."""
    unit, factor = ("s", "") if end >= 1 else ("ms", " * 1000")
    return {"title": f"{title}, {unit}", "labelExpr": f"format(datum.value{factor}, '~g')", "tickCount": 6}


def limit_rule(limit: float) -> list[Spec]:
    """A line at what the card has, and its name above the picture, where no bar lies behind it."""
    words = {"align": "right", "baseline": "bottom", "dy": -5, **BOLD_RED}
    text = {"value": f"red line: {limit:.1f} GiB usable"}
    return [
        layer("rule", {"strokeWidth": 2, "color": RED}, alone=True, y=at(limit)),
        layer("text", words, alone=True, y={"value": 0}, x={"value": "width"}, text=text),
    ]
