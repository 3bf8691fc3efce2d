"""The estimate of a mixed layout: every stage on its own GPU, each pipeline walked, time and memory by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster
from planner.cost.estimate import PARTS
from planner.cost.memory.states import COMPONENTS
from planner.cost.own_terms import flushes, until_flush
from planner.cost.pipeline.schedule_walk import StageDurations, walked_time
from planner.cost.pipeline.schedules import sends_overlap
from planner.cost.price.compute import straggling_of
from planner.errors import PlannerError
from planner.layout import Layout
from planner.mixed.boundaries import Hops, traffic_cluster
from planner.mixed.crossing import Spanned
from planner.mixed.mixed_job import RECOMPUTES, SCHEDULES, MixedJob
from planner.mixed.mixed_layout import MixedLayout, Pipeline
from planner.mixed.stage_pricing import PricedStages, price_stages, stage_contents
from planner.record import record
from planner.workload import peak_dtype

ROUNDING = float(np.sqrt(np.finfo(float).eps))
"""Part of the time below which idle time is what sums of floating point numbers leave."""


@record
class StageEstimate:
    """One stage of one pipeline; seconds per step, bytes per GPU."""

    kind: str
    gpus: int
    """Of all equal pipelines."""
    start: int
    """Layers before it."""
    layers: int
    tp: int
    recompute: str
    forward: float
    """Seconds of a microbatch's forward pass, the wait for its send included."""
    backward: float
    busy: float
    """Seconds of a step in which it computes or communicates."""
    imbalance: float
    """Seconds of a step that it waits because the slowest stage of its pipeline takes longer."""
    end: dict[str, float]
    """Seconds at the end of the step: exposed and hidden traffic of states, update, host."""
    memory: dict[str, float]
    """Bytes by component (cost.memory.COMPONENTS)."""
    usable_memory: float
    out_of_memory: float
    """Chance that the card runs out."""
    fits: bool
    """That is small enough, and the host has room for what is offloaded."""

    @property
    def memory_peak(self) -> float:
        """Bytes of all components."""
        return sum(self.memory.values())


@record
class PipelineEstimate:
    """One pipeline with its share of the batch."""

    seconds: float
    """From its first forward to its last backward pass."""
    stages: tuple[StageEstimate, ...]
    parts: dict[str, float]
    """Seconds of its slowest stage by part, bubble included."""
    hidden: dict[str, float]
    """Seconds of communication behind computation."""
    flop: float
    """Model FLOP of a step, on all equal pipelines."""


@record
class MixedEstimate:
    """Time and memory of one optimizer step."""

    time: dict[str, float]
    """Seconds by part (cost.estimate.PARTS) of the slowest pipeline and what surrounds it; they sum to the step time."""
    hidden: dict[str, float]
    """Seconds of communication hidden behind computation."""
    pipelines: tuple[PipelineEstimate, ...]
    """One for each of the layout."""
    tokens: float
    """Tokens of a step."""
    peak_flops: float
    """Dense peak of all GPUs in use together, FLOP/s."""

    @property
    def step_time(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.time[part] for part in PARTS)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the job."""
        return self.tokens / self.step_time

    @property
    def mfu(self) -> float:
        """Model FLOP over the peak of all GPUs in use and the step time."""
        return sum(one.flop for one in self.pipelines) / (self.peak_flops * self.step_time)

    @property
    def stages(self) -> tuple[StageEstimate, ...]:
        """Of all pipelines."""
        return tuple(stage for one in self.pipelines for stage in one.stages)

    @property
    def out_of_memory(self) -> float:
        """Chance of the fullest card."""
        return max(one.out_of_memory for one in self.stages)

    @property
    def fits(self) -> bool:
        """Every stage does."""
        return all(one.fits for one in self.stages)

    @property
    def between_stages(self) -> float:
        """Part of the GPU seconds of a step in which a GPU waits because another stage of its pipeline takes longer."""
        lost = sum(one.gpus * one.imbalance for one in self.stages)
        return lost / (self.step_time * sum(one.gpus for one in self.stages))

    @property
    def between_replicas(self) -> float:
        """Likewise because another pipeline takes longer."""
        longest = max(one.seconds for one in self.pipelines)
        lost = sum(stage.gpus * (longest - one.seconds) for one in self.pipelines for stage in one.stages)
        return lost / (self.step_time * sum(one.gpus for one in self.stages))


def estimate_mixed(job: MixedJob, layout: MixedLayout) -> MixedEstimate:
    """Price one mixed layout.

    T = max over pipelines r of T_r + end of the step. T_r is the walk of the schedule with the own durations of each stage: a pass
    ends with its send, so that a stage takes tau_j + d_j + d_{j-1}. With equal stages and one pipeline this is what
    ``cost.refine`` gives.
    """
    check_mixed(job, layout)
    priced = _priced(job, layout)
    hops = Hops(job, layout.cp)
    found = [
        _pipeline(job, layout, one, stages, hops)
        for one, stages in zip(layout.pipelines, priced, strict=True)
    ]
    slowest = max(range(len(found)), key=lambda number: found[number].seconds)
    ends = [stage.end for one in found for stage in one.stages]
    end = max(ends, key=lambda one: one["exposed"] + one["optimizer"] + one["offload"])
    parts = dict(found[slowest].parts)
    waiting = parts.pop("waiting")
    time = {
        **parts, "data_communication": end["exposed"], "optimizer": end["optimizer"], "offload": end["offload"] + waiting,
        "overhead": max(one.host.step_overhead for one in job.trainers.values()),
    }  # fmt: skip
    slowed = _straggling(layout, found, slowest)
    time["stragglers"] = slowed * (time["compute"] + time["recompute"] + time["bubble"])
    precision = peak_dtype(job.workload.precision)
    used = {kind: layout.gpus_of(kind) for kind in job.kinds}
    return MixedEstimate(
        time={part: time[part] for part in PARTS},
        hidden={**found[slowest].hidden, "data": end["hidden"]},
        pipelines=tuple(found),
        tokens=float(layout.global_batch_size) * job.workload.sequence_length * job.workload.sequences,
        peak_flops=sum(n * job.clusters[kind].hardware.peak(precision) for kind, n in used.items() if n),
    )


def check_mixed(job: MixedJob, layout: MixedLayout) -> None:
    """Raise PlannerError where a layout does not suit the job: kinds, GPUs, layers, batch, degrees."""
    model, batch = job.workload.model, job.workload.global_batch_size
    if layout.global_batch_size != batch:
        raise PlannerError(f"the pipelines take {layout.global_batch_size} sequences a step, and the global batch is {batch}")
    used = {kind: layout.gpus_of(kind) for kind in {stage.kind for one in layout.pipelines for stage in one.stages}}
    for pipeline in layout.pipelines:
        if (held := sum(stage.layers for stage in pipeline.stages)) != model.num_layers:
            raise PlannerError(f"the stages hold {held} layers, and {model.name} has {model.num_layers}")
        for stage in dict.fromkeys(pipeline.stages):
            node = job.cluster.node_kind(stage.kind)
            if model.num_heads % stage.tp:
                raise PlannerError(f"tp {stage.tp} of {stage.kind} does not divide the {model.num_heads} heads of {model.name}")
            if stage.tp > 1 and not job.trainers[stage.kind].legal.tp:
                raise PlannerError(f"trainer {job.trainer.name} has no tensor parallelism; set tp to 1")
            if used[stage.kind] > node.num_gpus:
                raise PlannerError(f"the layout takes {used[stage.kind]} GPUs of {stage.kind}, which has {node.num_gpus}")
        if len(pipeline.stages) > 1:
            _check_schedule(job, layout, pipeline)


def _check_schedule(job: MixedJob, layout: MixedLayout, pipeline: Pipeline) -> None:
    """Raise PlannerError where the trainer has no such schedule, or virtual stages do not come out even."""
    if layout.schedule not in job.trainer.legal.schedules:
        raise PlannerError(f"trainer {job.trainer.name} has no schedule {layout.schedule}; see 'plan trainers'")
    stages, m = len(pipeline.stages), pipeline.num_microbatches
    if layout.vpp > 1 and m % stages:
        raise PlannerError(f"{m} microbatches with interleaved stages: they pass in rounds of {stages}, the stages of the pipeline")
    if odd := [stage for stage in pipeline.stages if stage.layers % layout.vpp]:
        raise PlannerError(f"a stage of {odd[0].layers} layers has no {layout.vpp} equal virtual stages")


@dataclass(frozen=True)
class _Place:
    """A stage in a batch of priced ones."""

    priced: PricedStages
    row: int

    def at(self, values: Floats) -> float:
        """Its value of an array (3, N) or (N,)."""
        return float(values[0, self.row] if values.ndim == 2 else values[self.row])


def _priced(job: MixedJob, layout: MixedLayout) -> list[list[_Place]]:
    """The stages of every pipeline; those of one kind whose states go over the same links are priced together."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    traffic = dict[tuple[object, ...], Cluster]()
    for at, pipeline in enumerate(layout.pipelines):
        for number, stage in enumerate(pipeline.stages):
            links = traffic_cluster(job, layout, pipeline, number)
            key: tuple[object, ...] = (stage.kind, *(links.key() if isinstance(links, Spanned) else ()))
            groups.setdefault(key, []).append((at, number))
            traffic[key] = links
    found: list[list[_Place]] = [[None] * len(one.stages) for one in layout.pipelines]  # type: ignore[list-item]
    for key, places in groups.items():
        priced = _price_places(job, layout, places, traffic[key])
        for row, (at, number) in enumerate(places):
            found[at][number] = _Place(priced, row)
    return found


def _price_places(job: MixedJob, layout: MixedLayout, places: list[tuple[int, int]], traffic: Cluster) -> PricedStages:
    """Stages of one kind, given by pipeline and number, a row each."""
    pipelines = [layout.pipelines[at] for at, _ in places]
    stages = [one.stages[number] for one, (_, number) in zip(pipelines, places, strict=True)]
    kind = stages[0].kind

    def column(values: Iterable[int]) -> NDArray[np.int64]:
        return np.array(list(values), dtype=np.int64)

    columns = job.layout(
        kind, tp=column(one.tp for one in stages), pp=column(len(one.stages) for one in pipelines), dp=layout.replicas,
        cp=layout.cp, ep=layout.ep, micro_batch_size=column(one.micro_batch_size for one in pipelines),
        num_microbatches=column(one.num_microbatches for one in pipelines), zero=layout.zero,
        schedule=int(SCHEDULES[layout.schedule]), vpp=layout.vpp, dp_shard=layout.dp_shard,
        offload_optimizer=layout.offload_optimizer, recompute=column(int(RECOMPUTES[one.recompute]) for one in stages),
        recompute_layers=column(one.recompute_layers for one in stages),
    )  # fmt: skip

    def wide(values: Iterable[float]) -> Floats:
        return np.repeat(np.array(list(values), dtype=float)[:, None], 3, axis=1)

    number = [number for _, number in places]
    contents = stage_contents(
        job.workload.model,
        wide(sum(stage.layers for stage in one.stages[:n]) / layout.vpp for one, n in zip(pipelines, number, strict=True)),
        wide(one.layers for one in stages),
        wide(n == 0 for n in number),
        wide(n == len(one.stages) - 1 for one, n in zip(pipelines, number, strict=True)),
        layout.vpp,
    )
    return price_stages(job, kind, columns, (contents, np.arange(len(number))), wide(number), traffic)


def _pipeline(job: MixedJob, layout: MixedLayout, pipeline: Pipeline, places: list[_Place], hops: Hops) -> PipelineEstimate:
    """One pipeline walked, with the parts of its slowest stage."""
    m, count = pipeline.num_microbatches, len(pipeline.stages)
    forward = np.array([one.at(one.priced.forward) for one in places])
    backward = np.array([one.at(one.priced.backward) for one in places])
    blocking = 1.0 - float(sends_overlap(job.trainer, Layout(schedule=int(SCHEDULES[layout.schedule]))))
    out, back = (blocking * np.array(side) for side in zip(*hops.times(pipeline, layout.vpp), strict=True))
    both = forward + backward
    passes = StageDurations(forward + out, backward + back, np.zeros(count))
    whole = passes.forward + passes.backward
    seconds = _walked(job, layout, pipeline, places, passes, hops) if count > 1 else float(m * both[0])
    slowest = int(np.argmax(both if np.ptp(whole - both) == 0.0 else whole))
    first = places[slowest]
    parts = {name: m * first.at(one) for name, one in first.priced.parts().items()}
    parts["pipeline_communication"] = m * float(out[slowest] + back[slowest])
    idle = seconds - sum(parts.values())
    parts["bubble"] = idle if idle > ROUNDING * seconds else 0.0
    sent = (1.0 - blocking) * m * sum(hops.times(pipeline, layout.vpp)[slowest])
    hidden = {name: m * first.at(one) for name, one in first.priced.hidden().items()} | {"pipeline": sent}
    start, stages = 0, list[StageEstimate]()
    for number, (stage, one) in enumerate(zip(pipeline.stages, places, strict=True)):
        end = {name: one.at(values) for name, values in one.priced.step_end(out[number] + back[number]).items()}
        memory, _ = one.priced.memory
        stages.append(StageEstimate(
            kind=stage.kind, gpus=pipeline.count * stage.tp * layout.cp, start=start, layers=stage.layers, tp=stage.tp,
            recompute=stage.recompute, forward=float(passes.forward[number]), backward=float(passes.backward[number]),
            busy=float(m * whole[number]), imbalance=float(m * (whole.max() - whole[number])), end=end,
            memory={name: one.at(memory[name]) for name in COMPONENTS},
            usable_memory=float(job.clusters[stage.kind].hardware.usable_memory), out_of_memory=one.at(one.priced.out_of_memory),
            fits=bool(one.priced.fits[0, one.row]),
        ))  # fmt: skip
        start += stage.layers
    flop = places[0].at(places[0].priced.flop()) * m * pipeline.count
    return PipelineEstimate(seconds=seconds, stages=tuple(stages), parts=parts, hidden=hidden, flop=flop)


def _walked(
    job: MixedJob, layout: MixedLayout, pipeline: Pipeline, places: list[_Place], passes: StageDurations, hops: Hops
) -> float:  # fmt: skip
    """Seconds of the schedule, action by action; of one that runs empty, as often as it does."""
    schedule, count, vpp = int(SCHEDULES[layout.schedule]), len(pipeline.stages), layout.vpp
    at = Layout(num_microbatches=pipeline.num_microbatches)
    m, empty = int(until_flush(job.trainer, at).num_microbatches), float(flushes(job.trainer, at))
    if vpp == 1:
        return empty * float(walked_time(schedule, count, 1, m, passes))
    ends = [np.array([one.at(one.priced.slow * one.priced.ends[side]) for one in places]) for side in (0, 1)]

    def chunks(whole: Floats, own: Floats) -> Floats:
        """Equal but for the embedding in the first chunk and the head in the last."""
        every = np.tile((whole - own) / vpp, vpp)
        every[0] += own[0]
        every[-1] += own[-1]
        return every

    each = StageDurations(chunks(passes.forward, ends[0]), chunks(passes.backward, ends[1]), np.zeros(count * vpp))
    overlapped = bool(sends_overlap(job.trainer, Layout(schedule=schedule)))
    sends = hops.between(pipeline, vpp) if overlapped else 0.0
    walked = empty * float(walked_time(schedule, count, vpp, m, each, sends))
    return max(walked, pipeline.num_microbatches * hops.busiest_link(pipeline, vpp))


def _straggling(layout: MixedLayout, found: list[PipelineEstimate], slowest: int) -> float:
    """What the slowest GPU of the job adds, over computation and idle time; all stages of all pipelines are looked at.

    [cost.price.compute, straggling_of, whose first, middle and last stage are here as many as there are]
    """
    parts, m = found[slowest].parts, layout.pipelines[slowest].num_microbatches
    counts = np.array([[float(stage.gpus)] for one in found for stage in one.stages])
    seconds = np.array([[stage.busy / m] for one in found for stage in one.stages])
    computed = np.array([(parts["compute"] + parts["recompute"]) / m])
    return float(straggling_of(counts, seconds, computed)[0])
