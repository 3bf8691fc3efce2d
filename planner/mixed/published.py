"""Published runs on mixed clusters and with uneven stages, answered: rows of ``profiles/beyond-runs/heterogeneous``.

A row says its degrees, the layers (or units) of each stage and which GPUs hold them; ranks are numbered stage by stage, then by
replica, then by tensor rank, node by node.  [DeepSpeed, runtime/pipe/topology.py: PipeModelDataParallelTopology]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.error_bars import QUANTITIES, error_bar, kind_of
from planner.errors import PlannerError, shown
from planner.hardware import OVER
from planner.mixed import published_links
from planner.mixed.mixed_estimate import MixedEstimate, estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.mixed.mixed_plan import job_of
from planner.model import ModelSpec, load_model
from planner.published_rows import DOES_NOT_FIT, NOT_RUN, PREDICTED, REFUSED, AnsweredRow, Quantity, rows_of, source_of
from planner.units import GIGA, parse
from planner.workload import Workload

TRAINERS = (
    ("deepspeed (2020)", "megatron-deepspeed@2020"),
    ("sailor", "sailor"),
    ("deepspeed", "megatron-deepspeed"),
    ("aceso", "megatron-2021@2021.12"),
    ("megatron", "megatron-2021"),
)
"""What stands in a framework's name, and the trainer that is nearest: the first that matches."""
UNTIED = ("sailor",)
"""Frameworks whose models have a head of their own whatever the published model has.  [Sailor, megatron/model/opt_model.py]"""
JOINED = {("gh200-96gb", 4): f"gh200-96gb{OVER}450 GB/s"}
"""Hardware of nodes whose GPUs are joined otherwise than the profile has them: four superchips on a board, each with six of its 18
NVLinks to every other.  [NVIDIA, GH200 whitepaper; CSCS, Alps documentation: nodes of four GH200]"""
BASE = "gpt3-350m"
"""Model whose details a row's sizes complete: a GPT with biases, LayerNorm, learned positions and a plain MLP."""


def answers(document: Mapping[str, Any], where: str) -> list[AnsweredRow]:
    """One answer per row of a file. Raises PlannerError where the file is no list of runs."""
    if document.get("topic") == "geo":
        return published_links.answers(document, where)
    source = source_of(document, where)
    return [_answer(document, row, source, where) for row in rows_of(document, where)]


def _answer(document: Mapping[str, Any], row: Mapping[str, Any], source: str, where: str) -> AnsweredRow:
    """The answer to one row."""
    measured = row.get("measured") or {}
    head: dict[str, Any] = {
        "source": source, "id": row["id"], "topic": "heterogeneous", "counts": not row.get("suspect"), "sweep": source,
    }  # fmt: skip
    if measured.get("ran") is False or not any(name in measured for name in ("step_s", "mem_bytes")):
        return AnsweredRow(**head, status=NOT_RUN, reason="the source measured nothing")
    try:
        job, layout = run_of(document, row, where)
        found = estimate_mixed(job, layout)
    except PlannerError as error:
        return AnsweredRow(**head, status=REFUSED, reason=str(error))
    quantities = _quantities(job, layout, found, measured)
    status = PREDICTED if found.out_of_memory < 0.5 else DOES_NOT_FIT
    return AnsweredRow(**head, status=status, quantities=quantities)


def _quantities(
    job: MixedJob, layout: MixedLayout, found: MixedEstimate, measured: Mapping[str, Any]
) -> dict[str, Quantity]:
    """Measured numbers beside the prediction; the interval is that of the kind of GPU that is known worst."""
    used = [kind for kind in job.kinds if layout.gpus_of(kind)]

    def quantity(name: str, value: float, predicted: float) -> Quantity:
        bars = [
            error_bar(name, job.trainers[kind], job.clusters[kind].hardware, kind_of(job.workload, job.trainers[kind]))
            for kind in used
        ]
        low, high = min(one.low for one in bars), max(one.high for one in bars)
        return Quantity(measured=value, predicted=predicted, range=(predicted * low, predicted * high))

    quantities = {}
    if measured.get("step_s"):
        quantities["step_s"] = quantity(QUANTITIES[0], float(measured["step_s"]), found.step_time)
    if measured.get("mem_bytes"):
        most = max(found.stages, key=lambda stage: stage.memory_peak).memory_peak
        quantities["memory_gb"] = quantity(QUANTITIES[1], float(measured["mem_bytes"]) / GIGA, most / GIGA)
    return quantities


def run_of(document: Mapping[str, Any], row: Mapping[str, Any], where: str) -> tuple[MixedJob, MixedLayout]:
    """A row as a job and its layout. Raises PlannerError with what is missing."""
    place = f"{where}: {row['id']}"
    nodes = _nodes(document, row, place)
    cluster = ClusterFile(nodes=nodes, links=_links(document, nodes))
    trainer = trainer_of(str(document.get("framework") or ""))
    workload = _workload(document, row, nodes, place)
    job = job_of(workload, cluster, trainer)
    return job, _layout(document, row, job, place)


def trainer_of(framework: str) -> str:
    """The trainer of a framework. Raises PlannerError for one that is not known."""
    found = next((trainer for word, trainer in TRAINERS if word in framework.lower()), None)
    if found is None:
        raise PlannerError(f"framework {shown(framework)} is of no trainer that is planned here")
    return found


def _said(document: Mapping[str, Any], row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A group of keys of a row over the defaults of its file."""
    return {**((document.get("defaults") or {}).get(key) or {}), **(row.get(key) or {})}


def _number(group: Mapping[str, Any], key: str, place: str) -> int:
    value = group.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlannerError(f"{place}: {key} is {shown(value)}; it must be a whole number from 1")
    return value


@cache
def _base(preset: str) -> ModelSpec:
    return load_model(preset)


def _workload(document: Mapping[str, Any], row: Mapping[str, Any], nodes: Sequence[NodeKind], place: str) -> Workload:
    """The job that a row ran."""
    said = document.get("model") or (document.get("models") or {}).get(row.get("model")) or {}
    sizes = {key: _number(said, key, f"{place}: model") for key in ("hidden", "layers", "heads", "vocab", "seq")}
    base = _base("opt-1.3b" if str(said.get("name") or row.get("model")).startswith("opt") else BASE)
    model = replace(
        base, name=str(said.get("name") or row.get("model")), num_layers=sizes["layers"], hidden_size=sizes["hidden"],
        num_heads=sizes["heads"], num_kv_heads=sizes["heads"], head_dim=sizes["hidden"] // sizes["heads"],
        ffn_size=said.get("ffn") or 4 * sizes["hidden"], vocab_size=sizes["vocab"], max_sequence_length=sizes["seq"],
        tied_embeddings=base.tied_embeddings and not any(word in str(document.get("framework")).lower() for word in UNTIED),
        published_parameters=0.0,
    )  # fmt: skip
    precision = row.get("precision") or (document.get("defaults") or {}).get("precision") or "fp32"
    batch = _number(_said(document, row, "batch"), "global", f"{place}: batch")
    return Workload(model=model, sequence_length=sizes["seq"], global_batch_size=batch, precision=str(precision))


def _nodes(document: Mapping[str, Any], row: Mapping[str, Any], place: str) -> tuple[NodeKind, ...]:
    """The kinds of nodes, in rank order; how many where the file leaves it to the row."""
    found = []
    for one in (document.get("cluster") or {}).get("nodes") or []:
        gpus = _number(one, "gpus", f"{place}: cluster")
        hardware = JOINED.get((str(one.get("gpu")), gpus), str(one.get("gpu")))
        count = one.get("count") or _counted(row, str(one.get("gpu")), gpus)
        if not count:
            continue
        network = one.get("network")
        share = None if network is None else parse(network, "bytes/s", what=f"{place}: network") / gpus
        found.append(NodeKind(kind=str(one["kind"]), hardware=hardware, count=count, gpus=gpus, network=share))
    if not found:
        raise PlannerError(f"{place}: no nodes are said")
    return tuple(found)


def _counted(row: Mapping[str, Any], gpu: str, gpus: int) -> int:
    """Nodes of one kind of GPU that a row's stages take, or that its number of GPUs fills."""
    held = [one for stage in row.get("stages") or [] for one in stage["replicas"] if one["gpu"] == gpu]
    if held:
        return -(-sum(one["count"] * one["tp"] for one in held) // gpus)
    return -(-int((row.get("parallel") or {}).get("gpus", 0)) // gpus)


def _links(document: Mapping[str, Any], nodes: Sequence[NodeKind]) -> tuple[Link, ...]:
    """Links between kinds that the file gives."""
    names = {one.kind for one in nodes}
    return tuple(
        Link(between=tuple(one["between"]), bandwidth=parse(one["bandwidth"], "bytes/s"), per_node=True)
        for one in (document.get("cluster") or {}).get("links") or [] if set(one["between"]) <= names
    )  # fmt: skip


def _layout(document: Mapping[str, Any], row: Mapping[str, Any], job: MixedJob, place: str) -> MixedLayout:
    """Pipelines of a row, equal ones together."""
    tp, dp, pp = _degrees(row, place)
    micro = _number(_said(document, row, "batch"), "micro", f"{place}: batch")
    batch = job.workload.global_batch_size
    if batch % (micro * dp):
        raise PlannerError(f"{place}: {batch} sequences do not divide by micro batch {micro} x dp {dp}")
    layers = _layers(row, job.workload.model.num_layers, pp, place)
    columns = _held_by_stage(row, job) or _held_by_rank(job, tp, dp, pp)
    if any(len(column) != dp for column in columns):
        raise PlannerError(f"{place}: its stages have {sorted({len(one) for one in columns})} replicas, not dp {dp}")
    held = Counter(zip(*columns, strict=True))
    pipelines = [
        Pipeline(
            stages=tuple(Stage(kind=kind, layers=count, tp=own) for (kind, own), count in zip(kinds, layers, strict=True)),
            count=count, micro_batch_size=micro, num_microbatches=batch // (micro * dp),
        )
        for kinds, count in held.items()
    ]  # fmt: skip
    return MixedLayout(pipelines=tuple(pipelines), zero=0)


def _degrees(row: Mapping[str, Any], place: str) -> tuple[int, int, int]:
    """tp, dp and pp of a row; what it leaves open where its stages say each replica: tp may differ among them."""
    degrees, stages = dict(row.get("parallel") or {}), row.get("stages") or []
    if stages:
        each = {one["tp"] for stage in stages for one in stage["replicas"]}
        said = {"tp": max(each), "dp": sum(one["count"] for one in stages[0]["replicas"]), "pp": len(stages)}
        degrees |= {key: value for key, value in said.items() if degrees.get(key) is None}
    tp, dp, pp = (_number(degrees, key, f"{place}: parallel") for key in ("tp", "dp", "pp"))
    return tp, dp, pp


def _layers(row: Mapping[str, Any], total: int, pp: int, place: str) -> list[int]:
    """Layers of every stage: as said, or units less embedding and head, or even."""
    if row.get("layers_per_stage"):
        layers = [int(one) for one in row["layers_per_stage"]]
    elif row.get("stages"):
        layers = [int(one["units"]) for one in row["stages"]]
        layers[0] -= 1
        layers[-1] -= 1
        layers[-1] += total - sum(layers) if row.get("suspect") else 0
    else:
        layers = [total // pp + (number < total % pp) for number in range(pp)]
    if len(layers) != pp or sum(layers) != total:
        raise PlannerError(f"{place}: {len(layers)} stages hold {sum(layers)} layers; the model has {total}, and pp is {pp}")
    return layers


def _held_by_stage(row: Mapping[str, Any], job: MixedJob) -> list[list[tuple[str, int]]]:
    """Kind and tp of every replica of every stage, where the row says them; a kind of node by its GPU."""
    kinds = {one.hardware.partition(OVER)[0]: one.kind for one in job.cluster.nodes}
    stages = row.get("stages") or []
    return [
        [(kinds.get(one["gpu"], one["gpu"]), int(one["tp"])) for one in stage["replicas"] for _ in range(one["count"])]
        for stage in stages
    ]


def _held_by_rank(job: MixedJob, tp: int, dp: int, pp: int) -> list[list[tuple[str, int]]]:
    """The same where ranks are numbered (stage, replica, tensor rank), node by node: the kind of each group's first rank."""
    owners = [one.kind for one in job.cluster.nodes for _ in range(one.num_gpus)]
    if len(owners) < tp * dp * pp:
        raise PlannerError(f"tp {tp} x dp {dp} x pp {pp} are more than the {len(owners)} GPUs of the cluster")
    return [[(owners[(stage * dp + replica) * tp], tp) for replica in range(dp)] for stage in range(pp)]
