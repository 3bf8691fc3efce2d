"""MaxText: a YAML file over its base.yml, one mesh whose axes are the plan's degrees, one JAX process per node.

The mesh is a plain reshape of the devices, slowest axis first: data, stage, fsdp, ..., context, tensor, tensor_sequence, expert
[mesh_axes in configs/base.yml]. With ``num_slices`` 1 all degrees are ici degrees, also across nodes.
"""

from planner import library
from planner.layout import Module
from planner.trainers.bundle.model_config import family
from planner.trainers.bundle.quoting import filled_yaml, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules

BLOCKS = {
    "llama": "llama2", "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe", "deepseek_v2": "deepseek", "deepseek_v3": "deepseek",
}  # fmt: skip
"""Family of the model -> decoder_block."""
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
"""opt_type by optimizer."""
KNOWN = Module.CORE_ATTENTION | Module.MLP | Module.NORM | Module.MLP_ACTIVATION
"""Modules whose outputs have names that a remat policy can drop, and those that are always computed again."""


def refusals(job: ExportJob) -> list[str]:
    """What MaxText cannot run, with its rule."""
    found = unknown_choices(job, "MaxText", OPTIMIZERS, ("bf16", "fp8")) + unknown_modules(job, "MaxText", KNOWN)
    return found + refused(job, "maxtext", family=family(job.model), blocks=BLOCKS)


def render(job: ExportJob) -> Rendered:
    """maxtext.yml; data and output come from the command line."""
    block, optimizer = BLOCKS[str(family(job.model))], OPTIMIZERS[job.workload.optimizer]
    config = filled_yaml(job, "maxtext", "maxtext.txt", block=block, optimizer=optimizer)
    return run_of(job, "maxtext", {"maxtext.yml": library.dump_yaml(config)})
