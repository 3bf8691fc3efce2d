"""Which layers and parameters each pipeline stage holds: first, a middle one, last; shape (N, 3) everywhere. How many of the
parameters a rank holds, trains and updates, by state sharding."""

import functools
from collections.abc import Sequence

import numpy as np

from planner.arrays import Floats
from planner.cost.parameters import count_parameters
from planner.cost.state_dtypes import (
    BOTH_LAYOUTS,
    FP8_GATHERED,
    RUNS_AS_IT_LIES,
    frozen_element,
    frozen_other,
    in_fewer_bits,
    quantised_weights,
)
from planner.layout import Layout, Schedule, is_v_shaped
from planner.linear_attention import LayerKind
from planner.model import ModelSpec
from planner.record import record
from planner.trainer import Trainer
from planner.trainer_records import Kernels
from planner.workload import LOW_PRECISIONS, PAGED, Workload


def column(value: object) -> Floats:
    """A layout field as a float column of shape (N, 1)."""
    return np.atleast_1d(np.asarray(value, dtype=float))[..., None]


def sequences(workload: Workload, layout: Layout) -> Floats:
    """Sequences of a micro batch, (N, 1)."""
    return column(layout.micro_batch_size) * workload.sequences


@record
class Stages:
    """Contents of the first, a middle and the last stage of every candidate."""

    dense: Floats
    """Dense layers."""
    moe: Floats
    """Layers with experts."""
    embedding: Floats
    """1 where the token embedding lives."""
    head: Floats
    """Output heads: 1, and one more for every multi-token-prediction module."""
    weight: Floats
    """How many stages of the pipeline each of the three stands for: 1, p - 2, 1 (p = 1: 1, 0, 0)."""
    first_dense: Floats
    """Dense layers of the first virtual stage of each."""
    first_moe: Floats
    """Layers with experts of it."""


def stage_positions(layout: Layout, middle: int = 1) -> Floats:
    """Numbers of the three stages: 0, ``middle`` (0 where there is no middle), p - 1; shape (N, 3).

    Of all middle stages the first holds the most microbatches.
    """
    pp = np.atleast_1d(np.asarray(layout.pp, dtype=float))
    return np.stack([np.zeros_like(pp), np.where(pp > 2, float(middle), 0.0), pp - 1], axis=-1)


TIE = 1e-9
"""Layers by which a share may be missed and still count as met: rounding."""
NO_LAYERS = -1
"""First or last stage without any layer (0 = not given): only the embedding or the head."""


def assign_layers(model: ModelSpec, trainer: Trainer, layout: Layout) -> Layout:
    """The layout with the stages of a trainer that assigns layers by a rule of its own; any other layout as it is."""
    for term in trainer.terms:
        layout = term.partition(model, layout)
    return layout


def stage_layers(num_layers: int, layout: Layout) -> list[int]:
    """Layers of every pipeline rank: given first and last, the rest as even as it goes, larger ones first."""
    pp, first, last = int(layout.pp), int(layout.first_stage_layers), int(layout.last_stage_layers)
    given = (first != 0) + (last != 0)
    share, extra = divmod(num_layers - max(first, 0) - max(last, 0), max(pp - given, 1))
    middle = [share + (i < extra) for i in range(pp - given)]
    return ([max(first, 0)] if first else []) + middle + ([max(last, 0)] if last else [])


def split_stages(model: ModelSpec, layout: Layout, middle: int = 0) -> Stages:
    """Layers per stage: given first and last, the rest evenly; the remainder of a division makes a middle stage larger.

    Leading dense layers of a mixture of experts lie on the stages that the data passes first. Prediction modules sit on the
    last stage. The middle one of the three is the largest with the mean of experts, or the one of number ``middle``.
    """
    rows, total = len(layout), float(model.num_layers)
    pp, given_first, given_last = (
        np.broadcast_to(np.asarray(one, dtype=float), (rows,))
        for one in (layout.pp, layout.first_stage_layers, layout.last_stage_layers)
    )
    left = total - np.maximum(given_first, 0.0) - np.maximum(given_last, 0.0)
    even = left / np.maximum(pp - (given_first != 0) - (given_last != 0), 1.0)
    first = np.where(given_first != 0, np.maximum(given_first, 0.0), np.ceil(even))
    last = np.where(given_last != 0, np.maximum(given_last, 0.0), np.floor(even))
    single = pp == 1
    first, last = np.where(single, total, first), np.where(single, total, last)
    small, larger = np.divmod(np.maximum(total - first - last, 0.0), np.maximum(pp - 2, 1.0))
    between = small + ((middle <= larger) if middle else (larger > 0))
    layers = np.stack([first, np.where(pp > 2, between, first), last], axis=-1)
    one = np.ones(rows)
    at_first, at_last = np.stack([one, pp <= 2, single], axis=-1), np.stack([single, single, one], axis=-1)
    more = at_last * model.mtp_layers * model.layers_per_mtp
    leading, (chunk, chunk_leading) = _leading_dense(model, layers, layout, middle)
    moe = _moe_layers(model, layers, leading, layout, middle) + more * bool(model.num_moe_layers)
    chunk_moe = (chunk - chunk_leading) * experts_share(model)
    at_head = np.where(np.broadcast_to(is_v_shaped(layout.schedule), (rows,))[..., None], at_first, at_last)
    return Stages(
        dense=layers + more - moe,
        moe=moe,
        embedding=at_first,
        head=(1.0 + model.mtp_layers) * at_head,
        weight=np.stack([one, np.maximum(pp - 2, 0.0), np.where(single, 0.0, one)], axis=-1),
        first_dense=chunk - chunk_moe,
        first_moe=chunk_moe,
    )


def experts_share(model: ModelSpec) -> float:
    """Part of the layers behind the leading dense ones that have experts."""
    return model.num_moe_layers / max(model.num_layers - model.num_dense_layers, 1) if model.is_moe else 0.0


def _moe_layers(model: ModelSpec, layers: Floats, leading: Floats, layout: Layout, middle: int) -> Floats:
    """Layers with experts on each of the three stages; the middle one holds the mean of what first and last leave, or its own
    where ``middle`` is its number."""
    if not model.is_moe:
        return np.zeros_like(layers)
    pp = np.broadcast_to(np.asarray(layout.pp, dtype=float), layers.shape[:1])
    first, own, last = ((layers - leading) * experts_share(model)).T
    last = np.where(pp > 1, last, first)
    left = np.maximum(model.num_moe_layers - first - last, 0.0)
    mean = np.minimum(np.ceil(left / np.maximum(pp - 2, 1.0)), layers[..., 1])
    return np.stack([first, np.where(pp > 2, own if middle else mean, first), last], axis=-1)


def _leading_dense(
    model: ModelSpec, layers: Floats, layout: Layout, middle: int
) -> tuple[Floats, tuple[Floats, Floats]]:
    """How many of the D leading dense layers the first, one middle and the last stage hold, (N, 3); the layers of the first
    virtual stage of each, and those of them that are among the D.

    Chunk c of rank r is virtual stage c p + r and starts behind all layers of those before it, at s: of its n layers
    min(max(D - s, 0), n) are among the first D. Chunks of few layers put the D on several ranks. In a V the second chunk
    goes back up the ranks. Chunks of a rank: ``trainers.bundle.target.layers_per_chunk``.
    [Megatron Core, transformer_layer.py, get_transformer_layer_offset; torch.distributed.pipelining, stages c p + r]
    """
    pp, vpp, v_shaped = (
        np.broadcast_to(np.asarray(one), layers.shape[:1]) for one in (layout.pp, layout.vpp, is_v_shaped(layout.schedule))
    )
    rest = np.maximum(model.num_layers - layers[..., 0] - layers[..., 2], 0.0)
    small, larger = np.divmod(rest * (pp > 2), np.maximum(pp - 2, 1))
    smaller = np.maximum(pp - 2, 0) - larger
    before = max(middle - 1, 0)  # middle ranks before the one that is looked at; the larger ones come first
    start, found = np.zeros(len(layers)), np.zeros_like(layers)
    first_chunk = layers, found
    for chunk in range(int(np.max(vpp, initial=0))):
        if chunk and np.all(start >= model.num_dense_layers):
            break  # every later layer is behind them
        more, less = (np.where(chunk < vpp, one, 0) for one in (chunk, vpp - 1 - chunk))  # where the remainder goes
        first, last, low, high = (
            np.where(chunk < vpp, (one + where) // vpp, 0.0)
            for one, where in ((layers[..., 0], more), (layers[..., 2], less), (small, more), (small + 1, more))
        )
        inner, last = high * larger + low * smaller, np.where(pp > 1, last, 0.0)
        offset = first + high * np.minimum(larger, before) + low * np.maximum(before - larger, 0.0)
        sizes = np.stack([first, np.where(before < larger, high, low), last], axis=-1)
        down = np.stack([np.zeros_like(first), offset, first + inner], axis=-1)
        up = (first + inner + last)[:, None] - down - sizes
        back = (v_shaped & (chunk == 1))[:, None]
        here = np.clip(model.num_dense_layers - start[:, None] - np.where(back, up, down), 0.0, sizes)
        found = found + here
        first_chunk = first_chunk if chunk else (sizes, here)
        start = start + first + inner + last
    return found, first_chunk


@record
class StageParameters:
    """Parameters that one rank of each stage holds before state sharding, shape (N, 3)."""

    dense: Floats
    """Everything but routed experts; replicated over dp * cp."""
    expert: Floats
    """Routed experts; replicated over edp."""
    largest_dense_unit: Floats
    """The largest unit that ZeRO 3 gathers at once: a layer without its experts, shape (N, 1)."""
    largest_expert_unit: Floats
    """Routed experts of one layer, shape (N, 1)."""
    adapters: Floats
    """Low-rank adapters, when only those are trained."""
    expert_adapters: Floats
    """Those of them on routed experts where these have other replicas than the rest: sharded and reduced as the experts are."""
    whole: Floats
    """Copies of embedding and head that are trained beside adapters; 0 without."""
    linear: Floats
    """The part of ``dense`` that is linear layers: no embedding, head, norm or router."""
    image_encoder: Floats
    """The part of ``dense`` in an image encoder, on the first stage."""

    @property
    def all(self) -> Floats:
        """Parameters of one rank, experts included."""
        return self.dense + self.expert

    def trained(self, workload: Workload) -> tuple[Floats, Floats]:
        """Parameters that get gradients: all of them, or the adapters with what is trained in addition."""
        if workload.lora_rank:
            return self.adapters - self.expert_adapters + self.whole, self.expert_adapters
        return self.dense - self.image_encoder * (not workload.trains_images), self.expert

    def updated(self, workload: Workload, layout: Layout, trainer: Trainer | None = None) -> Floats:
        """Parameters whose optimizer states live on one rank."""
        dense, expert = self.trained(workload)
        dense_shard, expert_shard = shard_groups(layout, trainer)
        sharded = column(layout.zero) >= 1
        return dense / np.where(sharded, dense_shard, 1.0) + expert / np.where(sharded, expert_shard, 1.0)


def stage_parameters(
    workload: Workload, layout: Layout, stages: Stages, kernels: Kernels | None = None
) -> StageParameters:
    """Parameters per rank: sharded weights over tp, experts over ep * etp, the rest whole.

    Key and value projections are repeated when tp exceeds the number of key-value heads. An embedding that is tied, or
    that prediction modules look tokens up in, is stored twice when first and last stage differ.
    ``kernels`` decide which adapters there are; without them one for each fused linear layer.
    [parameters.count_parameters; as Megatron's own model has them]
    """
    model, counts, tp = workload.model, count_parameters(workload.model), column(layout.tp)
    attention, mlp, others, experts = _per_layer(model, layout, model.layer_kinds)
    table = counts.input_embedding / tp
    copy = table if model.tied_embeddings or model.mtp_layers else 0.0
    head = np.minimum(stages.head, 1.0)
    dense = (
        (stages.dense + stages.moe) * attention + stages.dense * mlp + stages.moe * others
        + stages.embedding * (table + counts.position_embedding + counts.vision)
        + head * (counts.head / tp + counts.final_norm) + head * copy * (1.0 - stages.embedding)
        + (stages.head - head) * (counts.mtp_sharded / tp + counts.mtp_replicated)
    )  # fmt: skip
    plain = attention - (not model.is_mla) * counts.attention_replicated
    linear = (
        (stages.dense + stages.moe) * plain + stages.dense * counts.mlp_sharded / tp + stages.moe * counts.shared_experts / tp
    )
    alone = [_per_layer(model, layout, [one._replace(share=1.0)]) for one in model.layer_kinds]
    unit = functools.reduce(np.maximum, [
        one[0] + (one[1] if not model.is_moe else np.maximum(one[2], one[1] * (model.num_plain_layers > 0))) for one in alone
    ])  # fmt: skip
    mixer, plain_mlp, shared, routed = _adapter_widths(workload, layout, kernels)
    width = (stages.dense + stages.moe) * mixer + stages.dense * plain_mlp + stages.moe * (shared + routed)
    apart = column(layout.edp) != column(layout.dp) * column(layout.cp)
    ends = (stages.embedding * workload.trains("embedding") + head * workload.trains("head")) * (workload.lora_rank > 0)
    return StageParameters(
        dense=dense,
        expert=stages.moe * experts,
        largest_dense_unit=unit,
        largest_expert_unit=functools.reduce(np.maximum, [one[3] for one in alone]),
        adapters=workload.lora_rank * width / tp,
        expert_adapters=workload.lora_rank * stages.moe * routed / tp * apart,
        whole=ends * table,
        linear=linear,
        image_encoder=stages.embedding * counts.vision,
    )


def _per_layer(model: ModelSpec, layout: Layout, kinds: Sequence[LayerKind]) -> tuple[Floats, Floats, Floats, Floats]:
    """Parameters on one rank of the mixers and norms of a layer, its dense MLP, shared experts with the router, routed experts;
    the mean of some kinds of layers."""
    counts, tp = count_parameters(model, kinds), column(layout.tp)
    repeat = np.maximum(tp / model.num_kv_heads, 1.0) - 1.0
    mixer = (counts.attention_sharded + repeat * counts.key_value_weights) / tp + counts.attention_replicated
    experts = counts.expert * model.num_experts / (column(layout.ep) * column(layout.etp))
    return (
        mixer,
        counts.mlp_sharded / tp + counts.mlp_replicated,
        counts.shared_experts / tp + counts.router,
        experts,
    )


def _adapter_widths(workload: Workload, layout: Layout, kernels: Kernels | None) -> tuple[float, float, float, Floats]:
    """Inputs plus outputs of the adapters of one layer, r (in + out) parameters each: mixer, MLP, shared experts, routed ones of a
    rank.

    Separate query, key and value, gate and up have an adapter each, which all read the same input; else one. Those of linear
    attention have one before and one behind it, where all linear layers are adapted. Of a hybrid, the mean of its layers.
    """
    separate = kernels is not None and kernels.separate_projections
    model, targets, pairs = workload.model, workload.lora_targets, 1.0 + separate * (workload.model.num_mlp_matrices - 2)
    h, matrices, own = float(model.hidden_size), model.num_mlp_matrices - 1, model.linear
    side = kernels.query_adapters(targets) if kernels is not None else 1.0
    attends, linear = (sum(one.share for one in model.layer_kinds if one.mixer == name) for name in ("attention", "linear"))
    mlps = sum(one.share for one in model.layer_kinds if one.mlp)
    if targets == "qv":
        return attends * (side * h + model.query_size + model.value_size), 0.0, 0.0, np.zeros((1, 1))
    attention = side * h + model.query_size + model.query_gate_size + model.key_size + model.value_size
    attention += (model.attention_output_size + h) * (targets != "qkv")
    mixer = attends * attention + (linear * (2.0 * h + own.input_size + own.value_size) if own and targets == "all" else 0.0)

    def mlp(width: float, outer: float = h, each: float = pairs) -> float:
        return mlps * (each * outer + matrices * width + width + outer) * (targets == "all" and width > 0)

    joined = kernels is not None and not kernels.linear_experts  # gate and up in one tensor
    routed = mlp(float(model.expert_ffn_size), float(model.routed_size), 1.0 if joined else pairs)
    routed *= kernels is None or kernels.adapted_experts
    experts = routed * model.num_experts / (column(layout.ep) * column(layout.etp))
    return mixer, mlp(float(model.ffn_size)), mlp(float(model.shared_expert_ffn_size)), experts


def experts_outside(layout: Layout, trainer: Trainer | None) -> Floats:
    """1 where routed experts are spread over ranks and left out of state sharding, (N, 1)."""
    outside = trainer is not None and trainer.legal.expert_parallel == "outside"
    return np.where(outside & (column(layout.ep) > 1), 1.0, 0.0)


def shard_groups(layout: Layout, trainer: Trainer | None = None) -> tuple[Floats, Floats]:
    """Ranks over which states are sharded: dense weights over dp_shard * cp, experts over their part of edp, or not at all."""
    replicas = column(layout.dp) / column(layout.shard)
    experts = np.maximum(column(layout.edp) / replicas, 1.0)
    return column(layout.shard) * column(layout.cp), np.where(experts_outside(layout, trainer) > 0, 1.0, experts)


def host_share(workload: Workload, layout: Layout) -> Floats:
    """Part of the optimizer states in host memory: what is offloaded, all where weights are, and all pages of a paged optimizer."""
    moved = np.maximum(column(layout.offload_optimizer) / 100.0, column(layout.offload_parameters))
    return np.where(workload.optimizer in PAGED, 1.0, moved)


def gathered_bytes(workload: Workload) -> float:
    """Bytes per parameter of trained weights, and of tables, that are gathered: in fp32 the fp32 weights themselves."""
    return 4.0 if workload.precision == "fp32" else 2.0


def layer_bytes(workload: Workload, trainer: Trainer) -> float:
    """Bytes per parameter of layers that are gathered: a frozen base as it lies in memory, cast before where that is fp32."""
    if quantised_weights(workload, trainer):
        return FP8_GATHERED[workload.precision]
    whole = gathered_bytes(workload)
    return min(frozen_element(workload), whole) if workload.lora_rank else whole


def gathered_parameters(workload: Workload, trainer: Trainer, parameters: StageParameters) -> Floats:
    """Bytes of all weights of a stage, gathered, (N, 3)."""
    layers = parameters.linear + parameters.expert
    return layers * layer_bytes(workload, trainer) + (parameters.all - layers) * gathered_bytes(workload)


def base_bytes(workload: Workload, trainer: Trainer, parameters: StageParameters) -> tuple[Floats, Floats]:
    """Bytes per parameter of dense and of expert weights without adapters, (N, 3) or (N, 1) each, as they lie in memory.

    Trained weights as the trainer has them. A frozen base has no master weights: linear layers in ``frozen_element``, all else
    (embedding, head, norms) in the dtype of activations, or in fp32 (option ``unquantised``); in fp8 the copies that a
    trainer keeps come on top, unless the base itself is in fp8 or fp4.
    """
    copies = ("weight_copies" in trainer.kernels.fp8) * (workload.precision in LOW_PRECISIONS)
    share = parameters.linear / np.maximum(parameters.dense, 1.0)
    if quantised_weights(workload, trainer):
        return share * BOTH_LAYOUTS + (1.0 - share) * (trainer.stored.weight_bytes + copies), np.full((1, 1), BOTH_LAYOUTS)
    if not workload.lora_rank:
        each = trainer.stored.weight_bytes + copies
        if workload.precision == "fp32":
            each = max(each, 4.0)
        return np.full((1, 1), each), np.full((1, 1), each)
    linear, other = frozen_element(workload), frozen_other(workload)
    tables = 4.0 if trainer.kernels.fp32_tables and in_fewer_bits(workload) else other
    linear = linear + copies * (workload.frozen_weights not in RUNS_AS_IT_LIES)
    kernels, fewer = trainer.kernels, frozen_element(workload) < other
    expert = linear if kernels.quantised_experts else 4.0 if kernels.fp32_experts and fewer else other
    return share * linear + (1.0 - share) * tables, np.full((1, 1), expert)


def gathered_at_once(most: int, layout: Layout, weights: Floats, ends: Floats) -> Floats:
    """Of a stage's gathered weights what is there at its peak: ends + (W - ends) min(1, k / v), of v virtual stages at most k.

    Embedding and head are, as the peak lies in the pass of the virtual stage that has them.  [torch 2.13, _add_unshard_reshard]
    """
    virtual = np.where(column(layout.schedule) == Schedule.INTERLEAVED, column(layout.vpp), 1.0)
    return ends + (weights - ends) * np.minimum((most or np.inf) / virtual, 1.0)
