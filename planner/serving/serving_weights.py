"""Bytes of weights and of cache on a GPU of each pipeline stage of an engine.

A rank of tp x attn_dp holds (t = tp, k key-value heads, E experts, s bytes of an element):

attention   (sharded + (max(t / k, 1) - 1) key_value) / t + replicated, in ``precision.attention``; whole on each attention rank
MLA         with it the up projection once more in 16 bits, as decode multiplies queries and outputs by its two halves
MLP         dense and shared experts / t in ``precision.weights``; ceil(E / ep) expert / moe_tp in ``precision.experts``
tables      embedding and head V h 2 / t; norms, routers, biases 2 bytes each
cache       per token and full layer (k d + k d_v) s / min(t, k); MLA (r + rope) s on every rank of t; both / dcp
state       per sequence: windowed layers min(window, length) tokens; linear layers their state and convolution / t
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray, spread
from planner.cost.parameters import active_parameters, count_parameters
from planner.model import ModelSpec
from planner.record import record
from planner.serving.engine import Engine
from planner.serving.serving_layout import CACHE_BYTES, WEIGHT_BYTES, Precision, ServingLayout
from planner.serving.traffic import Speculation, Traffic

PLAIN = 2.0
"""Bytes of what is never quantised: embeddings, head, norms, routers, activations."""
TILES = (256, 128)
"""Kernels of mxfp4 experts pad width and inner width of a rank to multiples of these: gpt-oss-120b loads as 65.97 GiB for 60.7.
[vLLM, quantization/mxfp4.py; log of 0.10.1]"""
INDEXER_KEY = 1.0 + 4.0 / 128
"""Bytes of an element of the indexer's keys: fp8 and one fp32 scale for 128.  [DeepSeek-V3.2-Exp, inference/model.py]"""


@record
class Stage:
    """What one pipeline stage holds; numbers or columns, or several stages with an axis of them before."""

    layers: Floats
    """Transformer layers."""
    sparse: Floats
    """Those with routed experts."""
    first: Any
    """It is the first stage: input embedding, image encoder."""
    last: Any
    """It is the last stage: output head, modules that draft."""
    exists: NDArray[np.bool_]
    """Where the layout has such a stage."""


def stages(model: ModelSpec, engine: Engine, layout: ServingLayout) -> list[Stage]:
    """First, middle and last stage; a layout of one stage has the last only, which is the whole model then.

    vLLM and SGLang give the L mod p left-over layers to the stages before the last, from behind; TensorRT-LLM from the first.
    [vllm/distributed/utils.py get_pp_indices; tensorrt_llm/mapping.py pp_layers]
    """
    p = np.asarray(layout.pp)
    each, over = model.num_layers // p, model.num_layers % p
    first = each + ((over > 0) if engine.early_remainder else (over > 0) & (over >= p - 1))
    middle = each + (over > (1 if engine.early_remainder else 0))
    last = np.where(p == 1, model.num_layers, each)
    dense = model.num_dense_layers
    share = model.num_moe_layers / max(model.num_layers - dense, 1)
    whole = np.where(p == 1, model.num_moe_layers, last * share)
    return [
        Stage(layers=first, sparse=np.maximum(first - dense, 0) * share, first=True, last=False, exists=p > 1),
        Stage(layers=middle, sparse=middle * share, first=False, last=False, exists=p > 2),
        Stage(layers=last, sparse=whole, first=False, last=True, exists=np.ones(p.shape, dtype=bool)),
    ]


def stacked(several: Sequence[Stage], shape: tuple[int, ...]) -> Stage:
    """Stages of columns of ``shape`` as one, with an axis of stages before them."""
    columns = {
        name: np.stack([spread(getattr(one, name), shape) for one in several])
        for name in ("layers", "sparse", "exists")
    }
    ends = {
        name: np.array([getattr(one, name) for one in several]).reshape(-1, *(1 for _ in shape)) for name in ("first", "last")
    }
    return Stage(**columns, **ends)


@record
class LayerBytes:
    """Bytes of weights of one layer on one GPU."""

    mixer: Floats
    """Attention or linear attention, and all norms of the layer."""
    dense: Floats
    """Dense MLP."""
    routed: Floats
    """Routed experts."""
    shared: Floats
    """Shared experts and the router."""


def layer_bytes(model: ModelSpec, precision: Precision, layout: ServingLayout) -> LayerBytes:
    """Weights of a mean layer of each kind on one GPU."""
    counts, tp = count_parameters(model), np.asarray(layout.tp, dtype=np.float64)
    linear = WEIGHT_BYTES[precision.weights]
    attention = WEIGHT_BYTES[precision.attention or precision.weights]
    experts = WEIGHT_BYTES[precision.experts or precision.weights]
    if model.is_mla:
        up = model.num_heads * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank
        share = model.num_attention_layers / model.num_layers
        mixer = (
            counts.attention_sharded * attention + share * up * PLAIN
        ) / tp + counts.attention_replicated * attention
    else:
        repeated = (np.maximum(tp / model.num_kv_heads, 1.0) - 1.0) * counts.key_value_weights
        mixer = (counts.attention_sharded + repeated) / tp * attention + counts.attention_replicated * PLAIN
    held = np.ceil(model.num_experts / np.asarray(layout.ep, dtype=np.float64))
    routed = held * counts.expert / np.asarray(layout.moe_tp) * experts
    if model.is_moe and (precision.experts or precision.weights) == "mxfp4":
        routed = (
            routed * _tiles(model.routed_size, 1, TILES[0]) * _tiles(model.expert_ffn_size, layout.moe_tp, TILES[1])
        )
    return LayerBytes(
        mixer=mixer,
        dense=counts.mlp_sharded / tp * linear + counts.mlp_replicated * PLAIN,
        routed=routed,
        shared=counts.shared_experts / tp * linear + counts.router * PLAIN,
    )


def _tiles(width: int, parts: Any, tile: int) -> Floats:
    """Bytes after padding over bytes before, of a width that is cut in parts."""
    each = width / np.asarray(parts, dtype=np.float64)
    return np.ceil(each / tile) * tile / each


def host_bytes(
    model: ModelSpec, engine: Engine, precision: Precision, layout: ServingLayout, layers: Any, sparse: Any
) -> Floats:
    """Bytes of weights of some layers, ``sparse`` of them with routed experts, that a GPU leaves in host memory."""
    if np.all(np.asarray(layout.gpu_weights) == 100):
        return np.zeros(np.shape(layout.gpu_weights))
    one = layer_bytes(model, precision, layout)
    found = np.asarray(sparse * one.routed)
    if engine.host_weights == "streams":
        found = found + layers * one.mixer + (layers - sparse) * one.dense + sparse * one.shared
    return found * (1.0 - np.asarray(layout.gpu_weights) / 100.0)


def weight_bytes(model: ModelSpec, engine: Engine, precision: Precision, layout: ServingLayout, stage: Stage) -> Floats:
    """Bytes of weights of a GPU of a stage."""
    counts, tp = count_parameters(model), np.asarray(layout.tp, dtype=np.float64)
    layer = layer_bytes(model, precision, layout)
    found = stage.layers * layer.mixer + (stage.layers - stage.sparse) * layer.dense
    found = found + stage.sparse * (layer.routed + layer.shared)
    found = found - host_bytes(model, engine, precision, layout, stage.layers, stage.sparse)
    front = PLAIN * (counts.input_embedding / tp + counts.position_embedding + counts.vision)
    tied = PLAIN * counts.input_embedding / tp * (counts.head == 0)
    back = PLAIN * (counts.final_norm + (counts.head or counts.input_embedding) / tp)
    back = back + np.where(np.asarray(layout.pp) == 1, front - tied, 0.0)
    return np.asarray(found + np.where(stage.first, front, 0.0) + np.where(stage.last, back, 0.0))


def draft_head(model: ModelSpec) -> float:
    """Parameters that a head on top of a model (EAGLE) reads for a drafted token: those of a layer and of a table."""
    return float(active_parameters(model)) / model.num_layers + float(model.vocab_size * model.hidden_size)


def draft_bytes(
    model: ModelSpec, precision: Precision, layout: ServingLayout, speculation: Speculation | None, stage: Stage
) -> Floats:
    """Weights of what drafts, on the last stage: the model's own module of multi-token prediction, loaded once whatever the depth,
    or a draft model of ``draft_parameters`` in 16 bits that is split over tp; n-gram lookup has none."""
    none = np.zeros(np.shape(layout.tp))
    if speculation is None or not speculation.draft_parameters:
        return none
    tp = np.asarray(layout.tp, dtype=np.float64)
    if not model.mtp_layers:
        return none + np.where(stage.last, speculation.draft_parameters * PLAIN / tp, 0.0)
    counts, layer = count_parameters(model), layer_bytes(model, precision, layout)
    inner = layer.routed + layer.shared if model.is_moe else layer.dense
    joined = (counts.mtp_sharded / tp + counts.mtp_replicated) * PLAIN
    return none + np.where(stage.last, joined + model.layers_per_mtp * (layer.mixer + inner), 0.0)


def token_bytes(model: ModelSpec, precision: Precision, layout: ServingLayout) -> Floats:
    """Cache of one token in one attention layer on one GPU; sparse attention keeps the indexer's keys with it."""
    size, tp = CACHE_BYTES[precision.cache], np.asarray(layout.tp, dtype=np.float64)
    if model.is_mla:
        found = size * (model.kv_lora_rank + model.qk_rope_head_dim) + np.zeros(tp.shape)
        found = found + model.index_head_dim * INDEXER_KEY * model.index_layers / model.num_layers
    else:
        found = size * (model.key_size + model.value_size) / np.minimum(tp, model.num_kv_heads)
    return found / np.asarray(layout.dcp)


def growing_layers(
    model: ModelSpec, engine: Engine, layers: Floats, speculation: Speculation | None, last: Any
) -> Floats:
    """Layers of a stage whose cache grows with every token; a module that drafts adds one of its own."""
    growing = model.num_full_attention_layers if engine.frees_windows else model.num_attention_layers
    drafts = speculation is not None and speculation.draft_parameters > 0 and model.mtp_layers > 0
    return layers * growing / model.num_layers + np.where(last, float(drafts), 0.0)


def sequence_bytes(
    model: ModelSpec, engine: Engine, precision: Precision, layout: ServingLayout, traffic: Traffic, stage: Stage
) -> Floats:
    """What a sequence holds on a GPU of a stage however long it grows: windows, and states of linear attention."""
    found = np.zeros(np.shape(layout.tp))
    if model.window and engine.frees_windows:
        length = np.minimum(model.window, traffic.input.mean + traffic.output.mean)
        windowed = stage.layers * model.num_windowed_layers / model.num_layers
        found = found + windowed * length * token_bytes(model, precision, layout)
    if model.linear:
        one, tp = model.linear, np.asarray(layout.tp, dtype=np.float64)
        state = engine.state_bytes * one.value_heads * one.value_head_dim * one.key_head_dim
        state += PLAIN * one.conv_size * (one.conv_kernel - 1)
        found = found + stage.layers * one.num_layers / model.num_layers * state / tp
    return found
