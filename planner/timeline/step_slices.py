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
from dataclasses import dataclass, replace

from planner.cost.estimate import PARTS
from planner.cost.pipeline.schedule_walk import Span, walk
from planner.cost.price.stage_times import largest_stage
from planner.timeline.passes import pieces_by_action
from planner.timeline.priced_plan import Priced
from planner.timeline.slices import STREAMS, Piece, Slice, rank_of_kind
from planner.timeline.update_slices import Ends, ends_of, once_slices

SAME = 1e-9
"""Part of a time below which a difference is rounding."""
ROUNDS = 100
"""Walks that the search for the hand-over takes at most; it needs a few."""


@dataclass(frozen=True, kw_only=True)
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
    pieces: dict[tuple[int, str], tuple[Piece, ...]]
    """The parts of an action, by stage and kind of action."""
    around: tuple[Slice, ...]
    """Before, after and (data-parallel traffic, hidden sends) during the actions."""
    hand_over: float
    """Seconds by which a rank's result reaches the next one later than walked (negative: earlier), so that the pipeline
    ends when the plan says: beyond 6 p microbatches the model extrapolates its walk. 0 where both agree."""
    slowest: int
    """Rank whose passes take longest: their parts are the estimate's."""
    slowest_update: int
    """Rank whose traffic and update take longest: those parts are the estimate's."""

    def window(self, start: float = 0.0, end: float = math.inf) -> Iterator[Span]:
        """The actions that overlap a window of time, whole."""
        return (one for one in self.actions if one.end > start and one.start < end)

    def slices(self, start: float = 0.0, end: float = math.inf) -> Iterator[Slice]:
        """Everything that overlaps a window of time, stream by stream; an action comes with all its pieces."""
        yield from (one for one in self.around if one.end > start and one.start < end)
        for action in self.window(start, end):
            for piece in self.pieces[action.stage, action.kind]:
                begin = min(action.start + piece.offset, action.end)
                yield Slice(
                    rank=action.rank, kind=piece.kind, part=piece.part, stage=action.stage, microbatch=action.microbatch,
                    start=begin, end=min(begin + piece.seconds, action.end), hidden=piece.hidden,
                )  # fmt: skip

    def totals(self, rank: int) -> dict[str, float]:
        """Seconds by part (PARTS) of one rank, and 'wait': at the end of the step, for ranks with more to update.

        They sum to the step time. 'bubble' is what the rank idles while the pipeline runs.
        """
        found, _ = self._sums(rank)
        length = self.pipeline_end - self.pipeline_start
        passes = sum(found[part] for part in PARTS[:7]) + sum(
            count * piece.seconds for count, piece in self._counted(rank) if piece.part == "offload"
        )
        inside = [one for one in self.around if one.rank == rank and not one.hidden and one.microbatch >= 0]
        found["bubble"] = length - passes - sum(one.end - one.start for one in inside)
        return {**found, "wait": self.step_time - sum(found.values())}

    def hidden(self, rank: int) -> dict[str, float]:
        """Seconds of overlapped communication of one rank, by stream."""
        return self._sums(rank)[1]

    def _counted(self, rank: int) -> list[tuple[int, Piece]]:
        """The pieces of a rank's actions, each with the number of actions."""
        counts = Counter((one.stage, one.kind) for one in self.actions if one.rank == rank)
        return [(count, piece) for key, count in counts.items() for piece in self.pieces[key]]

    def _sums(self, rank: int) -> tuple[dict[str, float], dict[str, float]]:
        parts, hidden = dict.fromkeys(PARTS, 0.0), dict.fromkeys(STREAMS, 0.0)
        mine: list[tuple[float, Slice | Piece]] = [(n * piece.seconds, piece) for n, piece in self._counted(rank)]
        mine += [(one.end - one.start, one) for one in self.around if one.rank == rank]
        for seconds, one in mine:
            if one.hidden:
                hidden[one.stream] += seconds
            else:
                parts[one.part] += seconds
        return parts, {stream: seconds for stream, seconds in hidden.items() if seconds > 0}


def timeline_of(priced: Priced) -> Timeline:
    """The predicted step of one pipeline of a priced layout."""
    ends, pp = ends_of(priced), int(priced.dealt.pp)
    start, step = ends.before, priced.step_time
    end = start + priced.pipeline_seconds + ends.inside
    walked, hand_over = _walked(priced)
    if any(ends.each):
        actions, traffic = _with_traffic(walked, ends, int(priced.dealt.num_microbatches), start)
    else:
        actions, traffic = [_later(one, start) for one in walked] if start else walked, []
    end = max(end, *(one.end for one in actions[-2 * pp :]))  # by rounding
    active = [(math.inf, 0.0)] * pp
    for one in actions:
        first, last = active[one.rank]
        active[one.rank] = min(first, one.start), max(last, one.end)
    around = [*traffic, *once_slices(ends, start, end, active, step), *_sends(actions, pp, priced.send[1], step)]
    last_one = max(range(len(around)), key=lambda i: (around[i].end, not around[i].hidden))
    around[last_one] = replace(around[last_one], end=step)  # what rounding left
    return Timeline(
        ranks=pp, stages=pp * int(priced.dealt.vpp), num_microbatches=int(priced.dealt.num_microbatches), step_time=step,
        pipeline_start=start, pipeline_end=end, actions=tuple(actions), pieces=pieces_by_action(priced),
        around=tuple(around), hand_over=hand_over,
        slowest=rank_of_kind(int(largest_stage(priced.times.forward + priced.times.backward)[0]), pp),
        slowest_update=rank_of_kind(ends.slowest, pp),
    )  # fmt: skip


def _walked(priced: Priced) -> tuple[list[Span], float]:
    """The actions from time 0, ending when the model says, and the hand-over that makes them (Timeline.hand_over)."""
    layout, wanted = priced.dealt, priced.pipeline_seconds
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
    # The end grows with the hand-over, in straight pieces: bracket, then the secant with halved ends (Illinois).
    far, (low, high) = (wanted - end) / int(layout.pp), (0.0, 0.0)
    at_low = at_high = end - wanted
    for _ in range(ROUNDS):
        spans, end = run(far)
        if far < 0:
            low, at_low = far, end - wanted
        else:
            high, at_high = far, end - wanted
        if at_low <= 0 <= at_high:
            break
        far *= 4
    else:
        raise AssertionError(f"{layout}: the pipeline cannot end at {wanted} s, it ends at {end} s")
    side = 0
    for _ in range(ROUNDS):
        later = high - at_high * (high - low) / (at_high - at_low)
        spans, end = run(later)
        error = end - wanted
        if abs(error) <= SAME * wanted:
            return spans, later
        if error < 0:
            low, at_low, at_high, side = later, error, at_high / 2 if side < 0 else at_high, -1
        else:
            high, at_high, at_low, side = later, error, at_low / 2 if side > 0 else at_low, 1
    raise AssertionError(f"{layout}: the pipeline ends at {end}, not at {wanted}")


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
        each, free = min(seconds, step / len(mine)), 0.0
        starts = []
        for one in mine:
            starts.append(max(one.end, free))
            free = starts[-1] + each
        latest = step
        for number in reversed(range(len(mine))):
            latest = min(starts[number], latest - each)
            starts[number] = max(latest, 0.0)
        found += [
            Slice(rank=rank, kind="send", part="pipeline_communication", stage=one.stage, microbatch=one.microbatch,
                  start=begin, end=begin + each, hidden=True)
            for one, begin in zip(mine, starts, strict=True)
        ]  # fmt: skip
    return found
