"""How often the model orders two measured plans of one job rightly, by the predicted gap: what ``profiles/ties.yaml`` stores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.questions.accuracy.prediction import Pair
from planner.ties import Ties

NEAR = 0.1
"""Pairs count when the faster of the two is predicted within this of its sweep's fastest: what a search's best plans are."""
STEPS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)
"""Predicted gaps, as ln(slower / faster), at which the shares are stored."""


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """Two measured layouts of one job."""

    source: str
    sweep: Hashable
    gap: float
    """Predicted ln(slower / faster), 0 or above."""
    right: bool
    """The one predicted to be faster was."""


def ordered(pairs: Sequence[Pair]) -> list[Ordered]:
    """Every two measured layouts of one job of one source whose faster is predicted near the fastest of the job.

    One job: same source, trainer, hardware, number of GPUs, workload. Runs that their source calls broken are left
    out.
    """
    jobs: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        run = pair.run
        if run.workload is None or run.cluster is None or run.trainer is None or run.layout is None:
            continue
        if pair.time_error is None or not run.representative:
            continue
        work, cluster = run.workload, run.cluster
        shape = (work.model.name, work.model.num_layers, work.model.num_kv_heads, work.lora_rank)
        job = (work.sequence_length, work.global_batch_size, work.precision, work.optimizer)
        jobs[(run.source, run.family, run.trainer.name, cluster.hardware.name, cluster.num_gpus, *shape, *job)].append(
            pair
        )
    found = []
    for key, members in jobs.items():
        predicted = np.log([pair.predicted.step_time or np.nan for pair in members])
        measured = np.log([pair.run.measured.step_time or np.nan for pair in members])
        fastest = float(predicted.min())
        for i, one in enumerate(members):
            for j in range(i):
                if one.run.layout == members[j].run.layout or min(predicted[i], predicted[j]) > fastest + NEAR:
                    continue
                gap = float(predicted[i] - predicted[j])
                right = gap * float(measured[i] - measured[j]) > 0
                found.append(Ordered(source=one.run.source, sweep=key, gap=abs(gap), right=right))
    return found


def build(found: Sequence[Ordered], date: str) -> Ties:
    """Isotonic regression of 'ordered rightly' on the predicted gap, read off at STEPS.

    Every source has the same weight, in it every job, in that every pair: what a user runs is another source. The share
    is bounded below by a coin: below that the few closest pairs say nothing.
    """
    per_sweep = Counter(one.sweep for one in found)
    sweeps: dict[str, set[Hashable]] = defaultdict(set)
    for one in found:
        sweeps[one.source].add(one.sweep)
    gaps, place = np.unique([one.gap for one in found], return_inverse=True)
    each = np.array([1.0 / per_sweep[one.sweep] / len(sweeps[one.source]) for one in found])
    right = np.array([float(one.right) for one in found])
    weights: Floats = np.bincount(place, weights=each).astype(float)
    fitted = isotonic(np.bincount(place, weights=each * right) / weights, weights)
    last = [max(int(np.searchsorted(gaps, step, side="right")) - 1, 0) for step in STEPS]
    at = [float(np.clip(fitted[row], 0.5, 1.0)) for row in last]
    return Ties(
        gaps=STEPS, right=tuple(at), pairs=len(found), sweeps=len(per_sweep), sources=len(sweeps), date=date,
    )  # fmt: skip


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The never falling column nearest to ``values`` in weighted squares: pool adjacent violators. [Barlow 1972]"""
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append([float(value), float(weight), 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, weight, length = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += length
    return np.concatenate([np.full(int(length), mean) for mean, _, length in blocks])


def to_dict(ties: Ties) -> dict[str, Any]:
    """Plain data in the form of ``profiles/ties.yaml``."""
    right = {gap: round(share, 3) for gap, share in zip(ties.gaps, ties.right, strict=True)}
    return {
        "right": right, "pairs": ties.pairs, "sweeps": ties.sweeps, "sources": ties.sources, "date": ties.date,
    }  # fmt: skip
