"""A stand-in for ``torch.cuda`` in virtual time: GPUs of some ranks that run one program, on which the project's own timing runs.

The host takes time to queue an operation, streams work in order and beside each other, a collective begins when the last rank's
stream has come to it, and a product and a collective at the same time slow each other down. Ranks differ by when they leave a
barrier of their hosts (``skew``). Nothing is random: what comes out is what a method measures of a truth that is known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

DEPTH = 1024  # Entries of a queue: a host that fills it waits
EVENT = 1e-6  # Host seconds of an event, or of one more stream
GRAPH = 10e-6  # Host seconds of a graph's launch
CLOCK = 1.7e9  # Cycles per second
NEVER = math.inf


@dataclass(eq=False)
class Op:
    """An entry of a stream; of an event or a wait 0 seconds."""

    kind: str  # kernel, collective, spin, record, wait
    seconds: float
    ready: list[float]  # When each rank's host queued it
    event: Event | None = None  # Recorded or waited for
    left: list[float] = field(default_factory=list)


class Event:
    """Of ``torch.cuda``; when each rank's device passed it."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self.cuda, self.at = cuda, [NEVER] * cuda.ranks

    def record(self, stream: Stream | None = None) -> None:
        self.at = [NEVER] * self.cuda.ranks
        self.cuda.queue("record", 0.0, EVENT, stream, self)

    def query(self) -> bool:
        """Whether the device of this process, the first, has passed it by now."""
        self.cuda.advance(self.cuda.host[0])
        return self.at[0] <= self.cuda.host[0]

    def elapsed_time(self, end: Event) -> float:
        assert max(*self.at, *end.at) < NEVER, "an event that the device has not passed yet"
        return 1e3 * (end.at[0] - self.at[0])


class Stream:
    """Of ``torch.cuda``."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self.cuda, self.ops, self.next = cuda, list[Op](), [0] * cuda.ranks

    def wait_event(self, event: Event) -> None:
        self.cuda.queue("wait", 0.0, EVENT, self, event)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.cuda)
        event.record(other)
        self.wait_event(event)


class VirtualCuda:
    """``slower`` (kernel, collective): how much longer either takes while the other runs."""

    def __init__(self, skew: tuple[float, ...] = (0.0, 30e-6), slower: tuple[float, float] = (1.0, 1.0)) -> None:
        self.skew, self.ranks, self.slower = skew, len(skew), dict(zip(("kernel", "collective"), slower, strict=True))
        self.host, self.at = [0.0] * self.ranks, 0.0
        self.streams: list[Stream] = []  # That have something in them
        self.current, self.captured = Stream(self), None
        self.ours = Stream(self)  # of collectives that are not waited for
        self.blocked = 0  # Times that a host found its queue full

    # ------------------------------------------------------------------------------------ what programs call

    def kernel(self, seconds: float, host: float) -> None:
        """One kernel on the current stream that the host needs ``host`` seconds to launch."""
        self.queue("kernel", seconds, host)

    def collective(self, seconds: float, host: float, later: bool = False) -> Any:
        """One collective of all ranks, on the current stream, or beside it and behind what is in it."""
        if not later:
            self.queue("collective", seconds, host)
            return None
        self.ours.wait_stream(self.current)
        self.queue("collective", seconds, host, self.ours)
        done = Event(self)
        done.record(self.ours)
        return SimpleNamespace(wait=lambda: self.current.wait_event(done))

    def barrier(self) -> None:
        """Of the hosts; each leaves it by its skew later."""
        self.host = [max(self.host) + late for late in self.skew]

    def perf_counter(self) -> float:
        return self.host[0]

    def synchronize(self) -> None:
        self.advance(NEVER)
        self.host = [max(host, self.at) for host in self.host]
        for stream in self.streams:
            assert set(stream.next) == {len(stream.ops)}, "devices that wait for each other"
            stream.ops, stream.next = [], [0] * self.ranks
        self.streams = []

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, capture_error_mode: str = "global") -> Iterator[None]:
        self.captured = graph.ops
        yield
        self.captured = None

    def as_torch(self, **more: Any) -> Any:
        """What timing code calls of ``torch``; ``more`` are further functions."""

        def new_graph() -> Any:
            ops: list[tuple[str, float]] = []

            def replay() -> None:
                self.host = [host + GRAPH for host in self.host]
                for kind, seconds in ops:
                    self.queue(kind, seconds, 0.0)

            return SimpleNamespace(ops=ops, replay=replay)

        cuda = SimpleNamespace(
            Event=lambda enable_timing: Event(self), Stream=lambda: Stream(self), stream=self.stream, graph=self.graph,
            current_stream=lambda: self.current, synchronize=self.synchronize, CUDAGraph=new_graph,
            _sleep=lambda cycles: self.queue("spin", cycles / CLOCK, 4e-6),
        )  # fmt: skip
        tiny = SimpleNamespace(all_reduce=lambda *_, **__: self.collective(10e-6, 25e-6))
        return SimpleNamespace(cuda=cuda, distributed=tiny, zeros=lambda *_, **__: None, **more)

    # ------------------------------------------------------------------------------------ time

    def queue(
        self, kind: str, seconds: float, host: float, stream: Stream | None = None, event: Event | None = None
    ) -> None:
        if self.captured is not None:
            self.captured.append((kind, seconds))
            return
        stream = stream or self.current
        self.host = [at + host for at in self.host]
        while any(len(stream.ops) - done >= DEPTH for done in stream.next):
            self.blocked += 1
            self.step(NEVER)
            self.host = [max(at, self.at) for at in self.host]
        if stream not in self.streams:
            self.streams.append(stream)
        stream.ops.append(Op(kind, seconds, list(self.host), event, [seconds] * self.ranks))

    def advance(self, until: float) -> None:
        """All devices up to a time, or until they have nothing left."""
        while self.step(until):
            pass

    def step(self, until: float) -> bool:
        """To the next time at which something begins or ends; False where there is none before ``until``."""
        self._pass()
        running = self._running()
        rates = {id(op): self._rate(op, rank, running) for rank, ops in enumerate(running) for op in ops}
        for ops in running:  # a collective is as quick as its slowest rank lets it be
            for op in ops:
                if op.kind == "collective":
                    rates[id(op)] = min(self._rate(op, rank, running) for rank in range(self.ranks))
        ends = [self.at + op.left[rank] / rates[id(op)] for rank, ops in enumerate(running) for op in ops]
        begins = [
            op.ready[rank] for stream in self.streams for rank in range(self.ranks)
            if (op := self._head(stream, rank)) and op.ready[rank] > self.at
        ]  # fmt: skip
        upto = min([*ends, *begins, until])
        if upto == NEVER or (upto <= self.at and not ends and not begins):
            return False
        for rank, ops in enumerate(running):
            for op in ops:
                op.left[rank] -= (upto - self.at) * rates[id(op)]
        self.at = max(upto, self.at)
        self._pass()
        return upto < until

    def _head(self, stream: Stream, rank: int) -> Op | None:
        place = stream.next[rank]
        return stream.ops[place] if place < len(stream.ops) else None

    def _running(self) -> list[list[Op]]:
        """By rank: what its device works on."""
        found: list[list[Op]] = [[] for _ in range(self.ranks)]
        for stream in self.streams:
            heads = [self._head(stream, rank) for rank in range(self.ranks)]
            for rank, op in enumerate(heads):
                if op is None or op.ready[rank] > self.at or op.kind in ("record", "wait"):
                    continue
                others = all(one is op and op.ready[other] <= self.at for other, one in enumerate(heads))
                if op.kind != "collective" or others:
                    found[rank].append(op)
        return found

    def _rate(self, op: Op, rank: int, running: list[list[Op]]) -> float:
        other = {"kernel": "collective", "collective": "kernel"}.get(op.kind)
        return 1.0 / self.slower[op.kind] if any(one.kind == other for one in running[rank]) else 1.0

    def _pass(self) -> None:
        """Whatever has ended, events and waits included, leaves its stream."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                for rank in range(self.ranks):
                    op = self._head(stream, rank)
                    if op is None or op.ready[rank] > self.at or op.left[rank] > 1e-13:
                        continue
                    if op.kind == "wait" and op.event is not None and op.event.at[rank] > self.at:
                        continue
                    if op.kind == "record" and op.event is not None:
                        op.event.at[rank] = self.at
                    stream.next[rank] += 1
                    moved = True


class VirtualRanks:
    """``rank_groups.Ranks`` of one node of a virtual machine."""

    device, timeout, hosts, first = "cuda", 30.0, ["node"] * 8, True

    def __init__(self, cuda: VirtualCuda) -> None:
        self.cuda, self.world, self.local = cuda, cuda.ranks, cuda.ranks
        self.watch = SimpleNamespace(doing=lambda *_: contextlib.nullcontext(), again=lambda: None)

    def group(self, pattern: Any) -> Any:
        return "a group"

    def barrier(self) -> None:
        self.cuda.barrier()

    def slowest(self, samples: Any) -> list[float]:
        self.barrier()
        return [float(one) for one in samples]


def operation(cuda: VirtualCuda, seconds: float, host: float = 25e-6) -> Callable[..., Any]:
    """Stands for ``rank_groups.Operation``: a collective that takes so long, which the host needs ``host`` to queue."""

    def made(*_: Any) -> Any:
        return SimpleNamespace(
            run=lambda: cuda.collective(seconds, host), start=lambda: cuda.collective(seconds, host, later=True),
            fill=lambda: None, calm=lambda: None, wrong=lambda: "", ranks=list(range(cuda.ranks)),
        )  # fmt: skip

    return made
