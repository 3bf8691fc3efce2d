"""When nothing fits: the cheapest changes that would make it fit, each searched and priced, one command line each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner import library
from planner.cluster import usual_counts
from planner.costs import rates_of, usd_per_million_tokens
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.gains import LEAST_GAIN, Gain
from planner.hardware import load_hardware
from planner.keywords import flag_of
from planner.record import record
from planner.rules import Job
from planner.search import Finding, Pins, search

DOUBLINGS = 6
"""More GPUs are tried up to 64 times the number asked for."""
SHORTEST_SEQUENCE = 512
SMALLER_STATES = {
    "adam_bf16": "Adam with bf16 moments", "adam_8bit": "Adam with 8-bit moments",
    "paged_adam_8bit": "Adam with 8-bit moments in pages of host memory",
}  # fmt: skip
"""From the largest states to the smallest."""
QUANTISED = ("nf4", "nf4_dq", "int8")
"""Dtypes of a frozen base that save memory, the usual one first."""
LORA_RANK = 16
FEWEST = 0.75
"""Part of the GPUs below which nobody leaves the others idle."""
OTHER_GPUS = 3
"""Other GPUs are listed up to this many, cheapest step first."""


@record
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


Change = tuple[str, dict[str, Any]]
"""In words, and the flags that change in the command line."""
Asked = tuple[Job, Pins]
"""What a command line asks for: the job, and the fields of the layout that stay."""


def advise(
    job: Job, needed: float, ask: Callable[[Mapping[str, Any]], Asked], command: Callable[..., str],
    progress: Callable[[str], None],
) -> list[Advice]:  # fmt: skip
    """Changes that make a job fit: of fine-tuning first those that need no other GPUs, cheapest first; else more GPUs, other GPUs,
    then the others.

    ``needed``: bytes that the closest attempt needs; cards with clearly less are not tried. ``ask`` is what the user's command asks
    for with some flags replaced, ``command`` its text; ``progress`` hears what is tried.
    """

    def tried(changes: Iterator[Change], most: int = 1) -> list[Advice]:
        """The first that fit."""
        found: list[Advice] = []
        for change in changes:
            progress(change[0])
            made = _try(change, ask)
            found += [_advice(change, *made, command(**change[1]))] if made else []
            if len(found) == most:
                break
        return found

    here = [one for changes in _here(job) for one in tried(changes)] or tried(together(job))
    larger = sorted(tried(_other_gpus(job, needed), most=len(library.names("hardware"))), key=_cost)[:OTHER_GPUS]
    elsewhere = [*tried(_more_gpus(job)), *larger]
    return [*sorted(here, key=_cost), *elsewhere] if job.fine_tunes else [*elsewhere, *here]


def loss_in_pieces(job: Job) -> str:
    """The option of the trainer by which logits come piece by piece, where they do not and the objective allows it; else ''."""
    whole = job.trainer.stored.loss in ("full", "kept") and job.workload.objective == "lm"
    known = job.trainer.choices.options.get("loss", {})
    return next((value for value in ("fused_linear", "chunked") if value in known and whole), "")


def _try(
    change: Change, ask: Callable[[Mapping[str, Any]], Asked], least_rate: float = 0.0
) -> tuple[Job, Finding] | None:  # fmt: skip
    """A changed job and its plans, or None when it still does not fit, is not possible at all, or cannot reach ``least_rate``
    tokens/s."""
    try:
        job, pins = ask(change[1])
        within = job.workload.tokens / least_rate if least_rate else math.inf
        finding = search(job, pins, top=1, within=within, only_fitting=True)
    except PlannerError:
        return None
    return (job, finding) if finding.fit else None


def _advice(change: Change, job: Job, finding: Finding, command: str) -> Advice:
    """The best plan of a changed job."""
    step = float(finding.estimates[0].step_time[0])
    rate = job.workload.tokens / step
    return Advice(
        change=change[0], command=command, layout=layout_text(finding.layouts[0]), step_time_s=step, tokens_per_second=rate,
        usd_per_million_tokens=usd_per_million_tokens(rates_of(job.cluster.hardware), job.cluster.num_gpus, rate),
    )  # fmt: skip


def _cost(advice: Advice) -> tuple[bool, float]:
    cost = advice.usd_per_million_tokens
    return cost is None, 1.0 / advice.tokens_per_second if cost is None else cost


def _more_gpus(job: Job) -> Iterator[Change]:
    """1.5, 2, 3, 4, 6, 8, ... times as many."""
    gpus = job.cluster.num_gpus
    quarters = (gpus * 2**power * part for power in range(1, DOUBLINGS + 1) for part in (3, 4))
    return ((f"{size // 4} GPUs of this kind", {"gpus": size // 4}) for size in quarters if size % 4 == 0)


CLEARLY = 0.9
"""The space of layouts differs a little between nodes: a card that has this part of what is needed is tried."""


def _other_gpus(job: Job, needed: float) -> Iterator[Change]:
    """As many of each kind with more memory, and about enough."""
    here = max(job.cluster.hardware.usable_memory, CLEARLY * needed)
    larger = (name for name in library.names("hardware") if load_hardware(name).usable_memory > here)
    return ((f"{job.cluster.num_gpus} x {name}", {"hardware": name}) for name in larger)


def _here(job: Job) -> Iterator[Iterator[Change]]:
    """Kinds of change that need no other GPUs, and the changes of each, the smallest first."""
    yield (
        (
            f"sequences of {length} tokens, as many tokens per step",
            {"sequence_length": length, "global_batch_size": batch},
        )
        for length, batch in _shorter(job)
    )
    yield from _leaner(job)
    yield _adapters(job)


def _leaner(job: Job) -> Iterator[Iterator[Change]]:
    """Those that train the same weights on the same batch."""
    work = job.workload
    smaller = (name for name in SMALLER_STATES if name != work.optimizer and name in job.trainer.optimizers)
    yield ((SMALLER_STATES[name], {"optimizer": name}) for name in smaller)
    if work.precision != "bf16_true" and "bf16_true" in job.legal.precisions and not work.lora_rank:
        yield iter([("weights, gradients and states in bf16", {"precision": "bf16_true"})])
    yield _loss(job)
    yield _quantised(job)


def fewer_gpus(job: Job, rate: float, ask: Callable[[Mapping[str, Any]], Asked]) -> list[Gain]:
    """The number of GPUs below a job's own that is faster than all of them, where there is one; ``rate``: the job's tokens/s.

    Stages, experts and the batch may share out better over fewer: deepseek-v3 with 2,048 sequences per step takes less time on
    1,408 H100 than on 1,536. No power of two is worse than what lies below it where the batch is one as well, or a multiple.
    """
    gpus, batch = job.cluster.num_gpus, job.workload.global_batch_size
    if gpus & (gpus - 1) == 0 and (batch & (batch - 1) == 0 or batch % gpus == 0):
        return []
    near = [n for n in usual_counts(job.cluster.hardware, FEWEST * gpus) if n < gpus]
    what = "fewer GPUs, over which the job shares out better"
    return _faster([(what, {"gpus": n, "nodes": None, "global_batch_size": batch}) for n in near], rate, ask)[:1]


def off_the_host(job: Job, rate: float, ask: Callable[[Mapping[str, Any]], Asked]) -> list[Gain]:
    """Changes that need less memory and so make a job faster whose best plan keeps something on the host or repeats layers to fit;
    ``rate``: its tokens/s.

    The base of adapters is quantised where they are trained alone; adapters in place of all weights are another job.
    """
    changes = [one for kind in _leaner(job) for one in kind if job.workload.lora_rank or "lora_rank" not in one[1]]
    return _faster(changes, rate, ask)[:OTHER_GPUS]


def _faster(changes: Sequence[Change], rate: float, ask: Callable[[Mapping[str, Any]], Asked]) -> list[Gain]:
    """Those of some changes that make more than ``rate`` tokens/s, the fastest first."""
    least, found = rate / (1.0 - LEAST_GAIN), list[Gain]()
    for text, flags in changes:
        if made := _try((text, flags), ask, least):
            job, finding = made
            step = float(finding.estimates[0].step_time[0])
            found.append(
                Gain(flag=flag_text(flags), what=text, gain=1.0 - rate * step / job.workload.tokens, step_time_s=step,
                     layout=layout_text(finding.layouts[0]))
            )  # fmt: skip
    return sorted((one for one in found if one.gain > LEAST_GAIN), key=lambda one: -one.gain)


def flag_text(flags: Mapping[str, Any]) -> str:
    """Changed flags as they are typed."""
    options = [f"{flag_of('options')} {name}={value}" for name, value in flags.get("options", {}).items()]
    said = {name: value for name, value in flags.items() if name != "options" and value is not None}
    return " ".join([*(f"{flag_of(name)} {value}" for name, value in said.items()), *options])


def _loss(job: Job) -> Iterator[Change]:
    """Logits piece by piece."""
    if value := loss_in_pieces(job):
        yield "head and loss piece by piece", {"options": {"loss": value}}


def _adapters(job: Job) -> Iterator[Change]:
    """Adapters in place of all weights."""
    if not job.workload.lora_rank:
        yield f"LoRA of rank {LORA_RANK}: frozen weights, adapters trained", {"lora_rank": LORA_RANK}


def _quantised(job: Job) -> Iterator[Change]:
    """Adapters on a frozen base of fewer bits."""
    dtype = next((name for name in QUANTISED if name in job.legal.frozen_weights), "")
    if dtype and job.workload.frozen_weights == "bf16":
        rank = job.workload.lora_rank or LORA_RANK
        yield f"QLoRA of rank {rank}: frozen weights in {dtype}", {"lora_rank": rank, "frozen_weights": dtype}


def _shorter(job: Job) -> list[tuple[int, int]]:
    """Shorter sequences, and how many of them make as many tokens."""
    work = job.workload
    lengths = [(work.sequence_length // 2**power, work.global_batch_size * 2**power) for power in range(1, 28)]
    return [one for one in lengths if one[0] >= SHORTEST_SEQUENCE]


def together(job: Job) -> Iterator[Change]:
    """Changes of several kinds at once, where none alone is enough: one more each time."""
    flags: dict[str, Any] = {}
    words: list[str] = []
    for text, more in _savings(job):
        flags, words = {**flags, **more}, [*words, text]
        if len(words) > 1:
            yield ", ".join(words), flags
    for length, batch in _shorter(job):
        more = {"sequence_length": length, "global_batch_size": batch}
        yield ", ".join([*words, f"sequences of {length} tokens"]), {**flags, **more}


def _savings(job: Job) -> Iterator[Change]:
    """What each kind of change gives at most, the cheapest in time first."""
    yield from [*_adapters(job), *_quantised(job)][-1:]
    smallest = [name for name in SMALLER_STATES if name in job.trainer.optimizers]
    if smallest and job.workload.optimizer not in smallest[-1:]:
        yield SMALLER_STATES[smallest[-1]], {"optimizer": smallest[-1]}
    yield from _loss(job)
