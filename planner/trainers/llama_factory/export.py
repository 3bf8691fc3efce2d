"""LLaMA-Factory: its YAML file over DeepSpeed's JSON or accelerate's FSDP file."""

from typing import Any

from planner import library
from planner.layout import Recompute
from planner.trainers.accelerate.export import LAUNCHER
from planner.trainers.bundle.quoting import Expression, filled_yaml, json_text
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered, Setting
from planner.trainers.transformers.fine_tuning import (
    SMOKE_PREPARE,
    back_end,
    front_end_refusals,
    on_deepspeed,
    smoke_data,
)
from planner.trainers.transformers.training_run import OPTIMIZERS


def refusals(job: ExportJob) -> list[str]:
    """What LLaMA-Factory or the back end below it cannot run, with its rule."""
    found = front_end_refusals(job, "LLaMA-Factory")
    if job.layout.offload_activations:
        found.append("offload_activations: LLaMA-Factory has no setting for it; set it to false")
    return found


def config(job: ExportJob) -> dict[str, Any]:
    """The YAML file. Model and data come from the command line, which is merged over it [hparams/parser.py: read_args]."""
    layout, work, sharded = job.layout, job.workload, on_deepspeed(job)
    # FSDP turns recompute on in accelerate's file, and twice would be wrong.
    checkpoints = layout.recompute == Recompute.FULL and (sharded or layout.zero == 0)
    tuned = {"finetuning_type": "lora", "lora_rank": work.lora_rank, "lora_target": "all"}
    data = {"stage": "pt", "do_train": True, **(tuned if work.lora_rank else {"finetuning_type": "full"})}
    data |= filled_yaml(
        job, "llama_factory", "llama_factory.txt", bf=work.precision in ("bf16", "fp8"), fp=work.precision == "fp16",
        low=work.precision == "fp8", optimizer=OPTIMIZERS[work.optimizer], keeps=not checkpoints, deepspeed=sharded,
    )  # fmt: skip
    if sharded:
        data["deepspeed"] = "ds_config.json"
    if work.precision == "fp8":
        data["fp8_backend"] = "torchao"
    return data


def render(job: ExportJob) -> Rendered:
    """llama_factory.yaml, the file of the library below, and data for the smoke run."""
    sharded, below = on_deepspeed(job), back_end(job).config(job)
    registry = {"smoke": {"file_name": "smoke.jsonl", "columns": {"prompt": "text"}}}
    files = {
        "llama_factory.yaml": library.dump_yaml(config(job)),
        **({"ds_config.json": json_text(below)} if sharded else {"accelerate.yaml": library.dump_yaml(below)}),
        "make_smoke_data.py": smoke_data(job), "data/dataset_info.json": json_text(registry),
    }  # fmt: skip
    more: dict[str, Any] = {"prepare": SMOKE_PREPARE, "start": "torchrun" if sharded else "node"}
    if sharded:
        force = Setting("1", "LLaMA-Factory takes DeepSpeed for a distributed run only with it.")
        more |= {"environment": {"FORCE_TORCHRUN": force}, "install": ("pip install 'deepspeed>=0.16'",)}
    launcher = Expression("" if sharded else " ".join(LAUNCHER))
    return run_of(job, "llama_factory", files, more, launcher=launcher)
