"""Other ways to run a collective, on a GPU, other than the one that a profile's curves are made of (torch): ``patterns.FORMS``.

The curves are of collectives that wait in a full queue, as in a step whose host is ahead: ``eager`` is what a host launches while
it is timed, ``graph`` a CUDA graph of some runs (nccl-tests -G), ``in_place`` an all-gather or reduce-scatter whose shares are part
of the whole buffer (FSDP and the distributed optimizer run them so), ``no_nvls`` one without the switch's multicast and sums.

NCCL reads NCCL_NVLS_ENABLE once in a process, NCCL_ALGO for every communicator: a second one that leaves the NVLS algorithms out
is formed, measured, and destroyed. Where the user has set either, that holds and the form is left out.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from planner.lab.profile.collective_timing import NotMeasuredError, check, sample, taker_of
from planner.lab.profile.device_timing import GRAPH_RUNS, captured
from planner.lab.profile.patterns import factor, in_words, pattern_of
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.rank_groups import Buffers, Operation, Ranks
from planner.lab.profile.timing import summarise

ALGORITHM, SWITCH = "NCCL_ALGO", "NCCL_NVLS_ENABLE"
WITHOUT_NVLS = "^NVLS,NVLSTree"  # All algorithms but these.  [NCCL, src/graph/tuning.cc, parseList]


class InPlace(Operation):
    """An all-gather whose input is its own part of the result, or a reduce-scatter whose result is its own part of the input."""

    def __init__(self, op: str, size: int, dtype: str, group: Any, buffers: Buffers) -> None:
        super().__init__(op, size, dtype, group, buffers)
        own = slice(self.me * self.part, (self.me + 1) * self.part)
        if op == "all_gather":
            self.source = self.result[own]
        else:
            self.result = self.source[own]
        self._call = self._calls()[op]

    def fill(self) -> None:
        """Nonsense in the rest of a gathered buffer first: filling the result last would overwrite the input."""
        if self.op == "all_gather":
            self.result.fill_(-1.0)
        self.in_place = True
        super().fill()
        self.in_place = False


def measure_form(point: Point, ranks: Ranks, buffers: Buffers, budget_s: float) -> Measured | None:
    """One form of a collective, on all ranks together; None where the pattern leaves no group. Raises NotMeasuredError on all
    ranks where it cannot be had."""
    pattern, form, op = pattern_of(point), point["form"], point["op"]
    everyone = pattern.groups(ranks.world)
    if not everyone:
        return None
    if form == "no_nvls" and (name := next((one for one in (ALGORITHM, SWITCH) if one in os.environ), "")):
        raise NotMeasuredError(f"{in_words(point)}: {name}={os.environ[name]} is set and holds for all")
    with ranks.watch.doing(in_words(point), everyone[0]), _group(point, ranks) as group:
        kind = InPlace if form == "in_place" else Operation
        operation = kind(op, point["size"], point["dtype"], group, buffers) if group else None
        check(operation, ranks, point)
        if operation:
            operation.calm()
        if form == "graph":
            samples, details = _graph(point, operation, ranks, budget_s)
        else:
            timed = taker_of(operation, ranks, ahead=form != "eager")
            samples, _, details = sample(operation, ranks, budget_s, timed)
        ranks.watch.again()
        check(operation, ranks, point)
    found = summarise(samples, "cuda_events")
    return found.measured(point, bus_bandwidth=point["size"] / found.median * factor(op, pattern.n), **details)


def _graph(point: Point, operation: Operation | None, ranks: Ranks, budget_s: float) -> Any:
    """Samples of a replayed graph, by its runs."""
    problem, replay = "", None
    if operation:
        try:
            replay = captured(operation.run)
        except Exception as error:  # on every rank alike: the library's collective cannot be captured
            problem = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if problems := [one for one in ranks.collect(problem) if one]:
        raise NotMeasuredError(f"{in_words(point)}: cannot be captured: {problems[0]}")
    timed = taker_of(operation, ranks, run=replay)
    samples, _, details = sample(operation, ranks, budget_s, timed, most=1)
    return [one / GRAPH_RUNS for one in samples], details


@contextlib.contextmanager
def _group(point: Point, ranks: Ranks) -> Iterator[Any]:
    """The group of the point's pattern that this rank is in, or None; without NVLS one of its own for as long as it is needed."""
    pattern = pattern_of(point)
    if point["form"] != "no_nvls":
        yield ranks.group(pattern)
        return
    os.environ[ALGORITHM] = WITHOUT_NVLS  # read when the communicator is made, by its first collective
    mine = None
    try:
        mine = ranks.form(pattern.groups(ranks.world))
        if mine is not None:
            dist.all_reduce(torch.zeros(1, device=ranks.device), group=mine)
            torch.cuda.synchronize()
        ranks.barrier()
    finally:
        del os.environ[ALGORITHM]
    yield mine
    ranks.destroy(mine)
