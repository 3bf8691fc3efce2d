"""What a run is priced as where nothing is compiled: on a processor, and on a GPU without a compiler. No torch here.

The trainer of a plan is priced with fused kernels, and with a host that works ahead of the device. The reference modules run eager
kernels there, and on a processor the host's work is work of the same core. A pass is then

    t(stage) = sum of its operators, as eager kernels, at the profile's rates + layers x h + ends x h_e
    h        = t(empty layer, measured) - t(empty layer, priced)

h: what torch does around the operators (modules, autograd, hooks of FSDP, DTensor), on layers too small for anything else that are
split like the plan's, less what the launches in the operators' own prices make of it.
"""

import dataclasses
import statistics
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.pipeline.partition import stage_parameters
from planner.lab.profile.layer_check import ROPE_PASSES
from planner.lab.reference.split import Split, Stage
from planner.lab.run.levels import Question
from planner.layout import Layout, Recompute, Schedule
from planner.record import record
from planner.rules import Job
from planner.timeline.passes import pieces_by_action
from planner.timeline.priced_plan import Priced, price
from planner.trainer import Trainer, changes_of
from planner.units import MICRO, format_seconds

COMPUTED = ("compute", "recompute")
"""Parts of a pass that are work of the core that computes."""
NORM_AND_SCALE = 12.0
"""Bytes per fp32 gradient that clipping moves: the norm reads 4, the scale reads 4 and writes 4, as kernels of their own.

[torch 2.13, nn/utils/clip_grad.py: get_total_norm, _foreach_mul_]
"""
LAYERS = (1, 3)
"""Of the small models that separate a layer from the ends."""
SMALL_MICROBATCHES = 4

Host = Mapping[str, tuple[float, float]]
"""Processor seconds by kind of pass, and of the update: of an empty layer, and of embedding and head together."""
UPDATED = "update"
"""The update among these kinds."""
KINDS = {"F": "forward", "B": "backward"}
"""Passes whose host time is said."""
UPDATE = ("clip", "optimizer")
"""Spans of a step that are its update."""
Passes = dict[str, Floats]
"""Seconds by kind of pass, arrays over the virtual stages: F forward, B the whole backward pass, W the part of it that a schedule
computes later (0 where it does not)."""


# ------------------------------------------------------------------------------------------------ the trainer as it runs


def as_run(trainer: Trainer, split: Split, *, on_cpu: bool) -> Trainer:
    """The trainer with the eager kernels of the reference modules; on a processor without a host next to the device.

    Not fused: plain torch operations, SwiGLU and rotary embedding as kernels that autograd runs backward, and a loss on fp32
    logits of 8 bytes forward and 12 backward per logit, of which the model counts 6 each. Gradients of microbatches after the
    first: a pipeline adds each tensor's to the fp32 one before, which is read and written, 8 bytes per parameter; otherwise it
    is copied into the buffer that is reduced, 4 written, and its share added to the one before, 8. The fresh gradient itself
    is still in the cache that its product wrote it into: 3.2 million parameters of a layer took 2.5 ms, 8 bytes are 2.4 ms
    and 12 are 3.6 (a core of a Xeon at 2.5 GHz, 2026-11-21).
    [torch, stage.backward_maybe_with_nosync; FSDPParamGroup.post_backward]
    """
    passes = {"norm": 1.0, "elementwise": 1.0, "rope": 1.0, "loss": 1.0}
    if not split.fused:
        passes |= {"rope": ROPE_PASSES, "loss": (16.0 if split.precision == "fp32" else 10.0) / 6.0}
    changes: dict[str, Any] = {
        "unfused": trainer.kernels.unfused | {"gradient_sum", "elementwise" if split.fused else "swiglu"}
    }
    if on_cpu:
        copies = {"accumulate": 8.0, "accumulate_in_pipeline": 0.0}
        if split.pp == 1 and split.zero > 1:
            copies |= {"accumulate": 4.0 + 8.0 / split.dp_shard, "reduce": 0.0}
        changes |= {"copy_bytes": copies, "host_time": 0.0, "unit_host_time": 0.0, "step_overhead": 0.0}
        changes |= {"host_factors": {"tensor_parallel": 1.0}}
    return trainer.replace(passes=passes, **changes)


def update_seconds(priced: Priced, split: Split, host: Host | None) -> Floats:
    """Seconds of the update as it runs, by kind of stage, (3,): the norm of the gradient and its scale, then the optimizer, with
    what the host needs around the tensors of its layers."""
    job, layout = priced.job, Layout.stack([priced.assigned])
    states = stage_parameters(job.workload, layout, priced.contents).updated(job.workload, layout)
    clip = np.ravel(job.cluster.hardware.memory_time(states * NORM_AND_SCALE, "elementwise"))
    each, ends = host[UPDATED] if host is not None else (0.0, 0.0)
    held = [sum(len(one.layers) for one in split.stages if one.rank == rank) for rank in range(split.pp)]
    layers = np.array([held[0], max(held[1:-1], default=0), held[-1]], dtype=float)
    at_ends = np.array([ends, 0.0, ends]) / min(split.pp, 2)
    moved = priced.shared.on_host(np.asarray(layout.num_microbatches, dtype=float))[:, 0]  # states on the host
    return priced.shared.optimizer[:, 0] + moved + clip + np.maximum(each * layers + at_ends, 0.0)


# ------------------------------------------------------------------------------------------------ passes


def computed(priced: Priced, parts: Container[str] | None = COMPUTED) -> Passes:
    """Seconds of one microbatch in some parts of its passes (None: all): of one core, whose work communication is not."""
    pieces = pieces_by_action(priced)
    stages = 1 + max(stage for stage, _ in pieces)
    return {
        kind: np.array([
            sum(
                one.end - one.start for letter in letters for one in pieces.get((stage, letter), ())
                if not one.hidden and (parts is None or one.part in parts)
            )
            for stage in range(stages)
        ])
        for kind, letters in (("F", "F"), ("B", "BIW"), ("W", "W"))
    }  # fmt: skip


def as_torch(found: Passes) -> Passes:
    """Tokens have no gradient: where the halves are apart torch's first stage does its whole backward pass as W."""
    if found["W"].any():
        found["W"][0] = found["B"][0]
    return found


def processor_seconds(priced: Priced, split: Split, host: Host | None) -> Passes:
    """Processor seconds of one microbatch's passes. Of a backward pass in two halves the first has the host's share."""
    found = computed(priced)
    layers = np.array([float(len(stage.layers)) for stage in split.stages])
    if host is not None:
        for kind, launches in priced_host(priced.job, priced.layout, split).items():
            each, ends = np.subtract(host[kind], launches)
            found[kind] += each * layers
            found[kind][[0, -1]] += ends / 2.0 if len(layers) > 1 else ends
    return as_torch({kind: np.maximum(seconds, 0.0) for kind, seconds in found.items()})


# ------------------------------------------------------------------------------------------------ empty layers


def not_measured(split: Split) -> str:
    """Why the host's work around layers like these is not measured; "" where it can be."""
    model = split.model
    kinds = (("experts", model.is_moe), ("latent attention", model.is_mla), ("a split sequence", split.cp > 1),
             ("products in 8 bits", split.linear))  # fmt: skip
    names = [name for name, has in kinds if has]
    return f"host time of layers with {' and '.join(names)} is not measured: it is priced by launches" if names else ""


def empty_layers(split: Split, layers: int) -> Split:
    """Layers without work on one stage, split by as many ranks: what is left is the host's.

    Gradients are reduced when the plan's are: in each microbatch, or, as in the middle of a pipeline, in none that is looked at.
    """
    rest, heads = split.world // split.tp, split.model.num_heads
    model = dataclasses.replace(
        split.model, name="small", num_layers=layers, hidden_size=8 * heads, head_dim=8, ffn_size=8 * split.tp,
        vocab_size=8 * split.tp, published_parameters=0.0, published_active_parameters=0.0,
    )  # fmt: skip
    return dataclasses.replace(
        split, model=model, sequence_length=2 * split.tp, pp=1, dp=rest, dp_shard=rest,
        zero=split.zero if split.pp == 1 else 1, num_microbatches=SMALL_MICROBATCHES,
        schedule="1F1B", stages=(Stage(rank=0, layers=tuple(range(layers))),),
    )  # fmt: skip


def priced_host(job: Job, layout: Layout, split: Split) -> Host:
    """What the model makes of empty layers, as ``Host`` without the update."""
    one, three = (_priced_small(job, layout, empty_layers(split, layers)) for layers in LAYERS)
    return {kind: apart(float(one[kind][0]), float(three[kind][0])) for kind in ("F", "B")}


def apart(one: float, three: float) -> tuple[float, float]:
    """Seconds of a layer, and of the ends, from a model of one layer and one of three."""
    each = (three - one) / float(LAYERS[1] - LAYERS[0])
    return each, one - each


def _priced_small(job: Job, layout: Layout, split: Split) -> Passes:
    like = layout.replace(
        pp=1, vpp=1, dp=split.dp, dp_shard=0, num_microbatches=SMALL_MICROBATCHES, first_stage_layers=0, last_stage_layers=0,
        schedule=Schedule.ONE_F_ONE_B, recompute_layers=0, zero=split.zero,
        **({"recompute_modules": 0} if int(layout.recompute) == Recompute.NONE else {}),
    )  # fmt: skip
    workload = dataclasses.replace(
        job.workload, model=split.model, sequence_length=split.sequence_length, document_length=0,
        global_batch_size=int(like.global_batch_size),
    )  # fmt: skip
    cluster = dataclasses.replace(job.cluster, num_gpus=int(like.num_gpus))
    return computed(price(Job(workload=workload, cluster=cluster, trainer=job.trainer), like))


# ------------------------------------------------------------------------------------------------ the profile


def yardsticks(cluster: Cluster) -> dict[str, float]:
    """Seconds that the yardsticks took when the cluster's profile was measured, at the rate that its figures have, where it has
    kept them: ``product`` of the passes, ``stream`` of the update, which moves bytes."""
    rows = cluster.hardware.measurements.get("yardstick", ())
    return {row["kind"]: float(row["us"]) * MICRO for row in reversed(rows)}


def host_is_measured(cluster: Cluster, split: Split) -> bool:
    """Whether empty layers are run before the steps: on the processor of the plan, where there can be such layers."""
    return cluster.hardware.is_cpu and not not_measured(split)


def profile_error(cluster: Cluster) -> float | None:
    """How far sums of operators were off from whole layers when the profile was measured, the largest, as a fraction."""
    rows = cluster.hardware.measurements.get("layer", ())
    return max((abs(float(row["error_percent"])) / 100.0 for row in rows if "error_percent" in row), default=None)


def mean_host(found: Sequence[Host | None]) -> Host | None:
    """Of the ranks that have measured it."""
    rows = [one for one in found if one]
    if not rows:
        return None
    means = {kind: np.mean([row[kind] for row in rows], axis=0) for kind in rows[0]}
    return {kind: (float(each), float(ends)) for kind, (each, ends) in means.items()}


def host_of(as_run: Mapping[str, Any] | None) -> Host | None:
    """What the ranks of a run have measured of the host, from its ``as_run``; None where they have not."""
    host = (as_run or {}).get("host")
    if host is None:
        return None
    names = {**KINDS, UPDATED: UPDATED}
    return {kind: (host[name]["layer_seconds"], host[name]["ends_seconds"]) for kind, name in names.items()}


# ------------------------------------------------------------------------------------------------ notes


@record
class EagerRun:
    """An uncompiled run, of all ranks or of one."""

    asked: Question
    """What was to be run."""
    priced: Priced
    """It as it was run."""
    on_cpu: bool
    """Whether it ran on a CPU."""
    not_compiled: Mapping[str, str]
    """Operators of a GPU that ran as several kernels, and why."""
    host: Host | None
    """What empty layers took."""
    slowed: Sequence[float]
    """How many times longer than in the profile the yardstick took, by step and rank."""
    update_slowed: Sequence[float]
    """The same of that of the update."""
    more: Sequence[str] = ()
    """Sentences of the level's own about the rate."""


def notes_of(run: EagerRun, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the prediction of an uncompiled run is made of, in numbers and sentences. ``rows``: its passes."""
    own = profile_error(run.asked.cluster)
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    found: dict[str, Any] = {
        "trainer": changes_of(run.priced.job.trainer, run.asked.trainer),
        "not_compiled": dict(run.not_compiled), "host": _host(run) if run.on_cpu else None,
        "yardstick": _yardstick(run) if run.on_cpu else None, "profile_error": own,
        "median_error": statistics.median(errors) if errors else None,
        "passes": len(errors), "within_profile_error": sum(one <= own for one in errors) if own is not None else None,
    }  # fmt: skip
    return found | {"sentences": [*(_on_cpu if run.on_cpu else _on_gpu)(run, found), *run.more, *_errors(found)]}


def _host(run: EagerRun) -> dict[str, Any] | None:
    """Seconds of an empty layer and of the ends, measured and as its operators are priced; those of the update measured."""
    if run.host is None:
        return None
    priced = priced_host(run.priced.job, run.priced.layout, run.asked.split)
    found = {
        name: dict(zip(("layer_seconds", "ends_seconds"), run.host[kind], strict=True))
        for kind, name in {**KINDS, UPDATED: UPDATED}.items()
    }
    for kind, name in KINDS.items():
        found[name] |= dict(zip(("priced_layer_seconds", "priced_ends_seconds"), priced[kind], strict=True))
    return found


def _yardstick(run: EagerRun) -> dict[str, float] | None:
    """Of the profile, and how much longer it took during the steps: the mean of ranks and steps."""
    seconds = yardsticks(run.asked.cluster).get("product")
    if not seconds or not run.slowed:
        return None
    slowed, update = statistics.fmean(run.slowed), statistics.fmean(run.update_slowed or run.slowed)
    return {"profile_seconds": seconds, "slowed": slowed, "update_slowed": update}


def _operators(run: EagerRun) -> str:
    """What a compiler would have made one kernel each."""
    return f"{'norms, ' if run.asked.split.fused else ''}SwiGLU, rotary embedding and loss"


def _on_gpu(run: EagerRun, _: dict[str, Any]) -> list[str]:
    names = "; ".join(f"{name}: {why}" for name, why in run.not_compiled.items())
    return [
        f"priced as it ran: {_operators(run)} as sequences of eager kernels, because no compiler made one of them ({names})"
    ]


def _on_cpu(run: EagerRun, found: dict[str, Any]) -> list[str]:
    host, at = found["host"], found["yardstick"]
    layers = not_measured(run.asked.split) or "host time around layers was not measured: it is priced by launches"
    if host is not None:
        layers = "host time of a layer, measured on empty layers: " + " and ".join(
            f"{format_seconds(host[kind]['layer_seconds'])} {kind} (priced by launches "
            f"{format_seconds(host[kind]['priced_layer_seconds'])})"
            for kind in KINDS.values()
        )
    rate = "the profile has no yardstick: a core that is slower now than when it was profiled shows as an error"
    if at is not None:
        rate = (
            f"processor time is given at the profile's rate of the core: its yardstick took {at['slowed']:.2f} times as long "
            f"during the steps, that of the update {at['update_slowed']:.2f} times"
        )
    return [
        f"priced as it ran: nothing is compiled on a CPU, so {_operators(run)} are sequences of eager kernels, further gradients "
        "are added by kernels, the update takes the gradient's norm, and the host's work is the core's", layers, rate,
    ]  # fmt: skip


def _errors(found: dict[str, Any]) -> list[str]:
    if found["median_error"] is None:
        return []
    said, own = f"passes are off by {found['median_error']:.1%} in the median", found["profile_error"]
    if own is None:
        return [f"{said}; the profile has no whole layer, so its own error is not known"]
    count = f"{found['within_profile_error']} of {found['passes']}"
    return [f"{said}; {count} within the profile's own error ({own:.1%}: its operators' sum against whole layers)"]
