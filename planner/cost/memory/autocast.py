"""What autocast adds to a layer whose weights lie in fp32: the residual stream and the norms are fp32 too.

The embedding puts out fp32, a linear layer bf16, and their sum is fp32 again. Sharded weights are gathered in half precision,
and what they put out is: this is of one GPU and of replicas alone.
[torch, autocast_mode: neither embedding nor addition nor multiplication is cast; transformers, LlamaRMSNorm]

Counted with hooks on what autograd saves of a LlamaForCausalLM (transformers 5.23, torch 2.13, on CPU): a layer keeps 4 bytes of
each element of its input for 2 where it is recomputed, and 10 T h bytes more where it is not.

Norms in fp32 of a frozen base in 4 or 8 bits (option ``unquantised``) do the same, whatever the embedding puts out: such a linear
layer returns the dtype of what it is given, so gate, up and what SiLU puts out are fp32 too, 2 T f each; attention casts its own.
[bitsandbytes, nn/modules.py: Linear4bit.forward; autograd/_functions.py: MatMul8bitLt]  Counted so, with adapters by PEFT 0.17: a
layer keeps 6 T f more (16.5 T h at f = 2.75 h), and in the backward pass of one that is recomputed another 2 T f are there.
"""

import numpy as np

from planner.arrays import Floats
from planner.cost.pipeline.partition import Stages, column, sequences
from planner.cost.price.stage_times import covered_share
from planner.cost.state_dtypes import in_fewer_bits
from planner.layout import Layout, Recompute
from planner.trainer import Trainer
from planner.workload import Workload

WIDER = 2.0
"""Bytes of an element of fp32 beyond one of half precision."""
COPY = 2.0
"""Bytes of an element of a linear layer's input, which each that reads the norm's output casts for itself."""


def _is_wide(workload: Workload, trainer: Trainer, layout: Layout) -> Floats:
    """1 where the stream is fp32, (N, 1): of trainers whose replicas are torch's DDP; others wrap in FSDP on one GPU too."""
    frozen = workload.frozen_weights == "fp32" or _passes_on(workload, trainer)
    trained = trainer.stored.weight_bytes >= 4.0 if not workload.lora_rank else frozen
    trained = trained and trainer.traffic.bucket_bytes > 0 and "stream_cast" not in trainer.kernels.unfused
    return np.where(column(layout.zero) < 1, float(trained and workload.element == 2), 0.0)


def _passes_on(workload: Workload, trainer: Trainer) -> bool:
    """Linear layers of a frozen base return fp32, which its norms give them."""
    return trainer.kernels.fp32_norms and in_fewer_bits(workload)


def _inner_more(workload: Workload, trainer: Trainer, layout: Layout, stages: Stages) -> tuple[Floats, Floats]:
    """Bytes of an inner tensor of the MLP in fp32 beyond those in half precision, of all layers of a stage and of one, (N, 3) each:
    of experts where each is a linear layer of its own."""
    model = workload.model
    rows = sequences(workload, layout) * workload.sequence_length / column(layout.cp) / column(layout.tp)
    each = WIDER * rows * _is_wide(workload, trainer, layout) * float(_passes_on(workload, trainer))
    routed = model.top_k * model.expert_ffn_size * trainer.kernels.linear_experts
    dense, moe = each * model.ffn_size, each * (model.is_moe * routed + model.shared_expert_ffn_size)
    return stages.dense * dense + stages.moe * moe, np.maximum((stages.dense > 0) * dense, (stages.moe > 0) * moe)


def _layer_more(workload: Workload, trainer: Trainer, layout: Layout) -> tuple[Floats, Floats]:
    """Bytes beyond those of a stream in half precision that a recomputed layer keeps, and one that is not, (N, 1) each.

    Not recomputed, every norm keeps its input and what it scales in fp32; query, key and value, gate and up cast its output one by
    one. Frozen weights keep neither.
    """
    model = workload.model
    split = np.where(column(layout.sequence_parallel) == 1, column(layout.tp), 1.0)
    values = sequences(workload, layout) * workload.sequence_length / column(layout.cp) / split * model.hidden_size
    values = values * _is_wide(workload, trainer, layout)
    apart = trainer.kernels.separate_projections
    casts = apart * (2.0 * (not model.is_mla) + model.gated * (not model.is_moe))
    norms = model.norms_per_layer * (model.norm == "rmsnorm" or "layer_norm" not in trainer.kernels.unfused)  # else saved wide
    whole = 0.0 if workload.lora_rank else WIDER * norms + COPY * casts
    return values * WIDER, values * whole


def head_copies(workload: Workload, trainer: Trainer, layout: Layout) -> Floats:
    """Bytes per weight of the head of copies that its product makes, (N, 1): autocast's alone of a frozen one in fp32."""
    own = sum(term.head_bytes(trainer) for term in trainer.terms)
    return np.where((column(layout.zero) < 1) & trainer.kernels.fp32_tables & in_fewer_bits(workload), COPY, own)


def stage_more(workload: Workload, trainer: Trainer, layout: Layout, stages: Stages) -> tuple[Floats, Floats]:
    """The same of all layers of a stage, of which recompute covers a part, and of the one that it brings back, (N, 3) each."""
    kept, whole = _layer_more(workload, trainer, layout)
    inner, widest = _inner_more(workload, trainer, layout, stages)
    tensors = workload.model.num_mlp_matrices - 1.0 + workload.model.gated * ("swiglu" in trainer.kernels.unfused)
    layers = stages.dense + stages.moe
    full = (column(layout.recompute) == Recompute.FULL) * covered_share(layout, stages)
    brought = np.maximum(whole + tensors * widest - kept, 0.0) + widest
    return layers * full * kept + (1.0 - full) * (layers * whole + tensors * inner), np.broadcast_to(full * brought, layers.shape)
