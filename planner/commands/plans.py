"""Commands that are one call of the API each: search, estimate, export, import; and what the library holds."""

import sys
from pathlib import Path
from typing import Any

import click

from planner.errors import listed
from planner.keywords import SEARCHED
from planner.layout import FIELDS
from planner.terminal.flags import completed, console, emit, job_options, layout_options, progress
from planner.trainers import having

NOTHING_FITS = 1
"""Exit code when no layout of the space fits."""
READERS = listed(having("readback"))
YAML_FILE = click.Path(dir_okay=False, path_type=Path)
OUTPUT = click.option("--output", type=YAML_FILE, help="Write the plan to this YAML file.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")


@click.command()
@job_options(required=True)
@layout_options(SEARCHED)
@click.option("--cluster", type=YAML_FILE, help="Nodes of several kinds and sites: a YAML file (docs/clusters.md).")
@click.option(
    "--outer", metavar="METHOD:N", help="Of a cluster of several sites: local updates, like diloco:100:8 (steps, bits)."
)
@click.option("--tokens", metavar="N", help="Tokens to train on, like 15T: prints days, GPU-hours, dollars and energy.")
@click.option("--days", type=float, metavar="D", help="Deadline for them; without --gpus the fewest GPUs that meet it are planned.")
@click.option("--price", type=float, metavar="USD", help="Dollars per GPU-hour. [of the profile]")
@click.option("--top", type=click.IntRange(1, 100), default=5, show_default=True, help="Plans to show.")
@click.option("--output", type=YAML_FILE, help="Write the best plan to this YAML file.")
@JSON
def search(
    top: int, output: Path | None, as_json: bool, cluster: Path | None, outer: str | None, **flags: Any
) -> None:  # fmt: skip
    """Search every legal layout and print the best plans (the default command).

    Any flag of a layout (--tp, --pp, --recompute, ...) pins that value; the search varies the others.

    \b
    Examples:
      plan --model llama-70b --gpus 8
      plan --model qwen3-235b-a22b --gpus 256 --hardware b200-sxm --top 10
      plan --model llama-8b --gpus 8 --trainer torchtitan --sequence-length 32768 --json
      plan --model llama-70b --gpus 64 --tp 8 --micro-batch-size 1 --output plan.yaml
      plan --model llama-8b --hardware h100 --tokens 15T --days 30
      plan --model llama-70b --cluster cluster.yaml --output mixed.yaml
      plan --model llama-70b --cluster cluster.yaml --outer diloco:100:8
    """
    from planner import api

    with progress("searching") as say:
        plans: Any
        if cluster is None:
            if outer is not None:
                raise click.UsageError("--outer is of a cluster of several sites; give its file with --cluster")
            plans = api.plan(top=top, progress=say, **flags)
        else:
            of_budget = {name: flags.pop(name) for name in ("tokens", "days", "price")}
            if given := next((name for name, value in of_budget.items() if value is not None), None):
                raise click.UsageError(f"--{given} is of one kind of GPU; the prices of a cluster stand in its file")
            plans = api.plan_mixed(cluster, outer=outer, top=top, progress=say, **flags)
    if output is not None and plans:  # before the tables, whose reader may have seen enough: plan ... | head
        plans[0].save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plans, as_json)
    if not plans:
        if output is not None:
            click.echo(f"nothing fits, so {output} was not written", err=True)
        sys.exit(NOTHING_FITS)


@click.command()
@click.argument("file", required=False, type=YAML_FILE)
@job_options(required=False)
@layout_options(FIELDS)
@OUTPUT
@JSON
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
    from planner import api

    if file is not None and api.is_mixed_plan(file):
        if given := next((name for name, value in flags.items() if value not in (None, ())), None):
            raise click.UsageError(f"--{given.replace('_', '-')}: a mixed plan is shown as it is; 'plan what-if' changes it")
        emit(api.load_mixed(file), as_json)
        return
    plan = api.estimate(file, **flags)
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json)


@click.command()
@click.argument("file", metavar="PLAN", required=False, type=YAML_FILE)
@click.option("--to", "to", metavar="NAME", help="Trainer to write for; --list names them.", shell_complete=completed("target"))
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Folder to write.")
@click.option(
    "--launcher", metavar="NAME", default="torchrun", show_default=True, help="How processes are started.",
    shell_complete=completed("launcher"),
)  # fmt: skip
@click.option("--cluster", type=YAML_FILE, metavar="FILE", help="Cluster file in whose regions SkyPilot may start it.")
@click.option("--check", is_flag=True, help="Run the trainer's own parser on the result, where it is installed.")
@click.option("--force", is_flag=True, help="Replace a folder that is not empty.")
@click.option("--list", "list_", is_flag=True, help="List the trainers and launchers, and stop.")
def export(
    file: Path | None, to: str | None, output: Path | None, launcher: str, cluster: Path | None, check: bool, force: bool,
    list_: bool,
) -> None:  # fmt: skip
    """Write a plan as a folder that a trainer runs: configuration, launch script, environment, smoke run, README.

    PLAN is a file written by --output of `plan` or `plan estimate`; one of `plan serve` is written for an engine, or for what runs
    engines on Kubernetes, with the benchmark that measures what was predicted. A mixed plan, of `plan --cluster`, is written for
    pytorch, megatron, megatron-bridge, torchtitan (with torchft where sites step alone), flagscale or hexiscale; one of `plan rl`
    for verl, nemo-rl, openrlhf, trl, slime, areal or prime-rl.

    \b
    Examples:
      plan --model llama-70b --gpus 64 --output plan.yaml
      plan export plan.yaml --to megatron --output run/
      plan export plan.yaml --to megatron --output run/ --check
      plan export plan.yaml --to megatron --launcher skypilot --cluster cluster.yaml --output run/
      plan export serve.yaml --to vllm --output server/ --check
      plan export serve.yaml --to dynamo --output server/
      plan export mixed.yaml --to pytorch --output run/
      plan export rl.yaml --to verl --output run/ --check
      plan export --list
    """
    if list_:
        from planner.terminal.library_tables import target_lines

        click.echo("\n".join(target_lines()))
        return
    if file is None or to is None or output is None:
        raise click.UsageError(
            "give the plan file, --to and --output, like: plan export plan.yaml --to megatron --output run/"
        )
    from planner import api
    from planner.api import rl_files, serving_files

    if rl_files.is_rl_file(file):
        if launcher != "torchrun":
            raise click.UsageError("--launcher is of trainings: an RL plan has its framework's own launch script")
        _export_rl(file, to, output, check=check, force=force)
        return
    if serving_files.is_serve_file(file):
        if launcher != "torchrun" or cluster is not None:
            raise click.UsageError("--launcher is of trainings: a serve plan has scripts, or is exported to dynamo or llm-d")
        made = serving_files.export_file(file, to, output, force=force)
        for warning in made.warnings:
            click.secho(f"warning: {warning}", fg="yellow", err=True)
        click.echo(f"wrote {output}: {', '.join(made.files)}")
        for note in made.notes:
            click.echo(f"note: {note}")
        if check:
            click.echo(serving_files.check_text(made))
        return
    if api.is_mixed_plan(file):
        if launcher != "torchrun" or cluster is not None:
            raise click.UsageError(
                "--launcher and --cluster: run.sh of a mixed plan starts on each node by hand, or by srun with one task a node"
            )
        written: Any = api.load_mixed(file).export(to, output, force=force)
    else:
        written = api.load(file).export(to, output, launcher=launcher, cluster=cluster, force=force)
    for warning in written.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    click.echo(f"wrote {output}: {', '.join(written.files)}")
    for note in written.notes:
        click.echo(f"note: {note}")
    if check:
        click.echo(written.check())


def _export_rl(file: Path, to: str, output: Path, *, check: bool, force: bool) -> None:
    """An RL plan as a folder for one of the frameworks."""
    from planner.api import rl_files

    made = rl_files.export_rl_file(file, to, output, force=force)
    for warning in made.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    click.echo(f"wrote {output}: {', '.join(made.files)}")
    for note in made.notes:
        click.echo(f"note: {note}")
    if check:
        click.echo(rl_files.check_rl_export(made, output))


@click.command("import")
@click.argument("file", type=YAML_FILE)
@click.option("--from", "from_", metavar="NAME", help=f"{READERS}. [by its content]")
@click.option(
    "--model", metavar="NAME", help="Model, where the file does not say it.",
    shell_complete=completed("model"),
)  # fmt: skip
@click.option("--gpus", type=int, metavar="N", help="GPUs of the job, where the file does not say.")
@click.option(
    "--hardware", metavar="NAME", help="Profile or YAML file ('plan hardware').",
    shell_complete=completed("hardware"),
)  # fmt: skip
@click.option(
    "--trainer", metavar="NAME", help="Trainer to price it for. [the one of the file]",
    shell_complete=completed("trainer"),
)  # fmt: skip
@click.option("--sequence-length", type=int, metavar="S", help="Tokens per sequence, where the file does not say.")
@click.option("--global-batch-size", type=int, metavar="B", help="Sequences per step, where the file does not say.")
@click.option(
    "--micro-batch-size", type=int, metavar="M", help="Sequences per forward pass, where the file does not say."
)
@click.option(
    "--set", "settings", metavar="NAME=VALUE", multiple=True,
    help="Value of a shell variable, or of a key of the configuration; may be repeated.",
)  # fmt: skip
@click.option("--engine", metavar="NAME", help="Engine and version of a server, where the file does not say: vllm@0.33.")
@click.option("--input-tokens", metavar="N", help="Prompt tokens of a server's requests: 2048, 8k, uniform:800-1000.")
@click.option("--output-tokens", metavar="N", help="Answer tokens of a server's requests, likewise.")
@click.option("--concurrency", metavar="N", help="Requests in flight at a server.")
@click.option("--rate", metavar="R", help="Requests that arrive at a server: 5/s, 300/min.")
@click.option("--answers", metavar="DIST", help="Tokens of an answer of RL: mean=3200,p99=8192, a number, or @file.")
@OUTPUT
def import_(file: Path, from_: str | None, output: Path | None, settings: tuple[str, ...], **said: Any) -> None:
    """Read a trainer's configuration as a plan, and price it.

    FILE holds arguments of Megatron-LM (a script, a YAML mapping, or a training log with its dump of arguments), a
    configuration of torchtitan (Python, TOML, JSON or a command line), DeepSpeed's JSON, nanotron's YAML, or a job of
    fine-tuning: LLaMA-Factory, axolotl, TRL and transformers with what they name of accelerate and DeepSpeed, ms-swift, torchtune
    (also 'tune run'), LitGPT, NeMo AutoModel, NeMo-RL, verl, recipes of Megatron-Bridge and NeMo 2 with overrides, NeMo 1 and
    commands over its YAML, and Python scripts and notebooks that build a trainer of TRL, transformers or unsloth. A script is
    followed, not run: variables, defaults, arithmetic, branches. What decides time or memory and stands nowhere is asked for by
    name, in one sentence. Settings that a plan does not hold are listed. What is said with flags goes before what is read.

    What starts a server becomes a serve plan: command lines and scripts of vLLM, SGLang and TensorRT-LLM with the files that they
    name, and Dynamo's DynamoGraphDeployment. What it does not say takes the engine's default; a benchmark in the same file says
    the load, else --input-tokens, --output-tokens, --concurrency or --rate.

    Configurations of OpenRLHF, slime, AReaL and prime-rl become an RL plan, and with --from rl:verl, rl:nemo-rl or rl:trl those of
    these: both pools, their layouts, staleness and weight sync. They have a limit of answers, not their length: --answers says it.

    \b
    Examples:
      plan import train.sh --gpus 64 --hardware h100-sxm --output plan.yaml
      plan import train.sh --set MODEL_SIZE=13B --set PP_SIZE=8
      plan import qwen3_full_sft.yaml --gpus 8 --set deepspeed=zero3
      plan import unsloth_notebook.ipynb --hardware l40s
      plan import sft/config.yaml --set accelerate=accelerate_configs/fsdp.yaml
      plan import slurm-1234.log --hardware a100-sxm-80gb
      plan import ds_config.json --model llama-8b --gpus 16 --sequence-length 4096
      plan import serve.sh --hardware h200-sxm --input-tokens 2048 --output-tokens 256 --concurrency 64
      plan import dynamo.yaml --from dynamo --set acceptance=0.7 --output serve.yaml
      plan import run_grpo.sh --from rl:verl --hardware h100-sxm --answers mean=1200,p99=4096 --output rl.yaml
    """
    from planner import api
    from planner.api import rl_files, serving_files

    asked = {name: said.pop(name) for name in ("engine", "input_tokens", "output_tokens", "concurrency", "rate", "answers")}
    if rl_files.is_rl_configuration(file, from_):
        _import_rl(file, from_, output, settings, {**said, **asked})
        return
    if asked.pop("answers") is not None:
        raise click.UsageError(f"--answers is of RL, and {file} is read as another job; --from rl:NAME reads it as one")
    if serving_files.is_server_file(file, from_):
        for name in ("trainer", "sequence_length", "global_batch_size", "micro_batch_size"):
            if said.pop(name) is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} is of a training, and {file} starts a server")
        _import_server(file, output, settings, {**said, **asked})
        return
    if (flag := next((name for name, value in asked.items() if value is not None), None)) is not None:
        raise click.UsageError(f"--{flag.replace('_', '-')} is of a server, and {file} starts none")
    plan = api.import_config(file, format=from_, settings=settings, **said)
    for one in plan.unread:
        click.secho(f"not in the plan: {one}", fg="yellow", err=True)
    if plan.noise:
        few = ", ".join(plan.noise[:4]) + (", ..." if len(plan.noise) > 4 else "")
        click.echo(f"left out: {len(plan.noise)} settings that change neither time nor memory ({few})", err=True)
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json=False)


def _import_rl(file: Path, from_: str | None, output: Path | None, settings: tuple[str, ...], said: dict[str, Any]) -> None:
    """A configuration of an RL framework as an RL plan: printed, and written where asked."""
    from planner.api import rl_calls, rl_files
    from planner.units import parse_count

    taken = {name: said.pop(name) for name in ("model", "hardware", "gpus", "answers")}
    tokens = said.pop("input_tokens")
    for name, value in said.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is not of an RL configuration, which {file} is")
    prompt = None if tokens is None else float(parse_count(tokens, what="--input-tokens")[0])
    read = rl_files.import_rl(file, format=from_, settings=settings, prompt_length=prompt, **taken)
    for note in read.notes:
        click.echo(f"note: {note}", err=True)
    if output is not None:
        read.plan.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(rl_calls.RlPlan(read.plan), as_json=False)


def _import_server(file: Path, output: Path | None, settings: tuple[str, ...], said: dict[str, Any]) -> None:
    """A server's command line as a serve plan: printed, and written where asked."""
    from planner.api.serving_files import import_server

    said |= {"input": said.pop("input_tokens"), "output": said.pop("output_tokens")}
    plan, read = import_server(file, settings=settings, **said)
    for one in read.unread:
        click.secho(f"not in the plan: {one}", fg="yellow", err=True)
    if read.noise:
        few = ", ".join(read.noise[:4])
        click.echo(f"left out: {len(read.noise)} settings that change neither time nor memory ({few})", err=True)
    for note in read.notes:
        click.echo(f"note: {note}", err=True)
    if output is not None:
        plan.file.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json=False)


@click.command()
@click.argument("words", nargs=-1)
def models(words: tuple[str, ...]) -> None:
    """List the model presets, or those whose names hold the WORDS."""
    from planner.errors import UnknownNameError
    from planner.terminal.library_tables import models_called, models_table

    names = models_called(words)
    if not names:
        raise UnknownNameError("model", " ".join(words), models_called(()))
    where = console()
    where.print(models_table(where.width, names))


@click.command()
def trainers() -> None:
    """List the trainers."""
    from planner.terminal.library_tables import trainers_table

    where = console()
    where.print(trainers_table(where.width))
