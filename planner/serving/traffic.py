"""What is asked of a server: lengths of requests, how they arrive, what speculation and caches save, and the limits to meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated

import numpy as np

from planner.errors import PlannerError
from planner.record import record
from planner.schema import check, one_of, within

LOADS = ("concurrency", "rate", "offline", "static")
"""Closed loop, open loop (Poisson), all requests at once, one fixed batch without a queue."""
CLIENTS = ("http", "frontend", "process")
Tokens = Annotated[float, within(1, 1e8)]


@record
class Lengths:
    """Distribution of a number of tokens: what the queues need of it. One, or columns of many next to columns of layouts."""

    mean: Tokens
    """E[x]."""
    squared: Annotated[float, within(1, 1e16)]
    """E[x^2]: equal to mean^2 where all lengths are equal."""
    longest: Tokens
    """Largest value: what a sequence may grow to."""

    def __post_init__(self) -> None:
        if isinstance(self.mean, np.ndarray):  # columns of many runs: their reader has checked each
            return
        check(self)
        if self.squared < self.mean**2 * (1.0 - 1e-9) or self.longest < self.mean * (1.0 - 1e-9):
            raise PlannerError(
                f"lengths of mean {self.mean:g} cannot have E[x^2] {self.squared:g} and longest {self.longest:g}"
            )

    @property
    def variation(self) -> float:
        """Squared coefficient of variation, Var[x] / E[x]^2; 0 = fixed."""
        return np.maximum(self.squared / self.mean**2 - 1.0, 0.0)

    def beyond(self, level: float) -> float:
        """The percentile ``level`` over the mean, less one: of an even distribution with this variance, not beyond the longest."""
        even = np.sqrt(3.0 * self.variation) * (2.0 * level - 1.0)
        return np.clip(even, -1.0, self.longest / self.mean - 1.0)

    @classmethod
    def fixed(cls, tokens: float) -> Lengths:
        """All equal."""
        return cls(mean=tokens, squared=tokens**2, longest=tokens)

    @classmethod
    def uniform(cls, low: float, high: float) -> Lengths:
        """Uniform in [low, high]: E[x^2] = (low^2 + low high + high^2) / 3."""
        return cls(mean=(low + high) / 2.0, squared=(low**2 + low * high + high**2) / 3.0, longest=high)

    @classmethod
    def of(cls, samples: Sequence[float]) -> Lengths:
        """As observed. Raises PlannerError when there are none."""
        if not samples:
            raise PlannerError("no lengths are given")
        values = np.asarray(samples, dtype=np.float64)
        return cls(mean=float(values.mean()), squared=float((values**2).mean()), longest=float(values.max()))


def longest_request(prompt: Lengths, answer: Lengths) -> int:
    """Tokens that a sequence may grow to, rounded up but for what rounding of the ends adds."""
    return math.ceil(round(prompt.longest + answer.longest, 6))


@record
class Speculation:
    """Draft tokens that the model verifies in one step: a declared input, never guessed."""

    depth: Annotated[int, within(1, 64)]
    """k: tokens drafted per step."""
    acceptance: Annotated[float, within(0, 1)]
    """p: chance that a drafted token is accepted, given that those before it were."""
    draft_parameters: Annotated[float, within(0, 1e13)] = 0.0
    """Parameters read per drafted token; 0 = n-gram lookup."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one step yields, (1 - p^(k+1)) / (1 - p).  [Leviathan 2023, equation 1]"""
        p, k = self.acceptance, self.depth
        return float(k + 1) if p >= 1.0 else (1.0 - p ** (k + 1)) / (1.0 - p)


@record
class Traffic:
    """Requests, and how they arrive."""

    input: Lengths
    """Prompt tokens."""
    output: Lengths
    """Generated tokens."""
    load: Annotated[str, one_of(LOADS)] = "concurrency"
    """How ``value`` is meant."""
    value: Annotated[float, within(0, 1e9)] = 1.0
    """concurrency: requests in flight over all replicas; rate: requests/s over all replicas; offline: requests; static: batch."""
    prefix_hit: Annotated[float, within(0, 0.999)] = 0.0
    """Part of the prompt found in the prefix cache: it costs no time, but room."""
    speculation: Speculation | None = None
    client: Annotated[str, one_of(CLIENTS)] = "http"
    """http: texts go through the engine's server and its client; frontend: processes before it make tokens of them (Dynamo);
    process: the load is made inside the engine's process."""
    stream: Annotated[float, within(0, 1e6)] = 0.0
    """Steps whose tokens one response of a stream holds (--stream-interval); 0: as many as the server's process keeps up with."""
    waves: Annotated[float, within(1, 1e9)] | None = None
    """Closed loop: requests sent over requests in flight where the run is short; the first wave queues as a burst. None: steady."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def rate(self) -> float | None:
        """Requests/s that arrive; None where requests wait for each other."""
        return self.value if self.load == "rate" else None

    @property
    def tokens_per_step(self) -> float:
        """What one step yields of a sequence."""
        return self.speculation.tokens_per_step if self.speculation else 1.0


@record
class Limits:
    """What an answer must keep, seconds; infinite = no limit."""

    ttft: float = field(default=float("inf"))
    """Time to first token."""
    tpot: float = field(default=float("inf"))
    """Time per output token after the first."""
    percentile: str = "mean"
    """Which figure of both the limit holds for: mean, p50, p90 or p99."""
