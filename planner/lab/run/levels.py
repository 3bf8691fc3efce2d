"""What is asked of a validation, and its levels (``--rung``): what each needs, the highest that a machine allows. No torch here.

A level is a module of this package with ``run(task)``, which returns the content of validation.yaml as far as it has it
(``record.complete`` fills in the rest; {} on a rank that does not report), and ``obstacle(task)``: why this machine cannot
run it, or "". The limits of time are the same on every level and are said before the start.
"""

import contextlib
import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import detect
from planner.cluster import Cluster
from planner.detect import memory_is_off
from planner.errors import PlannerError, nearest_first
from planner.lab.launch.gpus import gpus_here
from planner.lab.launch.place import Place, place_from
from planner.lab.reference.split import EIGHT_BITS, KERNELS, LIKE_TORCH, Split, split_of
from planner.layout import CpMethod, Layout, Module, Order, Recompute, is_v_shaped
from planner.plan_file import Plan, plan_from_dict
from planner.record import record
from planner.rules import Job, check
from planner.timeline.priced_plan import Priced, price
from planner.trainer import Trainer, load_trainer
from planner.units import GIB, KIB, format_bytes, format_seconds
from planner.workload import LOW_PRECISIONS, Workload

START = 120.0
"""Seconds that ranks wait for each other."""
SETTING_UP = 300.0
"""Seconds for modules, weights and groups, and for the comparison with one process."""
FIRST = 4.0
"""The first steps may take so many times longer: kernels are chosen, communicators are made."""
OUT_OF_MAIN_MEMORY = "because main memory was used up"
"""Why the kernel ended a process, at the end of a sentence."""
PREDICTED = 10.0
"""A step may take so many times what is predicted for it, whatever --timeout is."""
LONGER = "; if {what} only needs longer, raise --timeout"
"""Said of what has hung."""

OTHER_MEMORY = (
    "memory is that of torchtitan, predicted and measured alike: the {size} that the plan names are what {trainer} needs, and are "
    "not compared here (--trainer megatron or --trainer-log on its GPUs does that)"
)
"""Said of a plan of another trainer, whose peak is not in the tables."""
POSITIONS = ("first", "middle", "last")
"""The cost model's three kinds of stages, by ``timeline.passes.stage_kind``."""

ONE_PROCESS = "it is one process; start it without torchrun or srun"
"""Why a launcher cannot start a level."""


# ------------------------------------------------------------------------------------------------ the plan


@record
class Question:
    """A plan as the torch model runs it and as it is priced."""

    workload: Workload
    cluster: Cluster
    trainer: Trainer
    layout: Layout
    split: Split
    changes: tuple[str, ...]
    """What was changed so that the torch model can be compared with it, in words; empty for plans of torch's own trainers."""
    unchecked: tuple[str, ...] = ()
    """What of the plan is neither run nor priced here, a sentence each."""

    @property
    def job(self) -> Job:
        """What is trained, where and by which trainer."""
        return Job(workload=self.workload, cluster=self.cluster, trainer=self.trainer)

    def priced(self, trainer: Trainer | None = None) -> Priced:
        """The layout as the cost model has it, with another trainer where one is given."""
        return price(dataclasses.replace(self.job, trainer=trainer or self.trainer), self.layout)


def question(plan: Plan) -> Question:
    """What to run and to price for a plan. Raises PlannerError for what the torch model cannot say anything about."""
    trainer, layout, changes = plan.load_trainer(), plan.layout, []
    workload, unchecked = _without(plan.workload, layout)
    if trainer.code_base not in LIKE_TORCH:
        changes.append(f"trainer torchtitan instead of {trainer.name}, whose memory the torch model has not")
        trainer = load_trainer("torchtitan")
        layout, more = _as_torchtitan(layout)
        changes += [*more, OTHER_MEMORY.format(size=format_bytes(plan.prediction.memory_peak_gib * GIB), trainer=plan.trainer)]
    cluster = plan.cluster()
    try:
        on_device = layout.replace(offload_optimizer=0)  # states on the host are run whichever trainer has them, and so is fp8
        known = workload.precision in trainer.legal.precisions or workload.precision not in EIGHT_BITS
        check(Job(workload=workload if known else dataclasses.replace(workload, precision="fp8"), cluster=cluster, trainer=trainer),
              on_device)  # fmt: skip
    except PlannerError as error:
        if not changes:
            raise
        raise PlannerError(
            f"the plan is for trainer {plan.trainer}, whose memory the torch model has not, and as a torchtitan plan it is "
            f"refused: {error}; plan with --trainer torchtitan or fsdp"
        ) from error
    return Question(
        workload=workload, cluster=cluster, trainer=trainer, layout=layout,
        split=split_of(workload, trainer, layout), changes=tuple(changes), unchecked=tuple(unchecked),
    )  # fmt: skip


def _without(workload: Workload, layout: Layout) -> tuple[Workload, list[str]]:
    """The workload without what the torch model has not, and can be left out of the run and of the prediction alike; each named."""
    unchecked = []
    if workload.precision in EIGHT_BITS and workload.model.is_moe:
        unchecked.append(
            f"precision {workload.precision} of routed experts: they run in bf16 and are priced in {workload.precision}"
        )
    if workload.precision in EIGHT_BITS and workload.model.is_mla and int(layout.tp) > 1:
        unchecked.append(
            f"precision {workload.precision} of MLA's down projections, whole on each tensor-parallel rank: they run in bf16"
        )
    if workload.precision in EIGHT_BITS and workload.precision not in KERNELS:
        unchecked.append(
            f"time of products in {workload.precision}: they are emulated, operands rounded as planned and multiplied as what they "
            "then stand for"
        )
    if workload.precision in LOW_PRECISIONS and workload.precision not in EIGHT_BITS:
        unchecked.append(
            f"precision {workload.precision}: linear layers run and are priced in bf16; their casts, products and bytes in "
            f"{workload.precision} are not"
        )
        workload = dataclasses.replace(workload, precision="bf16")
    if workload.model.mtp_layers and int(layout.pp) > 1 and is_v_shaped(int(layout.schedule)):
        modules = "prediction modules" if workload.model.mtp_layers > 1 else "prediction module"
        unchecked.append(
            f"{workload.model.mtp_layers} multi-token {modules}: left out of the run and of the prediction, as the torch model has "
            "not two uses of an embedding in two virtual stages of a rank; their weights, activations and passes come on top"
        )
        model = dataclasses.replace(workload.model, mtp_layers=0, published_parameters=0.0, published_active_parameters=0.0)
        workload = dataclasses.replace(workload, model=model)
    if workload.model.is_moe and workload.expert_imbalance != 1.0:
        unchecked.append(
            "routing of a trained router: every expert gets the same number of tokens, in the run and in the prediction"
        )
        workload = dataclasses.replace(workload, expert_imbalance=1.0)
    return workload, unchecked


def _as_torchtitan(layout: Layout) -> tuple[Layout, list[str]]:
    """The nearest layout that torchtitan has, and what was changed."""
    wanted: dict[str, int] = {
        "zero": max(int(layout.zero), 2), "sequence_parallel": int(int(layout.tp) > 1), "order": int(Order.TP_CP_EP_DP_PP),
    }  # fmt: skip
    if int(layout.cp) > 1:
        wanted["cp_method"] = int(CpMethod.ALLGATHER)
    if int(layout.recompute) == Recompute.SELECTIVE:
        wanted["recompute_modules"] = int(Module.EVERY_SECOND_MATMUL)
    new = layout.replace(**wanted)
    before, after = layout.to_dict(), new.to_dict()
    return new, [f"{name} {after[name]} instead of {before[name]}" for name in wanted if after[name] != before[name]]


# ------------------------------------------------------------------------------------------------ the task


@record
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
    gpu_memory: tuple[float, ...] = ()
    """Bytes of the first GPU as its driver says; none where there is no GPU."""


@record
class Task:
    """What is asked of a level."""

    plan: Plan
    """The plan as it was read."""
    asked: Question
    """The same as the torch model runs it and as it is priced."""
    machine: Machine
    """Where."""
    ranks: tuple[int, ...] = ()
    """Ranks that the user named; none = the level chooses."""
    steps: int = 5
    """Steps that are measured."""
    warmup: int = 2
    """Steps before them that are not."""
    timeout: float = 60.0
    """--timeout: seconds after which a step has hung, where ten times its prediction are not more."""
    parity: bool = True
    """Train a tiny model with the same degrees first and compare it with one process."""
    trace: Path | None = None
    """Where a trace of the torch profiler goes; None = none."""
    why: str = ""
    """Why this level, in one sentence."""
    which: str = ""
    """Which run it is of several, said by a bar."""
    report: Callable[[dict[str, Any]], None] = lambda _: None
    """Writes and prints what was found; for a rank that has to end at once, on which ``run`` does not return."""

    @property
    def step_seconds(self) -> float:
        """Seconds after which a step has hung: --timeout, or ten times its prediction where that is more."""
        return max(self.timeout, PREDICTED * self.plan.prediction.step_time_s)

    def to_json(self) -> str:
        """What a rank of level ``full`` has to know; ``task_of_rank`` reads it."""
        same = {name: getattr(self, name) for name in ("steps", "warmup", "timeout", "parity")}
        trace = str(self.trace.resolve()) if self.trace else None
        return json.dumps({"plan": self.plan.to_dict(), "device": self.machine.device, "trace": trace, **same})

    def chosen_ranks(self) -> list[int]:
        """The ranks that the user named, else one of the first, the second and the last stage. Raises PlannerError."""
        split = self.asked.split
        for one in self.ranks:
            if not 0 <= one < split.world:
                raise PlannerError(f"--rank {one}: the plan has ranks 0 to {split.world - 1}")
        stages = sorted({0, min(1, split.pp - 1), split.pp - 1})
        return list(dict.fromkeys(self.ranks)) or [stage * (split.world // split.pp) for stage in stages]


def task_of_rank(text: str, place: Place) -> Task:
    """The task of one rank, from ``Task.to_json``."""
    given = json.loads(text)
    plan, device, trace = plan_from_dict(given.pop("plan")), given.pop("device"), given.pop("trace")
    machine = Machine(device=device, gpus=0, name="", memory=0.0, cores=1, place=place)
    return Task(plan=plan, asked=question(plan), machine=machine, trace=Path(trace) if trace else None, **given)


def step_limits(task: Task, steps: int) -> str:
    """The part of the sentence about limits that all levels with steps share."""
    limit, predicted = task.step_seconds, format_seconds(task.plan.prediction.step_time_s)
    what = "--timeout" if limit == task.timeout else f"{PREDICTED:.0f} times the {predicted} that are predicted"
    return (
        f"{format_seconds(limit)} for each of {steps} steps ({what}; {format_seconds(FIRST * limit)} for the first), then "
        "what hangs is named and ended"
    )


def longer(task: Task) -> str:
    """The end of the sentence about a step that has hung."""
    predicted, limit = format_seconds(task.plan.prediction.step_time_s), format_seconds(task.step_seconds)
    return f" (predicted: {predicted}; it may take {limit}){LONGER.format(what='a step')}"


# ------------------------------------------------------------------------------------------------ the levels


@dataclass(frozen=True)
class Level:
    """One way to compare a plan with reality."""

    name: str
    """As ``--rung`` takes it."""
    what: str
    """What it does, in a few words."""
    module: str
    """Of this package."""

    @property
    def code(self) -> Any:
        """Its module, with ``run`` and ``obstacle``."""
        return importlib.import_module(f"planner.lab.run.{self.module}")


LEVELS = (
    Level("full", "the plan itself on all its ranks", "full"),
    Level("truncated", "fewer layers and replicas", "truncated"),
    Level("rank", "some ranks, one after the other on one device", "one_rank"),
    Level("meta", "memory on fake tensors, no GPU needed", "meta"),
)
"""The highest first."""


def machine_here(device: str | None, environment: Mapping[str, str] = os.environ) -> Machine:
    """This machine. ``device`` cpu or cuda, None = cuda where there is a GPU. Raises PlannerError."""
    gpus = gpus_here(device)
    return Machine(
        device="cuda" if gpus.count else "cpu", gpus=gpus.count, name=gpus.names[0] if gpus.count else detect.processor(),
        memory=free_memory(), cores=len(os.sched_getaffinity(0)), place=place_from(environment), gpu_memory=gpus.memory[:1],
    )  # fmt: skip


def other_size(task: Task) -> str:
    """The sentence about GPUs whose memory is not that of the plan's hardware; "" where it is, or is not known."""
    hardware, found = task.asked.cluster.hardware, sum(task.machine.gpu_memory)
    if hardware.is_cpu or not memory_is_off(found, float(hardware.usable_memory)):
        return ""
    return (
        f"{task.machine.name} has {format_bytes(found)} of memory and the plan's {hardware.name} "
        f"{format_bytes(float(hardware.usable_memory))}: "
        "whether the plan fits here is another question than whether it fits there"
    )


def named(wanted: str) -> Level | None:
    """The level of a name; None for ``auto``. Raises PlannerError."""
    names = {level.name: level for level in LEVELS}
    if wanted != "auto" and wanted not in names:
        known = ", ".join(f"{level.name} ({level.what})" for level in LEVELS)
        nearest = nearest_first(wanted, ["auto", *names])[0]
        raise PlannerError(f"unknown level '{wanted}', nearest: {nearest}; known: auto (the highest possible), {known}")
    return names.get(wanted)


def choose(task: Task, wanted: str) -> tuple[Level, str]:
    """The level, and in one sentence why this one and not a higher one. Raises PlannerError.

    ``wanted`` is the name of a level, or ``auto`` for the highest that the machine allows.
    """
    level = named(wanted)
    if level is not None:
        obstacle = level.code.obstacle(task)
        if obstacle:
            raise PlannerError(f"--rung {wanted} ({level.what}) is not possible here: {obstacle}")
        return level, f"asked for with --rung {wanted}"
    passed: list[str] = []
    hardware = task.asked.cluster.hardware
    for level in LEVELS:
        obstacle = level.code.obstacle(task)
        if not obstacle and level.name != "meta" and task.machine.device == "cpu" and not hardware.is_cpu:
            obstacle = f"there is no GPU here and the plan is for {hardware.name}, whose times a CPU says nothing about"
        if not obstacle:
            return level, "; ".join(passed) if passed else "the highest level, and this machine can run it"
        passed.append(f"not {level.name}: {obstacle}")
    raise PlannerError(f"nothing can be run here: {'; '.join(passed)}")


def free_memory() -> float:
    """Bytes of main memory that can be had without swapping; all of it where the kernel does not say."""
    available = kernel_says("/proc/meminfo", "MemAvailable:")
    return available * KIB if available else float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def kills() -> int:
    """Processes that the kernel has ended because memory ran out, since it started."""
    return kernel_says("/proc/vmstat", "oom_kill")


def kernel_says(file: str, name: str) -> int:
    """A number in a file of the kernel; 0 where it is not there."""
    with contextlib.suppress(OSError, ValueError):
        words = [line.split() for line in Path(file).read_text(encoding="utf-8").splitlines()]
        return next((int(line[1]) for line in words if line[0] == name), 0)
    return 0
