"""Collectives to seconds: which link they use, and what stays exposed when they run beside computation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.compute import Work
from planner.cost.operators import Collective, Number
from planner.trainer import Trainer

OVERLAP_SLOWDOWN = 1.2
"""Time of computation beside communication over its time alone, and the other way round.

Communication kernels take multiprocessors and memory bandwidth. Measured coefficients lie between 1.1 and 1.3
[Galvatron, overlap coefficient of its profiler]; the middle is taken until a profile carries its own.
"""


def exposed(comm: Number, window: Number, first: Number = 0.0) -> Floats:
    """Seconds that overlapped communication adds to a window of computation.

    max(comm - window, first) + (sigma - 1) min(comm, window): what does not fit in the window (at least the piece that
    nothing can hide), and how much the computation is slowed while both run. Never more than comm itself.
    """
    comm, window = np.asarray(comm, dtype=float), np.asarray(window, dtype=float)
    added = np.maximum(comm - window, first) + (OVERLAP_SLOWDOWN - 1.0) * np.minimum(comm, window)
    return np.minimum(added, comm)


def collective_seconds(collective: Collective, cluster: Cluster) -> Floats:
    """Seconds of all its repetitions, running alone; 0 in a group of one."""
    n = np.asarray(collective.n, dtype=float)
    if np.all(n <= 1):
        return np.zeros(np.broadcast_shapes(n.shape, np.shape(collective.size)))
    if collective.op == "send_recv":
        return hop_seconds(cluster, collective.size, n, collective.stride) * collective.count
    time = cluster.collective_time(collective.op, collective.size, n, collective.stride)
    return np.where(n > 1, time * collective.count, 0.0)


def hop_seconds(cluster: Cluster, size: Number, n: Number, stride: Number) -> Floats:
    """Seconds of one hop between neighbours of a ring or chain of ``n`` ranks: the slowest hop, 0 for n = 1.

    All hops run in step, so one that leaves the scale-up domain sets the pace; it has one NIC, its neighbours the others.
    """
    n = np.asarray(n, dtype=float)
    distance = np.where(n * stride > cluster.domain, cluster.domain, stride)
    return np.where(n > 1, cluster.collective_time("send_recv", size, np.minimum(n, 2.0), distance), 0.0)


def exposed_seconds(
    collective: Collective, seconds: Floats, trainer: Trainer, work: Mapping[str, Work], pass_seconds: Number
) -> Floats:
    """What one layer's collective adds to the time of its pass: all of it, unless the trainer hides it.

    ``work`` are the operators of the layer by name, ``pass_seconds`` the computation of the whole pass: a collective
    beside 'layer' has half of it to hide behind.
    """
    if collective.overlap not in trainer.overlap or collective.beside == "":
        return seconds
    if collective.beside == "layer":
        return exposed(seconds, 0.5 * np.asarray(pass_seconds))
    name, pass_ = collective.beside.split(".")
    window = getattr(work[name], pass_) if name in work else 0.0
    first = seconds / np.maximum(np.asarray(collective.n, dtype=float), 1.0) if collective.chunked else 0.0
    if collective.group == "cp":  # the first block of keys is local, the last hop has nothing behind it to hide
        n = np.maximum(np.asarray(collective.n, dtype=float), 1.0)
        window = window * (n - 1.0) / n
    return exposed(seconds, window, first)
