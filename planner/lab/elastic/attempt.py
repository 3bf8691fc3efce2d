"""One attempt of a job: torchrun and its ranks as one group of processes, which is asked to save and end, or ended."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner import library
from planner.lab.launch.torchrun import MARK, end_all, end_marked

SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "NCCL_DEBUG": "WARN"}
"""Of the ranks, where the user has not set them."""
MARKED = re.compile(r"(?:[0-9a-f]{16})+")
POLL = 0.1
"""Seconds between two looks at the processes."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the nodes of a job find each other."""

    least: int = 1
    """Nodes with which it starts, or goes on."""
    most: int = 1
    """Nodes that it takes."""
    endpoint: str = "localhost:0"
    """HOST:PORT of the node that keeps the rendezvous; port 0 = a free one of this node."""
    name: str = "plan-run"
    """Of the job; the same on all nodes."""
    conf: str = ""
    """--rdzv-conf of torchrun, like last_call_timeout=60; "" = its defaults."""
    restarts: int = 3
    """Times that torchrun itself meets anew after a failure, where there are several nodes."""


def torchrun(meeting: Meeting, ranks: int, start: Path, grace: float) -> list[str]:
    """torchrun with the c10d rendezvous. One node: its failures end torchrun, and plan run decides. Several nodes: torchrun itself
    goes on with those that are left, or with one that came back.  [torch.distributed.run, torch 2.13]"""
    several = meeting.most > 1
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{meeting.least}:{meeting.most}",
        "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting.endpoint,
        "--rdzv-id", meeting.name, *(["--rdzv-conf", meeting.conf] if meeting.conf else []),
        "--max-restarts", str(meeting.restarts if several else 0), "--monitor-interval", str(POLL),
        "--shutdown-timeout", str(max(1, round(grace))), "--no-python", "bash", os.fspath(start),
    ]  # fmt: skip


class Attempt:
    """A group of processes that trains, and what it prints."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        """Starts it; both streams go to ``log``. What an attempt in the same folder has left behind, whose plan run was killed, is
        ended first. Raises OSError."""
        self._mark = f"{os.environ.get(MARK, '')}{os.urandom(8).hex()}"
        running = log.with_name(f"running-{socket.gethostname()}")
        with contextlib.suppress(OSError):
            if MARKED.fullmatch(before := running.read_text()):
                end_marked(before)
        library.write_whole(running, self._mark)
        self.log, self._seen = log, 0
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                list(words), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**SETTINGS, **os.environ, MARK: self._mark, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def lines(self) -> list[str]:
        """Whole lines that it has printed since the last call; all of the rest once it has ended."""
        over = self.process.poll() is not None
        with self.log.open("rb") as file:
            file.seek(self._seen)
            new = file.read()
        end = len(new) if over else new.rfind(b"\n") + 1
        self._seen += end
        return new[:end].decode("utf-8", errors="replace").splitlines()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def ask(self) -> None:
        """Asks the ranks, not torchrun, to save and end: torchrun would end them by force after a while of its own."""
        for rank in _children(self.process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rank, signal.SIGTERM)

    def end(self) -> None:
        """Ends everything that it started, by force. Nothing stays behind."""
        end_all(self.process, self._mark)


def _children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(one) for one in (task / "children").read_text().split()]
    return found


def sleep_until(moment: float) -> None:
    """Sleeps to a moment of the monotonic clock, at most POLL."""
    time.sleep(min(max(moment - time.monotonic(), 0.0), POLL))
