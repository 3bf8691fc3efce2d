"""How many nodes are being repaired, and how many spares cover that: Poisson."""

from __future__ import annotations

import math

import numpy as np

from planner.arrays import Floats
from planner.errors import PlannerError

TAIL = 1e-9
"""Numbers of nodes in repair that are less likely are left out."""
MOST = 100_000


def in_repair(nodes: int, mtbf: float, repair: float) -> Floats:
    """P(N = n) of nodes in repair, n = 0, 1, ...: Poisson with mean a = nodes x repair / M_node, whatever the distribution of the
    repair times (M/G/infinity, Palm's theorem). At most all nodes: the tail counts as that."""
    mean = nodes * repair / mtbf
    if min(nodes, mean) > MOST:
        raise PlannerError(f"{min(nodes, mean):,.0f} nodes would be in repair at a time; check --mtbf and --repair")
    most = min(nodes, int(mean + 12.0 * math.sqrt(mean) + 12.0))
    n = np.arange(most + 1)
    logs = n * math.log(mean) - mean - np.array([math.lgamma(one + 1.0) for one in n]) if mean > 0 else np.where(n, -np.inf, 0.0)
    found = np.exp(logs)
    found[-1] += max(1.0 - float(found.sum()), 0.0)
    return np.asarray(found)


def short_of(probabilities: Floats, spares: int) -> Floats:
    """P(j nodes are missing), j = 0, 1, ..., when ``spares`` nodes stand in for those in repair."""
    covered = min(spares, len(probabilities) - 1)
    return np.concatenate([[probabilities[: covered + 1].sum()], probabilities[covered + 1 :]])


def spares_for(nodes: int, mtbf: float, repair: float, shortage: float) -> int:
    """Smallest k with P(N > k) < ``shortage``, N failures in the time of a repair. Raises PlannerError."""
    if not 0.0 < shortage < 1.0:
        raise PlannerError(f"--shortage is {shortage:g}; it must be a chance between 0 and 1, like 0.01")
    tail = 1.0 - np.cumsum(in_repair(nodes, mtbf, repair))
    return int(np.argmax(tail < shortage)) if np.any(tail < shortage) else nodes
