"""What crosses between stages and between replicas of a mixed layout, and over which links."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from planner.cluster import Cluster
from planner.cluster_file import Link
from planner.cost.layer.operators import Shard
from planner.cost.unique_stages import send_seconds
from planner.mixed.crossing import Crossing, Member, Spanned
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage


class Hops:
    """Seconds of hops between stages; what does not depend on the pipeline around them is priced once."""

    def __init__(self, job: MixedJob, cp: int = 1) -> None:
        self.job, self.cp = job, cp
        self._known: dict[tuple[object, ...], float] = {}

    def times(self, pipeline: Pipeline, vpp: int = 1) -> list[tuple[float, float]]:
        """Seconds that each stage spends on a microbatch's sends in its forward and in its backward pass.

        Stage j sends forward over d_j and backward over d_{j-1}, once for each chunk. The ends, which send in one direction alone,
        receive in the other and wait for it as long: in a pipeline of equal hops every stage has both, as in the closed forms.
        """
        hops = self.between(pipeline)
        if not hops:
            return [(0.0, 0.0)]
        last = len(hops)
        return [(vpp * hops[min(number, last - 1)], vpp * hops[max(number - 1, 0)]) for number in range(last + 1)]

    def between(self, pipeline: Pipeline, vpp: int = 1) -> list[float]:
        """Seconds of every hop of a microbatch, in the order of (virtual) stages; the last sends a chunk's end to the first."""
        hops, last = list[float](), len(pipeline.stages) - 1
        for _, some in itertools.groupby(pipeline.stages, key=lambda stage: (stage.kind, stage.tp)):
            inside = len(list(some)) - 1
            hops += [self.boundary(pipeline, len(hops))] * inside if inside else []
            hops += [self.boundary(pipeline, len(hops))] if len(hops) < last else []
        return hops if vpp == 1 else ([*hops, self.boundary(pipeline, last)] * vpp)[:-1]

    def boundary(self, pipeline: Pipeline, number: int) -> float:
        """Seconds to hand one microbatch's activations from stage ``number`` to the next, or from the last to the first.

        Inside a kind as the cost model has it, where the slowest hop sets the pace of all; among several kinds each hop by itself:
        ranks are numbered stage by stage, and a hop leaves the node where the next stage begins on another. Between two kinds, or
        two tp, each side moves the tensor in tp pieces over its own card, and the slower side sets the pace; those that leave a
        node together share its cards. Over a link that is given, all equal pipelines pass at the same time: count B / bandwidth +
        latency, B the whole tensor (of a node's card that of the pipelines with a stage there).
        """
        one, other = pipeline.stages[number], pipeline.stages[(number + 1) % len(pipeline.stages)]
        if one.kind == other.kind and one.tp == other.tp:
            first, length = _run(pipeline, number)
            if length == len(pipeline.stages):
                return self._sent(pipeline, one, length, pipeline.count)
            ranks, domain = pipeline.count * one.tp * self.cp, int(self.job.clusters[one.kind].domain)
            inside = (number - first) * ranks // domain == ((number - first + 2) * ranks - 1) // domain
            if inside and number + 1 < len(pipeline.stages):
                return self._sent(pipeline, one, 2, pipeline.count)
            return self._sent(pipeline, one, 2, domain, ranks)
        away = max(
            self._sent(pipeline, stage, 2, int(self.job.clusters[stage.kind].domain), pipeline.count * stage.tp * self.cp)
            for stage in (one, other)
        )
        link = self.job.cluster.link(one.kind, other.kind)
        return max(away, link_seconds(link, self.job, self.cp, pipeline, (one, other)) if link else 0.0)

    def busiest_link(self, pipeline: Pipeline, vpp: int = 1) -> float:
        """Seconds for which a microbatch keeps the busiest given link between stages busy in each direction, all chunks together.

        A boundary is crossed vpp times, that of the last stage to the first vpp - 1 times: activations go one way, their gradients
        the other.
        """
        busy, last = dict[Link, float](), len(pipeline.stages) - 1
        for number, one in enumerate(pipeline.stages):
            other = pipeline.stages[number + 1 if number < last else 0]
            if (link := self.job.cluster.link(one.kind, other.kind) if one.kind != other.kind else None) is not None:
                seconds = link_seconds(link, self.job, self.cp, pipeline, (one, other)) - link.latency
                busy[link] = busy.get(link, 0.0) + (vpp - (number == last)) * seconds
        return max(busy.values(), default=0.0)

    def _sent(self, pipeline: Pipeline, stage: Stage, run: int, count: int, together: int = 0) -> float:
        """Seconds of a send in a run of so many stages of one kind, of so many pipelines side by side.

        ``together``: ranks that send at the same time; where they are fewer than a node has GPUs, each has more of its cards.
        """
        cluster, node = self.job.clusters[stage.kind], self.job.cluster.node_kind(stage.kind).gpus_per_node
        leaves = run * count * stage.tp * self.cp > cluster.domain
        share = node / min(together, node) if leaves and together else 1.0
        key = stage.kind, stage.tp, pipeline.micro_batch_size, share if leaves else -count
        if key not in self._known:
            columns = self.job.layout(
                stage.kind, tp=stage.tp, pp=run, dp=count, cp=self.cp, micro_batch_size=pipeline.micro_batch_size
            ).replace(tp=np.array([stage.tp]))
            if share != 1.0:
                wider = replace(cluster.hardware, network_bandwidth=cluster.hardware.network_bandwidth * share)
                cluster = replace(cluster, hardware=wider)
            self._known[key] = float(send_seconds(self.job.workload, cluster, self.job.trainers[stage.kind], columns)[0])
        return self._known[key]


def _run(pipeline: Pipeline, number: int) -> tuple[int, int]:
    """First of the neighbouring stages of the same kind and tp as one of them, itself included, and how many they are."""
    same = [(one.kind, one.tp) == (pipeline.stages[number].kind, pipeline.stages[number].tp) for one in pipeline.stages]
    first = number
    while first > 0 and same[first - 1]:
        first -= 1
    last = number
    while last + 1 < len(same) and same[last + 1]:
        last += 1
    return first, last - first + 1


def boundary_bytes(job: MixedJob, cp: int, pipeline: Pipeline) -> float:
    """Bytes of a microbatch's activations at the boundary of two stages, in one direction, of one pipeline."""
    stage = pipeline.stages[0]
    columns = job.layout(stage.kind, tp=1, cp=cp, micro_batch_size=pipeline.micro_batch_size)
    shard = Shard(workload=job.workload, trainer=job.trainers[stage.kind], layout=columns, ep_stride=1.0)
    more = stage.tp * cp * sum(term.sent_bytes(job.workload) for term in job.trainers[stage.kind].terms)
    return float(np.ravel(shard.tokens)[0]) * cp * job.workload.model.hidden_size * float(shard.element) + more


def link_seconds(link: Link, job: MixedJob, cp: int, pipeline: Pipeline, ends: tuple[Stage, Stage]) -> float:
    """Seconds of a boundary over a given link: of one that all share as many nodes send at once as pipelines and nodes allow."""
    passing, nodes_sending = float(pipeline.count), min(pipeline.count, *(job.cluster.node_kind(end.kind).count for end in ends))
    if link.per_node:
        nodes_sending = 1
        nodes = [job.cluster.node_kind(end.kind).gpus_per_node for end in ends]
        passing = min(passing, max(n / (end.tp * cp) for n, end in zip(nodes, ends, strict=True)))
    return passing * boundary_bytes(job, cp, pipeline) / link.speed(nodes_sending) + link.latency


def traffic_cluster(job: MixedJob, layout: MixedLayout, pipeline: Pipeline, number: int) -> Cluster:
    """The links that the gradients of a stage go over: those of its kind, or of all kinds that hold some of its layers."""
    own = pipeline.stages[number]
    holders = [(pipeline, own)]
    for other in layout.pipelines:
        if other is not pipeline:
            holders += [(other, stage) for stage in overlapping(pipeline, number, other)]
    cluster = job.clusters[own.kind]
    if len({stage.kind for _, stage in holders}) == 1:
        return cluster
    members = tuple(
        Member(job.clusters[stage.kind], min(float(one.count), job.clusters[stage.kind].domain // (stage.tp * layout.cp)),
               own.tp / stage.tp)
        for one, stage in holders
    )  # fmt: skip
    kinds = list(dict.fromkeys(stage.kind for _, stage in holders))
    crossings = []
    for at, one in enumerate(kinds):
        for another in kinds[at + 1 :]:
            link = job.cluster.link(one, another)
            if link is not None:
                rings = float(own.tp * layout.cp * len(pipeline.stages))
                ends = job.cluster.node_kind(one), job.cluster.node_kind(another)
                sharing = min(rings, ends[0].gpus_per_node) if link.per_node else rings
                crossings.append(Crossing(link, sharing, 1 if link.per_node else min(end.count for end in ends)))
    return Spanned(
        hardware=cluster.hardware, num_gpus=cluster.num_gpus, members=members, crossings=tuple(crossings),
        near=own.tp * layout.cp * layout.dp_shard,
    )  # fmt: skip


def overlapping(pipeline: Pipeline, number: int, other: Pipeline) -> list[Stage]:
    """Stages of another pipeline that hold some of what a stage holds."""
    start = sum(stage.layers for stage in pipeline.stages[:number])
    end, found, place = start + pipeline.stages[number].layers, list[Stage](), 0
    for at, stage in enumerate(other.stages):
        both_first, both_last = at == 0 and number == 0, at == len(other.stages) - 1 and number == len(pipeline.stages) - 1
        if (place < end and start < place + stage.layers) or both_first or both_last:
            found.append(stage)
        place += stage.layers
    return found
