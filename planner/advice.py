"""When nothing fits: the cheapest changes that would make it fit, each searched and priced, one command line each."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner import library
from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.costs import rates_of, usd_per_million_tokens
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout, Schedule
from planner.options import alternatives
from planner.rules import Job, allowed, check_workload
from planner.search import Pins, fits, search
from planner.workload import PRECISIONS

DOUBLINGS = 6
"""More GPUs are tried up to 64 times the number asked for."""
SHORTEST_SEQUENCE = 512
SMALLER_STATES = {"adam_bf16": "Adam with bf16 moments", "adam_8bit": "Adam with 8-bit moments"}
LORA_RANK = 16
OTHER_GPUS = 3
"""Other GPUs are listed up to this many, cheapest step first."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change that makes the job fit."""

    change: str
    """In words."""
    command: str
    """The command line that plans it."""
    layout: str
    """The best layout then."""
    step_time_s: float
    tokens_per_second: float
    """Of the whole job."""
    usd_per_million_tokens: float | None
    """At the profile's first price; None without one."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """An option, or a precision, that would make the best plan faster."""

    flag: str
    """The flag that chooses it."""
    what: str
    """What it does."""
    gain: float
    """Part of the step time that it saves, by pricing the plan both ways."""
    step_time_s: float
    layout: str
    """The layout that is fastest then; '' = that of the best plan."""


GAINS = 3
"""Options that would be faster are listed up to this many, the largest gain first."""
LEAST_GAIN = 0.01
FP8 = {"Hopper": ("fp8", "fp8_row", "fp8_block"), "Blackwell": ("fp8", "fp8_row", "mxfp8")}
"""Kinds of fp8 by architecture: scales per 32 values need Blackwell, which has no kernel for blocks of 128; others know one
scale per tensor."""


def gains(job: Job, layouts: Sequence[Layout], said: Collection[str] = ()) -> list[Gain]:
    """What would make the best plan faster and still fit: options of the trainer that were not stated, and lower precisions; of
    several values the best, the largest gains first.

    ``layouts``: the best plans. Each alternative is priced for all of them, and for the first with two virtual stages, which some
    need: its gain is that of the best one over the first plan as it is.
    """
    first = layouts[0]
    more = [first.replace(vpp=2, schedule=int(Schedule.INTERLEAVED))] if int(first.pp) > 1 and int(first.vpp) == 1 else []
    columns = Layout.stack([*layouts, *more])
    now = float(estimate(job.workload, job.cluster, job.trainer, first).step_time[0])
    best: dict[str, Gain] = {}
    for flag, name, what, one in _faster(job, said):
        legal = columns.take(allowed(one, columns))
        if not len(legal):
            continue
        found = estimate(one.workload, one.cluster, one.trainer, legal)
        step = np.where(fits(one, found), found.step_time, np.inf)
        row = int(np.argmin(step))
        gain = 1.0 - float(step[row]) / now
        if gain >= LEAST_GAIN and (name not in best or gain > best[name].gain):
            layout = legal.row(row)
            other = "" if layout == first else layout_text(layout)
            best[name] = Gain(flag=flag, what=what, gain=gain, step_time_s=float(step[row]), layout=other)
    return sorted(best.values(), key=lambda one: -one.gain)[:GAINS]


def _faster(job: Job, said: Collection[str]) -> Iterator[tuple[str, str, str, Job]]:
    """Flag, what it is about, text and job of everything that could be faster and that the job can be."""
    for one in alternatives(job, said):
        yield one.flag, one.option, one.what, one.job
    if job.workload.precision == "bf16":
        for name in FP8.get(job.cluster.hardware.arch.split()[0], ("fp8",)):
            changed = dataclasses.replace(job, workload=job.workload.replace(precision=name))
            with contextlib.suppress(PlannerError):
                check_workload(changed.workload, changed.cluster, changed.trainer)
                yield f"--precision {name}", "precision", PRECISIONS[name], changed


Change = tuple[str, Job, dict[str, Any]]
"""In words, the changed job, and the flags that change in the command line."""


def advise(job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> list[Advice]:
    """Changes in the order: more GPUs, other GPUs, shorter sequence, smaller optimizer states, adapters.

    ``command`` renders the user's command with some flags replaced; ``progress`` hears what is being tried.
    """
    found: list[Advice] = []
    for kind, changes in _changes(job):
        attempts = (_try(change, pins, command, progress) for change in changes)
        fits = (advice for advice in attempts if advice)
        found += sorted(fits, key=_cost)[:OTHER_GPUS] if kind == "other GPUs" else itertools.islice(fits, 1)
    return found


def _try(change: Change, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> Advice | None:
    """The best plan of a changed job, or None when it still does not fit or is not possible at all."""
    text, job, flags = change
    progress(text)
    try:
        check_workload(job.workload, job.cluster, job.trainer)
        finding = search(job, pins, top=1)
    except PlannerError:
        return None
    if not finding.fit:
        return None
    step = float(finding.estimates[0].step_time[0])
    rate = job.workload.tokens / step
    return Advice(
        change=text, command=command(**flags), layout=layout_text(finding.layouts[0]), step_time_s=step,
        tokens_per_second=rate,
        usd_per_million_tokens=usd_per_million_tokens(rates_of(job.cluster.hardware), job.cluster.num_gpus, rate),
    )  # fmt: skip


def _cost(advice: Advice) -> tuple[bool, float]:
    return advice.usd_per_million_tokens is None, advice.usd_per_million_tokens or advice.step_time_s


def _changes(job: Job) -> Iterator[tuple[str, Iterator[Change]]]:
    """Kinds of change, and the changes of each, the smallest first."""
    work, gpus, here = job.workload, job.cluster.num_gpus, job.cluster.hardware

    def changed(text: str, **flags: Any) -> Change:
        """Other fields of the workload, which have the names of their flags."""
        return text, dataclasses.replace(job, workload=work.replace(**flags)), flags

    def moved(text: str, profile: HardwareProfile, number: int, **flags: Any) -> Change:
        """Another cluster."""
        return text, dataclasses.replace(job, cluster=Cluster(hardware=profile, num_gpus=number)), flags

    quarters = [gpus * 2**power * part for power in range(1, DOUBLINGS + 1) for part in (3, 4)]
    more = [size // 4 for size in quarters if size % 4 == 0]  # 1.5, 2, 3, 4, 6, 8, ... times as many
    yield "more GPUs", (moved(f"{size} GPUs of this kind", here, size, gpus=size) for size in more)
    others = ((name, load_hardware(name)) for name in library.names("hardware"))
    larger = ((name, one) for name, one in others if one.usable_memory > here.usable_memory)
    yield "other GPUs", (moved(f"{gpus} x {name}", one, gpus, hardware=name) for name, one in larger)
    lengths = [(work.sequence_length // 2**power, work.global_batch_size * 2**power) for power in range(1, 28)]
    yield "shorter sequences", (
        changed(f"sequences of {length} tokens, as many tokens per step", sequence_length=length, global_batch_size=batch)
        for length, batch in lengths
        if length >= SHORTEST_SEQUENCE
    )
    yield "smaller states", (
        changed(text, optimizer=name)
        for name, text in SMALLER_STATES.items()
        if name != work.optimizer and name in job.trainer.optimizers
    )
    if not work.lora_rank:
        text = f"LoRA of rank {LORA_RANK}: frozen weights, adapters trained"
        yield "adapters", iter([changed(text, lora_rank=LORA_RANK)])
