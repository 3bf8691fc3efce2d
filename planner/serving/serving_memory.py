"""Memory of one engine: weights, cache, activations and graphs of each pipeline stage, and what the engine takes for its cache.

Per GPU of a stage, bytes (a rank of tp x attn_dp; t = tp, k key-value heads, E experts):

weights    attention (sharded + (max(t / k, 1) - 1) key_value) / t + replicated, in ``precision.attention``; dense MLP and shared experts
           / t in ``precision.weights``; E expert / (ep moe_tp) in ``precision.experts``; embedding and head V h 2 / t; norms,
           routers and biases 2 bytes each
cache      per token and full layer (k d + k d_v) s / min(t, k); MLA: (r + rope) s on every rank of t; both / dcp
state      per sequence: windowed layers min(window, length) tokens; linear layers their state and convolution / t
capacity   tokens: the least over stages of cache / bytes per token, times attn_dp
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from planner.arrays import Floats
from planner.cost.parameters import count_parameters
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.serving.engine import Engine
from planner.serving.result import ServingMemory
from planner.serving.serving_layout import CACHE_BYTES, WEIGHT_BYTES, Precision, ServingLayout
from planner.serving.traffic import Traffic
from planner.units import GIB, MIB

PLAIN = 2.0
"""Bytes of what is never quantised: embeddings, head, norms, routers, activations."""
STATE = 4.0
"""Bytes of an element of the state of linear attention; its convolution keeps PLAIN."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one pipeline stage holds; numbers or columns."""

    layers: Floats
    """Transformer layers."""
    sparse: Floats
    """Those with routed experts."""
    embedding: bool
    """It has the input embedding."""
    head: bool
    """It has the output head."""
    exists: Floats
    """Where the layout has such a stage."""


def serving_memory(
    model: ModelSpec,
    hardware: HardwareProfile,
    engine: Engine,
    precision: Precision,
    layout: ServingLayout,
    traffic: Traffic,
) -> ServingMemory:
    """Parts on the fullest GPU of one engine, for one layout or for columns."""
    found = [
        _of_stage(model, hardware, engine, precision, layout, traffic, stage) for stage in stages(model, engine, layout)
    ]
    return _scarcest(found)


def stages(model: ModelSpec, engine: Engine, layout: ServingLayout) -> list[Stage]:
    """First, middle and last stage; of one stage all three are the whole model.

    vLLM and SGLang give the L mod p left-over layers to the stages before the last, from behind; TensorRT-LLM one to each from the first.
    [vllm/distributed/utils.py get_pp_indices; tensorrt_llm/mapping.py pp_layers]
    """
    p = np.asarray(layout.pp)
    each, over = model.num_layers // p, model.num_layers % p
    early = engine.name == "trtllm"
    first = each + ((over > 0) if early else (over >= p - 1) & (over > 0))
    middle = each + (over > (1 if early else 0))
    last = np.where(p == 1, model.num_layers, each)
    dense = model.num_dense_layers
    share = model.num_moe_layers / max(model.num_layers - dense, 1)
    ones = np.ones(p.shape)
    return [
        Stage(layers=first, sparse=np.maximum(first - dense, 0) * share, embedding=True, head=False, exists=p > 1),
        Stage(layers=middle, sparse=middle * share, embedding=False, head=False, exists=p > 2),
        Stage(
            layers=last,
            sparse=np.where(p == 1, model.num_moe_layers, last * share),
            embedding=False,
            head=True,
            exists=ones,
        ),
    ]


def _of_stage(model, hardware, engine, precision, layout, traffic, stage) -> ServingMemory:  # type: ignore[no-untyped-def]
    weights = weight_bytes(model, engine, precision, layout, stage)
    per_token = token_bytes(model, precision, layout) * _attention(model, stage.layers)
    per_sequence = sequence_bytes(model, precision, layout, traffic, stage) + engine.block_tokens / 2.0 * per_token
    activations, graphs = activation_bytes(model, precision, layout), graph_bytes(engine, layout, hardware)
    runtime = (
        hardware.context_memory
        + hardware.workspace_memory
        + hardware.communicator_memory * (np.asarray(layout.engine_gpus) > 1)
    )
    total = hardware.usable_memory
    account = engine.accounting
    if account.school == "share_of_total":
        reserve = (1.0 - account.share) * total + np.zeros(weights.shape)
        inside = graphs if account.graphs_inside else 0.0
        cache = account.share * total - weights - activations - runtime - inside
        reserve = reserve + runtime - (0.0 if account.graphs_inside else graphs)
    elif account.school == "reserve":
        reserved = sglang_reserve(model, engine, hardware, layout)
        free = total - runtime
        cache = free * (1.0 - reserved / total) - weights
        reserve = total - cache - weights - activations - graphs
    else:
        free = total - weights - activations - runtime
        cache = account.share * free
        reserve = total - cache - weights - activations - graphs
    capacity = np.maximum(cache, 0.0) / np.maximum(per_token, 1e-9) * np.asarray(layout.attn_dp)
    missing = np.where(stage.exists, 0.0, np.inf)
    return ServingMemory(
        weights=weights, draft=np.zeros(weights.shape), activations=activations, graphs=graphs, reserve=reserve, cache=cache,
        usable=total, bytes_per_token=per_token, bytes_per_sequence=per_sequence, capacity=capacity + missing,
    )  # fmt: skip


def _scarcest(found: list[ServingMemory]) -> ServingMemory:
    """The stage with the least room, by candidate."""
    rooms = np.stack(
        np.broadcast_arrays(
            *[
                np.where(one.capacity == np.inf, np.inf, one.cache / np.maximum(one.bytes_per_token, 1e-9))
                for one in found
            ]
        )
    )
    least = np.argmin(rooms, axis=0)
    values = {}
    for field in fields(ServingMemory):
        if field.name == "usable":
            values[field.name] = found[0].usable
            continue
        column = np.stack([np.broadcast_to(getattr(one, field.name), least.shape) for one in found])
        picked = np.take_along_axis(column, least[None], axis=0)[0]
        values[field.name] = picked if picked.ndim else float(picked)
    return ServingMemory(**values)


def weight_bytes(model: ModelSpec, engine: Engine, precision: Precision, layout: ServingLayout, stage: Stage) -> Floats:
    """Bytes of weights of a GPU of a stage."""
    counts, tp = count_parameters(model), np.asarray(layout.tp, dtype=np.float64)
    linear = WEIGHT_BYTES[precision.weights]
    attention = WEIGHT_BYTES[precision.attention or precision.weights]
    experts = WEIGHT_BYTES[precision.experts or precision.weights]
    repeated = 0.0 if model.is_mla else (np.maximum(tp / model.num_kv_heads, 1.0) - 1.0) * counts.key_value_weights
    mixers = (counts.attention_sharded + repeated) / tp * attention
    mixers = mixers + counts.attention_replicated * (attention if model.is_mla else PLAIN)
    absorbed = PLAIN * model.num_heads * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank / tp
    mixers = mixers + (absorbed if model.is_mla else 0.0)
    dense = counts.mlp_sharded / tp * linear + counts.mlp_replicated * PLAIN
    spread = np.asarray(layout.ep) * np.asarray(layout.moe_tp)
    sparse = (
        model.num_experts * counts.expert / spread * experts
        + counts.shared_experts / tp * linear
        + counts.router * PLAIN
    )
    found = stage.layers * mixers + (stage.layers - stage.sparse) * dense + stage.sparse * sparse
    whole = (engine.embedding == "whole") & (np.asarray(layout.attn_dp) > 1)
    table = PLAIN * counts.input_embedding / np.where(whole, 1.0, tp)
    one_stage = np.asarray(layout.pp) == 1
    if stage.embedding:
        found = found + table + PLAIN * counts.position_embedding + PLAIN * counts.vision
    if stage.head:
        head = PLAIN * (counts.head or counts.input_embedding) / tp
        found = found + PLAIN * counts.final_norm + head
        front = table * (counts.head > 0) + PLAIN * (counts.position_embedding + counts.vision)
        found = found + np.where(one_stage, front, 0.0)
    return np.asarray(found)


def _attention(model: ModelSpec, layers: Floats) -> Floats:
    """Layers of a stage whose cache grows with every token."""
    return layers * model.num_full_attention_layers / model.num_layers


def token_bytes(model: ModelSpec, precision: Precision, layout: ServingLayout) -> Floats:
    """Cache of one token in one attention layer on one GPU.

    Keys and values are split over min(tp, k) ranks, and further over dcp by position; MLA's compressed state is whole on each rank.
    Sparse attention stores the indexer's keys beside them, one byte each and a scale per 128.  [DeepSeek-V3.2-Exp]
    """
    size, tp = CACHE_BYTES[precision.cache], np.asarray(layout.tp, dtype=np.float64)
    if model.is_mla:
        found = size * (model.kv_lora_rank + model.qk_rope_head_dim) + np.zeros(tp.shape)
        found = found + model.index_head_dim * (1.0 + 4.0 / 128) * model.index_layers / model.num_layers
    else:
        found = size * (model.key_size + model.value_size) / np.minimum(tp, model.num_kv_heads)
    return found / np.asarray(layout.dcp)


def sequence_bytes(
    model: ModelSpec, precision: Precision, layout: ServingLayout, traffic: Traffic, stage: Stage
) -> Floats:
    """What a sequence holds on one GPU of a stage however long it grows: windows and states of linear attention."""
    length = traffic.input.mean + traffic.output.mean
    windowed = stage.layers * model.num_windowed_layers / model.num_layers
    found = windowed * np.minimum(model.window, length) * token_bytes(model, precision, layout)
    if model.linear:
        one, tp = model.linear, np.asarray(layout.tp, dtype=np.float64)
        state = STATE * one.value_heads * one.value_head_dim * one.key_head_dim + PLAIN * one.conv_size * (
            one.conv_kernel - 1
        )
        found = found + stage.layers * one.num_layers / model.num_layers * state / tp
    return found


def activation_bytes(model: ModelSpec, precision: Precision, layout: ServingLayout) -> Floats:
    """Peak of a step of max_tokens tokens: residual and normed stream, and the widest of attention, MLP, experts; or the logits.

    experts     T K (max(2 f, h) + f) with T the tokens of all attention ranks, at most 32,768 at a time
    logits      fp32 and their copy for sampling, one row per sequence
    """
    tokens, tp = np.asarray(layout.max_tokens, dtype=np.float64), np.asarray(layout.tp, dtype=np.float64)
    attention = (2.0 * model.query_size + model.key_size + model.value_size) / tp
    widest = np.maximum(attention, 3.0 * model.ffn_size / tp) * tokens
    if model.is_moe:
        rows = np.minimum(tokens * np.asarray(layout.attn_dp), 32768.0) * model.top_k
        inner = model.expert_ffn_size / np.asarray(layout.moe_tp, dtype=np.float64)
        widest = np.maximum(widest, rows * (np.maximum(2.0 * inner, model.routed_size) + inner))
    forward = PLAIN * (2.0 * model.hidden_size * tokens + widest)
    batch = np.asarray(layout.max_batch) / np.asarray(layout.attn_dp)
    return np.maximum(forward, 10.0 * model.vocab_size * batch)


def graph_bytes(engine: Engine, layout: ServingLayout, hardware: HardwareProfile) -> Floats:
    """Pools of captured graphs: some 2 MB for each sequence of the largest, as SGLang reserves.  [memory_hook.py]"""
    return 2.0 * MIB * engine.largest_graph(layout, hardware)


def sglang_reserve(model: ModelSpec, engine: Engine, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
    """What SGLang leaves free: 512 MiB + 1.5 MiB a token of the chunk + 1 GiB tp pp / 8 + graphs; 10 GiB at least above 60 GiB.

    [sglang/srt/arg_groups/memory_hook.py handle_gpu_memory_settings, 0.5.23]
    """
    chunk = np.maximum(np.asarray(layout.max_tokens), 2048.0)
    found = 512.0 + 1.5 * chunk + 128.0 * np.asarray(layout.engine_gpus)
    graph = engine.largest_graph(layout, hardware)
    spread = np.where(
        np.asarray(layout.attn_dp) > 1, graph * np.asarray(layout.attn_dp) * np.where(graph > 300, 4.5, 3.0), 0.0
    )
    found = (found + 2.0 * graph + spread) * MIB
    return np.maximum(found, 10.0 * GIB) if hardware.usable_memory > 60.0 * GIB else found
