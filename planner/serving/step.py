"""Seconds of one step of an engine: decode of a batch, prompts beside it, by operator from measured kernels.

T(B, n, c) = sum over layers of products + attention + experts + memory-bound kernels + collectives, then head and host.
Symbols as in the cost package: L layers, h hidden, a heads, k KV heads, d head size, f FFN width, V vocabulary, E experts, K top-k;
B sequences, c context, n prompt tokens.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from planner.arrays import Floats, only
from planner.record import record
from planner.serving import host_weights
from planner.serving.curves.expert_kernels import FUSED_LAUNCHES
from planner.serving.curves.linear_products import JOINED_BY, TABLE_ROWS
from planner.serving.engine_facts import by_card
from planner.serving.even_stages import relays, wait_for_head
from planner.serving.linear_layers import LinearLayers
from planner.serving.result import StepTime
from planner.serving.served import Served
from planner.serving.serving_layout import WEIGHT_BYTES, ServingLayout

ACTIVATION = 2.0
"""Bytes of an activation between kernels: 16 bits in every engine."""
GATHERED = 8.0
"""Ranks of attention up to which engines gather all tokens for the experts and scatter the results: those of a server. Kernels that
send a token to its own experts are for wide expert parallelism, or asked for by a flag. [TensorRT-LLM 1.0 fused_moe_wide_ep.py
select_alltoall_method_type; vLLM 0.11 all2all_backend allgather_reducescatter; SGLang 0.5 moe_a2a_backend none]"""
LOGIT_PASSES = 4.0
"""Times that a sampler reads or writes fp32 logits: temperature, softmax, top-k/top-p scan, draw."""


@record
class Pass:
    """What one forward pass works on; numbers or columns that fit the layout's."""

    batch: Any
    """B: sequences that decode, in one engine (with pp stages these are the sequences of all groups in flight)."""
    context: Any
    """c: tokens that each has in the cache, mean."""
    prompts: Any = 0.0
    """Prompts, or chunks of prompts, in the pass, per attention rank."""
    prompt_tokens: Any = 0.0
    """New tokens of each."""
    cached: Any = 0.0
    """Tokens of each that are in the cache already (earlier chunks, prefix hits)."""
    holders: Any = np.inf
    """Attention ranks that have prompts in the pass, at most all of them; the others wait for them with their decodes."""
    queries: Any = 1.0
    """Tokens of each sequence in the pass: one, and those that a draft proposes."""
    clock: Any = 1.0
    """Rate of the tensor cores over that of a short burst."""
    eager: Any = False
    """The engine runs the pass outside CUDA graphs whatever its size."""
    streamed: bool = True
    """Every token is sent as it comes, not a whole answer at its end."""


def step_time(served: Served, layout: ServingLayout, work: Pass, linear: LinearLayers | None = None) -> StepTime:
    """Parts of the seconds that one pass takes through all stages; shapes broadcast over layout and work.

    ``linear``: the products of the layout, where many passes of it are priced.
    """
    return Step(served, layout, work, linear or LinearLayers(served, layout)).time(work.clock)


def rows_of(served: Served, layout: ServingLayout, work: Pass) -> Floats:
    """Rows of the products of one attention rank: those that a graph pads a batch to, and prompts."""
    return Step(served, layout, work, LinearLayers(served, layout)).tokens


def core_bound(rows: Any) -> Floats:
    """How far products of so many rows are bound by tensor cores: 0 up to TABLE_ROWS, where they wait for weights, 1 from two
    doublings above."""
    return np.clip(np.log2(np.maximum(rows, 1.0) / TABLE_ROWS) / JOINED_BY, 0.0, 1.0)


def _taken(value: Any, rows: Any) -> Any:
    """Rows of columns, alone or of a layout, a pass or parts; of all else the same."""
    if isinstance(value, ServingLayout):
        return value.take(rows)
    if isinstance(value, Pass | StepTime):
        return type(value)(**{name: _taken(one, rows) for name, one in vars(value).items()})
    if isinstance(value, tuple):
        return tuple(_taken(one, rows) for one in value)
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value


class Step:
    """One evaluation: sizes per rank that several parts share, and kernels, which are priced once for any clock and any rows."""

    def __init__(self, served: Served, layout: ServingLayout, work: Pass, linear: LinearLayers) -> None:
        self.served, self.layout, self.work, self.linear = served, layout, work, linear
        self.model, self.curves, self.hardware = served.model, served.curves, served.hardware
        self.plain = not (self.model.is_moe or self.model.qk_norm or self.model.is_mla)
        self.tp = np.asarray(layout.tp, dtype=np.float64)
        self.ranks = np.asarray(layout.ranks, dtype=np.float64)
        self.attn_dp = np.asarray(layout.attn_dp, dtype=np.float64)
        self.stages = np.asarray(layout.pp, dtype=np.float64)
        rank_batch = np.asarray(work.batch, dtype=np.float64) / (self.attn_dp * self.stages)
        self.prompt_tokens = np.asarray(work.prompts, dtype=np.float64) * np.asarray(work.prompt_tokens, dtype=np.float64)
        pure = self.prompt_tokens <= 0.0
        engine = served.engine
        inside = np.asarray(engine.captured(rank_batch, layout, served.hardware)) & pure & ~np.asarray(work.eager)
        self.graph = inside
        self.batch = np.where(inside, engine.padded(rank_batch, layout, served.hardware), rank_batch)
        self.sequences = rank_batch
        """Sequences that decode on one attention rank, as they are; ``batch`` is what the graph pads them to."""
        self.queries = np.asarray(work.queries, dtype=np.float64)
        self.tokens = np.maximum(self.batch * self.queries + self.prompt_tokens, 1.0)
        """Rows of the products of one attention rank."""
        masked = engine.graphs.masked & (np.asarray(layout.ep) > 1)
        own = np.maximum(rank_batch * self.queries + self.prompt_tokens, 1.0)
        self.routed = np.where(masked, own, self.tokens)
        """Those of them that go to experts."""
        without = np.maximum(self.attn_dp - np.maximum(np.asarray(work.holders, dtype=np.float64), 1.0), 0.0)
        self.missing = self.prompt_tokens * without
        """Rows of prompts that other attention ranks do not have."""

    def take(self, rows: Any) -> Step:
        """Some rows; kernels that are priced are not priced again."""
        found = copy(self)
        vars(found).update({name: _taken(value, rows) for name, value in vars(self).items()})
        found.linear = LinearLayers(self.served, found.layout)
        return found

    def time(self, clock: Any) -> StepTime:
        """All parts, with tensor cores at ``clock`` of their rate in a short burst."""
        model, served, layout, parts = self.model, self.served, self.layout, self._other
        linear = self._products * self._slower(self.tokens, served.precision.weights, clock)
        linear = host_weights.products_seconds(served, layout, linear)
        experts: Floats | float = 0.0
        if model.is_moe:
            chosen = (self.routed * self.attn_dp - self.missing) * model.top_k / max(model.num_experts, 1)
            routed = self._experts * self._slower(chosen, served.expert_format, clock)
            short = np.where(self.prompt_tokens <= 0.0, served.engine.spread_shortfall(self.hardware, layout), 0.0)
            short = short + by_card(served.engine.shortfall.layer, self.hardware, self.ranks)
            rows = self.tokens * self.attn_dp - self.missing
            experts = self.linear.sparse * (host_weights.experts_seconds(served, layout, routed, rows) + short)
        decodes, prompts = self._attention
        parts = replace(parts, linear=linear + parts.linear, attention=parts.attention + decodes + prompts / clock, experts=experts)
        parts = replace(parts, host=self._host(np.asarray(parts.total)))
        wait = wait_for_head(parts, layout, self.work, layers=model.num_layers, sends=self._sends)
        return replace(parts, communication=parts.communication + wait)

    @cached_property
    def _other(self) -> StepTime:
        """What no clock changes."""
        model, products, linear, states = self.model, self.linear, np.zeros(()), np.zeros(())
        if products.sparse:
            linear = products.sparse * products.time(products.router, self.tokens)
        if model.linear:
            linear = linear + model.linear.num_layers * products.time(products.recurrent, self.tokens)
            states = model.linear.num_layers * self._linear_attention()
        return StepTime(
            linear=linear,
            attention=states,
            experts=0.0,
            memory_bound=self._memory_bound(products.attends, products.mlps * model.num_layers),
            communication=self._communication() + self._sends,
            head=self._head(),
            host=0.0,
        )

    # ------------------------------------------------------------------------------------------------ products

    @cached_property
    def _products(self) -> Floats:
        """Products of attention and dense MLPs of all layers."""
        return self.linear.time(self.linear.body, self.tokens)

    def _slower(self, rows: Any, weights: str, clock: Any) -> Floats:
        """Time of products of so many rows at a clock and the engine's own rate, over that of a short burst."""
        rate = self.served.engine.product_rate(self.hardware, self.layout, weights)
        return 1.0 + (1.0 / (np.asarray(clock, dtype=np.float64) * rate) - 1.0) * core_bound(rows)

    @cached_property
    def _experts(self) -> Floats:
        """Experts of one layer on the slowest rank, shared ones included."""
        routed = self._routed() + self._chain()
        return routed + self.linear.time(self.linear.shared, self.tokens) if self.model.num_shared_experts else routed

    def _chain(self) -> Floats:
        """What a mixture of more kernels takes longer: a launch for each, and each waits for the one before it to drain."""
        number = by_card(self.served.engine.fusion.experts.get(self.served.expert_format, ()), self.hardware, self.ranks)
        floors = np.maximum(number - FUSED_LAUNCHES, 0.0) * self.hardware.launch_floor
        return floors + number * self.hardware.graph_launch_floor

    def _routed(self) -> Floats:
        m, layout = self.model, self.layout
        return self.curves.experts_time(
            self.routed * self.attn_dp - self.missing,
            hidden=float(m.routed_size),
            ffn=float(m.expert_ffn_size),
            top_k=float(m.top_k),
            experts=float(m.num_experts),
            moe_tp=np.asarray(layout.moe_tp, dtype=np.float64),
            ep=np.asarray(layout.ep, dtype=np.float64),
            weights=self.served.expert_format,
            skewed=self.served.skewed,
            sent=self.attn_dp > 1.0,  # a rank moves its own copies only
        )

    # ------------------------------------------------------------------------------------------------ attention

    @cached_property
    def _attention(self) -> tuple[Floats, Floats]:
        """Decode over the cache and prompts over theirs, all layers; windows bound the keys of their layers."""
        windowed, window = float(self.model.num_windowed_layers), self.model.window
        kinds = [(self.linear.attends - windowed, 0), (windowed, window)] if windowed else [(self.linear.attends, 0)]
        found = [(layers, *self._attention_layer(window)) for layers, window in kinds]
        decodes, prompts = (np.asarray(sum(one[0] * one[part] for one in found)) for part in (1, 2))
        return decodes, prompts

    def _attention_layer(self, window: int) -> tuple[Floats, Floats]:
        m, cache = self.model, self.served.precision.cache
        heads, context = m.num_heads / self.tp, np.asarray(self.work.context, dtype=np.float64)
        dcp = np.asarray(self.layout.dcp, dtype=np.float64)
        some = self.sequences > 0.0
        batch = np.maximum(self.sequences, 1.0)  # rows that a graph pads have no keys
        if m.is_mla:
            seen = np.minimum(context, m.index_top_k) if m.is_sparse else context
            decode = self.curves.decode_mla_time(batch, heads * dcp * self.queries, np.maximum(seen / dcp, 1.0), cache)
            if m.is_sparse:
                index = batch * context / dcp * (m.index_head_dim + 4.0)
                decode = decode + self.hardware.launch_floor + self.hardware.memory_time(index, "copy")
        else:
            kv = np.maximum(m.num_kv_heads / self.tp, 1.0)
            decode = self.curves.decode_attention_time(
                batch=batch,
                heads=heads * dcp * self.queries,
                kv_heads=kv,
                head_dim=float(m.head_dim),
                context=np.maximum(context / dcp, 1.0),
                cache=cache,
                window=float(window),
            )
        return np.where(some, decode, 0.0), self._prompts_attention(heads, window)

    def _prompts_attention(self, heads: Any, window: int) -> Floats:
        """Attention of prompts over their keys in one layer, of the passes that have any."""
        m, work = self.model, self.work

        def priced(new: Floats, cached: Floats, prompts: Floats, heads: Floats, kv_heads: Floats) -> Floats:
            prompt = {"queries": np.maximum(new, 1.0), "keys": np.maximum(cached + new, 1.0), "batch": prompts, "heads": heads}
            if m.is_sparse:
                return self.curves.sparse_prefill_time(
                    **prompt, cache=self.served.precision.cache, top_k=float(m.index_top_k),
                    index_heads=float(m.index_heads), index_dim=float(m.index_head_dim),
                )  # fmt: skip
            return self.curves.prefill_attention_time(
                **prompt, kv_heads=kv_heads, window=float(window), head_dim=float(m.head_dim), value_dim=float(m.value_head_size)
            )

        sizes = (work.prompt_tokens, work.cached, work.prompts, heads, np.maximum(m.num_kv_heads / self.tp, 1.0))
        return only(self.prompt_tokens > 0.0, priced, *(np.asarray(one, dtype=np.float64) for one in sizes))

    def _linear_attention(self) -> Floats:
        """The recurrence of one layer of linear attention."""
        one = self.model.linear
        assert one is not None
        updates = self.curves.linear_attention_time(one, np.maximum(self.batch, 1.0), 1.0, self.tp)
        states = np.where(self.sequences > 0.0, updates, 0.0)
        scan = partial(self.curves.linear_attention_time, one)
        work = (np.asarray(x, dtype=np.float64) for x in (self.work.prompts, self.work.prompt_tokens, self.tp))
        return states + only(self.prompt_tokens > 0.0, lambda prompts, new, tp: scan(prompts, np.maximum(new, 1.0), tp), *work)

    # ------------------------------------------------------------------------------------------------ the rest

    def _memory_bound(self, attends: float, mlps: float) -> Floats:
        """Kernels between the products: norms with the residual sum, rotary embedding with the write to the cache, activation.

        t = gaps + kernels x floor + bytes / (W u). Two kernels around attention, two more with MLA (norms of the compressed states,
        absorbed heads); one norm and one activation in an MLP; norm, choice of experts, activation of shared ones and sum where
        there are experts. The floor is that of a launch: kernels of a few rows take it inside a graph too, one waits for the other.
        Norms that an all-reduce does are no kernels. With programmatic dependent launch a kernel is on the GPU when the one before
        it drains: no gaps, the floor of a graph.
        """
        m = self.model
        # Products, attention, collectives and experts were measured beside others of their kind; in a layer each waits for the one
        # before it to drain: seven a layer, five more with MLA's compressed states and absorbed heads.
        gap, floor = self.hardware.graph_launch_floor, self.hardware.launch_floor
        if self.served.engine.overlaps_launches(self.hardware, self.served.attention_format):
            gap, floor = 0.0, self.hardware.graph_launch_floor
        gaps = m.num_layers * (7.0 + 5.0 * m.is_mla) * gap
        h, rows = float(m.hidden_size), self.tokens
        norms = 4.0 * ACTIVATION * rows * h
        rope = 2.0 * ACTIVATION * rows * (m.query_size / self.tp + 2.0 * np.maximum(m.key_size / self.tp, m.head_dim))
        width = float(m.top_k * m.expert_ffn_size if m.is_moe else m.ffn_size)
        act = 3.0 * ACTIVATION * rows * width / self.ranks
        per_attention = (2.0 + 2.0 * m.is_mla) * floor + self.hardware.memory_time(norms + rope, "norm_forward")
        per_mlp = (2.0 + 2.0 * m.is_moe) * floor + self.hardware.memory_time(norms + act, "norm_forward")
        saved = (self.tp > 1.0) * self.served.engine.reduces_norms(self.hardware, self.plain) * (floor + gap)
        return gaps + attends * (per_attention - saved) + mlps * (per_mlp - saved)

    def _communication(self) -> Floats:
        """All-reduces after attention and MLP, or the gathers of attention data parallelism, and messages of pipelines."""
        m = self.model
        size = ACTIVATION * self.tokens * m.hidden_size
        layers = float(m.num_layers)
        reduce = self._all_reduce(size, self.tp)
        total = layers * reduce + layers * np.where(self.attn_dp > 1.0, 0.0, reduce)
        if m.qk_norm and m.qk_norm_spans == "heads":  # the sums of squares of queries and keys, in fp32
            total = total + layers * self._all_reduce(8.0 * self.tokens, self.tp)
        whole = size * self.attn_dp - ACTIVATION * self.missing * m.hidden_size
        exchange = only(self.attn_dp > 1.0, self._gathers, whole, self.routed, self.ranks)
        return np.asarray(total + float(m.num_moe_layers or layers) * exchange + self._context_parallel())

    @cached_property
    def _sends(self) -> Floats:
        """Messages between the stages of a pipeline."""
        hops, size = self.stages - 1.0, ACTIVATION * self.tokens * self.model.hidden_size
        return hops * only(hops > 0, partial(self.served.cluster.collective_time, "send_recv"), size, 2, self.ranks)

    def _gathers(self, whole: Floats, routed: Floats, ranks: Floats) -> Floats:
        """One mixture after attention data parallelism: tokens of ``whole`` bytes gathered, in the format of the experts where the
        engine quantises them before, and 16-bit results summed and scattered; beyond a server direct sends, where faster."""
        m, experts, time = self.model, self.served.expert_format, self.served.cluster.collective_time
        scatter = time("reduce_scatter", whole, ranks, 1)
        small = WEIGHT_BYTES[experts] if experts in self.served.engine.fusion.gathered else ACTIVATION
        gather, wide = time("all_gather", whole * small / ACTIVATION, ranks, 1), m.is_moe & (ranks > GATHERED)
        if not np.any(wide):
            return gather + scatter
        sizes = (routed, float(m.hidden_size), float(m.top_k), float(m.num_experts), ranks)
        direct = self.curves.dispatch_time(*sizes) + self.curves.combine_time(*sizes)
        plain = gather if small == ACTIVATION else time("all_gather", whole, ranks, 1)
        return np.where(wide, np.minimum(plain + scatter, direct), gather + scatter)

    def _context_parallel(self) -> Floats:
        """Decode context parallelism: every rank of a group sees all heads of the group over its part of the cache, so queries are
        gathered and outputs are summed and scattered in each layer.  [vLLM, --decode-context-parallel-size]"""
        m, dcp = self.model, np.asarray(self.layout.dcp, dtype=np.float64)
        time = self.served.cluster.collective_time
        query, value = (
            (m.kv_lora_rank + m.qk_rope_head_dim, m.kv_lora_rank) if m.is_mla else (m.head_dim, m.value_head_size)
        )
        heads = ACTIVATION * self.sequences * self.queries * m.num_heads / self.tp * dcp

        def moved(heads: Floats, dcp: Floats) -> Floats:
            return time("all_gather", heads * query, dcp, 1) + time("reduce_scatter", heads * value, dcp, 1)

        return m.num_attention_layers * only(dcp > 1.0, moved, heads, dcp)

    def _all_reduce(self, size: Floats, n: Floats) -> Floats:
        """The engine's own kernel up to its limit, NCCL above it and across nodes."""
        engine = self.served.engine

        def reduced(size: Floats, n: Floats) -> Floats:
            own = self.curves.all_reduce_time(size, n, "graph", engine.name)
            nccl = self.served.cluster.collective_time("all_reduce", size, n, 1)
            within = (size <= engine.all_reduce_limit(self.hardware, n)) & (n <= self.served.cluster.domain)
            return np.where(within, np.minimum(own, nccl), nccl)

        return only(n > 1.0, reduced, size, n)

    def _head(self) -> Floats:
        """Output head on the last token of each sequence, its gather, and the sampler's passes over fp32 logits."""
        m = self.model
        rows = np.maximum(self.sequences * self.queries + np.asarray(self.work.prompts, dtype=np.float64), 1.0)
        product = self.linear.time(self.linear.head, rows)
        gathered = partial(self.served.cluster.collective_time, "all_gather", stride=1)
        gather = only(self.tp > 1.0, gathered, ACTIVATION * rows * m.vocab_size, self.tp)
        sample = LOGIT_PASSES * self.hardware.launch_floor + self.hardware.memory_time(
            LOGIT_PASSES * 4.0 * rows * m.vocab_size, "cross_entropy"
        )
        return product + gather + sample

    def _host(self, gpu: Floats) -> Floats:
        """What the engine adds per step and per sequence; outside a graph the pass takes at least the launches of its kernels."""
        host = self.served.engine.host
        each = host["sequence"] - (0.0 if self.work.streamed else host["streamed"])
        own = host["step"] + each * self.sequences  # every rank of attention has a scheduler of its own
        own = own + relays(self.layout) * host["relayed"] * self.sequences
        launch = np.maximum(by_card(self.served.engine.shortfall.launch, self.hardware, self.ranks), host["launch"])
        waits = np.maximum(launch * self._launches() - gpu, host["exposed"] * self._launches())
        return own + np.where(self.graph, 0.0, waits)

    def _launches(self) -> float:
        """Kernels of a pass. Attention: norm, product, rotary embedding, cache, attention and its reduction, product, all-reduce,
        with MLA six more around its compressed states. Dense MLP: norm, two products, activation, all-reduce. Experts: norm,
        router, choice, order, two products, activation, sum, all-reduce."""
        m = self.model
        return m.num_attention_layers * (8.0 + 6.0 * m.is_mla) + 5.0 * m.num_plain_layers + 9.0 * m.num_moe_layers
