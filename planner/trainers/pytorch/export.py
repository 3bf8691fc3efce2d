"""PyTorch itself: one script and plan.json, no framework."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from planner.layout import NAMES, Recompute, Schedule
from planner.trainers.bundle.environment import GROWING_SEGMENTS
from planner.trainers.bundle.fully_shard import SCHEDULES, shared_refusals
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target


def refusals(job: ExportJob) -> list[str]:
    """What the script has not."""
    layout, model, work = job.layout, job.model, job.workload
    plain = (
        model.norm == "rmsnorm" and model.position == "rope" and model.gated and model.activation == "silu"
        and model.norms_per_layer == 2 and not model.parallel_attention and not model.embedding_norm and not model.is_moe
        and not model.num_windowed_layers and not model.mtp_layers and not model.is_mla and not model.linear_bias
    )  # fmt: skip
    found = []
    if not plain:
        found.append(
            f"{model.name}: the script has dense layers with RMS norms, rotary positions, SwiGLU and grouped-query attention; "
            "use another target, or write the layer into train.py"
        )
    if int(layout.cp) > 1:
        found.append(f"cp {layout.cp}: the script has no context parallelism; use cp 1, or target torchtitan")
    if model.num_kv_heads % int(layout.tp):
        found.append(
            f"tp {layout.tp} must divide the {model.num_kv_heads} key-value heads [ColwiseParallel]; use a divisor"
        )
    found += shared_refusals(job)
    if int(layout.pp) > 1 and model.tied_embeddings:
        found.append(f"{model.name} ties its embeddings, and with pp {layout.pp} they lie on two ranks; use pp 1")
    if work.precision not in ("bf16", "fp32"):
        found.append(f"precision {work.precision}: the script computes in bf16 or fp32; choose one of them")
    if work.optimizer not in ("adam", "sgd"):
        found.append(f"optimizer {work.optimizer}: the script has adam and sgd; choose one of them")
    if work.lora_rank:
        found.append(f"lora_rank {work.lora_rank}: the script trains every weight")
    if int(layout.offload_optimizer) or int(layout.offload_activations):
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
        "micro_batch_size": int(layout.micro_batch_size), "num_microbatches": int(layout.num_microbatches),
        "precision": work.precision, "optimizer": work.optimizer, "learning_rate": 3e-4,
        "tp": int(layout.tp), "pp": int(layout.pp), "dp": int(layout.dp), "dp_shard": int(layout.shard),
        "zero": int(layout.zero), "schedule": SCHEDULES[Schedule(int(layout.schedule))],
        "recompute": NAMES["recompute"][Recompute(int(layout.recompute))],
        "compile": "swiglu" not in job.trainer.kernels.unfused,
        "stages": [{"rank": rank, "layers": list(layers)} for rank, _, layers in job.virtual_stages()],
    }  # fmt: skip


def render(job: ExportJob) -> Rendered:
    """train.py and plan.json."""
    script = resources.files("planner.trainers.targets").joinpath("pytorch_train.txt").read_text(encoding="utf-8")
    common = ("train.py", "--plan", "plan.json")
    return Rendered(
        files={"train.py": script, "plan.json": json.dumps(settings(job), indent=1) + "\n"},
        entry=(*common, "--data", "$DATA", "--steps", "$STEPS", "--checkpoint", "$CHECKPOINT"),
        smoke=(*common, "--steps", "5"),
        environment={"PYTORCH_CUDA_ALLOC_CONF": GROWING_SEGMENTS},
        variables={
            "DATA": Setting(
                value="", why="file of token numbers, 16 bits each (32 above 65536 tokens); empty: made up"
            ),
            "STEPS": Setting(value="1000", why="optimizer steps"),
            "CHECKPOINT": Setting(value="checkpoint", why="folder for weights and optimizer states"),
        },
        notes=(
            "The script prints parameters per pipeline rank before tensor parallelism splits them.",
            "plan.json says nothing of your model's base of the rotary positions: set rope_theta.",
        ),
        install=("pip install 'torch>=2.13,<2.14' numpy",),
    )


TARGET = Target(
    name="pytorch",
    title="PyTorch alone (a script with DeviceMesh, DTensor, fully_shard, pipelining)",
    trainers=("torchtitan", "fsdp"),
    versions=">=2.13,<2.14",
    package="torch",
    level="model built",
    source="torch 2.13.0: distributed/fsdp, distributed/tensor/parallel, distributed/pipelining",
    refusals=refusals,
    render=render,
)
