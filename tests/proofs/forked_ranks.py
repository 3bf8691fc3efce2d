"""Ranks as forked processes: torch is imported once by the parent, so that eight of them start in seconds."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlannerError


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(work: Callable[..., Any], rank: int, world: int, port: int, limit: float, pipe: Any, arguments: Any) -> None:
    """One process: joins the group, works, sends what it found or how it failed."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=limit))
        pipe.send((True, work(*arguments)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)


def run_ranks(work: Callable[..., Any], world: int, *arguments: Any, limit: float = 120.0) -> list[Any]:
    """``work(*arguments)`` on ``world`` gloo ranks; what each returned. Raises PlannerError naming the rank that failed.

    Only call it from a process that has not computed with several threads or on a GPU: they do not survive a fork.
    """
    context = multiprocessing.get_context("fork")
    port, started = free_port(), time.monotonic()
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_rank, args=(work, rank, world, port, limit, pipes[rank][1], arguments), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, sending in pipes:
        sending.close()
    try:
        return [_received(pipes[rank][0], rank, limit - time.monotonic() + started) for rank in range(world)]
    finally:
        for process in processes:
            process.join(5)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()


def _received(pipe: Any, rank: int, seconds: float) -> Any:
    try:
        if not pipe.poll(max(seconds, 0.1)):
            raise PlannerError(f"rank {rank} has not answered within the limit of time")
        good, found = pipe.recv()
    except EOFError:
        raise PlannerError(f"rank {rank} ended without a word") from None
    if not good:
        raise PlannerError(str(found))
    return found
