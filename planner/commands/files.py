"""Commands between plans and the files of trainers, engines and RL frameworks: export, import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.plans import OUTPUT, YAML_FILE
from planner.errors import listed
from planner.terminal.flags import completed, emit
from planner.trainers import SERVERS, having

if TYPE_CHECKING:
    from planner.api.results import Exported

READERS = listed([*having("readback"), *SERVERS])
OWN_START = {
    "serve": "a serve plan has scripts, or is exported to dynamo or llm-d",
    "mixed": "run.sh of a mixed plan starts on each node by hand, or by srun with one task a node",
    "rl": "an RL plan has its framework's own launch script",
}
"""How plans of other kinds are started."""


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
        given = {"the plan file": file, "--to": to, "--output": output}
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise click.UsageError(f"{missing} missing, like: plan export plan.yaml --to megatron --output run/")
    made = _written(file, to, output, launcher, cluster, force)
    for warning in made.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    click.echo(f"wrote {output}: {', '.join(made.files)}")
    for note in made.notes:
        click.echo(f"note: {note}")
    if check:
        click.echo(made.check())


def _written(file: Path, to: str, output: Path, launcher: str, cluster: Path | None, force: bool) -> Exported:
    """What was written of a plan of any kind. Raises PlannerError."""
    from planner import api
    from planner.api import rl_files, serving_files

    kind = api.plan_kind(file)
    if kind in OWN_START and (launcher != "torchrun" or cluster is not None):
        raise click.UsageError(f"--launcher and --cluster are of trainings on one kind of node: {OWN_START[kind]}")
    if kind == "rl":
        return rl_files.export_rl_file(file, to, output, force=force)
    if kind == "serve":
        return serving_files.export_file(file, to, output, force=force)
    if kind == "mixed":
        return api.load_mixed(file).export(to, output, force=force)
    return api.load(file).export(to, output, launcher=launcher, cluster=cluster, force=force)


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
    commands over its YAML, and Python scripts and notebooks that build a trainer of TRL, transformers or unsloth, or train in a
    loop of their own over accelerate, FSDP or DDP of torch, or DeepSpeed's engine. A script is followed, not run: variables,
    defaults, arithmetic, branches. What decides time or memory and stands nowhere is asked for by name, in one sentence. Settings
    that a plan does not hold are listed. What is said with flags goes before what is read.

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
    _tell(plan)
    if output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json=False)


def _tell(read: Any) -> None:
    """What of a configuration is not in the plan, and what was taken for what."""
    for one in read.unread:
        click.secho(f"not in the plan: {one}", fg="yellow", err=True)
    if read.noise:
        few = ", ".join(read.noise[:4]) + (", ..." if len(read.noise) > 4 else "")
        click.echo(f"left out: {len(read.noise)} settings that change neither time nor memory ({few})", err=True)
    for note in read.notes:
        click.echo(f"note: {note}", err=True)


def _import_rl(file: Path, from_: str | None, output: Path | None, settings: tuple[str, ...], said: dict[str, Any]) -> None:
    """A configuration of an RL framework as an RL plan: printed, and written where asked."""
    from planner.api import rl_calls, rl_files
    taken = {name: said.pop(name) for name in ("model", "hardware", "gpus", "answers")}
    tokens = said.pop("input_tokens")
    for name, value in said.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is not of an RL configuration, which {file} is")
    read = rl_files.import_rl(file, format=from_, settings=settings, prompt_length=tokens, **taken)
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
    _tell(read)
    if output is not None:
        plan.file.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(plan, as_json=False)
