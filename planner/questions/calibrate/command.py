"""``plan calibrate``: measured runs correct the factors of a hardware profile."""

from pathlib import Path
from typing import Any

import click

from planner.keywords import LOGGED
from planner.terminal.flags import emit, layout_options, progress


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--hardware", required=True, metavar="NAME", help="Profile to correct, or a YAML file ('plan hardware').")
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Profile to write.")
@click.option("--trainer", metavar="NAME", help="Trainer of the runs, or a YAML file. [by the framework of each run]")
@click.option("--model", metavar="NAME", help="Model of the logs, where they do not say it.")
@click.option("--gpus", type=int, metavar="N", help="GPUs of the logs, where they do not say it.")
@click.option("--sequence-length", type=int, metavar="S", help="Tokens per sequence of the logs, likewise.")
@click.option("--global-batch-size", type=int, metavar="B", help="Sequences per step of the logs, likewise.")
@click.option("--precision", metavar="NAME", help="Precision of the logs, likewise. [bf16]")
@layout_options(LOGGED)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def calibrate(runs: tuple[Path, ...], hardware: str, output: Path, as_json: bool, **flags: Any) -> None:
    """Correct the factors of a hardware profile with runs that you measured.

    RUNS are files of `plan validate --output`, files or directories in the schema of profiles/runs/README.md, or training
    logs of Megatron-LM, torchtitan, nanotron, DeepSpeed or the transformers Trainer; flags say what a log does not. A factor
    that the runs do not determine stays as it is, with the reason. Three runs are the least; five to ten of different layouts
    show more. Validated plans are priced and searched again with what was written.

    \b
    Examples:
      plan calibrate my-runs.yaml --hardware h100-sxm --output my-cluster.yaml
      plan calibrate validation-*.yaml --hardware h100-sxm --output my-cluster.yaml
      plan calibrate logs/*.log --hardware h100-sxm --output my-cluster.yaml
      plan calibrate ds-*.log --hardware a100-sxm-80gb --model llama-8b --sequence-length 4096 --output my-cluster.yaml
      plan --model llama-70b --gpus 64 --hardware my-cluster.yaml --trainer my-cluster.trainer.yaml
    """
    from planner import api

    with progress("fitting") as say:
        answer = api.calibrate(runs, hardware=hardware, output=output, progress=say, **flags)
    emit(answer, as_json, indent=1)
