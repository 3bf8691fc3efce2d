"""verl: Hydra overrides of its PPO trainer, with the plan on the actor: Megatron or FSDP2 below.

The plan prices the actor's update: forward and backward of ``ppo_mini_batch_size`` sequences. Generation and log
probabilities run on the same GPUs before it and were not priced.
"""

from typing import Any

from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.quoting import filled_text, filled_yaml, hydra_value, refused, run_of
from planner.trainers.bundle.serving import serving
from planner.trainers.bundle.target import ExportJob, Rendered, library_trainer, unknown_choices
from planner.trainers.megatron import core_settings as mcore

OPTIMIZERS = ("adam", "adam_bf16", "sgd")
"""Megatron's optimizers that verl passes on with plain settings."""
PRECISIONS = ("bf16", "fp16", "fp8", "fp8_block", "mxfp8")
"""McoreEngineConfig takes bfloat16 or float16, and fp8 on top of bf16."""
FSDP_OPTIMIZERS = {"adam": ("AdamW", "torch.optim"), "adam_8bit": ("_AdamW8bit", "torchao.optim")}
"""Optimizer -> optim.optimizer and optim.optimizer_impl of verl's FSDP engine."""


def _megatron(job: ExportJob) -> bool:
    return library_trainer(job.plan.trainer) == "megatron"


def refusals(job: ExportJob) -> list[str]:
    """What verl or the back end below it cannot run, with its rule."""
    megatron = _megatron(job)
    found = refused(job, "verl", megatron=megatron)
    if megatron:
        return found + [
            one for one in mcore.refusals(job, "verl", OPTIMIZERS, PRECISIONS) if not one.startswith("lora_rank")
        ]
    found += unknown_choices(job, "verl's FSDP engine", FSDP_OPTIMIZERS, ("bf16", "fp16"))
    return found + [one for one in accelerate.refusals(job) if not one.startswith(("optimizer ", "precision "))]


def overrides(job: ExportJob) -> list[str]:
    """Hydra overrides, one per line. A leading + adds a key to one of verl's free dictionaries."""
    facts: dict[str, Any] = {"megatron": _megatron(job), "rollout": _rollout(job)}
    if facts["megatron"]:
        unset = dict.fromkeys(("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"))
        facts |= {
            # fields of megatron-core's TransformerConfig, which Megatron-Bridge sets on its model provider
            "transformer": {
                "attention_backend": mcore.attention_backend(job), **unset, **mcore.recompute(job),
                **({"cpu_offloading": True} if job.layout.offload_activations else {}),
            },
            "pipeline": mcore.pipeline_layout(job), "cp_type": mcore.CP_TYPES[job.layout.cp_method],
            "recipe": mcore.precision_recipe(job), "chunks": len(job.layers_per_chunk()[0]),
            "sharded": mcore.shards_states(job), "wide": mcore.sums_in_fp32(job), "lean": mcore.lean_optimizer(job),
            "optimizer": mcore.OPTIMIZERS[job.workload.optimizer],
        }  # fmt: skip
    else:
        facts["optimizer"] = FSDP_OPTIMIZERS[job.workload.optimizer]
    pairs = filled_yaml(job, "verl", "overrides.txt", **facts)
    return [f"{name}={hydra_value(value)}" for name, value in pairs.items()]


def _rollout(job: ExportJob) -> int:
    """Tensor parallel degree of generation: the serving layout's, within a node."""
    one = serving(job)
    return one.tp if one and one.nodes == 1 else job.gpus_per_node


def render(job: ExportJob) -> Rendered:
    """The overrides in a file, a Ray cluster over the nodes, the trainer on the first of them."""
    megatron = _megatron(job)
    files = {
        "overrides.txt": "\n".join(overrides(job)) + "\n",
        "make_prompts.py": filled_text(job, "verl/make_prompts.txt"),
    }
    more = {"environment": mcore.environment(job)} if megatron else {}
    return run_of(job, "verl", files, more, megatron=megatron, rollout=_rollout(job))
