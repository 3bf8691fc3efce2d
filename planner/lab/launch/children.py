"""A command that is started and watched: its processes end with it, whatever sessions they opened."""

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "PLANNER_TRIAL"
"""Variable in the environment of everything that the command starts: finds children that opened sessions of their own."""
POLL = 0.1
GRACE = 15.0
"""Seconds that the command has to end in order after Ctrl-C; a second one ends it at once."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; negative = the signal that ended it."""
    hung: bool
    """It was ended here because its deadline had passed."""
    text: str
    """All that it printed, both streams."""
    interrupted: bool = False
    """The user stopped it."""


def run_watched(
    words: list[str], look: Callable[[str], object], deadline: Callable[[], float] = lambda: math.inf, *,
    folder: Path | None = None, environment: Mapping[str, str] | None = None, ask: signal.Signals = signal.SIGTERM,
) -> Ended:  # fmt: skip
    """Run a command until it ends, or until ``deadline`` (monotonic seconds) has passed.

    ``look`` is given what it has printed since, whole lines, often none. ``ask`` is the signal that asks it to end after Ctrl-C.
    Raises OSError when it cannot be started. Nothing that was started stays behind, after Ctrl-C neither.
    """
    mark = os.urandom(8).hex()
    environment = {**(environment or os.environ), MARK: mark, "PYTHONUNBUFFERED": "1"}
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
                end = new.rfind(b"\n") + 1
                seen += end
                look(new[:end].decode("utf-8", errors="replace"))
                hung = process.poll() is None and time.monotonic() > deadline()
        except KeyboardInterrupt:
            interrupted = True
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, ask)
                process.wait(timeout=GRACE)
        finally:
            with interrupts_ignored():
                _end_all(process, mark)
        log.seek(0)
        text = log.read().decode("utf-8", errors="replace")
        look(text)
        return Ended(code=process.returncode, hung=hung, text=text, interrupted=interrupted)


def _end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End by force what is left of the command, and everything that carries its mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A signal goes to a handler, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def termination_interrupts() -> contextlib.AbstractContextManager[None]:
    """A SIGTERM to this process ends what it has started too, as Ctrl-C does."""
    return _handled(signal.SIGTERM, signal.default_int_handler)


def interrupts_ignored() -> contextlib.AbstractContextManager[None]:
    """Ctrl-C is not heard: processes that are ended here are all ended, those that are started here never hear it."""
    return _handled(signal.SIGINT, signal.SIG_IGN)
