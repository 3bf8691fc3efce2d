"""Phases of a log beside those of an RL plan: the difference of each, the largest gap, and what usually makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import PlannerError
from planner.record import record
from planner.rl.rl_framework import load_framework
from planner.rl.rl_log import RlLog
from planner.rl.rl_plan import RlPlan, RlPrediction

FOLDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "openrlhf": {"logprob": ("logprob", "reference", "critic", "reward")},
    "nemo-rl": {"logprob": ("logprob", "reference"), "sync": ("sync", "switch")},
    "verl": {"sync": ("sync", "switch")},
    "areal": {"wait": ("wait", "generate", "reward")},
}
"""Framework -> phase of its log -> phases of a plan that it holds."""
SLOWER = {
    "generate": "answers are longer than planned (compare their mean and 99th percentile with --answers), fewer run at once (look "
    "for preemptions in the engine's log), or CUDA graphs are off",
    "reward": "rewards wait for hosts or sandboxes: say their time with --reward-time",
    "logprob": "micro batches are smaller than planned, or sequences are padded and not packed",
    "reference": "micro batches are smaller than planned, or the reference is copied from the host in every step",
    "critic": "micro batches are smaller than planned",
    "train": "micro batches are smaller or padded, answers are longer, or optimizer states come from the host",
    "critic_train": "micro batches are smaller or padded",
    "sync": "weights travel tensor by tensor, or by another method than planned; look at the bucket and at what is gathered",
    "switch": "states move over PCIe without pinned memory, or more of them than planned",
    "prepare": "the driver's host is slow: tokenising, padding, logging, checkpoints within the step",
    "wait": "the pool that generates is the slower one: give it more GPUs, or allow more staleness",
}
"""Phase -> what to look at where it takes longer than predicted."""
FASTER = {
    "generate": "answers are shorter than planned, or fewer are sampled", "train": "answers are shorter than planned",
    "logprob": "log-probs are taken from the engine", "wait": "answers are shorter than planned",
}  # fmt: skip
LEAST_REST = 0.01
"""Less of a step than this is no phase: medians of parts do not sum to the median of the whole."""
NOTABLE = 0.1
"""Gaps below this part of the step are named no cause."""


@record
class PhaseRow:
    """One phase."""

    phase: str
    measured: float
    """Seconds, median of the steps."""
    predicted: float
    covers: tuple[str, ...]
    """Phases of the plan that the log has under this name."""

    @property
    def gap(self) -> float:
        """Seconds that it takes longer than predicted."""
        return self.measured - self.predicted

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where nothing was measured."""
        return self.predicted / self.measured - 1.0 if self.measured > 0 else None


@record
class RlComparison:
    """A log with its plan."""

    log: RlLog
    plan: RlPlan
    rows: tuple[PhaseRow, ...]
    """Phases that the log has, the largest gap first."""
    step: PhaseRow
    unmeasured: tuple[str, ...]
    """Phases that are predicted and stand in no line of the log."""
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> PhaseRow | None:
        """The phase whose gap is the largest."""
        return self.rows[0] if self.rows else None

    @property
    def cause(self) -> str:
        """What usually makes the largest gap; '' where it is small."""
        worst = self.largest
        if worst is None or abs(worst.gap) < NOTABLE * self.step.measured:
            return ""
        return (SLOWER if worst.gap > 0 else FASTER).get(worst.phase, "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json: seconds."""
        return {
            "framework": self.log.framework, "steps": len(self.log.steps),
            "step": {"measured": self.step.measured, "predicted": self.step.predicted, "error": self.step.error},
            "phases": {
                one.phase: {"measured": one.measured, "predicted": one.predicted, "error": one.error, "covers": list(one.covers)}
                for one in self.rows
            },
            "largest": self.largest.phase if self.largest else None, "cause": self.cause or None,
            "unmeasured": list(self.unmeasured), "notes": list(self.notes),
        }  # fmt: skip


def compare_log(plan: RlPlan, log: RlLog) -> RlComparison:
    """A log against a priced plan. Raises PlannerError when the plan has no prediction."""
    found = plan.prediction
    if found is None:
        raise PlannerError("the plan was not priced; 'plan rl estimate' prices it")
    folded = FOLDED.get(log.framework, {})
    rows, covered = [], set[str]()
    for phase, seconds in _with_rest(plan, log).items():
        holds = folded.get(phase, (phase,))
        predicted = sum(_predicted(plan, found, one) for one in holds)
        rows.append(PhaseRow(phase=phase, measured=seconds, predicted=predicted, covers=holds))
        covered |= {*holds, *(("wait",) if phase == "generate" and plan.placement.staleness else ())}
    rows.sort(key=lambda one: -abs(one.gap))
    left = tuple(name for name, seconds in found.parts_s.items() if name not in covered and seconds >= 0.01 * found.step_s)
    notes = list(log.notes)
    own = plan.framework.partition("@")[0]
    if own != log.framework:
        notes.append(f"the log is of {log.framework}, the plan of {own}")
    step = PhaseRow(phase="step", measured=log.step, predicted=found.step_s, covers=("step",))
    return RlComparison(log=log, plan=plan, rows=tuple(rows), step=step, unmeasured=left, notes=tuple(notes))


def _with_rest(plan: RlPlan, log: RlLog) -> dict[str, float]:
    """The phases of a log; ``prepare`` is what of a step none of the others explains, where the log prints whole steps."""
    found = log.phases
    hidden = {"prepare", *(log.overlapped if plan.placement.staleness else ("wait",))}
    rest = log.step - sum(seconds for name, seconds in found.items() if name not in hidden)
    if any(one.total is not None for one in log.counted):
        found.pop("prepare", None)
        if rest >= LEAST_REST * log.step:
            found["prepare"] = rest
    return found


def _predicted(plan: RlPlan, found: RlPrediction, phase: str) -> float:
    """Seconds of a phase as the process that prints the log sees it: where generation runs ahead, what it waits for."""
    if phase == "wait":
        return found.parts_s["wait"]
    if phase == "generate" and plan.placement.staleness:
        framework = load_framework(plan.framework)
        beside = "generate" in framework.log.overlapped
        return found.phases_s["generate"] if beside else found.parts_s["generate"] + found.parts_s["wait"]
    return found.phases_s[phase]
