"""LLaMA-Factory: its YAML file over DeepSpeed's JSON or accelerate's FSDP file."""

from __future__ import annotations

import json
from typing import Any

from planner import library
from planner.layout import Recompute
from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target, library_trainer
from planner.trainers.deepspeed import export as deepspeed
from planner.trainers.transformers.fine_tuning import MODEL, SMOKE_PREPARE, SMOKE_STEPS, shared_refusals, smoke_data
from planner.trainers.transformers.training_run import OPTIMIZERS

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")


def refusals(job: ExportJob) -> list[str]:
    """What LLaMA-Factory or the back end below it cannot run, with its rule."""
    found = shared_refusals(job, "LLaMA-Factory", offloads_activations=False)
    below = _back_end(job).refusals(job)
    found += [one for one in below if not any(one.split(":")[0] == known.split(":")[0] for known in found)]
    if job.workload.precision not in PRECISIONS:
        found.append(
            f"precision {job.workload.precision}: LLaMA-Factory trains in {', '.join(PRECISIONS)} [Fp8Arguments]; use one of them"
        )
    return found


def _back_end(job: ExportJob) -> Any:
    """The module that writes the file of the library below."""
    return deepspeed if library_trainer(job.plan.trainer) == "deepspeed" else accelerate


def config(job: ExportJob) -> dict[str, Any]:
    """The YAML file. Model and data come from the command line, which is merged over it [hparams/parser.py: read_args]."""
    layout, work, sharded = job.layout, job.workload, _back_end(job) is deepspeed
    data: dict[str, Any] = {
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "lora" if work.lora_rank else "full",
        **({"lora_rank": work.lora_rank, "lora_target": "all"} if work.lora_rank else {}),
        "cutoff_len": work.sequence_length,
        "packing": True,
        "flash_attn": "sdpa",
        "per_device_train_batch_size": int(layout.micro_batch_size),
        "gradient_accumulation_steps": int(layout.num_microbatches),
        "bf16": work.precision in ("bf16", "fp8"),
        "fp16": work.precision == "fp16",
        "fp8": work.precision == "fp8",
        "pure_bf16": False,
        "optim": OPTIMIZERS[work.optimizer],
        "learning_rate": deepspeed.LEARNING_RATE,
        "disable_gradient_checkpointing": not _checkpoints(job),
        "use_reentrant_gc": sharded,
        "dataset_dir": "data",
        "output_dir": "output",
        "report_to": "none",
        "logging_steps": 1,
        "ddp_timeout": 1800,
        "dataloader_drop_last": True,
    }
    if sharded:
        data["deepspeed"] = "ds_config.json"
    if work.precision == "fp8":
        data["fp8_backend"] = "torchao"
    return data


def _checkpoints(job: ExportJob) -> bool:
    """Whether LLaMA-Factory itself turns recompute on; FSDP does it in accelerate's file, and twice would be wrong."""
    full = int(job.layout.recompute) == Recompute.FULL
    return full and (_back_end(job) is deepspeed or int(job.layout.zero) == 0)


def render(job: ExportJob) -> Rendered:
    """llama_factory.yaml, the file of the library below, and data for the smoke run."""
    sharded = _back_end(job) is deepspeed
    below = (
        {"ds_config.json": json.dumps(deepspeed.config(job), indent=2) + "\n"}
        if sharded
        else {"accelerate.yaml": library.dump_yaml(accelerate.config(job))}
    )
    launcher: list[str] = [] if sharded else [
        "accelerate", "launch", "--config_file", "accelerate.yaml", "--machine_rank", "$NODE_RANK",
        "--main_process_ip", "$MASTER_ADDR", "--main_process_port", "$MASTER_PORT",
    ]  # fmt: skip
    words = [*launcher, "-m", "llamafactory.launcher", "llama_factory.yaml", "model_name_or_path=$MODEL"]
    registry = {"smoke": {"file_name": "smoke.jsonl", "columns": {"prompt": "text"}}}
    return Rendered(
        files={
            "llama_factory.yaml": library.dump_yaml(config(job)), **below,
            "make_smoke_data.py": smoke_data(job), "data/dataset_info.json": json.dumps(registry, indent=2) + "\n",
        },
        entry=(*words, "dataset=$DATASET", "dataset_dir=$DATASET_DIR", "train_from_scratch=$FROM_SCRATCH", "max_steps=$STEPS"),
        smoke=(*words, "dataset=smoke", "train_from_scratch=true", f"max_steps={SMOKE_STEPS}", "output_dir=smoke-output",
               "save_strategy=no"),
        prepare=SMOKE_PREPARE,
        start="torchrun" if sharded else "node",
        environment={"FORCE_TORCHRUN": Setting(value="1", why="LLaMA-Factory takes DeepSpeed for a distributed run only with it.")}
        if sharded
        else {},
        variables={
            "MODEL": MODEL,
            "DATASET": Setting(value="smoke", why="Name of your data in dataset_info.json; 'smoke' is random text."),
            "DATASET_DIR": Setting(value="data", why="Folder of dataset_info.json."),
            "FROM_SCRATCH": Setting(value="false", why="true: random weights; false: those of MODEL."),
            "STEPS": Setting(value="1000", why="Optimizer steps."),
        },
        notes=(
            "Stage pt trains on packed text of the full length, which is what was priced; with stage sft and short samples a "
            "step has fewer tokens.",
            "The learning rate is a placeholder.",
            "LLaMA-Factory checks that fitting versions of transformers, accelerate and trl are installed: use an environment "
            "of its own.",
        ),
        install=(f"pip install 'llamafactory{TARGET.versions}'", *(("pip install 'deepspeed>=0.16'",) if sharded else ())),
    )  # fmt: skip


TARGET = Target(
    name="llama-factory",
    title="LLaMA-Factory (YAML over DeepSpeed or FSDP)",
    trainers=("deepspeed", "fsdp"),
    versions=">=0.9.5,<0.10",
    package="llamafactory",
    level="parsed",
    source="llamafactory 0.9.5: hparams/parser.py, hparams/training_args.py, model/model_utils/checkpointing.py",
    refusals=refusals,
    render=render,
)
