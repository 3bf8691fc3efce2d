"""What the targets around Hugging Face share: config.json of the model, the arguments of transformers, the script."""

from typing import Any

from planner.layout import Recompute
from planner.model import ModelSpec
from planner.trainers.bundle import model_config
from planner.trainers.bundle.quoting import Expression, filled, json_text
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered

OPTIMIZERS = {"adam": "adamw_torch_fused", "adam_8bit": "adamw_torch_8bit", "sgd": "sgd"}
"""transformers.training_args.OptimizerNames, by optimizer."""
LAYERS = {
    "llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer", "mixtral": "MixtralDecoderLayer",
}  # fmt: skip
"""Class of one transformer layer, by model_type: the families that the script was run with."""


def family(model: ModelSpec) -> str:
    """The model_type of LAYERS that has exactly this architecture; empty = none."""
    kind = model_config.family(model)
    return kind if kind in LAYERS else ""


def shared_refusals(job: ExportJob) -> list[str]:
    """What transformers' Trainer does not have, whatever shards the model."""
    if job.layout.recompute == Recompute.SELECTIVE:
        return ["recompute selective: checkpoints of transformers cover whole layers; use full or none"]
    return []


def training_arguments(job: ExportJob) -> dict[str, Any]:
    """Arguments of transformers.TrainingArguments that the plan decides, every one written out."""
    layout, work = job.layout, job.workload
    return {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "bf16": work.precision in ("bf16", "fp8"),
        "fp16": work.precision == "fp16",
        "optim": OPTIMIZERS[work.optimizer],
        **({"optim_args": "momentum=0.9"} if work.optimizer == "sgd" else {}),
        "torch_compile": False,
        "ddp_find_unused_parameters": False,
    }


def rendered(job: ExportJob, own: dict[str, str], training: dict[str, Any], launcher: tuple[str, ...] = ()) -> Rendered:
    """The script with training.json around a file of the target's own: what is behind transformers differs, this does not.

    ``training``: settings of training.json; ``launcher``: words before the script, of one that starts a process per GPU itself.
    """
    work, kind = job.workload, family(job.model)
    settings = {
        "training_arguments": training.pop("training_arguments"), "sequence_length": work.sequence_length,
        "attention": "sdpa", "lora_rank": work.lora_rank, "offload_activations": False, **training,
    }  # fmt: skip
    files = {**own, "training.json": json_text(settings), "train.py": filled("transformers", "transformers_train.txt")}
    if kind:
        longest = max(job.model.max_sequence_length, work.sequence_length)
        files["model/config.json"] = json_text({**(model_config.model_config(job.model) or {}), "max_position_embeddings": longest})
    return run_of(
        job, "transformers", files, family=kind, launcher=Expression(" ".join(launcher)),
        start="node" if launcher else "torchrun",
        options=Expression("--deepspeed ds_config.json" if "ds_config.json" in own else ""),
    )  # fmt: skip
