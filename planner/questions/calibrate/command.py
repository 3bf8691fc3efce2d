"""``plan calibrate``: measured runs correct the factors of a hardware profile."""

import re
from pathlib import Path
from typing import Any

import click

from planner.errors import PlannerError, shown
from planner.keywords import LOGGED
from planner.terminal.flags import completed, emit, layout_options, progress


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--hardware", metavar="NAME", help="Profile to correct, or a YAML file ('plan hardware').",
    shell_complete=completed("hardware"),
)  # fmt: skip
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Profile to write.")
@click.option(
    "--trace", multiple=True, metavar="PLAN=FILE",
    help="A plan with the trace of torch.profiler of its run, a folder or a pattern; may be repeated.",
)  # fmt: skip
@click.option(
    "--bench", multiple=True, metavar="PLAN=FILE", help="A serve plan with the JSON of its benchmark; may be repeated."
)
@click.option("--rl", multiple=True, metavar="PLAN=LOG", help="An RL plan with the log of its run; may be repeated.")
@click.option(
    "--trainer", metavar="NAME", help="Trainer of the runs, or a YAML file. [by the framework of each run]",
    shell_complete=completed("trainer"),
)  # fmt: skip
@click.option(
    "--model", metavar="NAME", help="Model of the logs, where they do not say it.",
    shell_complete=completed("model"),
)  # fmt: skip
@click.option("--gpus", type=int, metavar="N", help="GPUs of the logs, where they do not say it.")
@click.option("--sequence-length", type=int, metavar="S", help="Tokens per sequence of the logs, likewise.")
@click.option("--global-batch-size", type=int, metavar="B", help="Sequences per step of the logs, likewise.")
@click.option("--precision", metavar="NAME", help="Precision of the logs, likewise. [bf16]")
@layout_options(LOGGED)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def calibrate(
    runs: tuple[Path, ...],
    hardware: str | None,
    output: Path,
    trace: tuple[str, ...],
    bench: tuple[str, ...],
    rl: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Correct the factors of a hardware profile with runs that you measured.

    RUNS are files of `plan validate --output`, files or directories in the schema of profiles/runs/README.md, or training
    logs of Megatron-LM, torchtitan, nanotron, DeepSpeed or the transformers Trainer; flags say what a log does not. A factor
    that the runs do not determine stays as it is, with the reason. Three runs are the least; five to ten of different layouts
    show more. Validated plans are priced and searched again with what was written. A trace of torch.profiler with its plan
    is a run too, unless the host bounds its step: then it is named and left out.

    Benchmarks of servers (--bench) correct the host times of their engine instead, which differ between machines: two or more, of
    few and of many requests at once. --output is then an engine file for plan serve --engine.

    Logs of RL (--rl, two or more of one framework) give a factor for each phase: --output is then a file for plan rl --calibrated.

    \b
    Examples:
      plan calibrate my-runs.yaml --hardware h100-sxm --output my-cluster.yaml
      plan calibrate validation-*.yaml --hardware h100-sxm --output my-cluster.yaml
      plan calibrate logs/*.log --hardware h100-sxm --output my-cluster.yaml
      plan calibrate runs.yaml --trace a.yaml=a/rank0.json.gz --hardware h100-sxm --output my-cluster.yaml
      plan calibrate ds-*.log --hardware a100-sxm-80gb --model llama-8b --sequence-length 4096 --output my-cluster.yaml
      plan --model llama-70b --gpus 64 --hardware my-cluster.yaml --trainer my-cluster.trainer.yaml
      plan calibrate --rl a.yaml=a.log --rl b.yaml=b.log --output my-rl.yaml
      plan calibrate --bench serve.yaml=bench-8.json --bench serve.yaml=bench-64.json --output my-engine.yaml
    """
    from planner import api

    if rl:
        if runs or trace or hardware or bench:
            raise click.UsageError("--rl fits factors of phases: give no RUNS, --trace, --bench or --hardware with it")
        from planner.api import rl_files

        emit(rl_files.calibrate_rl([_plan_and_trace(one, "--rl") for one in rl], output=output), as_json, indent=1)
        click.echo(f"wrote {output}", err=True)
        return
    if bench:
        if runs or trace or hardware:
            raise click.UsageError("--bench fits an engine's host times: give no RUNS, --trace or --hardware with it")
        from planner.api.serving_files import calibrate_server

        emit(calibrate_server([_plan_and_trace(one, "--bench") for one in bench], output=output), as_json, indent=1)
        click.echo(f"wrote {output}", err=True)
        return
    if hardware is None:
        raise click.UsageError("which profile is corrected? give --hardware")
    if not runs and not trace:
        raise click.UsageError("what was measured? give RUNS, or --trace PLAN=FILE")
    traces = [_plan_and_trace(one) for one in trace]
    with progress("fitting") as say:
        answer = api.calibrate(runs, hardware=hardware, output=output, traces=traces, progress=say, **flags)
    emit(answer, as_json, indent=1)


def _plan_and_trace(text: str, flag: str = "--trace") -> tuple[str, str]:
    """The two files of --trace. A path may hold an equals sign: the plan ends with .yaml."""
    found = re.fullmatch(r"(.+?\.ya?ml)=(.+)", text)
    if found is None:
        like = {"--bench": "bench.json", "--rl": "run.log"}.get(flag, "rank0.json.gz")
        raise PlannerError(f"{flag} {shown(text)}: write it like plan.yaml={like}")
    return found[1], found[2]
