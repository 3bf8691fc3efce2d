"""The command line: ``plan --model llama-70b --gpus 8`` and its companions."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.errors import PlannerError
from planner.layout import BOOLEANS, FIELDS, NAMES, Layout, choice, module_mask

if TYPE_CHECKING:  # rich and numpy-heavy modules are imported by the command that needs them
    from rich.console import Console

    from planner.defaults import ResolvedJob
    from planner.plan import Plan
    from planner.search import Finding

NOTHING_FITS = 1
"""Exit code when no layout of the space fits."""

LAYOUT_HELP = {
    "tp": "Tensor parallel degree.",
    "pp": "Pipeline parallel degree.",
    "dp": "Data parallel degree.",
    "cp": "Context parallel degree.",
    "ep": "Expert parallel degree.",
    "etp": "Expert tensor parallel degree.",
    "vpp": "Virtual stages per pipeline rank.",
    "dp_shard": "Data parallel ranks that share states (HSDP); 0 = all.",
    "micro_batch_size": "Sequences per forward pass and replica.",
    "num_microbatches": "Microbatches per step and replica.",
    "sequence_parallel": "Split norms and dropout in the tensor parallel group.",
    "cp_method": "How attention sees the whole sequence.",
    "zero": "State sharding level, 0 to 3.",
    "schedule": "Pipeline schedule.",
    "order": "Rank order, innermost first.",
    "recompute": "What the backward pass computes again.",
    "recompute_layers": "Layers per stage under full recompute; 0 = all.",
    "recompute_modules": "Modules of selective recompute, separated by commas.",
    "offload_optimizer": "Percent of the optimizer states in host memory.",
    "offload_activations": "Keep activations in host memory between the passes.",
    "first_stage_layers": "Layers of the first pipeline stage; 0 = even share.",
    "last_stage_layers": "Layers of the last pipeline stage; 0 = even share.",
}


class SentenceError(click.ClickException):
    """A PlannerError as the command line shows it: one sentence, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.secho("error: ", fg="red", bold=True, err=True, nl=False)
        click.echo(self.message, err=True)


class PlanGroup(click.Group):
    """A group whose default command is the search: ``plan --model M --gpus N``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "--version"):
            looks_like_command = not args[0].startswith("-")
            if looks_like_command:
                from planner.errors import nearest_first

                nearest = ", ".join(nearest_first(args[0], self.commands)[:3])
                raise click.UsageError(f"No such command '{args[0]}'. Nearest: {nearest}.", ctx)
            args = ["search", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PlannerError as error:
            raise SentenceError(str(error)) from error


def _layout_options(names: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Flags for fields of Layout, all optional: what is not given is None."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for name in reversed(names):
            flag, text = f"--{name.replace('_', '-')}", LAYOUT_HELP[name]
            if name in NAMES:
                option = click.option(flag, type=click.Choice(list(NAMES[name].values())), help=text)
            elif name in BOOLEANS:
                option = click.option(f"{flag}/--no-{name.replace('_', '-')}", default=None, help=text)
            elif name == "recompute_modules":
                option = click.option(flag, metavar="LIST", help=text)
            else:
                option = click.option(flag, type=int, metavar="N", help=text)
            function = option(function)
        return function

    return decorate


def _job_options(*, required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Flags that say what is trained and where."""
    options = (
        click.option(
            "--model",
            required=required,
            metavar="NAME",
            help="Preset, config.json, directory or hub id ('plan models').",
        ),
        click.option("--gpus", required=required, type=int, metavar="N", help="GPUs in the job."),
        click.option(
            "--hardware", metavar="NAME", help="Profile or YAML file ('plan hardware'). [local GPU, else h100-sxm]"
        ),
        click.option("--trainer", metavar="NAME", help="Trainer or YAML file ('plan trainers'). [megatron]"),
        click.option("--sequence-length", type=int, metavar="S", help="Tokens per sequence. [at most 8192]"),
        click.option(
            "--global-batch-size", type=int, metavar="B", help="Sequences per optimizer step. [by model size]"
        ),
        click.option("--precision", metavar="NAME", help="bf16, fp16, fp32, fp8, fp8_block, mxfp8 or nvfp4. [bf16]"),
        click.option("--optimizer", metavar="NAME", help="adam, adam_bf16, adam_8bit, muon or sgd. [adam]"),
        click.option("--lora-rank", type=int, metavar="R", help="Train low-rank adapters only; 0 = all weights."),
        click.option(
            "--expert-imbalance", type=float, metavar="X", help="Tokens of the busiest expert rank over the mean. [1]"
        ),
        click.option(
            "--network-bandwidth", metavar="RATE", help="Per GPU, one direction, like '400 Gb/s'. [of the profile]"
        ),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value:
        return
    from importlib import metadata

    try:
        version = metadata.version("planner")
    except metadata.PackageNotFoundError:
        version = "of a checkout that is not installed"
    click.echo(f"plan {version}")
    ctx.exit()


@click.group(cls=PlanGroup, context_settings={"help_option_names": ["--help"], "max_content_width": 120})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Plan how to split the training of a language model over GPUs, and what it will cost.

    \b
    Examples:
      plan --model llama-70b --gpus 8
      plan --model deepseek-v3 --gpus 2048 --hardware h100-sxm --output plan.yaml
      plan --model ./config.json --gpus 64 --sequence-length 32768 --tp 8
      plan estimate --model llama-8b --gpus 8 --tp 2 --recompute full
      plan accuracy

    Without a command this is `plan search`; `plan search --help` lists all its flags. Exit codes: 0 a plan was found,
    1 nothing fits, 2 the input is wrong.
    """


@main.command(short_help="Search every legal layout, print the best plans (default).")
@_job_options(required=True)
@_layout_options(tuple(name for name in FIELDS if name not in ("num_microbatches", "order", "offload_activations")))
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

    pins = Pins(values=_layout_values(flags))
    resolved = resolve(Request(**{name: value for name, value in _request_fields(flags).items() if value is not None}))
    with _progress("searching"):
        finding = run_search(resolved.job, pins, top)
    _require_legal(resolved, finding, pins.values)
    plans = _plans(resolved, finding)
    advice = _advice(resolved, finding, pins, flags) if not finding.fit else []
    if as_json:
        click.echo(_json_of_search(resolved, plans, finding, advice))
    else:
        _print_search(resolved, plans, finding, advice)
    if output is not None and finding.fit:
        plans[0].save(output)
        click.echo(f"wrote {output}", err=True)
    if not finding.fit:
        if output is not None:
            click.echo(f"nothing fits, so {output} was not written", err=True)
        sys.exit(NOTHING_FITS)


def _request_fields(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that describe the job, by field of Request; None = not given."""
    from planner.units import parse

    fields = {name: flags[name] for name in _REQUEST_FLAGS}
    if fields["network_bandwidth"] is not None:
        rate = parse(fields["network_bandwidth"], "bytes/s", what="--network-bandwidth")
        if rate <= 0:
            raise PlannerError("--network-bandwidth must be above zero")
        fields["network_bandwidth"] = rate
    return {**fields, "num_gpus": flags["gpus"]}


_REQUEST_FLAGS = (
    "model", "hardware", "trainer", "sequence_length", "global_batch_size", "precision", "optimizer", "lora_rank",
    "expert_imbalance", "network_bandwidth",
)  # fmt: skip


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


def _layout_values(flags: dict[str, Any]) -> dict[str, int]:
    """The layout fields among the flags that were given, as integers. Raises PlannerError."""
    values: dict[str, int] = {}
    for name in FIELDS:
        value = flags.get(name)
        if value is None:
            continue
        if name in NAMES:
            values[name] = choice(name, value)
        elif name == "recompute_modules":
            values[name] = module_mask(value, where="--recompute-modules")
        else:
            checked = Layout.from_dict({name: value}, where=f"--{name.replace('_', '-')}")
            values[name] = int(getattr(checked, name))
    return values


def _plans(resolved: ResolvedJob, finding: Finding) -> list[Plan]:
    """The layouts of a finding as plans, each with the reason for its place."""
    from planner.explain import differences, misses_by, why_first
    from planner.plan import Plan, predict

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
                trainer=resolved.trainer, layout=layout, prediction=predict(found, resolved.job.trainer),
                assumptions=resolved.assumptions, why=why,
            )
        )  # fmt: skip
    return plans


def _advice(resolved: ResolvedJob, finding: Finding, pins: Any, flags: dict[str, Any]) -> list[Any]:
    from planner.advice import advise

    def command(**changes: Any) -> str:
        return _command_line({**flags, **changes})

    with _progress("nothing fits; looking for the cheapest changes") as say:
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


def _progress(text: str) -> Any:
    """A spinner on standard error while a person waits; nothing when piped. The body may call it with further text."""
    import contextlib

    @contextlib.contextmanager
    def spin() -> Any:
        if not sys.stderr.isatty():
            yield lambda _: None
            return
        from rich.console import Console

        with Console(stderr=True).status(text) as status:
            yield lambda more: status.update(f"{text}: {more}")

    return spin()


def _console() -> Console:
    """Standard output; colours off and 120 columns wide when it is piped."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140, no_color=True)


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
    from planner.report import table

    console, job = _console(), resolved.job
    model = job.model
    console.print(
        f"[bold]{model.name}[/bold] on {job.cluster.num_gpus} x {job.cluster.hardware.name}, sequences of "
        f"{job.workload.sequence_length} tokens, {job.workload.global_batch_size} per step, {job.workload.precision}, "
        f"{job.workload.optimizer}, trainer {job.trainer.name}"
    )
    console.print(table.assumptions_table(resolved.assumptions))
    table.print_plans(console, plans, finding.fit)
    first = plans[0]
    if finding.fit:
        low, high = (table.seconds(value) for value in first.prediction.step_time_range_s)
        console.print(
            f"Step of the first: {low} to {high} for nine of ten runs, by the errors of published runs of this trainer."
        )
        console.print(f"[bold]Why the first:[/bold] {first.why}")
    else:
        console.print(f"[bold red]Nothing fits.[/bold red] The best attempt {first.why}.")
    console.print()
    table.print_memory(console, first.prediction)
    if advice:
        console.print(table.advice_table(advice))
        for one in advice:
            console.print(f"  {one.change}:\n    {one.command}", soft_wrap=True, markup=False)
    elif not finding.fit:
        console.print("No single change of those tried makes it fit: combine a smaller model, more GPUs and adapters.")
    console.print(
        f"[dim]{finding.searched:,} layouts, {finding.legal:,} looked at and legal, {finding.priced:,} priced, "
        f"{finding.fitting:,} fit; {finding.seconds:.2f} s[/dim]"
    )


@main.command(short_help="Price one explicit layout, with the whole breakdown.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@_job_options(required=False)
@_layout_options(FIELDS)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this YAML file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def estimate(file: Path | None, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Price one explicit layout, with the whole breakdown.

    FILE is a plan written by --output, or a YAML mapping of layout fields; flags replace what it says. What is left out:
    dp follows from the number of GPUs, the number of microbatches from the batch, sharding and sequence parallelism
    from the trainer.

    \b
    Examples:
      plan estimate --model llama-70b --gpus 64 --tp 4 --pp 4 --vpp 5
      plan estimate plan.yaml --micro-batch-size 2
      plan estimate layout.yaml --model llama-8b --gpus 8 --json
    """
    from planner.explicit import explicit_plan, read_layout_file

    base = read_layout_file(file) if file is not None else None
    plan = explicit_plan(base, _layout_values(flags), _request_fields(flags))
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    if as_json:
        document = {"layout": plan.layout.to_dict(), "estimate": vars(plan.prediction)}
        click.echo(json.dumps({"assumptions": [vars(one) for one in plan.assumptions], **document}, indent=2))
        return
    from planner.report import table

    console = _console()
    if plan.assumptions:
        console.print(table.assumptions_table(plan.assumptions))
    table.print_prediction(console, plan)


@main.command(short_help="Predict published runs and print the errors.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every run and the summary as JSON.")
def accuracy(paths: tuple[Path, ...], as_json: bool) -> None:
    """Predict runs that somebody made and published, and print the errors.

    PATHS are files or directories in the schema of profiles/runs/README.md; without any, all runs that come with
    planner. Errors are predicted / measured - 1.

    \b
    Examples:
      plan accuracy
      plan accuracy my-runs.yaml --json
    """
    from planner import accuracy as runs

    with _progress("predicting"):
        report = runs.accuracy(list(paths) or None)
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    from planner.report.accuracy import print_accuracy

    print_accuracy(_console(), report)


@main.command()
def models() -> None:
    """List the model presets."""
    from planner.report.library import models_table

    _console().print(models_table())


@main.command()
def hardware() -> None:
    """List the hardware profiles."""
    from planner.report.library import hardware_table

    _console().print(hardware_table())


@main.command()
def trainers() -> None:
    """List the trainers."""
    from planner.report.library import trainers_table

    _console().print(trainers_table())


def main_entry() -> None:
    """Entry point of the installed command."""
    main(prog_name="plan")


if __name__ == "__main__":
    main_entry()
