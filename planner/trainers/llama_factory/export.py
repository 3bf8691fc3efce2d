"""LLaMA-Factory: its YAML file over DeepSpeed's JSON or accelerate's FSDP file."""

from __future__ import annotations

from typing import Any

from planner import library
from planner.layout import Recompute
from planner.trainers.accelerate.export import LAUNCHER
from planner.trainers.bundle.quoting import filled_yaml, json_text
from planner.trainers.bundle.target import ExportJob, Rendered, Setting
from planner.trainers.llama_factory import VERSIONS
from planner.trainers.transformers.fine_tuning import (
    MODEL,
    SMOKE_PREPARE,
    SMOKE_STEPS,
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
    words = ("-m", "llamafactory.launcher", "llama_factory.yaml", "model_name_or_path=$MODEL")
    words = words if sharded else (*LAUNCHER, *words)
    registry = {"smoke": {"file_name": "smoke.jsonl", "columns": {"prompt": "text"}}}
    why = "LLaMA-Factory takes DeepSpeed for a distributed run only with it."
    return Rendered(
        files={
            "llama_factory.yaml": library.dump_yaml(config(job)),
            **({"ds_config.json": json_text(below)} if sharded else {"accelerate.yaml": library.dump_yaml(below)}),
            "make_smoke_data.py": smoke_data(job), "data/dataset_info.json": json_text(registry),
        },
        entry=(*words, "dataset=$DATASET", "dataset_dir=$DATASET_DIR", "train_from_scratch=$FROM_SCRATCH", "max_steps=$STEPS"),
        smoke=(*words, "dataset=smoke", "train_from_scratch=true", f"max_steps={SMOKE_STEPS}", "output_dir=smoke-output",
               "save_strategy=no"),
        prepare=SMOKE_PREPARE,
        start="torchrun" if sharded else "node",
        environment={"FORCE_TORCHRUN": Setting("1", why)} if sharded else {},
        variables={
            "MODEL": MODEL,
            "DATASET": Setting("smoke", "Name of your data in dataset_info.json; 'smoke' is random text."),
            "DATASET_DIR": Setting("data", "Folder of dataset_info.json."),
            "FROM_SCRATCH": Setting("false", "true: random weights; false: those of MODEL."),
            "STEPS": Setting("1000", "Optimizer steps."),
        },
        notes=(
            "Stage pt trains on packed text of the full length, which is what was priced; with stage sft and short samples a "
            "step has fewer tokens.",
            "The learning rate is a placeholder.",
            "LLaMA-Factory checks that fitting versions of transformers, accelerate and trl are installed: use an environment "
            "of its own.",
        ),
        install=(f"pip install 'llamafactory{VERSIONS}'", *(("pip install 'deepspeed>=0.16'",) if sharded else ())),
    )  # fmt: skip
