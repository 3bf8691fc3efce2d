"""A plan as a page, Markdown, JSON, a trace or a picture: which of them, and its text."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.plan_file import Plan
    from planner.questions.report.subject import Spending

FORMATS = {
    "html": (".html", ".htm"), "trace": (".trace.json",), "markdown": (".md", ".markdown"), "json": (".json",), "png": (".png",),
}  # fmt: skip
"""Formats and the endings that mean them; the first that fits counts, as a trace is JSON as well."""
CHARTS = (
    "waterfall", "operators", "memory", "memory-timeline", "pipeline", "heatmap", "pareto", "scaling", "sensitivity", "accuracy",
)  # fmt: skip


SERVING_CHARTS = ("serve-front", "serve-load", "serve-step", "serve-memory")
"""Of a serve plan."""


def format_of(kind: str | None, output: Path | None, chart: str | None) -> str:
    """What to write: as said, by the ending of the file, or the page. Raises PlannerError for what does not go together."""
    kind = kind or _by_ending(output, chart)
    if kind not in FORMATS:
        raise PlannerError(f"unknown format '{kind}'; known: {', '.join(FORMATS)}")
    if chart is not None and kind != "png":
        raise PlannerError(f"--chart draws one picture: it goes with --format png, not with {kind}")
    if kind == "png" and chart not in (*CHARTS, *SERVING_CHARTS):
        raise PlannerError(
            f"which chart? give --chart with one of {', '.join(CHARTS)}; of a serve plan {', '.join(SERVING_CHARTS)}"
        )
    return kind


def _by_ending(output: Path | None, chart: str | None) -> str:
    if output is None:
        return "html" if chart is None else "png"
    for known, endings in FORMATS.items():
        if output.name.lower().endswith(endings):
            return known
    raise PlannerError(
        f"{output}: the ending does not say what to write; end it in .html, .md, .json or .png, or give --format"
    )


def report_of(
    plan: Plan,
    kind: str,
    chart: str | None,
    processes: int,
    progress: Callable[[str], None],
    spending: Spending | None = None,
) -> str | bytes:
    """The report of a plan in one of FORMATS, ``chart`` for a picture; ``processes`` search other sizes of the cluster;
    ``spending``: tokens and price of its costs.

    The plan is priced again, with its profile and trainer as they are now. Raises PlannerError.
    """
    if kind == "trace":
        from planner.questions.report.trace import trace_of
        from planner.rules import check
        from planner.timeline.priced_plan import job_of, price

        job = job_of(plan)
        check(job, plan.layout)
        return trace_of(price(job, plan.layout))
    from planner.questions.report.build import build
    from planner.questions.report.markdown import markdown
    from planner.questions.report.page import libraries, page, picture, start_library
    from planner.questions.report.scaling import scaled

    if chart is not None:
        if chart not in CHARTS:
            raise PlannerError(f"{chart} is a chart of a serve plan; of this one: {', '.join(CHARTS)}")
        libraries()
    with scaled(plan, processes) if chart in (None, "scaling") else nullcontext() as sizes:
        code = start_library() if kind == "html" else None
        document = build(plan, sizes, progress, spending)
        if code is not None:
            progress("writing the page")
            return page(document, code())
    if chart is not None:
        progress("drawing")
        return picture(document, chart)
    return (
        markdown(document) if kind == "markdown" else json.dumps(document.to_dict(), indent=2, allow_nan=False) + "\n"
    )
