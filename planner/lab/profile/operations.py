"""Each collective on real tensors: what to run, what to fill in, what must come out (torch).

Inputs and results are slices of two buffers that are made once, so that no timing includes an allocation or first touch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlannerError, UnknownNameError
from planner.lab.profile.patterns import DTYPE_BYTES, OPERATIONS
from planner.lab.profile.tensors import DTYPES

CHUNK = 2**24
"""Elements that are filled or checked at once: their indices take eight bytes each."""
SAFE_SUM = 256
"""bf16 counts exactly up to here: 8 bits of mantissa."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group of one pattern that this rank is in."""

    ranks: list[int]
    """Global ranks, in order."""
    me: int
    """Place of this rank in it."""
    handle: Any
    """The process group."""

    @property
    def n(self) -> int:
        """Ranks."""
        return len(self.ranks)


class Buffers:
    """Two byte buffers of ``capacity`` bytes and some more on one device, reused by every operation."""

    def __init__(self, capacity: int, device: str) -> None:
        self.capacity = capacity
        self.device = device
        slack = capacity + 4 * 4096  # uneven divisions round each of up to 4096 ranks' parts up by an element
        self.source = torch.zeros(slack, dtype=torch.uint8, device=device)
        self.result = torch.zeros(slack, dtype=torch.uint8, device=device)

    def view(self, which: torch.Tensor, count: int, dtype: str) -> torch.Tensor:
        """The first ``count`` elements as that type."""
        return which[: count * DTYPE_BYTES[dtype]].view(DTYPES[dtype])


class Operation:
    """One collective of one size, ready to run again and again."""

    source: torch.Tensor
    result: torch.Tensor

    def run(self) -> object:
        """Runs it; on a GPU it is queued on the current stream."""
        raise NotImplementedError

    def start(self) -> Any:
        """Starts it and returns its work handle, for running something at the same time."""
        raise PlannerError("torch has no such form of a transfer")

    def fill(self) -> None:
        """Puts the pattern of this rank into the inputs and nonsense into the results."""
        raise NotImplementedError

    def wrong(self) -> str:
        """After ``fill`` and one ``run``: what is wrong with the result of this rank, or nothing."""
        raise NotImplementedError

    def calm(self) -> None:
        """Zeros in the inputs, so that sums in place do not grow while it is timed."""
        self.source.zero_()


def make(op: str, size: int, dtype: str, group: Group, buffers: Buffers) -> Operation:
    """The operation of ``size`` bytes (S as nccl-tests counts them) in a group."""
    if op not in OPERATIONS:
        raise UnknownNameError("collective", op, OPERATIONS)
    if size > buffers.capacity:
        raise PlannerError(f"{op} of {size} bytes does not fit the buffers of {buffers.capacity}")
    return (_Transfer if op.startswith("send_recv") else _Collective)(op, size, dtype, group, buffers)


def content(rank: torch.Tensor | int, index: torch.Tensor, n: int) -> torch.Tensor:
    """Element ``index`` of the buffer of the group's rank: small whole numbers, so that sums of n are exact in bf16."""
    span = max(1, min(5, SAFE_SUM // (2 * n)))
    return ((index * 7 + rank * 3) % span + rank % 2).to(torch.float32)


def _put(buffer: torch.Tensor, values: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Element i becomes values(i)."""
    for start in range(0, buffer.numel(), CHUNK):
        part = buffer[start : start + CHUNK]
        part.copy_(values(torch.arange(start, start + part.numel(), device=buffer.device)))


def _single(name: str, older: str) -> Callable[..., Any]:
    """A function of torch.distributed by the name it has from 2.13 on, or its older one."""
    return getattr(dist, name, None) or getattr(dist, older)


class _Collective(Operation):
    """All, one to all and all to one."""

    def __init__(self, op: str, size: int, dtype: str, group: Group, buffers: Buffers) -> None:
        self.op, self.dtype, self.group = op, dtype, group
        self.part = max(1, -(-size // (DTYPE_BYTES[dtype] * group.n)))  # elements of one rank's share, rounded up
        self.whole = self.part * group.n
        divided_input = op in ("all_gather", "gather")
        divided_result = op in ("reduce_scatter", "scatter")
        self.source = buffers.view(buffers.source, self.part if divided_input else self.whole, dtype)
        self.result = buffers.view(buffers.result, self.part if divided_result else self.whole, dtype)
        self.in_place = op in ("all_reduce", "broadcast", "reduce")
        self.root = group.ranks[0]
        self._call = self._calls()[op]

    def run(self) -> object:
        return self._call(False)

    def start(self) -> Any:
        return self._call(True)

    def _calls(self) -> dict[str, Callable[[bool], Any]]:
        """By operation, blocking or not."""
        source, result, group, root = self.source, self.result, self.group.handle, self.root
        at_root = self.group.me == 0
        gathered = list(result.chunk(self.group.n)) if self.op == "gather" and at_root else None
        pieces = list(source.chunk(self.group.n)) if self.op == "scatter" and at_root else None
        gather = _single("all_gather_single", "all_gather_into_tensor")
        scatter = _single("reduce_scatter_single", "reduce_scatter_tensor")
        return {
            "all_reduce": lambda later: dist.all_reduce(source, group=group, async_op=later),
            "all_gather": lambda later: gather(result, source, group=group, async_op=later),
            "reduce_scatter": lambda later: scatter(result, source, group=group, async_op=later),
            "all_to_all": lambda later: dist.all_to_all_single(result, source, group=group, async_op=later),
            "broadcast": lambda later: dist.broadcast(source, root, group=group, async_op=later),
            "reduce": lambda later: dist.reduce(source, root, group=group, async_op=later),
            "gather": lambda later: dist.gather(source, gathered, root, group=group, async_op=later),
            "scatter": lambda later: dist.scatter(result, pieces, root, group=group, async_op=later),
        }

    def fill(self) -> None:
        _put(self.source, lambda index: content(self.group.me, index, self.group.n))
        if not self.in_place:
            self.result.fill_(-1.0)

    def _expected(self) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
        """(result, what its element i must be); None where this rank's result does not count."""
        n, me, part = self.group.n, self.group.me, self.part
        if self.op in ("reduce", "gather") and me != 0:
            return None
        wanted: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "all_reduce": self._sum,
            "reduce": self._sum,
            "broadcast": lambda index: content(0, index, n),
            "reduce_scatter": lambda index: self._sum(index + me * part),
            "scatter": lambda index: content(0, index + me * part, n),
            "all_to_all": lambda index: content(index // part, index % part + me * part, n),
            "all_gather": lambda index: content(index // part, index % part, n),
            "gather": lambda index: content(index // part, index % part, n),
        }
        return self.source if self.in_place else self.result, wanted[self.op]

    def _sum(self, index: torch.Tensor) -> torch.Tensor:
        total = content(0, index, self.group.n)
        for rank in range(1, self.group.n):
            total = total + content(rank, index, self.group.n)
        return total

    def wrong(self) -> str:
        pair = self._expected()
        return "" if pair is None else difference(pair[0], pair[1], exact=2 * self.group.n <= SAFE_SUM)


class _Transfer(Operation):
    """One way, both ways, or round the ring."""

    def __init__(self, op: str, size: int, dtype: str, group: Group, buffers: Buffers) -> None:
        self.op, self.group = op, group
        count = max(1, size // DTYPE_BYTES[dtype])
        self.source = buffers.view(buffers.source, count, dtype)
        self.result = buffers.view(buffers.result, count, dtype)
        self.following = group.ranks[(group.me + 1) % group.n]
        self.before = group.ranks[(group.me - 1) % group.n]
        self.receives = op != "send_recv" or group.me == 1

    def run(self) -> None:
        handle = self.group.handle
        if self.op == "send_recv":
            if self.group.me == 0:
                dist.send(self.source, self.following, group=handle)
            elif self.group.me == 1:
                dist.recv(self.result, self.before, group=handle)
            return
        steps = [
            dist.P2POp(dist.isend, self.source, self.following, group=handle),
            dist.P2POp(dist.irecv, self.result, self.before, group=handle),
        ]
        for work in dist.batch_isend_irecv(steps):
            work.wait()

    def fill(self) -> None:
        _put(self.source, lambda index: content(self.group.me, index, 1))
        self.result.fill_(-1.0)

    def wrong(self) -> str:
        if not self.receives:
            return ""
        sender = (self.group.me - 1) % self.group.n
        return difference(self.result, lambda index: content(sender, index, 1), exact=True)


def difference(result: torch.Tensor, expected: Callable[[torch.Tensor], torch.Tensor], *, exact: bool) -> str:
    """The first element that differs, in words; "" where none does. Large bf16 sums may round by one part in 64."""
    allowed = 0.0 if exact or result.dtype == torch.float32 else 1.0 / 64.0
    for start in range(0, result.numel(), CHUNK):
        found = result[start : start + CHUNK].to(torch.float32)
        wanted = expected(torch.arange(start, start + found.numel(), device=result.device))
        off = ((found - wanted).abs() > allowed * wanted.abs()) | ~torch.isfinite(found)
        if bool(off.any()):
            place = int(off.nonzero()[0].item())
            return (
                f"element {start + place} of {result.numel()} is {found[place].item():g}, "
                f"expected {wanted[place].item():g}"
            )
    return ""


def quiet() -> None:
    """Names that torch has renamed warn once per call site; the profile needs none of that on the terminal."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
