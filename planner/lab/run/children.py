"""A command that is watched by what it prints: its processes end with it, whatever sessions they opened."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.lab.launch.torchrun import termination_interrupts

MARK = "PLANNER_TRIAL"
"""Variable in the environment of everything that the command starts: finds children that opened sessions of their own."""
POLL = 0.1
GRACE = 10.0
"""Seconds between the request to end and the end by force."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; negative = the signal that ended it."""
    hung: bool
    """It was ended here because nothing was printed in time."""
    text: str
    """All that it printed, both streams."""
    interrupted: bool = False
    """The user stopped it."""


def run_watched(words: list[str], folder: Path, look: Callable[[str], object], deadline: Callable[[], float]) -> Ended:
    """Run a command in a folder until it ends, or until ``deadline`` (monotonic seconds) has passed.

    ``look`` is given every new part of what it prints. Raises OSError when it cannot be started. Nothing that was started
    stays behind, after Ctrl-C neither.
    """
    mark = os.urandom(8).hex()
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as log, termination_interrupts():
        process = subprocess.Popen(
            words, cwd=folder, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        hung, interrupted, seen = False, False, 0
        try:
            while process.poll() is None and not hung:
                time.sleep(POLL)
                new = os.pread(log.fileno(), 1 << 20, seen)
                end = new.rfind(b"\n") + 1  # whole lines only
                if end:
                    seen += end
                    look(new[:end].decode("utf-8", errors="replace"))
                hung = process.poll() is None and time.monotonic() > deadline()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            end_all(process, mark)
        log.seek(0)
        text = log.read().decode("utf-8", errors="replace")
        look(text)
        return Ended(code=process.returncode, hung=hung, text=text, interrupted=interrupted)


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the command, first asked and then by force, and everything that carries its mark."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes of this machine whose environment carries the mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found
