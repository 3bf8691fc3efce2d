"""A traced step next to the predicted one, part by part: which is off most, and how well a mechanism would explain the parts."""

import math
from collections.abc import Mapping
from typing import Any

from planner.explain import PART_TEXT
from planner.kineto.job_traces import Bandwidth, JobTraces
from planner.kineto.kernel_names import FAMILIES, OPTIMIZER
from planner.kineto.plan_traces import device_note, priced_seconds
from planner.kineto.step_parts import BUSY, StepParts
from planner.plan_file import Plan
from planner.record import record
from planner.units import format_seconds

ROWS: dict[str, tuple[str, ...]] = {
    "computation": ("compute", "recompute"), "tensor": ("tensor_communication",), "context": ("context_communication",),
    "expert": ("expert_communication",), "pipeline": ("pipeline_communication", "bubble"), "data": ("data_communication",),
    "other": (), "stragglers": ("stragglers",), "optimizer": ("optimizer",), "copies": ("offload",), "idle": ("host", "overhead"),
}  # fmt: skip
"""Row of the comparison -> parts of the prediction; each part is in one row, so that both columns sum to their step."""
COMMUNICATION = ("tensor", "context", "expert", "pipeline", "data", "other")
UNKNOWN = 0.2
"""Share of exposed communication in groups that are not known, from which kinds are not told apart."""
NAMES = {
    "computation": "computation and recompute", "pipeline": "pipeline sends and bubble", "other": "other communication",
    "copies": "copies to and from the host", "idle": "idle: host, launches, fixed overhead",
    **{name: PART_TEXT[f"{name}_communication"] for name in ("tensor", "context", "expert", "data")},
    **{name: PART_TEXT[name] for name in ("stragglers", "optimizer")},
}  # fmt: skip
MORE = {
    "computation": "the kernels below: matrix products at their rate, attention as a fused kernel, norms fused; then clocks with "
                   "'nvidia-smi -q -d CLOCK,PERFORMANCE,POWER' during a step",
    "pipeline": "compare the ranks: unequal stages make the others wait in receives; microbatches and virtual stages as planned?",
    "stragglers": "clocks and neighbours of the rank that waits least",
    "other": "groups of several dimensions: losses and gradient norms that are reduced in every microbatch, barriers, "
             "checks of DETAIL debugging",
    "optimizer": "a fused or foreach optimizer, states sharded as planned, gradient norms without a synchronisation per tensor",
    "copies": "pinned memory, copies on a stream of their own (non_blocking=True); offload only where planned",
    "idle": "who is late: data loader, .item() and other waits, logging, small kernels without compilation or CUDA graphs; "
            "the profiler itself slows the host, so time a step without it",
    **dict.fromkeys(("tensor", "context", "expert", "data"),
        "overlap (the kernels must run during matrix products, not between them), bandwidths below, which rank waits for which"),
}  # fmt: skip
"""What to check where a part takes longer than planned."""
FASTER = "compare the job with the plan, input by input: less is done than planned (recompute, microbatches, layers), or hidden"
LITTLE = 0.02
"""Part of the step below which a difference is not named."""
NOISE, SPREAD = 0.02, 0.1
"""Deviation of a traced part from its mechanism's: this part of the step, and this part of itself."""
MOST = math.log(1e3)
"""Most that a trace counts for or against a mechanism: the logarithm of its odds."""


@record
class TracedRow:
    """One part of the step, seconds."""

    part: str
    """Of ROWS."""
    predicted: float
    measured: float | None
    """None = it is inside of other rows."""

    @property
    def off(self) -> float:
        """Measured less predicted."""
        return 0.0 if self.measured is None else self.measured - self.predicted


@record
class Traced:
    """The traces of a job, compared with its plan."""

    job: JobTraces
    rank: StepParts
    """The rank that is compared: the one that computes longest."""
    rows: tuple[TracedRow, ...]
    """Empty where no kernels were recorded."""
    bandwidths: tuple[tuple[Bandwidth, float], ...]
    """Bandwidths with the seconds that the plan's hardware prices the same collective with."""
    sentence: str
    """Which part is off most, and what to check; '' without kernels."""
    notes: tuple[str, ...]
    gpus: int
    """Ranks of the job."""

    def waits_odds(self, slower: float) -> float:
        """Logarithm of the odds that one rank holds up the others, by a factor ``slower`` of the step, by how they wait for it.

        Then the others wait for 1 - 1/slower of the step, else for none of it. Where not all ranks were traced the late one may be
        missing, so that nothing is counted against it.
        """
        waits = self.job.waits
        if len(waits) < 2:
            return 0.0
        seen, expected = (max(waits.values()) - min(waits.values())) / self.rank.step_time, 1.0 - 1.0 / slower
        odds = 0.5 * (seen / NOISE) ** 2 - 0.5 * ((seen - expected) / (NOISE + SPREAD * expected)) ** 2
        return min(max(odds, -MOST if len(waits) == self.gpus else 0.0), MOST)

    @property
    def measured(self) -> dict[str, float]:
        """Seconds by row, for ``likelihood``; empty without kernels. Where the groups of much of it are not known, communication is
        one row."""
        found = {row.part: row.measured for row in self.rows if row.measured is not None}
        together = sum(found.get(part, 0.0) for part in COMMUNICATION)
        if found.get("other", 0.0) > UNKNOWN * together:
            found = {part: seconds for part, seconds in found.items() if part not in COMMUNICATION} | {
                "communication": together
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json; seconds per step."""
        return {
            "step_time_s": self.job.step_time, "device": self.job.device, "compared": self.rank.trace.name,
            "parts": [{"part": one.part, "predicted_s": one.predicted, "measured_s": one.measured} for one in self.rows],
            "sentence": self.sentence, "notes": list(self.notes), "ranks": [_plain(one) for one in self.job.parts],
            "waits_s": {str(rank): seconds for rank, seconds in self.job.waits.items()},
            "bandwidths": [
                {"kind": one.kind, "op": one.op, "ranks": one.size, "bytes": one.bytes, "calls": one.calls, "seconds": one.seconds,
                 "priced_seconds": priced}
                for one, priced in self.bandwidths
            ],
        }  # fmt: skip


def _plain(one: StepParts) -> dict[str, Any]:
    """One rank as plain data."""
    traffic = [{**vars(each), "hidden": max(each.total - each.exposed, 0.0)} for each in one.traffic]
    return {
        "file": str(one.trace.path), "rank": one.trace.rank, "steps": len(one.steps.spans), "found_by": one.steps.how or None,
        "step_time_s": one.step_time, "busy_share": one.busy_share, "compute_s": one.compute, "communication_s": traffic,
        "copies_s": one.copies, "idle_host_s": one.idle_host, "idle_other_s": one.idle_other, "longest_gap_s": one.longest_gap,
        "host_bound": one.host_bound, "product_flops": one.product_rate,
        "kernels": [{"name": name, "family": family, "seconds": seconds} for name, family, seconds in one.top],
    }  # fmt: skip


def plan_comparison(plan: Plan, job: JobTraces) -> Traced:
    """The traces of a job, compared with the plan that it ran."""
    rank, predicted = job.slowest, by_row(plan.prediction.time_s)
    seen = {**rank.exposed, "optimizer": rank.compute[FAMILIES[OPTIMIZER]], "copies": rank.copies,
            "idle": rank.idle_host + rank.idle_other, "stragglers": None}  # fmt: skip
    seen["computation"] = sum(rank.compute.values()) - float(seen["optimizer"] or 0.0)
    rows = (
        tuple(TracedRow(part=part, predicted=predicted[part], measured=seen[part]) for part in ROWS)
        if rank.trace.has_gpu
        else ()
    )
    notes = list(job.notes)
    if other := device_note(plan, job):
        notes.append(other)
    for one in job.parts:
        if one.host_bound:
            notes.append(
                f"{one.trace.name} is host-bound: for {one.host_share:.0%} of the step its GPU waits for a kernel to be launched "
                f"(up to {1 - BUSY:.0%} counts as bound by the GPU); how fast the GPUs are does not show"
            )
    return Traced(
        job=job, rank=rank, rows=tuple(one for one in rows if one.predicted or one.measured), notes=tuple(notes),
        bandwidths=tuple((one, priced_seconds(plan, one)) for one in job.bandwidths), sentence=_sentence(rows, job),
        gpus=plan.num_gpus,
    )  # fmt: skip


def by_row(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the parts of a prediction by row of the comparison."""
    return {row: sum(float(parts[name]) for name in names) for row, names in ROWS.items()}


def likelihood(predicted: Mapping[str, float], measured: Mapping[str, float]) -> float:
    """Logarithm of how well predicted parts (of Estimate.time) meet traced ones, seconds by row.

    -1/2 sum of ((measured - predicted) / (NOISE step + SPREAD part))^2, the larger of both as the part.
    """
    mine, step = by_row(predicted), sum(measured.values())
    mine["communication"] = sum(mine[part] for part in COMMUNICATION)
    found = 0.0
    for part, seconds in measured.items():
        found -= 0.5 * ((seconds - mine[part]) / (NOISE * step + SPREAD * max(seconds, mine[part]))) ** 2
    return found


def _sentence(rows: tuple[TracedRow, ...], job: JobTraces) -> str:
    """The part that is off most, and what to check; the rank that the others wait for."""
    if not rows:
        return ""
    worst = max(rows, key=lambda one: abs(one.off))
    said = "No part is off by more than 2 % of the step."
    if abs(worst.off) >= LITTLE * sum(one.measured or 0.0 for one in rows):
        way, check = ("more", MORE[worst.part]) if worst.off > 0 else ("less", FASTER)
        said = f"Off most: {NAMES[worst.part]}, {format_seconds(abs(worst.off))} {way} than predicted. Check: {check}."
    if job.waits:
        late = min(job.waits, key=lambda rank: job.waits[rank])
        most = max(job.waits.values()) - job.waits[late]
        if most >= LITTLE * job.slowest.step_time:
            said += f" Others wait for rank {late}, up to {format_seconds(most)} of each step: look there first."
    return said

