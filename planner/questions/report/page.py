"""The report as one HTML page that needs nothing else, text, tables and charts with their numbers inside; one chart as a PNG."""

import hashlib
import html
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from planner import library
from planner.costs import LEFT_OUT
from planner.errors import PlannerError
from planner.questions.report import specs
from planner.questions.report.document import TABLE_ROWS, Chart, Document

MISSING = "reports need jinja2 and vl-convert-python: pip install 'planner[report]'"
LONG = 24
"""Characters of a cell from which its column is kept wide."""
SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""What the page takes from the drawing library."""
SCALE = 2.0
"""Pixels of the picture for one of the specification."""
TEMPLATE = Path(__file__).with_name("page.html.j2")


def start_library() -> Callable[[], str]:
    """Begin to put the drawing library together, which takes seconds, in a thread; the result is asked for later.

    Vega, Vega-Lite and vega-embed in one text, from inside vl-convert-python: no network. It is kept in the user's cache
    directory by version. Raises PlannerError when vl-convert-python is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import vl_convert
    except ImportError as error:
        raise PlannerError(MISSING) from error
    file = _cache() / f"vega-{metadata.version('vl-convert-python')}.js"
    known = kept(file)
    if known is not None:
        return lambda: known
    pool = ThreadPoolExecutor(max_workers=1)
    found: Future[str] = pool.submit(lambda: str(vl_convert.javascript_bundle(SNIPPET)))
    pool.shutdown(wait=False)

    def result() -> str:
        text = found.result()
        with suppress(OSError, PlannerError):  # no home, no space: the next report takes as long as this one
            file.parent.mkdir(parents=True, exist_ok=True)
            library.write_whole(file, f"{_digest(text)}\n{text}")
        return text

    return result


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "planner"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def kept(path: Path) -> str | None:
    """The text of a cache file; None where there is none, or it is not what was written."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if _digest(text) == digest else None


def page(document: Document, code: str) -> str:
    """The page. ``code`` is the text of the drawing library."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=False, undefined=jinja2.StrictUndefined)
    drawn = {
        one.name: {"spec": specs.drawing(one), "data": specs.data(one), "canvas": specs.on_canvas(one)}
        for one in document.charts
    }
    tables = {one.name: _table(one) for one in (*document.charts, document.alternatives)}
    mine = next((number for number, row in enumerate(document.alternatives.rows) if "this plan" in str(row[0])), None)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        doc=document, tables=tables, mine=mine, summaries={one.name: _summary(one) for one in document.charts},
        tied=_tied, ticked=lambda text: Markup(_ticked(text)), left_out="; ".join(LEFT_OUT),
        assumed=[[one["what"], one["value"], one["why"], one["flag"]] for one in document.assumptions],
        rates=[[one["what"], one["value"], one["source"], one["date"]] for one in document.basis],
        code=Markup(_script(code)), charts=Markup(_json(drawn)),
    )  # fmt: skip


def _table(chart: Chart) -> tuple[list[str], list[list[str]], list[str]]:
    """Headings, cells and the class of each column; columns without any value are left out."""
    columns, cells = chart.filled_cells()
    words = ["long" if any(len(row[at]) > LONG for row in cells) else "text" for at in range(len(columns))]
    kinds = ["number" if one.kind not in ("text", "flag") else word for one, word in zip(columns, words, strict=True)]
    return [column.title for column in columns], cells, kinds


def _summary(chart: Chart) -> str:
    rows = len(chart.table_rows)
    some = (
        f"{rows:,} row{'' if rows == 1 else 's'}" if rows <= TABLE_ROWS else f"the first {TABLE_ROWS} of {rows:,} rows"
    )
    return f"The numbers ({some})"


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


def drawn_by() -> Any:
    """The library that draws pictures. Raises PlannerError when it is not installed."""
    try:
        import vl_convert
    except ImportError as error:
        raise PlannerError(MISSING) from error
    return vl_convert


def picture(document: Document, name: str) -> bytes:
    """The PNG of one chart, on white, with its title. Raises PlannerError when vl-convert-python is not installed."""
    one = document.chart(name)
    titled = {"text": f"{document.title}: {one.title}", "anchor": "start", "fontSize": 14, "color": "#1c2127"}
    spec = {**specs.filled(one), "background": "white", "padding": 14, "title": titled}
    return bytes(drawn_by().vegalite_to_png(spec, scale=SCALE))
