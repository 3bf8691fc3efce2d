"""Were the times of a source measured? How far series of its runs scatter around a straight line.

A step of m microbatches takes t(m) = a + b m seconds where nothing else changes: the slowest pipeline stage works m times, and
what fills, drains and ends the step does not depend on m. Times that were measured scatter around that line, as clocks,
networks and hosts do; times that lie on it to the last printed digit were computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.questions.accuracy.prediction import grouped
from planner.runs import Run

FEWEST = 3
"""Numbers of microbatches that a series needs: two always lie on a line."""


@dataclass(frozen=True, kw_only=True)
class Straight:
    """The series of one source."""

    source: str
    computed: bool
    """The source is listed as the output of a simulator."""
    series: int
    """Series of runs that differ in the number of microbatches alone."""
    median: float
    """Scatter around the line, relative to the time; median over the series."""
    largest: float
    """The same of the series that scatters most."""


def straightness(runs: Sequence[Run]) -> tuple[Straight, ...]:
    """Every source that has such series, in the order of their names."""
    found = []
    for source, members in grouped(runs, lambda run: run.source).items():
        scatters = [scatter_of(points) for points in series_of(members)]
        if scatters:
            found.append(
                Straight(
                    source=source, computed=members[0].computed, series=len(scatters),
                    median=float(np.median(scatters)), largest=float(np.max(scatters)),
                )
            )  # fmt: skip
    return tuple(found)


def series_of(runs: Sequence[Run]) -> list[dict[int, float]]:
    """Microbatches and seconds of runs that are alike in everything else; of equal runs the median."""
    times: dict[Hashable, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.workload is None or run.layout is None or run.cluster is None or run.measured.step_time is None:
            continue
        alike = (
            str(replace(run.workload, global_batch_size=1)), str(run.layout.replace(num_microbatches=1)),
            id(run.trainer), id(run.cluster.hardware), run.family,
        )  # fmt: skip
        times[alike][int(run.layout.num_microbatches)].append(run.measured.step_time)
    return [{m: float(np.median(seen)) for m, seen in one.items()} for one in times.values() if len(one) >= FEWEST]


def scatter_of(points: dict[int, float]) -> float:
    """Root of the mean squared distance from the line with the least of it, relative to the time; n - 2 degrees of freedom."""
    m = np.array(sorted(points), dtype=float)
    seconds = np.array([points[int(x)] for x in m])
    terms = np.stack([np.ones_like(m), m], axis=1) / seconds[:, None]
    line, *_ = np.linalg.lstsq(terms, np.ones_like(m), rcond=None)
    return float(np.sqrt(np.sum((terms @ line - 1.0) ** 2) / (len(m) - 2)))
