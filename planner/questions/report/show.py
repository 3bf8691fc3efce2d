"""A plan as a page, Markdown, JSON, a trace or a picture: which of them, and its text."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.plan_file import Plan
    from planner.questions.report.document import Document
    from planner.questions.report.subject import Spending

FORMATS = {
    "html": (".html", ".htm"), "trace": (".trace.json",), "markdown": (".md", ".markdown"), "json": (".json",), "png": (".png",),
}  # fmt: skip
"""Formats and the endings that mean them; the first that fits counts, as a trace is JSON as well."""
CHARTS = {
    "plan": (
        "waterfall", "operators", "memory", "memory-timeline", "pipeline", "heatmap", "pareto", "scaling", "sensitivity",
        "accuracy",
    ),
    "serve plan": ("serve-front", "serve-load", "serve-step", "serve-memory"),
    "mixed plan": ("mixed-cluster", "mixed-layers", "mixed-time", "mixed-lost", "mixed-pipeline", "mixed-memory", "mixed-sites"),
    "RL plan": ("rl-steps", "rl-phases", "rl-memory"),
}  # fmt: skip
"""Charts by kind of plan."""
EVERY_CHART = tuple(name for names in CHARTS.values() for name in names)


def format_of(kind: str | None, output: Path | None, chart: str | None) -> str:
    """What to write: as said, by the ending of the file, or the page. Raises PlannerError for what does not go together."""
    kind = kind or _by_ending(output, chart)
    if kind not in FORMATS:
        raise PlannerError(f"unknown format '{kind}'; known: {', '.join(FORMATS)}")
    if chart is not None and kind != "png":
        raise PlannerError(f"--chart draws one picture: it goes with --format png, not with {kind}")
    if kind == "png" and chart not in EVERY_CHART:
        known = "; ".join(f"of a {of} {', '.join(names)}".replace("a RL", "an RL") for of, names in CHARTS.items())
        raise PlannerError(f"which chart? give --chart: {known}")
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


def write_report(
    path: str | PathLike[str] | None, form: tuple[str | None, str | None], made: Callable[[str], str | bytes]
) -> str | bytes:
    """What ``made`` gives for the format, written to ``path`` where one is given; ``form``: format and chart as they were said."""
    from planner import library

    output = None if path is None else Path(path)
    found = made(format_of(form[0], output, form[1]))
    if output is not None:
        library.write_whole(output, found)
    return found


def written(
    of: str, form: tuple[str, str | None], build: Callable[[], Document], progress: Callable[[str], None],
    trace: Callable[[], str] | None = None,
) -> str | bytes:  # fmt: skip
    """The document that ``build`` makes, of a kind of plan of CHARTS, in a format with the name of a chart for a picture.

    ``trace``: the text of its trace, where it has one. Raises PlannerError for a format or a chart that the kind does not have.
    """
    from planner.questions.report.markdown import markdown
    from planner.questions.report.page import libraries, page, picture, start_library

    (kind, name), known = form, tuple(one for one in FORMATS if one != "trace" or trace is not None)
    article = "an" if of.startswith("RL") else "a"
    if kind not in known:
        raise PlannerError(f"{article} {of} has no {kind}; formats: {', '.join(known)}")
    if name is not None and name not in CHARTS[of]:
        raise PlannerError(f"{article} {of} has no chart {name}; charts: {', '.join(CHARTS[of])}")
    if kind == "trace":
        assert trace is not None
        return trace()
    if kind == "png":
        libraries()
    code = start_library() if kind == "html" else None
    document = build()
    if code is not None:
        progress("writing the page")
        return page(document, code())
    if name is not None:
        if name not in [one.name for one in document.charts]:
            raise PlannerError(f"{name} has nothing to draw for this plan")
        progress("drawing")
        return picture(document, name)
    return (
        markdown(document) if kind == "markdown" else json.dumps(document.to_dict(), indent=2, allow_nan=False) + "\n"
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

    def trace() -> str:
        from planner.questions.report.trace import trace_of
        from planner.rules import check
        from planner.timeline.priced_plan import job_of, price

        job = job_of(plan)
        check(job, plan.layout)
        return trace_of(price(job, plan.layout))

    def document() -> Document:
        from planner.questions.report.build import build
        from planner.questions.report.scaling import scaled

        with scaled(plan, processes) if chart in (None, "scaling") else nullcontext() as sizes:
            return build(plan, sizes, progress, spending)

    return written("plan", (kind, chart), document, progress, trace)
