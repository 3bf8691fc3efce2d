"""The table of all rules, in the order in which they are said; one layout checked, many masked, refusals counted."""

import numpy as np

from planner.errors import PlannerError
from planner.layout import Layout
from planner.rules.degrees import DEGREES
from planner.rules.experts import EXPERTS
from planner.rules.memory import MEMORY
from planner.rules.pipeline import PIPELINE
from planner.rules.rule import Job, Mask, Rule
from planner.rules.sequence import SEQUENCE
from planner.rules.together import TOGETHER

RULES: tuple[Rule, ...] = (*DEGREES, *PIPELINE, *SEQUENCE, *EXPERTS, *MEMORY, *TOGETHER)
"""The order counts: of one layout the first rule that it breaks is said."""
AROUND = ("GPUs", "layers", "virtual stages", "pipeline length", "microbatches", "batch")
"""Rules of the whole job, which do not ask for anything of a single stage."""


def check(job: Job, layout: Layout) -> None:
    """Raise PlannerError with the sentence of the first rule that one layout breaks."""
    for rule in RULES:
        if not np.all(rule.holds(job, layout)):
            raise PlannerError(f"{rule.sentence(job, layout)} (rule '{rule.name}')")


def allowed(job: Job, layout: Layout) -> Mask:
    """Mask of the candidates that meet every rule."""
    mask, columns = np.ones(len(layout), dtype=bool), layout.arrays()
    for rule in RULES:
        mask &= next(rule.judge(job, columns))
    return mask


def stage_allowed(job: Job, layout: Layout, *, say: bool = False) -> Mask:
    """Mask of the candidates that meet every rule of one stage, whatever job and pipeline are around it.

    With ``say`` of one layout the first rule that it breaks is raised as PlannerError."""
    mask, columns = np.ones(len(layout), dtype=bool), layout.arrays()
    for rule in RULES:
        if rule.name in AROUND:
            continue
        holds = next(rule.judge(job, columns))
        if say and not np.all(holds):
            raise PlannerError(f"{rule.sentence(job, layout)} (rule '{rule.name}')")
        mask &= holds
    return mask


def refusals(job: Job, layout: Layout) -> dict[str, int]:
    """How many candidates each rule refuses (a candidate counts for each rule it breaks), largest first."""
    counts = {rule.name: int(np.sum(~np.broadcast_to(rule.holds(job, layout), len(layout)))) for rule in RULES}
    return dict(sorted(((name, n) for name, n in counts.items() if n), key=lambda item: -item[1]))
