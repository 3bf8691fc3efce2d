"""``plan report``: a plan as a page, Markdown, JSON, a trace or pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.errors import PlannerError
from planner.terminal.flags import progress

if TYPE_CHECKING:
    from planner.plan_file import Plan

FORMATS = {
    "html": (".html", ".htm"),
    "trace": (),
    "markdown": (".md", ".markdown"),
    "json": (".json",),
    "png": (".png",),
}
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

    from planner.plan_file import load_plan

    plan = load_plan(file)
    if kind == "trace":
        from planner.questions.report.trace import trace_of
        from planner.rules import check
        from planner.timeline.priced_plan import job_of, price

        with progress("walking the pipeline"):
            job = job_of(plan)
            check(job, plan.layout)
            text = trace_of(price(job, plan.layout))
        _write(text, output)
    elif kind == "png":
        assert output is not None and chart is not None
        _picture(plan, chart, output)
    else:
        _document(plan, kind, output)


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


def _document(plan: Plan, kind: str, output: Path | None) -> None:
    from planner.questions.report.build import build
    from planner.questions.report.parallel_searches import scaled

    with scaled(plan) as sizes, progress("report") as say:
        library = None
        if kind == "html":
            from planner.questions.report.page import page, start_library

            library = start_library()
        document = build(plan, sizes.result, say)
        if library is not None:
            say("writing the page")
            text = page(document, library())
        elif kind == "markdown":
            from planner.questions.report.markdown import markdown

            text = markdown(document)
        else:
            text = json.dumps(document.to_dict(), indent=2, allow_nan=False) + "\n"
    _write(text, output)


def _picture(plan: Plan, chart: str, output: Path) -> None:
    from planner import library
    from planner.questions.report.build import build
    from planner.questions.report.parallel_searches import scaled
    from planner.questions.report.picture import drawn_by, picture

    drawn_by()
    with progress("report") as say:
        if chart == "scaling":
            with scaled(plan) as sizes:
                document = build(plan, sizes.result, say)
        else:
            document = build(plan, None, say)
        say("drawing")
        library.write_whole(output, picture(document, chart))
    click.echo(f"wrote {output}", err=True)


def _write(text: str, output: Path | None) -> None:
    from planner import library

    if output is None:
        click.echo(text, nl=False)
        return
    library.write_whole(output, text)
    click.echo(f"wrote {output}", err=True)
