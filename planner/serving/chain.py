"""One engine whose pipeline stages stand on several kinds of GPU: its passes, its memory, the cut of its layers.

Stage j of p holds L_j of L layers on its kind; t_j, h_j and o_j are the seconds of a pass over all layers there, of the head and of
the host, for the B / p sequences of a group; d the sends between stages:

    tau_j = L_j / L t_j + o_j / p, the last one + h_p
    T     = max(sum tau_j + d, g max tau_j)      g = min(max(B, 1), p) groups in flight: a closed loop through stations that take
                                                 one group at a time; a link that all engines share is one of them
    room  = min over stages of what their cards have left for the cache / bytes of a token there

With equal stages and no head this is ``step_time`` of an engine with p stages: sum tau_j + d. A pass with a prompt is priced with
g = p, as the groups behind it wait for the slowest stage. Layers count alike: that the first ones of some models have no experts is
left out of the time, not of the memory. The cycle of a closed loop of stations with fixed times is the longer of a customer's way
and of the busiest station times the customers. [Baccelli et al. 1992, Synchronization and Linearity: the maximum cycle mean]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.record import record
from planner.serving.engine_passes import Engine
from planner.serving.result import ServingMemory, StepTime
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import Placed, of_stage, scarcest
from planner.serving.serving_weights import Stage
from planner.serving.step import ACTIVATION, Pass, rows_of, step_time
from planner.serving.traffic import Traffic

IN_LAYERS = ("linear", "attention", "experts", "memory_bound", "communication")
"""Parts of a step that every layer has its share of."""


@record
class Hop:
    """The link between the stages of two kinds."""

    bandwidth: float
    """Bytes/s, of all engines together; inf where only their own cards bound it."""
    latency: float = 0.0


@record
class Chain:
    """Engines of unlike stages: kinds in the order of the pipeline, a row for each cut."""

    kinds: tuple[Served, ...]
    """The same model, engine and format on each kind, first stages first."""
    hops: tuple[Hop, ...]
    """Between a kind and the next."""
    layers: NDArray[np.int64]
    """(N, P): layers of each stage, 0 where a row has fewer stages."""
    kind: NDArray[np.int64]
    """(N, P): number of the kind of each stage, rising."""

    def stages_of(self, number: int) -> NDArray[np.int64]:
        """(N,): stages of a kind."""
        return np.asarray(np.sum((self.kind == number) & (self.layers > 0), axis=1))

    def layers_of(self, number: int) -> NDArray[np.int64]:
        """(N,): layers on a kind."""
        return np.asarray(np.sum(np.where(self.kind == number, self.layers, 0), axis=1))

    def take(self, rows: Any) -> Chain:
        """Some rows."""
        return replace(self, layers=self.layers[rows], kind=self.kind[rows])


class ChainEngine(Engine):
    """One engine of a chain under a kind of requests; ``layout``: columns, as many as the chain has rows."""

    def __init__(self, chain: Chain, layout: ServingLayout, traffic: Traffic) -> None:
        super().__init__(chain.kinds[0], layout, traffic)
        self.chain, self.count = chain, len(chain.layers)
        alone = replace(layout, pp=np.ones(self.count, dtype=np.int64))
        self.inner = [Engine(one, alone, traffic) for one in chain.kinds]

    def clock(self, batch: Any, busy: Any) -> Floats:
        """(kinds, N)."""
        return np.stack([np.broadcast_to(one.clock(batch / self.pp, busy), (self.count,)) for one in self.inner])

    def prompt_rate(self) -> Floats:
        """(kinds, N)."""
        return np.stack([np.broadcast_to(one.prompt_rate(), (self.count,)) for one in self.inner])

    def timed(self, work: Pass) -> Callable[[Any], StepTime]:
        """As of one kind."""
        return lambda clock: self.time(replace(work, clock=clock))

    def time(self, work: Pass) -> StepTime:
        """Seconds of one pass through all stages; the wait for the slowest stands under communication."""
        chain = self.chain
        groups = self.pp if np.any(np.asarray(work.prompts) > 0.0) else np.clip(np.asarray(work.batch), 1.0, self.pp)
        each, found = replace(work, batch=np.asarray(work.batch) / self.pp), self.by_kind(work)
        shares = [chain.layers_of(number) / chain.kinds[0].model.num_layers for number in range(len(found))]
        parts = {
            name: sum(share * np.asarray(getattr(one, name)) for share, one in zip(shares, found, strict=True))
            for name in IN_LAYERS
        }
        host = sum(chain.stages_of(number) / self.pp * np.asarray(one.host) for number, one in enumerate(found))
        head = np.broadcast_to(np.asarray(found[-1].head), (self.count,))
        sent, station = self._sends(each)
        parts["communication"] = parts["communication"] + sent
        whole = sum(parts.values()) + head + host
        slowest = np.maximum(np.max(self.stage_seconds(found), axis=1), station)
        parts["communication"] = parts["communication"] + np.maximum(groups * slowest - whole, 0.0)
        return StepTime(**parts, head=head, host=host)

    def both(self, batch: Any, packed: Any = 1.0) -> Callable[[Any], tuple[Floats, Floats, Floats]]:
        """As of one kind, one pass after the other; several loads of every row, (K, N), one by one."""
        if np.ndim(batch) > 1:
            each, shape = [self.both(*one) for one in zip(*np.broadcast_arrays(batch, packed), strict=True)], np.shape(batch)
            return lambda busy: self._stacked([one(at) for one, at in zip(each, np.broadcast_to(busy, shape), strict=True)])
        decoding, prompting = self.decoding(batch), self.prompting(batch, packed)

        def priced(busy: Any) -> tuple[Floats, Floats, Floats]:
            decode = np.asarray(decoding(busy).total)
            return decode, *prompting(decode, busy)

        return priced

    def _stacked(self, found: Sequence[tuple[Floats, Floats, Floats]]) -> tuple[Floats, Floats, Floats]:
        """(K, N) of every part."""
        parts = (np.stack([np.broadcast_to(one, (self.count,)) for one in part]) for part in zip(*found, strict=True))
        first, second, third = parts
        return first, second, third

    def by_kind(self, work: Pass) -> list[StepTime]:
        """A pass of one group over all layers, on each kind."""
        clocks, found = np.asarray(work.clock), list[StepTime]()
        for number, one in enumerate(self.chain.kinds):
            clock = clocks[number] if clocks.ndim == 2 else work.clock
            each = replace(work, batch=np.asarray(work.batch) / self.pp, clock=clock)
            found.append(step_time(one, self.inner[number].layout, each, self.inner[number].linear))
        return found

    def stage_seconds(self, found: Sequence[StepTime]) -> Floats:
        """(N, P): tau of every stage, from a pass over all layers on each kind."""
        chain = self.chain
        per_layer, host = self.per_layer(found)
        tau = chain.layers * np.take_along_axis(per_layer, chain.kind, axis=1)
        tau = tau + np.where(chain.layers > 0, np.take_along_axis(host, chain.kind, axis=1), 0.0)
        last = np.sum(chain.layers > 0, axis=1) - 1
        tau[np.arange(self.count), last] += np.broadcast_to(np.asarray(found[-1].head), (self.count,))
        return tau

    def per_layer(self, found: Sequence[StepTime]) -> tuple[Floats, Floats]:
        """(N, kinds): seconds of a layer, and of a stage's part of the host."""
        layers = self.chain.kinds[0].model.num_layers
        rows = [np.broadcast_to(sum(np.asarray(getattr(one, name)) for name in IN_LAYERS) / layers, (self.count,)) for one in found]
        hosts = [np.broadcast_to(np.asarray(one.host) / self.pp, (self.count,)) for one in found]
        return np.stack(rows, axis=1), np.stack(hosts, axis=1)

    def _sends(self, each: Pass) -> tuple[Floats, Floats]:
        """(N,): seconds of all sends of a group's pass, and those that the busiest shared link is taken by all engines' groups."""
        chain, width = self.chain, float(self.served.model.hidden_size)
        ranks, total, busiest = np.asarray(self.layout.ranks), np.zeros(self.count), np.zeros(self.count)
        sizes = [ACTIVATION * rows_of(one, self.inner[k].layout, each) * width for k, one in enumerate(chain.kinds)]
        for number, one in enumerate(chain.kinds):
            inside = one.cluster.collective_time("send_recv", sizes[number], np.full(self.count, 2), ranks)
            total = total + np.maximum(chain.stages_of(number) - 1, 0) * inside
        for number, hop in enumerate(chain.hops):
            ends = chain.kinds[number : number + 2]
            own = [one.cluster.collective_time("send_recv", sizes[number], 2, one.cluster.domain) for one in ends]
            shared = np.asarray(self.layout.replicas) * sizes[number] / hop.bandwidth
            total = total + np.maximum(np.maximum(own[0], own[1]), sizes[number] / hop.bandwidth) + hop.latency
            busiest = np.maximum(busiest, shared)
        return total, busiest


def chain_memory(chain: Chain, layout: ServingLayout, traffic: Traffic) -> ServingMemory:
    """Parts on the GPU with the least room for the cache, over the stages of all kinds."""
    found = list[dict[str, Any]]()
    last = np.sum(chain.layers > 0, axis=1) - 1
    places = np.arange(chain.layers.shape[1])[None, :]
    for number, one in enumerate(chain.kinds):
        mine = (chain.kind == number) & (chain.layers > 0)
        for end in ("first", "middle", "last"):
            at = {"first": places == 0, "last": places == last[:, None]}.get(end, (places > 0) & (places < last[:, None]))
            held = np.max(np.where(mine & at, chain.layers, 0), axis=1)
            if np.any(held):
                found.append(of_stage(placed(one, layout, traffic), stage_of(one, held, end)))
    count = len(chain.layers)
    every = {name: np.stack([np.broadcast_to(one[name], (count,)) for one in found]) for name in found[0]}
    sizes = {one["usable"] for one in found}
    return scarcest({**every, "usable": sizes.pop()} if len(sizes) == 1 else every)


def placed(one: Served, layout: ServingLayout, traffic: Traffic) -> Placed:
    """A kind of the chain as the memory model takes it."""
    return Placed(
        model=one.model, hardware=one.hardware, engine=one.engine, precision=one.precision, layout=layout, traffic=traffic
    )


def stage_of(one: Served, held: Any, end: str) -> Stage:
    """A stage with so many layers; ``end``: first, middle or last of its pipeline."""
    model, dense = one.model, one.model.num_dense_layers
    share = model.num_moe_layers / max(model.num_layers - dense, 1)
    sparse = np.maximum(held - dense, 0) * share if end == "first" else held * share
    return Stage(layers=held, sparse=sparse, first=end == "first", last=end == "last", exists=np.asarray(held) > 0)


def best_cut(
    layers: int, per_layer: Sequence[float], extra: Sequence[float], most: Sequence[int], groups: float
) -> tuple[int, ...] | None:
    """Layers of each stage, at least one, at most ``most``, with the least max(sum tau_j, groups max tau_j), where
    tau_j = L_j per_layer_j + extra_j; None where no cut has room.

    Exact: for each value that the longest stage can have, the cheapest stages are filled up to it, which gives the least sum;
    one of these values is the best. Stages that cost the same per layer then share their layers, the longest no longer.
    """
    cost, fixed, room = (np.asarray(values, dtype=np.float64) for values in (per_layer, extra, most))
    if np.any(room < 1) or np.sum(room) < layers:
        return None
    counts = np.arange(1, layers + 1)
    every = (fixed[:, None] + counts[None, :] * cost[:, None])[counts[None, :] <= room[:, None]]
    longest = np.unique(every) * (1.0 + 1e-12)
    limit = np.minimum(np.floor((longest[:, None] - fixed) / cost), room)
    able = np.all(limit >= 1, axis=1) & (np.sum(limit, axis=1) >= layers)
    longest, limit = longest[able], limit[able]
    if not len(longest):
        return None
    order = np.argsort(cost, kind="stable")
    free = limit[:, order] - 1.0
    before = np.cumsum(free, axis=1) - free
    filled = np.empty_like(limit)
    filled[:, order] = 1.0 + np.clip(layers - len(cost) - before, 0.0, free)
    tau = filled * cost + fixed
    cycle = np.maximum(np.sum(tau, axis=1), groups * np.max(tau, axis=1))
    best = int(np.argmin(cycle))
    return _levelled(filled[best], limit[best], cost, fixed)


def _levelled(filled: Floats, limit: Floats, cost: Floats, fixed: Floats) -> tuple[int, ...]:
    """Layers of stages with the same cost shared out, each next one to the stage that it makes the least long."""
    found, room, each, extra = [1] * len(filled), limit.tolist(), cost.tolist(), fixed.tolist()
    for value in set(each):
        mine = [at for at, one in enumerate(each) if one == value]
        for _ in range(int(sum(filled[at] for at in mine)) - len(mine)):
            free = [at for at in mine if found[at] < room[at]]
            found[min(free, key=lambda at: (found[at] + 1) * each[at] + extra[at])] += 1
    return tuple(found)
