"""The predicted step of one pipeline, action by action: what every rank does when, on which stream.

The pipeline is the cost model's own walk of its schedule (``cost.pipeline.schedule_walk``) with its durations; the parts of a
pass follow from the same layer costs (``passes``). Around it comes what the model adds to the step as a whole (``around``).
The end is the predicted step time, and on the slowest rank the seconds by part are the estimate's.

The model does not resolve, so the picture sets: inside a pass, exposed communication follows the computation in one piece (in
truth it alternates with it layer by layer); waiting for stragglers follows the pipeline.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.arrays import Floats
from planner.cost.estimate import PARTS
from planner.cost.pipeline.schedule_walk import Span, walk
from planner.cost.price.data_parallel import data_parallel, data_slowdown
from planner.cost.price.stage_times import largest_stage
from planner.cost.state_dtypes import stored_as
from planner.layout import Layout
from planner.record import record
from planner.timeline.passes import Slice, pieces_by_action, stage_kind
from planner.timeline.priced_plan import Priced

SAME = 1e-9
"""Part of a time below which a difference is rounding."""


@record
class Timeline:
    """One optimizer step of one pipeline; times in seconds from its start."""

    ranks: int
    """Pipeline ranks."""
    stages: int
    """Virtual stages, over all ranks."""
    num_microbatches: int
    """Microbatches of the step."""
    step_time: float
    """The end of the last slice."""
    pipeline_start: float
    """When the first forward pass may start: weights that are gathered once are there."""
    pipeline_end: float
    """When the last backward pass has ended."""
    actions: tuple[Span, ...]
    """Every action of every stage, whole: the classic picture of a pipeline. Those of one rank are in order of time."""
    pieces: dict[tuple[int, str], tuple[Slice, ...]]
    """The parts of an action, by stage and kind of action."""
    around: tuple[Slice, ...]
    """Before, after and (data-parallel traffic, hidden sends) during the actions."""
    hand_over: float
    """Seconds by which a rank's result reaches the next one later than walked (negative: earlier), so that the pipeline
    ends when the plan says: beyond 6 p microbatches the model extrapolates its walk. 0 where both agree."""

    def slices(self) -> Iterator[Slice]:
        """Everything, stream by stream; an action as its pieces."""
        yield from self.around
        for action in self.actions:
            for piece in self.pieces[action.stage, action.kind]:
                begin = min(action.start + piece.start, action.end)
                yield Slice(
                    rank=action.rank, kind=piece.kind, part=piece.part, stage=action.stage, microbatch=action.microbatch,
                    start=begin, end=min(action.start + piece.end, action.end), hidden=piece.hidden,
                )  # fmt: skip

    def totals(self, rank: int) -> dict[str, float]:
        """Seconds by part (PARTS) of one rank, and 'wait': at the end of the step, for ranks with more to update.

        They sum to the step time. 'bubble' is what the rank idles while the pipeline runs.
        """
        found, busy = dict.fromkeys(PARTS, 0.0), 0.0
        counts = Counter((one.stage, one.kind) for one in self.actions if one.rank == rank)
        for count, piece in ((count, piece) for key, count in counts.items() for piece in self.pieces[key]):
            if not piece.hidden:
                found[piece.part] += count * piece.seconds
                busy += count * piece.seconds
        for one in self.around:
            if one.rank == rank and not one.hidden:
                found[one.part] += one.seconds
                busy += one.seconds if one.microbatch >= 0 else 0.0
        found["bubble"] = self.pipeline_end - self.pipeline_start - busy
        return {**found, "wait": self.step_time - sum(found.values())}


@record
class Ends:
    """Seconds per step of what is not a pass, by kind of stage where they differ: arrays of length 3."""

    gather: Floats
    """Gathering weights, what is not hidden; copies into and out of buffers included."""
    reduce: Floats
    """Reducing gradients, what is not hidden."""
    gather_hidden: Floats
    reduce_hidden: Floats
    optimizer: Floats
    offload: Floats
    """Transfers and update of offloaded optimizer states."""
    stragglers: float
    """Waiting for the slowest GPU of the job."""
    overhead: float
    each: tuple[bool, bool]
    """Weights are gathered, gradients are reduced for every microbatch (only without a pipeline)."""

    @property
    def slowest(self) -> int:
        """Kind of stage where traffic, update and transfers take longest: these seconds are part of the step time."""
        return int(largest_stage((self.gather + self.reduce + self.optimizer + self.offload)[:, None])[0])

    @property
    def before(self) -> float:
        """Seconds before the pipeline starts: weights gathered once, as on the slowest."""
        return 0.0 if self.each[0] else float(self.gather[self.slowest])

    @property
    def inside(self) -> float:
        """Seconds that lie between the passes: traffic of every microbatch."""
        both = zip((self.gather, self.reduce), self.each, strict=True)
        return sum(float(value[self.slowest]) for value, each in both if each)


def ends_of(priced: Priced) -> Ends:
    """The same terms that the step time sums; what gradients alone would add counts as reducing, the rest as gathering."""
    job, shared = priced.job, priced.shared
    trainer, layout = stored_as(job.workload, job.trainer), Layout.stack([priced.assigned])
    sent = shared.send if priced.send[0] else 0.0 * shared.send
    nothing = np.zeros_like(shared.gather)

    def traffic(gather: Floats, copies: Floats) -> tuple[Floats, Floats]:
        """Exposed and hidden seconds."""
        return data_parallel(
            trainer, layout, replace(shared, gather=gather, copies=copies),
            shared.forward + sent, shared.backward + sent, data_slowdown(job.cluster, layout),
        )  # fmt: skip

    (exposed, hidden), (reduce, reduce_hidden) = traffic(shared.gather, shared.copies), traffic(nothing, nothing)
    zero, single = int(priced.assigned.zero), int(priced.assigned.pp) == 1
    time = priced.estimate.time
    return Ends(
        gather=np.maximum(exposed - reduce, 0.0)[:, 0], reduce=np.minimum(reduce, exposed)[:, 0],
        gather_hidden=np.maximum(hidden - reduce_hidden, 0.0)[:, 0], reduce_hidden=np.minimum(reduce_hidden, hidden)[:, 0],
        optimizer=shared.optimizer[:, 0], offload=shared.on_host(np.asarray(layout.num_microbatches, dtype=float))[:, 0],
        stragglers=float(time["stragglers"][0]), overhead=float(time["overhead"][0]),
        each=(single and zero >= max(trainer.stored.weight_sharding_level, 2), single and zero >= 2),
    )  # fmt: skip


def timeline_of(priced: Priced) -> Timeline:
    """The predicted step of one pipeline of a priced layout."""
    ends, pp = ends_of(priced), int(priced.assigned.pp)
    start, step = ends.before, priced.step_time
    end = start + priced.pipeline_seconds + ends.inside
    walked, hand_over = _walked(priced)
    if any(ends.each):
        actions, traffic = _with_traffic(walked, ends, int(priced.assigned.num_microbatches), start)
    else:
        actions, traffic = [_later(one, start) for one in walked] if start else walked, []
    end = max(end, *(one.end for one in actions[-2 * pp :]))  # by rounding
    active = [(math.inf, 0.0)] * pp
    for one in actions:
        first, last = active[one.rank]
        active[one.rank] = min(first, one.start), max(last, one.end)
    around = [*traffic, *_once(ends, start, end, active, step), *_sends(actions, pp, priced.send[1], step)]
    last_one = max(range(len(around)), key=lambda i: (around[i].end, not around[i].hidden))
    around[last_one] = replace(around[last_one], end=step)  # what rounding left
    return Timeline(
        ranks=pp, stages=pp * int(priced.assigned.vpp), num_microbatches=int(priced.assigned.num_microbatches), step_time=step,
        pipeline_start=start, pipeline_end=end, actions=tuple(actions), pieces=pieces_by_action(priced),
        around=tuple(around), hand_over=hand_over,
    )  # fmt: skip


def _walked(priced: Priced) -> tuple[list[Span], float]:
    """The actions from time 0, ending when the model says, and the hand-over that makes them (Timeline.hand_over)."""
    layout, wanted = priced.assigned, priced.pipeline_seconds
    every = priced.durations(priced.times)
    after, overlapped = priced.send

    def run(later: float) -> tuple[list[Span], float]:
        spans = walk(
            int(layout.schedule), int(layout.pp), int(layout.vpp), int(layout.num_microbatches),
            (every.forward + after, every.backward + after, every.weight), overlapped + later,
        )  # fmt: skip
        return spans, max(one.end for one in spans)

    spans, end = run(0.0)
    if abs(end - wanted) <= SAME * wanted:
        return spans, 0.0
    from scipy.optimize import brentq  # type: ignore[import-untyped]  # a fifth of a second, which few pipelines need

    # The first microbatch passes every rank, so that the end moves at least as far as the hand-over.
    error = SAME * wanted / len(spans)
    later = float(brentq(lambda later: run(later)[1] - wanted, 0.0, wanted - end, xtol=error, rtol=1e-15))
    return run(later)[0], later


def _with_traffic(walked: list[Span], ends: Ends, m: int, start: float) -> tuple[list[Span], list[Slice]]:
    """The actions of one rank with the traffic of each microbatch between and during them."""
    actions: list[Span] = []
    traffic: list[Slice] = []
    at = start

    def add(kind: str, microbatch: int, begin: float, seconds: float, hidden: bool) -> float:
        if seconds > 0:
            traffic.append(Slice(
                rank=0, kind=kind, part="data_communication", microbatch=microbatch, start=begin, end=begin + seconds,
                hidden=hidden,
            ))  # fmt: skip
        return begin + seconds

    for one in walked:
        i, seconds = one.microbatch, one.end - one.start
        if one.kind == "F" and ends.each[0]:
            at = add("gather weights", i, at, float(ends.gather[0]) / m, False)
            add("gather weights", i, at, float(ends.gather_hidden[0]) / m, True)
        actions.append(_later(one, at - one.start))
        at += seconds
        if one.kind == "B" and ends.each[1]:
            hidden = float(ends.reduce_hidden[0]) / m
            add("reduce gradients", i, at - hidden, hidden, True)
            at = add("reduce gradients", i, at, float(ends.reduce[0]) / m, False)
    return actions, traffic


def _later(one: Span, seconds: float) -> Span:
    return one._replace(start=one.start + seconds, end=one.end + seconds)


def _sends(actions: list[Span], pp: int, seconds: float, step: float) -> list[Slice]:
    """Overlapped sends: from the end of each pass, one after the other, as late as must be and no later.

    Where a step is too short for all of them, which the model does not forbid, they are drawn shorter.
    """
    if seconds <= 0:
        return []
    found: list[Slice] = []
    for rank in range(pp):
        mine = [one for one in actions if one.rank == rank and one.kind != "W"]
        each = min(seconds, step / len(mine))
        before = each * np.arange(len(mine))
        starts = np.maximum.accumulate(np.array([one.end for one in mine]) - before) + before
        starts = np.minimum(starts, step - each * len(mine) + before)
        found += [
            Slice(rank=rank, kind="send", part="pipeline_communication", stage=one.stage, microbatch=one.microbatch,
                  start=begin, end=begin + each, hidden=True)
            for one, begin in zip(mine, starts.tolist(), strict=True)
        ]  # fmt: skip
    return found


def _once(ends: Ends, start: float, end: float, active: list[tuple[float, float]], step: float) -> list[Slice]:
    """Slices that appear once per step, for a pipeline from ``start`` to ``end``.

    ``active`` is when each rank's own passes start and end: hidden traffic lies at its two ends. A rank whose weights take
    longer to gather than on the slowest one gathers the rest behind the pipeline, where it has the time.
    """
    found: list[Slice] = []
    for rank, (first, last) in enumerate(active):
        kind = stage_kind(rank, len(active))

        def add(word: str, part: str, begin: float, seconds: float, hidden: bool = False, rank: int = rank) -> float:
            if seconds > 0:
                found.append(Slice(rank=rank, kind=word, part=part, start=begin, end=begin + seconds, hidden=hidden))
            return begin + max(seconds, 0.0)

        gathered, reduced = (
            [0.0, 0.0] if each else [float(exposed[kind]), float(hidden[kind])]
            for each, exposed, hidden in (
                (ends.each[0], ends.gather, ends.gather_hidden), (ends.each[1], ends.reduce, ends.reduce_hidden)
            )
        )  # fmt: skip
        data, early = "data_communication", min(gathered[0], start)
        add("gather weights", data, start - early, early)
        at = add("stragglers", "stragglers", end, ends.stragglers)
        at = add("gather weights", data, at, gathered[0] - early)
        at = add("reduce gradients", data, at, reduced[0])
        at = add("optimizer", "optimizer", at, float(ends.optimizer[kind]))
        add("optimizer on host", "offload", at, float(ends.offload[kind]))
        add("overhead", "overhead", step - ends.overhead, ends.overhead)
        add("gather weights", data, first, gathered[1], True)
        add("reduce gradients", data, last - reduced[1], reduced[1], True)
    return found
