"""``plan search``, the default command: every legal layout priced, the best plans printed."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import PlannerError
from planner.layout import FIELDS
from planner.terminal.flags import console, job_options, layout_options, layout_values, progress, request_fields

if TYPE_CHECKING:  # rich and numpy-heavy modules are imported by the command that needs them
    from planner.defaults import ResolvedJob
    from planner.plan_file import Plan
    from planner.search import Finding

NOTHING_FITS = 1
"""Exit code when no layout of the space fits."""


@click.command(short_help="Search every legal layout, print the best plans (default).")
@job_options(required=True)
@layout_options(tuple(name for name in FIELDS if name not in ("num_microbatches", "order", "offload_activations")))
@click.option("--top", type=click.IntRange(1, 100), default=5, show_default=True, help="Plans to show.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the best plan to this YAML file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def search(top: int, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Search every legal layout and print the best plans (the default command).

    Any flag of a layout (--tp, --pp, --recompute, ...) pins that value; the search varies the others.

    \b
    Examples:
      plan --model llama-70b --gpus 8
      plan --model qwen3-235b-a22b --gpus 256 --hardware b200-sxm --top 10
      plan --model llama-8b --gpus 8 --trainer torchtitan --sequence-length 32768 --json
      plan --model llama-70b --gpus 64 --tp 8 --micro-batch-size 1 --output plan.yaml
    """
    from planner.defaults import Request, resolve
    from planner.search import Pins
    from planner.search import search as run_search

    pins = Pins(values=layout_values(flags))
    resolved = resolve(Request(**{name: value for name, value in request_fields(flags).items() if value is not None}))
    with progress("searching"):
        finding = run_search(resolved.job, pins, top)
    _require_legal(resolved, finding, pins.values)
    plans = _plans(resolved, finding)
    advice = _advice(resolved, finding, pins, flags) if not finding.fit else []
    if output is not None and finding.fit:  # before the tables, whose reader may have seen enough: plan ... | head
        plans[0].save(output)
        click.echo(f"wrote {output}", err=True)
    if as_json:
        click.echo(_json_of_search(resolved, plans, finding, advice))
    else:
        _print_search(resolved, plans, finding, advice)
    if not finding.fit:
        if output is not None:
            click.echo(f"nothing fits, so {output} was not written", err=True)
        sys.exit(NOTHING_FITS)


def _require_legal(resolved: ResolvedJob, finding: Finding, values: dict[str, int]) -> None:
    """Raise PlannerError when no layout meets the rules, with the rules that refuse most."""
    if finding.layouts:
        return
    job = resolved.job
    pinned = {name: values[name] for name in ("tp", "pp", "cp", "dp") if name in values}
    if job.cluster.num_gpus % math.prod(pinned.values()):
        degrees = " x ".join(f"{name} {value}" for name, value in pinned.items())
        raise PlannerError(f"{degrees} does not divide {job.cluster.num_gpus} GPUs; choose degrees whose product does")
    if values:  # the rule that the pinned values break on the one layout that they and the defaults make
        from planner.explicit import complete
        from planner.rules import check

        check(job, complete(job, values)[0])
    if not finding.searched:
        raise PlannerError(
            f"no layout of {job.cluster.num_gpus} GPUs shares out a global batch of {job.workload.global_batch_size} sequences "
            "with the pinned degrees; choose a --global-batch-size that divides by a data parallel degree, or unpin a degree"
        )
    refused = ", ".join(f"{name} ({count})" for name, count in list(finding.refused.items())[:4])
    raise PlannerError(
        f"none of the {finding.searched} layouts is legal for {job.model.name} on {job.cluster.num_gpus} GPUs with trainer "
        f"{job.trainer.name}; rules that refuse most: {refused or 'the pinned degrees leave no layout'}; unpin a degree, or "
        "change the number of GPUs or the batch"
    )


def _plans(resolved: ResolvedJob, finding: Finding) -> list[Plan]:
    """The layouts of a finding as plans, each with the reason for its place."""
    from planner.explain import differences, misses_by, why_first
    from planner.plan_file import Plan, predict

    plans = []
    for number, (layout, found) in enumerate(zip(finding.layouts, finding.estimates, strict=True)):
        if not finding.fit:
            gib, component = misses_by(found)
            why = f"misses by {gib:.1f} GiB; the largest component is {component.replace('_', ' ')}"
        elif number == 0:
            why = why_first(finding)
        else:
            pays, saves = differences(found, finding.estimates[0])
            behind = 100 * (float(found.step_time[0] / finding.estimates[0].step_time[0]) - 1)
            why = f"{behind:.1f} % slower than the first: " + (
                "; ".join([*pays[:2], *(f"saves {one}" for one in saves[:1])]) or "no part differs much"
            )
        plans.append(
            Plan(
                workload=resolved.job.workload, hardware=resolved.hardware, num_gpus=resolved.job.cluster.num_gpus,
                trainer=resolved.trainer, layout=layout, prediction=predict(found, resolved.job, resolved.kind),
                network_bandwidth=resolved.network_bandwidth,
                assumptions=resolved.assumptions, why=why,
            )
        )  # fmt: skip
    return plans


def _advice(resolved: ResolvedJob, finding: Finding, pins: Any, flags: dict[str, Any]) -> list[Any]:
    from planner.advice import advise

    def command(**changes: Any) -> str:
        return _command_line({**flags, **changes})

    with progress("nothing fits; looking for the cheapest changes") as say:
        return advise(resolved.job, pins, command, say)


def _command_line(flags: dict[str, Any]) -> str:
    """The flags as the command line that gives them."""
    words = ["plan"]
    for name, value in flags.items():
        if value is None or (name == "lora_rank" and value == 0):
            continue
        flag = f"--{name.replace('_', '-')}"
        words += (
            [flag if value else flag.replace("--", "--no-", 1)]
            if isinstance(value, bool)
            else [flag, shlex.quote(str(value))]
        )
    return " ".join(words)


def _json_of_search(resolved: ResolvedJob, plans: list[Plan], finding: Finding, advice: list[Any]) -> str:
    job = resolved.job
    document = {
        "workload": job.workload.to_dict(),
        "cluster": {"hardware": resolved.hardware, "num_gpus": job.cluster.num_gpus},
        "trainer": resolved.trainer,
        "assumptions": [vars(one) for one in resolved.assumptions],
        "plans": [
            {"rank": rank, "fits": finding.fit, "layout": plan.layout.to_dict(), "estimate": vars(plan.prediction), "why": plan.why}
            for rank, plan in enumerate(plans, 1)
        ],
        "searched": {
            "layouts": finding.searched, "legal": finding.legal, "priced": finding.priced, "fit": finding.fitting,
            "refused": finding.refused, "seconds": finding.seconds,
        },
        "advice": [one.to_dict() for one in advice],
    }  # fmt: skip
    return json.dumps(document, indent=2)


def _print_search(resolved: ResolvedJob, plans: list[Plan], finding: Finding, advice: list[Any]) -> None:
    from planner.terminal import tables as table

    out, job = console(), resolved.job
    model = job.model
    out.print(
        f"[bold]{model.name}[/bold] on {job.cluster.num_gpus} x {job.cluster.hardware.name}, sequences of "
        f"{job.workload.sequence_length} tokens, {job.workload.global_batch_size} per step, {job.workload.precision}, "
        f"{job.workload.optimizer}, trainer {job.trainer.name}"
    )
    out.print(table.assumptions_table(resolved.assumptions))
    table.print_plans(out, plans, finding.fit)
    first = plans[0]
    if finding.fit:
        low, high = (table.seconds(value) for value in first.prediction.step_time_range_s)
        out.print(
            f"Step of the first: {low} to {high} for nine of ten runs, by the errors on {first.prediction.step_time_range_basis}."
        )
        out.print(f"[bold]Why the first:[/bold] {first.why}")
    else:
        out.print(f"[bold red]Nothing fits.[/bold red] The best attempt {first.why}.")
    out.print()
    table.print_memory(out, first.prediction)
    if advice:
        out.print(table.advice_table(advice))
        for one in advice:
            out.print(f"  {one.change}:\n    {one.command}", soft_wrap=True, markup=False)
    elif not finding.fit:
        out.print("No single change of those tried makes it fit: combine a smaller model, more GPUs and adapters.")
    out.print(
        f"[dim]{finding.searched:,} layouts, {finding.legal:,} looked at and legal, {finding.priced:,} priced, "
        f"{finding.fitting:,} fit; {finding.seconds:.2f} s[/dim]"
    )
