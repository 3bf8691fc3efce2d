"""One chart of the report as a PNG: the specification that the page draws, drawn without a browser."""

from __future__ import annotations

from typing import Any

from planner.errors import PlannerError
from planner.questions.report import specs
from planner.questions.report.document import Document
from planner.questions.report.page import MISSING

SCALE = 2.0
"""Pixels of the picture for one of the specification."""


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
