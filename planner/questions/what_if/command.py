"""``plan what-if``: the same job with one thing changed, the best plan each; and the other direction."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import PlannerError
from planner.terminal.flags import console, layout_options, layout_values, progress

if TYPE_CHECKING:  # what searches and prints is imported when the command runs
    from planner.questions.what_if.numbers import Row
    from planner.questions.what_if.question import WhatIfJob

NOTHING_FITS, INTERRUPTED = 1, 130
"""Exit codes: no row fits; stopped with Ctrl-C, what was found is printed."""
PINS = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch_size", "zero", "schedule", "recompute")
"""Flags of a layout that hold for every row."""
VALUES = (
    ("model", "NAME", "Model; several values, each a row."),
    ("gpus", "N", "GPUs: 512, or 128,256, or 64..4096 (doublings), or x2."),
    ("hardware", "NAME", "Hardware profiles."),
    ("trainer", "NAME", "Trainers."),
    ("sequence_length", "S", "Tokens per sequence: 131072, 8192..131072, x2. Sequences per step stay."),
    ("global_batch_size", "B", "Sequences per optimizer step, likewise."),
    ("precision", "NAME", "Precisions."),
    ("optimizer", "NAME", "Optimizers."),
    ("lora_rank", "R", "Ranks of low-rank adapters; 0 = all weights."),
    ("lora_targets", "NAME", "Layers with adapters: all, attention or qkv."),
    ("document_length", "N", "Mean tokens of packed documents."),
    ("expert_imbalance", "X", "Tokens of the busiest expert rank over the mean."),
    ("network", "RATE", "Bandwidth between nodes per GPU, one direction: '800 Gb/s' or x2."),
    ("network_latency", "TIME", "Latency between nodes: '3 us' or x0.5."),
    ("scale_up", "RATE", "Bandwidth inside a node per GPU, one direction: '900 GB/s' or x2."),
    ("memory", "SIZE", "Usable memory of a GPU: '141 GiB' or x1.5."),
    ("memory_bandwidth", "RATE", "Of a GPU: '4.8 TB/s' or x1.5."),
    ("compute", "xN", "Peak FLOP/s of a GPU, only as a factor: x1.5."),
)  # fmt: skip


def value_options(function: Callable[..., None]) -> Callable[..., None]:
    """The flags of the job, each with any number of values."""
    for name, metavar, text in reversed(VALUES):
        flags = [f"--{name.replace('_', '-')}", *(["--network-bandwidth"] if name == "network" else [])]
        function = click.option(*flags, name, multiple=True, metavar=metavar, help=text)(function)
    return function


@click.command(name="what-if", short_help="The same job with one thing changed; fewest GPUs, cheapest hardware.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@value_options
@layout_options(PINS)
@click.option("--together", is_flag=True, help="One more row: the first change of every flag at once.")
@click.option("--fewest-gpus", is_flag=True, help="The fewest GPUs that train it (and meet --days, --budget).")
@click.option("--longest-sequence", is_flag=True, help="The longest sequence that fits.")
@click.option("--largest-batch", is_flag=True, help="The most sequences per forward pass (micro batch) that fit.")
@click.option("--cheapest", is_flag=True, help="Hardware by cost: the values of --hardware, or all that have a price.")
@click.option("--tokens", metavar="N", help="Tokens to train on, like 15T: prints days, GPU-hours, dollars and energy.")
@click.option("--days", type=float, metavar="D", help="Deadline for --fewest-gpus and --cheapest.")
@click.option("--budget", metavar="USD", help="Budget for --fewest-gpus and --cheapest, like 2M.")
@click.option(
    "--price",
    multiple=True,
    metavar="[NAME=]USD",
    help="Dollars per GPU-hour, of all or of one hardware. [of the profile]",
)
@click.option("--power-share", type=float, default=1.0, metavar="X", help="Mean power of a GPU over its limit. [1]")
@click.option(
    "--pue", type=float, default=1.0, metavar="X", help="Energy of the building over that of its machines. [1]"
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the sweep to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def what_if(file: Path | None, plot: Path | None, as_json: bool, **flags: Any) -> None:
    """The same job with one thing changed: the best plan each, beside the job as it is, and why it helps or does not.

    The base is FILE, a plan written by --output: then every value of a flag is a change, a row of its own. Without a
    file, the first value of each flag describes the base, further values are changes. A value like x2 multiplies what the
    base has and is a change wherever it stands. Several values: repeat the flag or separate them by commas; 64..4096
    doubles. Flags of a layout (--tp, --zero, ...) hold for every row.

    \b
    Examples:
      plan what-if plan.yaml --network x2 --hardware b200-sxm --precision fp8
      plan what-if plan.yaml --gpus 64..4096 --plot scaling.png
      plan what-if --model llama-70b --gpus 64 --network x2 --memory x1.5 --sequence-length 8192,32768
      plan what-if --model llama-70b --gpus 64 --fewest-gpus --longest-sequence --largest-batch
      plan what-if plan.yaml --tokens 15T --days 30 --fewest-gpus
      plan what-if plan.yaml --tokens 1T --days 60 --cheapest --hardware h100-sxm,h200-sxm,b200-sxm --price h100-sxm=2.5
    """
    from planner.questions.what_if.question import what_if_job

    job = what_if_job(file, flags, layout_values(flags))
    if plot is not None and job.sweep is None:
        raise PlannerError("--plot draws a sweep: give one flag several numbers, like --gpus 64..4096")
    if plot is not None and not plot.parent.is_dir():
        raise PlannerError(f"--plot {plot}: no such directory: {plot.parent}")
    rows, complete = _search(job)
    if not rows:
        click.echo("interrupted before anything was found", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(_document(job, rows, complete), indent=2))
    else:
        _print(job, rows)
    if plot is not None:
        _draw(job, rows, plot)
    if not complete:
        click.echo(f"interrupted: {len(rows)} rows were found, the others were not looked at", err=True)
        sys.exit(INTERRUPTED)
    if not any(row.fits for row in rows):
        sys.exit(NOTHING_FITS)


def _search(job: WhatIfJob) -> tuple[list[Row], bool]:
    """All rows, or those that were found before Ctrl-C."""
    from planner.questions.what_if.question import answers

    rows: list[Row] = []
    kept: list[Row] = []
    with progress("searching") as say:
        try:
            for row in answers(job, say, kept.append):
                rows.append(row)
                kept.clear()
        except KeyboardInterrupt:
            import dataclasses

            rows += [dataclasses.replace(one, label=f"{one.label} so far") for one in kept[-1:]]
            return rows, False
    return rows, True


def _document(job: WhatIfJob, rows: list[Row], complete: bool) -> dict[str, Any]:
    from planner.costs import LEFT_OUT
    from planner.questions.what_if.show import price_warning

    workload = job.resolved.job.workload
    return {
        "workload": workload.to_dict(),
        "cluster": {"hardware": job.resolved.hardware, "num_gpus": job.resolved.job.cluster.num_gpus},
        "trainer": job.resolved.trainer,
        "assumptions": [vars(one) for one in job.resolved.assumptions],
        "rows": [row.to_dict() for row in rows],
        "rates": {
            row.hardware: [vars(one) for one in row.rates.basis] for row in rows if row.rates is not None and row.fits
        },
        "left_out": list(LEFT_OUT),
        "warning": price_warning(rows),
        "complete": complete,
    }


def _print(job: WhatIfJob, rows: list[Row]) -> None:
    from rich.text import Text

    from planner.questions.what_if import show as report

    out, work = console(), job.resolved.job.workload
    out.print(
        f"[bold]{work.model.name}[/bold] on {job.resolved.job.cluster.num_gpus} x {job.resolved.hardware}, sequences of "
        f"{work.sequence_length} tokens, {work.global_batch_size} per step, {work.precision}, {work.optimizer}, trainer "
        f"{job.resolved.trainer}"
    )
    if job.resolved.assumptions:
        said = ", ".join(f"{one.what} {one.value} ({one.flag})" for one in job.resolved.assumptions)
        out.print(Text(f"Assumed: {said}", style="dim"))
    out.print()
    out.print(report.rows_table(rows, narrow=out.width < 100))
    if job.pricing.tokens is not None:
        out.print(report.costs_table(rows, job.pricing.tokens))
    if warning := report.price_warning(rows):
        out.print(Text(warning, style="yellow"))
        out.print()
    report.print_reasons(out, rows)
    report.print_sweeps(out, rows)
    out.print()
    report.print_basis(out, rows, with_energy=job.pricing.tokens is not None)


def _draw(job: WhatIfJob, rows: list[Row], path: Path) -> None:
    from planner.questions.what_if.show import sweeps
    from planner.questions.what_if.sweep_plot import sweep_plot

    swept = sweeps(rows, least=2)
    if job.sweep not in swept:
        click.echo(f"fewer than two points were found, so {path} was not drawn", err=True)
        return
    title = f"{job.resolved.job.model.name}, {job.resolved.hardware}, {job.resolved.trainer}"
    sweep_plot(swept[job.sweep], job.sweep, title, path)
    click.echo(f"wrote {path}", err=True)
