"""Seconds of the passes of one engine under a kind of requests, as functions of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats, spread
from planner.serving.linear_layers import LinearLayers
from planner.serving.result import StepTime
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, Step, core_bound
from planner.serving.traffic import Traffic

ROUND_POINTS = 64
"""Of an integral over the decodes until all ranks have prompts."""


class Engine:
    """One engine under a kind of requests: seconds of its passes as functions of the batch."""

    def __init__(self, served: Served, layout: ServingLayout, traffic: Traffic) -> None:
        self.served, self.layout, self.traffic = served, layout, traffic
        self.linear = LinearLayers(served, layout)
        self.input = traffic.input.mean * (1.0 - traffic.prefix_hit)
        self.hit = traffic.input.mean * traffic.prefix_hit
        self.output = traffic.output.mean
        self.context = traffic.input.mean + traffic.output.squared / (2.0 * traffic.output.mean)
        """Mean over the time of a decode: what is generated grows from 0 to O, longer answers are seen longer."""
        self.dp = np.asarray(layout.attn_dp, dtype=np.float64)
        self.pp = np.asarray(layout.pp, dtype=np.float64)
        self.hold = np.asarray(layout.hold, dtype=np.float64) - 1.0
        """H: decodes that the first prompt that waits is held back."""
        self.interval = np.asarray(layout.receive_interval, dtype=np.float64)
        """Decodes between two looks for requests."""
        self.balance = np.asarray(layout.balance, dtype=np.float64)
        self.budget = np.asarray(layout.max_tokens, dtype=np.float64)
        self.speed = traffic.tokens_per_step
        self.streamed = traffic.client != "process" or traffic.load != "offline"
        """Whether tokens are sent as they come: who asks for throughput alone, inside the engine's process, takes whole answers."""
        host, outside = served.engine.host, traffic.client != "process" and traffic.load != "static"
        self.client = host["first_token"] + host["prompt_token"] * traffic.input.mean if outside else 0.0
        """Seconds of a request at the client and the server's process, before its prompt waits for a pass."""
        self.drafted = 1.0 + (traffic.speculation.depth if traffic.speculation else 0.0)

    def time(self, work: Pass) -> StepTime:
        """Seconds of one pass through all stages."""
        return self.timed(work)(work.clock)

    def timed(self, work: Pass) -> Callable[[Any], StepTime]:
        """Seconds of one pass through all stages at a clock in place of that of ``work``."""
        return self.step(work).time

    def step(self, work: Pass) -> Step:
        """One pass through all stages."""
        return Step(self.served, self.layout, work, self.linear)

    def prompt_rate(self) -> Floats:
        """Rate of the kernels of prompts over that of the measured ones."""
        return self.served.engine.prompt_rate(self.served.hardware, self.layout)

    def decode(self, batch: Any, busy: Any = 0.0) -> Floats:
        """D(B): seconds of one pass over all stages that only decodes; ``busy``: share of the time that goes to prompts."""
        return np.asarray(self.decode_step(batch, busy).total)

    def decode_step(self, batch: Any, busy: Any = 0.0) -> StepTime:
        """The parts of ``decode``."""
        return self.decoding(batch)(busy)

    def decoding(self, batch: Any) -> Callable[[Any], StepTime]:
        """``decode_step`` of a batch by ``busy``."""
        batch = np.maximum(batch, 1e-6)
        timed = self.timed(self._decodes(batch))

        def step(busy: Any) -> StepTime:
            time = timed(self.clock(batch, busy))
            return replace(time, draft=self.draft(batch, time))

        return step

    def draft(self, batch: Floats, time: StepTime) -> Floats:
        """Seconds to propose the tokens of a step: by the model's own module of multi-token prediction a layer and the head each,
        by a draft model its weights in 16 bits once each; nothing by n-gram lookup."""
        one, model, hardware = self.traffic.speculation, self.served.model, self.served.hardware
        if one is None or not one.draft_parameters:
            return np.zeros_like(batch)
        if model.mtp_layers:
            layers = np.asarray(time.total - time.head - time.host) / model.num_layers
            return one.depth * (model.layers_per_mtp * layers + np.asarray(time.head))
        ranks = np.asarray(self.layout.ranks, dtype=np.float64)
        read = 2.0 * one.draft_parameters / (ranks * hardware.memory_bandwidth * hardware.memory_fraction["copy"])
        work = 2.0 * one.draft_parameters * batch / (ranks * hardware.sustained_flops("bf16"))
        return one.depth * np.maximum(read, work)

    def clock(self, batch: Any, busy: Any) -> Floats:
        """Rate of the tensor cores over that of a short burst: a device at its power limit slows them down in proportion to the
        share of the time that they are busy, ``busy`` with prompts, else with decodes of many rows."""
        rows = np.asarray(batch) * self.drafted / (self.dp * self.pp)
        cores = busy + (1.0 - busy) * core_bound(rows)
        return np.asarray(1.0 - (1.0 - self.served.hardware.sustained_clock) * np.clip(cores, 0.0, 1.0))

    def room(self, batch: Any) -> Floats:
        """Tokens of prompts that fit a pass of one attention rank together with ``batch`` decodes."""
        room = self.budget
        if self.served.engine.mixes_prefill:
            room = np.maximum(self.budget - np.asarray(batch) / (self.dp * self.pp), 1.0)
        return room if self.served.engine.chunked_prefill else np.maximum(room, self.input)

    def fed(self) -> Floats:
        """Requests at once that a token budget of C keeps supplied with prompts, where these share the passes of decodes:
        C O / (I + O) of every group and attention rank."""
        if not self.served.engine.mixes_prefill:
            return np.asarray(np.inf)
        return self.budget * self.dp * self.pp * self.output / (self.input + self.output)

    def chunks(self, batch: Any) -> tuple[Floats, Floats]:
        """Passes that one prompt takes, and its tokens in each."""
        number = np.ceil(self.input / self.room(batch))
        return number, self.input / number

    def prompt(self, batch: Any, decode: Floats, busy: Any = 0.0, packed: Any = 1.0) -> tuple[Floats, Floats]:
        """S, what one prompt adds to the engine's time, and the seconds of its own passes.

        An engine that mixes runs prompts together with the decodes: S = passes x (T(B, p n) - D(B)) / p, ``packed`` p prompts in a
        pass; one that does not stops them: S = T(0, p n) / p. With attention data parallelism those of
        ``holders`` ranks run at once. A prompt's own passes are those without the p - 1 others.
        """
        return self.prompting(batch, packed)(decode, busy)

    def prompting(self, batch: Any, packed: Any = 1.0) -> Callable[[Any, Any], tuple[Floats, Floats]]:
        """``prompt`` of a batch by the seconds of its decode and ``busy``."""
        each, holders = np.maximum(packed / self.dp, 1.0), self.holders(batch, packed)
        number, timed = self.passing(self._mixed(batch), each, holders)
        added = self._added(batch, number, each, holders)
        return lambda decode, busy: added(timed(busy), decode)

    def _mixed(self, batch: Any) -> Any:
        """Of ``batch`` decodes those that run in the passes of prompts."""
        return batch if self.served.engine.mixes_prefill else 0.0

    def _added(self, batch: Any, number: Any, each: Any, holders: Any) -> Callable[[Any, Any], tuple[Floats, Floats]]:
        """``prompt`` from the seconds of a pass with prompts and of one that only decodes."""
        mixes, together = self.served.engine.mixes_prefill, self.together(batch, number)

        def prompt(whole: Any, decode: Any) -> tuple[Floats, Floats]:
            added = np.maximum(whole - decode, 0.0) / each if mixes else whole / each
            own = whole - (each - 1.0) * added if mixes else whole
            return number * added * together / holders, number * own

        return prompt

    def both(self, batch: Any, packed: Any = 1.0) -> Callable[[Any], tuple[Floats, Floats, Floats]]:
        """``decode`` and ``prompt`` of a batch by ``busy``, whose passes are priced together, as rows of one table."""
        batch, each = np.maximum(batch, 1e-6), np.maximum(packed / self.dp, 1.0)
        mixed, holders = self._mixed(batch), self.holders(batch, packed)
        number, prompts = self.with_prompts(mixed, each, holders)
        shape = np.broadcast_shapes(np.shape(batch), np.shape(each), np.shape(number), np.shape(holders), np.shape(self.pp))
        timed = self.timed(_stacked((self._decodes(batch), prompts), shape))
        added, rate = self._added(batch, number, each, holders), self.prompt_rate()

        def priced(busy: Any) -> tuple[Floats, Floats, Floats]:
            clocks = self.clock(batch, busy), self.clock(mixed, busy) * rate
            time = timed(np.stack([spread(one, shape) for one in clocks]))
            decode, whole = spread(time.total, (2, *shape))
            if self.traffic.speculation:
                decode = decode + self.draft(batch, time.at(0))
            return decode, *added(whole, decode)

        return priced

    def _decodes(self, batch: Any) -> Pass:
        """A pass that only decodes."""
        return Pass(batch=batch, context=self.context, queries=self.drafted, streamed=self.streamed)

    def with_prompts(self, batch: Any, each: Any, holders: Any = np.inf) -> tuple[Floats, Pass]:
        """Passes of one prompt, and a mean one mixed with ``batch`` decodes, with prompts on so many attention ranks."""
        number, tokens = self.chunks(batch)
        return number, Pass(
            batch=np.maximum(batch, 1e-6), context=self.context, prompts=each, prompt_tokens=tokens,
            cached=(number - 1.0) / 2.0 * tokens + self.hit, holders=holders, streamed=self.streamed,
        )  # fmt: skip

    def passes(self, batch: Any, busy: Any = 0.0, each: Any = 1.0) -> tuple[Floats, Floats]:
        """Passes of one prompt mixed with ``batch`` decodes, and the mean seconds of one; ``busy`` as in ``decode``, ``each``:
        prompts of a pass on a rank."""
        number, timed = self.passing(batch, each)
        return number, timed(busy)

    def holders(self, batch: Any, packed: Any = 1.0) -> Floats:
        """Attention ranks that have a prompt in a pass that has any: ranks run in lock step, so that a prompt of one holds up all,
        and n prompts a pass meet others in it: n / (1 - exp(-n)), each on a rank of its own."""
        n = np.maximum(self.prompts_per_decode(batch) * self.chunks(batch)[0], 1e-9)
        return np.asarray(np.clip(np.maximum(n / -np.expm1(-n), packed), 1.0, self.dp))

    def passing(self, batch: Any, each: Any = 1.0, holders: Any = np.inf) -> tuple[Floats, Callable[[Any], Floats]]:
        """``passes`` by ``busy``."""
        number, prompts = self.with_prompts(batch, each, holders)
        timed, rate = self.timed(prompts), self.prompt_rate()
        return number, lambda busy: np.asarray(timed(self.clock(batch, busy) * rate).total)

    def together(self, batch: Any, number: Any) -> Floats:
        """Part of a prompt's time that it costs an engine of p stages, whose p groups follow each other from stage to stage: a pass
        with a prompt holds up all of them, unless another has one too. (1 - (1 - f)^p) / (f p) where a pass has one with the
        chance f, n prompts of ``number`` passes over p groups: from 1, when prompts are rare, to 1 / p."""
        chance = np.clip(self.prompts_per_decode(batch) * number / self.pp, 1e-6, 1.0 - 1e-12)
        return np.asarray(-np.expm1(self.pp * np.log1p(-chance)) / (chance * self.pp))

    def receive(self, requests: Any) -> Floats:
        """Decodes that a request waits before a pass can take it: half of the interval, and the next one too where the host
        prepares it while the GPU computes the one before; where a timer of H starts with the first that waits, that one waits H
        and the k = (N - 1) H / O that come meanwhile half of it: H (1 + k / 2) / (1 + k)."""
        others = np.maximum(requests - 1.0, 0.0) * self.hold / np.maximum(self.output, 1.0)
        held = self.hold * (1.0 + 0.5 * others) / (1.0 + others)
        return np.maximum(0.5 * self.interval, self._balanced(requests)[1]) + held + self.served.engine.overlap_scheduler

    def seldom(self, requests: Any) -> Floats:
        """Decodes between two passes that may take prompts."""
        return np.maximum(np.maximum(self.interval, self.hold), self._balanced(requests)[0])

    def _balanced(self, requests: Any) -> tuple[Floats, Floats]:
        """Decodes between two passes that take prompts where these wait until all R ranks have one, at most H, and the mean wait.

        Of n prompts a decode, each for one rank, one has come to a rank after t decodes with the chance q = 1 - exp(-n t / R). The
        cycle lasts longer than t with 1 - q^R, a prompt that has come by then waits with 1 - q^(R - 1): C = integral of 1 - q^R to
        H, wait = integral of t (1 - q^(R - 1)) / C. Where more come to a rank meanwhile than a pass of it takes, some always wait
        for the next, and with them others: half of H.
        """
        if not np.any(self.balance > 1.0):
            return np.ones(()), np.zeros(())
        each = np.asarray(requests, dtype=np.float64) / np.maximum(self.output, 1.0) / self.dp
        time = (np.arange(ROUND_POINTS) + 0.5) / ROUND_POINTS * self.balance[..., None]
        come, ranks = -np.expm1(-each[..., None] * time), self.dp[..., None]
        cycle = self.balance * (1.0 - come**ranks).mean(axis=-1)
        wait = self.balance * (time * (1.0 - come ** (ranks - 1.0))).mean(axis=-1) / np.maximum(cycle, 1e-9)
        late = each * cycle > self.budget / self.input
        cycle, wait = np.where(late, self.balance, np.maximum(cycle, 1.0)), np.where(late, 0.5 * self.balance, wait)
        waits = (self.balance > 1.0) & (self.dp > 1.0)
        return np.where(waits, cycle, 1.0), np.where(waits, wait, 0.0)

    @property
    def width(self) -> Floats:
        """w: decodes over which answers that started together end; equal lengths: 0."""
        return np.asarray(np.sqrt(12.0 * self.traffic.output.variation) * self.output)

    def prompts_per_decode(self, requests: Any) -> Floats:
        """n: the mean of N / (sqrt(k) w) over the waves k = 1 .. W of a run, (2 sqrt(W) - 1) / W N / w, not below N / O; of a loop
        that goes on for ever N / O unless lengths are equal."""
        apart = requests * self.seldom(requests) / np.maximum(self.output, 1.0)
        waves, width = self.traffic.waves, self.width
        in_step = (2.0 * np.sqrt(waves) - 1.0) / waves if waves is not None else 0.0
        return np.maximum(apart, np.where(width < 1.0, requests, in_step * requests / np.maximum(width, 1.0)))


def _stacked(passes: tuple[Pass, Pass], shape: tuple[int, ...]) -> Pass:
    """Two passes of columns of ``shape`` as one of columns with an axis of two before it."""
    first = passes[0]
    columns = {
        name: np.stack([spread(getattr(one, name), shape) for one in passes])
        for name in ("batch", "prompts", "prompt_tokens", "cached", "holders", "queries")
    }
    return Pass(context=first.context, streamed=first.streamed, **columns)
