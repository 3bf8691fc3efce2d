"""The queue of a worker that only computes prompts: those that arrive during a pass share the next, up to the token budget.

Symbols: P(n) seconds of the passes of n prompts on each of R = attn_dp x pp ranks, x arrivals/s at a worker, I input tokens.

    P(n) = P(1) + (n - 1) p                      p = (P(m) - P(1)) / (m - 1), m = budget / I prompts fit
    n    = x P(n) / R                            what arrives meanwhile, between 1 and m: n = x (P(1) - p) / (R - x p)
    wait = min(x P(n), 1) P(n) / 2               the rest of the pass in progress; above R m / P(m) the queue grows

A worker whose pass holds one prompt is the queue of ``load``. Ranks start their passes together.  [Bailey 1954, bulk queues]
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.record import record
from planner.serving import load
from planner.serving.engine_passes import Engine
from planner.serving.serving_layout import ServingLayout


@record
class Prompts:
    """Passes of one prefill worker; seconds."""

    first: Any
    """P(1): passes of a prompt that is alone on its rank."""
    more: Any
    """p: what each further prompt of the rank adds."""
    most: Any
    """m: prompts of a rank that share a pass."""
    ranks: Any
    """R: ranks that compute prompts of their own at once, over all stages."""

    @property
    def capacity(self) -> Floats:
        """Requests/s with full passes."""
        return np.asarray(self.most * self.ranks / self._passes(self.most))

    def _passes(self, number: Any) -> Floats:
        return np.asarray(self.first + (number - 1.0) * self.more)

    def own(self, rate: Any) -> Floats:
        """P(n) at ``rate`` requests/s at this worker."""
        left = np.maximum(self.ranks - rate * self.more, 1e-12)
        return self._passes(np.clip(rate * (self.first - self.more) / left, 1.0, self.most))

    def wait(self, rate: Any, workers: Any, requests: Any) -> Floats:
        """Mean wait for a pass at ``rate`` requests/s over all workers, below capacity."""
        return self._rest(self.own(rate / workers), rate, workers, requests)

    def waited(self, rate: Any, workers: Any, requests: Any) -> Floats:
        """The same with the own passes."""
        own = self.own(rate / workers)
        return own + self._rest(own, rate, workers, requests)

    def _rest(self, own: Any, rate: Any, workers: Any, requests: Any) -> Floats:
        several = self.most * self.ranks > 1.0
        rest = load.others_of(requests) * np.minimum(rate / workers * own, 1.0) * 0.5 * own
        if np.all(several):
            return rest
        return np.where(several, rest, load.queue_wait(rate, self.first / workers, requests))


class Prefill:
    """Workers without decodes, whose passes are priced once for any rows of their layout."""

    def __init__(self, engine: Engine) -> None:
        fit = engine.budget / engine.input
        fit = fit if engine.served.engine.chunked_prefill else np.floor(fit)
        self.engine = engine
        self.most = np.maximum(np.minimum(fit, np.asarray(engine.layout.max_batch) / engine.dp), 1.0)
        self.number, alone = engine.with_prompts(0.0, 1.0)
        """Passes of one prompt."""
        self.alone, self.full = engine.step(alone), engine.step(engine.with_prompts(0.0, self.most)[1])

    @property
    def layout(self) -> ServingLayout:
        """Columns, or integers."""
        return self.engine.layout

    def take(self, rows: Any, workers: Any) -> Prefill:
        """So many workers each of some rows."""
        found, engine = copy(self), self.engine
        found.engine = Engine(engine.served, replace(engine.layout.take(rows), replicas=workers), engine.traffic)
        found.most, found.number = self.most[rows], self.number[rows]
        found.alone, found.full = self.alone.take(rows), self.full.take(rows)
        return found

    def queue(self, busy: Any = 0.0) -> Prompts:
        """Their passes; ``busy``: share of the time that a worker computes."""
        engine, most = self.engine, self.most
        clock = engine.clock(0.0, busy) * engine.prompt_rate()
        alone, full = (np.asarray(one.time(clock).total) for one in (self.alone, self.full))
        more = np.where(most > 1.0, np.maximum(full - alone, 0.0) / np.maximum(most - 1.0, 1e-9), 0.0)
        return Prompts(first=self.number * alone, more=self.number * more, most=most, ranks=engine.dp * engine.pp)
