"""Where the steps of a trace begin and end."""

from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.kineto.kernel_names import OPTIMIZER
from planner.kineto.rank_trace import RankTrace

STEADY = 0.2
"""A step is steady when it is within this part of the median."""
PAUSE = 0.25
"""What follows within this part of the longest pause belongs to the same optimizer step: one optimizer for each part of a model."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of one rank."""

    spans: Floats
    """(K, 2): start and end of each steady step, seconds."""
    numbers: tuple[int, ...]
    """Of the profiler, or counted."""
    left_out: int
    """Steps that took much longer or shorter."""
    how: str
    """What they were found by; '' = none was found, and the one piece of time is the whole trace."""

    @property
    def seconds(self) -> float:
        """Mean time of a steady step."""
        return float(np.mean(np.diff(self.spans, axis=1)))


def find_steps(trace: RankTrace) -> Steps:
    """The steady steps of a rank, by what marks them: ProfilerStep annotations, Optimizer.step annotations, kernels of optimizers.

    A step goes from the first kernel that the host launched in it to that of the next one: the last step that was profiled only
    ends the one before. Where the profiler steps more often than the optimizer (once for each microbatch), the
    optimizer's steps count.
    """
    by_optimizer = _bounds(trace.optimizer)
    if len(trace.steps) >= 2 and not 2 <= len(by_optimizer) <= 0.75 * len(trace.steps):
        numbers, starts = zip(*((number, _first(trace, start)) for number, start, _ in trace.steps), strict=True)
        return _steady(np.array(starts), numbers[:-1], "ProfilerStep")
    if len(by_optimizer) >= 2:
        return _steady(by_optimizer, range(len(by_optimizer) - 1), "Optimizer.step")
    by_kernels = _bounds(trace.spans[trace.family == OPTIMIZER])
    if len(trace.steps) < 2 and len(by_kernels) >= 2:
        return _steady(by_kernels, range(len(by_kernels) - 1), "kernels of the optimizer")
    if trace.steps:  # a single one ends with its last kernel
        number, start, end = trace.steps[0]
        last = float(np.max(trace.spans[:, 1], initial=end))
        return Steps(
            spans=np.array([[_first(trace, start), max(end, last)]]),
            numbers=(number,),
            left_out=0,
            how="a single ProfilerStep",
        )
    everything = np.concatenate([trace.spans, trace.optimizer])
    whole = np.array([[np.min(everything), np.max(everything)]])
    return Steps(spans=whole, numbers=(0,), left_out=0, how="")


def _first(trace: RankTrace, start: float) -> float:
    """When the first kernel began that the host launched from a moment on; the moment itself where launches are not recorded."""
    later = trace.launched >= start
    return float(np.min(trace.spans[later, 0])) if np.any(later) else start


def _bounds(spans: Floats) -> Floats:
    """Ends of the groups of pieces that follow each other closely."""
    if len(spans) < 2:
        return spans[:, 1]
    ends = np.maximum.accumulate(spans[:, 1])
    pauses = spans[1:, 0] - ends[:-1]
    apart = pauses >= max(PAUSE * float(np.max(pauses)), 1e-9)
    return np.append(ends[:-1][apart], ends[-1])


def _steady(bounds: Floats, numbers: object, how: str) -> Steps:
    """The steps between bounds, without those that are far from the median."""
    bounds = np.maximum.accumulate(bounds)
    spans = np.column_stack([bounds[:-1], bounds[1:]])
    seconds = spans[:, 1] - spans[:, 0]
    middle = float(np.median(seconds[seconds > 0])) if np.any(seconds > 0) else 0.0
    keep = (seconds > 0) & (np.abs(seconds - middle) <= STEADY * middle)
    if not np.any(keep):  # nothing lasts, or half are short and half are long
        keep = seconds == (np.min(seconds[seconds > 0]) if middle else seconds[0])
    kept = tuple(int(number) for number, one in zip(numbers, keep, strict=True) if one)  # type: ignore[call-overload]
    return Steps(spans=spans[keep], numbers=kept, left_out=int(np.sum(~keep)), how=how)
