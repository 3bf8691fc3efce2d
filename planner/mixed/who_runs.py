"""Which trainers can run a mixed layout, by what it asks of them."""

from __future__ import annotations

from planner.mixed.mixed_layout import MixedLayout, Stage
from planner.trainer import Trainer

CUTS = {
    "Megatron Core": "--pipeline-model-parallel-layout", "megatron-bridge": "pipeline_model_parallel_layout",
    "megatron-deepspeed": "the pipeline engine's partition_method",
}  # fmt: skip
"""Code bases that cut a model anywhere, and what says where."""


def unlike(layout: MixedLayout) -> list[str]:
    """What differs between the ranks of a layout: cut, tp, recompute, shares, micro batch."""
    pipelines = layout.pipelines
    stages = [stage for one in pipelines for stage in one.stages]
    found = []
    if any(len({stage.layers for stage in one.stages}) > 1 for one in pipelines):
        found.append("layers")
    if len({stage.tp for stage in stages}) > 1:
        found.append("tp")
    if len({stage.recompute for stage in stages}) > 1:
        found.append("recompute")
    if len({_shape(one.stages) for one in pipelines}) > 1:
        found.append("pipelines")
    if len({one.num_microbatches for one in pipelines}) > 1:
        found.append("shares")
    if len({one.micro_batch_size for one in pipelines}) > 1:
        found.append("micro batch")
    return found


def _shape(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    return tuple(stage.layers for stage in stages)


def who_runs(layout: MixedLayout, trainer: Trainer) -> list[str]:
    """Sentences that say what runs a layout, for what it asks beyond equal ranks."""
    asked = unlike(layout)
    if not asked:
        return [f"every rank has the same sizes: {trainer.name} runs it as it is"]
    said = []
    if "layers" in asked:
        how = CUTS.get(trainer.code_base)
        said.append(
            f"stages of unlike length: {trainer.name} with {how}" if how
            else f"stages of unlike length: {trainer.name} cuts evenly; Megatron-LM with --pipeline-model-parallel-layout, or the "
            "PyTorch bundle"
        )  # fmt: skip
    if "recompute" in asked:
        said.append("recompute by stage: the PyTorch bundle; FlagScale")
    if {"tp", "pipelines"} & set(asked):
        said.append("tp or stages that differ by kind: FlagScale (hetero_process_meshes) or HexiScale; Megatron-LM has one tp")
    if {"shares", "micro batch"} & set(asked):
        said.append("shares that differ: the PyTorch bundle, which scales each loss; --micro-batch-size and dp of others are equal")
    return said
