"""Long links: what TCP connections reach over a round-trip time, and how long transfers and collectives between sites take.

One TCP connection has at most a window of bytes under way per round-trip time, so it reaches min(cap, window / RTT); k connections
reach k times that, up to the link. Loss is left out: on a clean path the window binds first. [Mathis et al., "The Macroscopic
Behavior of the TCP Congestion Avoidance Algorithm", CCR 1997, sec. 2; RFC 7323 sec. 1.1 for windows above 64 KiB]
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

from planner.cluster_file import ClusterFile, Link
from planner.errors import PlannerError

MOST_RINGS = 7
"""Sites up to which every order of a ring is tried."""


def path_bandwidth(cap: Any, flows: Any, window: Any, round_trip: Any) -> Any:
    """Bytes/s of ``flows`` connections together: min(cap, flows * window / RTT), the cap in bytes/s being that of the whole path.

    Written as 1 / max(1 / cap, RTT / (flows window)), which has no division by a round-trip time of 0.
    """
    import numpy as np

    return 1.0 / np.maximum(1.0 / cap, np.asarray(round_trip) / (flows * window))


def transfer_time(size: Any, link: Link, nodes: int = 1) -> Any:
    """Seconds until the last byte of a message has arrived: latency + S / bandwidth."""
    return link.latency + size / link.speed(nodes)


def ring_all_reduce_time(size: Any, ranks: int, bandwidth: float, latency: float) -> Any:
    """Seconds of a ring all-reduce of S bytes: 2 (n-1) steps of S / n bytes over the slowest hop, each with its latency.

    2 (n-1)/n S / B + 2 (n-1) alpha. [Thakur, Rabenseifner, Gropp 2005, sec. 4.4; Patarasuk and Yuan 2009]
    """
    return 2.0 * (ranks - 1) / ranks * size / bandwidth + 2.0 * (ranks - 1) * latency


def flat_all_reduce_time(size: Any, ranks: int, links: tuple[Link, ...]) -> Any:
    """Seconds of one ring through all ranks of all sites, whose neighbours stand in one site but for ``links``.

    2 (n-1)/n (S / min B + sum alpha): every link carries all chunks but one twice, and a chunk on its 2 (n-1) hops passes each link
    2 (n-1)/n times; hops inside a site take no time beside them.
    """
    slowest = min(one.speed() for one in links)
    return 2.0 * (ranks - 1) / ranks * (size / slowest + sum(one.latency for one in links))


def site_link(cluster: ClusterFile, a: str, b: str) -> Link:
    """The link between two sites: the file's own, else that of their kinds. Raises PlannerError where it gives none."""
    found = next((one for one in cluster.links if set(one.between) == {a, b}), None)
    if found is None:
        ends = [[one.kind for one in cluster.nodes if one.site == site] for site in (a, b)]
        between = [link for x in ends[0] for y in ends[1] if (link := cluster.link(x, y))]
        found = min(between, key=lambda one: one.bandwidth, default=None)
    if found is None:
        raise PlannerError(f"the cluster file gives no link between {a} and {b}; add one to links, with its bandwidth and latency")
    return found


def best_ring(cluster: ClusterFile, sites: tuple[str, ...], nodes: int = 1) -> tuple[Link, ...]:
    """The links of the ring over some sites whose slowest link is fastest, nearest first among equals; two sites have one link.

    Every order is tried up to MOST_RINGS sites; above that sites stay in the order of the file.
    """
    if len(sites) < 2:
        return ()
    if len(sites) == 2:
        return (site_link(cluster, *sites),)
    orders = permutations(sites[1:]) if len(sites) <= MOST_RINGS else [sites[1:]]

    def links(order: tuple[str, ...]) -> tuple[Link, ...]:
        around = (sites[0], *order)
        return tuple(site_link(cluster, a, b) for a, b in zip(around, (*around[1:], around[0]), strict=True))

    def slowest(ring: tuple[Link, ...]) -> tuple[float, float]:
        return -min(one.speed(nodes) for one in ring), max(one.latency for one in ring)

    return min((links(order) for order in orders), key=slowest)
