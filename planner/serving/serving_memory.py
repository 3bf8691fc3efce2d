"""Memory of one engine: what weights, a step and the runtime take, and what the engine takes for its cache by its own accounting.

share_of_total   cache = share x memory - weights - peak - what ``counts`` (vLLM)
reserve          cache = (memory - context - communicators) (1 - reserve / memory) - weights (SGLang)
share_of_free    cache = share x (memory - weights - peak - context - communicators - graphs) (TensorRT-LLM)
room             memory - weights - peak - context - communicators - graphs - SPARE: what the share can be raised to
cache            as the accounting says, or ``room`` where that would not hold one request of the traffic
capacity         tokens: the least over stages of cache / bytes per token, times attn_dp

The peak of a step of C tokens, bytes on a GPU:

stream    2 x C h 2, the residual stream and the normed one
widest    attention C (2 q + k + v) 2 / t; gated MLP C 3 f 2 / t; experts T K (max(2 f_e / moe_tp, h) + f_e / moe_tp + h / 2) 2 with
          the T tokens of all attention ranks, at most ``expert_tokens`` at once: in and out of both products, and an 8-bit copy
logits    ``logits`` bytes for each of V and each of the largest batch, at most ``sampled``: copies, sort and sums of sampling. vLLM
          samples so when it measures its peak: 38 B from logs that state peak, batch and vocabulary [0.6 to 0.26: 1.2 to 7.4 GiB]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.record import record
from planner.serving.engine import Engine
from planner.serving.engine_facts import by_card
from planner.serving.result import ServingMemory, normal_share
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.serving_weights import (
    PLAIN,
    Stage,
    draft_bytes,
    growing_layers,
    sequence_bytes,
    stacked,
    stages,
    token_bytes,
    weight_bytes,
)
from planner.serving.traffic import Traffic
from planner.units import GIB

SPARE = 1.0 * GIB
"""Left free where the engine's share is raised as far as it goes: fragments, kernels that are loaded later."""
LEAST_CHUNK = 2048.0
"""Tokens of a step that SGLang reserves for at least."""
MANY_GRAPHS = 300.0
"""Sequences of the largest graph above which SGLang reserves more with attention data parallelism."""
LOOSE = (0.01, 0.25, 0.4)
"""Standard deviation of weights, of peak and graphs, and of the runtime, as a part of each: what logs of servers that print them
leave (weights within 0.5 %, peaks within 20 %, communicators between 1.3 and 2.0 GiB)."""


@record
class Placed:
    """One engine of a model on a kind of GPU: what the formulas here share."""

    model: ModelSpec
    hardware: HardwareProfile
    engine: Engine
    precision: Precision
    layout: Any
    traffic: Traffic


def serving_memory(
    model: ModelSpec,
    hardware: HardwareProfile,
    engine: Engine,
    precision: Precision,
    layout: ServingLayout,
    traffic: Traffic,
) -> ServingMemory:
    """Parts on the GPU with the least room, for one layout or for columns."""
    one = Placed(model=model, hardware=hardware, engine=engine, precision=precision, layout=layout, traffic=traffic)
    shape = np.broadcast_shapes(*(np.shape(value) for value in vars(layout).values()))
    return scarcest(of_stage(one, stacked([stage for stage in stages(model, engine, layout) if np.any(stage.exists)], shape)))


def of_stage(one: Placed, stage: Stage) -> dict[str, Any]:
    """Fields of ServingMemory on a GPU of one stage, or of several as the stage has them."""
    model, engine, layout, speculation = one.model, one.engine, one.layout, one.traffic.speculation
    weights = weight_bytes(model, engine, one.precision, layout, stage)
    draft = draft_bytes(model, one.precision, layout, speculation, stage)
    layers = growing_layers(model, engine, stage.layers, speculation, stage.last)
    per_token = token_bytes(model, one.precision, layout) * layers
    per_sequence = (
        sequence_bytes(model, engine, one.precision, layout, one.traffic, stage) + engine.block_tokens / 2.0 * per_token
    )
    peak, graphs = activation_bytes(one), graph_bytes(one, stage)
    context, group = runtime_bytes(one)
    total = one.hardware.usable_memory
    held = weights + draft
    room = total - held - peak - context - group - graphs - SPARE
    share, whole = _share(one), _whole(one, held, peak, graphs)
    taken = np.minimum(share * whole[0], whole[0]) - whole[1]  # a share of less than nothing is no smaller lack
    longest = per_token * (one.traffic.input.mean + one.traffic.output.mean) + per_sequence
    cache = np.where(taken >= longest, taken, np.maximum(taken, room))
    spread = np.sqrt((LOOSE[0] * held) ** 2 + (LOOSE[1] * (peak + graphs)) ** 2 + (LOOSE[2] * (context + group)) ** 2)
    return {
        "weights": weights, "draft": draft, "activations": peak, "graphs": graphs, "cache": cache, "spread": spread,
        "reserve": total - held - peak - graphs - cache, "usable": total, "bytes_per_token": per_token,
        "bytes_per_sequence": per_sequence, "raised": (taken < longest) & (cache > taken),
        "share": np.where(cache > taken, (cache + whole[1]) / np.maximum(whole[0], 1.0), share),
        "capacity": np.maximum(cache, 0.0) / np.maximum(per_token, 1e-9) * np.asarray(layout.attn_dp),
        "left": np.where(stage.exists, cache / np.maximum(per_token, 1e-9), np.inf),
    }  # fmt: skip


def _share(one: Placed) -> Any:
    """The engine's flag of memory by default: of all (vLLM), of what runtime and communicators leave (SGLang), of what is free."""
    rules = one.engine.accounting
    return rules.share if rules.school != "reserve" else 1.0 - reserved(one) / one.hardware.usable_memory


def _whole(one: Placed, held: Floats, peak: Floats, graphs: Floats) -> tuple[Any, Any]:
    """What the flag is a share of, and what comes out of that share before the cache."""
    rules, total = one.engine.accounting, one.hardware.usable_memory
    context, group = runtime_bytes(one)
    if rules.school == "share_of_total":
        parts: dict[str, Any] = {"context": context, "group": group, "graphs": graphs}
        return total, held + peak + sum(parts[name] for name in rules.counts)
    if rules.school == "reserve":
        return total - context - group, held
    return total - held - peak - context - group - graphs, 0.0


def scarcest(found: Mapping[str, Any]) -> ServingMemory:
    """The stage with the least room, by candidate; what has the axis of ``left`` for them is told apart by it."""
    left = np.asarray(found["left"])
    least = np.argmin(left, axis=0)[None]
    values: dict[str, Any] = {}
    for field in fields(ServingMemory):
        value = np.asarray(found[field.name])
        if value.ndim == left.ndim:
            value = value[0] if len(left) == 1 else np.take_along_axis(value, least, axis=0)[0]
        values[field.name] = value if value.ndim else value.item()
    return ServingMemory(**values)


def activation_bytes(one: Placed) -> Floats:
    """Peak of the largest step of a rank."""
    model, layout = one.model, one.layout
    tokens, tp = np.asarray(layout.max_tokens, dtype=np.float64), np.asarray(layout.tp, dtype=np.float64)
    widest = (2.0 * model.query_size + model.key_size + model.value_size) / tp * tokens
    if model.num_plain_layers:
        widest = np.maximum(widest, (model.num_mlp_matrices * model.ffn_size) / tp * tokens)
    if model.is_moe:
        rows = np.minimum(tokens * np.asarray(layout.attn_dp), one.engine.expert_tokens) * model.top_k
        inner = model.expert_ffn_size / np.asarray(layout.moe_tp, dtype=np.float64)
        both = np.maximum(2.0 * inner, model.routed_size) + inner + model.routed_size / 2.0
        widest = np.maximum(widest, rows * both)
    batch = np.minimum(np.ceil(np.asarray(layout.max_batch) / np.asarray(layout.attn_dp)), tokens)
    logits = one.engine.accounting.logits * model.vocab_size * np.minimum(batch, one.engine.accounting.sampled)
    return np.maximum(PLAIN * (2.0 * model.hidden_size * tokens + widest), logits)


def graph_bytes(one: Placed, stage: Stage) -> Floats:
    """Pools of captured graphs: ``graph`` for each size and layer."""
    return one.engine.accounting.graph * one.engine.number_of_graphs(one.layout, one.hardware) * stage.layers


def runtime_bytes(one: Placed) -> tuple[float, Floats]:
    """Context; communicators and workspaces of an engine of several GPUs, and buffers of its all-reduce."""
    rules, several = one.engine.accounting, np.asarray(one.layout.engine_gpus) > 1
    linked = np.minimum(np.asarray(one.layout.tp), one.hardware.scale_up_domain)
    return rules.context, np.where(several, rules.group + rules.rank * linked, 0.0)


def reserved(one: Placed) -> Floats:
    """What SGLang's accounting leaves free."""
    rules, layout, hardware = one.engine.reserve, one.layout, one.hardware
    gpus, dp = np.asarray(layout.engine_gpus, dtype=np.float64), np.asarray(layout.attn_dp, dtype=np.float64)
    found = by_card(rules.share, hardware, gpus) * hardware.usable_memory + by_card(rules.constant, hardware, gpus)
    found = found + by_card(rules.gpu, hardware, gpus) * gpus
    found = found + rules.token * np.maximum(np.asarray(layout.max_tokens), LEAST_CHUNK)
    graph = one.engine.largest_graph(layout, hardware)
    found = found + rules.sequence * graph
    each = np.where(graph > MANY_GRAPHS, rules.spread[1], rules.spread[0])
    found = found + np.where(dp > 1, each * graph * dp + rules.spread_constant, 0.0)
    found = np.maximum(found, by_card(rules.least, hardware, gpus))
    drafts = one.traffic.speculation is not None and one.traffic.speculation.draft_parameters > 0
    return found + rules.draft * drafts


def preemption_chance(
    engine: Engine, layout: ServingLayout, traffic: Traffic, memory: ServingMemory, running: Any
) -> Floats:
    """Chance that the cache of an attention rank is full in a step in which the engine runs ``running`` sequences.

    0 where answers are reserved whole.

    P(sum of lengths > capacity) with B sequences of mean m and variance v each, a normal distribution of B m and B v:
    a running sequence has I + u O tokens, u uniform, and longer answers are seen longer: m = I + E[O^2] / (2 E[O]),
    v = Var I + E[O^3] / (3 E[O]) - (E[O^2] / (2 E[O]))^2, E[O^3] as of a gamma distribution, E[O]^3 (1 + c) (1 + 2 c).
    """
    each = np.asarray(running, dtype=np.float64) / np.asarray(layout.attn_dp)
    fixed = np.asarray(memory.bytes_per_sequence) / np.maximum(memory.bytes_per_token, 1e-9)
    output, c = traffic.output.mean, traffic.output.variation
    grown = traffic.output.squared / (2.0 * output)
    mean = traffic.input.mean + grown + fixed
    variance = (
        traffic.input.mean**2 * traffic.input.variation + output**2 * (1.0 + c) * (1.0 + 2.0 * c) / 3.0 - grown**2
    )
    room = np.asarray(memory.capacity) / np.asarray(layout.attn_dp)
    deviations = (each * mean - room) / np.sqrt(np.maximum(each * variance, 1.0))
    return np.asarray(normal_share(deviations)) * (engine.admits == "input")
