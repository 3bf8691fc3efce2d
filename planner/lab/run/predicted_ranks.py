"""What was measured of a plan's ranks beside what the cost model says of the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.cluster import Cluster
from planner.cost.estimate import largest_by_stage
from planner.cost.memory.states import ALLOCATED
from planner.errors import PlannerError
from planner.lab.reference.split import LIKE_TORCH, Split, split_of
from planner.layout import CpMethod, Layout, Module, Order, Recompute
from planner.plan_file import Plan
from planner.rules import Job, check
from planner.trainer import Trainer, load_trainer
from planner.units import GIB
from planner.workload import Workload

POSITIONS = ("first", "middle", "last")
NAMES = {**{name: name for name in ALLOCATED}, "workspace": "temporary"}
"""Component of the cost model -> category of the witness."""
BOUNDS = {"weights": 0.001, "gradients": 0.001, "optimizer_states": 0.001, "activations": 0.03, "peak": 0.05}
"""Differences beyond which one of the two is wrong. Temporary memory is not held to a bound of its own: it is in the peak."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A plan as the torch model runs it and as it is priced."""

    workload: Workload
    cluster: Cluster
    trainer: Trainer
    layout: Layout
    split: Split
    changes: tuple[str, ...]
    """What was changed so that the torch model is a witness of it, in words; empty for plans of torch's own trainers."""


def question(plan: Plan) -> Question:
    """What to run and to price for a plan. Raises PlannerError for what the torch model cannot say anything about."""
    trainer, layout, changes = plan.load_trainer(), plan.layout, []
    if trainer.code_base not in LIKE_TORCH:
        changes.append(f"trainer torchtitan instead of {trainer.name}, whose memory the torch model has not")
        trainer = load_trainer("torchtitan")
        layout, more = _as_torchtitan(layout)
        changes += more
    cluster = plan.cluster()
    try:
        check(Job(workload=plan.workload, cluster=cluster, trainer=trainer), layout)
    except PlannerError as error:
        if not changes:
            raise
        raise PlannerError(
            f"the plan is for trainer {plan.trainer}, whose memory the torch model has not, and as a torchtitan plan it is "
            f"refused: {error}; plan with --trainer torchtitan or fsdp"
        ) from error
    return Question(
        workload=plan.workload, cluster=cluster, trainer=trainer, layout=layout,
        split=split_of(plan.workload, trainer, layout), changes=tuple(changes),
    )  # fmt: skip


def _as_torchtitan(layout: Layout) -> tuple[Layout, list[str]]:
    """The nearest layout that torchtitan has, and what was changed."""
    wanted: dict[str, int] = {
        "zero": max(int(layout.zero), 2), "sequence_parallel": int(int(layout.tp) > 1), "order": int(Order.TP_CP_EP_DP_PP),
    }  # fmt: skip
    if int(layout.cp) > 1:
        wanted["cp_method"] = int(CpMethod.ALLGATHER)
    if int(layout.recompute) == Recompute.SELECTIVE:
        wanted["recompute_modules"] = int(Module.EVERY_SECOND_MATMUL)
    before, after = layout.to_dict(), layout.replace(**wanted)
    told = after.to_dict()
    return after, [f"{name} {told[name]} instead of {before[name]}" for name in wanted if told[name] != before[name]]


def position(stage: int, pp: int) -> int:
    """Which of the cost model's three stages a pipeline stage is."""
    return 0 if stage == 0 else 2 if stage == pp - 1 else 1


def predicted(asked: Question, stage: int) -> dict[str, float]:
    """Bytes by category of the witness, of what torch's allocator hands out on one stage, and "peak", the most at one moment.

    Each category is at its own maximum: they do not sum to the peak. The workspace of GPU libraries, which is no tensor, is left
    out.
    """
    parts = largest_by_stage(asked.workload, asked.cluster, asked.trainer, asked.layout, max(stage, 1))
    where = position(stage, int(asked.layout.pp))
    found = {NAMES.get(name, name): float(values[where, 0]) for name, values in parts.items()}
    for name in ("temporary", "peak"):
        found[name] -= asked.cluster.hardware.workspace_memory
    return found


def row(what: str, told: float, seen: float) -> dict[str, Any]:
    """One line of the table, GiB; the error is predicted / measured - 1."""
    error = told / seen - 1.0 if seen else (0.0 if abs(told) < 1.0 else float("inf"))
    bound = BOUNDS.get(what)
    return {
        "what": what, "predicted_gib": told / GIB, "measured_gib": seen / GIB, "error": error if error < 1e9 else None,
        "bound": bound, "inside": None if bound is None else abs(error) <= bound,
    }  # fmt: skip


def stage_result(asked: Question, measured: Any) -> dict[str, Any]:
    """Everything about one rank, as plain data."""
    from planner.lab.run.recorded_traffic import compared

    told = predicted(asked, measured.stage)
    rows = [row(name, told[name], measured.held[name]) for name in NAMES.values()]
    rows.append(row("peak", told["peak"], measured.peak))
    return {
        "rank": measured.rank, "stage": measured.stage, "priced_as": POSITIONS[position(measured.stage, int(asked.layout.pp))],
        "memory": rows, "at_peak_gib": {name: size / GIB for name, size in measured.at_peak.items()},
        "parameters": measured.parameters, "microbatches_run": measured.microbatches,
        "receive_buffers_added_gib": measured.unseen_receive_bytes / GIB,
        "layers_run": measured.layers_run, "traffic": compared(asked, measured),
        "collectives": measured.collectives, "seconds": round(measured.seconds, 1),
    }  # fmt: skip


def result(asked: Question, ranks: Sequence[Any]) -> dict[str, Any]:
    """The whole validation as plain data; the rank with the highest peak first."""
    stages = sorted((stage_result(asked, one) for one in ranks), key=lambda one: -one["memory"][-1]["measured_gib"])
    return {
        "rung": "meta", "trainer": asked.trainer.name, "changes": list(asked.changes),
        "layout": asked.layout.to_dict(), "num_gpus": int(asked.layout.num_gpus), "ranks": stages,
    }  # fmt: skip
