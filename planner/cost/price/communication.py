"""Collectives to seconds: which link they use, and what stays exposed when they overlap with computation."""

from collections.abc import Mapping

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.layer.expert_layer import distinct_share
from planner.cost.layer.operators import Collective, Number
from planner.cost.price.compute import Work
from planner.cost.price.deduplicate import distinct_values, stacked
from planner.hardware import ASSUMED, Slowdown
from planner.trainer import Trainer

DISPATCH_RATES = (0.66, 0.87, 0.68)
"""Rate of kernels that send a token once per place, over that of NVLink, of the network, and of the network between two
nodes: bytes that leave a GPU.

NVLink: HybridEP on GB200, bf16, 32 multiprocessors, mean of dispatch and combine on 8, 16, 24, 32, 36 GPUs 0.73, 0.72, 0.70,
0.67, 0.66, on B200 0.68; DeepEP on H100 0.62, H800 0.69. Network: HybridEP on H100, 32 and 64 GPUs 0.86 and 0.87, DeepEP on
H800 0.87 and 0.89, on H100 0.90; two nodes only reach 0.66 to 0.70.  [DeepEP, README of main and of the branch hybrid-ep,
2026; aiconfigurator tables of DeepEP on H100: combine of 4096 tokens of 7168, top 8 of 256, 973 us on 8 GPUs, 1777 on 16,
3522 on 32; this gives 948, 1761, 3684]
"""
DISPATCH_LATENCY = 40e-6
"""Seconds of such a kernel for few tokens: 39 us dispatch, 68 us combine on 8 H100.  [aiconfigurator, DeepEP, 64 tokens]"""


def exposed(comm: Number, window: Number, first: Number = 0.0, slowdown: Slowdown = ASSUMED) -> Floats:
    """Seconds that overlapped communication adds to a window of computation.

    While both run, computation advances at 1 / s_c of its speed and communication at 1 / s_m. Of the communication
    h = min(comm, window s_c / s_m) overlaps with the computation, in s_m h seconds, in which s_m h / s_c of the computation
    is done: max(comm - window s_c / s_m, first) + s_m (1 - 1 / s_c) h. What does not fit in the window counts whole (at
    least the piece that nothing can hide). With equal slowdowns s: max(comm - window, first) + (s - 1) min(comm, window).
    Never more than comm itself.
    """
    compute, communication = np.asarray(slowdown.compute), np.asarray(slowdown.communication)
    comm = np.asarray(comm, dtype=float)
    reach = np.asarray(window, dtype=float) * (compute / communication)
    slowed = communication - communication / compute
    added = np.maximum(comm - reach, first) + slowed * np.minimum(comm, reach)
    return np.minimum(added, comm)


def slowdown_of(cluster: Cluster, n: Number, stride: Number) -> Slowdown:
    """What computation and the collectives of groups of ``n`` ranks, ``stride`` apart, cost each other.

    As the profile has measured it, inside a domain or for groups that leave it; ASSUMED where it has not.
    """
    measured = cluster.hardware.overlap
    inside, across = (measured[link].slowdown if link in measured else ASSUMED for link in ("inside", "across"))
    if inside == across:
        return inside
    fits = cluster.ranks_per_domain(n, stride) >= np.asarray(n)
    return Slowdown(
        compute=np.where(fits, inside.compute, across.compute),
        communication=np.where(fits, inside.communication, across.communication),
    )


def collective_seconds(collectives: list[Collective], cluster: Cluster, rows: int) -> list[Floats]:
    """Seconds of all repetitions of each, running alone, columns of ``rows``; 0 in a group of one.

    Those of one operation are priced together.
    """
    found: dict[int, Floats] = {}
    together: dict[str, list[int]] = {}
    for number, one in enumerate(collectives):
        if np.all(np.asarray(one.n) <= 1):
            found[number] = np.zeros(rows)
        elif one.op == "send_recv":
            found[number] = np.broadcast_to(hop_seconds(cluster, one.size, one.n, one.stride) * one.count, (rows,))
        elif one.copies:
            found[number] = np.where(np.asarray(one.n) > 1, dispatch_seconds(one, cluster) * one.count, 0.0)
        else:
            together.setdefault(one.op, []).append(number)
    for op, members in together.items():
        sides = [[getattr(collectives[number], name) for number in members] for name in ("size", "n", "stride", "count")]
        some, which = distinct_values([one for side in sides for one in side], rows)
        size, n, stride, count = (stacked(side, rows)[:, some] for side in sides)
        times = np.where(n > 1, cluster.collective_time(op, size, n, stride) * count, 0.0)[:, which]
        found |= dict(zip(members, times, strict=True))
    return [found[number] for number in range(len(collectives))]


def neighbours_share(places: Number, copies: float, experts: float) -> Floats:
    """Distinct places among ``copies`` neighbouring experts, per copy, when tokens take them in turn.

    Token i takes experts i K to i K + K - 1. A place holds g = E / P of them, so a run of K covers 1 + (K - gcd(K, g)) / g
    places on average.  [NeMo AutoModel, FakeBalancedGate]
    """
    each = np.maximum(np.rint(experts / np.maximum(np.asarray(places, dtype=float), 1.0)), 1.0)
    common = np.gcd(each.astype(np.int64), int(copies))
    return (1.0 + (copies - common) / each) / copies


def dispatch_seconds(collective: Collective, cluster: Cluster) -> Floats:
    """Seconds of an expert all-to-all that sends a token once to every node and GPU that needs it.

    Between N nodes the network carries a share N (1 - (1 - 1/N)^K) / K of the copies; inside a domain NVLink carries the
    copies to distinct GPUs, n (1 - (1 - 1/n)^K) of them, at the same time; what stays at home is not carried: (N - 1)/N
    and (n - 1)/n. Combining sums on the way back likewise. Rates: DISPATCH_RATES.
    """
    n, size, stride = (np.asarray(x, dtype=float) for x in (collective.n, collective.size, collective.stride))
    hardware = cluster.hardware

    def share(places: Number) -> Floats:
        if collective.neighbours:
            return neighbours_share(places, collective.copies, collective.neighbours)
        return distinct_share(places, collective.copies)

    inside = cluster.ranks_per_domain(n, stride)
    nodes = np.maximum(n / inside, 1.0)
    link = min(DISPATCH_RATES[0] * hardware.scale_up_bandwidth, collective.bandwidth)
    local = size * share(n) * (1.0 - 1.0 / n) / np.where(inside > 1.0, link, np.inf)
    network = hardware.network_bandwidth * np.where(nodes == 2.0, DISPATCH_RATES[2], DISPATCH_RATES[1])
    remote = size * share(nodes) * (1.0 - 1.0 / nodes) / network
    return np.maximum(local, remote) + DISPATCH_LATENCY


def hop_seconds(cluster: Cluster, size: Number, n: Number, stride: Number) -> Floats:
    """Seconds of one hop between neighbours of a ring or chain of ``n`` ranks: the slowest hop, 0 for n = 1.

    All hops run in step, so one that leaves the scale-up domain sets the pace; it has one NIC, its neighbours the others.
    """
    n = np.asarray(n, dtype=float)
    distance = np.where(n * stride > cluster.domain, cluster.domain, stride)
    return np.where(n > 1, cluster.collective_time("send_recv", size, np.minimum(n, 2.0), distance), 0.0)


def exposed_seconds(
    collective: Collective, seconds: Floats, trainer: Trainer, work: Mapping[str, Work], pass_seconds: Number,
    compute_units: float = np.inf, slowdown: Slowdown = ASSUMED,
) -> Floats:  # fmt: skip
    """What one layer's collective adds to the time of its pass: all of it, unless the trainer hides it.

    ``work`` are the operators of the layer by name, ``pass_seconds`` the computation of the whole pass: a collective
    that overlaps with 'layer' has half of it to hide behind. A kernel that says how many multiprocessors it takes of U leaves the
    computation at the same time (U - units) / U of its speed at most; ``slowdown`` is what every other collective leaves it.
    """
    if collective.overlap not in trainer.traffic.overlap or collective.overlaps_with == "":
        return seconds
    if collective.overlaps_with == "layer":
        left = max(1.0 - collective.units / compute_units, 0.1)
        shared = Slowdown(
            compute=np.maximum(slowdown.compute, 1.0 / left),
            communication=np.maximum(slowdown.communication, 1.0 / left),
        )
        return exposed(seconds, 0.5 * np.asarray(pass_seconds), slowdown=shared)
    name, pass_ = collective.overlaps_with.split(".")
    window = getattr(work[name], pass_) if name in work else 0.0
    first = seconds / np.maximum(np.asarray(collective.n, dtype=float), 1.0) if collective.chunked else 0.0
    if collective.group == "cp":  # the first block of keys is local, the last hop has nothing behind it to hide
        n = np.maximum(np.asarray(collective.n, dtype=float), 1.0)
        window = window * (n - 1.0) / n
    return exposed(seconds, window, first, slowdown)
