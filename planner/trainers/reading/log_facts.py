"""What the readers of training logs share: facts of a log, steady steps, numbers as frameworks print them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from planner.errors import PlannerError

WARM_UP = 2
"""Logged steps at the beginning that never count: allocation, autotuning, compilation, the first data."""
LEAST_STEPS = 3
"""Steady steps that a median needs."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One logged step; None = not printed."""

    number: int
    seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    samples_per_second: float | None = None
    """Of the whole job."""
    batch: int | None = None
    """Sequences of this step."""
    loss: float | None = None


@dataclass(kw_only=True)
class Log:
    """What one log says. ``facts`` are fields of a row by path ('parallel.tp'); a None there counts as not said."""

    framework: str
    """As profiles/frameworks.yaml knows it, or the name of a trainer."""
    steps: list[Step]
    facts: dict[str, Any] = field(default_factory=dict)
    memory_gib: float | None = None
    """Peak of one GPU."""
    memory_kind: str = ""
    """'allocated' or 'reserved'."""
    other_memory_gib: dict[str, float] = field(default_factory=dict)
    """Peaks of other kinds that the log prints in addition: 'reserved', 'device'."""
    gpu: str = ""
    """The device's name as the log prints it; '' = not said."""
    notes: list[str] = field(default_factory=list)
    """In the words that rows of runs use."""
    average: bool = False
    """The only time is an average over the whole training, warm-up included."""


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The steady steps of a log in one number."""

    seconds: float | None
    tokens_per_second_per_gpu: float | None
    samples_per_second: float | None
    spread: float
    """1.4826 times the median absolute deviation over the median."""
    steps: int
    batch: int | None


def lines(text: str) -> Iterator[str]:
    """Lines without the codes of colours."""
    for line in text.splitlines():
        yield _ANSI.sub("", line)


def number(text: str) -> float:
    """A number as people print it: 1,234.5, 4.71K, 12.3M."""
    match = re.fullmatch(r"([\d.,]+(?:[eE][+-]?\d+)?)\s*([KMBGT]?)", text.strip())
    if match is None:
        raise ValueError(text)
    return float(match.group(1).replace(",", "")) * _SUFFIX[match.group(2)]


def whole(text: Any) -> int | None:
    """A whole number, or None where the text is none."""
    try:
        return int(str(text).strip().strip(","))
    except ValueError:
        return None


def steady(log: Log, where: str, *, warm_up: int = WARM_UP) -> Steady:
    """Median over the steady steps: repeated numbers and the first steps dropped, the last batch size kept.

    Raises PlannerError when too few steps are left.
    """
    unique = list({step.number: step for step in reversed(log.steps)}.values())
    unique.sort(key=lambda step: step.number)
    if log.average:
        one = unique[-1]
        return Steady(
            seconds=one.seconds, tokens_per_second_per_gpu=one.tokens_per_second_per_gpu,
            samples_per_second=one.samples_per_second, spread=0.0, steps=1, batch=one.batch,
        )  # fmt: skip
    last = unique[-1].batch if unique else None
    kept = [step for step in unique[warm_up:] if step.batch == last]
    if len(kept) < LEAST_STEPS:
        raise PlannerError(
            f"{where}: {len(unique)} steps are logged; the first {warm_up} are warm-up, and at least {LEAST_STEPS} more with "
            "one batch size are needed: train a little longer, or log more often"
        )

    def middle(values: Iterable[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return median(there) if there else None

    seconds = middle(step.seconds for step in kept)
    speed = middle(step.tokens_per_second_per_gpu for step in kept)
    rate = middle(step.samples_per_second for step in kept)
    by = (
        "seconds" if seconds is not None else "tokens_per_second_per_gpu" if speed is not None else "samples_per_second"
    )
    values = [value for step in kept if (value := getattr(step, by)) is not None]
    center = median(values)
    spread = 1.4826 * median(abs(value - center) for value in values) / center if center else 0.0
    return Steady(seconds=seconds, tokens_per_second_per_gpu=speed, samples_per_second=rate, spread=spread,
                  steps=len(kept), batch=last)  # fmt: skip
