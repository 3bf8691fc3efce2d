"""``plan report``: a plan as a page, Markdown, JSON, a trace or pictures."""

from pathlib import Path

import click

from planner.questions.report.show import CHARTS, FORMATS, SERVING_CHARTS, format_of
from planner.terminal.flags import progress

PROCESSES = 8
"""Other sizes of the cluster are searched in up to as many processes."""


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [PLAN with .html; text: stdout]"
)
@click.option("--format", "kind", type=click.Choice(list(FORMATS)), help="What to write. [by the ending of --output]")
@click.option("--tokens", metavar="N", help="Tokens to train on, of which time, cost and energy are stated: 15T. [1T]")
@click.option("--price", type=float, metavar="USD", help="Dollars per GPU-hour. [of the profile]")
@click.option("--chart", type=click.Choice((*CHARTS, *SERVING_CHARTS)), metavar="NAME", help="Which chart, for --format png.")
def report(
    file: Path, output: Path | None, kind: str | None, tokens: str | None, price: float | None, chart: str | None
) -> None:
    """Show a plan to people: where time and memory go, what else there was, what it hangs on.

    PLAN is a plan file of --output, of `plan serve` too. It is priced again, with its profile and trainer or engine as they
    are now, also when it does not fit.

    \b
    html      one page with everything: no network, light and dark, for print as well
    markdown  the same numbers for an issue or a wiki
    json      the same numbers for programs
    png       one chart: --chart waterfall, operators, memory, memory-timeline, pipeline, heatmap, pareto,
              scaling, sensitivity, accuracy; of a serve plan serve-front, serve-load, serve-step, serve-memory
    trace     the predicted step for Perfetto or chrome://tracing

    \b
    Examples:
      plan report plan.yaml --output report.html
      plan report plan.yaml --tokens 15T --price 2.50
      plan report plan.yaml --format markdown
      plan report plan.yaml --chart memory --output memory.png
      plan report plan.yaml --format trace --output step.trace.json
    """
    from planner import api

    kind = format_of(kind, output, chart)
    if output is None and kind in ("html", "png"):
        output = file.with_suffix(".html") if kind == "html" else file.with_name(f"{file.stem}-{chart}.png")
    if api.plan_kind(file) == "serve":
        if tokens is not None:
            raise click.UsageError("--tokens is about training; a serve plan costs dollars per million tokens")
        with progress("report") as say:
            made = api.load_serve(file).report(output, format=kind, chart=chart, progress=say, price=price)
        _finish(made, output)
        return
    plan = api.load(file)
    with progress("walking the pipeline" if kind == "trace" else "report") as say:
        made = plan.report(output, format=kind, chart=chart, processes=PROCESSES, progress=say, tokens=tokens, price=price)
    _finish(made, output)


def _finish(made: str | bytes, output: Path | None) -> None:
    """Text on standard output, or where it was written."""
    if output is None:
        click.echo(made, nl=False)
    else:
        click.echo(f"wrote {output}", err=True)
