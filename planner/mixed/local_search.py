"""The best layout with local updates: every site plans for itself; the batch is shared out so that all steps take as long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.errors import PlannerError
from planner.mixed.local_updates import kinds_of, price_layout
from planner.mixed.mixed_axes import MixedPins
from planner.mixed.mixed_estimate import MixedEstimate
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Outer
from planner.mixed.mixed_search import search_mixed
from planner.record import record
from planner.workload import peak_dtype

ROUNDS = 3
"""Times that the batch is shared out again by what the sites reach."""
UNITS = 32
"""Parts of the batch that are given to sites, where it is divided so finely."""


@record
class LocalFinding:
    """A layout whose sites step alone."""

    layout: MixedLayout
    sites: tuple[tuple[str, MixedEstimate], ...]
    """Each with the price of its own steps."""
    estimate: MixedEstimate
    """Of all sites together, averages included."""


def search_local(
    job: MixedJob, outer: Outer, pins: MixedPins | None = None, progress: Callable[[str], None] = lambda _: None
) -> LocalFinding:
    """The fastest layout of every site alone, joined by local updates. Raises PlannerError where a site cannot train alone.

    Shares of the batch are whole parts of it: first by peak rate, then by the samples/s that the sites reach with their share.
    """
    sites = [site for site in job.cluster.sites if kinds_of(job, site)]
    if len(sites) < 2:
        raise PlannerError("local updates are between sites, and the cluster has one; name sites of its kinds")
    pins = replace(pins or MixedPins(), equal_shares=True, equal_tp=True, equal_recompute=True)  # as a site's trainer asks for
    batch = job.workload.global_batch_size
    if batch < len(sites):
        raise PlannerError(f"a global batch of {batch} cannot be shared out over {len(sites)} sites")
    weights = [_peak(job, site) for site in sites]
    best: LocalFinding | None = None
    tried = set[tuple[int, ...]]()
    for _ in range(ROUNDS):
        shares = shared_out(batch, weights)
        if tuple(shares) in tried:
            break
        tried.add(tuple(shares))
        found, own = list[tuple[str, MixedEstimate]](), list[MixedLayout]()
        for site, share in zip(sites, shares, strict=True):
            progress(site)
            part = replace(job.only(*kinds_of(job, site)), workload=replace(job.workload, global_batch_size=share))
            some = search_mixed(part, _like(pins, own), 1)
            if not some.best:
                raise PlannerError(f"the model does not fit on {site} alone, and local updates need it whole on every site")
            own.append(some.best[0][0])
            found.append((site, some.best[0][1]))
        joined = _joined(job, outer, own, found)
        if best is None or joined.estimate.step_time < best.estimate.step_time:
            best = joined
        weights = [share / one.step_time for share, (_, one) in zip(shares, found, strict=True)]
    assert best is not None
    return best


def _peak(job: MixedJob, site: str) -> float:
    """Dense peak of a site's GPUs, FLOP/s."""
    precision = peak_dtype(job.workload.precision)
    return sum(
        job.clusters[kind].hardware.peak(precision) * job.clusters[kind].num_gpus / job.slowdown[kind]
        for kind in kinds_of(job, site)
    )  # fmt: skip


def shared_out(batch: int, weights: list[float]) -> list[int]:
    """A batch in whole parts near to some weights, at least one part each; the parts are as many as UNITS, or samples."""
    unit = next(n for n in range(max(batch // UNITS, 1), 0, -1) if batch % n == 0)
    if batch // unit < len(weights):
        unit = 1
    parts = [1] * len(weights)
    for _ in range(batch // unit - len(weights)):  # each next part to the site that would have done with it first
        ahead = min(range(len(weights)), key=lambda at: (parts[at] + 1) / weights[at])
        parts[ahead] += 1
    return [unit * one for one in parts]


def _like(pins: MixedPins, own: list[MixedLayout]) -> MixedPins:
    """The first site decides what is one for all pipelines of a layout."""
    if not own:
        return pins
    one = own[0]
    return replace(
        pins, cp=one.cp, ep=one.ep, zero=one.zero, schedule=one.schedule, vpp=one.vpp, offload_optimizer=one.offload_optimizer
    )


def _joined(job: MixedJob, outer: Outer, own: list[MixedLayout], found: list[tuple[str, MixedEstimate]]) -> LocalFinding:
    """The layouts of all sites as one."""
    pipelines = tuple(one for layout in own for one in layout.pipelines)
    layout = replace(own[0], pipelines=pipelines, outer=outer)
    return LocalFinding(layout=layout, sites=tuple(found), estimate=price_layout(job, layout))
