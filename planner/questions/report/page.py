"""The report as one HTML page that needs nothing else, text, tables and charts with their numbers inside; one chart as a PNG."""

import base64
import html
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from planner import library
from planner.errors import PlannerError
from planner.questions.report.document import TABLE_ROWS, Chart, Document, Value, shown
from planner.units import format_count

MISSING = "pages and charts need vl-convert-python: pip install vl-convert-python"
LONG = 24
"""Characters of a cell from which its column is kept wide."""
SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""What the page takes from the drawing library."""
SCALE = 2.0
"""Pixels of the picture for one of the specification."""
FEW_TEXTS = 4000
"""Up to this many rows each number comes with its text for people; of more, tooltips format the number themselves."""
CANVAS = 2500
"""Rows from which a chart is drawn on a canvas: so many elements make a page slow."""


def libraries() -> Any:
    """The library that draws. Raises PlannerError when it or the one for templates is not installed."""
    try:
        import jinja2  # noqa: F401
        import vl_convert
    except ImportError as error:
        raise PlannerError(MISSING) from error
    return vl_convert


def start_library() -> Callable[[], str]:
    """Begin to put the drawing library together, which takes seconds, in a thread; the result is asked for later.

    Vega, Vega-Lite and vega-embed in one text, from inside vl-convert-python: no network. It is kept in the user's cache
    directory by version. Raises PlannerError when a library is not installed.
    """
    drawn_by = libraries()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "planner"
    file = cache / f"vega-embed-{metadata.version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        known = file.read_text(encoding="utf-8")
        return lambda: known
    pool = ThreadPoolExecutor(max_workers=1)
    found: Future[str] = pool.submit(lambda: str(drawn_by.javascript_bundle(SNIPPET)))
    pool.shutdown(wait=False)

    def result() -> str:
        with suppress(OSError, PlannerError):  # no home, no space: the next report takes as long as this one
            cache.mkdir(parents=True, exist_ok=True)
            library.write_whole(file, found.result())
        return found.result()

    return result


def page(document: Document, code: str) -> str:
    """The page. ``code`` is the text of the drawing library."""
    from markupsafe import Markup

    drawn = {
        one.name: {"spec": specification(one), "data": data(one), "canvas": len(one.rows) > CANVAS}
        for one in document.charts
    }
    tables = {one.name: _table(one) for one in (*document.charts, document.alternatives)}
    mine = next((number for number, row in enumerate(document.alternatives.rows) if "this plan" in str(row[0])), None)
    return _template("page.html.j2", autoescape=True).render(
        doc=document, tables=tables, mine=mine, most_rows=TABLE_ROWS, tied=_tied, left_out=document.left_out,
        tokens=format_count(float(document.rates.get("tokens") or 0.0)),
        ticked=lambda text: Markup(_ticked(text)),
        assumed=[[one["what"], one["value"], one["why"], one["flag"]] for one in document.assumptions],
        rates=[[one["what"], one["value"], one["source"], one["date"]] for one in document.basis],
        files=_files(document), code=Markup(_script(code)), charts=Markup(_json(drawn)), budget=Markup(_json(dict(document.rates))),
    )  # fmt: skip


def _files(document: Document) -> list[tuple[str, str]]:
    """Files that the page holds: name and data URL, which a browser saves without a script."""
    plan, name = dict(document.plan), document.file
    texts = {name: library.dump_yaml(plan), f"{Path(name).stem}.json": json.dumps(plan, indent=1) + "\n"}
    return [
        (name, f"data:application/octet-stream;base64,{base64.b64encode(text.encode()).decode('ascii')}")
        for name, text in texts.items()
    ]  # fmt: skip


def _template(name: str, **options: Any) -> Any:
    """A file of this folder as a template."""
    import jinja2

    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return jinja2.Environment(**options, undefined=jinja2.StrictUndefined).from_string(text)


@cache
def _drawings() -> Any:
    """The macros of charts.yaml.j2."""
    return _template("charts.yaml.j2", trim_blocks=True, lstrip_blocks=True).module


def specification(chart: Chart) -> dict[str, Any]:
    """The Vega-Lite specification of a chart, without its rows."""
    drawings = _drawings()
    body = getattr(drawings, chart.name.replace("-", "_"))(chart)
    return {**yaml.safe_load(drawings.shared() + body), "description": f"{chart.title}. {chart.reading}"}


def data(chart: Chart) -> dict[str, Any]:
    """The rows that the specification draws, as columns; with the text of every number where there are few."""
    columns = [column.key for column in chart.columns]
    rows: list[list[Value]] = [list(row) for row in chart.rows]
    if len(rows) <= FEW_TEXTS:
        texted = [(at, column) for at, column in enumerate(chart.columns) if column.kind not in ("text", "flag")]
        columns += [f"{column.key}_text" for _, column in texted]
        rows = [[*row, *(shown(row[at], column.kind) for at, column in texted)] for row in rows]
    return {"columns": columns, "rows": rows}


def filled(chart: Chart) -> dict[str, Any]:
    """The specification with its rows: what a renderer outside the page draws."""
    table = data(chart)
    records = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return {**specification(chart), "datasets": {"rows": records}}


def _table(chart: Chart) -> tuple[list[str], list[list[str]], list[str]]:
    """Headings, cells and the class of each column; columns without any value are left out."""
    columns, cells = chart.cells()
    words = ["long" if any(len(row[at]) > LONG for row in cells) else "text" for at in range(len(columns))]
    kinds = ["number" if one.kind not in ("text", "flag") else word for one, word in zip(columns, words, strict=True)]
    return [column.title for column in columns], cells, kinds


def _ticked(text: str) -> str:
    """Text as HTML, what stands between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _tied(text: str) -> str:
    """Text whose numbers are not parted from their units at the end of a line."""
    return re.sub(r"(\d) (s|ms|GiB|%|USD|days)\b", "\\1\u00a0\\2", text)


def _script(code: str) -> str:
    """JavaScript that cannot end its script element early."""
    return re.sub(r"(?i)</(?=script)|<(?=!--)", lambda found: "<\\/" if found[0] == "</" else "\\x3c", code)


def _json(value: object) -> str:
    """JSON for a script element: no character of it can end the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def picture(document: Document, name: str) -> bytes:
    """The PNG of one chart, on white, with its title. Raises PlannerError when a library is not installed."""
    one = document.chart(name)
    titled = {"text": f"{document.title}: {one.title}", "anchor": "start", "fontSize": 14, "color": "#1c2127"}
    spec = {**filled(one), "background": "white", "padding": 14, "title": titled}
    return bytes(libraries().vegalite_to_png(spec, scale=SCALE))
