"""What one layer does on one GPU for one microbatch: its operators and collectives, with shapes and bytes.

Everything else is read off these lists: FLOP and seconds (compute), exposed communication (communication), what is kept
for the backward pass (memory), what a recompute mode repeats and frees.
"""

import numpy as np

from planner.cost.layer.adapters import merged_experts, read_again
from planner.cost.layer.attention_layer import attention_block
from planner.cost.layer.eager_kernels import EAGER, eager, uncompiled
from planner.cost.layer.expert_layer import after_experts, before_experts, expert_exchange, expert_loop, joined
from planner.cost.layer.linear_layer import linear_block
from planner.cost.layer.operators import (
    NEVER,
    REPEATED,
    Collective,
    Gemm,
    MemoryBound,
    Number,
    Operator,
    Shard,
    logit_bytes,
    loss_bytes,
    loss_share,
)
from planner.cost.layer.parts import input_gradient_sum, linear, norm, rank_order, residual, tp_pair
from planner.cost.layer.save_list import attention_products, listed_output, repeats
from planner.layout import Module
from planner.linear_attention import WHOLE, LayerKind
from planner.workload import LOW_PRECISIONS


def layer(shard: Shard, moe: bool, kind: LayerKind = WHOLE) -> tuple[list[Operator], list[Collective]]:
    """Operators and collectives of one layer, dense or with experts, in forward order: what its ``kind`` has of mixer and MLP."""
    mixers = {"attention": attention_block, "linear": linear_block}
    operators, collectives = mixers[kind.mixer](shard) if kind.mixer in mixers else ([], [])
    if kind.mlp:
        more_operators, more_collectives = _moe_block(shard) if moe else _mlp_block(shard)
        operators, collectives = operators + more_operators, collectives + more_collectives
    return _own(shard, "layer", uncompiled(operators, shard), collectives)


def _own(
    shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
) -> tuple[list[Operator], list[Collective]]:
    """As the trainer's own terms have it."""
    for one in shard.trainer.terms:
        operators, collectives = one.layer(shard, part, operators, collectives)
    return operators, collectives


GELU_NEW = ("gelu_new", "gelu_new_half")
"""Rows of EAGER that an activation may be."""


def _mlp(
    shard: Shard, name: str, width: float, module: Module, m: Number, split: Number, groups: Number, *,
    ends: bool = False,
) -> list[Operator]:  # fmt: skip
    """Up projection (two matrices when gated), activation, down projection, over ``m`` rows in each of ``groups``.

    The activation keeps the output of the up projection, and its own output for the down projection; recomputing the
    activation frees the latter. ReLU keeps its own output alone.  [torch, derivatives.yaml: relu, threshold_backward(grad, result)]
    SwiGLU as two kernels reads and writes 2 + 3 tensors of the inner width forward and 3 + 3 + 3 backward (both factors of the
    product, SiLU), and keeps what SiLU put out.
    """
    model, e, passes = shard.model, shard.element, shard.trainer.kernels.elementwise_passes
    grouped = bool(module & Module.MOE) and not module & Module.SHARED_EXPERTS
    h, inner = float(model.routed_size if grouped else model.hidden_size), width / split
    up = inner * (model.num_mlp_matrices - 1)
    rows = m * groups
    sums = float(model.gated and shard.trainer.kernels.separate_projections)
    alone = (
        grouped or not shard.trainer.kernels.transformer_engine
    )  # its activations are a unit of recompute in grouped experts only
    activation = (Module.MLP_ACTIVATION if alone else NEVER) | REPEATED | module
    first = attention_products(model) + 1
    last = first + model.num_mlp_matrices - 1
    share = 1.0 if grouped else 0.5 if model.gated else repeats(first)
    useful = 1.0 / shard.busiest if grouped else 1.0
    apart = model.gated and "swiglu" in shard.trainer.kernels.unfused
    moved = ((up + inner) * passes, (2 * up + inner) * passes)
    row = EAGER["gate_views" if "gate_views" in shard.trainer.kernels.unfused else "swiglu"]
    if apart:
        moved = (row.forward.as_plain(e) / e * inner, row.backward.as_plain(e) / e * inner)
    plain = None if model.gated else next((EAGER[one] for one in GELU_NEW if one in shard.trainer.kernels.unfused), None)
    if plain is not None:
        row, moved = plain, (plain.forward.as_plain(e) / e * inner, plain.backward.as_plain(e) / e * inner)
    if grouped and "router" in shard.trainer.kernels.unfused:  # the gradient of the router's weight reads both again
        moved = (moved[0], moved[1] + up + inner)
    per_linear = {"launches": _expert_launches(shard, groups), "captured": False} if grouped else {}
    fused = grouped and shard.trainer.kernels.fused_experts
    ranks = 1.0 if grouped else shard.quantising_ranks
    if fused:  # the activation is part of both kernels; backward the second reads what the first one multiplied
        moved = (0.0, up)
    return [
        *linear(shard, f"{name}_up", m, up, h, groups=groups, module=module | REPEATED, share=share, useful=useful,
                saved=rows * up * e * (model.activation != "relu"), quantised=(False, fused), gathered=(ranks, 1.0), **per_linear),
        *input_gradient_sum(shard, name, sums, rows, reader="copy" if grouped else "norm"),
        *(_clamp(shard, rows, up) if grouped else []),
        MemoryBound(name=f"{name}_activation", kind="swiglu" if model.gated else "elementwise", module=activation,
                    forward=rows * moved[0] * e, backward=rows * moved[1] * e,
                    saved=rows * inner * (shard.input_element * read_again(shard, f"{name}_down") + e * apart +
                                          (plain.saved[e > 2] if plain is not None else 0.0)),
                    launches=(row.launches[0][e > 2], row.launches[1][e > 2]) if apart or plain is not None else (passes, passes),
                    captured=not grouped),
        *linear(shard, f"{name}_down", m, h, inner, groups=groups, module=module | REPEATED, useful=useful,
                share=1.0 if grouped else repeats(last), ends=ends, kept=0.0 if grouped else listed_output(shard, last),
                quantised=(fused, False), gathered=(1.0, ranks), **per_linear),
    ]  # fmt: skip


def _clamp(shard: Shard, rows: Number, width: Number) -> list[Operator]:
    """Clamp of gate and up before the activation, as kernels of its own; its output is kept in addition to its input.

    The activation behind it copies a number to the GPU from memory that is not pinned: the host waits until the GPU is
    there.  [fused_bias_geglu.py, weighted_bias_quick_geglu_impl: torch.tensor(linear_offset, device=...)]
    """
    row = next((one for one in ("clamp", "clamp_views") if one in shard.trainer.kernels.unfused), "")
    if not shard.model.clamped_activation or not row:
        return []
    module = Module.MLP_ACTIVATION | Module.MOE | REPEATED
    return [eager(shard, row, rows * width, "experts_clamp", module=module, captured=False, waits=row == "clamp")]


def _expert_launches(shard: Shard, groups: Number) -> tuple[Number, Number]:
    """Kernels of one linear layer of the experts: one each way, or one per expert where they are launched in a loop, and those
    that quantise the rows of each (``Casts.kernels``).
    [TransformerEngine, grouped_linear.py: cuBLAS in a loop; csrc/extensions/cast.cpp, multi_tensor_quantize_impl]"""
    alone = {"grouped_gemm", "expert_loop"} & shard.trainer.kernels.unfused
    each = groups if alone else np.ones_like(shard.tp)
    casts = shard.trainer.kernels.casts.get(shard.workload.precision)
    quantised = casts.kernels if casts and shard.workload.precision in LOW_PRECISIONS else 0.0
    return each * (1.0 + quantised), each * (2.0 + quantised)


def _mlp_block(shard: Shard) -> tuple[list[Operator], list[Collective]]:
    operators = [] if shard.model.norms_per_layer == 1 else [norm(shard, "mlp_norm", "mlp_up", inside=Module.MLP)]
    last = shard.model.norms_per_layer <= 2
    operators += [] if shard.model.parallel_attention else rank_order(shard, "mlp", Module.MLP)
    operators += _mlp(shard, "mlp", float(shard.model.ffn_size), Module.MLP, shard.tokens, shard.tp, 1.0, ends=last)
    operators.append(residual(shard, "mlp_residual", ends=True))
    if shard.model.norms_per_layer > 2:
        operators.append(norm(shard, "mlp_post_norm"))
    if shard.model.parallel_attention:  # both blocks share one input and one output: no further collective
        return operators, []
    return operators, tp_pair(shard, "mlp", "mlp_up", "mlp_down", Module.MLP, ends=last)


def _moe_block(shard: Shard) -> tuple[list[Operator], list[Collective]]:
    """Router, permutation, all-to-all, grouped expert MLP, all-to-all, permutation back, shared experts.

    Each rank sends T_s K token copies and receives as many (times imbalance), shared among its E / e experts whose
    width is split over etp. Kept: the permuted inputs and the expert MLP's tensors.
    [Megatron Core MoE, arXiv 2504.14960, section 3]
    """
    model, module = shard.model, Module.MOE
    rows, local = shard.expert_rows, np.maximum(model.num_experts / shard.ep, 1.0)
    operators: list[Operator] = [
        norm(shard, "mlp_norm", "shared_up", rows=_routed_rows(shard)),
        Gemm(name="router", m=shard.tokens_split, n=float(model.num_experts), k=float(model.hidden_size), module=module | REPEATED,
             low_precision=False, trained=shard.workload.lora_rank == 0,
             saved=shard.tokens_split * model.num_experts * 4, launches=(6.0, 6.0)),
        *_routed_width(shard, "experts_in", float(model.routed_size), float(model.hidden_size)),
        *before_experts(shard),
        *_mlp(shard, "experts", float(model.expert_ffn_size), module, rows / local, shard.etp, local),
        *merged_experts(shard),
        *expert_loop(shard, local),
        *after_experts(shard),
        *_routed_width(shard, "experts_out", float(model.hidden_size), float(model.routed_size)),
        *joined(shard),
    ]  # fmt: skip
    if model.shared_expert_ffn_size:
        shared = Module.SHARED_EXPERTS | module
        operators += _mlp(shard, "shared", float(model.shared_expert_ffn_size), shared, shard.tokens, shard.tp, 1.0)
    operators.append(residual(shard, "mlp_residual"))
    collectives = expert_exchange(shard)
    if model.shared_expert_ffn_size:
        collectives += tp_pair(shard, "shared", "shared_up", "shared_down", module)
    return operators, collectives


def _routed_rows(shard: Shard) -> Number:
    """Rows of the norm before experts that are kept: router and routed experts take those of the rank, T_s, shared experts all T
    where layers save their gathered input.  [torchtitan, models/common/MOE_SHARDING.md]"""
    gathered = shard.trainer.stored.gathered_inputs and shard.model.shared_expert_ffn_size > 0
    return shard.tokens_split + np.where(gathered & (shard.split > 1), shard.tokens, 0.0)


def _routed_width(shard: Shard, name: str, n: float, k: float) -> list[Operator]:
    """Projection to and from the width at which routed experts work, whole on every rank, over the tokens before they are sent.
    [Megatron Core, moe_layer.py, moe_latent_size: fc1_latent_proj, fc2_latent_proj]"""
    if not shard.model.expert_hidden_size:
        return []
    source = shard.tokens_split * k * shard.element * (name == "experts_out")
    return linear(shard, name, shard.tokens_split, n, k, module=Module.MOE | REPEATED, saved=source)


def embedding(shard: Shard) -> tuple[list[Operator], list[Collective]]:
    """Token embedding split by vocabulary: each rank looks up its rows, the sum is scattered or all-reduced."""
    values, e = shard.tokens * shard.model.hidden_size, shard.element
    operators: list[Operator] = [
        MemoryBound(name="embedding", kind="copy", forward=2 * values * e, backward=3 * values * e,
                    kept=shard.tokens * 8 + shard.dropout * values / shard.split, launches=(3.0, 3.0))
    ]  # fmt: skip
    pair = tp_pair(shard, "embedding", "", "", NEVER)
    collectives = [one for one in pair if one.name.endswith(("_scatter", "_reduce", "gather_gradient"))]
    return _own(shard, "embedding", operators, collectives)


def head(shard: Shard) -> tuple[list[Operator], list[Collective]]:
    """Final norm, output projection and cross entropy on V / t columns.

    The loss reads the logits and writes their fp32 softmax forward, reads that and writes the gradient backward
    (``loss_bytes``); from two passes on they are plain element-wise kernels, at the bandwidth of these. Alive at the
    peak: ``logit_bytes`` per logit, of all tokens or of a piece (``loss_share``).
    """
    model, trainer = shard.model, shard.trainer
    columns = model.vocab_size / shard.tp
    logits = shard.tokens * columns
    again = trainer.stored.loss in ("chunked", "vocabulary")  # nothing of a piece is kept
    operators: list[Operator] = [
        norm(shard, "final_norm"),
        Gemm(name="logits", m=shard.tokens, n=columns, k=float(model.hidden_size), low_precision=False, again=again,
             trained=shard.workload.trains("head") or trainer.stored.loss == "vocabulary", launches=(1.0, 2.0)),
        MemoryBound(name="loss", kind="cross_entropy" if trainer.kernels.loss_passes < 2 else "elementwise",
                    forward=logits * loss_bytes(shard), backward=logits * loss_bytes(shard), again=again,
                    kept=logits * logit_bytes(shard) * loss_share(shard),
                    launches=(6.0 * trainer.kernels.loss_passes, 3.0 * trainer.kernels.loss_passes)),
    ]  # fmt: skip
    pair = tp_pair(shard, "head", "logits", "logits", NEVER)
    collectives = [one for one in pair if not one.name.endswith(("_scatter", "_reduce", "gather_gradient"))]
    return _own(shard, "head", uncompiled(operators, shard), collectives)
