"""One rank of a big job alone on one device, with real tensors: what it computes, how long that takes, how much it allocates.

The same run as on fake tensors (``meta.py``) with memory and numbers: its modules, optimizer and pipeline schedule, rank and world
size pretended, collectives by local copies (``fake_collectives.py``). The memory tracker follows a first step; the steps that are
timed it does not. Time of the copies is taken off every pass: what is left is the rank's own computation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.lab.reference import kernels
from planner.lab.reference.split import Split
from planner.lab.run.assembled_step import Seen
from planner.lab.run.clock import Clock, Timed, TimedSteps, memory, reset_memory
from planner.lab.run.eager_pricing import UPDATE, Host, Yardsticks
from planner.lab.run.fake_collectives import FakeCollectives, denormals
from planner.lab.run.full_rank import facts, in_words
from planner.lab.run.levels import FIRST, SETTING_UP
from planner.lab.run.memory_tracker import MemoryTracker
from planner.lab.run.meta import Measured, RankAlone, quiet_process, step_of
from planner.lab.run.rate import Core, host_seconds
from planner.lab.run.training import Run
from planner.lab.run.workers import Pipe

Key = tuple[str, int, int]
"""Kind of a span, virtual stage, microbatch."""


@dataclass(frozen=True, kw_only=True)
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
    yardsticks: Yardsticks | None = None
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
    """Seconds by pass (forward, backward, weight) and virtual stage, local copies taken off: one for each microbatch of each
    timed step."""
    totals: list[float] = field(default_factory=list)
    """Seconds of all passes of each timed step, local copies taken off."""
    updates: list[float] = field(default_factory=list)
    """Seconds of clipping and update of each timed step, local copies taken off."""
    stand_ins: list[dict[str, Any]] = field(default_factory=list)
    """Local copies of a step, see ``FakeCollectives.by_operation``."""
    failure: dict[str, Any] | None = None
    """Outcome, phase, sentence and GiB allocated; None when it got through."""
    not_compiled: dict[str, str] = field(default_factory=dict)
    """Operators that ran on a GPU as several kernels instead of one, and why."""
    host: Host | None = None
    """Of a processor: what empty layers take, local copies taken off; None = not measured."""
    slowed: list[float] = field(default_factory=list)
    """How many times longer than in the profile its yardstick took in each timed step, whose times are divided by it; empty
    where the profile has none."""
    update_slowed: list[float] = field(default_factory=list)
    """The same of the update."""

    @classmethod
    def of(cls, rank: int, split: Split, failure: dict[str, Any] | None = None) -> Emulation:
        """A rank of which nothing is known yet."""
        stage = rank * split.pp // split.world
        return cls(rank=rank, stage=stage, microbatches=step_of(split), failure=failure)

    @property
    def outcome(self) -> str:
        """How it ended."""
        return "completed" if self.failure is None else str(self.failure["outcome"])

    def seen(self) -> Seen:
        """Medians over the steps."""
        found: dict[str, dict[int, float]] = {"forward": {}, "backward": {}, "weight": {}}
        for (name, stage), values in self.samples.items():
            found[name][stage] = statistics.median(values)
        passes = self.microbatches * sum(sum(found[name].values()) for name in ("forward", "backward"))
        once, optimizer = statistics.median(self.totals) - passes, statistics.median(self.updates)
        return Seen(stage=self.stage, **found, once=once, optimizer=optimizer)

    def add(self, own: dict[Key, float]) -> None:
        """One step's times, halves of a backward pass joined."""
        for (kind, stage, number), seconds in own.items():
            if kind == "F":
                self.samples["forward", stage].append(seconds)
            elif kind == "B":
                self.samples["backward", stage].append(seconds)
            elif kind == "I":
                self.samples["backward", stage].append(seconds + own.get(("W", stage, number), 0.0))
            elif kind == "W":
                self.samples["weight", stage].append(seconds)
        self.totals.append(own["passes", -1, -1])
        self.updates.append(sum(own[kind, -1, -1] for kind in UPDATE))


class OnDevice(RankAlone):
    """The run of a rank without neighbours, with numbers: weights, tokens and what comes from neighbours are drawn."""

    def __init__(self, run: Run, tracker: MemoryTracker, progress: Pipe, rank: int) -> None:
        super().__init__(run, tracker, progress)
        self._drawn = torch.Generator(device=run.device).manual_seed(rank)
        run.fill_by_shard()

    def inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of ``count`` microbatches and what follows them."""
        shape = (count * self.split.micro_batch_size, self.split.sequence_length // self.split.cp)
        size, device = self.split.model.vocab_size, self.run.device
        first, second = (torch.randint(size, shape, device=device, generator=self._drawn) for _ in range(2))
        return first, second

    def receive_buffers(self) -> list[torch.Tensor]:
        """Buffers for activations and gradients of neighbours."""
        every = [
            infos
            for stage in self.run.stages
            for all_ in (stage.args_recv_info, stage.grad_recv_info)
            for infos in all_.values()
        ]
        return [info.buffer for infos in every for info in infos if info.buffer is not None]


class OwnClock(Clock):
    """A clock that knows which local copies ran inside of each span."""

    def __init__(self, device: torch.device, fakes: FakeCollectives) -> None:
        super().__init__(device)
        self._fakes = fakes
        self._inside: dict[Key, list[tuple[int, int]]] = defaultdict(list)

    @contextlib.contextmanager
    def span(self, kind: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Times the block."""
        first = len(self._fakes.log)
        with super().span(kind, stage, microbatch):
            yield
        if self.on:
            self._inside[kind, stage, microbatch].append((first, len(self._fakes.log)))

    def cut(self) -> list[Any]:
        """Everything since the last call, not read yet, and the local copies inside of it."""
        inside, self._inside = self._inside, defaultdict(list)
        return [super().cut(), inside]

    def own(self, batch: list[Any]) -> dict[Key, float]:
        """What ``cut`` gave: seconds of every span by kind, stage and microbatch, without the local copies inside: time of the
        stream on a GPU, of the processor on a CPU, because on shared cores wall time says little."""
        spans, inside = batch
        found = {(one.kind, one.stage, one.microbatch): one for one in self.resolve(spans)}
        return {
            key: (one.seconds if self.cuda else one.processor)
            - sum(self._fakes.seconds(*window) for window in inside[key])
            for key, one in found.items()
        }

    def take(self) -> list[Timed]:
        """Everything since the last call; what ran in a thread is without the local copies inside."""
        batch = self.cut()
        own = self.own(batch)
        timed = self.resolve(batch[0])
        return [dataclasses.replace(one, thread=own[one.kind, one.stage, one.microbatch]) for one in timed]


def emulate(alone: Alone, split: Split, rank: int, pipe: Pipe | None = None) -> Emulation:
    """Run one rank by itself. Once per process: torch remembers process groups by name that the next call would not have.

    Running out of memory is a result: what was known until then, and the phase.
    """
    torch.set_flush_denormal(True)  # on a CPU numbers near 0 cost a matrix product up to 180 times its time
    one = LoneRank(alone, split, rank, pipe or Pipe())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=split.world)
    try:
        one.run()
    except Exception as error:
        known = facts(error, one.device.type)
        if not known:
            raise
        one.snapshot().failure = {
            "outcome": "out_of_memory", "phase": one.phase, "sentence": in_words(error), "allocated_gib": known["allocated_gib"],
        }  # fmt: skip
    finally:
        gc.enable()
        dist.destroy_process_group()
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

    def __init__(self, alone: Alone, split: Split, rank: int, pipe: Pipe) -> None:
        self.alone, self.split, self.pipe = alone, split, pipe
        self.device, self.ran = _device(alone), quiet_process(split)
        self.found = Emulation.of(rank, split)
        self.fakes = FakeCollectives(self.device)
        self.clock = OwnClock(self.device, self.fakes)
        self.core = Core(alone.yardsticks) if alone.yardsticks is not None else None
        self.phase = ""

    def begin(self, phase: str, seconds: float) -> None:
        """What comes next, and after how long it has hung."""
        self.phase = phase
        self.pipe.begin(phase, seconds)

    def snapshot(self) -> Emulation:
        """All that was found so far."""
        self.found.allocator, self.found.not_compiled = memory(self.device), dict(kernels.NOT_COMPILED)
        return self.found

    def run(self) -> None:
        """The step that is followed, then the timed ones."""
        started = time.perf_counter()
        self.begin("building the model", SETTING_UP)
        with ExitStack() as stack:
            tracker = MemoryTracker()
            stack.enter_context(tracker.patches())
            made = Run(self.ran, self.device)
            stack.enter_context(self.fakes)
            with tracker:
                run = OnDevice(made, tracker, self.pipe, self.found.rank)
                run.warm()
                self.begin("first step", self.alone.timeout * FIRST)
                self.found.memory = run.tracked(self.split, self.found.rank, started)
            odd = sum(denormals(one) for one in run.receive_buffers())
            assert not odd, f"{odd} numbers of receive buffers are denormal or not finite"
            self.pipe.keep(self.snapshot())
            for hook in run.hooks:
                hook.remove()
            if self.core is not None and self.alone.host:
                self.begin("timing layers without work", SETTING_UP)
                self.found.host = host_seconds(self.ran, self.core.kept.product, partial(OwnClock, fakes=self.fakes))
            self.time(run)

    def time(self, run: OnDevice) -> None:
        """Steps with the clock on; nothing follows them."""
        self.clock.attach(run.run)
        if self.core is not None:
            self.clock.between = self.core.look
        steps = TimedSteps(warmup=self.alone.warmup, steps=self.alone.steps, before=self.before, took=self.took)
        steps.take(run.run, self.clock, [run.inputs(self.ran.num_microbatches)])

    def before(self, number: int) -> Any:
        """A step begins, or the wait for the last one."""
        warmup, steps = self.alone.warmup, self.alone.steps
        if number == warmup + steps:
            self.begin("the last step", self.alone.timeout)
            return nullcontext()
        timed = number >= warmup
        phase = f"step {number - warmup + 1}" if timed else f"warm-up step {number + 1}"
        self.begin(phase, self.alone.timeout * (FIRST if number == 0 else 1.0))
        self.pipe(f"stage {self.found.stage}: {phase} of {steps if timed else warmup}")
        if number == warmup:
            gc.collect()
            reset_memory(self.device)
            self.fakes.clear()
        if self.core is not None:
            self.core.begin()
        return nullcontext()

    def took(self, batch: list[Any]) -> None:
        """Keeps the times of one step, here and where this process was started; on a processor at the rate of its profile."""
        [window] = batch[1]["step", -1, -1]
        own, slowed = self.clock.own(batch), self.core.ended() if self.core is not None else None
        if slowed is not None:
            own["passes", -1, -1] -= slowed.worked
            own = {key: t / (slowed.update if key[0] in UPDATE else slowed.passes) for key, t in own.items()}
            self.found.slowed.append(slowed.passes)
            self.found.update_slowed.append(slowed.update)
        self.found.add(own)
        self.found.stand_ins = self.fakes.by_operation(*window)
        self.pipe.keep(self.snapshot())
