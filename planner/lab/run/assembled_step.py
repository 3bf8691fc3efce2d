"""A step from the computation of a few ranks: measured passes, priced communication, the schedule walked with both.

What was measured takes the place of the cost model's computation; everything else is the cost model's own: exposed
communication inside the passes, the walk of the pipeline, traffic of data parallelism behind its new windows, stragglers,
overhead. Fed with the predicted computation it gives the prediction again, part by part.

    T = walk(measured passes + priced communication) + stragglers + exposed data traffic + once + measured update + overhead
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from planner.arrays import Floats
from planner.cost import estimate
from planner.cost.pipeline.schedule_walk import stage_rank, walked_time
from planner.cost.price.data_parallel import data_parallel, data_slowdown
from planner.lab.reference.split import Split
from planner.lab.run.eager_pricing import Host, Passes, as_run, computed, processor_seconds, update_seconds
from planner.lab.run.levels import POSITIONS, Question
from planner.layout import Layout
from planner.record import record
from planner.timeline.passes import stage_kind
from planner.timeline.priced_plan import Priced

COMPUTED = ("compute", "recompute", "host")
"""Parts of a pass that one rank alone shows; in a measured pass they are one."""
EXCHANGED = ("tensor_communication", "context_communication", "expert_communication", "pipeline_communication")
"""Parts of a pass that need the other ranks."""
PARTS = (
    "compute", *EXCHANGED, "bubble", "stragglers", "data_communication", "once_per_step", "optimizer", "overhead",
)  # fmt: skip
"""Parts of an assembled step; they sum to it. ``compute`` is compute, recompute and host of the cost model's parts.

``once_per_step`` is copies into and out of the buffers of sharded states, which a pipeline makes once per step; without one
they belong to every pass, and to ``compute``.
"""
MEASURED = ("compute", "once_per_step", "optimizer")
"""Parts that one rank shows. The others are priced, behind and around the measured computation."""


@record
class Seen:
    """What one rank's own computation took; collectives and what stands for them are not in it."""

    stage: int
    """Pipeline rank."""
    passes: dict[tuple[str, int], float]
    """Seconds per microbatch by pass and virtual stage, see ``eager_pricing.Passes``: the loss counts to the last forward pass."""
    once: float
    """Seconds per step that both passes took beyond microbatches times the above."""
    optimizer: float
    """Seconds of clipping and update."""


@record
class Predicted:
    """What is predicted of every virtual stage, seconds per microbatch; on a processor that is not the cost model's own."""

    computed: Passes
    """Computation by pass."""
    exchanged: dict[str, Floats]
    """Exposed communication by part (EXCHANGED): of forward and backward passes, (2, stages)."""
    ranks: list[int]
    """Pipeline rank of every virtual stage."""
    update: Floats
    """Seconds of clipping and update by kind of stage, (3,)."""


def predicted_of(priced: Priced) -> Predicted:
    """As the cost model has it; without a pipeline passes include the copies of sharded states."""
    layout, found = priced.assigned, computed(priced, COMPUTED)
    exchanged = {part: computed(priced, (part,)) for part in EXCHANGED}
    return Predicted(
        computed=with_copies(priced, found),
        exchanged={part: np.array([seconds["F"], seconds["B"]]) for part, seconds in exchanged.items()},
        ranks=[stage_rank(i, int(layout.pp), int(layout.schedule)) for i in range(len(found["F"]))],
        update=priced.shared.optimizer[:, 0] + on_host(priced),
    )  # fmt: skip


def on_host(priced: Priced) -> Floats:
    """Seconds of copies and update of states in host memory by kind of stage, (3,): part of the update that is measured."""
    return priced.shared.on_host(np.asarray(priced.assigned.num_microbatches, dtype=float))[:, 0]


def with_copies(priced: Priced, passes: Passes) -> Passes:
    """Passes with the copies of sharded states, which without a pipeline belong to them."""
    if int(priced.assigned.pp) > 1:
        return passes
    forward, backward = _copies(priced)[:, 0] / int(priced.assigned.num_microbatches)
    return passes | {"F": passes["F"] + forward, "B": passes["B"] + backward}


def priced_as_run(asked: Question) -> Priced:
    """The plan with the trainer that runs on a processor."""
    return asked.priced(as_run(asked.trainer, asked.split, on_cpu=True))


def predicted_as_run(priced: Priced, split: Split, host: Host | None) -> Predicted:
    """Passes and updates of every stage of what ``priced_as_run`` gave, with the host's work that was measured."""
    computed = with_copies(priced, processor_seconds(priced, split, host))
    return dataclasses.replace(predicted_of(priced), computed=computed, update=update_seconds(priced, split, host))


def parts_as_run(asked: Question, host: Host | None) -> dict[str, float]:
    """Seconds of the whole plan's step by part of the cost model's; they sum to it. The host's work is in compute."""
    priced = priced_as_run(asked)
    found = predicted_step(priced, predicted_as_run(priced, asked.split, host)).parts
    found["data_communication"] += found.pop("once_per_step")  # copies of sharded states
    return {part: found.get(part, 0.0) for part in estimate.PARTS}


def _data(priced: Priced, longer: Floats, *copied: str) -> Floats:
    """Exposed seconds per step of gradients and weights by kind of stage, (3,), with copies into (``reduce``) and out of
    (``gather``) their buffers. They hide behind each pass and the send that it waits for; ``longer``, (2, 3): forward and
    backward passes over the predicted ones."""
    trainer, layout = priced.job.trainer, Layout.stack([priced.assigned])
    trainer = trainer.replace(
        copy_bytes={name: trainer.traffic.copied(name) if name in copied else 0.0 for name in ("reduce", "gather")}
    )
    windows = np.array([priced.shared.forward, priced.shared.backward]) * longer[:, :, None]
    forward, backward = windows + priced.send[0] * int(priced.assigned.vpp)
    slowdown = data_slowdown(priced.job.cluster, layout)
    return data_parallel(trainer, layout, priced.shared, forward, backward, slowdown)[0][:, 0]


def _copies(priced: Priced) -> Floats:
    """Seconds per step that copies of sharded states add to forward and backward passes, by kind of stage, (2, 3).

    Weights are copied in for every gather: before the forward pass, and with zero 3 before the backward pass as well.
    """
    as_priced = np.ones((2, 3))
    every, gathers, none = (_data(priced, as_priced, *names) for names in (("reduce", "gather"), ("gather",), ()))
    ahead = gathers - none
    if int(priced.assigned.zero) == 3 and int(priced.assigned.pp) == 1:
        ahead = ahead / 2.0
    return np.array([ahead, every - none - ahead])


@record
class Assembled:
    """A step put together."""

    parts: dict[str, float]
    """Seconds by part (PARTS); they sum to the step."""
    slowest: int
    """Pipeline rank whose passes take longest: its computation and communication are the parts'."""
    borrowed: tuple[str, ...]
    """Stages that were not measured and took the ratio of measured to predicted of others, in words."""

    @property
    def step(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.parts.values())


def predicted_step(priced: Priced, predicted: Predicted) -> Assembled:
    """The step of ranks that compute what is predicted of them; with ``predicted_of`` it is the cost model's."""
    return assemble(priced, (), predicted)


def assemble(priced: Priced, seen: Sequence[Seen], whole: Predicted) -> Assembled:
    """The step of a layout from what some of its ranks computed and what is predicted of the whole.

    Stages that were not measured take the predicted computation times measured over predicted of a stage of the same
    kind (first, middle, last), or of all measured ones where their kind was not.
    """
    layout = priced.assigned
    pp, m = int(layout.pp), int(layout.num_microbatches)
    kinds = np.array([stage_kind(rank, pp) for rank in whole.ranks])
    ratios, borrowed = _ratios(pp, whole, seen)
    computed = {name: seconds * ratios[name][kinds] for name, seconds in whole.computed.items()}
    for (name, stage), seconds in (item for one in seen for item in one.passes.items()):
        computed[name][stage] = seconds
    passes = np.array([computed["F"], computed["B"]])
    forward, backward = passes + sum(whole.exchanged.values())
    slowest = int(np.bincount(whole.ranks, forward + backward).argmax())
    mine = np.array(whole.ranks) == slowest
    parts = dict.fromkeys(PARTS, 0.0)
    for part, of_passes in (("compute", passes), *whole.exchanged.items()):
        parts[part] = m * float(of_passes[:, mine].sum())
    busy = walked = sum(parts.values())
    if pp > 1:
        walked = walked_time(int(layout.schedule), pp, int(layout.vpp), m, (forward, backward, computed["W"]))
    parts["bubble"] = max(walked - busy, 0.0)
    parts["stragglers"] = _stragglers(priced, parts)
    sums = np.array([[np.bincount(kinds, one[name], 3) for name in ("F", "B")]
                     for one in (computed, predicted_of(priced).computed)])  # fmt: skip
    longer = np.divide(sums[0], sums[1], out=np.ones((2, 3)), where=sums[1] > 0)
    parts |= _ends(priced, longer, whole.update * ratios["optimizer"], seen)
    if pp == 1:
        parts["compute"] += parts["once_per_step"]
        parts["once_per_step"] = 0.0
    parts["overhead"] = float(priced.estimate.time["overhead"][0])
    return Assembled(parts=parts, slowest=slowest, borrowed=borrowed)


def _stragglers(priced: Priced, parts: dict[str, float]) -> float:
    """What the slowest GPU of the job adds to computation (the host's part and copies, as predicted, left out) and bubble."""
    compute, recompute, host = (float(priced.estimate.time[name][0]) for name in COMPUTED)
    others = host + (float(_copies(priced)[:, 0].sum()) if int(priced.assigned.pp) == 1 else 0.0)
    share = (compute + recompute) / (compute + recompute + others)
    return float(priced.estimate.slowed[0]) * (parts["compute"] * share + parts["bubble"])


def _ratios(pp: int, whole: Predicted, seen: Sequence[Seen]) -> tuple[dict[str, Floats], tuple[str, ...]]:
    """Measured over predicted by pass (and optimizer) and kind of stage, (3,); and which are those of others, in words."""
    sums = {name: np.zeros((2, 3)) for name in (*whole.computed, "optimizer")}
    for one in seen:
        kind = stage_kind(one.stage, pp)
        for (name, stage), seconds in one.passes.items():
            sums[name][:, kind] += seconds, whole.computed[name][stage]
        sums["optimizer"][:, kind] += one.optimizer, whole.update[kind]
    measured = sorted({stage_kind(one.stage, pp) for one in seen})
    missing = [kind for kind in range(3) if kind not in measured]
    for pair in sums.values():
        pair[:, missing] = pair.sum(axis=1, keepdims=True)
    ratios = {name: np.divide(pair[0], pair[1], out=np.ones(3), where=(pair > 0).min(axis=0)) for name, pair in sums.items()}
    ratios["W"] = np.where(sums["W"][0] > 0, ratios["W"], ratios["B"])
    others = " and ".join(POSITIONS[kind] for kind in measured)
    return ratios, tuple(
        f"{POSITIONS[kind]} stage not measured: priced times measured over predicted of {others}"
        for kind in missing if kind in {stage_kind(rank, pp) for rank in range(pp)}
    )  # fmt: skip


def _ends(priced: Priced, longer: Floats, optimizer: Floats, seen: Sequence[Seen]) -> dict[str, float]:
    """What stands around the passes on the stage where it takes longest: traffic behind so much longer passes, copies (those
    that were measured, else priced), update."""
    pp = int(priced.assigned.pp)
    exposed, once = _data(priced, longer), _copies(priced).sum(axis=0) if pp > 1 else np.zeros(3)
    for kind in {stage_kind(one.stage, pp) for one in seen}:
        once[kind] = max(one.once for one in seen if stage_kind(one.stage, pp) == kind)
    found = {"data_communication": exposed, "once_per_step": once, "optimizer": optimizer}
    kinds = sorted({stage_kind(rank, pp) for rank in range(pp)})
    end = max(kinds, key=lambda kind: float(sum(seconds[kind] for seconds in found.values())))
    return {name: float(seconds[end]) for name, seconds in found.items()}
