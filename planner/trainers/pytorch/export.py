"""PyTorch itself: one script and plan.json, no framework."""

from typing import Any

from planner.layout import Module, Schedule
from planner.trainers.bundle.fully_shard import SCHEDULES, beyond_llama, shared_refusals
from planner.trainers.bundle.quoting import filled_yaml, json_text, refused, run_of, template
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules

OPTIMIZERS = ("adam", "sgd")
PRECISIONS = ("bf16", "fp32")


def refusals(job: ExportJob) -> list[str]:
    """What the script has not."""
    found = unknown_choices(job, "PyTorch", OPTIMIZERS, PRECISIONS)
    found += unknown_modules(job, "PyTorch", Module.EVERY_SECOND_MATMUL)
    beyond = beyond_llama(job.model, experts=job.model.is_moe, MLA=job.model.is_mla)
    return found + refused(job, "pytorch", beyond_llama=beyond) + shared_refusals(job)


def settings(job: ExportJob) -> dict[str, Any]:
    """plan.json: the model and how it is split, every dimension written out."""
    schedule = SCHEDULES[Schedule(job.layout.schedule)]
    return filled_yaml(job, "pytorch", "plan.txt", pipeline_schedule=schedule)


def render(job: ExportJob) -> Rendered:
    """train.py with its checkpoints, and plan.json."""
    files = {
        "train.py": template("pytorch", "pytorch_train.txt"), "saves.py": template("pytorch", "pytorch_saves.txt"),
        "good_checkpoints.py": template("pytorch", "good_checkpoints.py"), "plan.json": json_text(settings(job), indent=1),
    }  # fmt: skip
    return run_of(job, "pytorch", files)
