"""Megatron-Bridge's runtime_config_update and ConfigContainer.validate on an exported folder."""

import importlib
import os
import runpy
from typing import Any

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import hide, modern_typing, pretend_gpu, settle_torch, stand_in
from planner.trainers.megatron.core_settings import environment as core_environment
from planner.trainers.megatron.core_settings import recompute as core_recompute

NEEDED = ("megatron.bridge", "torch", "omegaconf", "hydra", "transformers", "datasets", "peft", "einops")
KERNELS = ("transformer_engine", "nvidia_resiliency_ext", "modelopt", "diffusers", "megatron.energon")
"""What its modules import and a machine without a GPU does not have."""
APART = ("megatron.bridge.diffusion",)
"""Recipes of image models, which its package of language models imports: they subclass what diffusers would bring."""


def asks(job: ExportJob) -> dict[str, Any]:
    """Layers of every virtual stage, and variables that the validator looks at."""
    return {
        "layers": job.layers_per_chunk(),
        "environment": {name: one.value for name, one in core_environment(job).items()},
        "recompute": core_recompute(job),
    }


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    from megatron.core.transformer.enums import LayerType

    pretend_gpu(*asked["capability"])
    os.environ.update({"WORLD_SIZE": str(asked["world"]), "RANK": "0", "DATA_PATH": "data", **asked["environment"]})
    program = runpy.run_path(os.path.join(asked["folder"], "plan_config.py"))
    _validated(program["config"](smoke=True))
    config = program["config"]()
    answer.reached("parsed")
    _validated(config)
    layout = asked["layout"]
    answer.same("data parallel size", config.data_parallel_size, layout["dp"])
    answer.same("global batch", config.train.global_batch_size, asked["batch"])
    each = config.train.micro_batch_size * config.data_parallel_size
    answer.same("microbatches", config.train.global_batch_size // each, layout["num_microbatches"])
    answer.same("sequence parallel", bool(config.model.sequence_parallel), bool(layout["sequence_parallel"]))
    said = {name: getattr(config.model, name, None) for name in asked["recompute"]}
    answer.same("recompute", said, asked["recompute"])
    written = config.model.pipeline_model_parallel_layout
    if written is not None:
        counts = [[chunk.count(LayerType.decoder) for chunk in rank] for rank in written.layout]
        answer.same("layers", counts, asked["layers"])
    answer.reached("validated")


def _validated(config: Any) -> None:
    """Its own checks, without the two fusions that ask for Transformer Engine's kernels and no other rule looks at."""
    from megatron.bridge.training.config import runtime_config_update

    config.model.apply_rope_fusion = config.model.moe_permute_fusion = False
    runtime_config_update(config)
    config.validate()


def prepare() -> None:
    """Once, before the first folder."""
    settle_torch()
    modern_typing()
    stand_in("triton")
    pretend_gpu(9, 0)
    hide(*APART)
    # Megatron Core looks for Transformer Engine first: it must not take the stand-in for it.
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.utils as utils
    import megatron.training.arguments  # noqa: F401
    from packaging.version import Version

    stand_in(*KERNELS)
    utils._te_version = Version("2.17.0")
    importlib.import_module("transformer_engine.pytorch.optimizers").__dict__["FusedAdam"] = FusedAdam


class FusedAdam:
    """Transformer Engine's optimizer as far as Megatron Core looks at it: the names of its arguments since 1.13."""

    def __init__(
        self,
        *,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
    ) -> None:
        raise NotImplementedError("a stand-in: no optimizer is built")
