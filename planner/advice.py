"""When nothing fits: the cheapest changes that would make it fit, each searched and priced, one command line each."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from planner import library
from planner.cluster import Cluster
from planner.costs import rates_of, usd_per_million_tokens
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.hardware import load_hardware
from planner.rules import Job, check_workload
from planner.search import Pins, search

DOUBLINGS = 6
"""More GPUs are tried up to 64 times the number asked for."""
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


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A job changed in one way."""

    text: str
    job: Job
    flags: dict[str, object]
    """What it changes in the command line."""


def advise(job: Job, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> list[Advice]:
    """Changes in the order: more GPUs, other GPUs, shorter sequence, smaller optimizer states, adapters.

    ``command`` renders the user's command with some flags replaced; ``progress`` hears what is being tried.
    """
    found: list[Advice] = []
    for changes in (_more_gpus, _other_gpus, _shorter_sequence, _smaller_states, _adapters):
        attempts = (_try(change, pins, command, progress) for change in changes(job))
        fits = (advice for advice in attempts if advice)
        found += sorted(fits, key=_cost)[:OTHER_GPUS] if changes is _other_gpus else itertools.islice(fits, 1)
    return found


def _try(change: _Change, pins: Pins, command: Callable[..., str], progress: Callable[[str], None]) -> Advice | None:
    """The best plan of a changed job, or None when it still does not fit or is not possible at all."""
    progress(change.text)
    job = change.job
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
        change=change.text, command=command(**change.flags), layout=layout_text(finding.layouts[0]), step_time_s=step,
        tokens_per_second=rate,
        usd_per_million_tokens=usd_per_million_tokens(rates_of(job.cluster.hardware), job.cluster.num_gpus, rate),
    )  # fmt: skip


def _cost(advice: Advice) -> tuple[bool, float]:
    return advice.usd_per_million_tokens is None, advice.usd_per_million_tokens or advice.step_time_s


def _changed(job: Job, text: str, **flags: Any) -> _Change:
    """The job with other fields of its workload, which have the names of their flags."""
    return _Change(text=text, job=dataclasses.replace(job, workload=job.workload.replace(**flags)), flags=flags)


def _more_gpus(job: Job) -> Iterator[_Change]:
    """Fewest GPUs of this kind: doubled until it fits, with the half step in between: 1.5, 2, 3, 4, 6, 8, ... times."""
    quarters = [job.cluster.num_gpus * 2**power * part for power in range(1, DOUBLINGS + 1) for part in (3, 4)]
    for gpus in (size // 4 for size in quarters if size % 4 == 0):
        cluster = dataclasses.replace(job.cluster, num_gpus=gpus)
        text = f"{gpus} GPUs of this kind"
        yield _Change(text=text, job=dataclasses.replace(job, cluster=cluster), flags={"gpus": gpus})


def _other_gpus(job: Job) -> Iterator[_Change]:
    """The same number of GPUs with more memory."""
    gpus = job.cluster.num_gpus
    for name in library.names("hardware"):
        hardware = load_hardware(name)
        if hardware.usable_memory > job.cluster.hardware.usable_memory:
            other = dataclasses.replace(job, cluster=Cluster(hardware=hardware, num_gpus=gpus))
            yield _Change(text=f"{gpus} x {name}", job=other, flags={"hardware": name})


def _shorter_sequence(job: Job) -> Iterator[_Change]:
    """Halved until it fits, with as many tokens per step."""
    length, batch = job.workload.sequence_length // 2, job.workload.global_batch_size * 2
    while length >= SHORTEST_SEQUENCE:
        text = f"sequences of {length} tokens, as many tokens per step"
        yield _changed(job, text, sequence_length=length, global_batch_size=batch)
        length, batch = length // 2, batch * 2


def _smaller_states(job: Job) -> Iterator[_Change]:
    """Adam with bf16 moments, then with 8-bit moments."""
    for optimizer, text in (("adam_bf16", "Adam with bf16 moments"), ("adam_8bit", "Adam with 8-bit moments")):
        if optimizer != job.workload.optimizer and optimizer in job.trainer.optimizers:
            yield _changed(job, text, optimizer=optimizer)


def _adapters(job: Job) -> Iterator[_Change]:
    """Low-rank adapters on frozen weights."""
    if not job.workload.lora_rank:
        yield _changed(job, f"LoRA of rank {LORA_RANK}: frozen weights, adapters trained", lora_rank=LORA_RANK)
