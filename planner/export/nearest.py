"""What a trainer cannot run is an error that says why, and names the nearest plan that it can run."""

from __future__ import annotations

from pathlib import Path

from planner.errors import PlannerError
from planner.export.target import ExportJob, Target, library_trainer


def require_expressible(target: Target, job: ExportJob, file: Path) -> None:
    """Raise PlannerError with every reason why the target cannot run the plan as it was priced."""
    reasons = []
    trainer = library_trainer(job.plan.trainer)
    if trainer not in target.trainers:
        reasons.append(
            f"the plan was priced for trainer {trainer}, and {target.name} runs plans of {', '.join(target.trainers)}"
        )
    reasons += target.refusals(job)
    if reasons:
        raise PlannerError(f"{target.name} cannot run this plan: {'; '.join(reasons)}")
