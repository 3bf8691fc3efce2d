"""``plan doctor``: what was measured against a plan, and what would explain the gap."""

import re
from pathlib import Path

import click

from planner.terminal.flags import emit, progress


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--measured", metavar="TIME",
    help="Time of an optimizer step: 14.2 (seconds), 850ms; of a serve plan the JSON of a benchmark; of an RL plan a log.",
)  # fmt: skip
@click.option("--memory", metavar="BYTES", help="Peak memory of one GPU, like 71GiB.")
@click.option(
    "--memory-kind",
    type=click.Choice(["device", "reserved", "allocated"]),
    default="device",
    help="What --memory is the peak of: nvidia-smi, torch's reserved or allocated bytes. [device]",
)
@click.option(
    "--trace", multiple=True, metavar="FILE",
    help="Trace of torch.profiler (.json, .json.gz), a folder of them or a pattern; may be repeated: one file for each rank.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def doctor(
    file: Path, measured: str | None, memory: str | None, memory_kind: str, trace: tuple[str, ...], as_json: bool
) -> None:
    """Compare what was measured with a plan, and list what would explain the gap.

    Each mechanism (slow link, no overlap, recompute on, slow host, imbalance, a slow GPU, ...) is priced again with the cost
    model; the size that it would need is printed with how plausible that is and the check that shows it. Measure a step that
    is no warm-up, on the slowest rank; memory on the GPU with the most.

    A trace compares the step with the plan part by part: how busy the GPU is, computation, communication that nothing hides by
    process group, waits for the host and for other ranks. Its step time counts where --measured is not given, and its parts weigh
    for and against each mechanism. Record three steps or more, with schedule(wait=1, warmup=2, active=4) and prof.step() after
    each optimizer step.

    For a serve plan, --measured is the JSON of vllm bench serve, sglang.bench_serving, InferenceX or plan validate: the largest
    deviations are named, at the load that was measured, with what would explain them.

    For an RL plan, --measured is the log of verl, NeMo RL, OpenRLHF, TRL, slime, AReaL or prime-rl: the phases of its steps are
    compared with the plan's, and the largest gap is named.

    \b
    Examples:
      plan doctor plan.yaml --measured 14.2s
      plan doctor plan.yaml --measured 14.2s --memory 71GiB --memory-kind reserved
      plan doctor plan.yaml --memory 78GiB --json
      plan doctor plan.yaml --trace rank0.json.gz
      plan doctor plan.yaml --trace 'traces/*.json.gz' --measured 14.2s
      plan doctor serve.yaml --measured bench.json
      plan doctor rl.yaml --measured run.log
    """
    from planner import api
    from planner.api import rl_files, serving_files

    kind = api.plan_kind(file)
    if kind == "rl":
        if measured is None or _is_time(measured) or memory is not None or trace:
            what = f"the log of its framework{_not(measured)}"
            raise click.UsageError(f"{file} is an RL plan: give --measured with {what}, and nothing else")
        emit(rl_files.doctor_rl(file, measured), as_json)
        return
    if kind == "serve":
        if measured is None or _is_time(measured) or memory is not None or trace:
            what = f"the JSON of a benchmark{_not(measured)}"
            raise click.UsageError(f"{file} is a serve plan: give --measured with {what}, and nothing else")
        emit(serving_files.doctor_server(file, measured), as_json)
        return

    with progress("pricing what may be wrong") as say:
        found = api.doctor(file, measured=measured, memory=memory, memory_kind=memory_kind, trace=trace, progress=say)
    emit(found, as_json)


def _is_time(measured: str) -> bool:
    """Whether what was measured is no file but a time, such as 14.2s."""
    return re.fullmatch(r"[\d.]+ *[a-z]{0,3}", measured) is not None and not Path(measured).exists()


def _not(measured: str | None) -> str:
    """The time that stands where a file is asked for."""
    return f", not {measured}" if measured and _is_time(measured) else ""
