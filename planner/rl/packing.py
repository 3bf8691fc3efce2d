"""Packing of answers into sequences of one capacity, by replicas and optimizer steps: how many microbatches an update has.

First-fit decreasing, as frameworks do it: answers longest first, each into the first sequence with room.  [Johnson 1974]
Without packing every microbatch is as long as its longest answer.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.record import record
from planner.rl.rl_workload import RlWorkload

SAMPLED = 256
"""Answers of a replica that are packed; more pack as these do."""


@record
class Packed:
    """The microbatches of one optimizer step on one replica."""

    microbatches: int
    capacity: float
    """Tokens that a microbatch may hold."""
    tokens: float
    """Tokens of a microbatch, mean."""
    longest: float
    """Tokens of the fullest."""
    document: float
    """Tokens of a sequence as attention sees it: E[l^2] / E[l]."""
    sequences: int = 1
    """Sequences of a microbatch that are padded to one length; 1 where they are packed."""


@lru_cache(maxsize=4096)
def _packed(workload: RlWorkload, answers: int, capacity: float) -> Packed:
    number = min(answers, SAMPLED)
    lengths = np.minimum(workload.context_tokens + workload.answers.sample(number), capacity)[::-1]
    rooms = np.empty(0)
    for length in lengths:
        fits = np.flatnonzero(rooms >= length)
        if len(fits):
            rooms[fits[0]] -= length
        else:
            rooms = np.append(rooms, capacity - length)
    total, many = float(lengths.sum()), answers / number
    bins = max(round(len(rooms) * many), 1)
    return Packed(
        microbatches=bins,
        capacity=capacity,
        tokens=total * many / bins,
        longest=float(capacity - rooms.min()),
        document=float((lengths**2).sum() / total),
    )


def packed(workload: RlWorkload, replicas: int, capacity: float) -> Packed:
    """The microbatches of ``replicas`` data-parallel replicas whose sequences hold ``capacity`` tokens: on the fullest."""
    batch = workload.trained * workload.epochs / workload.updates
    return _packed(workload, max(int(np.ceil(batch / replicas)), 1), capacity)


def padded(workload: RlWorkload, replicas: int, micro: int) -> Packed:
    """The same without packing: ``micro`` sequences side by side, padded to the longest of them."""
    batch = workload.trained * workload.epochs / workload.updates
    each = max(int(np.ceil(batch / replicas)), 1)
    length = workload.context_tokens + float(workload.answers.longest_of(min(micro, each)))
    mean = workload.context_tokens + workload.answers.mean
    longest = workload.context_tokens + workload.answers.most
    return Packed(
        microbatches=-(-each // micro), capacity=length * micro, tokens=mean * micro, longest=longest, document=length,
        sequences=micro,
    )  # fmt: skip
