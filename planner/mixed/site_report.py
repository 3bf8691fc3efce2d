"""What crosses between the sites of a mixed layout: which dimension, how many bytes and dollars per step, how long it is
waited for, and what would make it less: microbatches in flight, reduction in two levels, compression, local updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from planner.cluster_file import Link
from planner.errors import PlannerError
from planner.mixed import sites as law
from planner.mixed.boundaries import Hops, boundary_bytes
from planner.mixed.local_updates import (
    NOT_WHOLE,
    LocalUpdate,
    alone,
    inner_step,
    kinds_of,
    local_update,
    nodes_between,
    parameters_of,
    site_of,
)
from planner.mixed.mixed_estimate import MixedEstimate, PipelineEstimate, estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Outer, Pipeline
from planner.mixed.wide_links import (
    best_ring,
    flat_all_reduce_time,
    ring_all_reduce_time,
    site_link,
)
from planner.record import record

EVERY, BITS = (1, 10, 50, 100, 500), (32, 16, 8, 4)
"""Intervals and widths of the table of local updates."""
WHO_REDUCES = (
    "Two levels: hybrid sharding of FSDP (replicate across sites, shard inside), Megatron's --num-distributed-optimizer-instances. "
    "fp16 and PowerSGD: communication hooks of torch's DDP; they change gradients, so compare losses."
)
"""Trainers of the ways to reduce gradients."""
FRAGMENTS = 24
"""Of streaming DiLoCo in that table."""


@record
class SiteTraffic:
    """What one dimension sends between two sites in a step."""

    between: tuple[str, str]
    dimension: str
    """``data`` or ``pipeline``."""
    bytes_per_step: float
    """Both directions, all groups."""
    seconds: float
    """In which the link is busy, per step."""
    exposed: float
    """Seconds of a step that are waited for it."""
    usd_per_step: float


@record
class InFlight:
    """A pipeline over a slow link with more microbatches in flight than 1F1B has."""

    pipeline: int
    between: tuple[str, str]
    extra: int
    """Microbatches of every stage before the link, further to those of 1F1B."""
    memory: float
    """Bytes that they take on the fullest GPU of those stages."""
    blocking: float
    """Seconds of the pipeline as it is priced: stages wait for their sends."""
    overlapped: float
    """Where sends overlap, with 1F1B's own microbatches in flight."""
    hidden: float
    """Where sends overlap and the extra microbatches are in flight."""


@record
class Reduction:
    """One way to reduce gradients between sites every step."""

    name: str
    bytes_per_step: float
    """That leave each site."""
    seconds: float
    """On the wire, latency included."""
    kernels: float
    """Seconds of compression and decompression."""


@record
class SiteReport:
    """Between the sites of a layout."""

    sites: tuple[str, ...]
    traffic: tuple[SiteTraffic, ...]
    in_flight: tuple[InFlight, ...]
    reductions: tuple[Reduction, ...]
    """Ways to average gradients every step; the first is the one that is priced."""
    local: tuple[LocalUpdate, ...]
    """By interval and width; empty where a site holds no whole replica."""
    outer: LocalUpdate | None
    """That of the layout."""
    outer_memory: float
    """Bytes of the outer optimizer on each site."""
    notes: tuple[str, ...]

    @property
    def usd_per_step(self) -> float:
        """Dollars of all traffic of a step."""
        return sum(one.usd_per_step for one in self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds, bytes, dollars."""
        rows = ("traffic", "in_flight", "reductions", "local")
        return {
            "sites": list(self.sites), "usd_per_step": self.usd_per_step, "outer_memory": self.outer_memory,
            **{name: [dict(vars(one)) for one in getattr(self, name)] for name in rows},
            "outer": None if self.outer is None else dict(vars(self.outer)), "notes": list(self.notes),
        }  # fmt: skip


def site_report(job: MixedJob, layout: MixedLayout, estimate: MixedEstimate) -> SiteReport | None:
    """The report of a layout and its price (``price_layout``); None where it stays in one site.

    Raises PlannerError where a link is missing, or local updates have no site with a whole replica.
    """
    used = tuple(site for site in job.cluster.sites if any(layout.gpus_of(k) for k in kinds_of(job, site)))
    if len(used) < 2:
        return None
    groups = data_groups(job, layout)
    traffic = (*_data_traffic(job, layout, groups, estimate), *_pipeline_traffic(job, layout))
    whole = alone(job, layout)
    notes, local, outer = list[str](), tuple[LocalUpdate, ...](), None
    if len(whole) > 1:
        step = inner_step(job, layout)
        ring = best_ring(job.cluster, whole, nodes_between(job, whole))
        table = [Outer(method="diloco", every=every, bits=bits) for every in EVERY for bits in BITS]
        table += [Outer(method="streaming_diloco", every=max(EVERY), bits=bits, fragments=FRAGMENTS) for bits in BITS]
        local = tuple(local_update(job, one, whole, ring, step) for one in table)
        if layout.outer is not None:
            outer = local_update(job, layout.outer, whole, ring, step)
            traffic = (_averages(whole, outer, step),)
        notes.append(law.CONVERGENCE[layout.outer.method if layout.outer else "diloco"])
    elif layout.outer is not None:
        raise PlannerError(NOT_WHOLE)
    else:
        notes.append("Pipelines span the sites: local updates (DiLoCo) need a whole replica in each of two sites.")
    if groups and layout.outer is None:
        notes.insert(0, WHO_REDUCES)
    return SiteReport(
        sites=used, traffic=traffic, in_flight=tuple(_in_flight(job, layout, estimate)),
        reductions=_reductions(job, layout, groups), local=local, outer=outer,
        outer_memory=law.outer_memory(parameters_of(job)) if local else 0.0, notes=tuple(notes),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ every step


def data_groups(job: MixedJob, layout: MixedLayout) -> dict[tuple[str, ...], float]:
    """Parameters by the sites that hold them, only of those that several sites hold: these are averaged between them."""
    model = job.workload.model
    layer, first, last = law.layer_parameters(model)
    places = [[site_of(job, stage.kind) for stage in one.stages for _ in range(stage.layers)] for one in layout.pipelines]
    ends = [(site_of(job, one.stages[0].kind), site_of(job, one.stages[-1].kind)) for one in layout.pipelines]
    found: dict[tuple[str, ...], float] = defaultdict(float)

    def add(held: set[str], parameters: float) -> None:
        if len(held) > 1:
            found[tuple(site for site in job.cluster.sites if site in held)] += parameters

    for number in range(model.num_layers):
        add({one[number] for one in places}, layer)
    if model.tied_embeddings:
        add({site for pair in ends for site in pair}, first)
    else:
        add({one for one, _ in ends}, first)
        add({one for _, one in ends}, last)
    return dict(found)


def _data_traffic(
    job: MixedJob, layout: MixedLayout, groups: dict[tuple[str, ...], float], estimate: MixedEstimate
) -> Iterator[SiteTraffic]:
    """Gradients, averaged by one ring through all n replicas, 2 (n-1)/n P over each link of the ring; in two levels n is the number
    of groups that share states."""
    width, replicas = job.trainer.traffic.gradient_reduce_bytes, layout.replicas // max(layout.dp_shard, 1)
    sums: dict[Link, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for held, parameters in groups.items():
        nodes = nodes_between(job, held)
        for link in best_ring(job.cluster, held, nodes):
            sent = law.data_bytes(parameters, replicas, width)
            sums[link][0] += (2.0 if len(held) == 2 else 1.0) * sent  # a ring of two passes its link there and back
            sums[link][1] += sent / link.speed(nodes) + 2.0 * (replicas - 1) / replicas * link.latency
    for link, (sent, seconds) in sums.items():
        yield SiteTraffic(
            between=_ends(job, link), dimension="data", bytes_per_step=sent, seconds=seconds,
            exposed=min(seconds, estimate.time["data_communication"]), usd_per_step=sent * link.price,
        )  # fmt: skip


def _averages(sites: tuple[str, ...], outer: LocalUpdate, step: float) -> SiteTraffic:
    """The layout's own local updates, as their part of every step."""
    return SiteTraffic(
        between=(sites[0], sites[-1]), dimension="data", bytes_per_step=len(sites) * outer.bytes_per_step,
        seconds=outer.average / outer.every, exposed=outer.step - step, usd_per_step=outer.usd_per_step,
    )  # fmt: skip


def _ends(job: MixedJob, link: Link) -> tuple[str, str]:
    """Sites that a link joins."""
    names = [one if one in job.cluster.sites else site_of(job, one) for one in link.between]
    return names[0], names[1]


def _hops(job: MixedJob, layout: MixedLayout, pipeline: Pipeline) -> list[tuple[int, Link, float]]:
    """(stage before it, link, bytes of a microbatch in one direction) of the hand-overs between two sites."""
    found = []
    for number, (one, other) in enumerate(pairwise(pipeline.stages)):
        a, b = site_of(job, one.kind), site_of(job, other.kind)
        if a != b:
            link = job.cluster.link(one.kind, other.kind) or site_link(job.cluster, a, b)
            found.append((number, link, boundary_bytes(job, layout.cp, pipeline)))
    return found


def _pipeline_traffic(job: MixedJob, layout: MixedLayout) -> Iterator[SiteTraffic]:
    """Activations forward and their gradients back: m B each way of every pipeline. Exposed is what the pipeline takes longer than
    with the networks of its kinds alone."""
    between = {site_link(job.cluster, *pair) for pair in _joined(job, layout)}
    links = tuple(one for one in job.cluster.links if one not in between)
    near = replace(job, cluster=replace(job.cluster, links=links))
    sums: dict[Link, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for pipeline in layout.pipelines:
        crossing = _hops(job, layout, pipeline)
        waited = _only(job, layout, pipeline).seconds - _only(near, layout, pipeline).seconds if crossing else 0.0
        for _, link, size in crossing:
            sent = size * pipeline.num_microbatches * pipeline.count
            sums[link][0] += 2.0 * sent
            sums[link][1] += sent / link.speed(min(nodes_between(job, _ends(job, link)), pipeline.count))
            sums[link][2] = max(sums[link][2], waited)
    for link, (sent, seconds, waited) in sums.items():
        yield SiteTraffic(
            between=_ends(job, link), dimension="pipeline", bytes_per_step=sent, seconds=seconds, exposed=waited,
            usd_per_step=sent * link.price,
        )  # fmt: skip


def _joined(job: MixedJob, layout: MixedLayout) -> set[tuple[str, str]]:
    """Pairs of sites between which a pipeline hands over."""
    pairs = [(site_of(job, a.kind), site_of(job, b.kind)) for one in layout.pipelines for a, b in pairwise(one.stages)]
    return {(a, b) for a, b in pairs if a != b}


def _only(job: MixedJob, layout: MixedLayout, pipeline: Pipeline) -> PipelineEstimate:
    """One of the pipelines, priced."""
    only = replace(layout, pipelines=(pipeline,), outer=None)
    workload = replace(job.workload, global_batch_size=only.global_batch_size)
    return estimate_mixed(replace(job, workload=workload), only).pipelines[0]


def _durations(job: MixedJob, layout: MixedLayout, pipeline: Pipeline) -> tuple[list[float], list[float]]:
    """Seconds of every stage's passes of one microbatch without sends, and of every hand-over."""
    found = _only(job, layout, pipeline)
    between = Hops(job, layout.cp)
    hops = [between.boundary(pipeline, number) for number in range(len(pipeline.stages) - 1)]
    if not hops:
        return [found.stages[0].forward + found.stages[0].backward], []
    last = len(hops) - 1
    taus = [
        stage.forward + stage.backward - hops[min(number, last)] - hops[max(number - 1, 0)]
        for number, stage in enumerate(found.stages)
    ]
    return taus, hops


def _in_flight(job: MixedJob, layout: MixedLayout, estimate: MixedEstimate) -> Iterator[InFlight]:
    """What more microbatches in flight would bring and cost, for each pipeline over a slow link."""
    for place, pipeline in enumerate(layout.pipelines):
        crossing = _hops(job, layout, pipeline)
        if not crossing:
            continue
        taus, hops = _durations(job, layout, pipeline)
        m, count = pipeline.num_microbatches, len(pipeline.stages)
        wires = [
            pipeline.count * next((size / link.speed() for at, link, size in crossing if at == number), 0.0)
            for number in range(count - 1)
        ]
        extra = min(law.extra_in_flight(sum(hops), 0.0, max(*taus, *wires)), max(m - 1, 0))
        last = max(at for at, _, _ in crossing)
        stages = estimate.pipelines[place].stages[: last + 1]
        flights = [m if layout.schedule == "gpipe" else min(m, count - number) for number in range(last + 1)]
        more = [min(extra, m - flight) for flight in flights]
        yield InFlight(
            pipeline=place, between=_ends(job, crossing[-1][1]), extra=max(more),
            memory=max(
                stage.memory["activations"] / flight * further
                for stage, flight, further in zip(stages, flights, more, strict=True)
            ),
            blocking=estimate.pipelines[place].seconds,
            overlapped=law.pipeline_seconds(taus, hops, wires, m),
            hidden=law.pipeline_seconds(taus, hops, wires, m, extra),
        )  # fmt: skip


def _reductions(job: MixedJob, layout: MixedLayout, groups: dict[tuple[str, ...], float]) -> tuple[Reduction, ...]:
    """Gradients every step: one ring through all replicas, in two levels, and in two levels with compression."""
    if not groups:
        return ()
    model, width = job.workload.model, job.trainer.traffic.gradient_reduce_bytes
    total = sum(groups.values())
    rings = {held: best_ring(job.cluster, held, nodes_between(job, held)) for held in groups}

    def levels(scale: float) -> float:
        return sum(
            ring_all_reduce_time(
                parameters * scale, len(held), min(one.speed(nodes_between(job, held)) for one in rings[held]),
                max(one.latency for one in rings[held]),
            )
            for held, parameters in groups.items()
        )  # fmt: skip

    n = layout.replicas
    around = {held: ring if len(ring) > 2 else ring * 2 for held, ring in rings.items()}
    flat = sum(flat_all_reduce_time(parameters * width, n, around[held]) for held, parameters in groups.items())
    slowest = min(one.hardware.memory_bandwidth for one in job.clusters.values())
    peak = min(one.hardware.peak("fp32") if "fp32" in one.hardware.peak_flops else one.hardware.peak("bf16")
               for one in job.clusters.values())  # fmt: skip
    found = [Reduction(name="one ring", bytes_per_step=law.data_bytes(total, n, width), seconds=flat, kernels=0.0)]
    share = sum(law.data_bytes(parameters, len(held), 1.0) for held, parameters in groups.items())
    found.append(Reduction(name="two levels", bytes_per_step=share * width, seconds=levels(width), kernels=0.0))
    if layout.dp_shard:
        found.reverse()  # the first is the one that is priced
    gpus = min(layout.gpus_of(kind) for kind in job.kinds if layout.gpus_of(kind))
    for name in (law.FP16, law.INT8, f"{law.POWER_SGD}:4", f"{law.POWER_SGD}:32"):
        one = law.compressed(model, total, name)
        per = one.wire / total
        if per < width:
            kernels = law.kernel_seconds(one, gpus, slowest, peak)
            found.append(Reduction(name=f"two levels, {one.name}", bytes_per_step=share * per, seconds=levels(per),
            kernels=kernels))
    return tuple(found)
