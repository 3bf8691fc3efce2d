"""One rank of a big job alone on one device, with real tensors: what it computes, how long that takes, how much it allocates.

The same run as on fake tensors (``meta.py``) with memory and numbers: its modules, optimizer and pipeline schedule, rank and world
size pretended, collectives by local copies (``fake_collectives.py``). The memory tracker follows a first step; the steps that are
timed it does not. Time of the copies is taken off every pass: what is left is the rank's own computation.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from planner.lab.reference import fused_operators
from planner.lab.reference.attention_kernel import RAN
from planner.lab.reference.split import Split
from planner.lab.run.assembled_step import Seen
from planner.lab.run.clock import PASSES, Clock, Timed, memory
from planner.lab.run.eager_pricing import UPDATE, Host
from planner.lab.run.fake_collectives import FakeCollectives, by_operation, seconds_of
from planner.lab.run.full_rank import facts, in_words, traced_step
from planner.lab.run.kernel_trace import slow_hosts
from planner.lab.run.levels import FIRST, SETTING_UP
from planner.lab.run.meta import Measured, RankAlone, pretended, step_of
from planner.lab.run.rate import Core, Slowed, TimedSteps, host_seconds
from planner.lab.run.workers import Tell
from planner.record import record
from planner.units import KILO


@record
class Alone:
    """How a rank is to be run by itself."""

    device: str
    """cpu or cuda."""
    warmup: int
    """Steps that are neither followed nor timed."""
    steps: int
    """Steps that are timed."""
    timeout: float = 60.0
    """Seconds after which a step has hung."""
    yardsticks: dict[str, float] | None = None
    """Of the processor's profile, whose rate times are brought to; None on a GPU."""
    host: bool = False
    """Time empty layers first."""


@dataclass(kw_only=True)
class Emulation:
    """What one rank did alone, filled while it runs."""

    rank: int
    """Of all ranks."""
    stage: int
    """Its pipeline rank."""
    microbatches: int
    """Of each step."""
    memory: Measured | None = None
    """As level meta sees it, of the step that is followed; None when it did not get through."""
    allocator: dict[str, int] = field(default_factory=dict)
    """Bytes: peaks of the GPU's allocator over the timed steps (allocated, reserved), and what the device had in use (device);
    of a CPU the peak of resident memory."""
    samples: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds by pass (F, B, W) and virtual stage, local copies taken off: one for each microbatch of each
    timed step."""
    totals: list[float] = field(default_factory=list)
    """Seconds of all passes of each timed step, local copies taken off."""
    updates: list[float] = field(default_factory=list)
    """Seconds of clipping and update of each timed step, local copies taken off."""
    busy: list[dict[str, Any]] = field(default_factory=list)
    """Of a GPU: seconds in which kernels of each pass run, see ``kernel_trace.busy_passes``."""
    stand_ins: list[dict[str, Any]] = field(default_factory=list)
    """Local copies of a step, see ``FakeCollectives.by_operation``."""
    failure: dict[str, Any] | None = None
    """Outcome, phase, sentence and GiB allocated; None when it got through."""
    not_compiled: dict[str, str] = field(default_factory=dict)
    """Operators that ran on a GPU as several kernels instead of one, and why."""
    attention: list[str] = field(default_factory=list)
    """Kernels that attention ran on a GPU."""
    host: Host | None = None
    """Of a processor: what empty layers take, local copies taken off; None = not measured."""
    slowed: list[float] = field(default_factory=list)
    """How many times longer than in the profile its yardstick took in each timed step, whose times are divided by it; empty
    where the profile has none."""
    update_slowed: list[float] = field(default_factory=list)
    """The same of the update."""

    @classmethod
    def of(cls, rank: int, split: Split) -> Emulation:
        """A rank of which nothing is known yet."""
        return cls(rank=rank, stage=rank * split.pp // split.world, microbatches=step_of(split))

    @property
    def outcome(self) -> str:
        """How it ended."""
        return "completed" if self.failure is None else str(self.failure["outcome"])

    @property
    def host_bound(self) -> dict[tuple[int, str], float]:
        """Share of a pass in which the GPU works, by virtual stage and kind, where the host bounds it."""
        return slow_hosts(self.busy, {(stage, kind): values for (kind, stage), values in self.samples.items()})

    def seen(self) -> Seen:
        """Medians over the steps."""
        passes = {key: statistics.median(values) for key, values in self.samples.items()}
        each = sum(seconds for (name, _), seconds in passes.items() if name != "W")
        once = statistics.median(self.totals) - self.microbatches * each
        return Seen(stage=self.stage, passes=passes, once=once, optimizer=statistics.median(self.updates))


class OwnClock(Clock):
    """A clock that leaves out the local copies inside of each span."""

    def __init__(self, device: torch.device, fakes: FakeCollectives) -> None:
        super().__init__(device)
        self._fakes = fakes

    def _now(self) -> Any:
        if not self.cuda:
            return super()._now() - np.array([0.0, self._fakes.spent])
        event = self._spare.pop() if self._spare else _Event(enable_timing=True)
        event.log, event.copies = self._fakes.log, len(self._fakes.log)
        event.record()
        return event


class _Event(torch.cuda.Event):
    """An event of a GPU that knows the local copies before it."""

    log: list[Any]
    copies: int

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another one, without the local copies between both."""
        copies = [times for _, _, times in self.log[self.copies : end_event.copies]]
        return float(super().elapsed_time(end_event)) - seconds_of(copies) * KILO


def emulate(alone: Alone, split: Split, rank: int, tell: Tell) -> Emulation:
    """Run one rank by itself, once per process.

    Running out of memory is a result: what was known until then, and the phase.
    """
    torch.set_flush_denormal(True)  # on a CPU numbers near 0 cost a matrix product up to 180 times its time
    one = LoneRank(alone, split, rank, tell)
    try:
        with pretended(split, rank), one.fakes:
            one.run()
    except Exception as error:
        known = facts(error, one.device.type)
        if not known:
            raise
        one.snapshot().failure = {
            "outcome": "out_of_memory", "phase": one.phase, "sentence": in_words(error), "allocated_gib": known["allocated_gib"],
        }  # fmt: skip
    return one.snapshot()


def _device(alone: Alone) -> torch.device:
    """One device, whatever rank is pretended: device meshes choose a GPU by the rank."""
    if alone.device == "cpu":
        return torch.device("cpu")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[0]
    os.environ.pop("LOCAL_RANK", None)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


class LoneRank:
    """One rank that is run by itself: where it is, named when it fails, and what it has found."""

    def __init__(self, alone: Alone, split: Split, rank: int, tell: Tell) -> None:
        self.alone, self.split, self.tell, self.device = alone, split, tell, _device(alone)
        self.found = Emulation.of(rank, split)
        self.fakes = FakeCollectives(self.device)
        self.clock = OwnClock(self.device, self.fakes)
        self.core = Core(alone.yardsticks) if alone.yardsticks is not None else None
        self.phase = ""
        self.starts: list[int] = []
        """Local copies before each timed step."""

    def begin(self, phase: str, seconds: float) -> None:
        """What comes next, and after how long it has hung."""
        self.phase = phase
        self.tell("begin", (phase, seconds))

    def snapshot(self) -> Emulation:
        """All that was found so far."""
        self.found.allocator, self.found.not_compiled = memory(self.device), dict(fused_operators.NOT_COMPILED)
        self.found.attention = sorted(set(RAN.values()))
        return self.found

    def run(self) -> None:
        """The step that is followed, then the timed ones."""
        self.begin("building the model", SETTING_UP)
        torch.manual_seed(self.found.rank)
        followed = RankAlone(self.split, self.tell, self.device)
        self.begin("first step", self.alone.timeout * FIRST)
        self.found.memory = followed.tracked(self.found.rank)
        self.tell("kept", self.snapshot())
        for hook in followed.hooks:
            hook.remove()
        if self.core is not None and self.alone.host:
            self.begin("timing layers without work", SETTING_UP)
            clock = partial(OwnClock, fakes=self.fakes)
            self.found.host = host_seconds(followed.split, self.core.product, clock)
        self.time(followed)

    def time(self, alone: RankAlone) -> None:
        """Steps with the clock on; nothing follows them."""
        self.clock.attach(alone.run)
        warmup, steps = self.alone.warmup, self.alone.steps
        timed = TimedSteps(warmup=warmup, steps=steps, core=self.core, before=self.before, took=self.took)
        data = alone.inputs()
        timed.take(alone.run, self.clock, [data])
        if self.device.type == "cuda":
            self.begin("traced step", self.alone.timeout * FIRST)
            self.fakes.named = True
            self.found.busy = traced_step(alone.run, self.clock, self.device, None, data)["busy"]
            self.fakes.named = False

    def before(self, number: int, words: str) -> Any:
        """A step begins, or the wait for the last one."""
        self.begin(words, self.alone.timeout * (FIRST if number == 0 else 1.0))
        if number >= self.alone.warmup:
            self.starts.append(len(self.fakes.log))
        return nullcontext()

    def took(self, timed: list[Timed], slowed: Slowed | None) -> None:
        """Keeps the times of one step, here and where this process was started: of the stream on a GPU, of the processor on a
        CPU, because on shared cores wall time says little, and at the rate of its profile."""
        own = {(t.kind, t.stage, t.microbatch): t.thread for t in timed}
        if slowed is not None:
            own = {key: t / (slowed.update if key[0] in UPDATE else slowed.passes) for key, t in own.items()}
            self.found.slowed.append(slowed.passes)
            self.found.update_slowed.append(slowed.update)
        begun, ended = [*self.starts, None][len(self.found.totals) :][:2]
        self.found.stand_ins = by_operation(self.fakes.log[begun:ended])
        for (kind, stage, number), seconds in own.items():
            if kind in PASSES:
                half = own.get(("W", stage, number), 0.0) if kind == "I" else 0.0
                self.found.samples["B" if kind == "I" else kind, stage].append(seconds + half)
        self.found.totals.append(own["passes", -1, -1])
        self.found.updates.append(sum(own[kind, -1, -1] for kind in UPDATE))
        self.tell("kept", self.snapshot())
