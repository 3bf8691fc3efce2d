"""A step from the computation of a few ranks: measured passes, priced communication, the schedule walked with both.

What was measured takes the place of the cost model's computation; everything else is the cost model's own: exposed
communication inside the passes, the walk of the pipeline, traffic of data parallelism behind its new windows, stragglers,
overhead. Fed with the predicted computation it gives the prediction again, part by part.

    T = walk(measured passes + priced communication) + stragglers + exposed data traffic + once + measured update + overhead
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.pipeline.schedule_walk import stage_rank, walked_time
from planner.cost.price.data_parallel import data_parallel, data_slowdown
from planner.cost.price.stage_times import largest_stage
from planner.lab.run.plan_question import POSITIONS, position
from planner.layout import Layout
from planner.timeline.passes import pieces_by_action
from planner.timeline.priced_plan import Priced
from planner.trainer import Trainer

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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank's own computation took; collectives and what stands for them are not in it."""

    stage: int
    """Pipeline rank."""
    forward: dict[int, float]
    """Seconds per microbatch by virtual stage; the loss counts to the last."""
    backward: dict[int, float]
    """The same, input and weight gradients together."""
    weight: dict[int, float]
    """The part of it that is weight gradients, where the schedule computes them apart; else empty."""
    once: float
    """Seconds per step that both passes took beyond microbatches times the above."""
    optimizer: float
    """Seconds of clipping and update."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is predicted of every virtual stage, seconds per microbatch; on a processor that is not the cost model's own."""

    computed: dict[str, Floats]
    """Computation by pass: forward, backward, weight (part of backward)."""
    exchanged: dict[str, dict[str, Floats]]
    """Exposed communication by part (EXCHANGED) and pass."""
    ranks: list[int]
    """Pipeline rank of every virtual stage."""
    update: Floats
    """Seconds of clipping and update by kind of stage, (3,)."""


def predicted_of(priced: Priced) -> Predicted:
    """As the cost model has it; without a pipeline passes include the copies of sharded states."""
    pieces, layout = pieces_by_action(priced), priced.dealt
    count = 1 + max(stage for stage, _ in pieces)
    kinds = {"forward": "F", "backward": "BIW", "weight": "W"}

    def total(passes: str, parts: Iterable[str]) -> Floats:
        wanted = set(parts)
        found = np.zeros(count)
        for (stage, kind), each in pieces.items():
            if kind in passes:
                found[stage] += sum(one.seconds for one in each if not one.hidden and one.part in wanted)
        return found

    computed = {name: total(letters, COMPUTED) for name, letters in kinds.items()}
    return Predicted(
        computed=with_copies(priced, computed),
        exchanged={part: {name: total(kinds[name], [part]) for name in ("forward", "backward")} for part in EXCHANGED},
        ranks=[stage_rank(i, int(layout.pp), int(layout.schedule)) for i in range(count)],
        update=priced.shared.optimizer[:, 0],
    )  # fmt: skip


def with_copies(priced: Priced, computed: dict[str, Floats]) -> dict[str, Floats]:
    """Passes by name with the copies of sharded states, which without a pipeline belong to them."""
    if int(priced.dealt.pp) > 1:
        return computed
    m = int(priced.dealt.num_microbatches)
    more = dict(zip(("forward", "backward"), (float(one[0]) / m for one in _copies(priced)), strict=True))
    return {name: seconds + more.get(name, 0.0) for name, seconds in computed.items()}


def _data(priced: Priced, forward: Floats, backward: Floats, trainer: Trainer | None = None) -> Floats:
    """Exposed seconds per step of gradients and weights, by kind of stage, (3, 1)."""
    shared = priced.shared
    exposed, _ = data_parallel(
        trainer or priced.job.trainer, Layout.stack([priced.dealt]), shared, forward, backward,
        data_slowdown(priced.job.cluster, Layout.stack([priced.dealt])),
    )  # fmt: skip
    return exposed


def _without_copies(priced: Priced, *, gathers: bool) -> Trainer:
    """The trainer as if it moved nothing into and out of its communication buffers, or (``gathers``) only gathered weights."""
    trainer = priced.job.trainer
    kept = trainer.traffic.copied("gather") if gathers else 0.0
    return trainer.replace(copy_bytes={"reduce": 0.0, "gather": kept})


def _copies(priced: Priced) -> tuple[Floats, Floats]:
    """Seconds per step and kind of stage, (3,), that copies of sharded states add to the forward and the backward passes.

    Weights are copied in for every gather: before the forward pass, and with zero 3 before the backward pass as well.
    """
    forward, backward = priced.shared.forward, priced.shared.backward
    none = _data(priced, forward, backward, _without_copies(priced, gathers=False))
    gathers = (_data(priced, forward, backward, _without_copies(priced, gathers=True)) - none)[:, 0]
    every = (_data(priced, forward, backward) - none)[:, 0]
    ahead = gathers / 2.0 if int(priced.dealt.zero) == 3 and int(priced.dealt.pp) == 1 else gathers
    return ahead, every - ahead


def predicted_parts(priced: Priced) -> dict[str, float]:
    """The predicted step in the parts of an assembled one; they sum to the predicted step time."""
    seconds = {name: float(values[0]) for name, values in priced.estimate.time.items()}
    forward, backward = _windows(priced, np.ones(3), np.ones(3))
    exposed = _data(priced, forward, backward)
    end = largest_stage(exposed + priced.shared.optimizer + priced.shared.offload)[0]
    copies = float(np.add(*_copies(priced))[end])
    pipelined = int(priced.dealt.pp) > 1
    parts = {name: seconds.get(name, 0.0) for name in PARTS}
    parts["compute"] = sum(seconds[name] for name in COMPUTED) + (0.0 if pipelined else copies)
    parts["once_per_step"] = copies if pipelined else 0.0
    parts["data_communication"] = seconds["data_communication"] - copies
    return parts


def _windows(priced: Priced, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
    """Seconds per microbatch and kind of stage that traffic hides behind, the predicted ones times a factor each.

    [cost.estimate: each pass with the send that it waits for]
    """
    sent = priced.send[0] * int(priced.dealt.vpp)
    return priced.shared.forward * forward[:, None] + sent, priced.shared.backward * backward[:, None] + sent


@dataclass(frozen=True, kw_only=True)
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


def as_predicted(priced: Priced, predicted: Predicted, rank: int) -> Seen:
    """A pipeline rank that computes what is predicted."""
    mine = [i for i, where in enumerate(predicted.ranks) if where == rank]
    kind, pp = position(rank, int(priced.dealt.pp)), int(priced.dealt.pp)
    computed = predicted.computed
    halves = bool(computed["weight"].any())
    passes = {
        name: {i: float(computed[name][i]) for i in mine if halves or name != "weight"}
        for name in ("forward", "backward", "weight")
    }
    once = float(np.add(*_copies(priced))[kind]) if pp > 1 else 0.0
    return Seen(stage=rank, **passes, once=once, optimizer=float(predicted.update[kind]))


def predicted_step(priced: Priced, predicted: Predicted) -> Assembled:
    """The step of ranks that compute what is predicted of them; with ``predicted_of`` it has ``predicted_parts``."""
    ranks = range(int(priced.dealt.pp))
    return assemble(priced, [as_predicted(priced, predicted, rank) for rank in ranks], predicted)


def assemble(priced: Priced, seen: Sequence[Seen], predicted: Predicted | None = None) -> Assembled:
    """The step of a layout from what some of its ranks computed. At least one must have been measured.

    Stages that were not measured take the predicted computation times measured over predicted of a stage of the same
    kind (first, middle, last), or of all measured ones where their kind was not.
    """
    whole, layout = predicted or predicted_of(priced), priced.dealt
    pp, m = int(layout.pp), int(layout.num_microbatches)
    ratios, borrowed = _ratios(priced, whole, seen)
    computed = {
        name: whole.computed[name] * np.array([ratios[position(r, pp)][name] for r in whole.ranks])
        for name in whole.computed
    }
    for one in seen:
        for name in computed:
            for stage, seconds in getattr(one, name).items():
                computed[name][stage] = seconds
    waits = {
        name: np.sum([whole.exchanged[part][name] for part in EXCHANGED], axis=0) for name in ("forward", "backward")
    }
    forward, backward = computed["forward"] + waits["forward"], computed["backward"] + waits["backward"]
    mine = [[i for i, rank in enumerate(whole.ranks) if rank == r] for r in range(pp)]
    slowest = max(range(pp), key=lambda r: float((forward + backward)[mine[r]].sum()))

    def of_slowest(values: Floats) -> float:
        return m * float(values[mine[slowest]].sum())

    parts = dict.fromkeys(PARTS, 0.0)
    parts["compute"] = of_slowest(computed["forward"] + computed["backward"])
    for part in EXCHANGED:
        parts[part] = of_slowest(whole.exchanged[part]["forward"] + whole.exchanged[part]["backward"])
    busy = sum(parts.values())
    walked = busy
    if pp > 1:
        walked = walked_time(int(layout.schedule), pp, int(layout.vpp), m, (forward, backward, computed["weight"]))
    parts["bubble"] = max(walked - busy, 0.0)
    parts["stragglers"] = _stragglers(priced, parts)
    parts |= _ends(priced, whole, ratios, seen)
    if pp == 1:
        parts["compute"] += parts.pop("once_per_step")
        parts["once_per_step"] = 0.0
    parts["overhead"] = float(priced.estimate.time["overhead"][0])
    return Assembled(parts={name: parts[name] for name in PARTS}, slowest=slowest, borrowed=borrowed)


def _stragglers(priced: Priced, parts: dict[str, float]) -> float:
    """What the slowest GPU of the job adds to computation (the host's part, as predicted, left out) and bubble."""
    computed = sum(float(priced.estimate.time[name][0]) for name in ("compute", "recompute"))
    whole = predicted_parts(priced)["compute"]
    share = computed / whole if whole else 1.0
    return float(priced.estimate.slowed[0]) * (parts["compute"] * share + parts["bubble"])


Ratios = dict[int, dict[str, float]]
"""Measured over predicted by kind of stage (0 first, 1 middle, 2 last) and by pass or part."""


def _ratios(priced: Priced, predicted: Predicted, seen: Sequence[Seen]) -> tuple[Ratios, tuple[str, ...]]:
    """Of every kind of stage; and which of them are others' in words."""
    pp = int(priced.dealt.pp)
    names = ("forward", "backward", "weight", "optimizer")
    sums: dict[int, dict[str, list[float]]] = {}
    for one in seen:
        kind = position(one.stage, pp)
        mine = sums.setdefault(kind, {name: [0.0, 0.0] for name in names})
        for name in names[:3]:
            for stage, seconds in getattr(one, name).items():
                mine[name][0] += seconds
                mine[name][1] += float(predicted.computed[name][stage])
        mine["optimizer"][0] += one.optimizer
        mine["optimizer"][1] += float(predicted.update[kind])
    every = {name: [sum(one[name][i] for one in sums.values()) for i in (0, 1)] for name in names}

    def ratio(pair: list[float], other: float = 1.0) -> float:
        return pair[0] / pair[1] if pair[1] > 0 and pair[0] > 0 else other

    found, borrowed = {}, []
    for kind in sorted({position(rank, pp) for rank in range(pp)} | {0, 1, 2}):
        pairs = sums.get(kind, every)
        found[kind] = {name: ratio(pairs[name]) for name in names}
        if not pairs["weight"][0]:
            found[kind]["weight"] = found[kind]["backward"]
        if kind not in sums and any(position(rank, pp) == kind for rank in range(pp)):
            which = " and ".join(POSITIONS[one] for one in sums)
            borrowed.append(f"{POSITIONS[kind]} stage not measured: priced times measured over predicted of {which}")
    return found, tuple(borrowed)


def _beyond(priced: Priced, predicted: Predicted, name: str) -> Floats:
    """What is predicted of a pass over what the cost model says, by kind of stage, (3,): 1 where they are the same."""
    bare, pp = predicted_of(priced), int(priced.dealt.pp)
    sums = np.zeros((2, 3))
    for stage, rank in enumerate(bare.ranks):
        sums[:, position(rank, pp)] += predicted.computed[name][stage], bare.computed[name][stage]
    return np.divide(sums[0], sums[1], out=np.ones(3), where=sums[1] > 0)


def _ends(priced: Priced, predicted: Predicted, ratios: Ratios, seen: Sequence[Seen]) -> dict[str, float]:
    """What stands around the passes on the stage where it takes longest: traffic, copies, update.

    Exposed traffic is priced behind the windows that were measured.
    """
    kinds = (0, 1, 2)
    pp = int(priced.dealt.pp)
    longer = {name: np.array([ratios[kind][name] for kind in kinds]) for name in ("forward", "backward", "optimizer")}
    windows = _windows(priced, *(longer[name] * _beyond(priced, predicted, name) for name in ("forward", "backward")))
    exposed = _data(priced, *windows, _without_copies(priced, gathers=False))[:, 0]
    once = np.add(*_copies(priced)) if pp > 1 else np.zeros(3)
    optimizer = predicted.update * longer["optimizer"]
    for kind in kinds:
        measured = [one for one in seen if position(one.stage, pp) == kind]
        if measured:
            once[kind] = max(one.once for one in measured)
    if pp == 1:
        once[:] = seen[0].once
    end = int(largest_stage((exposed + once + optimizer)[:, None])[0])
    found = {"data_communication": exposed, "once_per_step": once, "optimizer": optimizer}
    return {name: float(seconds[end]) for name, seconds in found.items()}
