"""Stages of a mixed plan validated one by one: each as its rank would run it, on fake tensors or alone on this device.

A mixed plan has as many kinds of ranks as it has unlike stages. Level meta builds the modules, the optimizer and one step of
each on fake
tensors, at full size, and compares memory; level rank runs those stages for real, alone, whose kind is the device of this
machine, and
compares memory and the passes of a microbatch. What lies between ranks (sends over mixed links, gradients of unequal shares,
replicas
that wait) is priced and not run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from planner import detect
from planner.cost.memory.states import ALLOCATED
from planner.errors import PlannerError, listed
from planner.lab.launch.gpus import gpus_here
from planner.lab.launch.torchrun import need_torch
from planner.lab.reference.split import LIKE_TORCH, Split, Stage, split_of
from planner.lab.run.comparison import NAMES, memory_row
from planner.lab.run.workers import Lost, Manner, measure_all
from planner.mixed.mixed_estimate import StageEstimate, estimate_mixed
from planner.mixed.mixed_job import RECOMPUTES, SCHEDULES, MixedJob
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_plan import MixedPlan, job_of
from planner.record import record
from planner.units import format_seconds

RUNGS = ("auto", "meta", "rank")
BETWEEN = (
    "sends between stages, gradients and weights over mixed links, replicas that wait for each other: one rank alone shows none of "
    "them; run the export on the nodes, and calibrate with its log"
)


@record
class StageTask:
    """One of the unlike stages of a mixed plan."""

    pipeline: int
    """Place of its pipeline in the layout."""
    number: int
    """Of its pipeline."""
    kind: str
    layers: int
    split: Split
    """Its pipeline as if all replicas were like it: what one rank of the stage holds is the same."""
    rank: int
    """That is run, of ``split``."""
    predicted: Mapping[str, float]
    """Bytes at the peak by category of the memory tracker, and "peak"."""
    forward: float
    """Seconds of a microbatch, with its send."""
    backward: float


def tasks_of(plan: MixedPlan) -> tuple[list[StageTask], list[str], list[str]]:
    """The unlike stages, what was changed to run them, what is not checked. Raises PlannerError where nothing can be run."""
    job, layout, changes = _as_torch(plan)
    found, unchecked, seen = list[StageTask](), [BETWEEN], set[str]()
    estimate = estimate_mixed(job, layout)
    for number, pipeline in enumerate(layout.pipelines):
        if len({stage.tp for stage in pipeline.stages}) > 1:
            unchecked.append(
                f"pipeline {number}: activations between stages of unlike tp are split again, which is not run here"
            )
        for position, stage in enumerate(pipeline.stages):
            if stage.recompute_layers:
                unchecked.append(
                    f"pipeline {number}, stage {position}: recompute of {stage.recompute_layers} of its {stage.layers} layers"
                )
                continue
            task = _stage_task(job, layout, (number, position), estimate.pipelines[number].stages[position])
            if (key := str((task.kind, task.split, task.rank))) not in seen:
                seen.add(key)
                found.append(task)
    if not found:
        raise PlannerError(f"no stage of this plan can be run alone here: {'; '.join(unchecked[1:])}")
    return found, changes, unchecked


def _as_torch(plan: MixedPlan) -> tuple[MixedJob, MixedLayout, list[str]]:
    """Job and layout as the torch model has them; what was changed for that."""
    job = plan.job()
    if job.trainer.code_base in LIKE_TORCH:
        return job, plan.layout, []
    layout = dataclasses.replace(plan.layout, zero=max(plan.layout.zero, 2))
    changes = [f"trainer torchtitan instead of {job.trainer.name}, whose memory the torch model has not"]
    changes += [f"zero {layout.zero} instead of {plan.layout.zero}"] if layout.zero != plan.layout.zero else []
    return job_of(plan.workload, plan.cluster, "torchtitan"), layout, changes


def _stage_task(job: MixedJob, layout: MixedLayout, place: tuple[int, int], priced: StageEstimate) -> StageTask:
    """A stage by its pipeline and its place there."""
    number, position = place
    pipeline = layout.pipelines[number]
    stage, pp = pipeline.stages[position], len(pipeline.stages)
    columns = job.layout(
        stage.kind, tp=stage.tp, pp=pp, dp=layout.replicas, cp=layout.cp, ep=layout.ep, zero=layout.zero,
        micro_batch_size=pipeline.micro_batch_size, num_microbatches=pipeline.num_microbatches,
        recompute=int(RECOMPUTES[stage.recompute]), schedule=int(SCHEDULES[layout.schedule]),
    )  # fmt: skip
    start, stages = 0, []
    for rank, one in enumerate(pipeline.stages):
        stages.append(Stage(rank=rank, layers=tuple(range(start, start + one.layers))))
        start += one.layers
    split = dataclasses.replace(split_of(job.workload, job.trainers[stage.kind], columns), stages=tuple(stages))
    memory = {name: priced.memory[name] for name in ALLOCATED}
    memory["workspace"] -= job.clusters[stage.kind].hardware.workspace_memory  # of GPU libraries: no tensor
    return StageTask(
        pipeline=number, number=position, kind=stage.kind, layers=stage.layers, split=split, rank=position * (split.world // pp),
        predicted={**{NAMES[name]: size for name, size in memory.items()}, "peak": sum(memory.values())},
        forward=priced.forward, backward=priced.backward,
    )  # fmt: skip


def validate_stages(
    plan: MixedPlan, rung: str = "auto", device: str | None = None, *, limit: float = 1200.0, steps: tuple[int, int] = (2, 5),
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Memory, and on level rank passes, of every unlike stage compared with its price; plain data.

    ``rung``: meta, rank, or auto: rank where a kind of the plan is this machine's device. ``steps``: warm and measured ones.
    Raises PlannerError for levels that need all ranks, and where torch is missing.
    """
    if rung not in RUNGS:
        raise PlannerError(
            f"--rung {rung} runs ranks together, and a mixed plan has unlike ones on unlike GPUs: known here are {listed(RUNGS)}; "
            "the whole plan runs as its export ('plan export --to pytorch')"
        )
    need_torch()
    tasks, changes, unchecked = tasks_of(plan)
    here = _kinds_here(plan, device)
    if rung == "rank" and not here:
        kinds = listed(sorted({one.kind for one in tasks}), "and")
        raise PlannerError(
            f"--rung rank needs a device of the plan, which has {kinds}, and this machine has none; use --rung meta"
        )
    chosen = "rank" if here and rung != "meta" else "meta"
    if chosen == "rank":
        away = sorted({one.kind for one in tasks} - set(here))
        unchecked += (
            [f"stages on {listed(away, 'and')}: not this machine's device; run this command there, or with --rung meta"]
            if away
            else []
        )
        tasks = [one for one in tasks if one.kind in here]
    rows = [_alone(one, here[one.kind], steps, say) if chosen == "rank" else _tracked(one, limit, say) for one in tasks]
    return {
        "rung": chosen, "plan": plan.workload.model.name, "trainer": plan.trainer, "changes": changes, "unchecked": unchecked,
        "outcome": next((row["failure"]["outcome"] for row in rows if row["failure"]), "completed"), "stages": rows,
    }  # fmt: skip


def _kinds_here(plan: MixedPlan, device: str | None) -> dict[str, str]:
    """Kinds of the plan that are this machine's device -> cpu or cuda."""
    gpus = gpus_here(device)
    name = detect.profile_of(gpus.names[0]) if gpus.count and gpus.names else None
    found = {}
    for one in plan.cluster.nodes:
        cpu = one.profile.is_cpu and not gpus.count and one.profile.device == detect.processor()
        if cpu or (name is not None and name == one.profile.name):
            found[one.kind] = "cpu" if cpu else "cuda"
    return found


def _row(task: StageTask) -> dict[str, Any]:
    return {
        "pipeline": task.pipeline, "stage": task.number, "kind": task.kind, "layers": task.layers, "tp": task.split.tp,
        "recompute": task.split.recompute, "memory": [], "passes": [], "failure": None,
    }  # fmt: skip


def _memory(task: StageTask, parts: Mapping[str, float], total: float) -> list[dict[str, Any]]:
    """At the peak on both sides; the parts sum to it."""
    rows = [
        memory_row(name, task.predicted[name], float(parts.get(name, 0.0))) | {"bound": None, "inside": None}
        for name in NAMES.values()
    ]
    return [*rows, memory_row("peak", task.predicted["peak"], total)]


def _tracked(task: StageTask, limit: float, say: Callable[[str], object]) -> dict[str, Any]:
    """One step of the stage's rank on fake tensors."""
    from planner.lab.run.meta import measure_ranks

    row, gone = _row(task), list[Lost]()
    (found,) = measure_ranks(task.split, [task.rank], limit=limit, say=say, lost=gone.append)
    if found is None:
        if gone[0].kind == "failed":
            raise PlannerError(gone[0].sentence)
        return {**row, "failure": gone[0].failure(0)}
    return {**row, "parameters": found.parameters, "memory": _memory(task, found.most.parts, found.most.total)}


def _alone(task: StageTask, device: str, steps: tuple[int, int], say: Callable[[str], object]) -> dict[str, Any]:
    """The stage's rank by itself on this machine's device: memory, and passes where nothing but computation is in their price."""
    from planner.lab.run.emulate import Alone, emulate

    row, gone = _row(task), list[Lost]()
    alone = Alone(device=device, warmup=steps[0], steps=steps[1])
    manner = Manner(work=partial(emulate, alone), at_once=1, fork=device == "cpu", where="alone on one device")
    (found,) = measure_all([(task.rank, task.split)], manner, say=say, lost=gone.append)
    if found is None or found.failure is not None:
        return {**row, "failure": found.failure if found is not None else gone[0].failure(0)}
    row["parameters"] = found.memory.parameters
    row["memory"] = _memory(task, found.memory.most.parts, found.memory.most.total)
    alike = (
        task.split.tp * task.split.cp * task.split.ep * task.split.pp == 1
    )  # nothing but computation is in the price
    for kind, predicted in (("F", task.forward), ("B", task.backward)):
        measured = found.seen().passes.get((kind, task.number))
        if measured is not None:
            error = predicted / measured - 1.0 if alike else None
            row["passes"].append({"pass": kind, "predicted_s": predicted, "measured_s": measured, "error": error})
    return row


def lines(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells of the table: a row per stage."""
    rows = list[tuple[str, ...]]()
    for one in found["stages"]:
        peak = next((row for row in one["memory"] if row["what"] == "peak"), None)
        times = [
            f"{row['pass']} {format_seconds(row['predicted_s'])} / {format_seconds(row['measured_s'])}"
            for row in one["passes"]
        ]
        rows.append((
            f"{one['pipeline']}.{one['stage']}", one["kind"], str(one["layers"]), str(one["tp"]), one["recompute"],
            "-" if peak is None else f"{peak['predicted_gib']:.2f}", "-" if peak is None else f"{peak['measured_gib']:.2f}",
            one["failure"]["outcome"] if one["failure"] else f"{100 * peak['error']:+.1f} %" if peak else "-", ", ".join(times),
        ))  # fmt: skip
    return rows
