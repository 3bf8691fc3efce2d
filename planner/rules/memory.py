"""Rules of what saves memory: sharding, recompute, offload."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import NAMES, Layout, Module, Recompute, module_mask, module_names
from planner.model import ModelSpec
from planner.rules.jobs import LEAN_OPTIMIZERS
from planner.rules.rule import Job, Rule
from planner.trainer import Trainer


def _zero_holds(job: Job, layout: Layout) -> Any:
    zero, alone = np.asarray(layout.zero), np.asarray(layout.dp) * np.asarray(layout.cp) == 1
    return np.isin(zero, job.trainer.legal.zero) & (
        (np.asarray(layout.pp) == 1) | np.isin(zero, job.trainer.legal.zero_with_pp) | alone
    )


def _shard_holds(job: Job, layout: Layout) -> Any:
    shard, dp = np.asarray(layout.shard), np.asarray(layout.dp)
    return (dp % np.maximum(shard, 1) == 0) & ((shard == dp) | job.trainer.legal.hsdp) & (shard <= dp)


def _recompute_holds(job: Job, layout: Layout) -> Any:
    mode, modules = np.asarray(layout.recompute), np.asarray(layout.recompute_modules)
    modes = [number for number, name in NAMES["recompute"].items() if name in job.trainer.legal.recompute]
    known = module_mask(list(job.trainer.legal.recompute_modules))
    selective = mode == Recompute.SELECTIVE
    named = np.where(selective, (modules != 0) & ((modules & ~known) == 0), modules == 0)
    layers = np.asarray(layout.recompute_layers)
    partly = (layers == 0) | (
        (mode == Recompute.FULL) & job.trainer.legal.recompute_layers & (layers <= job.model.num_layers)
    )
    return np.isin(mode, modes) & named & partly


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


def _modules_hold(job: Job, layout: Layout) -> Any:
    """Only modules that the model has."""
    return (np.asarray(layout.recompute_modules) & absent_modules(job.model, job.trainer)) == 0


def _recompute_chunks_hold(job: Job, layout: Layout) -> Any:
    """Layers to recompute are counted per virtual stage."""
    return np.asarray(layout.recompute_layers) % np.maximum(np.asarray(layout.vpp), 1) == 0


def _host_states_hold(job: Job, layout: Layout) -> Any:
    """Offload works on sharded optimizers, and so do Megatron's moments of less than 32 bits."""
    lean = job.trainer.kernels.transformer_engine and job.workload.optimizer in LEAN_OPTIMIZERS
    alone = np.asarray(layout.dp) * np.asarray(layout.cp) == 1
    return alone | (np.asarray(layout.zero) > 0) | ((np.asarray(layout.offload_optimizer) == 0) & (not lean))


def _fp16_stays(job: Job) -> bool:
    """Megatron's optimizer on the host clips gradients in fp32 or bf16 only.  [core/optimizer/clip_grads.py, decoupled_grad]"""
    return job.trainer.kernels.transformer_engine and job.workload.precision == "fp16"


def _offloadable(job: Job) -> str:
    states = "optimizer states" if job.trainer.legal.offload_optimizer else "no optimizer states"
    return f"{states}, but not in fp16" if job.trainer.legal.offload_optimizer and _fp16_stays(job) else states


def _offload_holds(job: Job, layout: Layout) -> Any:
    able = job.trainer.legal.offload_optimizer and not _fp16_stays(job)
    optimizer = (np.asarray(layout.offload_optimizer) == 0) | able
    activations = (np.asarray(layout.offload_activations) == 0) | (
        job.trainer.legal.offload_activations & (np.asarray(layout.recompute) == Recompute.FULL)
    )
    return optimizer & activations


def _part_of_optimizer_holds(job: Job, layout: Layout) -> Any:
    share, level = np.asarray(layout.offload_optimizer), job.trainer.legal.partial_offload_level
    part = (share > 0) & (share < 100)
    return (share == 0) | (np.asarray(layout.zero) >= np.where(part, level, min(level, 1)))


def _offload_meshes_hold(job: Job, layout: Layout) -> Any:
    split = (np.asarray(layout.tp) > 1) & (np.asarray(layout.ep) > 1) & (np.asarray(layout.offload_optimizer) > 0)
    return ~split | job.trainer.legal.offload_with_tp_and_ep


MEMORY: tuple[Rule, ...] = (
    Rule(
        name="sharding",
        holds=_zero_holds,
        sentence=lambda job, x: (
            f"zero {x.zero} with pp {x.pp}: trainer {job.trainer.name} knows zero "
            f"{', '.join(map(str, job.trainer.legal.zero))}, with a pipeline "
            f"{', '.join(map(str, job.trainer.legal.zero_with_pp)) or 'none'}"
        ),
    ),
    Rule(
        name="shard group",
        holds=_shard_holds,
        sentence=lambda job, x: (
            f"dp_shard {x.dp_shard} must divide dp {x.dp}"
            + (
                ""
                if job.trainer.legal.hsdp
                else f", and trainer {job.trainer.name} shards over all of dp: leave dp_shard at 0"
            )
        ),
    ),
    Rule(
        name="recompute",
        holds=_recompute_holds,
        sentence=lambda job, x: (
            f"recompute {NAMES['recompute'][int(x.recompute)]} with modules "
            f"{', '.join(module_names(int(x.recompute_modules))) or 'none'} and recompute_layers {x.recompute_layers}: trainer "
            f"{job.trainer.name} knows {', '.join(job.trainer.legal.recompute)} "
            f"(modules: {', '.join(job.trainer.legal.recompute_modules) or 'none'}); "
            "selective needs modules, the others none; layers go with full only"
        ),
    ),
    Rule(
        name="recompute modules",
        holds=_modules_hold,
        sentence=lambda job, x: (
            f"{job.model.name} does not have all of the modules "
            f"{', '.join(module_names(int(x.recompute_modules)))}; moe and shared_experts need experts, mla_up_projection needs MLA"
            + (
                "; norm and mlp_activation of dense layers are part of Transformer Engine's linear layers: choose mlp"
                if int(x.recompute_modules)
                & absent_modules(job.model, job.trainer)
                & (Module.NORM | Module.MLP_ACTIVATION)
                else ""
            )
        ),
    ),
    Rule(
        name="recompute layers",
        holds=_recompute_chunks_hold,
        sentence=lambda job, x: (
            f"recompute_layers {x.recompute_layers} with vpp {x.vpp}: layers are counted per virtual stage, so it must be a "
            f"multiple of {x.vpp}; the nearest is {max(1, round(int(x.recompute_layers) / int(x.vpp))) * int(x.vpp)}"
        ),
    ),
    Rule(
        name="host optimizer",
        holds=_host_states_hold,
        sentence=lambda job, x: (
            f"optimizer {job.workload.optimizer} with offload_optimizer {x.offload_optimizer} and zero {x.zero}: states on the "
            "host or in less than 32 bits are a part of the sharded optimizer; use zero 1"
        ),
    ),
    Rule(
        name="offload",
        holds=_offload_holds,
        sentence=lambda job, x: (
            f"offload_optimizer {x.offload_optimizer} and offload_activations {bool(x.offload_activations)}: "
            f"trainer {job.trainer.name} offloads "
            f"{_offloadable(job)} and "
            f"{'activations with full recompute' if job.trainer.legal.offload_activations else 'no activations'}"
        ),
    ),
    Rule(
        name="partial offload",
        holds=_part_of_optimizer_holds,
        sentence=lambda job, x: (
            f"offload_optimizer {x.offload_optimizer} with zero {x.zero}: trainer {job.trainer.name} moves a part of the states "
            f"to the host from zero {job.trainer.legal.partial_offload_level} on, all of them from 1 on; use 100, or a higher zero"
        ),
    ),
    Rule(
        name="offload with split experts",
        holds=_offload_meshes_hold,
        sentence=lambda job, x: (
            f"offload_optimizer {x.offload_optimizer} with tp {x.tp} and ep {x.ep}: trainer {job.trainer.name} does not offload "
            "when experts take ranks from tensor parallelism; use tp 1 or no offload"
        ),
    ),
)
