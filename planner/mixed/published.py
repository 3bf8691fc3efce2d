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
from planner.errors import PlannerError, listed, shown
from planner.hardware import OVER
from planner.mixed import published_links
from planner.mixed.mixed_estimate import MixedEstimate, estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.mixed.mixed_plan import job_of
from planner.model import ModelSpec, load_model
from planner.published_rows import DOES_NOT_FIT, NOT_RUN, PREDICTED, REFUSED, AnsweredRow, Quantity, rows_of, source_of
from planner.units import GIB, GIGA, MIB, parse
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
MEMORY = {"mem_bytes": 1.0, "mem_mib": MIB, "mem_gib": GIB}
"""Bytes of the units in which rows say the largest memory of a GPU."""
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
    measured = _group(row.get("measured"), f"{where}: {row['id']}: measured")
    head: dict[str, Any] = {
        "source": source, "id": row["id"], "topic": "heterogeneous", "counts": not row.get("suspect"), "sweep": source,
    }  # fmt: skip
    numbers = {key: float(value) for key, value in measured.items() if isinstance(value, (int, float)) and value > 0}
    if measured.get("ran") is False or not {"step_s", "tokens_per_s_per_gpu", *MEMORY} & set(numbers):
        return AnsweredRow(**head, status=NOT_RUN, reason="the source measured nothing")
    try:
        job, layout = run_of(document, row, where)
        found = estimate_mixed(job, layout)
    except PlannerError as error:
        return AnsweredRow(**head, status=REFUSED, reason=str(error))
    quantities = _quantities(job, layout, found, numbers)
    status = PREDICTED if found.out_of_memory < 0.5 else DOES_NOT_FIT
    return AnsweredRow(**head, status=status, quantities=quantities)


def _quantities(
    job: MixedJob, layout: MixedLayout, found: MixedEstimate, measured: Mapping[str, float]
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
    if "step_s" in measured:
        quantities["step_s"] = quantity(QUANTITIES[0], measured["step_s"], found.step_time)
    if "tokens_per_s_per_gpu" in measured:
        rate = found.tokens_per_second / layout.num_gpus
        step = quantity(QUANTITIES[0], found.step_time, found.step_time).range
        quantities["tokens_per_s_per_gpu"] = Quantity(
            measured=measured["tokens_per_s_per_gpu"], predicted=rate,
            range=(rate * found.step_time / step[1], rate * found.step_time / step[0]),
        )  # fmt: skip
    for name in MEMORY.keys() & measured.keys():
        most = max(found.stages, key=lambda stage: stage.memory_peak).memory_peak
        quantities["memory_gb"] = quantity(QUANTITIES[1], measured[name] * MEMORY[name] / GIGA, most / GIGA)
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
    return {**_group(_group(document.get("defaults"), "defaults").get(key), key), **_group(row.get(key), key)}


def _group(value: Any, place: str) -> Mapping[str, Any]:
    """Keys and values; none where nothing is said. Raises PlannerError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise PlannerError(f"{place} is {shown(value)}; it must be keys with values")
    return value or {}


def _groups(value: Any, place: str) -> list[Mapping[str, Any]]:
    """A list of such; none where nothing is said. Raises PlannerError."""
    if value is not None and not isinstance(value, list):
        raise PlannerError(f"{place} is {shown(value)}; it must be a list")
    return [_group(one, f"{place} {number}") for number, one in enumerate(value or (), 1)]


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
    models = _group(document.get("models"), f"{place}: models")
    said = _group(document.get("model") or models.get(str(row.get("model"))), f"{place}: model")
    sizes = {key: _number(said, key, f"{place}: model") for key in ("hidden", "layers", "heads", "vocab", "seq")}
    base = _base("opt-1.3b" if str(said.get("name") or row.get("model")).startswith("opt") else BASE)
    model = replace(
        base, name=str(said.get("name") or row.get("model")), num_layers=sizes["layers"], hidden_size=sizes["hidden"],
        num_heads=sizes["heads"], num_kv_heads=sizes["heads"], head_dim=sizes["hidden"] // sizes["heads"],
        ffn_size=_number({"ffn": 4 * sizes["hidden"], **said}, "ffn", f"{place}: model"), vocab_size=sizes["vocab"],
        max_sequence_length=sizes["seq"],
        tied_embeddings=base.tied_embeddings and not any(word in str(document.get("framework")).lower() for word in UNTIED),
        published_parameters=0.0,
    )  # fmt: skip
    precision = row.get("precision") or _group(document.get("defaults"), "defaults").get("precision") or "fp32"
    batch = _number(_said(document, row, "batch"), "global", f"{place}: batch")
    return Workload(model=model, sequence_length=sizes["seq"], global_batch_size=batch, precision=str(precision))


def _nodes(document: Mapping[str, Any], row: Mapping[str, Any], place: str) -> tuple[NodeKind, ...]:
    """The kinds of nodes, in rank order; how many where the file leaves it to the row."""
    found = []
    for one in _groups(_group(document.get("cluster"), f"{place}: cluster").get("nodes"), f"{place}: nodes"):
        gpus = _number(one, "gpus", f"{place}: cluster")
        hardware = JOINED.get((str(one.get("gpu")), gpus), str(one.get("gpu")))
        count = _number(one, "count", place) if one.get("count") else _counted(row, str(one.get("gpu")), gpus, place)
        if not count:
            continue
        network = one.get("network")
        share = None if network is None else parse(network, "bytes/s", what=f"{place}: network") / gpus
        name = str(one.get("kind") or one.get("gpu"))
        found.append(NodeKind(kind=name, hardware=hardware, count=count, gpus=gpus, network=share))
    if not found:
        raise PlannerError(f"{place}: no nodes are said")
    return tuple(found)


def _counted(row: Mapping[str, Any], gpu: str, gpus: int, place: str) -> int:
    """Nodes of one kind of GPU that a row's stages take, or that its number of GPUs fills."""
    if stages := _stages_of(row, place):
        return -(-sum(count * tp for stage in stages for name, tp, count in stage if name == gpu) // gpus)
    parallel = _group(row.get("parallel"), f"{place}: parallel")
    return -(-_number(parallel, "gpus", f"{place}: parallel") // gpus) if parallel.get("gpus") else 0


def _stages_of(row: Mapping[str, Any], place: str) -> list[list[tuple[str, int, int]]]:
    """GPU, tp and number of the replicas of every stage, where a row says them."""
    return [
        [
            (str(one.get("gpu")), _number(one, "tp", f"{place}: replicas"), _number(one, "count", f"{place}: replicas"))
            for one in _groups(stage.get("replicas"), f"{place}: replicas")
        ]
        for stage in _groups(row.get("stages"), f"{place}: stages")
    ]


def _links(document: Mapping[str, Any], nodes: Sequence[NodeKind]) -> tuple[Link, ...]:
    """Links between kinds that the file gives."""
    names = {one.kind for one in nodes}
    said = [
        (one, one.get("between")) for one in _groups(_group(document.get("cluster"), "cluster").get("links"), "links")
    ]
    return tuple(
        Link(between=(ends[0], ends[1]), bandwidth=parse(one.get("bandwidth"), "bytes/s", what="links: bandwidth"), per_node=True)
        for one, ends in said if isinstance(ends, list) and len(ends) == 2 and all(end in names for end in ends)
    )  # fmt: skip


def _layout(document: Mapping[str, Any], row: Mapping[str, Any], job: MixedJob, place: str) -> MixedLayout:
    """Pipelines of a row, equal ones together."""
    tp, dp, pp = _degrees(row, place)
    micro = _number(_said(document, row, "batch"), "micro", f"{place}: batch")
    batch = job.workload.global_batch_size
    if batch % (micro * dp):
        raise PlannerError(f"{place}: {batch} sequences do not divide by micro batch {micro} x dp {dp}")
    layers = _layers(row, job.workload.model.num_layers, pp, place)
    columns = _held_by_stage(row, job, place) or _held_by_rank(job, tp, dp, pp)
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
    degrees, stages = dict(_group(row.get("parallel"), f"{place}: parallel")), _stages_of(row, place)
    if stages:
        each = {tp for stage in stages for _, tp, _ in stage}
        said = {"tp": max(each, default=0), "dp": sum(count for _, _, count in stages[0]), "pp": len(stages)}
        degrees |= {key: value for key, value in said.items() if degrees.get(key) is None}
    tp, dp, pp = (_number(degrees, key, f"{place}: parallel") for key in ("tp", "dp", "pp"))
    return tp, dp, pp


def _layers(row: Mapping[str, Any], total: int, pp: int, place: str) -> list[int]:
    """Layers of every stage: as said, or units less embedding and head, or even."""
    if row.get("layers_per_stage"):
        said = row["layers_per_stage"] if isinstance(row["layers_per_stage"], list) else [row["layers_per_stage"]]
        layers = [_number({"layers_per_stage": one}, "layers_per_stage", place) for one in said]
    elif row.get("stages"):
        layers = [_number(one, "units", f"{place}: stages") for one in _groups(row["stages"], place)]
        layers[0] -= 1
        layers[-1] -= 1
        layers[-1] += total - sum(layers) if row.get("suspect") else 0
    else:
        layers = [total // pp + (number < total % pp) for number in range(pp)]
    if len(layers) != pp or sum(layers) != total:
        raise PlannerError(
            f"{place}: {len(layers)} stages hold {sum(layers)} layers; the model has {total}, and pp is {pp}"
        )
    return layers


def _held_by_stage(row: Mapping[str, Any], job: MixedJob, place: str) -> list[list[tuple[str, int]]]:
    """Kind and tp of every replica of every stage, where the row says them; a kind of node by its GPU."""
    kinds = {one.hardware.partition(OVER)[0]: one.kind for one in job.cluster.nodes}
    found = [
        [(kinds.get(gpu, gpu), tp) for gpu, tp, count in stage for _ in range(count)]
        for stage in _stages_of(row, place)
    ]
    if strange := {kind for stage in found for kind, _ in stage} - set(job.kinds):
        raise PlannerError(f"{place}: a stage stands on {shown(min(strange))}; the cluster has {listed(list(kinds))}")
    return found


def _held_by_rank(job: MixedJob, tp: int, dp: int, pp: int) -> list[list[tuple[str, int]]]:
    """The same where ranks are numbered (stage, replica, tensor rank), node by node: the kind of each group's first rank."""
    owners = [one.kind for one in job.cluster.nodes for _ in range(one.num_gpus)]
    if len(owners) < tp * dp * pp:
        raise PlannerError(f"tp {tp} x dp {dp} x pp {pp} are more than the {len(owners)} GPUs of the cluster")
    return [[(owners[(stage * dp + replica) * tp], tp) for replica in range(dp)] for stage in range(pp)]
