"""What the front ends around transformers share: plans that they can say, data for the smoke run."""

from __future__ import annotations

from planner.layout import Recompute
from planner.trainers.bundle.target import ExportJob, Setting
from planner.trainers.transformers.training_run import OPTIMIZERS

SMOKE_STEPS = 3
"""Optimizer steps of a smoke run."""


def shared_refusals(job: ExportJob, name: str, *, offloads_activations: bool) -> list[str]:
    """What no front end around transformers' Trainer can say, whatever its back end."""
    layout, found = job.layout, []
    for degree, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if int(getattr(layout, degree)) > 1:
            found.append(
                f"{degree} {getattr(layout, degree)}: {name} runs {job.trainer.name} plans with data parallelism alone, no {what} "
                f"parallelism; use {degree} 1"
            )
    if int(layout.recompute) == Recompute.SELECTIVE:
        found.append(
            "recompute selective: checkpoints of transformers cover whole layers [PreTrainedModel.gradient_checkpointing_enable]; "
            "use full or none"
        )
    if int(layout.offload_activations) and not offloads_activations:
        found.append(f"offload_activations: {name} has no setting for it; set it to false")
    if job.workload.optimizer not in OPTIMIZERS:
        found.append(
            f"optimizer {job.workload.optimizer} has no counterpart in transformers' OptimizerNames; use {', '.join(OPTIMIZERS)}"
        )
    return found


MODEL = Setting(
    value=None,
    why="Folder or hub name of the model: config.json and tokenizer, and weights unless you start from random ones.",
)
"""Every front end reads sizes and tokenizer from there."""


def smoke_data(job: ExportJob) -> str:
    """Script that writes enough random text for the smoke run: a word is at least one token."""
    tokens = SMOKE_STEPS * job.workload.tokens
    return f'''"""Writes data/smoke.jsonl: random words, at least {SMOKE_STEPS} steps of {job.workload.tokens} tokens."""

import json
import os
import random

WORDS, LINES = 512, {-(-tokens // 512)}
generator = random.Random(0)
letters = "abcdefghijklmnopqrstuvwxyz"
os.makedirs("data", exist_ok=True)
temporary = f"data/.smoke.{{os.getpid()}}"
with open(temporary, "w", encoding="utf-8") as stream:
    for _ in range(LINES):
        words = ("".join(generator.choices(letters, k=4)) for _ in range(WORDS))
        stream.write(json.dumps({{"text": " ".join(words)}}) + "\\n")
os.replace(temporary, "data/smoke.jsonl")
'''


SMOKE_PREPARE = (
    "# Random text for the smoke run, written once.",
    "[ -f data/smoke.jsonl ] || python make_smoke_data.py",
)
