"""One rank of level ``full``: meets the others, compares a tiny model with one process, then runs and times the plan (torch)."""

import contextlib
import json
import logging
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner import library
from planner.detect import pressure
from planner.lab.launch.meeting import Met, meet, open_store
from planner.lab.launch.place import Place
from planner.lab.launch.state import Pace, State, Teller, to_file
from planner.lab.launch.torchrun import DIRECTORY
from planner.lab.launch.watch import Verdict, Watch, heed_signals
from planner.lab.reference import fused_operators
from planner.lab.run.clock import PASSES, Clock, Timed, TimedSteps, memory, reset_memory, states
from planner.lab.run.eager_pricing import host_is_measured, yardsticks
from planner.lab.run.levels import FIRST, SETTING_UP
from planner.lab.run.memory_tracker import MemoryTracker, optimizer_states
from planner.lab.run.orders import Ledger, Orders
from planner.lab.run.parity import among_ranks, precisions, tiny_of
from planner.lab.run.rate import Core, host_seconds
from planner.lab.run.traced import traced_step
from planner.lab.run.training import Run
from planner.units import GIB

SLACK = 30.0
"""Seconds that torch's own time limit of a collective is behind that of the watch, which names the rank."""


class OneRank:
    """What one rank does and has found so far."""

    def __init__(self, orders: Orders, place: Place, met: Met, ledger: Ledger, teller: Teller) -> None:
        self.orders, self.place, self.met, self.ledger, self.teller = orders, place, met, ledger, teller
        self.asked = orders.question()
        self.on_cpu = orders.device != "cuda"
        self.device = torch.device("cpu") if self.on_cpu else torch.device("cuda", torch.cuda.current_device())
        self.clock = Clock(self.device)
        self.steps = orders.warmup + orders.steps
        self.pace = Pace("validate", self.steps + 3, skip=3)
        self.entry: dict[str, Any] = {
            "rank": place.rank, "host": met.watch.hosts[place.rank], "name": met.names[place.rank], "steps": [],
            "pressure": [pressure()], "parity": None, "loss": [], "memory": {}, "host_seconds": None, "not_compiled": {},
        }  # fmt: skip
        self.core: Core | None = None
        """On a processor."""

    def doing(self, words: str, seconds: float | None = None) -> Any:
        """What is said when it fails, and after how long it has hung."""
        return self.met.watch.doing(words, list(range(self.place.world)), seconds)

    def show(self, doing: str, done: int) -> None:
        """Shows where the run is."""
        self.teller.tell(self.pace.at(doing, done))

    def run(self) -> None:
        """Everything; the entry in the ledger is whole after every step."""
        tracker = MemoryTracker() if self.on_cpu else None
        with self.doing("setting up the groups", SETTING_UP):
            self.show("setting up", 0)
            reset_memory(self.device)
            with tracker.patches() if tracker else contextlib.nullcontext():  # modules are hooked when they are sharded
                made = Run(self.asked.split, self.device)
        self.entry["stage"] = made.rank["pp"]
        if self.orders.parity and not self._equal(made):
            return
        if self.on_cpu:
            self._processor()
        with self.doing("allocating weights and optimizer states", SETTING_UP):
            with tracker or contextlib.nullcontext():
                made.allocate(fill=False)
            made.fill_by_shard()
        self.clock.attach(made)
        if tracker is not None:
            self._track(made, tracker)
        self._measure(made)
        self.entry["memory"] |= {"states": states(made), **memory(self.device)}
        if self.orders.trace or not self.on_cpu:
            self._trace(made)
        self.entry["pressure"].append(pressure())
        self.put()

    def _processor(self) -> None:
        """The rate of its core, and what the host needs around layers that are split like these."""
        cluster, split = self.asked.cluster, self.asked.split
        self.core = Core(yardsticks(cluster))
        self.clock.between = self.core.look
        if host_is_measured(cluster, split):
            with self.doing("timing layers without work", SETTING_UP):
                self.show("timing the host", 1)
                self.entry["host_seconds"] = dict(host_seconds(split, self.core.kept.product))
        self.put()

    def put(self) -> None:
        """Writes what there is."""
        self.ledger.put(self.place.rank, self.entry)

    def _equal(self, made: Run) -> bool:
        """Whether a tiny model with the same degrees trains like one process."""
        self.show("comparing a tiny model with one process", 1)
        for precision in precisions(self.asked.split):
            tiny = tiny_of(self.asked.split, precision)
            words = f"training a tiny model in {precision} to compare it with one process"
            with self.doing(words, max(self.orders.timeout, SETTING_UP)):
                found = among_ranks(tiny, self.device, made.meshes)
            self.entry["parity"] = found if precision == "fp64" else {**self.entry["parity"], "rounded": found}
            self.put()
            if not found["equal"]:
                return False
        return True

    def _track(self, made: Run, tracker: MemoryTracker) -> None:
        """Two steps on a CPU with every storage followed: the second has optimizer states from its beginning."""
        with self.doing("a step with its memory followed", self.orders.timeout * FIRST):
            kept = [p for part in made.parts for p in part.parameters()]
            tracker.assign("weights", kept)
            with tracker.patches(), tracker:
                for step in range(2):
                    self.show("following memory", 2)
                    if step:
                        tracker.start()
                    self.met.watch.again(self.orders.timeout * FIRST)
                    for optimizer in made.optimizers:
                        optimizer.zero_grad()
                    made.gradients(*made.data(step))
                    tracker.assign("gradients", [p.grad for p in kept if p.grad is not None])
                    made.clip()
                    for optimizer in made.optimizers:
                        optimizer.step()
                        tracker.assign("optimizer_states", optimizer_states(optimizer))
            peak = tracker.peak
            self.entry["memory"] |= {"held": dict(tracker.largest), "at_peak": peak.parts, "peak": peak.total}

    def _measure(self, made: Run) -> None:
        """Warm steps, then measured ones."""
        steps = TimedSteps(warmup=self.orders.warmup, steps=self.orders.steps, before=self._before, took=self._took)
        losses, norm = steps.take(made, self.clock, [made.data(step) for step in range(2)])
        with self.doing("the last step"):
            ends = [losses[0], losses[-1]] if losses else []
            self.entry["loss"] = [made.total_loss(one.reshape(())) for one in ends]
            self.entry["norm"] = float(norm) if norm is not None else None
        self.put()

    def _before(self, number: int) -> Any:
        if number == self.steps:
            return self.doing("the last step")
        warm = number < self.orders.warmup
        words = f"warm step {number + 1}" if warm else f"step {number + 1 - self.orders.warmup}"
        self.show(words, 3 + number)
        if number == self.orders.warmup and not self.on_cpu:
            reset_memory(self.device)
        if self.core is not None:
            self.core.begin()
        return self.doing(words, self.orders.timeout * (FIRST if number == 0 else 1.0))

    def _took(self, batch: Any) -> None:
        """Keeps the times of one step."""
        found = summary(self.clock.resolve(batch))
        slowed = self.core.ended() if self.core is not None else None
        if slowed is not None:
            found["slowed"], found["update_slowed"] = slowed.passes, slowed.update
            for name in ("step", "passes"):
                found[name][0] -= slowed.wall
        self.entry["steps"].append(found)
        self.entry["not_compiled"] = dict(fused_operators.NOT_COMPILED)
        self.put()

    def _trace(self, made: Run) -> None:
        """One more step under torch's profiler, on one rank of each pipeline stage."""
        mine = all(made.rank[name] == 0 for name in ("replica", "shard", "cp", "tp"))
        path = trace_path(self.orders.trace, made.rank["pp"]) if self.orders.trace else None
        with self.doing("the traced step", self.orders.timeout * FIRST):
            self.show("tracing", self.steps + 3)
            if mine:
                self.entry["exposed"] = traced_step(made, self.device, path)
                self.entry["trace"] = str(path) if path else ""
            else:
                made.step(*made.data(0))
            dist.barrier()


def trace_path(path: str, stage: int) -> Path:
    """The file of a pipeline stage: that of the user for the first, with the stage in its name for the others."""
    whole = Path(path)
    return whole if stage == 0 else whole.with_name(f"{whole.stem}.stage{stage}{whole.suffix}")


def summary(timed: Sequence[Timed]) -> dict[str, Any]:
    """One step as numbers: seconds of the whole and its phases, and of the actions of each stage and kind."""
    found: dict[str, Any] = {"actions": []}
    for one in timed:
        if one.kind not in PASSES:
            found[one.kind] = [one.seconds, one.processor, one.thread]
    groups: dict[tuple[int, str], list[Timed]] = {}
    for one in timed:
        if one.kind in PASSES:
            groups.setdefault((one.stage, one.kind), []).append(one)
    for (stage, kind), many in sorted(groups.items()):
        columns = [[getattr(one, name) for one in many] for name in ("seconds", "processor", "thread")]
        found["actions"].append({
            "stage": stage, "kind": kind, "count": len(many), "total": [sum(one) for one in columns],
            "median": [statistics.median(one) for one in columns],
        })  # fmt: skip
    passes = [one for one in timed if one.kind in PASSES]
    if passes:  # from the first forward to the end of the last backward pass
        found["window"] = max(one.start + one.seconds for one in passes) - min(one.start for one in passes)
    return found


# ------------------------------------------------------------------------------------------------ the process


Report = Callable[[list[dict[str, Any]], Verdict | None], None]
"""Gets what all ranks have left and what went wrong (None: nothing), on one rank."""


def work(orders: Orders, place: Place, report: Report, show: Callable[[State], object] | None = None) -> None:
    """Runs this rank. ``report`` is called on the first rank, or on the one that found out what is wrong; not where the ranks
    were started by another process of this machine, which reads their files."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_flush_denormal(True)
    directory = os.environ.get(DIRECTORY)
    show = to_file(Path(directory) / "state.json") if directory else show
    ledger, watches = Ledger(directory), list[Watch]()
    met = meet(place, orders.device, orders.timeout, lambda sentence: _ended(sentence, place, ledger, watches, report))
    watches.append(met.watch)
    ledger.store = met.store
    heed_signals(met.watch)
    try:
        _job(orders, place, met, ledger, Teller(show if place.rank == 0 else None))
    except KeyboardInterrupt:
        met.watch.silence()
        if place.rank == 0 and not directory:
            verdict = Verdict(kind="interrupted", rank=-1, phase="", sentence="stopped")
            report(ledger.read(place.world), verdict)
        raise
    except Exception as error:
        met.watch.fail(error, facts(error, orders.device), in_words(error))
        raise
    if directory:
        (Path(directory) / f"done-{place.rank}").touch()
    elif place.rank == 0:
        report(ledger.read(place.world), None)
    with contextlib.suppress(Exception):  # everything is measured and kept; nothing here can lose it
        dist.destroy_process_group()


def _job(orders: Orders, place: Place, met: Met, ledger: Ledger, teller: Teller) -> None:
    """From the process group to the last step."""
    world = list(range(place.world))
    with met.watch.doing("joining the process group", world, SETTING_UP):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if orders.device == "cuda" else "gloo", store=dist.PrefixStore("job", met.store),
            rank=place.rank, world_size=place.world, timeout=timedelta(seconds=orders.timeout * FIRST + SLACK),
        )  # fmt: skip
    OneRank(orders, place, met, ledger, teller).run()
    with met.watch.doing("the end", world):
        dist.barrier()
    met.watch.done()


def _ended(sentence: str, place: Place, ledger: Ledger, watches: list[Watch], report: Report) -> None:
    """This rank has to end because something failed; with a sentence on the one that reports."""
    if not sentence:
        return
    verdict = watches[0].verdict if watches else None
    verdict = verdict or Verdict(kind="said", rank=place.rank, phase="the start", sentence=sentence)
    if ledger.directory is not None:
        library.write_whole(ledger.directory / "verdict.json", json.dumps(vars(verdict)))
        library.write_whole(ledger.directory / "failure.txt", sentence)
    else:
        report(ledger.read(place.world, open_store(place)), verdict)


def facts(error: BaseException, device: str) -> dict[str, Any]:
    """What an exception says in addition to its text: whether memory ran out, and how much was allocated."""
    if not any(_out_of_memory(one) for one in causes(error)):
        return {}
    if device == "cuda":
        return {"out_of_memory": True, "allocated_gib": torch.cuda.memory_allocated() / GIB}
    return {"out_of_memory": True, "allocated_gib": memory(torch.device("cpu")).get("resident", 0) / GIB}


def in_words(error: BaseException) -> str:
    """The first line of the innermost cause: torch wraps what fails inside of a stage."""
    inner = causes(error)[-1]
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


def causes(error: BaseException) -> list[BaseException]:
    """An exception and its causes, the innermost last."""
    found = [error]
    while found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
    return found


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    words = ("out of memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(one in text for one in words)
