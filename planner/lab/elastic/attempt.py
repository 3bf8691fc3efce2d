"""One attempt of a job: torchrun and its ranks as one group of processes, which is asked to save and end, or ended."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from planner import library
from planner.lab.launch.torchrun import MARK, end_all, end_marked
from planner.record import record

SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "NCCL_DEBUG": "WARN"}
"""Of the ranks, where the user has not set them."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Of several nodes: ranks meet in a new store each time. The store of the agent, which they would share, keeps the addresses of
ranks that are gone, and a node that comes later is not told where it is.  [torch 2.13: elastic/rendezvous/dynamic_rendezvous.py,
next_rendezvous; pytorch/pytorch#135712]"""
MARKED = re.compile(r"(?:[0-9a-f]{16})+")
POLL = 0.1
"""Seconds between two looks at the processes."""


@record
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

    @property
    def settings(self) -> dict[str, str]:
        """Variables of torchrun."""
        return OWN_STORE if self.most > 1 else {}

    @property
    def answers(self) -> float:
        """Seconds within which the node that keeps the rendezvous must answer.  [torch 2.13: c10d_rendezvous_backend.py]"""
        said = re.search(r"\bread_timeout=(\d+)", self.conf)
        return float(said[1]) if said else 60.0


def torchrun(meeting: Meeting, ranks: int, start: Path, grace: float) -> list[str]:
    """torchrun with the c10d rendezvous. A failure ends it on each node, and plan run starts it again: it meets with those that are
    left. A node that comes later is taken in by the torchrun that runs.  [torch.distributed.run, torch 2.13]"""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{meeting.least}:{meeting.most}",
        "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting.endpoint,
        "--rdzv-id", meeting.name, *(["--rdzv-conf", meeting.conf] if meeting.conf else []),
        "--max-restarts", "0", "--monitor-interval", str(POLL),
        "--shutdown-timeout", str(max(1, round(grace))), "--no-python", "bash", os.fspath(start),
    ]  # fmt: skip


class Attempt:
    """A group of processes that trains, and what it prints."""

    def __init__(self, words: Sequence[str], log: Path, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Starts it with more variables; both streams go to ``log``. What an attempt in the same folder has left behind,
        whose plan run was killed, is ended first. Raises OSError."""
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
                env={**SETTINGS, **settings, **os.environ, MARK: self._mark, "PYTHONUNBUFFERED": "1"},
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
