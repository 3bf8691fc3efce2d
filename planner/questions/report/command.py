"""``plan report``: a plan as a page, Markdown, JSON, a trace or pictures."""

from pathlib import Path
from typing import Any

import click

from planner.library import require_folder
from planner.questions.report.show import EVERY_CHART, FORMATS, format_of
from planner.terminal.flags import progress

PROCESSES = 8
"""Other sizes of the cluster are searched in up to as many processes."""
LOADED = {"serve": "load_serve", "mixed": "load_mixed", "rl": "load_rl"}
"""Call of the API that reads a kind of plan that is not one of training on one kind."""


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [PLAN with .html; text: stdout]"
)
@click.option("--format", "kind", type=click.Choice(list(FORMATS)), help="What to write. [by the ending of --output]")
@click.option("--tokens", metavar="N", help="Tokens to train on, of which time, cost and energy are stated: 15T. [1T]")
@click.option("--price", type=float, metavar="USD", help="Dollars per GPU-hour. [of the profile]")
@click.option("--chart", type=click.Choice(EVERY_CHART), metavar="NAME", help="Which chart, for --format png.")
def report(
    file: Path, output: Path | None, kind: str | None, tokens: str | None, price: float | None, chart: str | None
) -> None:
    """Show a plan to people: where time and memory go, what else there was, what it hangs on.

    PLAN is a plan file of --output: of `plan`, `plan --cluster`, `plan serve` or `plan rl`. It is priced again, with its profiles
    and trainer or engine as they are now, also when it does not fit; an RL plan is shown as its file holds it.

    \b
    html      one page with everything: no network, light and dark, for print as well
    markdown  the same numbers for an issue or a wiki
    json      the same numbers for programs
    png       one chart: --chart waterfall, operators, memory, memory-timeline, pipeline, heatmap, pareto,
              scaling, sensitivity, accuracy; of others --chart serve-..., mixed-..., rl-...
    trace     the predicted step for Perfetto or chrome://tracing; of a serve plan there is none

    \b
    Examples:
      plan report plan.yaml --output report.html
      plan report plan.yaml --tokens 15T --price 2.50
      plan report plan.yaml --format markdown
      plan report plan.yaml --chart memory --output memory.png
      plan report mixed.yaml --tokens 1T
      plan report rl.yaml --format trace --output step.trace.json
    """
    from planner import api

    require_folder(output)
    kind = format_of(kind, output, chart)
    if output is None and kind in ("html", "png"):
        output = file.with_suffix(".html") if kind == "html" else file.with_name(f"{file.stem}-{chart}.png")
    which = api.plan_kind(file)
    if tokens is not None and which in ("serve", "rl"):
        costs = {"serve": "a serve plan costs dollars per million tokens", "rl": "an RL plan costs dollars per thousand steps"}
        raise click.UsageError(f"--tokens is about training on a number of tokens; {costs[which]}")
    if price is not None and which == "mixed":
        raise click.UsageError("--price is one price; a mixed plan has that of each kind: give price in its cluster file")
    asked: dict[str, Any] = {"format": kind, "chart": chart, "tokens": tokens, "price": price}
    with progress("walking the pipeline" if kind == "trace" else "report") as say:
        if which in LOADED:
            asked = {name: value for name, value in asked.items() if value is not None}
            made = getattr(api, LOADED[which])(file).report(output, progress=say, **asked)
        else:
            made = api.load(file).report(output, processes=PROCESSES, progress=say, **asked)
    _finish(made, output)


def _finish(made: str | bytes, output: Path | None) -> None:
    """Text on standard output, or where it was written."""
    if output is None:
        click.echo(made, nl=False)
    else:
        click.echo(f"wrote {output}", err=True)
