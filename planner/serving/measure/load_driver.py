"""Requests sent as the plan's traffic says: a fixed number in flight, Poisson arrivals, or all at once; bounded in time.

Ctrl-C, or the end of the time, stops the sending; requests in flight are dropped, and what was answered by then is the result.
"""

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from planner.errors import PlannerError
from planner.record import record
from planner.serving.export.bench_command import requests_of
from planner.serving.measure.bench_prompts import SEED, Asked, Form, find_form, requests
from planner.serving.measure.stream_client import Address, Answer, post_stream
from planner.serving.traffic import Traffic

TICK = 0.5
"""Seconds between two lines of progress."""
MOST_FAILED = 20
"""Failures in a row after which a run is given up."""


@record
class Drive:
    """How a server is driven."""

    address: Address
    traffic: Traffic
    vocabulary: int
    """Tokens of the model."""
    model: str | None = None
    """The server's name for it; None = the first that it lists."""
    count: int | None = None
    """Requests; None = by the traffic."""
    limit: float = 600.0
    """Seconds of the whole run at most, probe included."""
    warmup: int = 2
    """Requests before the clock starts."""
    progress: Callable[[str], None] = lambda _: None


@dataclass(kw_only=True)
class Driven:
    """What was measured."""

    form: Form
    answers: list[Answer] = field(default_factory=list)
    """Answered and failed ones, in the order of their ends."""
    asked: int = 0
    """Requests that the run had."""
    duration: float = 0.0
    """Seconds from the first request to the last end."""
    stopped: str = ""
    """Why it ended before all were answered; '' = it did not."""
    most_at_once: int = 0

    @property
    def done(self) -> list[Answer]:
        """Those that were answered."""
        return [one for one in self.answers if not one.error]


def drive(asked: Drive) -> Driven:
    """Run the load. Raises PlannerError when the server does not answer at all."""
    return asyncio.run(_drive(asked))


async def _drive(asked: Drive) -> Driven:
    began = time.perf_counter()
    stop = asyncio.Event()
    why: list[str] = []

    def interrupted() -> None:
        why.append("Ctrl-C")
        stop.set()

    with _interrupts(asyncio.get_running_loop(), interrupted):
        asked.progress("asking the server for its model")
        finding = asyncio.ensure_future(find_form(asked.address, asked.model, asked.vocabulary))
        waiting = asyncio.ensure_future(stop.wait())
        await asyncio.wait({finding, waiting}, timeout=asked.limit, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not finding.done():
            finding.cancel()
            raise PlannerError(
                f"{asked.address}: stopped before its first answer ({why[0] if why else f'none in {asked.limit:g} s'})"
            )
        form, _ = finding.result()
        count = asked.count or requests_of(asked.traffic)
        todo = requests(form, asked.traffic, asked.vocabulary)
        run = _Run(asked, form, stop, why, began + asked.limit)
        await run.warm(list(islice(todo, asked.warmup)))
        return await run.all(islice(todo, count), count)


class _Run:
    """One run on its way."""

    def __init__(self, asked: Drive, form: Form, stop: asyncio.Event, why: list[str], end: float) -> None:
        self.asked, self.form, self.stop, self.why, self.end = asked, form, stop, why, end
        self.found = Driven(form=form)
        self.inside = 0
        self.failed_in_a_row = 0

    async def warm(self, some: Sequence[Asked]) -> None:
        """Requests that do not count."""
        if some:
            self.asked.progress("warming up")
            await self._bounded(asyncio.gather(*(self._send(one) for one in some)))

    async def all(self, todo: Iterator[Asked], count: int) -> Driven:
        """The whole load."""
        self.found.asked = count
        start = time.perf_counter()
        shown = asyncio.ensure_future(self._show(start))
        if not self.stop.is_set():
            load = self._open(todo) if self.asked.traffic.load == "rate" else self._closed(todo)
            await self._bounded(asyncio.ensure_future(load))
        shown.cancel()
        ends = [one.started + one.latency for one in self.found.done]
        self.found.duration = max([*ends, start]) - start if not self.stop.is_set() else time.perf_counter() - start
        missing = count - len(self.found.answers)
        if missing or self.why:
            self.found.stopped = self.why[0] if self.why else f"the limit of {self.asked.limit:g} s"
        return self.found

    async def _bounded(self, work: "asyncio.Future[Any]") -> None:
        """Until it is done, the time is over or somebody stops it; what is in flight then is dropped."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait(
            {work, waiting}, timeout=max(self.end - time.perf_counter(), 0.0), return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        if not work.done():
            work.cancel()
            self.stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _send(self, one: Asked) -> Answer:
        left = max(self.end - time.perf_counter(), 1.0)
        return await post_stream(self.asked.address, self.form.path, one.body, left)

    async def _one(self, one: Asked) -> None:
        self.inside += 1
        self.found.most_at_once = max(self.found.most_at_once, self.inside)
        try:
            answer = await self._send(one)
        finally:
            self.inside -= 1
        self.found.answers.append(answer)
        self.failed_in_a_row = self.failed_in_a_row + 1 if answer.error else 0
        if self.failed_in_a_row >= MOST_FAILED:
            self.why.append(f"{MOST_FAILED} requests in a row failed ({answer.error})")
            self.stop.set()

    async def _closed(self, todo: Iterator[Asked]) -> None:
        """As many in flight as the load says; each that ends makes room for the next."""
        offline = self.asked.traffic.load == "offline"
        workers = self.found.asked if offline else max(round(self.asked.traffic.value), 1)

        async def work() -> None:
            for one in todo:
                await self._one(one)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(workers, self.found.asked)):
                group.create_task(work())

    async def _open(self, todo: Iterator[Asked]) -> None:
        """Poisson arrivals: gaps are exponential with the mean 1 / rate."""
        draws, at = random.Random(SEED), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for one in todo:
                await asyncio.sleep(max(at - time.perf_counter(), 0.0))
                group.create_task(self._one(one))
                at += draws.expovariate(max(self.asked.traffic.value, 1e-9))

    async def _show(self, start: float) -> None:
        while True:
            done, tokens = len(self.found.done), sum(one.output_tokens for one in self.found.done)
            seconds = max(time.perf_counter() - start, 1e-9)
            failed = len(self.found.answers) - done
            self.asked.progress(
                f"{done} of {self.found.asked} requests, {self.inside} in flight, {tokens / seconds:.0f} output tokens/s"
                + (f", {failed} failed" if failed else "")
            )
            await asyncio.sleep(TICK)


@contextlib.contextmanager
def _interrupts(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls ``call`` instead of raising, in the main thread, until the body ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
