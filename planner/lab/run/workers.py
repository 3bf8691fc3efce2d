"""Ranks that run alone, on fake or on real tensors, in processes of their own, each phase within its time."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch

from planner.errors import PlannerError
from planner.lab.launch.torchrun import deaf, termination_interrupts
from planner.lab.reference.split import Split
from planner.lab.run.depth import beyond, depths
from planner.lab.run.ipc import Lost, Pipe, Voice
from planner.lab.run.meta import Measured, measure
from planner.units import format_seconds

ORPHANED = 1.0
"""Seconds after which a process ends whose parent was killed."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How ranks are run."""

    work: Callable[[Split, int, Voice], Any]
    """What a process does with its rank; the last argument is told how far it is. Travels to the process."""
    at_once: int
    """Processes that run side by side."""
    fork: bool
    """Start them as copies of this process, which is quick; no GPU survives it."""
    where: str
    """In words, for a rank that failed."""
    shallow: bool = False
    """A rank of many equal layers is run twice with few of them, and the line through both is what it does (depth.py)."""
    limit: float = math.inf
    """Seconds until a rank has to begin its first phase, which names its own limit; with no phases, until its end."""


ON_FAKE_TENSORS = Manner(work=measure, at_once=os.cpu_count() or 1, fork=True, where="on fake tensors", shallow=True)


@dataclass
class _Running:
    """One process."""

    rank: int
    process: Any
    limit: float
    """Seconds for the phase."""
    until: float
    """When it has hung, on the monotonic clock."""
    phase: str = "its step"
    kept: Any = None

    def begin(self, phase: str, seconds: float) -> None:
        """A new phase."""
        self.phase, self.limit, self.until = phase, seconds, time.monotonic() + seconds

    def lost(self, kind: str, sentence: str) -> Lost:
        """What is known of it when it does not come to its end."""
        return Lost(rank=self.rank, kind=kind, phase=self.phase, sentence=sentence, kept=self.kept)


def _work(manner: Manner, split: Split, rank: int, pipe: Any) -> None:
    """One process: measures, says how far it is, sends what it found or how it failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that started this one ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        found = manner.work(split, rank, Pipe(pipe))
        pipe.send(("found", found))
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).splitlines() or [""])[0]
        pipe.send(("failed", f"{type(error).__name__}: {said} ({where.filename}, line {where.lineno})"))


def _end_with(parent: int) -> None:
    """Nobody would end this process if its parent was killed."""
    while os.getppid() == parent:
        time.sleep(ORPHANED)
    os._exit(1)


def measure_all(
    split: Split, ranks: list[int], say: Callable[[str], object] = lambda _: None, manner: Manner = ON_FAKE_TENSORS,
    lost: Callable[[Lost], object] | None = None, begun: Callable[[str], object] = lambda _: None,
) -> list[Any]:  # fmt: skip
    """What each rank does, in the order of ``ranks``. Children end with this call, also when it is interrupted.

    A rank that hangs, fails or is lost raises PlannerError; with ``lost`` it is told there, its result is None and the others
    run on, but for an interruption, after which no more is started. ``begun`` is told every phase of a rank.
    """
    context: Any = multiprocessing.get_context("fork" if manner.fork else "spawn")
    size = split.world // split.pp
    deep = {rank: depths(split, rank // size) if manner.shallow else None for rank in ranks}
    waiting = [(rank, one) for rank in ranks for one in _runs(split, deep[rank])]
    found: dict[int, list[Any]] = {rank: [] for rank in ranks}
    gone: set[int] = set()
    running: dict[Any, _Running] = {}

    def lose(pipe: Any, kind: str, sentence: str) -> None:
        one = running.pop(pipe)
        one.process.kill()
        one.process.join()
        told = one.lost(kind, sentence)
        if lost is None:
            raise PlannerError(told.sentence)
        if one.rank not in gone:
            gone.add(one.rank)
            lost(told)

    try:
        with termination_interrupts():
            while waiting or running:
                while waiting and len(running) < manner.at_once:
                    rank, one = waiting.pop(0)
                    if rank not in gone:
                        pipe, process = _started(context, manner, one, rank)
                        running[pipe] = _Running(rank, process, manner.limit, time.monotonic() + manner.limit)
                for pipe in wait(list(running), _patience(running)) if running else ():
                    _hear(pipe, running, found, say, begun, lose, manner)
                for pipe in [pipe for pipe, one in running.items() if time.monotonic() > one.until]:
                    lose(pipe, "hung", _hung(running[pipe]))
    except KeyboardInterrupt:
        if lost is None:
            raise
        open_ = list(running.values()) or [_Running(-1, None, 0.0, 0.0)]
        lost(open_[0].lost("interrupted", "stopped"))
        gone.update(rank for rank in ranks if len(found[rank]) < len(_runs(split, deep[rank])))
    finally:
        with deaf():
            for left in running.values():
                left.process.kill()
                left.process.join()
    return [None if rank in gone else _joined(found[rank], deep[rank]) for rank in ranks]


def _started(context: Any, manner: Manner, split: Split, rank: int) -> tuple[Any, Any]:
    """The end of the pipe that is read here, and the process."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(manner, split, rank, there), daemon=True)
    with deaf():
        process.start()
    there.close()
    return here, process


def _patience(running: dict[Any, _Running]) -> float | None:
    """Seconds until the next rank has hung; None = never."""
    nearest = min(one.until for one in running.values())
    return None if math.isinf(nearest) else max(0.0, nearest - time.monotonic()) + 0.01


def _hung(one: _Running) -> str:
    return f"rank {one.rank} was ended: {one.phase} took longer than {format_seconds(one.limit)}"


def _hear(
    pipe: Any, running: dict[Any, _Running], found: dict[int, list[Any]], say: Callable[[str], object],
    begun: Callable[[str], object], lose: Callable[[Any, str, str], object], manner: Manner,
) -> None:  # fmt: skip
    """One message of a rank."""
    one = running[pipe]
    try:
        kind, content = pipe.recv()
    except EOFError:
        one.process.join()
        lose(pipe, "died", f"rank {one.rank}: {_ended(one.process.exitcode)} during {one.phase}")
        return
    if kind == "progress":
        say(f"rank {one.rank}, {content}")
    elif kind == "begin":
        one.begin(*content)
        begun(one.phase)
    elif kind == "kept":
        one.kept = content
    elif kind == "failed":
        lose(pipe, "failed", f"rank {one.rank} failed {manner.where}: {content}")
    else:
        found[one.rank].append(content)
        del running[pipe]
        one.process.join()


def _ended(code: int) -> str:
    """How a process ended."""
    return (
        f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}"
    )


def _runs(split: Split, deep: tuple[Split, Split, float] | None) -> tuple[Split, ...]:
    """The job itself, or both of its shallow ones."""
    return (split,) if deep is None else deep[:2]


def _joined(found: list[Any], deep: tuple[Split, Split, float] | None) -> Any:
    """What the rank that was run whole gave, or the line through both of its shallow runs."""
    if deep is None:
        return found[0]
    first, second = sorted(found, key=lambda one: one.layers_run)
    joined: Measured = beyond(first, second, deep[2])
    return joined
