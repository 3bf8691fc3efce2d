"""``plan validate``: a plan compared with what torch, or its own trainer, really does with it."""

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from planner.library import require_folder
from planner.terminal.flags import completed, emit, progress

PATH = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", metavar="PLAN", type=PATH)
@click.option("--rung", metavar="NAME", default="auto", help="full, truncated, rank, meta or auto: the highest. [auto]")
@click.option(
    "--rank", type=int, multiple=True, metavar="R", help="Rungs rank, meta: this rank; repeatable. [of 3 stages]"
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What runs it. [cuda where there is a GPU]")
@click.option("--steps", type=click.IntRange(1, 1000), default=5, metavar="N", help="Steps that are measured. [5]")
@click.option("--warmup", type=click.IntRange(0, 1000), default=2, metavar="N", help="Steps before them. [2]")
@click.option(
    "--timeout",
    default="60s",
    metavar="TIME",
    help="A step that takes longer has hung, where 10 times its prediction are not more; the first has 4 times that. [60s]",
)
@click.option("--trace", type=PATH, metavar="FILE", help="Trace one more step.")
@click.option("--no-parity", is_flag=True, help="Do not first check on a tiny model that the ranks train like one.")
@click.option(
    "--trainer", metavar="NAME", help="Run its export in torchtitan or megatron and read the log.",
    shell_complete=completed("trainer"),
)  # fmt: skip
@click.option("--trainer-command", metavar="CMD", help="Started in the export's folder. [bash smoke.sh]")
@click.option("--trainer-log", type=PATH, metavar="FILE", help="A log that exists already.")
@click.option("--top", type=click.IntRange(2, 20), metavar="N", help="Run the N best plans of the job and rank them.")
@click.option("--finalist", type=PATH, multiple=True, metavar="PLAN", help="Run and rank it too; repeatable, instead of --top.")
@click.option("--print-commands", is_flag=True, help="Print the torchrun and SLURM commands for --nodes and stop.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Machines, for --print-commands. [by the plan]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--output", type=PATH, metavar="FILE", help="Write validation.yaml; of a server: JSON as vllm bench serve does.")
@click.option("--url", metavar="URL", help="Of a running server, for a serve plan: http://localhost:8000.")
@click.option("--served-model", metavar="NAME", help="The server's name for the model. [the first that it lists]")
@click.option("--requests", type=click.IntRange(1, 10**6), metavar="N", help="Requests to the server. [by the load of the plan]")
@click.option("--limit", default="10min", metavar="TIME", help="Of a run against a server, probe included. [10min]")
def validate(
    file: Path, rung: str, device: str | None, print_commands: bool, nodes: int | None, as_json: bool,
    output: Path | None, url: str | None, **flags: Any,
) -> None:  # fmt: skip
    """Compare a plan with what torch does with it. PLAN is a file written by --output of `plan` or `plan estimate`.

    A serve plan is compared with a running server: --url names any OpenAI-compatible one, which gets the plan's load (requests in
    flight, or Poisson arrivals), streamed; TTFT, TPOT and throughput as vllm bench serve defines them are compared with the
    prediction. Ctrl-C ends the run and keeps what was measured.

    Of a mixed plan every unlike stage is run as one of its ranks would: rung `meta`, or rung `rank` where its kind is this
    machine's
    device. What lies between the ranks is said to be unchecked.

    Rung `full` runs the plan on all its ranks: on the GPUs of this machine, under torchrun or srun on many machines
    (--print-commands shows how), or with gloo on the CPU. Rung `truncated` runs fewer layers and replicas with the same shards
    on a few devices, and scales up. Rung `rank` runs some ranks alone on one device: computation and memory are measured,
    communication is priced. Rung `meta` needs no GPU: the modules, the optimizer and one step of a rank, at full size, on
    fake tensors; memory and collectives are compared. All limits of time are said before the start. Exit codes: 0 it ran,
    1 it ran out of memory, hung, lost a rank, was stopped or trains differently than one process (recorded in --output, with
    what was measured before), 2 the input is wrong.

    \b
    Examples:
      plan --model llama-70b --gpus 64 --trainer torchtitan --output plan.yaml
      plan validate plan.yaml --rung meta
      plan validate mixed.yaml --rung meta
      plan validate plan.yaml --print-commands --nodes 8
      plan validate plan.yaml --trainer megatron --steps 10 --output validation.yaml
      plan validate plan.yaml --trainer torchtitan --trainer-log slurm-1234.log --output validation.yaml
      plan validate plan.yaml --top 3 --output finalists.yaml
      plan validate plan.yaml --finalist other.yaml --trainer megatron --output finalists.yaml
      plan validate serve.yaml --url http://localhost:8000 --output bench.json
    """
    from planner.api.plan_kinds import plan_kind

    kind = plan_kind(file)
    if kind == "serve":
        of_server = {name: flags[name] for name in ("served_model", "requests", "limit", "warmup")}
        _validate_server(file, url, output, as_json, of_server)
    if kind == "mixed":
        _validate_mixed(file, rung, device, output, as_json, flags)
    if url is not None:
        raise click.UsageError("--url is of a server, and the plan is of a training; give a serve plan")
    from planner.lab.run.levels import named
    from planner.lab.run.request import Request, many_machines
    from planner.plan_file import load_plan

    flags = {name: value for name, value in flags.items() if name not in ("served_model", "requests", "limit")}
    named(rung)
    require_folder(output)
    plan = load_plan(file)
    if print_commands:
        click.echo(many_machines(plan, nodes, device), nl=False)
        return
    asked = Request(plan=plan, file=file, rung=rung, device=device, flags=flags, output=output, as_json=as_json)
    finalists = asked.finalists()
    if not (asked.validate_finalists(finalists) if finalists else asked.validate()):
        sys.exit(1)


def _validate_mixed(
    file: Path, rung: str, device: str | None, output: Path | None, as_json: bool, flags: dict[str, Any]
) -> NoReturn:  # fmt: skip
    """The unlike stages of a mixed plan, one by one; exit code 1 where one did not come to its end."""
    from planner.api.mixed_calls import validate_mixed

    for name in ("trainer", "trainer_log", "top", "finalist", "trace", "rank"):
        if flags.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is of plans of one kind of GPU; a mixed plan is validated stage by stage")
    with progress("stages") as say:
        found = validate_mixed(file, rung=rung, device=device, steps=flags["steps"], warmup=flags["warmup"], progress=say)
    if output is not None:
        found.save(output)
        click.echo(f"wrote {output}", err=True)
    emit(found, as_json)
    sys.exit(0 if found.to_dict()["outcome"] == "completed" else 1)


def _validate_server(file: Path, url: str | None, output: Path | None, as_json: bool, asked: dict[str, Any]) -> NoReturn:
    """A serve plan against a running server; exit code 1 where the run ended before its end."""
    from planner.api.serving_files import validate_server

    if url is None:
        raise click.UsageError(f"{file} is a serve plan: say where its server runs, like --url http://localhost:8000")
    with progress("measuring") as say:
        found = validate_server(file, url=url, output=output, progress=say, **asked)
    emit(found, as_json)
    if output is not None:
        click.echo(f"wrote {output}", err=True)
    sys.exit(1 if found.found.result.stopped else 0)
