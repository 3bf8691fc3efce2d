"""Seconds to sample all answers of a step: continuous batching as a flow of answers, with the length tail.

The axis is tokens since the first answer began: all that run advance one token in a decode. n answers of an engine, C places (batch
limit, cache), S(x) the share of answers longer than x. b(y) answers begin at y; at x

    running(x) = sum over y of b(y) S(x - y)                   as many begin as end while the queue lasts: running = C
    any(x)     = 1 - exp(sum over y of b(y) ln(1 - S(x - y)))  chance that one still runs; exact where all begin at 0
    T          = sum over x of any(x) D(running(x) / any(x), context(x)) dx / tokens per decode

D from the serving step model; context: prompts, and what is generated so far. The slowest engine has the longest answer of all:
what it runs longer than the expected longest of its own n, alone, comes on top. Prompts are computed at the beginning; answers of
one prompt share its cache. Between turns an answer leaves its place in the batch, not in the cache, for the time of the tool.

Where new weights enter running engines (partial) nothing is drained: T = n mean / (B / D(B)), as many groups in flight as the lead
allows. A group, the answers to one prompt, is in flight until its longest ends: B = n (1 + lead) mean / E[longest of a group].
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.record import record
from planner.rl.answer_lengths import AnswerLengths
from planner.rl.rl_workload import RlWorkload
from planner.serving.engine_passes import Engine
from planner.serving.result import ServingMemory
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.step import Pass, step_time
from planner.serving.traffic import Lengths, Traffic

POINTS = 96
"""Points of the axis."""
DEVIATIONS = np.linspace(-3.0, 3.0, 25)
"""Of the memory that is left to a cache, in standard deviations."""
WAVES = 3.0
"""Answers for each place that the flow is followed for; further ones pass at the rate of full places."""


@record
class HostCost:
    """Seconds of the host in a decode, next to the engine's own."""

    sample: float = 0.0
    """Of each sampled token of an engine."""
    hosts_step: float = 0.0
    """Of each host of an engine over several."""
    stall: float = 0.0
    """Of the host of a rank, where the engine's graphs are cut in pieces."""


@record
class Generation:
    """One step's sampling on every layout; columns of length N."""

    seconds: Floats
    """All answers, the last included."""
    steady: Floats
    """All answers where engines never run empty."""
    prompts: Floats
    """Of that, prompts."""
    running: Floats
    """Answers that one engine runs at once at most."""
    memory: ServingMemory
    """Of one engine."""
    longest: Floats
    """Expected longest answer of all engines, tokens."""

    def take(self, rows: Any) -> Generation:
        """Some rows."""
        memory: dict[str, Any] = {name: _cut(value, rows) for name, value in vars(self.memory).items()}
        columns: dict[str, Any] = {name: _cut(value, rows) for name, value in vars(self).items() if name != "memory"}
        return replace(self, **columns, memory=replace(self.memory, **memory))


def _cut(value: Any, rows: Any) -> Any:
    """Rows of a column; a number stands for all."""
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value


def traffic_of(workload: RlWorkload) -> Traffic:
    """The requests of a step as the serving model takes them."""
    answers = workload.answers
    output = Lengths(mean=answers.mean, squared=max(answers.squared, answers.mean**2), longest=answers.most)
    return Traffic(
        input=Lengths.fixed(max(workload.context_tokens, 1.0)), output=output, speculation=workload.speculation, client="process"
    )


def shared_engine(served: Served, share: float | None) -> Served:
    """The engine with another share of the memory: where training lives on the same GPUs. None = its default."""
    if share is None or served.engine.accounting.school == "reserve":
        return served
    accounting = replace(served.engine.accounting, share=share)
    return replace(served, engine=replace(served.engine, accounting=accounting))


class Sampler:
    """Engines of layouts, one or columns, that sample the answers of a step."""

    def __init__(self, served: Served, layout: ServingLayout, workload: RlWorkload, host: HostCost | None = None) -> None:
        """``host``: seconds of the host that the engine's own do not hold."""
        self.layout, self.work = _columns(layout), workload
        self.memory = serving_memory(
            served.model, served.hardware, served.engine, served.precision, self.layout, traffic_of(workload)
        )
        self.flow = _Flow(served, self.layout, workload, self.memory, host or HostCost())

    @cached_property
    def seconds(self) -> Floats:
        """Decodes of all answers, the last included."""
        return self.flow.seconds(self.work.answers)

    @property
    def even(self) -> Floats:
        """All answers, if every one had the mean length."""
        return self.flow.seconds(AnswerLengths(lengths=(self.work.answers.mean,), shares=(1.0,))) + self.flow.prompts

    def generation(self, lead: float = 0.0) -> Generation:
        """The sampling of a step; ``lead``: further steps whose answers may be in flight."""
        flow = self.flow
        return Generation(
            seconds=self.seconds + flow.prompts,
            steady=np.minimum(flow.steady(lead), self.seconds) + flow.prompts,
            prompts=flow.prompts,
            running=np.minimum(flow.each, flow.places),
            memory=self.memory,
            longest=np.broadcast_to(self.work.answers.longest_of(self.work.sampled), flow.each.shape),
        )


def places_of(memory: ServingMemory, held: Any, longest: Any, most: Floats) -> Floats:
    """Answers that an engine runs at once: what its cache holds, ``held`` tokens each, at most ``most`` of them; columns.

    Where little memory is left its error is larger than the cache. Of engines that start, those that hold the ``longest`` answer,
    1 / E[1 / n]: the time of a step's answers goes with 1 / n.
    """
    cache, spread, tokens = (np.asarray(one, dtype=float)[..., None] for one in (memory.cache, memory.spread, memory.capacity))
    held, longest = (np.asarray(one, dtype=float)[..., None] for one in (held, longest))
    found = tokens * np.maximum(1.0 + DEVIATIONS * spread / np.maximum(cache, 1.0), 0.0)
    weight = np.exp(-0.5 * DEVIATIONS**2) * (found >= longest)
    weight = np.where(weight.sum(axis=-1, keepdims=True) > 0.0, weight, DEVIATIONS == 0.0)
    number = np.clip(found / held, 1.0, np.maximum(most[..., None], 1.0))
    return np.asarray(weight.sum(axis=-1) / (weight / number).sum(axis=-1))


def longest_stall(ranks: Any) -> Floats:
    """What ranks wait for the slowest host of n, over the mean stall of one: H(n) - 1 of exponential ones, 0 of a rank alone."""
    number = np.asarray(ranks, dtype=int)
    return np.cumsum(1.0 / np.arange(1, int(np.max(number)) + 1))[number - 1] - 1.0


def _columns(layout: ServingLayout) -> ServingLayout:
    """Every field as a column of one length."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value)) for value in vars(layout).values()))
    return ServingLayout(**dict(zip(vars(layout), columns, strict=True)))


class _Flow:
    """Answers through the engines of layouts."""

    def __init__(
        self, served: Served, layout: ServingLayout, workload: RlWorkload, memory: ServingMemory, host: HostCost
    ) -> None:
        self.served, self.layout, self.work, self.host = served, layout, workload, host
        self.engine = Engine(served, layout, traffic_of(workload))
        replicas = np.asarray(layout.replicas, dtype=float)
        self.each = np.maximum(np.ceil(workload.sampled / replicas), 1.0)
        answers = workload.answers
        grown = answers.squared / (2.0 * answers.mean) if served.engine.admits == "input" else answers.mean
        own = np.asarray(memory.bytes_per_sequence) / np.maximum(memory.bytes_per_token, 1e-9)
        longest = workload.context_tokens + answers.most + own
        self.places = places_of(memory, workload.context_tokens + grown + own, longest, np.asarray(layout.max_batch, dtype=float))
        self.speed = float(self.engine.speed)
        self.prompts = self._prompts()

    def decode(self, rows: Any, batch: Floats, context: Floats) -> Floats:
        """D for some rows of the layouts, or all (None), batch and context columns of the same length."""
        layout = self.layout if rows is None else self.layout.take(rows)
        engine = self.engine if rows is None else Engine(self.served, layout, self.engine.traffic)
        batch = np.maximum(batch, 1e-6)
        work = Pass(batch=batch, context=context, queries=engine.drafted, clock=engine.clock(batch, 0.0))
        time = step_time(self.served, layout, work, engine.linear)
        hosts = np.ceil(np.asarray(layout.engine_gpus) / self.served.hardware.gpus_per_node)
        host = self.host.sample * batch * self.speed + self.host.hosts_step * hosts * (hosts > 1.0)
        if self.served.engine.graphs.pieces:
            host = host + self.host.stall * longest_stall(np.asarray(layout.engine_gpus))
        return np.asarray(time.total + engine.draft(batch, time) + host)

    def _prompts(self) -> Floats:
        """Seconds of the prompts of an engine: its token budget filled in every pass; answers of a prompt share its cache."""
        together = np.minimum(float(self.work.samples), self.each) if self.served.engine.prefix_cache else 1.0
        length, tools = self.work.prompt_length, (self.work.turns - 1) * self.work.tool_tokens
        fresh = self.each / together * length + self.each * tools
        budget = np.asarray(self.layout.max_tokens, dtype=float) * np.asarray(self.layout.attn_dp, dtype=float)
        packed = np.maximum(np.minimum(budget, fresh) / length, 1e-3)
        work = Pass(batch=1e-6, context=length, prompts=packed / np.asarray(self.layout.attn_dp), prompt_tokens=length)
        whole = np.asarray(step_time(self.served, self.layout, work, self.engine.linear).total)
        return whole * fresh / (packed * length)

    def _active(self, answers: AnswerLengths) -> tuple[AnswerLengths, float]:
        """Lifetimes in decodes of answers whose turns wait for tools, and the share of it that they decode."""
        work = self.work
        if not work.waits:
            return answers, 1.0
        middle = int(np.argsort(self.each)[len(self.each) // 2])
        step = self.decode([middle], np.minimum(self.each, self.places)[[middle]], np.array([self._context(answers.mean / 2.0)]))
        wait = (work.turns - 1) * work.tool_s / float(step[0]) * self.speed
        longer = AnswerLengths(lengths=tuple(one + wait for one in answers.lengths), shares=answers.shares)
        return longer, answers.mean / longer.mean

    def _context(self, age: Any) -> Any:
        """Mean tokens in the cache of an answer of which ``age`` tokens are there."""
        tools = (self.work.turns - 1) * self.work.tool_tokens / self.work.answers.mean
        return self.work.prompt_length + age * (1.0 + tools)

    def seconds(self, answers: AnswerLengths) -> Floats:
        """Decodes of all answers of the slowest engine."""
        answers, active = self._active(answers)
        each, places = self.each, self.places
        followed = np.minimum(each, WAVES * places)
        running, some, ages, width = self._followed(answers, followed)
        count, points = running.shape
        rows = np.repeat(np.arange(count), points)
        batch = (running / np.maximum(some, 1e-12)).clip(min=1.0) * active
        priced = self.decode(rows, batch.reshape(-1), self._context(ages * active).reshape(-1)).reshape(count, points)
        time = (priced * some).sum(axis=1) * width / self.speed
        age = answers.squared / (2.0 * answers.mean)
        rate = self.decode(None, places * active, np.full(count, self._context(age * active)))
        time = time + (each - followed) * answers.mean / places * rate / self.speed
        longer = np.maximum(answers.longest_of(self.work.sampled) - answers.longest_of(each), 0.0)
        alone = self.decode(None, np.full(count, 1.0), np.full(count, self._context(answers.most * active)))
        return np.asarray(time + longer * alone / self.speed)

    def _followed(self, answers: AnswerLengths, number: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Running answers, chance that one runs, and mean age, (N, POINTS) at the middle of each piece; width of a piece (N,)."""
        places = np.minimum(self.places, number)
        horizon = answers.most + np.maximum(number - places, 0.0) * answers.mean / places
        width = horizon / POINTS
        at = (np.arange(POINTS) + 0.5) * width[:, None]  # a cohort begins at the start of a piece
        left = answers.survival(at)
        gone = np.log1p(-np.minimum(left, 1.0 - 1e-12))
        begun, queue = np.zeros_like(at), number.copy()
        running, ended, ages = np.zeros_like(at), np.zeros_like(at), np.zeros_like(at)
        for k in range(POINTS):
            older, lived = begun[:, :k], slice(k, 0, -1)
            alive = (older * left[:, lived]).sum(axis=1)
            new = np.minimum(queue, np.maximum(places - alive, 0.0))
            begun[:, k], queue = new, queue - new
            running[:, k] = alive + new * left[:, 0]
            running[:, k] = np.where(queue > 0.0, places, running[:, k])
            ended[:, k] = (older * gone[:, lived]).sum(axis=1) + new * gone[:, 0]
            ages[:, k] = (older * left[:, lived] * at[:, lived]).sum(axis=1) + new * left[:, 0] * at[:, 0]
        some = np.where(running >= places[:, None], 1.0, -np.expm1(ended))
        ages = ages / np.maximum(running, 1e-9)
        return running, some, ages, width

    def steady(self, lead: float) -> Floats:
        """Decodes of a step's answers where the engines stay filled with groups of ``lead`` further steps."""
        answers, active = self._active(self.work.answers)
        running = self.work.answers.mean / self.work.answers.longest_of(self.work.samples)
        batch = np.minimum(self.places, self.each * (1.0 + lead) * running)
        age = answers.squared / (2.0 * answers.mean)
        count = len(self.each)
        one = self.decode(None, batch * active, np.full(count, self._context(age * active)))
        return np.asarray(self.each * answers.mean / batch * one / self.speed)
