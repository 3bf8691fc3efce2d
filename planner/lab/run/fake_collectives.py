"""Fake collectives: one process does, to its own memory, what a collective of the whole group would.

The fake process group gathers by copying and exchanges by copying, but its all-reduce, broadcast and receive do nothing and
its reduce-scatter reads one shard of the input. While ``FakeCollectives`` is entered every one of them reads and writes the
bytes that this rank's GPU reads and writes for it, so that kernels next to it find caches and memory as busy as they
will be, and buffers from neighbours hold sane numbers. Time on the wire is not there: it is priced, never measured.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import _disable_current_modes

from planner.lab.run.kernel_trace import STAND_IN
from planner.lab.run.memory_tracker import operation_of
from planner.units import KILO

TILE = 1 << 20
"""Normal numbers that receive buffers are filled with, over and over."""
Copy = Callable[[Tensor, Tensor], object]
"""Writes what a collective gives into the first tensor, from the second."""


class FakeCollectives:
    """Replaces the collectives of this process while it is entered, and takes the time that each replacement takes.

    ``log`` has one entry for each: (operation, bytes of the full buffer, times): begin and end in CPU seconds, or two CUDA
    events, or None for what ran on another stream than the one that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.log: list[tuple[str, int, Any]] = []
        self.spent = 0.0
        """Seconds of all entries on a CPU."""
        self.named = False
        """Under the profiler: what runs on the stream that computes is called a stand-in."""
        self._numbers = torch.empty(TILE, device=device).normal_(generator=torch.Generator(device=device).manual_seed(1))
        self._library: Any = None
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def __enter__(self) -> Self:
        self._library = torch.library.Library("c10d", "IMPL")
        operations: tuple[tuple[str, Copy, bool], ...] = (
            ("_allgather_base_", _repeat, True), ("allgather_into_tensor_coalesced_", _repeat, False),
            ("_reduce_scatter_base_", _sum, True), ("reduce_scatter_tensor_coalesced_", _sum, False),
            ("allreduce_", _rewrite, True), ("broadcast_", _rewrite, True), ("alltoall_base_", _exchange, False),
            ("recv_", self._fill, False), ("send", _nothing, False),
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced is the purpose
            for name, copy, gives in operations:
                kernel = self._kernel(operation_of(name), copy, gives)
                self._library.impl(name, kernel, self.device.type.upper(), allow_override=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _kernel(self, operation: str, copy: Copy, gives: bool) -> Callable[..., Any]:
        """One collective of torch's; ``gives``: it returns what it wrote, too."""

        def run(outs: Any, ins: Any, *_: Any) -> Any:
            targets = outs if isinstance(outs, list) else [outs]
            sources = ins if isinstance(ins, list) else [ins] if isinstance(ins, Tensor) else targets
            size = max(sum(one.numel() * one.element_size() for one in many) for many in (targets, sources))
            with _disable_current_modes(), torch.no_grad():
                times = self._begun()
                with torch.profiler.record_function(STAND_IN) if self.named and times is not None else nullcontext():
                    for target, source in zip(targets, sources, strict=True):
                        copy(target.detach(), source.detach())
                self._ended(times)
            self.log.append((operation, size, times))
            work = FakeWork().boxed()
            return (outs, work) if gives else work

        return run

    def _begun(self) -> Any:
        if self._main is None:
            return [time.process_time()]
        if torch.cuda.current_stream(self.device) != self._main:
            return None
        times = [torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)]
        times[0].record()
        return times

    def _ended(self, times: Any) -> None:
        if self._main is None:
            times.append(time.process_time())
            self.spent += times[1] - times[0]
        elif times is not None:
            times[1].record()

    def _fill(self, out: Tensor, _: Tensor) -> None:
        for part in out.view(-1).split(TILE):
            part.copy_(self._numbers[: part.numel()])


def by_operation(entries: Sequence[tuple[str, int, Any]]) -> list[dict[str, Any]]:
    """Entries of the log summed up; ``beside``: how many of them ran on other streams, untimed."""
    found: dict[str, dict[str, Any]] = {}
    for operation, size, times in entries:
        one = found.setdefault(operation, {"operation": operation, "times": 0, "bytes": 0, "seconds": 0.0, "beside": 0})
        one["times"] += 1
        one["bytes"] += size
        one["seconds"] += seconds_of([times])
        one["beside"] += times is None
    return [found[operation] for operation in sorted(found)]


def seconds_of(times: Sequence[Any]) -> float:
    """Of the stream that computes, for the times of some entries of the log. CUDA: after a wait for the device."""
    return sum(
        (one[1] - one[0]) if isinstance(one[0], float) else one[0].elapsed_time(one[1]) / KILO  # of milliseconds
        for one in times if one is not None
    )  # fmt: skip


def _repeat(out: Tensor, mine: Tensor) -> None:
    one = mine.reshape(1, -1)
    out.view(-1, mine.numel()).copy_(one.expand(out.numel() // mine.numel(), -1))


def _sum(out: Tensor, every: Tensor) -> None:
    torch.sum(every.view(-1, out.numel()), 0, out=out.view(-1))


def _rewrite(out: Tensor, _: Tensor) -> None:
    out.mul_(1)


def _exchange(out: Tensor, mine: Tensor) -> None:
    for part in out.split(max(mine.shape[0], 1)):
        part.copy_(mine[: part.shape[0]])


def _nothing(*_: Tensor) -> None:
    """Sent data is written by the receiver."""
