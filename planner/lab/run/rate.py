"""How fast this processor's core is while a step runs, by the profiler's yardstick; and what the host needs around layers (torch).

A core that is shared runs at another rate from second to second, and processor time does not leave that out. The profiler gives all
of its figures at the rate that its yardstick had when it began; a step's are brought there alike: t = t_measured y_0 / y, y the
mean of the yardstick between the passes of that step on that rank.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from planner.lab.profile.compute_timing import stream_yardstick, yardstick
from planner.lab.profile.tensors import keep_memory
from planner.lab.reference.split import Split
from planner.lab.run.clock import Clock, Timed, reset_memory
from planner.lab.run.eager_pricing import LAYERS, UPDATE, UPDATED, Host, apart, empty_layers
from planner.lab.run.training import Run
from planner.record import record

APART = 40.0
"""Yardsticks that fit between two of them: they take a fortieth of the time."""
AROUND = 3
"""Runs of the yardstick of the update, on either side of a step."""
PASSES = ("F", "B")
Passes = dict[tuple[int, str, int], float]
"""Processor seconds by stage, kind and microbatch."""


class Rate:
    """The yardstick, run between passes."""

    def __init__(self) -> None:
        self.yardstick = yardstick()
        self._runs: list[float] = []
        self._last = 0.0

    def look(self) -> None:
        """Runs it where the last time was long enough ago."""
        if time.perf_counter() - self._last >= APART * self.yardstick.reference:
            self._runs.append(self.yardstick.seconds())
            self._last = time.perf_counter()

    def take(self) -> float:
        """Its mean seconds since the last call, of at least one run."""
        if not self._runs:
            self._last = 0.0
            self.look()
        found, self._runs = statistics.fmean(self._runs), []
        return found


class Slowed(NamedTuple):
    """How many times longer than in the profile the yardsticks took during a step."""

    passes: float
    """Of the core that computes."""
    update: float
    """Of what moves bytes; as the passes where the profile has no yardstick of it."""


class Core:
    """A processor is host and device at once: one thread and freed memory kept, as its profile has them, and the rate of its core
    from step to step, where the profile has kept its own."""

    def __init__(self, kept: Mapping[str, float]) -> None:
        """``kept``: see ``eager_pricing.yardsticks``."""
        torch.set_num_threads(1)
        keep_memory()
        self.product, self.stream = kept.get("product"), kept.get("stream")
        self.rate = Rate() if self.product else None
        self._streamed: list[float] = []

    def look(self) -> None:
        """A pass has ended."""
        if self.rate is not None:
            self.rate.look()

    def begin(self) -> None:
        """A step is next."""
        if self.rate is not None:
            self.rate.take()
            self._streamed = _streamed()

    def ended(self) -> Slowed | None:
        """The step since ``begin``; None where the profile has no yardstick."""
        if self.rate is None or not self.product:
            return None
        passes = self.rate.take() / self.product
        return Slowed(passes, statistics.fmean(self._streamed + _streamed()) / self.stream if self.stream else passes)


def _streamed() -> list[float]:
    """The yardstick of the update, some times."""
    return [stream_yardstick().seconds() for _ in range(AROUND)]


@record
class TimedSteps:
    """Steps that are taken one after the other, the last ones timed."""

    warmup: int
    """Steps before those that are timed."""
    steps: int
    """Steps that are timed."""
    core: Core | None
    """Of a processor."""
    before: Callable[[int, str], AbstractContextManager[object]]
    """Gives what stands around the step of a number, from 0, and in words, and around the wait for the last one."""
    took: Callable[[list[Timed], Slowed | None], object]
    """Gets what a timed step took, and how slow its core was."""

    def take(self, run: Run, clock: Clock, data: Sequence[Any]) -> list[torch.Tensor]:
        """Losses of the timed steps. On a GPU the host may be one step ahead: a stream that waits to
        be asked idles at the beginning of the next step."""
        waiting: list[list[Any]] = []
        losses = []
        if self.core is not None:
            clock.between = self.core.look
        for number in range(self.warmup + self.steps):
            clock.on = number >= self.warmup
            if number == self.warmup:
                gc.collect()
                reset_memory(run.device)
            with self.before(number, f"step {number + 1 - self.warmup}" if clock.on else f"warm step {number + 1}"):
                if self.core is not None:
                    self.core.begin()
                with clock.span("step"):
                    loss, _ = run.step(*data[number % len(data)])
                if clock.on:
                    losses.append(loss.detach())
                    waiting.append(clock.cut())
                elif clock.cuda:
                    torch.cuda.synchronize()  # its time is over when it has run, not when it was started
                while len(waiting) > int(clock.cuda):
                    self._read(clock, waiting.pop(0))
        clock.on = False
        with self.before(self.warmup + self.steps, "the last step"):
            for batch in waiting:
                self._read(clock, batch)
        return losses

    def _read(self, clock: Clock, batch: list[Any]) -> None:
        self.took(clock.resolve(batch), self.core.ended() if self.core is not None else None)


def taken_step(run: Run, clock: Clock, number: int) -> list[Timed]:
    """Takes a step."""
    with clock.span("step"):
        run.step(*run.data(number))
    return clock.resolve(clock.cut())


def passes_of(step: Iterable[Timed]) -> Passes:
    """The thread's seconds of each pass."""
    return {(t.stage, t.kind, t.microbatch): t.thread for t in step if t.microbatch >= 0}


def middle(steps: Iterable[Passes], kind: str) -> list[float]:
    """Passes of all microbatches but the first, which gathers weights, and the last, which reduces gradients."""
    kept = list(steps)
    last = max(number for step in kept for _, _, number in step)
    return [t for step in kept for (_, k, number), t in step.items() if k == kind and 0 < number < last]


def host_seconds(split: Split, reference: float | None = None, clocks: Callable[[torch.device], Clock] = Clock) -> Host:
    """Passes over empty layers, and their update: one layer and three separate a layer from the ends. Brought to a yardstick of
    ``reference`` seconds where one is given. ``clocks`` makes the clock, one for each of the two."""
    device, found = torch.device("cpu"), {}
    for layers in LAYERS:
        run = Run(empty_layers(split, layers), device).allocate(fill=False).fill_by_shard()
        clock, rate = clocks(device), Rate()
        clock.attach(run)
        clock.on = True
        steps = []
        for number in range(5):
            steps.append(taken_step(run, clock, number))
            rate.look()
        slowed = rate.take() / reference if reference else 1.0
        passes = [passes_of(step) for step in steps[1:]]
        updates = [sum(t.thread for t in step if t.kind in UPDATE) for step in steps[1:]]
        found[layers] = {kind: statistics.median(middle(passes, kind)) / slowed for kind in PASSES}
        found[layers][UPDATED] = statistics.median(updates) / slowed
    return {kind: apart(*(found[layers][kind] for layers in LAYERS)) for kind in (*PASSES, UPDATED)}
