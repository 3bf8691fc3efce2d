"""Small mixed jobs for tests."""

from __future__ import annotations

from typing import Any

from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.mixed.export.export_job import MixedExport
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Outer, Pipeline, Stage
from planner.model import ModelSpec, load_model
from planner.trainer import load_trainer
from planner.workload import Workload

TINY: dict[str, Any] = {
    "name": "tiny", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 64,
    "vocab_size": 128, "max_sequence_length": 64,
}  # fmt: skip


def two_kinds(a: int = 1, t: int = 2, **fields: Any) -> ClusterFile:
    """Nodes of four H100 and of two L40S."""
    return ClusterFile(
        nodes=(
            NodeKind(kind="big", hardware="h100-sxm", count=a, gpus=4, site="east"),
            NodeKind(kind="small", hardware="l40s", count=t, gpus=2, site=fields.pop("site", "east")),
        ),
        **fields,
    )


def stage(kind: str, layers: int, tp: int = 1, **fields: Any) -> Stage:
    """A stage in one line."""
    return Stage(kind=kind, layers=layers, tp=tp, **fields)


def pipeline(*stages: Stage, m: int = 4, b: int = 1, count: int = 1) -> Pipeline:
    """A pipeline in one line."""
    return Pipeline(stages=stages, num_microbatches=m, micro_batch_size=b, count=count)


def export_of(
    layout: MixedLayout, cluster: ClusterFile | None = None, trainer: str = "torchtitan", **work: Any
) -> MixedExport:
    """A job on the tiny model, or on the one that is named."""
    model = work.pop("model", None)
    found = ModelSpec(**TINY | work.pop("sizes", {})) if model is None else load_model(model)
    workload = Workload(
        **{
            "model": found,
            "sequence_length": 16 if model is None else 4096,
            "global_batch_size": layout.global_batch_size,
        }
        | work
    )
    cluster = cluster or two_kinds()
    job = MixedJob(
        workload=workload, cluster=cluster, trainers={one.kind: load_trainer(trainer) for one in cluster.nodes}
    )
    return MixedExport(job=job, layout=layout, trainer=trainer)


UNEQUAL = MixedLayout(
    pipelines=(
        pipeline(stage("big", 3), stage("small", 1), m=4),
        pipeline(stage("big", 4), m=3, b=2),
        pipeline(stage("small", 1), stage("small", 3, recompute="full", recompute_layers=2), m=2),
    ),
    zero=2,
)
"""Three replicas: other cuts, other shares, other microbatches, recompute in one stage."""
ALIKE = MixedLayout(pipelines=(pipeline(stage("big", 3), stage("small", 1), m=4, count=2),), zero=1)
"""One uneven cut, equal shares."""
LLAMA_CUT = MixedLayout(pipelines=(pipeline(stage("big", 20, 2), stage("small", 12, 2), m=16, count=2),), zero=1)
"""Llama 3.1 8B on all eight GPUs."""
SITES = two_kinds(site="west", links=(Link(between=("east", "west"), bandwidth=1e9, latency=0.03),))
DILOCO = MixedLayout(
    pipelines=(pipeline(stage("big", 4), count=4, m=2), pipeline(stage("small", 4), count=4, m=1)), zero=2,
    outer=Outer(method="diloco", every=10, bits=8, fragments=2),
)  # fmt: skip
