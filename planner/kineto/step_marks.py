"""Where the steps of a trace begin and end."""


import numpy as np

from planner.arrays import Floats
from planner.kineto.kernel_names import OPTIMIZER
from planner.kineto.rank_trace import RankTrace
from planner.record import record

STEADY = 0.2
"""A step is steady when it is within this part of the median."""
APART, SURELY = 8.0, 100.0
"""Pauses within a step and between steps differ by this factor at least; by the second where a single pause is the longer one."""
LAUNCH = 1e-5
"""Seconds: shorter pauses between kernels are alike."""
MICROBATCHES = 0.75
"""The profiler steps once for each microbatch where no more than this part of its steps holds a step of the optimizer."""


@record
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
    by_optimizer = _of_several(trace) if trace.steps else _bounds(trace.optimizer)
    if len(trace.steps) >= 2 and not len(by_optimizer):
        numbers, host, _ = zip(*trace.steps, strict=True)
        starts = np.array([_first(trace, start) for start in host])
        if np.any(np.diff(starts) <= 0):  # steps without kernels of their own
            starts = np.array(host)
        return _steady(starts, numbers[:-1], "ProfilerStep")
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
    """Ends of the groups of pieces that follow each other closely: the pauses between them are of two very different sizes."""
    if len(spans) < 2:
        return spans[:, 1]
    ends = np.maximum.accumulate(spans[:, 1])
    pauses = np.maximum(spans[1:, 0] - ends[:-1], LAUNCH)
    ordered = np.sort(pauses)
    jumps = ordered[1:] / ordered[:-1]
    jumps[-1:] = np.where(jumps[-1:] > SURELY, jumps[-1:], 0.0)  # a single long pause may be a hiccup
    least = 0.0
    if len(jumps) and np.max(jumps) > APART:
        least = ordered[int(np.argmax(jumps)) + 1]
    return np.append(ends[:-1][pauses >= least], ends[-1])


def _of_several(trace: RankTrace) -> Floats:
    """Ends of the optimizer's steps where the profiler steps more often than the optimizer, once for each microbatch; else none."""
    starts = np.array([start for _, start, _ in trace.steps])
    place = np.searchsorted(starts, trace.optimizer[:, 0], side="right") - 1
    with_it = np.unique(place[place >= 0])
    if len(with_it) < 2 or len(with_it) > MICROBATCHES * len(starts):
        return np.zeros(0)
    return np.array([np.max(trace.optimizer[place == one, 1]) for one in with_it])


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
