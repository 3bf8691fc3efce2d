"""What a timeline is made of: slices on the streams of pipeline ranks, and the passes of every virtual stage, part by part."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.estimate import PARTS
from planner.cost.pipeline.partition import stage_parameters
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.cost.price.stage_times import hook_seconds, pass_seconds, stage_totals
from planner.cost.price.state_traffic import accumulation_seconds, activation_offload
from planner.cost.state_dtypes import stored_as
from planner.layout import Layout, Schedule
from planner.timeline.priced_plan import Priced

SPLIT = (Schedule.ZB_H1, Schedule.ZB_2P, Schedule.ZBV, Schedule.DUALPIPE_V)
"""Schedules that issue input gradients (I) and weight gradients (W) apart."""
GROUPS = {"tp": "tensor_communication", "cp": "context_communication", "ep": "expert_communication"}
WORDS = {
    "offload": "activations from host", "host": "wait for host", "recompute": "recompute", "compute": "",
    "tensor_communication": "tensor", "context_communication": "context", "expert_communication": "expert",
    "pipeline_communication": "send",
}  # fmt: skip
"""The parts of a pass in words ('' = the kind of action), in the order in which they are drawn; the model knows their sums,
not how they alternate layer by layer."""
Parts = dict[str, Floats]
"""Seconds of one pass by part, arrays over the virtual stages."""
STREAMS = ("compute", "host", "tensor", "context", "expert", "pipeline", "data", "offload")
"""What one rank runs at the same time: kernels, waiting for the host, communication by group, copies to the host."""
STREAM_OF_PART = {part: part.removesuffix("_communication") for part in PARTS} | {
    "recompute": "compute", "bubble": "compute", "stragglers": "compute", "optimizer": "compute", "overhead": "host",
}  # fmt: skip
"""The stream on which each part of the step time runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Something that runs on one stream of one rank, or as a piece on that of every action of one stage and kind."""

    kind: str
    """F, B, I, W, recompute; what is none of them in words: 'send', 'gather weights', 'optimizer'."""
    part: str
    """Part of the step time that it counts for, one of PARTS."""
    hidden: bool = False
    """It runs during computation and is no part of the step time."""
    start: float
    """Seconds from the start of the step; of a piece from that of the action."""
    end: float
    """The same."""
    rank: int = -1
    """Pipeline rank."""
    stage: int = -1
    """Virtual stage in model order; -1 = the whole rank."""
    microbatch: int = -1
    """-1 = none."""

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start

    @property
    def stream(self) -> str:
        """One of STREAMS."""
        return STREAM_OF_PART[self.part]


def stage_kind(rank: int, pp: int) -> int:
    """Kind of stage, as the cost model prices them, of a rank: 0 first, 1 middle, 2 last."""
    return 0 if rank == 0 else 2 if rank == pp - 1 else 1


def rank_of_kind(kind: int, pp: int) -> int:
    """The rank that a kind of stage is priced at: the first, the second, the last."""
    return min((0, 1, pp - 1)[kind], pp - 1) if pp > 2 or kind != 1 else 0


def pieces_by_action(priced: Priced) -> dict[tuple[int, str], tuple[Slice, ...]]:
    """The pieces of an action by (virtual stage, kind of action), in order; hidden communication among them.

    Their seconds are those of ``cost.refine.durations``, split by the same layer costs: what is not hidden sums to the
    duration of the action. Hidden communication runs during the computation of the passes that can hide it, in proportion to
    their length: both, or the backward pass where the trainer overlaps nothing else (tp_backward).
    """
    passes, hidden = _seconds(priced)
    overlap = priced.job.trainer.traffic.overlap
    found: dict[tuple[int, str], tuple[Slice, ...]] = {}
    for stage in range(len(passes["F"]["compute"])):
        windows = {kind: float(parts["recompute"][stage] + parts["compute"][stage]) for kind, parts in passes.items()}
        for kind, parts in passes.items():
            overlapped = {}
            for group, part in GROUPS.items():
                hides = [k for k in windows if not (group == "tp" and "tp" not in overlap and k == "F")]
                room = sum(windows[k] for k in hides)
                if kind in hides and room > 0:
                    overlapped[part] = float(hidden[group][stage]) * windows[kind] / room
            found[stage, kind] = _pieces(kind, {part: float(parts[part][stage]) for part in WORDS}, overlapped)
    return found


def _pieces(kind: str, parts: dict[str, float], overlapped: dict[str, float]) -> tuple[Slice, ...]:
    """One action: its parts one after the other, hidden communication from where its computation starts."""
    pieces, at = [], 0.0
    for part, word in WORDS.items():
        if part == "recompute":
            pieces += [
                Slice(kind=WORDS[name], part=name, start=at, end=at + seconds, hidden=True)
                for name, seconds in overlapped.items()
                if seconds > 0
            ]
        if parts[part] > 0:
            pieces.append(Slice(kind=word or kind, part=part, start=at, end=at + parts[part]))
            at += parts[part]
    return tuple(pieces)


def _seconds(priced: Priced) -> tuple[dict[str, Parts], Parts]:
    """Seconds by kind of action, part and virtual stage; and hidden seconds of both passes by group and virtual stage."""
    job, layout = priced.job, Layout.stack([priced.assigned])
    parameters = stage_parameters(job.workload, layout, priced.contents, job.trainer.kernels)
    trainer = stored_as(job.workload, job.trainer)
    costs = price_blocks(job.workload, job.cluster, trainer, layout)
    totals, ends, _ = stage_totals(layout, priced.contents, costs)
    totals[INDEX["wgrad"]] += accumulation_seconds(job.workload, job.cluster, trainer, layout, parameters).T
    hooks = hook_seconds(trainer, layout, priced.contents)
    busy, host = pass_seconds(trainer, layout, totals, hooks, job.cluster.hardware.serial_launches)
    passes = busy[0] + host[0], busy[1] + host[1]
    waiting = activation_offload(job.cluster, layout, priced.contents, priced.times.saved, *passes)
    nothing = np.zeros_like(waiting)

    def spread(whole: Floats, at_ends: Floats = nothing) -> Floats:
        times = dataclasses.replace(
            priced.times, forward=whole, ends_forward=at_ends, backward=nothing, ends_backward=nothing,
            weight=nothing, ends_weight=nothing,
        )  # fmt: skip
        return priced.durations(times).forward

    def quantity(*names: str) -> Floats:
        rows = [INDEX[name] for name in names]
        return spread(totals[rows].sum(axis=0), ends[rows].sum(axis=0))

    send = np.full(len(spread(nothing)), priced.send[0])
    none = np.zeros_like(send)
    forward = {part: quantity(f"{group}_forward") for group, part in GROUPS.items()} | {
        "compute": quantity("forward"), "recompute": none, "host": spread(host[0]), "offload": none,
        "pipeline_communication": send,
    }  # fmt: skip
    backward = {part: quantity(f"{group}_backward") for group, part in GROUPS.items()} | {
        "compute": quantity("dgrad", "wgrad"), "recompute": quantity("recompute"), "host": spread(host[1]),
        "offload": spread(waiting), "pipeline_communication": send,
    }  # fmt: skip
    hidden = {group: quantity(f"{group}_hidden") for group in GROUPS}
    if int(priced.assigned.schedule) not in SPLIT or int(priced.assigned.pp) == 1:
        return {"F": forward, "B": backward}, hidden
    weights = dict.fromkeys(WORDS, none) | {"compute": quantity("wgrad")}
    inputs = {**backward, "compute": backward["compute"] - weights["compute"]}
    return {"F": forward, "I": inputs, "W": weights}, hidden
