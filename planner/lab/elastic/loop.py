"""The loop of ``plan run``: start the plan for the GPUs that are there, watch it, save in time, go on after a failure or a change.

Everything that works is an engine that exists: torchrun starts and meets, torch.distributed.checkpoint (or the trainer's own
checkpoints) saves and reshards, the search has planned every world before.
"""

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from planner import library
from planner.errors import PlannerError
from planner.lab.elastic.attempt import Attempt, Meeting, sleep_until, torchrun
from planner.lab.elastic.run_flags import Adapter
from planner.lab.elastic.worlds import World
from planner.lab.launch.torchrun import AFTERWARDS, cause
from planner.record import record

STOPPED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C, and after SIGTERM or a notice: start it again to go on."""
LOOK = 5.0
"""Seconds between two questions how many GPUs there are."""
TAIL = 20_000
"""Characters of what an attempt printed at last that are looked at for its cause."""
AGAIN = 3.0
"""Seconds before the next attempt after a failure, times the failures in a row."""
UNWRITABLE = "checkpoints cannot be written"
"""Beginning of the sentence with which the PyTorch script ends because of its storage."""
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
"""Of torchrun's report: rank and exit code of the one that failed first."""
NEVER = (2, 126, 127)
"""Exit codes of a program that does not start: its arguments are wrong (argparse), it cannot be run, it is not there."""
RENDEZVOUS = {
    "RendezvousConnectionError": "the node that keeps the rendezvous does not answer",
    "RendezvousClosedError": "the other nodes have just ended",
    "RendezvousTimeoutError": "fewer nodes have come than --nnodes needs",
}
"""What torchrun's exceptions about the rendezvous say in words.  [torch 2.13: elastic/rendezvous/api.py]"""
AGENT = re.compile(r"^[EWI]\d{4} \d\d:.*?/elastic/|^Traceback", re.MULTILINE)
"""Beginning of what torchrun prints itself."""
PEER_GONE = re.compile(r"Connection (reset|closed) by peer")
"""Of gloo, where the process at the other end has ended."""
AGENT_STARTS = 20.0
"""Seconds that torchrun has to start, nearly all imports."""
SHOWN = ("step ", "checkpoint ", "resumed ", "stopped ", "finished ", "pipeline rank")
"""Beginnings of lines of the PyTorch script that are its progress."""


class Group(Protocol):
    """What an attempt is to the loop; ``Attempt`` is one."""

    def lines(self) -> list[str]:
        """New lines."""

    def ask(self) -> None:
        """Asks it to save and end."""

    def end(self) -> None:
        """Ends it by force."""

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""


@record
class Job:
    """What is run, and the limits that are said before it starts."""

    worlds: dict[int, World]
    """Plans by number of GPUs of the job."""
    start: Path
    """Script that torchrun starts for each rank."""
    folder: Path
    """Of logs and checkpoints."""
    adapter: Adapter
    """How the trainer speaks."""
    gpus: Callable[[], int]
    """GPUs that may be used on this node now."""
    watched: bool = False
    """The number of GPUs is asked for while it runs, too."""
    notice: Callable[[], str] = lambda: ""
    """Why the machine is about to be taken away; "" = it is not."""
    before: Callable[[], list[str]] = list
    """Called before each attempt; what it says."""
    saved: Callable[[], int] = lambda: 0
    """Step of the newest checkpoint: ranks of another node may print the steps."""
    meeting: Meeting = field(default_factory=Meeting)
    """Of several nodes."""
    grace: float = 60.0
    """Seconds from a notice until everything is ended."""
    first: float = 1200.0
    """Seconds until the first step of an attempt, then it has hung."""
    silence: float = 600.0
    """Seconds between two steps, then it has hung."""
    restarts: int = 3
    """Failures in a row without a new step, after which it ends."""
    launch: Callable[[int, Path], Group] | None = None
    """Starts an attempt of so many ranks with a log; None = torchrun."""


@dataclass(kw_only=True)
class Ended:
    """How one attempt ended; the history that is kept of it."""

    gpus: int
    """GPUs of this node that it had."""
    why: str = ""
    """finished, interrupted, terminated, changed, failed or hung."""
    words: str = ""
    """Cause in words."""
    first_step: int | None = None
    """Number of the first step that it did; None = it did none."""
    last_step: int | None = None
    """Number of its last step."""
    started: float = 0.0
    """Unix time."""
    first_step_s: float | None = None
    """Seconds from its start to the end of its first step."""
    step_s: float | None = None
    """Mean seconds of its steps after the first."""
    seconds: float = 0.0
    """All of it."""
    code: int | None = None
    """Exit code of the rank that failed first, where torchrun says it."""

    def did(self, step: int, seconds: float) -> None:
        """A step has ended, so many seconds after the start."""
        if self.first_step is None or self.first_step_s is None:
            self.first_step, self.first_step_s = step, seconds
        elif step > self.first_step:
            self.step_s = (seconds - self.first_step_s) / (step - self.first_step)
        self.last_step = step


@dataclass(kw_only=True)
class Signals:
    """What the user or the machine has said to this process."""

    why: str = ""
    """interrupted or terminated; "" = nothing yet."""
    words: str = ""
    """Which signal."""
    again: bool = False
    """Said twice: do not wait."""
    codes: dict[str, int] = field(default_factory=lambda: {"interrupted": STOPPED, "terminated": TERMINATED})
    """Exit code of each."""

    def heard(self, number: int, _: object) -> None:
        """Handler of SIGINT and SIGTERM."""
        self.again = bool(self.why)
        self.why = self.why or ("interrupted" if number == signal.SIGINT else "terminated")
        self.words = self.words or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


@contextlib.contextmanager
def heeding() -> Iterator[Signals]:
    """Inside the block Ctrl-C, SIGTERM and SIGUSR1 (``sbatch --signal``) are notices."""
    said, numbers = Signals(), (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    if threading.current_thread() is not threading.main_thread():
        yield said
        return
    before = {number: signal.signal(number, said.heard) for number in numbers}
    try:
        yield said
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_training(job: Job, say: Callable[[str], object]) -> int:
    """Runs the job to its end; the exit code: 0 finished, 1 it failed too often, 130 and 143 stopped and saved, to be continued.

    ``say`` gets lines of progress. Raises PlannerError where no plan is small enough for the GPUs that are there.
    """
    failures, number, best = 0, len(_history(job.folder)), job.saved()
    with heeding() as said:
        while True:
            number += 1
            gpus = _fitting(job)
            log = job.folder / f"attempt-{number}.log"
            say(f"attempt {number} on {gpus} GPUs: {job.worlds[_world(job, gpus)].words}; log {log}")
            ended = _attempt(job, gpus, log, said, say)
            _keep(job.folder, ended)
            if ended.why == "finished":
                say(f"finished at step {ended.last_step}" if ended.last_step else "finished; its log names no step")
                return 0
            if ended.why in said.codes:
                say(f"{ended.words}: {_where(ended)}; start the same command again to go on")
                return said.codes[ended.why]
            if ended.why == "changed":
                say(f"{ended.words}: {_where(ended)}")
                continue
            if ended.words.startswith(UNWRITABLE):  # trying again would lose as much again
                raise PlannerError(ended.words)
            if ended.code in NEVER and not ended.last_step:
                raise PlannerError(f"the command does not start: {ended.words}; its log: {log}")
            reached = max(ended.last_step or 0, job.saved())
            failures, best = 1 if reached > best else failures + 1, max(best, reached)
            say(f"attempt {number} {ended.why}: {ended.words}")
            if failures > job.restarts:
                raise PlannerError(
                    f"{failures} attempts in a row failed without a step further than {best}; the last: {ended.words}; "
                    f"its log: {log}"
                )
            _pause(AGAIN * failures, said)
            if said.why:
                return said.codes[said.why]


def patience(job: Job) -> float:
    """Seconds within which all attempts have failed where the node that keeps the rendezvous does not answer."""
    waits = AGAIN * job.restarts * (job.restarts + 1) / 2
    return (job.restarts + 1) * (job.meeting.answers + AGENT_STARTS) + waits


def _fitting(job: Job) -> int:
    """GPUs of this node that the next attempt takes: the most that have a plan."""
    here = job.gpus()
    fitting = [gpus for gpus in job.worlds if gpus <= here * job.meeting.most]
    if job.meeting.most > 1 and here:
        return here
    if not fitting:
        raise PlannerError(f"{here} GPUs are left here, and the smallest plan needs {min(job.worlds)}; start again with more")
    return max(fitting)


def _world(job: Job, gpus: int) -> int:
    """The world that is shown: with several nodes the largest, which torchrun may not reach."""
    return max(job.worlds) if job.meeting.most > 1 else gpus


def _attempt(job: Job, gpus: int, log: Path, said: Signals, say: Callable[[str], object]) -> Ended:
    """One attempt, from its start to its end."""
    launch = job.launch or (lambda ranks, file: Attempt(
        torchrun(job.meeting, ranks, job.start, job.grace), file, job.meeting.settings))  # fmt: skip
    for line in job.before():
        say(f"  {line}")
    begun, ended = time.monotonic(), Ended(gpus=gpus, started=time.time())
    try:
        group = launch(gpus, log)
    except OSError as error:
        raise PlannerError(f"torchrun cannot be started ({error.strerror})") from error
    try:
        text = _watch(job, group, ended, said, say)
    finally:
        group.end()
    ended.seconds = time.monotonic() - begun
    if not group.code and (_said(text, "finished at step") or not (ended.why or _said(text, "stopped at step"))):
        ended.why = "finished"  # also where it came to its end while it was asked to stop
    elif not ended.why and said.why:  # the ranks heard it as soon as this process
        ended.why, ended.words = said.why, said.words
    elif not ended.why:
        ended.why = "failed" if group.code else "changed"
        ended.words = why_failed(text, group.code) if group.code else "its ranks were told to stop, not here"
        ended.code = int(root[2]) if (root := ROOT_CAUSE.search(text)) else None
    return ended


def _watch(job: Job, group: Group, ended: Ended, said: Signals, say: Callable[[str], object]) -> str:
    """Until the attempt has ended by itself, or is to be ended; what it printed at last."""
    begun = looked = stepped = time.monotonic()
    deadline, tail, asked = begun + job.first, "", False
    while True:
        over = group.code is not None
        for line in group.lines():
            tail = f"{tail}{line}\n"[-TAIL:]
            found = job.adapter.step.search(line)
            if line.startswith(SHOWN) or (found and int(found[1]) != ended.last_step):  # ranks may print the same
                say(f"  {line}")
            if found:
                stepped = time.monotonic()
                deadline = deadline if asked else stepped + job.silence
                ended.did(int(found[1]), stepped - begun)
        if over:
            return tail
        now = time.monotonic()
        look, looked = now - looked > LOOK, now if now - looked > LOOK else looked
        if not asked and (why := _to_stop(job, said, ended.gpus, look)):
            ended.why, ended.words = why
            asked, deadline = True, now + job.grace
            say(f"{ended.words}: saving, at most {job.grace:g} s")
            group.ask()
        if now > deadline or said.again:
            if asked:
                ended.words += f"; not saved within {job.grace:g} s, it goes on from the checkpoint before"
            else:
                ended.why, ended.words = "hung", f"no step for {now - stepped:.0f} s, it was ended"
            return tail
        sleep_until(deadline)


def _to_stop(job: Job, said: Signals, gpus: int, look: bool) -> tuple[str, str] | None:
    """Why the attempt is to save and end now: (why, words)."""
    if said.why:
        return said.why, said.words
    if words := job.notice():
        return "terminated", f"notice: {words}"
    if look and job.watched and job.meeting.most == 1:
        here = job.gpus()
        fitting = max((one for one in job.worlds if one <= here), default=0)
        if fitting != gpus:
            return "changed", f"{here} GPUs are there now, it had {gpus}"
    return None


def why_failed(text: str, code: int) -> str:
    """Why an attempt ended: the sentence of its saves, the signal that ended the rank that torchrun names first, its exception."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"torchrun was ended by {signal.Signals(-code).name}"
    said = next((line for line in text.splitlines() if line.startswith(UNWRITABLE)), "")
    root = ROOT_CAUSE.search(text)
    if not said and root is not None and int(root[2]) < 0:
        with contextlib.suppress(ValueError):
            return f"rank {root[1]} was ended by {signal.Signals(-int(root[2])).name}"
    met = next((words for name, words in RENDEZVOUS.items() if f".{name}: " in text or f"\n{name}: " in text), "")
    last = cause(text)
    if not last or any(word in last for word in AFTERWARDS):  # no rank raised anything: what the ranks printed last
        last = next((line for line in reversed(AGENT.split(text, maxsplit=1)[0].splitlines()) if line.strip()), "")[:300] or last
    gone = "a rank has lost another one: " if PEER_GONE.search(last) else ""
    return said or met or gone + last or f"exit code {code}"


def _said(text: str, words: str) -> bool:
    """Whether one of the last lines begins so."""
    return any(line.startswith(words) for line in text.splitlines()[-50:])


def _where(ended: Ended) -> str:
    return f"stopped after step {ended.last_step}" if ended.last_step else "stopped before the first step"


def _pause(seconds: float, said: Signals) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not said.why:
        sleep_until(until)


# ------------------------------------------------------------------------------------------------ history


def _history(folder: Path) -> list[dict[str, Any]]:
    """Attempts of before, as they were kept."""
    path = folder / "history.json"
    found = library.parse_json(library.read_text(path), str(path)) if library.is_file(path) else []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise PlannerError(f"{path} is no list of attempts; remove it")
    return found


def _keep(folder: Path, ended: Ended) -> None:
    library.write_whole(folder / "history.json", json.dumps([*_history(folder), asdict(ended)], indent=1))
