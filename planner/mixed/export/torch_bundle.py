"""PyTorch itself for unlike stages and unequal shares: train.py (the model), mixed_train.py (the split) and plan.json."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from planner.mixed.export.export_job import MixedExport
from planner.trainers.bundle.quoting import json_text, run_of, template
from planner.trainers.bundle.target import Rendered
from planner.trainers.pytorch import export as one_kind

KEPT = (
    "model", "sequence_length", "global_batch_size", "precision", "optimizer", "learning_rate", "schedule", "compile", "tp", "zero",
)  # fmt: skip
"""Of plan.json of a job of one kind."""


def settings(mixed: MixedExport) -> dict[str, Any]:
    """plan.json: the model, and of every replica its share, its loss scale R m_r b_r / G, its stages with their ranks."""
    layout = mixed.layout
    data = one_kind.settings(mixed.alike(layout.pipelines[0], layout.replicas))
    pipelines = [one for one in layout.pipelines for _ in range(one.count)]
    scales = [
        scale for one, scale in zip(layout.pipelines, layout.loss_scales(), strict=True) for _ in range(one.count)
    ]
    starts = [0, *accumulate(one.sequences for one in pipelines)]
    replicas = []
    for number, (pipeline, scale, start) in enumerate(zip(pipelines, scales, starts, strict=False)):
        placed, layer, stages = mixed.placement.of_replica(number), 0, []
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


def refusals(mixed: MixedExport) -> list[str]:
    """What the script has not, looked at for every pipeline: its rules are about degrees and the model."""
    layout = replace(
        mixed.layout, zero=2
    )  # weights stay gathered and states are sharded, whatever the trainer calls it
    every = [replace(mixed, layout=layout).alike(one, layout.replicas) for one in layout.pipelines]
    return list(dict.fromkeys(text for one in every for text in one_kind.refusals(one)))


def render(mixed: MixedExport) -> Rendered:
    """train.py (the model), mixed_train.py (the split), plan.json."""
    files = {
        "train.py": template("pytorch", "pytorch_train.txt"),
        "mixed_train.py": template("planner.mixed.export", "mixed_train.txt"), "plan.json": json_text(settings(mixed), indent=1),
    }  # fmt: skip
    made = run_of(mixed.alike(mixed.layout.pipelines[0], mixed.layout.replicas), "pytorch", files)
    scales = ", ".join(f"{scale:.6g}" for scale in mixed.layout.loss_scales())
    notes = (
        f"Loss scales R m b / G of the pipelines: {scales}. They are in plan.json, and mixed_train.py applies them: every sequence "
        "of the global batch weighs the same, and the gradient is that of one rank with the whole batch.",
        "Weights are gathered once a step and stay; gradients are summed whole and reduced once, after the last microbatch.",
        "Unlike GPUs need one NCCL that knows all of them; where their vendors differ, another backend of torch.distributed.",
    )
    words = (made.entry, made.smoke)
    entry, smoke = (tuple("mixed_train.py" if word == "train.py" else word for word in one) for one in words)
    return replace(made, entry=entry, smoke=smoke, notes=(*made.notes, *notes))
