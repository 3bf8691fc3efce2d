"""One rank of level ``full``: meets the others, compares a tiny model with one process, then runs and times the plan (torch)."""

import contextlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from planner import library
from planner.detect import pressure
from planner.lab.launch.meeting import Met, meet, open_store
from planner.lab.launch.place import Place
from planner.lab.launch.state import Pace, State, Teller, to_file
from planner.lab.launch.torchrun import DIRECTORY
from planner.lab.launch.watch import Verdict, heed_signals
from planner.lab.reference import fused_operators
from planner.lab.reference.attention_kernel import RAN
from planner.lab.run.clock import PASSES, Clock, Timed, memory, reset_memory, states
from planner.lab.run.eager_pricing import UPDATE, host_is_measured, yardsticks
from planner.lab.run.kernel_trace import busy_passes, exposed
from planner.lab.run.levels import FIRST, SETTING_UP, Task
from planner.lab.run.memory_tracker import MemoryTracker, optimizer_states
from planner.lab.run.parity import among_ranks, precisions, tiny_of
from planner.lab.run.rate import Core, Slowed, TimedSteps, host_seconds
from planner.lab.run.training import Run
from planner.units import GIB

SLACK = 30.0
"""Seconds that torch's own time limit of a collective is behind that of the watch, which names the rank."""


class OneRank:
    """What one rank does and has found so far."""

    def __init__(self, task: Task, place: Place, met: Met, directory: Path | None, teller: Teller) -> None:
        """``directory``: for its file where it was started by a process of this machine; None = the store has what it found."""
        self.task, self.place, self.met, self.directory, self.teller = task, place, met, directory, teller
        self.asked, self.on_cpu = task.asked, task.machine.device == "cpu"
        self.device = torch.device("cpu") if self.on_cpu else torch.device("cuda", torch.cuda.current_device())
        self.clock = Clock(self.device)
        self.steps = task.warmup + task.steps
        self.pace = Pace("validate", self.steps + 3, skip=3)
        self.entry: dict[str, Any] = {
            "rank": place.rank, "host": met.watch.hosts[place.rank], "name": met.names[place.rank], "steps": [],
            "pressure": [pressure()], "parity": None, "loss": [], "memory": {}, "host_seconds": None, "not_compiled": {},
            "attention": [],
        }  # fmt: skip
        self.core: Core | None = None
        """On a processor."""

    def doing(self, words: str, seconds: float | None = None, done: int | None = None) -> Any:
        """What is said when it fails, and after how long it has hung; shown where the number of steps ``done`` is given."""
        if done is not None:
            self.teller.tell(self.pace.at(words, done))
        return self.met.watch.doing(words, list(range(self.place.world)), seconds)

    def run(self) -> None:
        """Everything; what is written is whole after every step."""
        tracker = MemoryTracker() if self.on_cpu else None
        with self.doing("setting up the groups", SETTING_UP, 0):
            reset_memory(self.device)
            with tracker.patches() if tracker else contextlib.nullcontext():  # modules are hooked when they are sharded
                made = Run(self.asked.split, self.device)
        self.entry["stage"] = made.rank["pp"]
        if self.task.parity and not self._equal(made):
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
        if self.task.trace or not self.on_cpu:
            self._trace(made)
        self.entry["pressure"].append(pressure())
        self.put()

    def _processor(self) -> None:
        """The rate of its core, and what the host needs around layers that are split like these."""
        cluster, split = self.asked.cluster, self.asked.split
        self.core = Core(yardsticks(cluster))
        if host_is_measured(cluster, split):
            with self.doing("timing layers without work", SETTING_UP, 1):
                self.entry["host_seconds"] = dict(host_seconds(split, self.core.product))
        self.put()

    def put(self) -> None:
        """Writes what there is: it outlives the rank."""
        text = json.dumps(self.entry)
        if self.directory is not None:
            library.write_whole(self.directory / f"rank-{self.place.rank}.json", text)
        else:
            self.met.store.set(f"rank/{self.place.rank}", text)

    def _equal(self, made: Run) -> bool:
        """Whether a tiny model with the same degrees trains like one process."""
        for precision in precisions(self.asked.split):
            tiny = tiny_of(self.asked.split, precision)
            words = f"training a tiny model in {precision} to compare it with one process"
            with self.doing(words, max(self.task.step_seconds, SETTING_UP), 1):
                found = among_ranks(tiny, self.device, made.meshes)
            self.entry["parity"] = found if precision == "fp64" else {**self.entry["parity"], "rounded": found}
            self.put()
            if not found["equal"]:
                return False
        return True

    def _track(self, made: Run, tracker: MemoryTracker) -> None:
        """Two steps on a CPU with every storage followed: the second has optimizer states from its beginning."""
        with self.doing("a step with its memory followed", self.task.step_seconds * FIRST, 2):
            kept = [p for part in made.parts for p in part.parameters()]
            tracker.assign("weights", kept)
            with tracker.patches(), tracker:
                for step in range(2):
                    if step:
                        tracker.start()
                    self.met.watch.again(self.task.step_seconds * FIRST)
                    for optimizer in made.optimizers:
                        optimizer.zero_grad()
                    made.gradients(*made.data(step))
                    tracker.assign("gradients", [p.grad for p in kept if p.grad is not None])
                    made.clip()
                    for optimizer in made.optimizers:
                        optimizer.step()
                        tracker.assign("optimizer_states", optimizer_states(optimizer))
            peak = tracker.peak
            self.entry["memory"] |= {"held": dict(peak.held), "at_peak": peak.parts, "peak": peak.total}

    def _measure(self, made: Run) -> None:
        """Warm steps, then measured ones."""
        steps = TimedSteps(
            warmup=self.task.warmup, steps=self.task.steps, core=self.core, before=self._before, took=self._took
        )
        losses = steps.take(made, self.clock, [made.data(step) for step in range(2)])
        with self.doing("the last step"):
            ends = [losses[0], losses[-1]] if losses else []
            self.entry["loss"] = [made.total_loss(one.reshape(())) for one in ends]
        self.put()

    def _before(self, number: int, words: str) -> Any:
        return self.doing(words, self.task.step_seconds * (FIRST if number == 0 else 1.0), 3 + number)

    def _took(self, timed: list[Timed], slowed: Slowed | None) -> None:
        """Keeps the times of one step."""
        self.entry["steps"].append(summary(timed, slowed))
        self.entry["not_compiled"] = dict(fused_operators.NOT_COMPILED)
        self.entry["attention"] = sorted(set(RAN.values()))
        self.put()

    def _trace(self, made: Run) -> None:
        """One more step under torch's profiler, on one rank of each pipeline stage."""
        mine = all(made.rank[name] == 0 for name in ("replica", "shard", "cp", "tp"))
        path, stage = self.task.trace, made.rank["pp"]
        if path and stage:  # that of the user for the first stage
            path = path.with_name(f"{path.stem}.stage{stage}{path.suffix}")
        with self.doing("the traced step", self.task.step_seconds * FIRST, 3 + self.steps):
            if mine:
                self.entry |= traced_step(made, self.clock, self.device, path)
                self.entry["trace"] = str(path) if path else ""
            else:
                made.step(*made.data(0))
            dist.barrier()


def summary(timed: Sequence[Timed], slowed: Slowed | None) -> dict[str, Any]:
    """One step as numbers: [wall, busy] seconds of the whole and its phases, and of the passes of each stage and kind.

    Busy is what is compared: the stream of a GPU; of a CPU the thread's processor time, at the rate of the profile. B is the
    whole backward pass, W the part of it that was computed later. ``waited``: wall seconds inside of passes without work.
    """
    found: dict[str, Any] = {"actions": [], "waited": 0.0}
    groups: dict[tuple[int, str], dict[int, Any]] = {}
    for one in timed:
        rate = 1.0 if slowed is None else slowed.update if one.kind in UPDATE else slowed.passes
        times = [one.seconds, one.thread / rate]
        if one.kind not in PASSES:
            found[one.kind] = times
            continue
        found["waited"] += max(one.seconds - one.thread, 0.0)
        for kind in {"I": "B", "W": "BW"}.get(one.kind, one.kind):
            passes = groups.setdefault((one.stage, kind), {})
            passes[one.microbatch] = passes.get(one.microbatch, 0.0) + np.array(times)
    for (stage, kind), passes in sorted(groups.items()):
        rows = np.array(list(passes.values()))
        total, median = rows.sum(axis=0).tolist(), np.median(rows, axis=0).tolist()
        found["actions"].append({"stage": stage, "kind": kind, "total": total, "median": median})
    if slowed is not None:
        found["slowed"], found["update_slowed"] = slowed
    return found


# ------------------------------------------------------------------------------------------------ the trace


def traced_step(
    run: Run, clock: Clock, device: torch.device, path: Path | None, data: tuple[torch.Tensor, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Runs a step under torch's profiler; writes the trace (Chrome format) where a path is given. On a GPU ``exposed``
    communication and ``busy`` passes (``kernel_trace``), on a CPU, whose collectives run in threads that share its cores, {}."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    data = data or run.data(0)
    clock.named = True
    with profile(activities=activities) as trace:
        run.step(*data)
        if device.type == "cuda":
            torch.cuda.synchronize()
    clock.named = False
    with tempfile.TemporaryDirectory(prefix="plan-validate-") as name:
        file = Path(name) / "trace.json"
        trace.export_chrome_trace(str(file))
        text = file.read_text(encoding="utf-8")
    if path is not None:
        library.write_whole(path, text)
    if device.type != "cuda":
        return {}
    events = json.loads(text)["traceEvents"]
    return {"exposed": exposed(events), "busy": busy_passes(events)}


# ------------------------------------------------------------------------------------------------ the process


Report = Callable[[list[dict[str, Any]], Verdict | None], None]
"""Gets what all ranks have left and what went wrong (None: nothing), on one rank."""


def work(task: Task, place: Place, report: Report, show: Callable[[State], object] | None = None) -> None:
    """Runs this rank. ``report`` is called on the first rank, or on the one that found out what is wrong; not where the ranks
    were started by another process of this machine, which reads their files."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # a failed pipeline logs its whole schedule
    torch.set_flush_denormal(True)
    directory = Path(os.environ[DIRECTORY]) if DIRECTORY in os.environ else None
    show = to_file(directory / "state.json") if directory else show
    met: Met | None = None

    def ended(sentence: str) -> None:
        """This rank has to end because something failed; with a sentence on the one that reports."""
        if not sentence:
            return
        verdict = met.watch.verdict if met else None
        verdict = verdict or Verdict(kind="said", rank=place.rank, phase="the start", sentence=sentence)
        if directory is not None:
            library.write_whole(directory / "verdict.json", json.dumps(vars(verdict)))
            library.write_whole(directory / "failure.txt", sentence)
        else:
            report(_read(open_store(place), place.world), verdict)

    met = meet(place, task.machine.device, task.step_seconds, ended)
    heed_signals(met.watch)
    try:
        _job(OneRank(task, place, met, directory, Teller(show if place.rank == 0 else None)))
    except KeyboardInterrupt:
        met.watch.silence()
        if place.rank == 0 and not directory:
            report(_read(met.store, place.world), Verdict(kind="interrupted", rank=-1, phase="", sentence="stopped"))
        raise
    except Exception as error:
        met.watch.fail(error, facts(error, task.machine.device), in_words(error))
        raise
    if directory:
        (directory / f"done-{place.rank}").touch()
    elif place.rank == 0:
        report(_read(met.store, place.world), None)
    with contextlib.suppress(Exception):  # everything is measured and kept; nothing here can lose it
        dist.destroy_process_group()


def _read(store: Any, world: int) -> list[dict[str, Any]]:
    """What every rank has left so far in the store; ``store`` is a client of this thread."""
    return [json.loads(store.get(f"rank/{rank}")) for rank in range(world) if store.check([f"rank/{rank}"])]


def _job(one: OneRank) -> None:
    """From the process group to the last step."""
    task, place, met = one.task, one.place, one.met
    limit = timedelta(seconds=task.step_seconds * FIRST + SLACK)
    limit_groups(limit)
    with one.doing("joining the process group", SETTING_UP):
        dist.init_process_group(
            "gloo" if one.on_cpu else "cpu:gloo,cuda:nccl", store=dist.PrefixStore("job", met.store),
            rank=place.rank, world_size=place.world, timeout=limit,
        )  # fmt: skip
    one.run()
    with one.doing("the end"):
        dist.barrier()
    met.watch.done()


def limit_groups(limit: timedelta) -> None:
    """Process groups that torch makes by itself, for the dimensions of a mesh, get this limit: they have torch's own otherwise, ten
    minutes, whatever a step may take, and a mesh takes none."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, limit)


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
