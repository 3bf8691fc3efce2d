"""``plan report``: a plan as a page, Markdown, JSON, a trace or pictures."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.errors import PlannerError
from planner.terminal.flags import progress

if TYPE_CHECKING:
    from planner.plan_file import Plan

FORMATS = {
    "html": (".html", ".htm"), "trace": (), "markdown": (".md", ".markdown"), "json": (".json",), "png": (".png",),
}  # fmt: skip
"""Formats and the endings that mean them; a trace is JSON as well and must be asked for (or end in .trace.json)."""
CHARTS = (
    "waterfall", "memory", "memory-timeline", "pipeline", "heatmap", "pareto", "scaling", "sensitivity", "accuracy",
)  # fmt: skip


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [PLAN with .html; text: stdout]"
)
@click.option("--format", "kind", type=click.Choice(list(FORMATS)), help="What to write. [by the ending of --output]")
@click.option("--chart", type=click.Choice(CHARTS), help="Which chart, for --format png.")
def report(file: Path, output: Path | None, kind: str | None, chart: str | None) -> None:
    """Show a plan to people: where time and memory go, what else there was, what it hangs on.

    PLAN is a plan file of --output. It is priced again, with its profile and trainer as they are now, also when it does not fit.

    \b
    html      one page with everything: no network, light and dark, for print as well
    markdown  the same numbers for an issue or a wiki
    json      the same numbers for programs
    png       one chart: --chart waterfall, memory, memory-timeline, pipeline, heatmap, pareto, scaling, sensitivity, accuracy
    trace     the predicted step for Perfetto or chrome://tracing

    \b
    Examples:
      plan report plan.yaml --output report.html
      plan report plan.yaml --format markdown
      plan report plan.yaml --chart memory --output memory.png
      plan report plan.yaml --format trace --output step.trace.json
    """
    kind = _format(kind, output, chart)
    if chart is not None and kind != "png":
        raise PlannerError(f"--chart draws one picture: it goes with --format png, not with {kind}")
    if kind == "png" and chart is None:
        raise PlannerError(f"which chart? give --chart with one of {', '.join(CHARTS)}")
    if output is None and kind in ("html", "png"):
        output = file.with_suffix(".html") if kind == "html" else file.with_name(f"{file.stem}-{chart}.png")

    from planner import library
    from planner.plan_file import load_plan

    plan = load_plan(file)
    made = _trace(plan) if kind == "trace" else _document(plan, kind, chart)
    if output is None:
        click.echo(made, nl=False)
    else:
        library.write_whole(output, made)
        click.echo(f"wrote {output}", err=True)


def _format(kind: str | None, output: Path | None, chart: str | None) -> str:
    """What to write: as said, by the ending of the file, or the page. Raises PlannerError for an ending that says nothing."""
    if kind is not None:
        return kind
    if output is None:
        return "html" if chart is None else "png"
    name = output.name.lower()
    if name.endswith(".trace.json"):
        return "trace"
    for known, endings in FORMATS.items():
        if name.endswith(endings):
            return known
    raise PlannerError(
        f"{output}: the ending does not say what to write; end it in .html, .md, .json or .png, or give --format"
    )


def _trace(plan: Plan) -> str:
    from planner.questions.report.trace import trace_of
    from planner.rules import check
    from planner.timeline.priced_plan import job_of, price

    with progress("walking the pipeline"):
        job = job_of(plan)
        check(job, plan.layout)
        return trace_of(price(job, plan.layout))


def _document(plan: Plan, kind: str, chart: str | None) -> str | bytes:
    """The report as a page, Markdown or JSON, or the picture of one chart."""
    from planner.questions.report.build import build
    from planner.questions.report.markdown import markdown
    from planner.questions.report.page import drawn_by, page, picture, start_library
    from planner.questions.report.scaling import scaled

    if kind == "png":
        drawn_by()
    with nullcontext() if chart not in (None, "scaling") else scaled(plan) as sizes, progress("report") as say:
        code = start_library() if kind == "html" else None
        document = build(plan, sizes, say)
        if code is not None:
            say("writing the page")
            return page(document, code())
        if chart is not None:
            say("drawing")
            return picture(document, chart)
    return (
        markdown(document) if kind == "markdown" else json.dumps(document.to_dict(), indent=2, allow_nan=False) + "\n"
    )
