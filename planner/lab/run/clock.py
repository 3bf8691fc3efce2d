"""Stopwatches of one rank: its step, every action of its pipeline, the update; and how much memory it takes (torch).

On a GPU all times are those of the current stream, between two events: what the stream waits for inside of an action
(exposed communication) counts, what the host does ahead does not. On a CPU two are taken: wall and the processor time of the
thread that computes. On shared cores only processor time says something about the work.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planner.lab.run.host_states import local
from planner.lab.run.kernel_trace import pass_name
from planner.lab.run.levels import kernel_says
from planner.lab.run.memory_tracker import optimizer_states
from planner.lab.run.training import Run
from planner.record import record
from planner.units import KIB, KILO

PASSES = ("F", "B", "I", "W")
"""Kinds of actions: forward, backward, or its halves: gradients of the input and of the weights."""


@record
class Timed:
    """Something that ran once."""

    kind: str
    """One of PASSES, or step, passes (all of them with the waiting between), clip, optimizer."""
    stage: int
    """Virtual stage; -1 = the whole rank."""
    microbatch: int
    """-1 = none."""
    seconds: float
    """Wall time on a CPU, time of the stream on a GPU."""
    thread: float
    """Processor seconds of the thread that ran it; on a GPU as ``seconds``."""


class Clock:
    """Times what runs inside ``span``; ``attach`` puts spans around the actions of a run."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._open: list[tuple[str, int, int, Any, Any]] = []
        self._spare: list[Any] = []
        self._last: tuple[int, int] = (0, 0)
        self._left_out = np.zeros(2)
        """Seconds that no span of a CPU has: of ``between``, by both clocks."""
        self.on = False
        """Nothing is taken while it is off."""
        self.named = False
        """Passes have names in the trace of torch's profiler instead."""
        self.between: Callable[[], object] = lambda: None
        """Called when a pass has ended; of a processor, and its time is left out."""

    def _now(self) -> Any:
        if not self.cuda:
            return np.array([time.perf_counter(), time.thread_time()]) - self._left_out
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def span(self, kind: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Times the block."""
        if self.named and kind in PASSES:
            with torch.profiler.record_function(pass_name(kind, stage, microbatch)):
                yield
            return
        if not self.on:
            yield
            return
        begun = self._now()
        yield
        ended = self._now()
        self._open.append((kind, stage, microbatch, begun, ended))
        if kind in PASSES and not self.cuda:
            self.between()
            self._left_out += self._now() - ended

    def attach(self, run: Run) -> None:
        """Puts spans around the passes, the loss, clipping and the update of a run. The loss is part of the forward pass that has
        just ended: schedules compute it right behind."""
        run.span = self.span
        for stage in run.stages:
            for name, kind in (("forward", "F"), ("backward", "B"), ("backward_weight", "W")):
                method = f"{name}_one_chunk"
                setattr(stage, method, self._timed_pass(getattr(stage, method), kind, stage.stage_index))
        if run.schedule is not None and run.has_last:
            loss = run.schedule._loss_fn

            def timed(*arguments: Any, **named: Any) -> Any:
                with self.span("F", *self._last):
                    return loss(*arguments, **named)

            run.schedule._loss_fn = timed

    def _timed_pass(self, original: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def run(number: int, *arguments: Any, **named: Any) -> Any:
            if kind == "F":
                self._last = stage, number
            half = kind == "B" and not named.get("full_backward", True)
            with self.span("I" if half else kind, stage, number):
                return original(number, *arguments, **named)

        return run

    def cut(self) -> list[Any]:
        """Everything since the last call, not read yet."""
        spans, self._open = self._open, []
        return spans

    def resolve(self, spans: list[Any]) -> list[Timed]:
        """What ``cut`` gave, each action once; on a GPU waits until it has run. The span ``step`` must be in it."""
        if self.cuda:
            next(ended for kind, _, _, _, ended in spans if kind == "step").synchronize()
        found: dict[tuple[str, int, int], Any] = {}
        for *key, begun, ended in spans:  # a forward pass and its loss, the two halves of an update have the same key
            seconds = np.full(2, begun.elapsed_time(ended) / KILO) if self.cuda else ended - begun
            found[tuple(key)] = found.get(tuple(key), 0.0) + seconds
            if self.cuda:
                self._spare += [begun, ended]
        return [
            Timed(kind=kind, stage=stage, microbatch=number, seconds=float(seconds), thread=float(thread))
            for (kind, stage, number), (seconds, thread) in found.items()
        ]


# ------------------------------------------------------------------------------------------------ memory


def reset_memory(device: torch.device) -> None:
    """Peaks start anew."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # the kernel's own peak of resident memory  [man proc_pid_clear_refs]
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory(device: torch.device) -> dict[str, int]:
    """Bytes of this rank. GPU: peaks of what torch's allocator handed out and holds (allocated, reserved), and what the device
    has in use now, context, NCCL and other processes included (device). CPU: peak of resident memory, the libraries
    included (resident)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "device": total - free,
        }  # fmt: skip
    resident = kernel_says("/proc/self/status", "VmHWM:")
    return {"resident": int(resident * KIB)} if resident else {}


def states(run: Run) -> dict[str, int]:
    """Bytes that a rank keeps between steps, by the sizes of its own parts: weights, gradients, optimizer states."""
    weights = [p for part in run.parts for p in part.parameters()]
    found = {
        "weights": weights, "gradients": [p.grad for p in weights if p.grad is not None],
        "optimizer_states": [kept for one in run.optimizers for kept in optimizer_states(one)],
    }  # fmt: skip
    return {
        name: sum(int(one.numel() * one.element_size()) for one in map(local, tensors) if isinstance(one, torch.Tensor))
        for name, tensors in found.items()
    }
