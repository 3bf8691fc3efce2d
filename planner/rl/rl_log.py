"""Phase times of every step out of a framework's log: console lines, printed mappings, tables, or JSON lines.

A log is a run of ``name: seconds``. Which names are which phase is data (profiles/rl/NAME.yaml, log); how they stand is not asked:
``name:1.2``, ``'name': 1.2``, ``"name": 1.2``, ``name: 1.20s (3.4%)``, ``| name | 1.2e+00 |`` and numbers of numpy are all read. A
new step begins where a name stands again that the current one already has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from planner import library
from planner.errors import PlannerError, listed
from planner.record import record
from planner.rl.rl_framework import PHASES, LogNames, framework_names, load_framework
from planner.trainers.logs import MOST_BYTES

WARM_UP = 2
"""Steps at the beginning that never count: graphs are captured, memory is allocated, checkpoints are read."""
LEAST_STEPS = 3
"""Steps after them that a median needs; a shorter log counts whole, and says so."""
LONGEST = 1e6
"""Seconds of a phase at most: a larger number is none."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(?:np\.float\d+\(|tensor\()?([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\)?"
_BETWEEN = r"[\"']?\s*[:=│|]\s*[\"']?"


@record
class LoggedStep:
    """One step as the log has it."""

    phases: Mapping[str, float]
    """Seconds by PHASES; a phase that the framework does not print is not there."""
    total: float | None = None
    """Seconds of the whole step, where it is printed."""


@record
class RlLog:
    """The steps of a log."""

    framework: str
    """Name of the framework whose log it is."""
    steps: tuple[LoggedStep, ...]
    overlapped: frozenset[str] = frozenset()
    """Phases that run beside the step where generation runs ahead."""

    @property
    def counted(self) -> Sequence[LoggedStep]:
        """Steps that are no warm-up."""
        return self.steps[WARM_UP:] if len(self.steps) >= WARM_UP + LEAST_STEPS else self.steps

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each phase that is printed; of a phase that some steps lack, over those that have it."""
        found = {}
        for name in PHASES:
            values = [one.phases[name] for one in self.counted if name in one.phases]
            if values:
                found[name] = median(values)
        return found

    @property
    def step(self) -> float:
        """Median seconds of a step: as printed, or the sum of its phases, of which those that overlap are left out."""
        totals = [one.total for one in self.counted if one.total is not None]
        if totals:
            return median(totals)
        return median(sum(value for name, value in one.phases.items() if name not in self.overlapped) for one in self.counted)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of the medians."""
        if len(self.counted) == len(self.steps):
            return (f"the log has {len(self.steps)} steps, too few to leave the first ones out",)
        return ()

    def to_dict(self) -> dict[str, object]:
        """Plain data: the medians, and every step."""
        return {
            "framework": self.framework, "steps": len(self.steps), "step_s": self.step, "phases_s": self.phases,
            "every_step": [{"step_s": one.total, "phases_s": dict(one.phases)} for one in self.steps],
        }  # fmt: skip


@dataclass
class _Open:
    """A step that is being read."""

    found: dict[str, float] = field(default_factory=dict)


def read_rl_log(path: Path, framework: str = "") -> RlLog:
    """The phases in a file. ``framework``: whose log it is; '' = found by its names. Raises PlannerError."""
    return parse_rl_log(library.read_text(path, most=MOST_BYTES, errors="replace"), str(path), framework)


def parse_rl_log(text: str, where: str, framework: str = "") -> RlLog:
    """The phases in a text. Raises PlannerError where no framework's names stand in it."""
    asked = [framework] if framework else framework_names()
    best: RlLog | None = None
    for label in asked:
        found = load_framework(label)
        steps = tuple(_steps(text, found.log))
        log = RlLog(framework=found.name, steps=steps, overlapped=found.log.overlapped)
        if steps and (best is None or _weight(log) > _weight(best)):
            best = log
    if best is None:
        raise PlannerError(
            f"{where}: no phase times of {listed(asked)} were found; give the log of the process that prints them (the driver of "
            "Ray, or metrics.jsonl of prime-rl)"
        )
    return best


def _weight(log: RlLog) -> int:
    """How many numbers a log was read with: the names of some frameworks are words of others."""
    return sum(len(one.phases) + (one.total is not None) for one in log.steps)


def _steps(text: str, names: LogNames) -> Iterator[LoggedStep]:
    """The steps, in their order."""
    phase_of = {name: phase for phase, words in names.phases.items() for name in words} | dict.fromkeys(names.step, "")
    if not phase_of:
        return
    words = "|".join(re.escape(one) for one in sorted(phase_of, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w/])({words}){_BETWEEN}{_NUMBER}")
    open_ = _Open()
    for line in text.splitlines():
        for match in pattern.finditer(_ANSI.sub("", line)):
            name, seconds = match[1], float(match[2])
            if not 0.0 <= seconds <= LONGEST:
                continue
            if name in open_.found:
                yield _closed(open_, phase_of)
                open_ = _Open()
            open_.found[name] = seconds
    if open_.found:
        yield _closed(open_, phase_of)


def _closed(open_: _Open, phase_of: Mapping[str, str]) -> LoggedStep:
    phases: dict[str, float] = {}
    totals = [seconds for name, seconds in open_.found.items() if not phase_of[name]]
    for name, seconds in open_.found.items():
        if phase := phase_of[name]:
            phases[phase] = phases.get(phase, 0.0) + seconds
    return LoggedStep(phases=phases, total=totals[0] if totals else None)
