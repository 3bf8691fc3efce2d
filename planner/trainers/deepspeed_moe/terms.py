"""What DeepSpeed's own layer of experts does: tokens travel by products with dense masks over tokens x experts x capacity.

Every expert has room for c tokens, and its rows are c whatever the router does; what finds no room is dropped. S tokens are those
of a microbatch, whole on every tensor-parallel rank.
[DeepSpeed 0.3 to 0.19, moe/sharded_moe.py: top1gating, top2gating, topkgating,
MOELayer.forward; since August 2026 (#8195) routes are gathered by index instead]
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.layer.operators import Collective, Gemm, MemoryBound, Number, Operator, Shard
from planner.cost.own_terms import OwnTerms
from planner.cost.pipeline.partition import StageParameters, column, sequences
from planner.layout import Layout, Module
from planner.workload import Workload

LEAST_CAPACITY = 4.0
"""--moe-min-capacity of Megatron-DeepSpeed by default."""
_GONE = ("sort", "pad", "unpad", "expert_bias")
"""Tokens need no sorting; the second bias of an expert is not added.  [moe/experts.py: "Ignore the bias term for now"]"""
_TRANSIENT = 8.0
"""Bytes per mask element in the backward pass beyond what is saved: the fp32 gradient of the weights, and that times locations."""


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Gates with a capacity."""

    capacity_factor: float = 0.0
    """Room of the experts over the copies of tokens; 0 = experts are not DeepSpeed's own."""

    def capacity(self, tokens: Number, experts: int, top_k: int) -> Floats:
        """c = max(ceil(S f K / E), 4)."""
        return np.maximum(np.ceil(np.asarray(tokens) * self.capacity_factor * top_k / experts), LEAST_CAPACITY)

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Masks and products with them around the experts, which have R = E c / t rows on every rank."""
        if part != "layer" or not self.capacity_factor or all(one.name != "router" for one in operators):
            return operators, collectives
        slots = shard.model.num_experts * self.capacity(shard.tokens_split, shard.model.num_experts, shard.model.top_k)
        ratio = slots / shard.tp / shard.expert_rows
        found: list[Operator] = []
        for one in operators:
            if one.name == "router":
                found.append(dataclasses.replace(one, saved=one.saved + _gate_bytes(shard, slots)))
            elif one.name == "permute":
                found += [_masks(shard, slots), _dispatch(shard, slots), _chunks(shard, slots)]
            elif one.name == "unpermute":
                found.append(_combine(shard, slots))
            elif one.name not in _GONE:
                found.append(_scaled(one, ratio) if one.name.startswith("experts_") else one)
        return found, [*(one for one in collectives if one.group != "ep"), *_exchange(shard, slots)]

    def workspace_bytes(self, workload: Workload, layout: Layout, parameters: StageParameters) -> Number:
        """What the masks of one layer need in the backward pass, on stages with experts, and rows that the factor adds to what the
        widest gradient of the experts counts."""
        model = workload.model
        if not self.capacity_factor or not model.is_moe:
            return 0.0
        tokens = sequences(workload, layout) * workload.sequence_length / column(layout.cp)
        slots = model.num_experts * self.capacity(tokens, model.num_experts, model.top_k)
        more = np.maximum(slots - tokens * model.top_k, 0.0) / column(layout.tp)
        wide = more * model.expert_ffn_size * model.num_mlp_matrices * workload.element
        return (_TRANSIENT * tokens * slots + wide) * (parameters.expert > 0)


def _gate_bytes(shard: Shard, slots: Number) -> Number:
    """S (4 h + 4 E K + 4 c K) beside the S E of the softmax: the fp32 copy of the input, which the gradient of the gate's weight
    reads, masks of the K choices, and where each token lies in its expert. From three choices on locations are one mask, S E c, in
    place of the K short ones."""
    model, choices = shard.model, min(shard.model.top_k, 2)
    places = slots if model.top_k > 2 else choices * slots / model.num_experts
    return 4.0 * shard.tokens_split * (model.hidden_size + choices * model.num_experts + places)


def _masks(shard: Shard, slots: Number) -> MemoryBound:
    """Bytes per element of S E c, e those of an activation. Forward: an outer product written, 4, for each choice, and with two
    their sum, 12; from three on a one-hot of 8, cast 8 + 4, times the gates 4 + 4. Whether it is zero 4 + 1, and casts of both
    masks 1 + e and 4 + e. Backward: the cast of the gradient e + 4; times locations and summed 12 for each choice, from three on
    16, as locations have the size of the mask."""
    e, many, choices = shard.element, shard.model.top_k > 2, min(shard.model.top_k, 2)
    made = 28.0 if many else 4.0 * choices + 12.0 * (choices > 1)
    half = e < 4
    forward = made + 5.0 + (1.0 + e) + (4.0 + e) * half
    backward = (e + 4.0) * half + (16.0 if many else 12.0 * choices)
    size = shard.tokens_split * slots
    return MemoryBound(name="expert_masks", kind="elementwise", module=Module.MOE, forward=forward * size, backward=backward * size,
                       launches=(12.0 + 16.0 * choices, 8.0 + 6.0 * choices), captured=False)  # fmt: skip


def _dispatch(shard: Shard, slots: Number) -> Gemm:
    """sec,sm->ecm: the mask is kept in the type of the input; it has no gradient, so the backward pass has one product."""
    return Gemm(name="expert_dispatch", m=slots, n=float(shard.model.hidden_size), k=shard.tokens_split, trained=False,
                low_precision=False, useful=0.0, saved=shard.element * shard.tokens_split * slots, module=Module.MOE,
                captured=False, launches=(1.0, 1.0))  # fmt: skip


def _combine(shard: Shard, slots: Number) -> Gemm:
    """sec,ecm->sm: weights and what all experts put out are kept, and both get a gradient."""
    h, e = float(shard.model.hidden_size), shard.element
    return Gemm(name="expert_combine", m=shard.tokens_split, n=h, k=slots, activations=True, low_precision=False, useful=0.0,
                saved=e * (shard.tokens_split + h) * slots, module=Module.MOE, captured=False, launches=(1.0, 2.0))  # fmt: skip


def _chunks(shard: Shard, slots: Number) -> MemoryBound:
    """R h of the experts' input, kept; several of one rank take pieces of it, copied where ranks lie behind each other, and their
    outputs are joined; backward the other way round.  [moe/experts.py: chunk, cat]"""
    rows = slots / shard.tp * shard.model.hidden_size * shard.element
    several = shard.model.num_experts / shard.ep > 1
    return MemoryBound(name="expert_chunks", kind="copy", module=Module.MOE, forward=2.0 * rows * several * (1.0 + (shard.ep > 1)),
                       backward=4.0 * rows * several, saved=rows, launches=(2.0, 2.0), captured=False)  # fmt: skip


def _scaled(one: Operator, ratio: Number) -> Operator:
    """An operator of the experts with ``ratio`` times its rows; its useful FLOP stay those of the tokens."""
    one = dataclasses.replace(one, saved=one.saved * ratio, kept=one.kept * ratio)
    if isinstance(one, Gemm):
        return dataclasses.replace(one, m=one.m * ratio, useful=one.useful / ratio)
    if isinstance(one, MemoryBound):
        return dataclasses.replace(one, forward=one.forward * ratio, backward=one.backward * ratio)
    return one


def _exchange(shard: Shard, slots: Number) -> list[Collective]:
    """All-to-all of R h before and after the experts, both ways. Each tensor-parallel rank sends its 1 / t of the capacity: all are
    gathered after the experts, and their gradients before them.  [moe/mappings.py: drop_tokens, gather_tokens]"""
    size = slots * shard.model.hidden_size * shard.element

    def one(name: str, op: str, backward: bool) -> Collective:
        tensor = op == "all_gather"
        return Collective(name=name, group="tp" if tensor else "ep", op=op, size=size if tensor else size / shard.tp,
                          n=shard.tp if tensor else shard.ep, stride=1.0 if tensor else shard.ep_stride, backward=backward,
                          module=Module.MOE)  # fmt: skip

    return [
        one("dispatch", "all_to_all", False), one("combine", "all_to_all", False), one("combine_gather", "all_gather", False),
        one("dispatch_gradient", "all_to_all", True), one("combine_gradient", "all_to_all", True),
        one("dispatch_gather_gradient", "all_gather", True),
    ]  # fmt: skip
