"""Local updates: sites that step alone and average their weights now and then (DiLoCo, streaming DiLoCo, local SGD), priced."""

from __future__ import annotations

from dataclasses import replace

from planner.cluster_file import Link
from planner.errors import PlannerError
from planner.mixed import sites as law
from planner.mixed.mixed_estimate import MixedEstimate, estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Outer
from planner.mixed.wide_links import best_ring, ring_all_reduce_time
from planner.record import record

NOT_WHOLE = "local updates need a whole replica in each of two sites; here pipelines span the sites, or one site holds all"
OVERLAP = 5
"""Steps that the average of a fragment is spread over at the most. [Douillard et al. 2025: tau = 5]"""


@record
class LocalUpdate:
    """Sites that step alone and average now and then."""

    method: str
    every: int
    bits: int
    average: float
    """Seconds of one average of all parameters."""
    utilisation: float
    """Share of time in which GPUs train."""
    step: float
    """Seconds of an inner step, its part of the average included."""
    bytes_per_step: float
    """That leave each site, mean over steps."""
    usd_per_step: float


def price_layout(job: MixedJob, layout: MixedLayout) -> MixedEstimate:
    """Price a mixed layout, with its local updates where it has some.

    A step then takes t / util: that of the slowest site, priced alone, and its part of the averages, which stands under
    data_communication. Raises PlannerError where a site holds no whole replica.
    """
    if layout.outer is None:
        return estimate_mixed(job, layout)
    places = alone(job, layout)
    if len(places) < 2:
        raise PlannerError(NOT_WHOLE)
    priced = {site: _of_site(job, layout, site) for site in places}
    slowest = max(priced.values(), key=lambda one: one.step_time)
    outer = local_update(job, layout.outer, places, best_ring(job.cluster, places, nodes_between(job, places)), slowest.step_time)
    waiting = {site: iter(one.pipelines) for site, one in priced.items()}
    return replace(
        slowest, pipelines=tuple(next(waiting[site_of(job, one.stages[0].kind)]) for one in layout.pipelines),
        time={**slowest.time, "data_communication": slowest.time["data_communication"] + outer.step - slowest.step_time},
        tokens=sum(one.tokens for one in priced.values()), peak_flops=sum(one.peak_flops for one in priced.values()),
    )  # fmt: skip


def _inside(job: MixedJob, layout: MixedLayout, site: str) -> MixedLayout:
    """The pipelines of one site."""
    own = tuple(one for one in layout.pipelines if site_of(job, one.stages[0].kind) == site)
    return replace(layout, pipelines=own, outer=None)


def _of_site(job: MixedJob, layout: MixedLayout, site: str) -> MixedEstimate:
    """The steps of one site, with its own pipelines, kinds and part of the batch only."""
    inside = _inside(job, layout, site)
    workload = replace(job.workload, global_batch_size=inside.global_batch_size)
    return estimate_mixed(replace(job.only(*kinds_of(job, site)), workload=workload), inside)


def loss_scales(job: MixedJob, layout: MixedLayout) -> tuple[float, ...]:
    """What each pipeline multiplies its mean loss with: with local updates gradients are averaged inside its site alone."""
    if layout.outer is None:
        return layout.loss_scales()
    found = dict[str, list[float]]()
    for site in alone(job, layout):
        found[site] = list(_inside(job, layout, site).loss_scales())
    return tuple(found[site_of(job, one.stages[0].kind)].pop(0) for one in layout.pipelines)


def inner_step(job: MixedJob, layout: MixedLayout) -> float:
    """Seconds of a step in which every site works alone: that of the slowest site."""
    return max(_of_site(job, layout, site).step_time for site in alone(job, layout))


def local_update(job: MixedJob, outer: Outer, sites: tuple[str, ...], ring: tuple[Link, ...], step: float) -> LocalUpdate:
    """Utilisation, traffic and price of local updates between some sites; ``step``: seconds of an inner step of the slowest."""
    size, nodes = parameters_of(job) * outer.bits / 8.0, nodes_between(job, sites)
    bandwidth = min(one.speed(nodes) for one in ring)
    streams = outer.method == "streaming_diloco"
    fragments = outer.fragments if streams else 1
    latency = fragments * max(one.latency for one in ring)
    average = float(ring_all_reduce_time(size, len(sites), bandwidth, latency))
    if streams:
        used = float(law.streaming_utilisation(outer.every, step, average, fragments, overlapped_steps(outer)))
    else:
        used = float(law.utilisation(outer.every, step, average))
    sent = law.data_bytes(parameters_of(job), len(sites), outer.bits / 8.0) / outer.every
    return LocalUpdate(
        method=outer.method, every=outer.every, bits=outer.bits, average=average, utilisation=used, step=step / used,
        bytes_per_step=sent, usd_per_step=len(sites) * sent * max(one.price for one in ring),
    )  # fmt: skip


def overlapped_steps(outer: Outer) -> int:
    """Steps that pass while the average of a fragment is under way: it must end before the next begins."""
    return min(OVERLAP, outer.every // outer.fragments - 1) if outer.method == "streaming_diloco" else 0


def kinds_of(job: MixedJob, site: str) -> list[str]:
    """Kinds that stand in a site."""
    return [one.kind for one in job.cluster.nodes if one.site == site]


def site_of(job: MixedJob, kind: str) -> str:
    """The site in which a kind stands."""
    return job.cluster.node_kind(kind).site


def parameters_of(job: MixedJob) -> float:
    """Parameters of the model."""
    layer, first, last = law.layer_parameters(job.workload.model)
    model = job.workload.model
    return layer * model.num_layers + first + (0.0 if model.tied_embeddings else last)


def nodes_between(job: MixedJob, sites: tuple[str, ...]) -> int:
    """Nodes that send at the same time: those of the smallest of some sites."""
    return min(sum(one.count for one in job.cluster.nodes if one.site == site) for site in sites)


def alone(job: MixedJob, layout: MixedLayout) -> tuple[str, ...]:
    """Sites that may step alone: all that are used, if every pipeline stays in one of them; else none."""
    found = list[str]()
    for pipeline in layout.pipelines:
        places = {site_of(job, stage.kind) for stage in pipeline.stages}
        if len(places) > 1:
            return ()
        found += places
    return tuple(site for site in job.cluster.sites if site in found)
