"""Which layouts are legal for a job: one table of rules, each a predicate on columns and a sentence for one layout."""

from planner.rules.jobs import LEAN_OPTIMIZERS, NO_FLASH_ATTENTION, SPARSE_KERNELS, check_workload, runs_attention
from planner.rules.memory import absent_modules
from planner.rules.rule import Job, Mask, Rule
from planner.rules.sequence import low_precision_multiple
from planner.rules.table import RULES, allowed, check, refusals, stage_allowed

__all__ = [
    "LEAN_OPTIMIZERS", "NO_FLASH_ATTENTION", "RULES", "SPARSE_KERNELS",
    "Job", "Mask", "Rule", "absent_modules", "allowed", "check", "check_workload",
    "low_precision_multiple", "refusals", "runs_attention", "stage_allowed",
]  # fmt: skip
