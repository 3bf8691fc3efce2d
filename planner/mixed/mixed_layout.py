"""How a job is split over several kinds of nodes: pipelines of unlike stages, each with its share of the batch."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from planner import schema
from planner.errors import PlannerError, listed
from planner.layout import NAMES
from planner.record import record
from planner.schema import Count, Name, one_of, within

INTERLEAVED = "interleaved_1f1b"


@record
class Stage:
    """One pipeline stage: a tensor (and context) parallel group of one kind of GPU, and what it holds."""

    kind: Name
    """Node kind of the cluster file; a group never spans two."""
    layers: Annotated[int, within(0)]
    """Transformer layers; 0 only where the stage holds the embedding or the head alone."""
    tp: Count = 1
    """Tensor parallel degree."""
    recompute: Annotated[str, one_of(*NAMES["recompute"].values())] = "none"
    recompute_layers: Annotated[int, within(0)] = 0
    """Layers under full recompute; 0 = all of the stage."""


@record
class Pipeline:
    """Equal replicas of the model, each one pipeline with the same stages and the same share of the batch."""

    stages: tuple[Stage, ...]
    """First stage (embedding) first, last stage (head) last."""
    count: Count = 1
    """Replicas."""
    micro_batch_size: Count = 1
    """Sequences per forward pass of one replica."""
    num_microbatches: Count = 1
    """Microbatches per step of one replica."""

    @property
    def sequences(self) -> int:
        """Sequences per step of one replica."""
        return self.micro_batch_size * self.num_microbatches


@record
class Outer:
    """Local updates: the sites step alone and average every ``every`` steps (DiLoCo)."""

    method: Annotated[str, one_of("diloco", "streaming_diloco", "local_sgd")]
    every: Count
    """Inner steps between two averages."""
    bits: Annotated[int, within(1, 32)] = 32
    """Bits of a sent number."""
    fragments: Count = 1
    """Parts of the model that are averaged in turn (streaming)."""

    def __post_init__(self) -> None:
        if self.method == "streaming_diloco" and not 2 <= self.fragments <= self.every:
            raise PlannerError(f"streaming_diloco averages 2 to {self.every} fragments in turn, not {self.fragments}")


@record
class MixedLayout:
    """All pipelines of a job. Data parallel groups join the replicas of a layer, whatever stage holds it."""

    pipelines: tuple[Pipeline, ...]
    cp: Count = 1
    """Context parallel degree of every stage, inside its kind."""
    ep: Count = 1
    """Expert parallel degree, over equal replicas of one kind."""
    zero: Annotated[int, within(0, 3)] = 1
    """State sharding over the data parallel group of a layer."""
    schedule: Annotated[str, one_of("gpipe", "1f1b", INTERLEAVED)] = "1f1b"
    vpp: Count = 1
    """Virtual stages per stage, interleaved: each holds as many of its layers as the others."""
    dp_shard: Annotated[int, within(0)] = 0
    """Replicas that share states and average gradients first, then with the other such groups (two levels); 0 = all, one ring."""
    offload_optimizer: Annotated[int, within(0, 100)] = 0
    """Percent of the optimizer states in host memory."""
    outer: Outer | None = None

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise PlannerError("pipelines is empty; give at least one")
        layers = {sum(stage.layers for stage in one.stages) for one in self.pipelines}
        if len(layers) != 1:
            raise PlannerError(f"the pipelines hold {sorted(layers)} layers; every replica must hold the whole model")
        if (self.vpp > 1) != (self.schedule == INTERLEAVED):
            raise PlannerError(f"vpp {self.vpp} with schedule {self.schedule}: virtual stages are those of {INTERLEAVED}")
        alike: Counter[tuple[Stage, ...]] = Counter()
        for one in self.pipelines:
            alike[one.stages] += one.count
        if self.dp_shard and any(count % self.dp_shard for count in alike.values()):
            raise PlannerError(f"dp_shard {self.dp_shard} does not divide {listed(map(str, alike.values()), 'and')} equal replicas")

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return sum(one.count * one.sequences for one in self.pipelines)

    @property
    def replicas(self) -> int:
        """Copies of the model: the data parallel degree."""
        return sum(one.count for one in self.pipelines)

    @property
    def num_gpus(self) -> int:
        """GPUs in use."""
        return sum(one.count * stage.tp * self.cp for one in self.pipelines for stage in one.stages)

    def gpus_of(self, kind: str) -> int:
        """GPUs in use of one kind."""
        return sum(
            one.count * stage.tp * self.cp for one in self.pipelines for stage in one.stages if stage.kind == kind
        )

    def loss_scales(self) -> tuple[float, ...]:
        """What each pipeline multiplies its mean loss with before an averaging all-reduce over R replicas: R m_r b_r / G.

        Equal shares give 1. Without it, replicas with fewer samples would weigh each of theirs more.
        """
        return tuple(self.replicas * one.sequences / self.global_batch_size for one in self.pipelines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``schema.read`` takes back."""
        return schema.plain_fields(self)


def shape_text(layout: MixedLayout) -> str:
    """A mixed layout in words: pipelines with their stages by kind."""
    said = []
    for one in layout.pipelines:
        runs: list[list[Stage]] = []
        for stage in one.stages:
            if runs and (runs[-1][0].kind, runs[-1][0].tp) == (stage.kind, stage.tp):
                runs[-1].append(stage)
            else:
                runs.append([stage])
        stages = " > ".join(f"{len(run)} x {run[0].kind} tp {run[0].tp} ({sum(s.layers for s in run)} layers)" for run in runs)
        said.append(f"{one.count} x [{stages}], {one.num_microbatches} x {one.micro_batch_size}")
    more = [f"{name} {value}" for name, value in (("cp", layout.cp), ("ep", layout.ep), ("vpp", layout.vpp)) if value > 1]
    more += [f"shared over {layout.dp_shard}"] if layout.dp_shard else []
    more += ["states on the host"] if layout.offload_optimizer else []
    return ", ".join(["; ".join(said), *more])
