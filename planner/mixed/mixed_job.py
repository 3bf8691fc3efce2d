"""A job on several kinds of nodes: its kinds by speed, the cluster and trainer of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from planner.cluster import Cluster
from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.errors import PlannerError, shown
from planner.layout import NAMES, CpMethod, Layout, Module, Recompute, Schedule
from planner.mixed.mixed_layout import INTERLEAVED
from planner.record import record
from planner.rules import Job, stage_allowed
from planner.space import usual_modules
from planner.trainer import Trainer
from planner.workload import Workload

SCHEDULES = {"gpipe": Schedule.GPIPE, "1f1b": Schedule.ONE_F_ONE_B, INTERLEAVED: Schedule.INTERLEAVED}
RECOMPUTES = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}


def split_by_speed(cluster: ClusterFile) -> ClusterFile:
    """The cluster with one kind for every measured slowdown: slow nodes may so get fewer layers or samples, or be left out.

    Nodes as fast as most keep the name of their kind; others take that of their first node behind it: ``t4 node-5``, and their
    factor where an earlier split has that name already.
    """
    kinds, names = list[NodeKind](), dict[str, list[str]]()
    taken = {one.kind for one in cluster.nodes}
    for one in cluster.nodes:
        factors = cluster.slowdowns(one.kind)
        counts = Counter(factors)
        usual = max(counts, key=lambda factor: (counts[factor], -factor))
        for factor in sorted(counts, key=lambda factor: (factor != usual, factor)):
            first = cluster.names_of(one.kind)[factors.index(factor)]
            name = one.kind if factor == usual else f"{one.kind} {first}"
            name = f"{name} x{factor:g}" if factor != usual and name in taken else name
            taken.add(name)
            names.setdefault(one.kind, []).append(name)
            speed = {} if factor == 1.0 else {"": factor}
            kinds.append(replace(one, kind=name, count=counts[factor], slowdown=speed))
    links = list[Link]()
    for link in cluster.links:
        ends = [names.get(end, [end]) for end in link.between]
        links += [replace(link, between=(a, b)) for a in ends[0] for b in ends[1]]
    return replace(cluster, nodes=tuple(kinds), links=tuple(links))


@record
class MixedJob:
    """What is trained, on which nodes, with which trainer on each kind."""

    workload: Workload
    cluster: ClusterFile
    """Every kind with one speed (``split_by_speed``)."""
    trainers: dict[str, Trainer]
    """By kind: the same program, with the attention kernel that the kind's GPUs have."""

    def __post_init__(self) -> None:
        if missing := [one.kind for one in self.cluster.nodes if one.kind not in self.trainers]:
            raise PlannerError(f"no trainer is given for {shown(missing[0])}")

    @cached_property
    def clusters(self) -> dict[str, Cluster]:
        """The GPUs of each kind as a cluster of their own."""
        return {one.kind: Cluster(hardware=one.profile, num_gpus=one.num_gpus) for one in self.cluster.nodes}

    @cached_property
    def slowdown(self) -> dict[str, float]:
        """Measured time over that of the profile, by kind."""
        return {one.kind: self.cluster.slowdowns(one.kind)[0] for one in self.cluster.nodes}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds in rank order."""
        return tuple(one.kind for one in self.cluster.nodes)

    @property
    def trainer(self) -> Trainer:
        """That of the first kind: what does not depend on the GPU is the same on all."""
        return self.trainers[self.kinds[0]]

    def uniform(self, kind: str) -> Job:
        """The same training on one kind alone."""
        return Job(workload=self.workload, cluster=self.clusters[kind], trainer=self.trainers[kind])

    def only(self, *kinds: str) -> MixedJob:
        """The same training on some of the kinds."""
        cluster = self.cluster
        for kind in self.kinds:
            cluster = cluster if kind in kinds else cluster.without(kind)
        return replace(self, cluster=cluster, trainers={kind: self.trainers[kind] for kind in kinds})

    def layout(self, kind: str, **columns: Any) -> Layout:
        """A layout of one kind with what its trainer fixes filled in: sequence parallelism, modules of selective recompute, how a
        sequence is split, tensor parallelism of experts."""
        trainer, tp = self.trainers[kind], columns["tp"]
        split = trainer.legal.sequence_parallel != "never"
        selective = usual_modules(trainer, self.workload.model)
        modules = (columns.get("recompute", 0) == int(Recompute.SELECTIVE)) * selective
        whole = self.workload.model.is_moe and trainer.legal.expert_parallel != "folded"
        return Layout(
            **columns, sequence_parallel=(tp > 1) * split, recompute_modules=modules, etp=tp if whole else 1,
            cp_method=self.cp_method,
        )  # fmt: skip

    @cached_property
    def cp_method(self) -> int:
        """The first way to split a sequence that the rules allow for the model."""
        job = self.uniform(self.kinds[0])
        for number, name in NAMES["cp_method"].items():
            at = Layout(cp=2, dp=1, cp_method=number, zero=max(job.legal.zero))
            if name in job.legal.cp_methods and np.all(stage_allowed(job, at)):
                return number
        return int(CpMethod.RING)

    @cached_property
    def recomputes(self) -> tuple[str, ...]:
        """Recompute that every trainer of the job has, cheapest first."""
        every = [usual_modules(one, self.workload.model) for one in self.trainers.values()]
        return ("none", "selective", "full") if all(one != Module(0) for one in every) else ("none", "full")
