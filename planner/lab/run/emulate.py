"""One rank of a big job alone on one device, with real tensors: what it computes, how long that takes, how much it allocates.

The same run as on fake tensors (``meta.py``) with memory and numbers: its modules, optimizer and pipeline schedule, rank and world
size pretended, collectives by stand-ins (``stand_ins.py``). A first step is watched by the memory witness; the steps that are timed
are not. Time of the stand-ins is taken off every pass: what is left is the rank's own computation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.lab.reference import kernels
from planner.lab.reference.split import Split
from planner.lab.run.assembled_step import Seen
from planner.lab.run.clock import Clock, Timed, memory, reset_memory
from planner.lab.run.collective_recorder import Wires
from planner.lab.run.eager_pricing import UPDATE, Host, Yardsticks
from planner.lab.run.fake_collectives import StandIns, denormals
from planner.lab.run.full_rank import facts, fill, in_words
from planner.lab.run.ipc import Voice
from planner.lab.run.memory_tracker import Witness
from planner.lab.run.meta import Emulated, Measured, measured_by, step_of
from planner.lab.run.rate import Core, host_seconds
from planner.lab.run.time_limits import FIRST, SETTING_UP
from planner.lab.run.training import Run

Samples = dict[tuple[str, int], list[float]]
"""Seconds by pass (forward, backward, weight) and virtual stage: one for each microbatch of each timed step."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """How a rank is to be run by itself."""

    device: str
    """cpu or cuda."""
    warmup: int
    """Steps that are neither watched nor timed."""
    steps: int
    """Steps that are timed."""
    timeout: float = 60.0
    """Seconds after which a step has hung."""
    yardsticks: Yardsticks | None = None
    """Of the processor's profile, whose rate times are brought to; None on a GPU."""
    host: bool = False
    """Time layers of nothing first."""


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What one rank did alone."""

    rank: int
    """Of all ranks."""
    stage: int
    """Its pipeline rank."""
    memory: Measured | None
    """As rung meta sees it, of the watched step; None when it did not get through."""
    allocator: dict[str, int]
    """Bytes: peaks of the GPU's allocator over the timed steps (allocated, reserved), and what the device had in use (device);
    of a CPU the peak of resident memory."""
    samples: Samples
    """What the passes took, stand-ins taken off."""
    totals: list[float]
    """Seconds of all passes of each timed step, stand-ins taken off."""
    updates: list[float]
    """Seconds of clipping and update of each timed step, stand-ins taken off."""
    microbatches: int
    """Of each step."""
    stand_ins: list[dict[str, Any]]
    """Per step: operation, times, bytes of the full buffers, seconds; ``beside`` of them ran on other streams, untimed."""
    failure: dict[str, Any] | None = None
    """Phase, sentence, GiB allocated, whether it ran out of memory and ``outcome``; None when it got through."""
    not_compiled: dict[str, str] = field(default_factory=dict)
    """Operators that ran on a GPU as several kernels instead of one, and why."""
    host: Host | None = None
    """Of a processor: what layers of nothing take, stand-ins taken off; None = not measured."""
    slowed: list[float] = field(default_factory=list)
    """How many times longer than in the profile its yardstick took in each timed step, whose times are divided by it; empty
    where the profile has none."""
    update_slowed: list[float] = field(default_factory=list)
    """The same of the update."""

    @classmethod
    def lost(cls, rank: int, split: Split, sentence: str, phase: str = "its process", **more: Any) -> Emulation:
        """A rank whose process ended without an answer."""
        failure = {"phase": phase, "sentence": sentence, "allocated_gib": None, "out_of_memory": False, **more}
        return cls(
            rank=rank, stage=rank * split.pp // split.world, memory=None, allocator={}, samples={}, totals=[], updates=[],
            microbatches=step_of(split), stand_ins=[], failure=failure,
        )  # fmt: skip

    def seen(self) -> Seen:
        """Medians over the steps."""
        found: dict[str, dict[int, float]] = {"forward": {}, "backward": {}, "weight": {}}
        for (name, stage), values in self.samples.items():
            found[name][stage] = statistics.median(values)
        passes = self.microbatches * sum(sum(found[name].values()) for name in ("forward", "backward"))
        return Seen(
            stage=self.stage, **found, once=statistics.median(self.totals) - passes,
            optimizer=statistics.median(self.updates),
        )  # fmt: skip


class OnDevice(Emulated):
    """The run of a rank without neighbours, with numbers: weights, tokens and what comes from neighbours are drawn."""

    def __init__(self, run: Run, witness: Witness, progress: Voice, rank: int) -> None:
        super().__init__(run, witness, progress)
        self._drawn = torch.Generator(device=run.device).manual_seed(rank)
        fill(run, rank)

    def inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of ``count`` microbatches and what follows them."""
        shape = (count * self.split.micro_batch_size, self.split.sequence_length // self.split.cp)
        size, device = self.split.model.vocab_size, self.run.device
        first, second = (torch.randint(size, shape, device=device, generator=self._drawn) for _ in range(2))
        return first, second

    def receive_buffers(self) -> list[torch.Tensor]:
        """Buffers for activations and gradients of neighbours."""
        found = []
        for stage in self.run.stages:
            for every in (stage.args_recv_info, stage.grad_recv_info):
                found += [info.buffer for infos in every.values() for info in infos if info.buffer is not None]
        return found


class StoppedClock(Clock):
    """A clock that knows which stand-ins ran inside of each span."""

    def __init__(self, device: torch.device, stand_ins: StandIns) -> None:
        super().__init__(device)
        self._stand_ins = stand_ins
        self._inside: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)

    @contextlib.contextmanager
    def span(self, kind: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Times the block."""
        first = len(self._stand_ins.log)
        with super().span(kind, stage, microbatch):
            yield
        if self.on:
            self._inside[kind, stage, microbatch].append((first, len(self._stand_ins.log)))

    def cut(self) -> list[Any]:
        """Everything since the last call, not read yet, and the stand-ins inside of it."""
        inside, self._inside = self._inside, defaultdict(list)
        return [super().cut(), inside]

    def own(self, batch: list[Any]) -> dict[tuple[str, int, int], float]:
        """What ``cut`` gave: seconds of every span by kind, stage and microbatch, without the stand-ins inside."""
        spans, inside = batch
        return {key: self.seconds_of(one) - sum(self._stand_ins.seconds(*window) for window in inside[key])
                for one in self.resolve(spans) for key in [(one.kind, one.stage, one.microbatch)]}  # fmt: skip

    def take(self) -> list[Timed]:
        """Everything since the last call; what ran in a thread is without the stand-ins inside."""
        batch = self.cut()
        own = self.own(batch)
        return [
            dataclasses.replace(one, thread=own[one.kind, one.stage, one.microbatch]) for one in self.resolve(batch[0])
        ]

    def seconds_of(self, one: Timed) -> float:
        """Time of the stream on a GPU, of the processor on a CPU: on shared cores wall time says little."""
        return one.seconds if self.cuda else one.processor


@dataclass
class _Progress:
    """Where a rank is, named when it fails, and what it has found."""

    rank: int
    ran: Split
    device: torch.device
    say: Voice
    phase: str = "building the model"
    memory: Measured | None = None
    samples: Samples = field(default_factory=lambda: defaultdict(list))
    totals: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    stand_ins: list[dict[str, Any]] = field(default_factory=list)
    host: Host | None = None
    slowed: list[float] = field(default_factory=list)
    update_slowed: list[float] = field(default_factory=list)

    def begin(self, phase: str, seconds: float) -> None:
        """What comes next, and after how long it has hung."""
        self.phase = phase
        self.say.begin(phase, seconds)

    def found(self, failure: dict[str, Any] | None = None) -> Emulation:
        """All of it."""
        return Emulation(
            rank=self.rank, stage=self.rank * self.ran.pp // self.ran.world, memory=self.memory,
            allocator=memory(self.device), samples=dict(self.samples), totals=self.totals, updates=self.updates,
            microbatches=self.ran.num_microbatches, stand_ins=self.stand_ins, failure=failure,
            not_compiled=dict(kernels.NOT_COMPILED), host=self.host, slowed=self.slowed, update_slowed=self.update_slowed,
        )  # fmt: skip


def emulate(alone: Alone, split: Split, rank: int, say: Voice | None = None) -> Emulation:
    """Run one rank by itself. Once per process: torch remembers process groups by name that the next call would not have.

    Running out of memory is a result: what was known until then, and the phase.
    """
    device = _device(alone)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_flush_denormal(True)  # on a CPU numbers near 0 cost a matrix product up to 180 times its time
    gc.collect()
    gc.disable()  # as trainers do: a collection in the middle of a step is none of the layout's business
    count = step_of(split)
    ran = dataclasses.replace(split, num_microbatches=count, balanced=True)
    so_far, failure = _Progress(rank, ran, device, say or Voice()), None
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=split.world)
    try:
        _watch_and_time(alone, split, ran, rank, device, so_far)
    except Exception as error:
        known = facts(error, device.type)
        if not known.get("out_of_memory"):
            raise
        failure = {"phase": so_far.phase, "sentence": in_words(error), **known}
    finally:
        gc.enable()
        dist.destroy_process_group()
    return so_far.found(failure)


def _device(alone: Alone) -> torch.device:
    """One device, whatever rank is pretended: device meshes choose a GPU by the rank."""
    if alone.device == "cpu":
        return torch.device("cpu")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[0]
    os.environ.pop("LOCAL_RANK", None)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _watch_and_time(
    alone: Alone,
    split: Split,
    ran: Split,
    rank: int,
    device: torch.device,
    so_far: _Progress,
) -> None:
    """The watched step, then the timed ones; what was found goes into ``so_far`` as it comes."""
    started = time.perf_counter()
    so_far.begin("building the model", SETTING_UP)
    core = Core(alone.yardsticks) if alone.yardsticks is not None else None
    with ExitStack() as stack:
        witness = Witness()
        stack.enter_context(witness.patches())
        made, wires = Run(ran, device), Wires()
        stand_ins = stack.enter_context(StandIns(device))
        with witness:
            run = OnDevice(made, witness, so_far.say, rank)
            run.warm()
            so_far.begin("first step", alone.timeout * FIRST)
            witness.start()
            with wires:
                run.measured()
            witness.is_("gradients", run.gradient_tensors())
            so_far.memory = measured_by(run, witness, wires, split, rank, time.perf_counter() - started)
        odd = sum(denormals(one) for one in run.receive_buffers())
        assert not odd, f"{odd} numbers of receive buffers are denormal or not finite"
        so_far.say.keep(so_far.found())
        for hook in run.hooks:
            hook.remove()
        if core is not None and alone.host:
            so_far.begin("timing layers without work", SETTING_UP)
            so_far.host = host_seconds(ran, core.kept.product, partial(StoppedClock, stand_ins=stand_ins))
        _time(alone, run, stand_ins, device, so_far, core)


def _time(
    alone: Alone,
    run: OnDevice,
    stand_ins: StandIns,
    device: torch.device,
    so_far: _Progress,
    core: Core | None,
) -> None:
    """Steps with the clock on; nothing watches them."""
    clock = StoppedClock(device, stand_ins)
    clock.attach(run.run)
    if core is not None:
        clock.between = core.look
    data = run.inputs(run.split.num_microbatches)
    ahead = 1 if clock.cuda else 0  # a GPU that waits to be asked idles at the beginning of the next step
    batches: list[list[Any]] = []
    for number in range(alone.warmup + alone.steps):
        timed = number >= alone.warmup
        phase = f"step {number - alone.warmup + 1}" if timed else f"warm-up step {number + 1}"
        so_far.begin(phase, alone.timeout * (FIRST if number == 0 else 1.0))
        so_far.say(f"stage {run.run.rank['pp']}: {so_far.phase} of {alone.steps if timed else alone.warmup}")
        if number == alone.warmup:
            gc.collect()
            reset_memory(device)
            stand_ins.clear()
        clock.on = timed
        if core is not None:
            core.begin()
        with clock.span("step"):
            run.run.step(*data)
        if timed:
            batches.append(clock.cut())
        elif clock.cuda:
            torch.cuda.synchronize()  # its time is over when it has run, not when it was started
        while len(batches) > ahead:
            _took(batches.pop(0), clock, stand_ins, so_far, core)
    so_far.begin("the last step", alone.timeout)
    for batch in batches:
        _took(batch, clock, stand_ins, so_far, core)


def _took(batch: list[Any], clock: StoppedClock, stand_ins: StandIns, so_far: _Progress, core: Core | None) -> None:
    """Keeps the times of one step, here and where this process was started; on a processor at the rate of its profile."""
    [window] = batch[1]["step", -1, -1]
    own, slowed = clock.own(batch), core.ended() if core is not None else None
    if slowed is not None:
        own["passes", -1, -1] -= slowed.worked
        own = {key: t / (slowed.update if key[0] in UPDATE else slowed.passes) for key, t in own.items()}
        so_far.slowed.append(slowed.passes)
        so_far.update_slowed.append(slowed.update)
    _keep(own, so_far)
    so_far.stand_ins = _by_operation(stand_ins, *window)
    so_far.say.keep(so_far.found())


def _keep(own: dict[tuple[str, int, int], float], so_far: _Progress) -> None:
    """One step's times, halves of a backward pass joined."""
    for (kind, stage, number), seconds in own.items():
        if kind == "F":
            so_far.samples["forward", stage].append(seconds)
        elif kind == "B":
            so_far.samples["backward", stage].append(seconds)
        elif kind == "I":
            so_far.samples["backward", stage].append(seconds + own.get(("W", stage, number), 0.0))
        elif kind == "W":
            so_far.samples["weight", stage].append(seconds)
    so_far.totals.append(own["passes", -1, -1])
    so_far.updates.append(own["clip", -1, -1] + own["optimizer", -1, -1])


def _by_operation(stand_ins: StandIns, first: int, last: int) -> list[dict[str, Any]]:
    """The stand-ins of a step, those of the log from ``first`` to before ``last``, summed up."""
    times: Counter[str] = Counter()
    size: Counter[str] = Counter()
    beside: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for number in range(first, last):
        operation, each, _, taken = stand_ins.log[number]
        times[operation] += 1
        size[operation] += each
        beside[operation] += taken is None
        seconds[operation] += stand_ins.seconds(number, number + 1)
    return [
        {"operation": one, "times": times[one], "bytes": size[one], "seconds": seconds[one], "beside": beside[one]}
        for one in sorted(times)
    ]
