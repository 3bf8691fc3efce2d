"""Fake collectives: one process does, to its own memory, what a collective of the whole group would.

The fake process group gathers by copying and exchanges by copying, but its all-reduce, broadcast and receive do nothing and
its reduce-scatter reads one shard of the input. While ``FakeCollectives`` is entered every one of them reads and writes the
bytes that this rank's GPU reads and writes for it, so that kernels next to it find caches and memory as busy as they
will be, and buffers from neighbours hold sane numbers. Time on the wire is not there: it is priced, never measured.

operation        reads             writes
all-gather       own shard         the whole buffer, from the own shard
reduce-scatter   the whole buffer  own shard: the sum of the buffer's parts
all-reduce       the buffer        the buffer, unchanged
broadcast        the buffer        the buffer, unchanged
all-to-all       what it sends     what it receives, from what it sends
send             nothing           nothing: the receiver's side is where memory is written
receive          nothing           the buffer, normal numbers
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import _disable_current_modes

from planner.units import KILO

TILE = 1 << 16
"""Normal numbers that receive buffers are filled with, over and over."""
DENORMAL = 1e-30
"""Numbers closer to 0 than this are close to where single precision and bf16 lose bits, and CPUs most of their speed."""


class FakeCollectives:
    """Replaces the collectives of this process while it is entered, and takes the time that each replacement takes.

    ``log`` has one entry for each: (operation, bytes of the full buffer, ranks of the group, begin, end) with begin and end
    in CPU seconds, or two CUDA events, or None for what ran on another stream than the one that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.log: list[tuple[str, int, int, Any]] = []
        generator = torch.Generator(device=device).manual_seed(1)
        self._numbers = torch.empty(TILE, device=device).normal_(generator=generator)
        self._tiles: dict[torch.dtype, Tensor] = {}
        self._library: Any = None
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def __enter__(self) -> FakeCollectives:
        self._library = torch.library.Library("c10d", "IMPL")
        key = self.device.type.upper()
        operations: dict[str, Callable[..., Any]] = {
            "_allgather_base_": self._gather, "allgather_into_tensor_coalesced_": self._gather_all,
            "_reduce_scatter_base_": self._scatter, "reduce_scatter_tensor_coalesced_": self._scatter_all,
            "allreduce_": self._reduce, "broadcast_": self._broadcast, "alltoall_base_": self._exchange,
            "recv_": self._receive, "send": self._send,
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced is the purpose
            for name, function in operations.items():
                self._library.impl(name, function, key, allow_override=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def seconds(self, first: int = 0, last: int | None = None) -> float:
        """Of the stream that computes, for the entries of the log from ``first`` to before ``last``. CUDA: after a wait for
        the device."""
        return sum(_length(times) for _, _, _, times in self.log[first:last])

    def by_operation(self, first: int, last: int) -> list[dict[str, Any]]:
        """Entries of the log from ``first`` to before ``last``, summed up; ``beside`` of them ran on other streams, untimed."""
        found: dict[str, dict[str, Any]] = {}
        for operation, size, _, times in self.log[first:last]:
            one = found.setdefault(
                operation, {"operation": operation, "times": 0, "bytes": 0, "seconds": 0.0, "beside": 0}
            )
            one["times"] += 1
            one["bytes"] += size
            one["seconds"] += _length(times)
            one["beside"] += times is None
        return [found[operation] for operation in sorted(found)]

    def clear(self) -> None:
        """Forget the log."""
        self.log.clear()

    def numbers(self, like: Tensor) -> Tensor:
        """Normal numbers, TILE of them, in the precision of a tensor."""
        if like.dtype not in self._tiles:
            self._tiles[like.dtype] = self._numbers.to(like.dtype)
        return self._tiles[like.dtype]

    def _timed(self, operation: str, size: int, group: Any, work: Callable[[], object]) -> Any:
        ranks = dist.ProcessGroup.unbox(group).size()
        with _disable_current_modes(), torch.no_grad():
            if self._main is None:
                begin = time.process_time()
                work()
                times: Any = (begin, time.process_time())
            elif torch.cuda.current_stream(self.device) == self._main:
                times = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                times[0].record()
                work()
                times[1].record()
            else:
                work()
                times = None
        self.log.append((operation, size, ranks, times))
        return FakeWork().boxed()

    def _gather(self, out: Tensor, mine: Tensor, group: Any, *_: Any) -> Any:
        return out, self._gather_all([out], [mine], group)

    def _gather_all(self, outs: list[Tensor], parts: list[Tensor], group: Any, *_: Any) -> Any:
        def work() -> None:
            for out, mine in zip(outs, parts, strict=True):
                one = mine.detach().reshape(1, -1)
                out.detach().view(-1, mine.numel()).copy_(one.expand(out.numel() // mine.numel(), -1))

        return self._timed("all_gather", sum(map(_bytes, outs)), group, work)

    def _scatter(self, out: Tensor, every: Tensor, group: Any, *_: Any) -> Any:
        return out, self._scatter_all([out], [every], group)

    def _scatter_all(self, outs: list[Tensor], wholes: list[Tensor], group: Any, *_: Any) -> Any:
        def work() -> None:
            for out, every in zip(outs, wholes, strict=True):
                torch.sum(every.detach().view(-1, out.numel()), 0, out=out.detach().view(-1))

        return self._timed("reduce_scatter", sum(map(_bytes, wholes)), group, work)

    def _reduce(self, tensors: list[Tensor], group: Any, *_: Any) -> Any:
        return tensors, self._timed("all_reduce", sum(map(_bytes, tensors)), group, lambda: _rewrite(tensors))

    def _broadcast(self, tensors: list[Tensor], group: Any, *_: Any) -> Any:
        return tensors, self._timed("broadcast", sum(map(_bytes, tensors)), group, lambda: _rewrite(tensors))

    def _exchange(self, out: Tensor, mine: Tensor, group: Any, *_: Any) -> Any:
        def work() -> None:
            source, place = mine.detach(), out.detach()
            for start in range(0, place.shape[0], max(source.shape[0], 1)):
                part = place[start : start + source.shape[0]]
                part.copy_(source[: part.shape[0]])

        return self._timed("all_to_all", max(_bytes(out), _bytes(mine)), group, work)

    def _receive(self, tensors: list[Tensor], group: Any, *_: Any) -> Any:
        def work() -> None:
            for tensor in tensors:
                fill(tensor, self.numbers(tensor))

        return self._timed("receive", sum(map(_bytes, tensors)), group, work)

    def _send(self, tensors: list[Tensor], group: Any, *_: Any) -> Any:
        return self._timed("send", sum(map(_bytes, tensors)), group, lambda: None)


def fill(tensor: Tensor, numbers: Tensor) -> None:
    """Write such numbers over and over into a contiguous tensor, without other memory."""
    flat, count = tensor.detach().view(-1), numbers.numel()
    whole = flat.numel() // count * count
    flat[:whole].view(-1, count).copy_(numbers.expand(whole // count, count))
    flat[whole:].copy_(numbers[: flat.numel() - whole])


def denormals(tensor: Tensor) -> int:
    """How many numbers of a tensor are not 0 and closer to it than DENORMAL, or not finite."""
    values = tensor.detach().float()
    return int((((values != 0) & (values.abs() < DENORMAL)) | ~torch.isfinite(values)).sum())


def _rewrite(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.detach().mul_(1)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _length(times: Any) -> float:
    if times is None:
        return 0.0
    begin, end = times
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / KILO  # of milliseconds
