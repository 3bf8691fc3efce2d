"""What the front ends around transformers share: the library below them, plans that they can say, data for the smoke run."""

from typing import Any

from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.quoting import filled, refused
from planner.trainers.bundle.target import ExportJob, library_trainer
from planner.trainers.deepspeed import export as deepspeed

SMOKE_STEPS = 3
"""Optimizer steps of a smoke run."""


def on_deepspeed(job: ExportJob) -> bool:
    """Whether DeepSpeed is the library below the front end; else it is FSDP by accelerate."""
    return library_trainer(job.plan.trainer) == "deepspeed"


def back_end(job: ExportJob) -> Any:
    """The exporter of the library below."""
    return deepspeed if on_deepspeed(job) else accelerate


def front_end_refusals(job: ExportJob, name: str) -> list[str]:
    """What no front end around transformers' Trainer can say, then what the library below it refuses."""
    found = refused(job, "transformers", front_end=name)
    said = {one.split(":")[0] for one in found}
    return [*found, *(one for one in back_end(job).refusals(job) if one.split(":")[0] not in said)]


def smoke_data(job: ExportJob) -> str:
    """Script that writes enough random text for the smoke run: a word is at least one token."""
    tokens = job.workload.tokens
    return filled("transformers", "make_smoke_data.txt", steps=str(SMOKE_STEPS), tokens=str(tokens),
                  lines=str(-(-SMOKE_STEPS * tokens // 512)))  # fmt: skip
