"""Ranks that run alone, on fake or on real tensors, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch

from planner.errors import PlannerError
from planner.reference.split import Split
from planner.validator.depth import beyond, depths
from planner.validator.meta import Measured, measure


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How ranks are run."""

    work: Callable[[Split, int, Callable[[str], None]], Any]
    """What a process does with its rank; the last argument is told how far it is. Travels to the process."""
    at_once: int
    """Processes that run side by side."""
    fork: bool
    """Start them as copies of this process, which is quick; no GPU survives it."""
    where: str
    """In words, for a rank that failed."""
    shallow: bool = False
    """A rank of many equal layers is run twice with few of them, and the line through both is what it does (depth.py)."""


ON_FAKE_TENSORS = Manner(work=measure, at_once=os.cpu_count() or 1, fork=True, where="on fake tensors", shallow=True)


def _work(manner: Manner, split: Split, rank: int, pipe: Any) -> None:
    """One process: measures, says how far it is, sends what it found or how it failed."""
    torch.set_num_threads(1)
    try:
        found = manner.work(split, rank, lambda text: pipe.send(("progress", text)))
        pipe.send(("found", found))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).splitlines() or [""])[0]
        pipe.send(("failed", f"{type(error).__name__}: {said} ({where.filename}, line {where.lineno})"))


def measure_all(
    split: Split, ranks: list[int], say: Callable[[str], object] = lambda _: None, manner: Manner = ON_FAKE_TENSORS
) -> list[Any]:
    """What each rank does, in the order of ``ranks``. Children end with this call, also when it is interrupted."""
    context: Any = multiprocessing.get_context("fork" if manner.fork else "spawn")
    size = split.world // split.pp
    deep = {rank: depths(split, rank // size) if manner.shallow else None for rank in ranks}
    waiting = [(rank, one) for rank in ranks for one in _runs(split, deep[rank])]
    found: dict[int, list[Any]] = {rank: [] for rank in ranks}
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < manner.at_once:
                rank, one = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(manner, one, rank, there), daemon=True)
                process.start()
                there.close()
                running[here] = (rank, process)
            for pipe in wait(list(running)):
                rank, process = running[pipe]
                kind, content = _message(pipe, rank, process)
                if kind == "progress":
                    say(f"rank {rank}, {content}")
                    continue
                if kind == "failed":
                    raise PlannerError(f"rank {rank} failed {manner.where}: {content}")
                found[rank].append(content)
                del running[pipe]
                process.join()
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return [_joined(found[rank], deep[rank]) for rank in ranks]


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


def _message(pipe: Any, rank: int, process: Any) -> tuple[str, Any]:
    try:
        kind, content = pipe.recv()
    except EOFError:
        process.join()
        raise PlannerError(f"rank {rank}: its process ended with code {process.exitcode} before it was done") from None
    return str(kind), content
