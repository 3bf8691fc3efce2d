"""PyTorch itself: one script and plan.json, no framework."""

from typing import Any

from planner.layout import NAMES, Module, Recompute, Schedule
from planner.trainers.bundle.fully_shard import SCHEDULES, beyond_llama, shared_refusals
from planner.trainers.bundle.quoting import filled, json_text
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules

OPTIMIZERS = ("adam", "sgd")
PRECISIONS = ("bf16", "fp32")


def refusals(job: ExportJob) -> list[str]:
    """What the script has not."""
    layout, model, work = job.layout, job.model, job.workload
    found = unknown_choices(job, "PyTorch", OPTIMIZERS, PRECISIONS)
    found += unknown_modules(job, "PyTorch", Module.EVERY_SECOND_MATMUL)
    if beyond_llama(model, experts=model.is_moe, MLA=model.is_mla):
        found.append(
            f"{model.name}: the script has dense layers with RMS norms, rotary positions, SwiGLU and grouped-query attention; "
            "use another target, or write the layer into train.py"
        )
    if layout.cp > 1:
        found.append(f"cp {layout.cp}: the script has no context parallelism; use cp 1, or target torchtitan")
    if model.num_kv_heads % layout.tp:
        found.append(
            f"tp {layout.tp} must divide the {model.num_kv_heads} key-value heads [ColwiseParallel]; use a divisor"
        )
    found += shared_refusals(job)
    if layout.pp > 1 and model.tied_embeddings:
        found.append(f"{model.name} ties its embeddings, and with pp {layout.pp} they lie on two ranks; use pp 1")
    if work.lora_rank:
        found.append(f"lora_rank {work.lora_rank}: the script trains every weight")
    if layout.offload_optimizer or layout.offload_activations:
        found.append("offload: the script keeps states and activations on the GPU")
    return found


def settings(job: ExportJob) -> dict[str, Any]:
    """plan.json: the model and how it is split, every dimension written out."""
    layout, work, model = job.layout, job.workload, job.model
    fields = ("name", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size",
              "tied_embeddings", "qkv_bias", "qk_norm")  # fmt: skip
    return {
        "model": {**{name: getattr(model, name) for name in fields}, "rope_theta": 500000.0},
        "sequence_length": work.sequence_length, "global_batch_size": work.global_batch_size,
        "micro_batch_size": layout.micro_batch_size, "num_microbatches": layout.num_microbatches,
        "precision": work.precision, "optimizer": work.optimizer, "learning_rate": 3e-4,
        "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "dp_shard": job.shard,
        "zero": layout.zero, "schedule": SCHEDULES[Schedule(layout.schedule)],
        "recompute": NAMES["recompute"][Recompute(layout.recompute)],
        "compile": "swiglu" not in job.trainer.kernels.unfused,
        "stages": [{"rank": rank, "layers": list(layers)} for rank, _, layers in job.virtual_stages()],
    }  # fmt: skip


def render(job: ExportJob) -> Rendered:
    """train.py and plan.json."""
    files = {"train.py": filled("pytorch", "pytorch_train.txt"), "plan.json": json_text(settings(job), indent=1)}
    return run_of(job, "pytorch", files)
