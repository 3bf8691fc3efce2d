"""DeepSpeed: its JSON file, under transformers' Trainer."""

from __future__ import annotations

import json
from typing import Any

from planner.layout import CpMethod, Recompute
from planner.trainers.bundle.target import ExportJob, Rendered, Target
from planner.trainers.transformers.training_run import family, rendered, shared_refusals, training_arguments

EXPERT_PRESETS = {"mixtral": "mixtral", "qwen3_moe": "qwen3_moe"}
"""Presets of AutoEP, by model_type of transformers; DeepSeek's MLA models have presets of their own."""


LEARNING_RATE = 3e-4
"""transformers wants the same number in the JSON and in its own arguments."""


def refusals(job: ExportJob) -> list[str]:
    """What DeepSpeed's JSON cannot say or DeepSpeed cannot run, with its rule."""
    layout, work = job.layout, job.workload
    tp, cp, ep, found = int(layout.tp), int(layout.cp), int(layout.ep), []
    if int(layout.pp) > 1:
        found.append(
            f"pp {layout.pp}: pipelines do not stand in the JSON; the code builds PipelineModule(layers, num_stages={layout.pp}, "
            "partition_method='parameters') [deepspeed/pipe], and its JSON block 'pipeline' only tunes it; use pp 1"
        )
    if tp > 1 and cp > 1:
        found.append(
            f"tp {tp} with cp {cp}: AutoTP's mesh is data x tensor, Ulysses' data x sequence, and there is none of all three "
            "[deepspeed/utils/groups.py]; use one of them"
        )
    if cp > 1 and int(layout.cp_method) != CpMethod.A2A:
        found.append(f"cp {cp}: DeepSpeed's sequence parallelism is Ulysses; use cp_method a2a")
    if int(layout.dp_shard) not in (0, int(layout.dp)):
        found.append(
            f"dp_shard {layout.dp_shard}: MiCS was removed in 0.19 and hpZ keeps a second copy; leave dp_shard at 0"
        )
    found += _expert_refusals(job, ep)
    if 0 < int(layout.offload_optimizer) < 100 and int(layout.zero) != 3:
        found.append(
            f"offload_optimizer {layout.offload_optimizer} with zero {layout.zero}: a part of the states goes to the host with "
            "ZeRO 3 only [DeepSpeedZeroConfig.offload_ratio_check]; use 100, or zero 3"
        )
    if int(layout.offload_optimizer) and int(layout.zero) == 0:
        found.append("offload_optimizer with zero 0: it is a part of ZeRO [runtime/zero]; use zero 1")
    if int(layout.offload_optimizer) and work.optimizer != "adam":
        found.append(
            f"offload_optimizer with {work.optimizer}: on the host DeepSpeed steps with its CPU Adam; use adam"
        )
    if work.precision not in ("bf16", "fp16", "fp32"):
        found.append(f"precision {work.precision}: DeepSpeed trains in bf16, fp16 or fp32; choose one of them")
    return found + shared_refusals(job)


def _expert_refusals(job: ExportJob, ep: int) -> list[str]:
    layout, model, found = job.layout, job.model, []
    if not model.is_moe:
        return []
    if int(layout.etp) > 1:
        found.append(
            f"etp {layout.etp}: expert_tensor_parallel_size is reserved [auto_ep_folding.validate_folding_global]; use 1"
        )
    if int(layout.tp) > 1 and ep == 1:
        found.append(
            f"tp {layout.tp} with ep 1: AutoEP with AutoTP needs autoep_size > 1 [the same]; use ep > 1 or tp 1"
        )
    if int(layout.tp) > 1 and int(layout.offload_optimizer):
        found.append("offload_optimizer with AutoEP and AutoTP is not supported [the same]; use tp 1")
    if ep > 1 and not model.is_mla and family(model) not in EXPERT_PRESETS:
        found.append(
            f"ep {ep}: AutoEP has presets for Mixtral, Qwen3-MoE and DeepSeek [auto_ep_presets], none for {model.name}; use ep 1"
        )
    return found


def config(job: ExportJob) -> dict[str, Any]:
    """ds_config.json. DeepSpeed counts every AutoTP rank as a replica in its batch rule, train = micro x steps x world / sp."""
    layout, work = job.layout, job.workload
    zero: dict[str, Any] = {"stage": int(layout.zero), "overlap_comm": True, "contiguous_gradients": True,
                            "reduce_bucket_size": 500_000_000}  # fmt: skip
    if int(layout.zero) in (1, 2):
        zero |= {"reduce_scatter": True, "allgather_partitions": True, "allgather_bucket_size": 500_000_000}
    if int(layout.zero) == 3:
        zero |= {"stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
                 "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000,
                 "stage3_gather_16bit_weights_on_model_save": False}  # fmt: skip
    if int(layout.offload_optimizer):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": int(layout.offload_optimizer) / 100}
    data: dict[str, Any] = {
        "train_batch_size": work.global_batch_size * int(layout.tp),
        "train_micro_batch_size_per_gpu": int(layout.micro_batch_size),
        "gradient_accumulation_steps": int(layout.num_microbatches),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": work.precision == "bf16"},
        "fp16": {"enabled": work.precision == "fp16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    if int(layout.offload_optimizer):  # DeepSpeed's own AdamW, which steps on the host
        params = {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        data["optimizer"] = {"type": "AdamW", "params": params}
    if int(layout.cp) > 1:
        data["sequence_parallel_size"] = int(layout.cp)
    if int(layout.tp) > 1:
        data["tensor_parallel"] = {"autotp_size": int(layout.tp)}
    if int(layout.ep) > 1:
        data["expert_parallel"] = {"enabled": True, "autoep_size": int(layout.ep), "expert_tensor_parallel_size": 1}
        preset = EXPERT_PRESETS.get(family(job.model))
        if preset:
            data["expert_parallel"]["preset_model"] = preset
    return data


def render(job: ExportJob) -> Rendered:
    """ds_config.json, training.json, train.py, and config.json of the model where its family is known."""
    layout = job.layout
    arguments = training_arguments(job) | {"learning_rate": LEARNING_RATE}
    if int(layout.recompute) == Recompute.FULL:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    sizes = {"sp_size": int(layout.cp), "sp_backend": "deepspeed"} if int(layout.cp) > 1 else None
    said = []
    if int(layout.tp) > 1:
        said.append(
            f"train_batch_size is {layout.tp} times the batch of the plan: DeepSpeed's batch rule counts AutoTP ranks as replicas."
        )
    said.append("zero_to_fp32.py, which DeepSpeed writes into every checkpoint, joins the shards of the weights.")
    return rendered(
        job,
        {"ds_config.json": json.dumps(config(job), indent=2) + "\n"},
        arguments,
        more={"parallelism": sizes, "offload_activations": bool(layout.offload_activations)},
        options=("--deepspeed", "ds_config.json"),
        notes=tuple(said),
        install=("pip install 'deepspeed>=0.19.8,<0.20'",),
    )


TARGET = Target(
    name="deepspeed",
    title="DeepSpeed with transformers' Trainer (JSON)",
    trainers=("deepspeed",),
    versions=">=0.19.8,<0.20",
    package="deepspeed",
    level="validated",
    source="DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, utils/groups.py, module_inject/auto_ep_folding.py",
    refusals=refusals,
    render=render,
)
