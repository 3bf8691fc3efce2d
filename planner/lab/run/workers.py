"""Ranks that run alone, on fake or on real tensors, in processes of their own, each phase within its time."""

import ctypes
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from planner.errors import PlannerError
from planner.lab.launch.torchrun import cause_in_words, interrupts_held, interrupts_ignored, termination_interrupts
from planner.lab.reference.split import Split
from planner.lab.run.levels import LONGER, OUT_OF_MAIN_MEMORY, kills
from planner.record import record
from planner.units import format_seconds

PR_SET_PDEATHSIG = 1
"""A process gets a signal when its parent ends  [man prctl]."""

TELLING = 0.05
"""Share of the work that must be done before it says how long the rest takes."""

Tell = Callable[[str, Any], object]
"""How a rank reports to the process that started it, a kind and its content: ``progress`` (share done, and in words), ``begin``
(what comes next, and after how many seconds it has hung), ``kept`` (what it has found so far: it outlives the process)."""


@record
class Lost:
    """A rank that did not come to its end."""

    rank: int
    """Of all ranks; -1 = none had been started."""
    kind: str
    """hung, died (its process ended), failed (an exception) or interrupted (by the user)."""
    phase: str
    """What it was doing."""
    sentence: str
    """All of it for the user."""
    kept: Any = None
    """What it had found until then; None = nothing."""

    def failure(self, killed: int) -> dict[str, Any]:
        """Outcome, phase and sentence as a record has them; ``killed``: ``kills()`` before the start."""
        outcome, sentence = {"died": "lost_rank"}.get(self.kind, self.kind), self.sentence
        if self.kind == "hung":
            sentence += LONGER.format(what="it")
        if self.kind == "died" and kills() > killed:
            outcome, sentence = "out_of_memory", f"{sentence}: the kernel ended it {OUT_OF_MAIN_MEMORY}"
        return {"outcome": outcome, "phase": self.phase, "sentence": sentence, "allocated_gib": None}


@record
class Manner:
    """How ranks are run."""

    work: Callable[[Split, int, Tell], Any]
    """What a process does with its rank. Travels to the process."""
    at_once: int
    """Processes at the same time."""
    fork: bool
    """Start them as copies of this process, which is quick; no GPU survives it."""
    where: str
    """In words, for a rank that failed."""
    limit: float = math.inf
    """Seconds until a rank has to begin its first phase, which names its own limit; with no phases, until its end."""


@dataclass(kw_only=True)
class _Running:
    """One process."""

    number: int
    """Of its job."""
    rank: int
    process: Any
    limit: float
    """Seconds for the phase."""
    until: float
    """When it has hung, on the monotonic clock."""
    phase: str = "its step"
    kept: Any = None
    share: float = 0.0
    """Of its work that is done."""

    def lost(self, kind: str, sentence: str) -> Lost:
        """Why it does not come to its end."""
        return Lost(rank=self.rank, kind=kind, phase=self.phase, sentence=sentence, kept=self.kept)


def measure_all(
    jobs: Sequence[tuple[int, Split]], manner: Manner, *, say: Callable[[str], object] = lambda _: None,
    lost: Callable[[Lost], object] | None = None, begun: Callable[[str], object] = lambda _: None,
) -> list[Any]:  # fmt: skip
    """What each rank of ``jobs`` does, in their order. Children end with this call, also when it is interrupted.

    A rank that hangs, fails or is lost raises PlannerError; with ``lost`` it is reported there, its result is None and the
    others run on, but for an interruption, after which no more is started. ``begun`` gets every phase of a rank.
    """
    pool, waiting = _Pool(manner, say, lost, begun, len(jobs)), list(enumerate(jobs))
    try:
        with termination_interrupts():
            while waiting or pool.running:
                while waiting and len(pool.running) < manner.at_once:
                    number, (rank, split) = waiting.pop(0)
                    if rank not in pool.gone:
                        pool.start(number, rank, split)
                if pool.running:
                    pool.hear_all()
    except KeyboardInterrupt:
        if lost is None:
            raise
        stopped = [one.lost("interrupted", "stopped") for one in pool.running.values()]
        lost(stopped[0] if stopped else Lost(rank=-1, kind="interrupted", phase="its step", sentence="stopped"))
    finally:
        with interrupts_ignored():
            for left in pool.running.values():
                left.process.kill()
                left.process.join()
    return [None if rank in pool.gone else pool.found.get(number) for number, (rank, _) in enumerate(jobs)]


class _Pool:
    """The processes and what they found."""

    def __init__(
        self, manner: Manner, say: Callable[[str], object], lost: Any, begun: Callable[[str], object], jobs: int
    ) -> None:
        self.manner, self.say, self.lost, self.begun, self.jobs = manner, say, lost, begun, jobs
        self.started = time.monotonic()
        self.context: Any = multiprocessing.get_context("fork" if manner.fork else "spawn")
        self.running: dict[Any, _Running] = {}
        """By the pipe that is heard."""
        self.found: dict[int, Any] = {}
        self.gone: set[int] = set()

    def start(self, number: int, rank: int, split: Split) -> None:
        """One process, heard through its pipe."""
        here, there = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_work, args=(self.manner, split, rank, there), daemon=True)
        limit = self.manner.limit
        with interrupts_held():
            process.start()
            there.close()
            self.running[here] = _Running(
                number=number, rank=rank, process=process, limit=limit, until=time.monotonic() + limit
            )

    def hear_all(self) -> None:
        """Waits for messages, at most until the next rank has hung."""
        nearest = min(one.until for one in self.running.values())
        patience = None if math.isinf(nearest) else max(0.0, nearest - time.monotonic()) + 0.01
        for pipe in wait(list(self.running), patience):
            self.hear(pipe)
        for pipe, one in list(self.running.items()):
            if time.monotonic() > one.until:
                took = f"{one.phase} took longer than {format_seconds(one.limit)}"
                self.lose(pipe, "hung", f"rank {one.rank} was ended: {took}")

    def hear(self, pipe: Any) -> None:
        """One message of a rank."""
        one = self.running[pipe]
        try:
            kind, content = pipe.recv()
        except EOFError:
            one.process.join()
            code = one.process.exitcode
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self.lose(pipe, "died", f"rank {one.rank}: its process {ended} during {one.phase}")
            return
        if kind == "progress":
            one.share, words = content
            self.say(f"{self.far()}; rank {one.rank}, {words}")
        elif kind == "begin":
            one.phase, one.limit = content
            one.until = time.monotonic() + one.limit
            self.begun(one.phase)
        elif kind == "kept":
            one.kept = content
        elif kind == "failed":
            self.lose(pipe, "failed", f"rank {one.rank} failed {self.manner.where}: {content}")
        else:
            self.found[one.number] = content
            del self.running[pipe]
            one.process.join()

    def far(self) -> str:
        """How much of all is done, and what that promises of the rest: the jobs are much alike."""
        done = (len(self.found) + len(self.gone) + sum(one.share for one in self.running.values())) / self.jobs
        spent = time.monotonic() - self.started
        left = f", about {spent / done * (1.0 - done):.0f} s left" if done > TELLING and spent > 1.0 else ""
        return f"{100.0 * min(done, 1.0):.0f} % done{left}"

    def lose(self, pipe: Any, kind: str, sentence: str) -> None:
        """Ends a rank. Raises PlannerError where nobody wants to know of it."""
        one = self.running.pop(pipe)
        one.process.kill()
        one.process.join()
        if self.lost is None:
            raise PlannerError(sentence)
        if one.rank not in self.gone:
            self.gone.add(one.rank)
            self.lost(one.lost(kind, sentence))


def _work(manner: Manner, split: Split, rank: int, pipe: Any) -> None:
    """One process: measures, says how far it is, sends what it found or how it failed. It ends with its parent."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that started this one ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        pipe.send(("found", manner.work(split, rank, lambda *message: pipe.send(message))))
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        pipe.send(("failed", cause_in_words(error)))
