"""What the model adds to the pipeline once per step, and when it stands in the picture: traffic of states, the update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.price.stage_times import largest_stage
from planner.cost.price.state_traffic import data_parallel, data_slowdown
from planner.layout import Layout
from planner.timeline.priced_plan import Priced
from planner.timeline.slices import Slice, rank_of_kind, stage_kind


@dataclass(frozen=True, kw_only=True)
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
    slowest: int
    """Kind of stage where traffic, update and transfers take longest together: it sets the step time."""

    @property
    def before(self) -> float:
        """Seconds before the pipeline starts: weights gathered once, as on the slowest."""
        return 0.0 if self.each[0] else float(self.gather[self.slowest])

    @property
    def inside(self) -> float:
        """Seconds that lie between the passes: traffic of every microbatch."""
        return sum(
            float(value[self.slowest])
            for value, each in zip((self.gather, self.reduce), self.each, strict=True)
            if each
        )


def ends_of(priced: Priced) -> Ends:
    """The same terms that the step time sums, by kind of stage.

    The model prices gradients and weights together; what gradients alone would add counts as reducing, the rest as
    gathering. The sum is the model's.
    """
    job, shared = priced.job, priced.shared
    layout = Layout.stack([priced.dealt])
    sent = shared.send if priced.send[0] else 0.0 * shared.send
    windows = (shared.forward + sent, shared.backward + sent)
    slowdown = data_slowdown(job.cluster, layout)
    ends = (shared.reduced_last, shared.gathered_first)
    exposed, hidden = data_parallel(
        job.trainer, layout, ends, shared.reduce, shared.gather, shared.copies, *windows, slowdown
    )
    nothing = np.zeros_like(shared.gather)
    reduce, reduce_hidden = data_parallel(
        job.trainer, layout, ends, shared.reduce, nothing, nothing, *windows, slowdown
    )
    zero, single = int(priced.dealt.zero), int(priced.dealt.pp) == 1
    time = priced.estimate.time
    return Ends(
        gather=np.maximum(exposed - reduce, 0.0)[:, 0], reduce=np.minimum(reduce, exposed)[:, 0],
        gather_hidden=np.maximum(hidden - reduce_hidden, 0.0)[:, 0], reduce_hidden=np.minimum(reduce_hidden, hidden)[:, 0],
        optimizer=shared.optimizer[:, 0], offload=shared.offload[:, 0],
        stragglers=float(time["stragglers"][0]), overhead=float(time["overhead"][0]),
        each=(single and zero >= max(job.trainer.stored.weight_sharding_level, 2), single and zero >= 2),
        slowest=int(largest_stage(exposed + shared.optimizer + shared.offload)[0]),
    )  # fmt: skip


def once_slices(
    ends: Ends, pp: int, start: float, end: float, active: list[tuple[float, float]], step: float
) -> list[Slice]:
    """Slices that stand once per step, for a pipeline from ``start`` to ``end``.

    ``active`` is when each rank's own passes start and end: hidden traffic lies at its two ends. A rank whose weights take
    longer to gather than on the slowest one gathers the rest behind the pipeline, where it has the time.
    """
    found: list[Slice] = []

    def add(rank: int, stream: str, kind: str, part: str, begin: float, seconds: float, hidden: bool = False) -> float:
        if seconds > 0:
            found.append(
                Slice(rank=rank, stream=stream, kind=kind, part=part, stage=-1, microbatch=-1, start=begin,
                      end=begin + seconds, hidden=hidden)
            )  # fmt: skip
        return begin + max(seconds, 0.0)

    data = "data_communication"
    for rank in range(pp):
        kind = stage_kind(rank, pp)
        gather = 0.0 if ends.each[0] else float(ends.gather[kind])
        early = min(gather, start)
        add(rank, "data", "gather weights", data, start - early, early)
        at = add(rank, "compute", "stragglers", "stragglers", end, ends.stragglers)
        at = add(rank, "data", "gather weights", data, at, gather - early)
        at = add(rank, "data", "reduce gradients", data, at, 0.0 if ends.each[1] else float(ends.reduce[kind]))
        at = add(rank, "compute", "optimizer", "optimizer", at, float(ends.optimizer[kind]))
        add(rank, "offload", "optimizer on host", "offload", at, float(ends.offload[kind]))
        add(rank, "host", "overhead", "overhead", step - ends.overhead, ends.overhead)
        first, last = active[rank]
        if not ends.each[0]:
            add(rank, "data", "gather weights", data, first, float(ends.gather_hidden[kind]), True)
        if not ends.each[1]:
            hidden = float(ends.reduce_hidden[kind])
            add(rank, "data", "reduce gradients", data, last - hidden, hidden, True)
    return found


def slowest_rank(values: Floats, pp: int) -> int:
    """The rank of the kind of stage with the largest value, (3, 1)."""
    return rank_of_kind(int(largest_stage(values)[0]), pp)
