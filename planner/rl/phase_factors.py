"""Factors of the phases of an RL step, from logs of one's own runs: what ``plan calibrate --rl`` writes and ``plan rl`` takes.

factor = geometric mean over the runs of measured / predicted, one for each phase that the logs have. A phase that no log has keeps
1. Each run is also predicted with the factors of the others alone, which shows whether they carry over.

    planner_rl_factors: 1
    framework: verl
    hardware: h100-sxm
    factors: {generate: 1.12, train: 0.97}
    source: 'run-a.log with a.yaml, run-b.log with b.yaml'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError, listed
from planner.record import record
from planner.rl.rl_doctor import PhaseRow, RlComparison
from planner.rl.rl_plan import PHASES
from planner.schema import Name, Text, check_keys, keys, read, within

KIND = "rl_factors"
VERSION = 1
"""Format of files of factors. A file of another format is refused."""
LEAST, MOST = 0.05, 20.0
"""Factors beyond these are no correction: the plan is of another run."""
FEWEST = 2
"""Runs that a fit needs: of one alone nothing could be left out."""
Factor = Annotated[float, within(LEAST, MOST)]


@record
class PhaseFactors:
    """Corrections of one framework on one kind of GPU."""

    framework: Name
    """Name of the framework whose logs they are of."""
    hardware: Name
    """Profile of the pool that trains."""
    factors: Annotated[dict[str, Factor], keys(PHASES, required=False)]
    """Phase -> measured over predicted."""
    source: Text = ""
    """Runs that they are of."""


@record
class FittedRun:
    """A run with what is predicted of it."""

    name: str
    measured: float
    """Seconds of a step."""
    before: float
    after: float
    """With the factors."""
    left_out: float
    """With the factors of the other runs."""


@record
class PhaseFit:
    """Factors and how they came about."""

    found: PhaseFactors
    spread: Mapping[str, tuple[float, float]]
    """Smallest and largest of the runs, by phase."""
    runs: tuple[FittedRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            **plain_factors(self.found), "spread": {name: list(one) for name, one in self.spread.items()},
            "runs": [vars(one) for one in self.runs],
        }  # fmt: skip


def fit_factors(runs: Sequence[tuple[str, RlComparison]]) -> PhaseFit:
    """Factors of the phases of these logs, each named and compared with its plan. Raises PlannerError."""
    if len(runs) < FEWEST:
        raise PlannerError(f"{len(runs)} run of RL is given; factors of phases need {FEWEST} or more, of different plans")
    for what, values in (
        ("frameworks", {one.log.framework for _, one in runs}), ("kinds of GPUs", {one.plan.hardware for _, one in runs})
    ):  # fmt: skip
        if len(values) > 1:
            raise PlannerError(f"the runs are of different {what}: {listed(sorted(values), 'and')}; calibrate each by itself")
    ratios = [_ratios(one) for _, one in runs]
    factors = _means(ratios)
    if not factors:
        raise PlannerError("the logs have no phase that the plans predict by itself; nothing can be fitted")
    off = {name: factor for name, factor in factors.items() if not LEAST <= factor <= MOST}
    if off:
        name, factor = next(iter(off.items()))
        raise PlannerError(f"{name} takes {factor:.3g} times what is predicted: the plans are of other runs than the logs")
    fitted = []
    for number, (name, one) in enumerate(runs):
        others = _means([ratio for place, ratio in enumerate(ratios) if place != number])
        fitted.append(
            FittedRun(
                name=name, measured=one.step.measured, before=one.step.predicted, after=_corrected(one, factors),
                left_out=_corrected(one, others),
            )
        )  # fmt: skip
    every = {phase: [ratio[phase] for ratio in ratios if phase in ratio] for phase in factors}
    source = ", ".join(name for name, _ in runs)
    first = runs[0][1]
    found = PhaseFactors(framework=first.log.framework, hardware=first.plan.hardware, factors=factors, source=source)
    return PhaseFit(found=found, spread={phase: (min(one), max(one)) for phase, one in every.items()}, runs=tuple(fitted))


def _ratios(one: RlComparison) -> dict[str, float]:
    """measured / predicted of the phases that are measured by themselves; several under one name share it."""
    found: dict[str, float] = {}
    for row in one.rows:
        if _waits(one, row) or row.predicted <= 0.0 or row.measured <= 0.0:
            continue
        for phase in row.covers:
            if phase in PHASES:
                found[phase] = row.measured / row.predicted
    return found


def _waits(one: RlComparison, row: PhaseRow) -> bool:
    """Where generation runs ahead, what the trainer prints of it is what it waits."""
    return row.phase == "wait" or (row.phase == "generate" and one.plan.placement.staleness > 0)


def _means(ratios: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = {}
    for phase in PHASES:
        values = [math.log(one[phase]) for one in ratios if phase in one]
        if values:
            found[phase] = math.exp(sum(values) / len(values))
    return found


def _corrected(one: RlComparison, factors: Mapping[str, float]) -> float:
    """Seconds of a step with its parts on the critical path corrected; what it waits stays."""
    assert one.plan.prediction is not None
    return sum(seconds * factors.get(name, 1.0) for name, seconds in one.plan.prediction.parts_s.items())


def plain_factors(found: PhaseFactors) -> dict[str, Any]:
    """The file of factors."""
    return {
        f"planner_{KIND}": VERSION, "framework": found.framework, "hardware": found.hardware, "factors": dict(found.factors),
        "source": found.source,
    }  # fmt: skip


def write_factors(found: PhaseFactors, path: Path) -> None:
    """Write the file, whole or not at all."""
    library.write_whole(path, library.dump_yaml(plain_factors(found)))


def load_factors(path: Path) -> PhaseFactors:
    """Read a file of factors. Raises PlannerError."""
    data = library.read_yaml(path)
    library.version_of(data, KIND, VERSION, where=str(path))
    known = (f"planner_{KIND}", "framework", "hardware", "factors", "source")
    found = dict(check_keys(data, known, str(path), required=known[:4]))
    del found[f"planner_{KIND}"]
    return read(PhaseFactors, found, str(path))
