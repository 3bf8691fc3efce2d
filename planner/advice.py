"""When nothing fits: the cheapest changes that would make it fit, each searched and priced, one command line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner import library
from planner.cluster import Cluster
from planner.costs import rates_of, usd_per_million_tokens
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.hardware import load_hardware
from planner.rules import Job, check_workload
from planner.search import Pins, search

LARGEST_GROWTH = 64
"""More GPUs are tried up to this many times the number asked for."""
SHORTEST_SEQUENCE = 512
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

    def to_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return vars(self)


def advise(job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> list[Advice]:
    """Changes in the order: more GPUs, other GPUs, shorter sequence, smaller optimizer states, adapters.

    ``command`` renders the user's command with some flags replaced; ``progress`` is told what is being tried.
    """
    found: list[Advice] = []
    for attempts in (_more_gpus, _other_gpus, _shorter_sequence, _smaller_states, _adapters):
        found += attempts(job, pins, command, progress)
    return found


def _try(job: Job, pins: Pins, change: str, command: str) -> Advice | None:
    """The best plan of a changed job, or None when it still does not fit or is not possible at all."""
    try:
        check_workload(job.workload, job.cluster, job.trainer)
        finding = search(job, pins, top=1)
    except PlannerError:
        return None
    if not finding.fit:
        return None
    best = finding.estimates[0]
    step = float(best.step_time[0])
    rate = job.workload.tokens / step
    return Advice(
        change=change, command=command, layout=layout_text(finding.layouts[0]), step_time_s=step, tokens_per_second=rate,
        usd_per_million_tokens=usd_per_million_tokens(rates_of(job.cluster.hardware), job.cluster.num_gpus, rate),
    )  # fmt: skip


def _with_gpus(job: Job, gpus: int) -> Job:
    return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, num_gpus=gpus))


def _more_gpus(job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> list[Advice]:
    """Fewest GPUs of this kind: doubled until it fits, then the half step in between."""
    for gpus in _sizes(job.cluster.num_gpus):
        progress(f"{gpus} GPUs")
        advice = _try(_with_gpus(job, gpus), pins, f"{gpus} GPUs of this kind", command(gpus=gpus))
        if advice:
            return [advice]
    return []


def _sizes(asked: int) -> Iterator[int]:
    """1.5, 2, 3, 4, 6, 8, ... times the number asked for, whole numbers only."""
    growth = 2
    while growth <= LARGEST_GROWTH:
        if asked * growth * 3 % 4 == 0:
            yield asked * growth * 3 // 4
        yield asked * growth
        growth *= 2


def _other_gpus(job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> list[Advice]:
    """The same number of GPUs with more memory, cheapest tokens first."""
    found = []
    for name in library.names("hardware"):
        hardware = load_hardware(name)
        if hardware.usable_memory <= job.cluster.hardware.usable_memory:
            continue
        progress(name)
        other = dataclasses.replace(job, cluster=Cluster(hardware=hardware, num_gpus=job.cluster.num_gpus))
        advice = _try(other, pins, f"{job.cluster.num_gpus} x {name}", command(hardware=name))
        if advice:
            found.append(advice)
    return sorted(found, key=_cost)[:OTHER_GPUS]


def _cost(advice: Advice) -> tuple[bool, float]:
    return advice.usd_per_million_tokens is None, advice.usd_per_million_tokens or advice.step_time_s


def _shorter_sequence(
    job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]
) -> list[Advice]:
    """Halved until it fits, with as many tokens per step."""
    length, batch = job.workload.sequence_length // 2, job.workload.global_batch_size * 2
    while length >= SHORTEST_SEQUENCE:
        progress(f"sequence length {length}")
        shorter = dataclasses.replace(
            job, workload=job.workload.replace(sequence_length=length, global_batch_size=batch)
        )
        line = command(sequence_length=length, global_batch_size=batch)
        advice = _try(shorter, pins, f"sequences of {length} tokens, as many tokens per step", line)
        if advice:
            return [advice]
        length, batch = length // 2, batch * 2
    return []


def _smaller_states(job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> list[Advice]:
    """Adam with bf16 moments, then with 8-bit moments; the first that fits."""
    for optimizer, text in (("adam_bf16", "Adam with bf16 moments"), ("adam_8bit", "Adam with 8-bit moments")):
        if optimizer == job.workload.optimizer or optimizer not in job.trainer.optimizers:
            continue
        progress(text)
        smaller = dataclasses.replace(job, workload=job.workload.replace(optimizer=optimizer))
        advice = _try(smaller, pins, text, command(optimizer=optimizer))
        if advice:
            return [advice]
    return []


def _adapters(job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> list[Advice]:
    """Low-rank adapters on frozen weights."""
    if job.workload.lora_rank:
        return []
    progress("low-rank adapters")
    adapted = dataclasses.replace(job, workload=job.workload.replace(lora_rank=LORA_RANK))
    advice = _try(
        adapted, pins, f"LoRA of rank {LORA_RANK}: frozen weights, adapters trained", command(lora_rank=LORA_RANK)
    )
    return [advice] if advice else []
