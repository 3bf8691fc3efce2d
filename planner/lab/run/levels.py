"""The rungs of a validation: what each needs, and the highest that a machine allows. No torch here.

A rung is a module of this package with ``run(task, say)``, which returns the content of validation.yaml as far as it has it
(``record.complete`` fills in the rest; {} on a rank that does not report), and ``obstacle(task)``: why this machine cannot
run it, or "".
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner import detect
from planner.errors import PlannerError, nearest_first
from planner.lab.launch.place import Place, place_from
from planner.lab.launch.state import State, same

if TYPE_CHECKING:
    from planner.lab.run.predicted_ranks import Question
    from planner.plan_file import Plan

Say = Callable[[str], None]
"""Told what is going on, for a person who waits."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to run on."""

    device: str
    """"cuda" where there is a GPU (or one is asked for), else "cpu"."""
    gpus: int
    """GPUs of this machine; 0 when the CPU is to be used."""
    name: str
    """Of the first GPU as the driver says it, or of the processor."""
    memory: float
    """Bytes of main memory that are free for use."""
    cores: int
    """Cores that this process may use."""
    place: Place | None
    """Where this process stands among the ranks that torchrun or srun started; None = started by hand."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked of a rung."""

    plan: Plan
    """The plan as it was read."""
    asked: Question
    """The same as the torch model runs it and as it is priced."""
    machine: Machine
    """Where."""
    ranks: tuple[int, ...] = ()
    """Ranks that the user named; none = the rung chooses."""
    steps: int = 5
    """Steps that are measured."""
    warmup: int = 2
    """Steps before them that are not."""
    timeout: float = 60.0
    """Seconds after which a step has hung."""
    parity: bool = True
    """Train a tiny model with the same degrees first and compare it with one process."""
    trace: Path | None = None
    """Where a trace of the torch profiler goes; None = none."""
    why: str = ""
    """Why this rung, in one sentence."""
    shown: Callable[[State], State] = same
    """What a bar draws of a state: where this run is one of several, all of them."""
    report: Callable[[dict[str, Any]], None] = lambda _: None
    """Writes and prints what was found; for a rank that has to end at once, on which ``run`` does not return."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to hold a plan against reality."""

    name: str
    """As ``--rung`` takes it."""
    what: str
    """What it does, in a few words."""
    module: str
    """Of this package; has run(task, say) and obstacle(task)."""
    shows_itself: bool = False
    """It draws a progress bar of its own."""

    def obstacle(self, task: Task) -> str:
        """Why the machine cannot run it, a part of a sentence; "" when it can."""
        return str(importlib.import_module(self.module).obstacle(task))

    def run(self, task: Task, say: Say) -> dict[str, Any]:
        """What was found, {} on a rank that does not report. Raises PlannerError for what is the user's to change; a run that
        fails is a result."""
        found: dict[str, Any] = importlib.import_module(self.module).run(task, say)
        return found


RUNGS: tuple[Rung, ...] = (
    Rung(name="full", what="the plan itself on all its ranks", module="planner.lab.run.full", shows_itself=True),
    Rung(name="truncated", what="fewer layers and replicas", module="planner.lab.run.truncated", shows_itself=True),
    Rung(
        name="rank",
        what="some ranks, one after the other on one device",
        module="planner.lab.run.one_rank",
        shows_itself=True,
    ),
    Rung(name="meta", what="memory on fake tensors, no GPU needed", module="planner.lab.run.meta_run"),
)
"""The highest first."""


def machine_here(device: str | None, environment: Mapping[str, str] = os.environ) -> Machine:
    """This machine. ``device`` cpu or cuda, None = cuda where there is a GPU. Raises PlannerError."""
    names = [] if device == "cpu" else detect.local_devices()
    gpus = len(names)
    if not gpus and device != "cpu" and (device == "cuda" or Path("/dev/kfd").exists()):
        from planner.lab.launch.torchrun import count_by_torch  # drivers without nvidia-smi

        gpus = count_by_torch()
    if device == "cuda" and not gpus:
        raise PlannerError("--device cuda: neither the driver nor torch reports a GPU here; leave it out")
    return Machine(
        device="cuda" if gpus else "cpu", gpus=gpus, name=names[0] if names else "GPU" if gpus else detect.processor(),
        memory=free_memory(), cores=len(os.sched_getaffinity(0)), place=place_from(environment),
    )  # fmt: skip


def named(wanted: str) -> Rung | None:
    """The rung of a name; None for ``auto``. Raises PlannerError."""
    names = {rung.name: rung for rung in RUNGS}
    if wanted != "auto" and wanted not in names:
        known = ", ".join(f"{rung.name} ({rung.what})" for rung in RUNGS)
        nearest = nearest_first(wanted, ["auto", *names])[0]
        raise PlannerError(f"unknown rung '{wanted}', nearest: {nearest}; known: auto (the highest possible), {known}")
    return names.get(wanted)


def choose(task: Task, wanted: str) -> tuple[Rung, str]:
    """The rung, and in one sentence why this one and not a higher one. Raises PlannerError.

    ``wanted`` is the name of a rung, or ``auto`` for the highest that the machine allows.
    """
    rung = named(wanted)
    if rung is not None:
        obstacle = rung.obstacle(task)
        if obstacle:
            raise PlannerError(f"--rung {wanted} ({rung.what}) is not possible here: {obstacle}")
        return rung, f"asked for with --rung {wanted}"
    passed: list[str] = []
    for rung in RUNGS:
        obstacle = rung.obstacle(task) or automatic_obstacle(task, rung)
        if not obstacle:
            return rung, "; ".join(passed) if passed else "the highest rung, and this machine can run it"
        passed.append(f"not {rung.name}: {obstacle}")
    raise PlannerError(f"nothing can be run here: {'; '.join(passed)}")


def automatic_obstacle(task: Task, rung: Rung) -> str:
    """Why a rung that is possible is not taken unless it is asked for."""
    hardware = task.asked.cluster.hardware
    on_cpu = task.machine.device == "cpu"
    if rung.name != "meta" and on_cpu and not hardware.is_cpu:
        return f"there is no GPU here and the plan is for {hardware.name}, whose times a CPU says nothing about"
    return ""


def free_memory() -> float:
    """Bytes of main memory that can be had without swapping; all of it where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    from planner.units import KIB

    found = [float(line.split()[1]) * KIB for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
