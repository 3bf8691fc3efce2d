"""One step of a mixed layout, action by action: one pipeline of each group, walked with the own durations of its stages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.pipeline.schedule_walk import StageDurations, walk
from planner.mixed.mixed_estimate import MixedEstimate, PipelineEstimate
from planner.mixed.mixed_job import SCHEDULES
from planner.mixed.mixed_layout import MixedLayout

KINDS = {"F": "forward", "B": "backward"}


class Action(NamedTuple):
    """What a stage does for some time; seconds from the start of the step."""

    pipeline: int
    """Group of equal pipelines, from 0."""
    stage: int
    kind: str
    """A pass, or what stands at the end of a step."""
    microbatch: int
    """-1 of what is done once a step."""
    start: float
    end: float


def actions(layout: MixedLayout, found: MixedEstimate) -> list[Action]:
    """Passes with their sends, stage by stage, then traffic of states, update and overhead; what is hidden is left out.

    The last pass of a pipeline ends with its seconds of the estimate: beyond 6 p microbatches these are extrapolated, and the
    walk is stretched to them (0.01 %).
    """
    longest = max(one.seconds for one in found.pipelines)
    lists = [_passes(layout, found, number) + _ends(number, one, found, longest) for number, one in enumerate(found.pipelines)]
    return [one for each in lists for one in each]


def _passes(layout: MixedLayout, found: MixedEstimate, number: int) -> list[Action]:
    """Forward and backward passes of one pipeline."""
    one, m = found.pipelines[number], layout.pipelines[number].num_microbatches
    forward, backward = (np.array([getattr(stage, name) for stage in one.stages]) for name in ("forward", "backward"))
    count = len(one.stages)
    spans = walk(int(SCHEDULES[layout.schedule]), count, 1, m, StageDurations(forward, backward, np.zeros(count)))
    stretch = one.seconds / max(span.end for span in spans)
    return [
        Action(number, span.rank, KINDS[span.kind], span.microbatch, span.start * stretch, span.end * stretch) for span in spans
    ]


def _ends(number: int, one: PipelineEstimate, found: MixedEstimate, longest: float) -> list[Action]:
    """What follows the pipelines, when the longest has ended: gradients join the replicas of all of them."""
    listed = list[Action]()
    for stage, estimate in enumerate(one.stages):
        at = longest
        for kind, seconds in (
            ("stragglers", found.time["stragglers"]), ("gradients and weights", estimate.end["exposed"]),
            ("optimizer", estimate.end["optimizer"]), ("optimizer on host", estimate.end["offload"]),
        ):  # fmt: skip
            if seconds > 0.0:
                listed.append(Action(number, stage, kind, -1, at, at + seconds))
                at += seconds
        start = max(found.step_time - found.time["overhead"], at)
        listed.append(Action(number, stage, "overhead", -1, start, max(found.step_time, start)))
    return listed
