"""When to save a checkpoint: intervals and the expected wall time, for failures that come as a Poisson process.

Symbols: M mean time between failures of the job, tau training between two saves, delta stall of training by a save, s time from
the end of the stall until the checkpoint is whole on the storage (0: synchronous save), R restart after a failure. All in seconds;
scalars or columns of numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.arrays import Floats
from planner.cluster_file import Storage
from planner.errors import PlannerError
from planner.record import record

NEWTON_STEPS = 60
"""The derivative vanishes at 0: the distance to a small root is halved by each step at first."""
SERIES = 1e-10
"""Stall over time between failures below which the interval is that of the series: Newton's function is rounding there."""


@record
class SaveTimes:
    """What one save and one load of a checkpoint take."""

    stall: float
    """Seconds that training stands still: the copy to host memory, or the whole save where it is synchronous."""
    behind: float
    """Seconds from then until the checkpoint is whole on the storage, while training goes on; 0 = synchronous."""
    load: float
    """Seconds to read it back."""
    size: float = 0.0
    """Bytes of the checkpoint."""


def young(stall: npt.ArrayLike, mtbf: npt.ArrayLike) -> Floats:
    """tau = sqrt(2 delta M).  [Young 1974, CACM 17(9), equation 5; first order, for delta << M]"""
    return np.sqrt(2.0 * np.asarray(stall, dtype=float) * np.asarray(mtbf, dtype=float))


def daly(stall: npt.ArrayLike, mtbf: npt.ArrayLike) -> Floats:
    """The interval that minimises ``wall_over_work`` exactly, tau = M (1 + W(-e^{-delta/M - 1})), W Lambert's function.

    From d/dtau (e^{(tau + delta)/M} - 1) / tau = 0: with u = tau/M and d = delta/M, u = 1 - e^{-(u + d)}. Newton from u = 1
    falls to the root, as the function is convex. Neither R nor s moves it.  [Daly 2006, FGCS 22(3), section 4, equation 20 ff.]

    Where d is lost beside 1 (below 1e-10), the first terms of its series: u = p - p^2/3, p = sqrt(2 d).
    """
    d = np.asarray(stall, dtype=float) / np.asarray(mtbf, dtype=float)
    u = np.ones_like(d)
    for _ in range(NEWTON_STEPS):
        kept = np.exp(-(u + d))
        u = np.maximum(u - (kept - 1.0 + u) / np.maximum(1.0 - kept, 1e-300), 0.0)
    near = np.sqrt(2.0 * d)
    return np.where(d < SERIES, near - near * near / 3.0, u) * np.asarray(mtbf, dtype=float)


def wall_over_work(
    interval: npt.ArrayLike, *, stall: npt.ArrayLike, mtbf: npt.ArrayLike, restart: npt.ArrayLike, behind: npt.ArrayLike = 0.0
) -> Floats:
    """T_wall / T_work = (M / tau) e^{(R + s)/M} (e^{(tau + delta)/M} - 1); infinite where that is beyond what a number holds.

    Synchronous (s = 0) this is Daly's equation 20. Asynchronous: a checkpoint counts from s after its stall. Just after a restart
    the next one is whole after C + s without a failure, C = tau + delta: M e^{R/M} (e^{(C + s)/M} - 1) expected seconds. From then
    on each needs C without a failure, and a failure costs what is lost, R, and the former: with p = e^{-C/M}
        E = (1 - p) M + (1 - p) (M (e^{R/M} - 1) + M e^{R/M} (e^{(C + s)/M} - 1)) = M e^{(R + s)/M} (e^{C/M} - 1).
    """
    tau, m = np.asarray(interval, dtype=float), np.asarray(mtbf, dtype=float)
    waits = (np.asarray(restart, dtype=float) + np.asarray(behind, dtype=float)) / m
    with np.errstate(over="ignore"):
        return np.asarray(m / tau * np.exp(waits) * np.expm1((tau + np.asarray(stall, dtype=float)) / m))


def best_interval(times: SaveTimes, mtbf: float, step_time: float = 0.0) -> float:
    """Seconds of training between two saves: ``daly``, at least until the last save is whole, in whole steps where their time is
    given (the better neighbour). Raises PlannerError."""
    if not (mtbf > 0 and np.isfinite(mtbf)):
        raise PlannerError(f"the mean time between failures is {mtbf:g} s; it must be above 0")
    least = max(times.behind, step_time)
    tau = max(float(daly(times.stall, mtbf)), least, 1e-3)
    if step_time <= 0:
        return tau
    steps = np.maximum(np.array([np.floor(tau / step_time), np.ceil(tau / step_time)]), np.ceil(times.behind / step_time - 1e-9))
    candidates = np.maximum(steps, 1.0) * step_time
    costs = wall_over_work(candidates, stall=times.stall, mtbf=mtbf, restart=0.0, behind=times.behind)
    return float(candidates[int(np.argmin(costs))])


def lost_by_failure(interval: float, times: SaveTimes, mtbf: float, restart: float) -> float:
    """Expected seconds that one failure costs: work done again, and the restart.

    A failure falls into a cycle of C = tau + delta. Its time in the cycle has the density of an exponential that is cut at C, whose
    mean is M - C / (e^{C/M} - 1) (C/2 for C << M); what was trained since the last whole checkpoint is that and s more.
    """
    cycle = interval + times.stall
    ratio = cycle / mtbf
    mean = mtbf - cycle / np.expm1(ratio) if ratio > 1e-6 else cycle / 2.0
    return float(mean + times.behind + restart)


def save_times(
    size: float, storage: Storage, *, of_node: npt.ArrayLike, stall: float, asynchronous: bool = True
) -> SaveTimes:
    """What a checkpoint of ``size`` bytes takes, of which nodes write ``of_node`` each.

    save = latency + max(size / write, max_node bytes / per_node). An asynchronous save stalls training for ``stall`` seconds, the
    copy of the largest part of a rank to host memory.
    [torch.distributed.checkpoint, state_dict_saver.py, async_save: staging to CPU, then the save in a thread or process]
    """
    save, load = (transfer_seconds(storage, size, of_node, rate) for rate in (storage.write, storage.read))
    return SaveTimes(
        stall=stall if asynchronous else save, behind=save if asynchronous else 0.0, load=load, size=size
    )


def transfer_seconds(storage: Storage, size: float, node_size: npt.ArrayLike, rate: float) -> float:
    """Seconds to read or write: all bytes at the ``rate`` of the storage, those of the busiest node at what a node reaches.

    latency + max(size / rate, max_node bytes / per_node)
    """
    busiest = float(np.max(node_size))
    return float(storage.latency + max(size / rate, busiest / (storage.per_node or rate)))
