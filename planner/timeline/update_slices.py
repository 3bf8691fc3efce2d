"""What the model adds to the pipeline once per step, and when it is drawn: traffic of states, the update."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.price.data_parallel import data_parallel, data_slowdown
from planner.cost.price.stage_times import largest_stage
from planner.layout import Layout
from planner.timeline.priced_plan import Priced
from planner.timeline.slices import Slice, stage_kind


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

    @property
    def update(self) -> Floats:
        """Seconds of traffic, update and transfers by kind of stage: the largest is part of the step time."""
        return self.gather + self.reduce + self.optimizer + self.offload

    @property
    def slowest(self) -> int:
        """Kind of stage where the update takes longest."""
        return int(largest_stage(self.update[:, None])[0])

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
    """The same terms that the step time sums, by kind of stage.

    The model prices gradients and weights together; what gradients alone would add counts as reducing, the rest as
    gathering. The sum is the model's.
    """
    job, shared = priced.job, priced.shared
    layout = Layout.stack([priced.dealt])
    sent = shared.send if priced.send[0] else 0.0 * shared.send
    nothing = np.zeros_like(shared.gather)

    def traffic(gather: Floats, copies: Floats) -> tuple[Floats, Floats]:
        """Exposed and hidden seconds."""
        return data_parallel(
            job.trainer, layout, dataclasses.replace(shared, gather=gather, copies=copies),
            shared.forward + sent, shared.backward + sent, data_slowdown(job.cluster, layout),
        )  # fmt: skip

    (exposed, hidden), (reduce, reduce_hidden) = traffic(shared.gather, shared.copies), traffic(nothing, nothing)
    zero, single = int(priced.dealt.zero), int(priced.dealt.pp) == 1
    time = priced.estimate.time
    return Ends(
        gather=np.maximum(exposed - reduce, 0.0)[:, 0], reduce=np.minimum(reduce, exposed)[:, 0],
        gather_hidden=np.maximum(hidden - reduce_hidden, 0.0)[:, 0], reduce_hidden=np.minimum(reduce_hidden, hidden)[:, 0],
        optimizer=shared.optimizer[:, 0], offload=shared.offload[:, 0],
        stragglers=float(time["stragglers"][0]), overhead=float(time["overhead"][0]),
        each=(single and zero >= max(job.trainer.stored.weight_sharding_level, 2), single and zero >= 2),
    )  # fmt: skip


def once_slices(ends: Ends, start: float, end: float, active: list[tuple[float, float]], step: float) -> list[Slice]:
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
