"""``plan calibrate``: measured runs correct the factors of a hardware profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.keywords import layout_values
from planner.layout import NAMES
from planner.terminal.flags import console, layout_options, progress

if TYPE_CHECKING:
    from planner.questions.calibrate.replan import Replanned
    from planner.runs import Run

LAYOUT = ("tp", "pp", "cp", "ep", "vpp", "micro_batch_size", "zero", "recompute")
"""What a log may leave open."""


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
@layout_options(LAYOUT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def calibrate(
    runs: tuple[Path, ...],
    hardware: str,
    output: Path,
    trainer: str | None,
    model: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Correct the factors of a hardware profile with runs that you measured.

    RUNS are files of `plan validate --output`, files or directories in the schema of profiles/runs/README.md, or training
    logs of Megatron-LM, torchtitan, nanotron, DeepSpeed or the transformers Trainer; flags say what a log does not. A factor
    that the runs do not determine stays as it is, with the reason. Three runs are the least; five to ten of different layouts
    tell more. Validated plans are priced and searched again with what was written.

    \b
    Examples:
      plan calibrate my-runs.yaml --hardware h100-sxm --output my-cluster.yaml
      plan calibrate validation-*.yaml --hardware h100-sxm --output my-cluster.yaml
      plan calibrate logs/*.log --hardware h100-sxm --output my-cluster.yaml
      plan calibrate ds-*.log --hardware a100-sxm-80gb --model llama-8b --sequence-length 4096 --output my-cluster.yaml
      plan --model llama-70b --gpus 64 --hardware my-cluster.yaml --trainer my-cluster.trainer.yaml
    """
    from planner.hardware import load_hardware
    from planner.model import load_model
    from planner.questions.calibrate.numbers import calibrate as fit
    from planner.questions.calibrate.output import provenance, shared_trainer, write
    from planner.questions.calibrate.sources import read_measured
    from planner.trainer import load_trainer
    from planner.trainers.logs import Given

    given = Given(model=load_model(model) if model else None, facts=_facts(flags))
    own = load_trainer(trainer) if trainer else None
    measured = read_measured(runs, hardware, trainer=own, given=given)
    shared = shared_trainer(measured)
    with progress("fitting"):
        found = fit(measured, load_hardware(hardware), shared)
    written = write(found, hardware, shared, output, trainer_base=trainer)
    changed = _replanned(measured, written)
    if as_json:
        rows = [
            {"source": one.run.source, "id": one.run.id, "of": one.fits, "before": one.before, "after": one.after,
             "held_out": one.held_out}
            for one in found.checked
        ]  # fmt: skip
        more = {"files": list(map(str, written)), "errors": rows, "plans": [one.to_dict() for one in changed]}
        click.echo(json.dumps({**provenance(found, hardware), **more}, indent=1))
        return
    from planner.questions.calibrate.show import print_calibration, print_replanned

    out = console()
    print_calibration(out, found)
    use = f"--hardware {written[0]}" + (f" --trainer {written[1]}" if len(written) > 1 else "")
    print_replanned(out, changed)
    out.print(f"wrote {' and '.join(map(str, written))}; use it with {use}", soft_wrap=True, markup=False)


def _replanned(measured: list[Run], written: list[Path]) -> list[Replanned]:
    """The validated plans with what was written."""
    from planner.hardware import load_hardware
    from planner.questions.calibrate.replan import replan
    from planner.trainer import load_trainer

    if not any(run.of_plan for run in measured):
        return []
    files = [str(path) for path in written]
    with progress("planning again"):
        return replan(measured, load_hardware(files[0]), load_trainer(files[1]) if files[1:] else None, files=files)


def _facts(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags as fields of a row."""
    values = layout_values(flags)
    facts: dict[str, Any] = {
        "parallel.gpus": flags["gpus"], "model.seq": flags["sequence_length"], "batch.global": flags["global_batch_size"],
        "batch.micro": values.get("micro_batch_size"), "precision": flags["precision"],
        "recompute": NAMES["recompute"][values["recompute"]] if "recompute" in values else None,
    }  # fmt: skip
    return facts | {f"parallel.{name}": values.get(name) for name in ("tp", "pp", "cp", "ep", "vpp", "zero")}
