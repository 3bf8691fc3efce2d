"""A rank that dies, a link that hangs: the run ends within a stated time, with a sentence that names them.

Every rank says in the store what it is about to do and, from a thread, that it is alive. When an operation raises, or does
not end within its time, or another rank has failed, the rank posts that, waits GRACE for the others and ends; one of
them says which ranks are missing or what went wrong. The thread sees it even where the operation never returns, and
looks whether the next rank is alive: of a machine that lost its power or link no connection is ever closed.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from planner.errors import PlannerError
from planner.lab.launch import nccl
from planner.record import record

TICK = 0.25
"""Seconds between two signs of life."""
LAST = 5.0
"""Seconds that the first rank waits for the others at the end."""
GRACE = 1.5
"""Seconds that the ranks wait for each other when something has failed: silent for that long is gone."""
LOOK = 2
"""Signs of life between two looks at the neighbour's: the store of a thousand ranks has enough to do."""
SILENT = 30.0
"""Seconds without a sign of life after which a rank counts as gone, however long its operation may take. Libraries may keep
its thread from running for some seconds: a driver that starts, a compiler."""
FAILED = 3
"""Exit code of a rank of a failed run."""
CONNECTION = ("connection", "closed by peer", "timed out", "timeout", "nccl", "broken pipe", "socket", "gloo")
"""Words in an exception that say that a peer or link failed, not this rank."""


@record
class Verdict:
    """What went wrong, as the one rank that reports found it."""

    kind: str
    """error (an exception of a rank), said (a sentence for the user), died, hung, link, stopped, store."""
    rank: int
    """The rank that is to blame; -1 = none alone."""
    phase: str
    """What was being done."""
    sentence: str
    """All of it for the user."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the rank said of itself."""


class Watch:
    """What this rank is doing, how long it may take, and what is said when it fails."""

    def __init__(
        self, store: Any, rank: int, hosts: list[str], timeout: float, *, ended: Callable[[str], None],
        leave: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        """``store`` is a client of its own, used by the thread only; ``hosts`` has the host of each rank. ``ended`` is
        called once, with the sentence on the one rank that reports and with "" on the others; then ``leave``."""
        self.store, self.rank, self.hosts, self.timeout = store, rank, hosts, timeout
        self._ended, self._leave = ended, leave
        self._doing, self._inside = ("starting", tuple(range(len(hosts)))), False
        self._deadline, self._seconds = float("inf"), timeout
        self.ending = False
        """This rank is already on its way out, with a report or without."""
        self._next = (rank + 1) % len(hosts)
        self.verdict: Verdict | None = None
        """What went wrong; set on the rank that reports before ``ended`` is called."""
        self._parent = os.getppid()
        self._lock = threading.RLock()  # a signal may come while the main program holds it
        self._stop = threading.Event()
        self._signals, self.signalled = socket.socketpair()
        """``signalled`` gets the number of every signal, also while the main program waits inside of a library."""
        for end in (self._signals, self.signalled):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def begin(self) -> None:
        """Starts the signs of life."""
        self._thread.start()

    @contextlib.contextmanager
    def doing(self, words: str, ranks: list[int], seconds: float | None = None) -> Iterator[None]:
        """Inside the block: what is said when it fails, among which ranks, and when it has hung (default the timeout)."""
        before, outermost = self._doing, not self._inside
        self._doing, self._inside = (words, tuple(ranks)), True
        self.again(seconds)
        try:
            yield
            # What raises is still being done when it is reported; between two blocks the last one says how far the run came.
            self._doing = (f"what follows {words}", tuple(range(len(self.hosts)))) if outermost else before
            self._inside = not outermost
        finally:
            self._deadline = float("inf")

    def again(self, seconds: float | None = None) -> None:
        """One more step of the same: the time starts anew."""
        self._seconds = self.timeout if seconds is None else seconds
        self._deadline = time.monotonic() + self._seconds

    def done(self) -> None:
        """This rank has nothing left to do; ending is now no failure. The first rank, which may hold the store, leaves last."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        self.store.set(f"done/{self.rank}", "1")
        until = time.monotonic() + LAST * (self.rank == 0)
        while time.monotonic() < until and not all(self._get(f"done/{rank}") for rank in range(len(self.hosts))):
            time.sleep(TICK)

    def silence(self) -> None:
        """The user or launcher ends the run: nothing is to be reported."""
        self.ending = True
        self._stop.set()

    def fail(self, error: BaseException, facts: dict[str, Any] | None = None, text: str = "") -> None:
        """Ends this rank because of an exception; ``facts`` come with the verdict, ``text`` says it better than it does.
        With facts the error is this rank's own, whatever words it uses. Where the watch was quicker its report comes first."""
        inner = error
        while inner.__cause__ is not None:  # torch wraps what fails inside of a stage
            inner = inner.__cause__
        if isinstance(inner, RuntimeError) and nccl.of_nccl(str(inner)):
            self.end("error", nccl.in_words(str(inner)), facts)
            return self._join()
        text = text or str(error).strip() or type(error).__name__
        lost = any(word in text.lower() for word in CONNECTION) and isinstance(error, RuntimeError | OSError)
        if isinstance(error, PlannerError):
            self.end("said", text)
        else:
            self.end("lost" if lost and not facts else "error", text.splitlines()[0][:300], facts)
        return self._join()

    def _join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        count, life, seen = 0, "", 0
        while not self._stop.wait(TICK):
            count += 1  # not seconds: where all ranks were stopped and went on, nobody was silent
            if os.getppid() != self._parent:  # the launcher was killed: nobody would end this rank
                self._ended("")
                self._leave(FAILED)
            try:
                stopped = self._signalled()
                if not stopped:
                    self.store.set(f"alive/{self.rank}", str(count))
                if stopped or self.store.check(["failure"]):
                    self.end("stopped")
                    return
                if count % LOOK == 0:
                    now = self._get(f"alive/{self._next}")
                    if now != life or self._get(f"done/{self._next}"):
                        life, seen = now, count
            except Exception as error:  # whatever the store's client raises: nobody is left to report to
                if self._stop.is_set():
                    return
                self.end("store", str(error).splitlines()[0][:200])
                return
            if time.monotonic() > self._deadline or (count - seen) * TICK > SILENT:
                self.end("late" if time.monotonic() > self._deadline else "silent")
                return

    def _signalled(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in self._signals.recv(64)
        return False

    def end(self, kind: str, text: str = "", facts: dict[str, Any] | None = None) -> None:
        """Ends this rank: with an error or said, lost (of a peer), late, silent (the next one), store, or stopped (by the launcher,
        because another one died, which is then named, or because somebody stopped it)."""
        with self._lock:  # the thread and the main program may both come here
            if self.ending:
                return
            self.ending = True
        sentence = ""
        if kind == "store":
            sentence = f"{self.where(0)} no longer answers rank {self.rank}, which was at: {self._doing[0]} ({text})"
            self.verdict = Verdict(kind="store", rank=0, phase=self._doing[0], sentence=sentence)
        else:
            with contextlib.suppress(Exception):
                sentence = self._report(kind, text, facts or {})
        self._ended(sentence)
        self._leave(FAILED)

    def _report(self, kind: str, text: str, facts: dict[str, Any]) -> str:
        """Posts, waits, and on the rank that comes first here returns the sentence."""
        words, ranks = self._doing
        post = {
            "kind": kind, "text": text, "doing": words, "ranks": list(ranks), "facts": facts, "seconds": self._seconds,
        }  # fmt: skip
        self.store.set(f"failed/{self.rank}", json.dumps(post))
        self.store.set("failure", "1")
        before = self._lives()
        time.sleep(GRACE)
        after = self._lives()
        world = range(len(self.hosts))
        posts = {rank: json.loads(text) for rank in world if (text := self._get(f"failed/{rank}"))}
        gone = [r for r in world if r not in posts and (before[r] == after[r] or self._get(f"done/{r}"))]
        if self.store.add("reporter", 1) != 1:
            return ""
        self.verdict = self.judge(posts, gone)
        return self.verdict.sentence

    def _lives(self) -> list[str]:
        return [self._get(f"alive/{rank}") for rank in range(len(self.hosts))]

    def _get(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def where(self, rank: int) -> str:
        """``rank 2 (node b)``."""
        return f"rank {rank} ({self.hosts[rank]})"

    def judge(self, posts: dict[int, dict[str, Any]], gone: list[int]) -> Verdict:
        """What happened, in one sentence: own errors first, then the ranks that are gone, then who waited in vain."""
        kinds = {kind: {r: one for r, one in posts.items() if one["kind"] == kind} for kind in ("said", "error", "silent")}
        waiting = {rank: entry for rank, entry in posts.items() if entry["kind"] in ("late", "lost")}
        silent = [(rank + 1) % len(self.hosts) for rank in kinds["silent"]]
        limit = max((float(entry.get("seconds", self.timeout)) for entry in waiting.values()), default=self.timeout)
        doing = next(iter((kinds["error"] or waiting or posts).values()))["doing"]
        for rank, entry in kinds["said"].items():
            return Verdict(kind="said", rank=rank, phase=doing, sentence=str(entry["text"]))
        for rank, entry in sorted(kinds["error"].items()):
            sentence = f"{self.where(rank)} failed at {entry['doing']}: {entry['text']}"
            facts = entry.get("facts", {})
            return Verdict(kind="error", rank=rank, phase=entry["doing"], sentence=sentence, facts=facts)
        if gone or silent:
            gone = gone or silent  # heard again since, but too late
            names = " and ".join(self.where(rank) for rank in gone[:4]) + (" and others" if len(gone) > 4 else "")
            hung = waiting and not silent and all(entry["kind"] == "late" for entry in waiting.values())
            how = f"stopped answering for {limit:g} s during {doing}" if hung else f"died during {doing}"
            if silent:
                how = (
                    f"gave no sign of life for {SILENT:g} s during {doing}: the process is dead, its machine is, or the link to it"
                )
            return Verdict(kind="hung" if hung else "died", rank=gone[0], phase=doing, sentence=f"{names} {how}")
        if not waiting:
            return Verdict(kind="stopped", rank=-1, phase=doing, sentence=f"the launcher ended the run during {doing}")
        return self._stuck(waiting, doing, limit)

    def _stuck(self, waiting: dict[int, dict[str, Any]], doing: str, limit: float) -> Verdict:
        """All ranks are alive and wait."""
        ranks = sorted({rank for entry in waiting.values() for rank in entry["ranks"]}) or sorted(waiting)
        hosts = sorted({self.hosts[rank] for rank in ranks})
        names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        lost = [f"rank {rank}: {entry['text']}" for rank, entry in waiting.items() if entry["kind"] == "lost"]
        why = lost[0] if lost else f"no answer within {limit:g} s"
        sentence = (
            f"{doing} did not end although all ranks are alive ({why}): the link between ranks {names} on "
            f"{', '.join(hosts[:4])} hangs"
        )
        return Verdict(kind="link", rank=min(waiting), phase=doing, sentence=sentence)


def heed_signals(watch: Watch) -> None:
    """Ctrl-C ends a rank in order, and what it has is written on the way out. SIGTERM comes from a launcher that has lost a
    rank, often before this one has noticed: it is reported, by the watch where the main program does not come to it because it
    waits for the lost rank. A report that is under way is not cut short."""

    def stop(number: int, _: object) -> None:
        if watch.ending:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        watch.end("stopped")  # comes back only where the watch was quicker: it reports, and ends this process

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, stop)
    signal.set_wakeup_fd(watch.signalled.fileno(), warn_on_full_buffer=False)
