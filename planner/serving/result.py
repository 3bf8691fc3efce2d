"""What an estimate says of a deployment: times, rates, memory; numbers, or columns of numbers for columns of layouts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from planner import arrays as npt
from planner.record import record

Numbers = float | npt.Floats
"""A number, or a column of numbers."""
LAST = 0.995
"""Percentile of the steady part of a short run from which on its first wave decides."""


def normal_share(deviations: Numbers) -> Numbers:
    """Share of a normal distribution below ``deviations`` standard deviations, to 0.02 %: 1 / (1 + exp(-1.5976 x - 0.07056 x^3)).

    [Bowling et al. 2009, Journal of Industrial Engineering and Management 2 (1), 114-127]
    """
    x = np.clip(np.asarray(deviations), -8.0, 8.0)
    return 1.0 / (1.0 + np.exp(-1.5976 * x - 0.07056 * x**3))


def apart(*deviations: Numbers) -> Numbers:
    """Deviations of a percentile from the means of several latencies, as that of their sum: squares add up, as of normal ones; of
    a latency that grows without bound, none."""
    deviations = tuple(np.where(np.isfinite(one), one, 0.0) for one in deviations)
    squares = sum(np.asarray(one) * np.abs(one) for one in deviations)
    return np.sign(squares) * np.sqrt(np.abs(squares))


@record
class Quantiles:
    """Figures of one latency, seconds."""

    mean: Numbers
    p50: Numbers
    p90: Numbers
    p99: Numbers

    def of(self, name: str) -> Numbers:
        """mean, p50, p90 or p99 by name."""
        return getattr(self, name)


@record
class StepTime:
    """Seconds of one step of one engine by what takes them; the parts add up to ``total``."""

    linear: Numbers
    """Projections, dense MLPs, router."""
    attention: Numbers
    """Attention over the cache and of prompts; linear attention."""
    experts: Numbers
    """Routed and shared experts."""
    memory_bound: Numbers
    """Norms, rotary embedding, activations, quantisation, residual sums."""
    communication: Numbers
    """All-reduces, all-to-all, gathers, messages between pipeline stages."""
    head: Numbers
    """Embedding, output head and sampling."""
    host: Numbers
    """What the engine's host loop adds that the GPU does not hide."""
    draft: Numbers = 0.0
    """Proposing the tokens that the step verifies."""

    @property
    def total(self) -> Numbers:
        """Sum of the parts."""
        return sum(getattr(self, one.name) for one in fields(self))

    def at(self, index: int) -> StepTime:
        """The parts at a place of the first axis, where they have one."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        whole = np.shape(self.total)
        return StepTime(**{name: np.broadcast_to(value, whole)[index] for name, value in parts.items()})


@record
class ServingMemory:
    """Bytes on the fullest GPU, and what of them is left for the cache."""

    weights: Numbers
    draft: Numbers
    """Weights and cache of a draft model."""
    activations: Numbers
    """Peak of the largest step."""
    graphs: Numbers
    """Pools of captured CUDA graphs."""
    reserve: Numbers
    """Context, communicators, workspaces, and what the engine leaves free by its own accounting."""
    cache: Numbers
    """What the engine takes for keys, values and states."""
    usable: float
    """Memory of the device as the runtime reports it."""
    bytes_per_token: Numbers
    """Cache of one token on the fullest GPU."""
    bytes_per_sequence: Numbers
    """State of one sequence that does not grow (linear attention, windows that are full), and half a block of waste."""
    capacity: Numbers
    """Tokens that the cache of one engine holds, over all its attention ranks."""
    spread: Numbers = 0.0
    """Standard deviation of ``cache``: what is not known of weights, peak and runtime."""
    raised: object = False
    """The engine's default would not hold one request: its share of the memory is raised as far as it goes."""
    share: Numbers = 0.0
    """The engine's flag that gives this cache: gpu-memory-utilization, mem-fraction-static, free_gpu_memory_fraction."""

    @property
    def fits(self) -> object:
        """Whether the engine may start: some cache is left, or would be if the parts were two standard deviations smaller."""
        return np.asarray(self.cache) + 2.0 * np.asarray(self.spread) > 0

    @property
    def start_chance(self) -> Numbers:
        """Chance that some cache is left, from 0 to 1: cache / spread normally distributed."""
        return normal_share(np.asarray(self.cache) / np.maximum(self.spread, 1.0))


@record
class Flow:
    """Steady state of one engine; seconds, requests/s, sequences."""

    ttft: npt.Floats
    """Mean, over the first wave of a short run too."""
    tpot: npt.Floats
    wait: npt.Floats
    """The part of ttft that queues, after the first wave."""
    rate: npt.Floats
    """X."""
    running: npt.Floats
    """B."""
    waiting: npt.Floats
    """Requests that are not admitted yet."""
    prompt: npt.Floats
    """S."""
    decode: npt.Floats
    """D(B)."""
    late: Any = 0.0
    """The part of wait that all wait alike: for a place, behind those in flight."""
    chance: Any = 1.0
    """Of a request to queue at all."""
    longest: Any = np.inf
    """Longest wait without ``late``: of a closed loop, for the prompts of all others."""
    own: Any = 0.0
    """Seconds of the passes of a request's own prompt, in ttft."""
    first: Any = 0.0
    """Mean time to first token of the first wave of a short run, which comes at once."""
    start: Any = 0.0
    """The part of it that all requests of the wave wait alike."""
    waves: float = np.inf
    """Waves of a short run."""

    def ttft_at(self, level: float) -> npt.Floats:
        """The percentile ``level`` of the time to first token: P(wait > t) = c exp(-c t / mean), c the chance to wait, as in M/G/1,
        evenly where the longest wait is below twice the mean; requests of the first wave are served at even intervals, after all
        others have been."""
        share = 1.0 / self.waves
        mean = self.ttft - np.maximum(self.first - self.ttft, 0.0) * share / (1.0 - share) if share < 1.0 else self.ttft
        queued = np.where(np.isinf(self.wait), 0.0, self.wait - self.late)
        chance = np.clip(self.chance, 1e-9, 1.0)
        rest = np.minimum(level / (1.0 - share), LAST) if share < 1.0 else LAST
        waited = queued / chance * np.maximum(np.log(chance / (1.0 - rest)), 0.0)
        near = np.minimum(self.longest, 2.0 * queued)
        even = 2.0 * queued - near + 2.0 * rest * (near - queued)  # between twice the mean less the longest, and the longest
        steady = mean - queued + np.where(near < 2.0 * queued, even, np.minimum(waited, self.longest))
        late = self.start + 2.0 * (self.first - self.start) * max(level - (1.0 - share), 0.0) / share if share else 0.0
        return np.where(level > 1.0 - share, np.maximum(steady, late), steady)


@record
class ServingEstimate:
    """The answer for one deployment, or columns of it."""

    ttft: Quantiles
    """Time to first token, queue and client included."""
    tpot: Quantiles
    """Time per output token after the first, of a request."""
    itl: Quantiles
    """Gap between two tokens."""
    e2e: Quantiles
    """Whole request."""
    requests_per_second: Numbers
    """Finished requests, whole deployment."""
    output_tokens_per_second: Numbers
    """Generated tokens, whole deployment."""
    total_tokens_per_second: Numbers
    """Prompt and generated tokens, whole deployment."""
    running: Numbers
    """Sequences that one engine decodes at once, mean."""
    waiting: Numbers
    """Requests that wait for admission at one engine, mean."""
    step: StepTime
    """The mean decode step."""
    memory: ServingMemory
    saturated: object
    """Open loop: more arrives than leaves."""
    fits: object
    """The engine starts and holds at least one request."""
    max_concurrency: Numbers
    """Requests of this length that the cache of the whole deployment holds at once."""
    preemption: Numbers
    """Chance that a step finds the cache full and has to pre-empt."""
    flow: Flow
    """The steady state of one engine that all of it follows from."""
