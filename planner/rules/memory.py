"""Rules of what saves memory: sharding, recompute, offload."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.layout import Module, Recompute, module_mask, module_names
from planner.model import ModelSpec
from planner.rules.jobs import LEAN_OPTIMIZERS
from planner.rules.rule import Job, chosen, divides, known, known_to, rule
from planner.trainer import Trainer
from planner.workload import FP8_WEIGHTS


@rule("sharding")
def _sharding(job: Job, x: Any) -> Iterator[Any]:
    levels, in_pipeline = job.legal.zero, job.legal.zero_with_pp
    piped = (x.pp == 1) | np.isin(x.zero, in_pipeline) | (x.dp * x.cp == 1)
    yield np.isin(x.zero, levels) & piped
    yield (
        f"zero {x.zero} with pp {x.pp}: trainer {job.trainer.name} knows zero {', '.join(map(str, levels))}, with a pipeline "
        f"{', '.join(map(str, in_pipeline)) or 'none'}"
        f"{known_to(f'zero {x.zero}', lambda legal: int(x.zero) in (legal.zero if x.pp == 1 else legal.zero_with_pp))}"
    )


@rule("shard group")
def _shard_group(job: Job, x: Any) -> Iterator[Any]:
    remedy = "" if job.legal.hsdp else f", and trainer {job.trainer.name} shards over all of dp: leave dp_shard at 0"
    fits = divides(x.shard, x.dp) & (x.shard <= x.dp)
    yield fits & ((x.shard == x.dp) | job.legal.hsdp)
    yield f"dp_shard {x.dp_shard} must divide dp {x.dp}{remedy}"


@rule("weights in 8 bits")
def _quantised_weights(job: Job, x: Any) -> Iterator[Any]:
    """[megatron/training/arguments.py: fp8-param-gather only supported with distributed optimizer]"""
    asked, precision = "parameters" in job.trainer.kernels.fp8, job.workload.precision
    held = (x.zero == 1) | ((x.zero == 0) & (x.dp * x.cp == 1))
    yield held & (precision in FP8_WEIGHTS) & (not job.workload.lora_rank) | (not asked)
    yield (
        f"option fp8_param_gather with zero {x.zero} in {precision}: weights lie in fp8 with zero 1 and precisions "
        f"{', '.join(FP8_WEIGHTS)}, without adapters; change them, or --option fp8_param_gather=off"
    )


@rule("recompute")
def _recompute(job: Job, x: Any) -> Iterator[Any]:
    modes, modules, layers = job.legal.recompute, job.legal.recompute_modules, x.recompute_layers
    unknown = x.recompute_modules & ~module_mask(list(modules))
    selective = x.recompute == Recompute.SELECTIVE
    named = np.where(selective, (x.recompute_modules != 0) & (unknown == 0), x.recompute_modules == 0)
    held = np.maximum(job.model.num_layers // np.maximum(x.pp, 1), 1)
    every = np.maximum(held // np.maximum(layers, 1), 1)
    nth = job.legal.every_nth_layer & (held // every == layers)
    partly = (x.recompute == Recompute.FULL) & (job.legal.recompute_layers | nth) & (layers <= job.model.num_layers)
    yield np.isin(x.recompute, known("recompute", modes)) & named & ((layers == 0) | partly)
    yield (
        f"recompute {chosen('recompute', x.recompute)} with modules {', '.join(module_names(int(x.recompute_modules))) or 'none'} "
        f"and recompute_layers {layers}: trainer {job.trainer.name} knows {', '.join(modes)} (modules: "
        f"{', '.join(modules) or 'none'}); selective needs modules, the others none; "
        + (
            "layers go with full only"
            if job.legal.recompute_layers or job.legal.every_nth_layer
            else "full is of all layers, so recompute_layers is 0"
        )
    )


def absent_modules(model: ModelSpec, trainer: Trainer) -> int:
    """Modules that selective recompute cannot repeat in a model, as a bit mask.

    What the model does not have; with Transformer Engine also what is part of a linear layer's kernel: the norms of a
    dense layer, and all activations but those of grouped experts.  [megatron/core: transformer_layer.py, moe/experts.py]
    """
    absent = Module(0)
    if not model.is_mla:
        absent |= Module.MLA_UP_PROJECTION
    if not model.is_moe:
        absent |= Module.MOE | Module.SHARED_EXPERTS
        absent |= Module.MLP_ACTIVATION if trainer.kernels.transformer_engine else Module(0)
    elif not model.shared_expert_ffn_size:
        absent |= Module.SHARED_EXPERTS
    if trainer.kernels.transformer_engine and not (model.is_moe or model.is_mla):
        absent |= Module.NORM
    return int(absent)


@rule("recompute modules")
def _recompute_modules(job: Job, x: Any) -> Iterator[Any]:
    missing = x.recompute_modules & absent_modules(job.model, job.trainer)
    fused = "; norm and mlp_activation of dense layers are part of Transformer Engine's linear layers: choose mlp"
    yield missing == 0
    yield (
        f"{job.model.name} does not have all of the modules {', '.join(module_names(int(x.recompute_modules)))}; moe and "
        "shared_experts need experts, mla_up_projection needs MLA"
        + (fused if int(missing) & (Module.NORM | Module.MLP_ACTIVATION) else "")
    )


@rule("recompute layers")
def _recompute_layers(job: Job, x: Any) -> Iterator[Any]:
    """Layers to recompute are counted per virtual stage."""
    yield divides(x.vpp, x.recompute_layers)
    yield (
        f"recompute_layers {x.recompute_layers} with vpp {x.vpp}: layers are counted per virtual stage, so it must be a multiple "
        f"of {x.vpp}; the nearest is {max(1, round(int(x.recompute_layers) / int(x.vpp))) * int(x.vpp)}"
    )


@rule("host optimizer")
def _host_optimizer(job: Job, x: Any) -> Iterator[Any]:
    """Offload works on sharded optimizers, and so do Megatron's moments of less than 32 bits."""
    lean = job.trainer.kernels.transformer_engine and job.workload.optimizer in LEAN_OPTIMIZERS
    yield (x.dp * x.cp == 1) | (x.zero > 0) | ((x.offload_optimizer == 0) & (not lean))
    yield (
        f"optimizer {job.workload.optimizer} with offload_optimizer {x.offload_optimizer} and zero {x.zero}: states on the host or "
        "in less than 32 bits are a part of the sharded optimizer; use zero 1"
    )


@rule("offload")
def _offload(job: Job, x: Any) -> Iterator[Any]:
    """Megatron's optimizer on the host clips gradients in fp32 or bf16 only.  [core/optimizer/clip_grads.py, decoupled_grad]"""
    fp16 = job.trainer.kernels.transformer_engine and job.workload.precision == "fp16"
    states = job.legal.offload_optimizer
    yield (x.offload_optimizer == 0) | (states and not fp16)
    whole = "; with offload_parameters they live there anyway" if job.legal.offload_parameters else ""
    yield (
        f"offload_optimizer {x.offload_optimizer}: trainer {job.trainer.name} offloads {'' if states else 'no '}optimizer states"
        f"{', but not in fp16' if states and fp16 else ' alone' if whole else ''}{whole}"
    )


@rule("activations on the host")
def _offload_activations(job: Job, x: Any) -> Iterator[Any]:
    """Megatron moves what layers save where nothing is recomputed and there is no pipeline.  [transformer_config.py]"""
    inputs, saved = job.legal.offload_activations, job.legal.offload_saved_tensors
    recomputed = inputs & (x.recompute == Recompute.FULL)
    plain = saved & (x.recompute == Recompute.NONE) & (x.pp == 1)
    some = (x.offload_layers == 0) | (plain & (x.offload_layers <= job.model.num_layers) & (x.offload_activations == 1))
    yield ((x.offload_activations == 0) | recomputed | plain) & some
    ways = ["activations with full recompute"] * inputs + [
        "what layers save without recompute and without a pipeline"
    ] * saved
    yield (
        f"offload_activations of {x.offload_layers or 'all'} layers with recompute {chosen('recompute', x.recompute)} and pp "
        f"{x.pp}: trainer {job.trainer.name} offloads {' or of some layers '.join(ways) or 'no activations'}"
    )


@rule("weights on the host")
def _offload_parameters(job: Job, x: Any) -> Iterator[Any]:
    """FSDP and ZeRO 3 keep the shards that a unit is gathered from in host memory."""
    level, can = max(job.trainer.stored.weight_sharding_level, 1), job.legal.offload_parameters
    yield (x.offload_parameters == 0) | (can & (x.zero >= level))
    levels = ", ".join(str(one) for one in job.legal.zero if one >= level)
    yield (
        f"offload_parameters with zero {x.zero}: trainer {job.trainer.name} "
        + (
            f"keeps weights on the host where it shards them; use zero {levels}"
            if can
            else "keeps its weights on the GPU"
        )
    )


@rule("partial offload")
def _partial_offload(job: Job, x: Any) -> Iterator[Any]:
    share, level = x.offload_optimizer, job.legal.partial_offload_level
    least = np.where(share < 100, level, min(level, 1))
    yield (share == 0) | (x.zero >= least)
    yield (
        f"offload_optimizer {share} with zero {x.zero}: trainer {job.trainer.name} moves a part of the states to the host from "
        f"zero {level} on, all of them from 1 on; use 100, or a higher zero"
    )


@rule("offload with split experts")
def _offload_with_split_experts(job: Job, x: Any) -> Iterator[Any]:
    one = (x.tp == 1) | (x.ep == 1) | (x.offload_optimizer == 0)
    yield one | job.legal.offload_with_tp_and_ep
    yield (
        f"offload_optimizer {x.offload_optimizer} with tp {x.tp} and ep {x.ep}: trainer {job.trainer.name} does not offload when "
        "experts take ranks from tensor parallelism; use tp 1 or no offload"
    )


MEMORY = (
    _quantised_weights,
    _sharding, _shard_group, _recompute, _recompute_modules, _recompute_layers, _host_optimizer, _offload, _offload_activations,
    _offload_parameters, _partial_offload, _offload_with_split_experts,
)  # fmt: skip
