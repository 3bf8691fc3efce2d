"""What the front ends around transformers share: the library below them, plans that they can say, data for the smoke run."""

from typing import Any

from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.quoting import filled
from planner.trainers.bundle.target import ExportJob, Setting, library_trainer
from planner.trainers.deepspeed import export as deepspeed

SMOKE_STEPS = 3
"""Optimizer steps of a smoke run."""
MODEL = Setting(
    None, "Folder or hub name of the model: config.json and tokenizer, and weights unless you start from random ones."
)
"""Every front end reads sizes and tokenizer from there."""
SMOKE_PREPARE = (
    "# Random text for the smoke run, written once.",
    "[ -f data/smoke.jsonl ] || python make_smoke_data.py",
)


def on_deepspeed(job: ExportJob) -> bool:
    """Whether DeepSpeed is the library below the front end; else it is FSDP by accelerate."""
    return library_trainer(job.plan.trainer) == "deepspeed"


def back_end(job: ExportJob) -> Any:
    """The exporter of the library below."""
    return deepspeed if on_deepspeed(job) else accelerate


def front_end_refusals(job: ExportJob, name: str) -> list[str]:
    """What no front end around transformers' Trainer can say, then what the library below it refuses."""
    found = {
        f"{degree} {getattr(job.layout, degree)}": f"{name} runs {job.trainer.name} plans with data parallelism alone, no {what} "
        f"parallelism; use {degree} 1"
        for degree, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert"))
        if getattr(job.layout, degree) > 1
    }
    below = [one for one in back_end(job).refusals(job) if one.split(":")[0] not in found]
    return [*(f"{setting}: {why}" for setting, why in found.items()), *below]


def smoke_data(job: ExportJob) -> str:
    """Script that writes enough random text for the smoke run: a word is at least one token."""
    tokens = job.workload.tokens
    return filled("transformers", "make_smoke_data.txt", steps=str(SMOKE_STEPS), tokens=str(tokens),
                  lines=str(-(-SMOKE_STEPS * tokens // 512)))  # fmt: skip
