"""What the readers of training logs share: facts of a log, its steps and peaks by patterns, steady steps."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from planner import units
from planner.errors import PlannerError
from planner.record import record
from planner.runs.mapping import KINDS

WARM_UP = 2
"""Logged steps at the beginning that never count: allocation, autotuning, compilation, the first data."""
LEAST_STEPS = 3
"""Steady steps that a median needs."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_BINARY = {"K": units.KIB, "M": units.MIB, "G": units.GIB}
_SPEEDS = ("seconds", "tokens_per_second_per_gpu", "samples_per_second")


@record
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


@record
class Steady:
    """The steady steps of a log in one number."""

    seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    samples_per_second: float | None = None
    spread: float
    """1.4826 times the median absolute deviation over the median."""
    steps: int
    batch: int | None


class Settings(dict[str, str]):
    """Settings that a framework prints, name -> text; the first of a name counts."""

    def value(self, name: str) -> Any:
        """A whole number, true or false; None where the text is neither."""
        text = self.get(name, "").strip().strip(",")
        try:
            return {"True": True, "False": False}[text] if text in ("True", "False") else int(text)
        except ValueError:
            return None

    def facts(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Facts of a log by path, from the setting of that name."""
        return {path: self.value(name) for path, name in names.items()}


def lines(text: str) -> Iterator[str]:
    """Lines without the codes of colours."""
    for line in text.splitlines():
        yield _ANSI.sub("", line)


def scan(log: Log, text: str, patterns: Mapping[str, Sequence[re.Pattern[str]]], unit: str = "G") -> Iterator[str]:
    """Adds the steps and peaks of a text to a log, and yields all other lines.

    ``patterns``: those of lines that hold a text. Names of their groups are fields of Step, 'milliseconds', or a kind of
    memory in ``unit`` or in that of the group 'unit'.
    """
    peaks = dict.fromkeys(KINDS, 0.0)
    for line in lines(text):
        found: dict[str, str] = {}
        for pattern in (one for mark, some in patterns.items() if mark in line for one in some):
            if match := pattern.search(line):
                found |= {key: value for key, value in match.groupdict().items() if value}
        if not found:
            yield line
            continue
        for kind in peaks.keys() & found:
            size = number(found.pop(kind)) * _BINARY[found.get("unit", unit)] / units.GIB
            peaks[kind] = max(peaks[kind], size)
        if "number" in found:
            values: dict[str, Any] = {key: number(value) for key, value in found.items() if key != "unit"}
            if "milliseconds" in values:
                values["seconds"] = values.pop("milliseconds") * units.parse("1 ms", "seconds")
            values |= {key: int(values[key]) for key in ("number", "batch") if key in values}
            log.steps.append(Step(**values))
    log.other_memory_gib = {kind: peak for kind, peak in peaks.items() if peak}
    if log.other_memory_gib:
        log.memory_kind = next(iter(log.other_memory_gib))
        log.memory_gib = log.other_memory_gib.pop(log.memory_kind)
        log.notes.append(KINDS[log.memory_kind])


def number(text: str) -> float:
    """A number as people print it: 1,234.5, 4.71K, 12.3M."""
    match = re.fullmatch(r"([\d.,]+(?:[eE][+-]?\d+)?)\s*([KMBGT]?)", text.strip())
    if match is None:
        raise ValueError(text)
    return float(match.group(1).replace(",", "")) * _SUFFIX[match.group(2)]


def steady(log: Log, where: str, *, warm_up: int = WARM_UP) -> Steady:
    """Median over the steady steps: repeated numbers and the first steps dropped, the last batch size kept.

    Raises PlannerError when too few steps are left.
    """
    unique = list({step.number: step for step in reversed(log.steps)}.values())
    unique.sort(key=lambda step: step.number)
    last = unique[-1].batch if unique else None
    kept = unique[-1:] if log.average else [step for step in unique[warm_up:] if step.batch == last]
    if len(kept) < LEAST_STEPS and not log.average:
        raise PlannerError(
            f"{where}: {len(unique)} steps are logged; the first {warm_up} are warm-up, and at least {LEAST_STEPS} more with "
            "one batch size are needed: train a little longer, or log more often"
        )
    printed = {key: [value for step in kept if (value := getattr(step, key)) is not None] for key in _SPEEDS}
    middle = {key: median(values) for key, values in printed.items() if values}
    by, center = next(iter(middle.items()))
    spread = 1.4826 * median(abs(value - center) for value in printed[by]) / center if center else 0.0
    return Steady(**middle, spread=spread, steps=len(kept), batch=last)
