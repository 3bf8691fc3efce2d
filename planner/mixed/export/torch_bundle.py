"""PyTorch itself for unlike stages and unequal shares: train.py (the model), mixed_train.py (the split) and plan.json."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from planner.mixed.export.mixed_job import MixedJob
from planner.trainers.bundle.quoting import json_text, template
from planner.trainers.pytorch import export as one_kind

KEPT = (
    "model", "sequence_length", "global_batch_size", "precision", "optimizer", "learning_rate", "schedule", "compile", "tp", "zero",
)  # fmt: skip
"""Of plan.json of a job of one kind."""


def settings(job: MixedJob) -> dict[str, Any]:
    """plan.json: the model, and of every replica its share, its loss scale R m_r b_r / G, its stages with their ranks."""
    layout = job.layout
    data = one_kind.settings(job.alike(layout.pipelines[0], "torchtitan"))
    pipelines = [one for one in layout.pipelines for _ in range(one.count)]
    scales = [scale for one, scale in zip(layout.pipelines, layout.loss_scales(), strict=True) for _ in range(one.count)]
    starts = [0, *accumulate(one.sequences for one in pipelines)]
    replicas = []
    for number, (pipeline, scale, start) in enumerate(zip(pipelines, scales, starts, strict=False)):
        placed, layer, stages = job.placement.of_replica(number), 0, []
        for stage, where in zip(pipeline.stages, placed, strict=True):
            stages.append({
                "layers": list(range(layer, layer + stage.layers)), "ranks": list(where.ranks), "kind": stage.kind,
                "recompute": stage.recompute, "recompute_layers": stage.recompute_layers,
            })  # fmt: skip
            layer += stage.layers
        replicas.append({
            "micro_batch_size": pipeline.micro_batch_size, "num_microbatches": pipeline.num_microbatches, "loss_scale": scale,
            "first_row": start, "stages": stages,
        })  # fmt: skip
    return {name: data[name] for name in KEPT} | {"global_batch_size": layout.global_batch_size, "replicas": replicas}


def files(job: MixedJob) -> dict[str, str]:
    """What the folder holds besides launch scripts."""
    return {
        "train.py": template("pytorch", "pytorch_train.txt"),
        "mixed_train.py": template("planner.mixed.export", "mixed_train.txt"), "plan.json": json_text(settings(job), indent=1),
    }  # fmt: skip
