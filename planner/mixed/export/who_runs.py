"""Which trainers run a mixed plan, said beside it."""

from __future__ import annotations

from planner.errors import listed
from planner.mixed.export.export_job import MixedExport, stages_text
from planner.mixed.export.mixed_targets import TARGETS, mixed_target, nearest_run, refused
from planner.mixed.mixed_plan import MixedPlan
from planner.trainer_options import spelled


def runners(mixed: MixedExport) -> tuple[list[str], list[str]]:
    """Targets of ``plan export`` that take a layout as it is: of the trainer that it is priced for, and of others."""
    trainer, priced, others = spelled(mixed.trainer)[0], list[str](), list[str]()
    for name in TARGETS:
        target = mixed_target(name, mixed)
        if not refused(target, mixed):
            (priced if trainer in target.trainers else others).append(name)
    return priced, others


def who_runs(plan: MixedPlan) -> list[str]:
    """Sentences: the targets of ``plan export`` that take a plan as it is; where none does, what the nearest one would take."""
    mixed = MixedExport(job=plan.job(), layout=plan.layout, trainer=plan.trainer)
    trainer, (priced, others) = spelled(plan.trainer)[0], runners(mixed)
    said = [f"plan export --to {listed(priced)}"] if priced else []
    if others:
        said.append(f"plan export --to {listed(others)}, which is another trainer than {trainer}, for which it is priced")
    said = said or [_none(mixed)]
    return [*said, "local updates: a job of its own on every site, joined by torchft"] if plan.layout.outer else said


def _none(mixed: MixedExport) -> str:
    """No trainer; the nearest layout that the first of them would run."""
    for name in TARGETS:
        found, _ = nearest_run(mixed_target(name, mixed), mixed)
        if found is not None:
            return f"no trainer runs it as it is; --to {name} would run {stages_text(found)}"
    return "no trainer runs it as it is: plan with fewer kinds"
