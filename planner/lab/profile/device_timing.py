"""Timing by device events (torch): the queue of the GPU is full before the first event, so that the device is timed, not the host.

A host needs 5 to 30 us to queue an operation; a kernel or a message may take less. Between two events the device then waits for the
host, and the events say what the host needs. Therefore the device spins first, for as long as the host needs to queue the sample
(times MARGIN), and the sample is good where its first event had not passed when the last was queued. Figures without the spin
(``ahead=False``: a host that dispatches while it is timed) and from a CUDA graph are kept with short ones.
"""

import time
from functools import cache
from typing import Any

import torch

from planner import units
from planner.lab.profile.points import Run

MARGIN = 1.5  # Length of the spin over what the host needed for a sample
SLACK = 20e-6  # Seconds: the events, the spin's own launch
LONGEST_SPIN = 0.1  # Seconds: what takes the host longer is no kernel
SHORTEST_SPIN = 1_000_000  # Cycles by which a spin's rate is known: half a millisecond
GRAPH_RUNS = 16  # Runs captured in one graph: its own launch is spread over them


@cache
def spin_rate() -> float:
    """Cycles of a spinning kernel per second; the quickest of some, at the clock of a device that works."""
    rates = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(SHORTEST_SPIN)
        end.record()
        torch.cuda.synchronize()
        rates.append(SHORTEST_SPIN / max(start.elapsed_time(end) / units.KILO, 1e-9))
    return max(rates)


def spin(seconds: float) -> None:
    """Queues a kernel on the current stream that does nothing for so long."""
    torch.cuda._sleep(int(seconds * spin_rate()))


class EventTaker:
    """Samples by events, each the mean of ``inner`` runs, in seconds; a block of them is queued before the host waits.

    ``before`` is queued between the spin and the first event. ``late`` of the last block: samples whose first event had passed
    before all was queued; ``wider`` makes the next spins twice as long (``timing.ahead_of``). It does not do so by itself: all
    ranks of a collective must run as many.
    """

    def __init__(self, run: Run, before: Run | None = None, *, ahead: bool = True) -> None:
        self.run, self.before, self.ahead = run, before, ahead
        self.late, self.margin = 0, MARGIN
        self._first: list[tuple[Any, Any]] = []  # Samples that only showed what the host needs
        self._host: dict[int, float] = {}  # Least seconds that the host needed to queue a sample, by its runs

    def wider(self) -> None:
        """The host needs longer than was thought."""
        self.margin *= 2.0

    def _spin_seconds(self, inner: int) -> float:
        """For a sample of so many runs, from those that were queued before."""
        known = [seconds * max(inner / runs, 1.0) for runs, seconds in self._host.items()]
        return min(self.margin * min(known) + SLACK, LONGEST_SPIN)

    def __call__(self, count: int, inner: int) -> list[float]:
        while (
            self.ahead and len(self._first) < 2
        ):  # the first run of all compiles, loads and connects: the second counts
            self._first.append(self._queue(inner))
            torch.cuda.synchronize()
        pairs = []
        self.late = 0
        for _ in range(count):
            if self.ahead:
                spin(self._spin_seconds(inner))
            start, end = self._queue(inner)
            self.late += self.ahead and start.query()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / units.KILO / inner for start, end in pairs]

    def _queue(self, inner: int) -> tuple[Any, Any]:
        """One sample between its events. A full queue makes the host wait: the least of all is what it needs."""
        begun = time.perf_counter()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.before:
            self.before()
        start.record()
        for _ in range(inner):
            self.run()
        end.record()
        seconds = time.perf_counter() - begun
        self._host[inner] = min(self._host.get(inner, seconds), seconds)
        return start, end


def captured(run: Run, runs: int = GRAPH_RUNS) -> Run:
    """A CUDA graph of so many runs. Raises RuntimeError where one of them cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lazy loading and workspaces, outside of the capture
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, ours = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may query events meanwhile
            for _ in range(runs):
                run()
    except BaseException:
        torch.cuda.set_stream(ours)  # a capture that cannot be ended leaves its own stream the current one
        raise
    return graph.replay


def lost() -> str:
    """What the driver says of a device that gives no further results; "" while it works."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return ""
