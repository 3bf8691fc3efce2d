"""Gaps between the tokens of one answer: most steps only decode, some are held up by prompts.

    G   mean gap, TPOT; D the gap of a step that only decodes; S seconds that one prompt of n passes adds (``load``)
    a = (G - D) n / S            passes of prompts that fall into a step, mean
    r   the most of them on one of w ranks in lock step (attention ranks, groups of stages): P(r <= k) = P(Poisson(a / w) <= k)^w
    gap = D + r (G - D) / E[r]   its mean is G; r at most what fits a pass; left out: that prompts differ in length

A step that yields several tokens (speculation) spreads its time over them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.serving.engine_passes import Engine
from planner.serving.result import Flow, Quantiles


def token_gaps(engine: Engine, flow: Flow, levels: dict[str, float]) -> Quantiles:
    """Mean and percentiles, seconds; ``levels``: name of a percentile -> share of the gaps below it."""
    mean = np.asarray(flow.tpot, dtype=np.float64)
    least = np.minimum(flow.decode / engine.speed, mean)
    number, tokens = engine.chunks(flow.running)
    mixes, ranks = engine.served.engine.mixes_prefill, engine.dp * engine.pp
    added = np.asarray(flow.prompt) / (number if mixes else 1.0) / engine.speed
    passes = np.divide(mean - least, added, out=np.zeros_like(mean + added), where=added > 0.0) / ranks
    below = np.moveaxis(_poisson(passes), 0, -1) ** ranks[..., None]
    most = np.maximum(np.floor(engine.room(flow.running) / tokens), 1.0) if mixes else np.full_like(tokens, np.inf)
    below = np.where(np.arange(below.shape[-1]) < most[..., None], below, 1.0)  # what fits a pass at most
    expected = (1.0 - below).sum(axis=-1)
    each = np.divide(mean - least, expected, out=np.zeros_like(expected), where=expected > 0.0)

    def at(level: float) -> Floats:
        return np.where(added > 0.0, least + (below < level).sum(axis=-1) * each, mean)

    return Quantiles(mean=mean, **{name: at(level) for name, level in levels.items()})


def _poisson(mean: Any) -> Floats:
    """P(x <= k) of Poisson variables of these means, k = 0, 1, .. along a first axis, as far as it is not 1."""
    mean = np.maximum(np.asarray(mean, dtype=np.float64), 1e-12)
    largest = float(np.max(mean))
    k = np.arange(int(largest + 8.0 * np.sqrt(largest)) + 8, dtype=np.float64).reshape(-1, *(1,) * mean.ndim)
    logs = k * np.log(mean) - mean - np.cumsum(np.log(np.maximum(k, 1.0)), axis=0)
    return np.asarray(np.minimum(np.cumsum(np.exp(logs), axis=0), 1.0))
