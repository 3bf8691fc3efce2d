"""What an exporter gets and gives: the job of a plan, the target that says no or renders, the files with how to start them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from planner import library
from planner.cluster import Cluster, strides
from planner.cost.parameters import count_parameters
from planner.cost.pipeline.partition import assign_layers, stage_layers
from planner.errors import listed
from planner.layout import Layout, Module, Recompute, Schedule, module_names
from planner.model import ModelSpec
from planner.plan_file import Plan
from planner.record import record
from planner.rules import Job
from planner.trainer import Trainer
from planner.trainer_options import spelled
from planner.workload import Workload

LEVELS = ("name known", "parsed", "validated", "groups built", "model built")
"""How far a trainer's own code has gone with an exported file, least first."""


@dataclass(frozen=True)
class Setting:
    """A value and the reason for it; both are written into the bundle."""

    value: str | None
    """None: the user has to say it."""
    why: str
    """One line."""


def layers_per_chunk(num_layers: int, layout: Layout) -> list[list[int]]:
    """Layers of every virtual stage, by pipeline rank and then by chunk of that rank.

    A rank's layers are partitioned over its chunks as evenly as it goes: on the last stage the remainder goes to its first
    chunks, on the others to their last, so that the chunks that carry embedding and loss are not the larger ones.
    """
    parts, ranks = int(layout.vpp), stage_layers(num_layers, layout)
    partition = []
    for rank, layers in enumerate(ranks):
        share, extra = divmod(layers, parts)
        ends = [share + (i < extra) for i in range(parts)]
        partition.append(ends if rank == len(ranks) - 1 and rank > 0 else ends[::-1])
    return partition


def virtual_stages(partition: list[list[int]], layout: Layout) -> list[tuple[int, int, range]]:
    """(pipeline rank, chunk, layer numbers from 0) of every virtual stage, in the order that the data passes them.

    Looping schedules pass all ranks chunk by chunk; V-shaped ones go down the ranks with the first chunk and back up
    with the second. ``partition``: ``layers_per_chunk``.
    """
    v_shaped = int(layout.schedule) in (Schedule.ZBV, Schedule.DUALPIPE_V)
    ranks, found, start = list(range(len(partition))), [], 0
    for chunk in range(len(partition[0])):
        for rank in reversed(ranks) if v_shaped and chunk == 1 else ranks:
            found.append((rank, chunk, range(start, start + partition[rank][chunk])))
            start += partition[rank][chunk]
    return found


@record
class ExportJob:
    """A plan with what it names loaded: all that an exporter looks at."""

    plan: Plan
    """The plan as written in its file."""
    cluster: Cluster
    """GPUs and how they are connected."""
    trainer: Trainer
    """What the plan was priced for."""

    @staticmethod
    def of(plan: Plan) -> ExportJob:
        """The job of a plan. Raises PlannerError when its hardware or its trainer is unknown."""
        return ExportJob(plan=plan, cluster=plan.cluster(), trainer=plan.load_trainer())

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return self.plan.workload

    @property
    def model(self) -> ModelSpec:
        """The architecture."""
        return self.plan.workload.model

    @cached_property
    def layout(self) -> Any:
        """How it is split: the plan's Layout, in plain integers."""
        return Layout(**{name: int(value) for name, value in self.plan.layout.columns().items()})

    @property
    def shard(self) -> int:
        """Data parallel ranks over which states are sharded."""
        return int(self.layout.shard)

    @property
    def rules_job(self) -> Job:
        """What the rules look at."""
        return Job(workload=self.workload, cluster=self.cluster, trainer=self.trainer)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one host that the job uses."""
        return min(int(self.cluster.hardware.gpus_per_node), self.cluster.num_gpus)

    @property
    def num_nodes(self) -> int:
        """Hosts in the job."""
        return self.cluster.num_nodes

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What templates may name: fields of the layout as a plan file says them, the parts of the job, its size."""
        return {
            **self.layout.to_dict(), "job": self, "plan": self.plan, "layout": self.layout, "work": self.workload,
            "workload": self.workload, "model": self.model, "trainer": self.trainer, "cluster": self.cluster,
            "hardware": self.cluster.hardware, "gpus": self.cluster.num_gpus, "num_nodes": self.num_nodes,
            "gpus_per_node": self.gpus_per_node, "shard": self.shard,
        }  # fmt: skip

    def name_of(self, run: str) -> str:
        """Name of a run ('run' or 'smoke') for schedulers: lower case letters, digits and hyphens, at most 50."""
        model = re.sub(r"[^a-z0-9]+", "-", self.model.name.lower()).strip("-") or "model"
        return f"plan-{model[:30].strip('-')}-{self.cluster.num_gpus}{'-smoke' if run == 'smoke' else ''}"

    def layers_per_chunk(self) -> list[list[int]]:
        """Transformer layers of every virtual stage, by pipeline rank and then by chunk of that rank, as they were priced."""
        return layers_per_chunk(self.model.num_layers, assign_layers(self.model, self.trainer, self.layout))

    def virtual_stages(self) -> list[tuple[int, int, range]]:
        """(pipeline rank, chunk, layer numbers from 0) of every virtual stage, in the order that the data passes them."""
        return virtual_stages(self.layers_per_chunk(), self.layout)

    def parameters(self, vocab_rows: int | None = None) -> list[int]:
        """Parameters that one GPU of every pipeline rank holds before state sharding, exactly.

        The counts of cost.parameters over the layers that the rank really has: dense weights over tp, experts over
        ep etp, the rest whole. ``vocab_rows``: rows of the table after the trainer's padding; default the model's own.
        A tied table is held twice when the first and the last stage differ, and so is one that prediction modules look
        tokens up in; with such modules the final norm follows the last layer, not the head.
        """
        model, layout, counts = self.model, self.layout, count_parameters(self.model)
        tp = int(layout.tp)
        table = (model.vocab_size if vocab_rows is None else vocab_rows) * model.hidden_size / tp
        dense, sparse = layer_parameters(model, tp, int(layout.ep) * int(layout.etp))
        held, stages = [0.0] * int(layout.pp), self.virtual_stages()
        for rank, _, layers in stages:
            held[rank] += sum(sparse if model.is_moe_layer(i) else dense for i in layers)
        held[stages[0][0]] += table + counts.position_embedding
        last = sparse if model.is_moe_layer(model.num_layers - 1) else dense
        apart = stages[0][0] != stages[-1][0]
        looked_up = model.tied_embeddings or model.mtp_layers > 0
        held[stages[-1][0]] += table * ((not model.tied_embeddings) + (apart and looked_up))
        ending = [stage for stage in stages if len(stage[2])][-1] if model.mtp_layers else stages[-1]
        held[ending[0]] += counts.final_norm
        held[stages[-1][0]] += model.mtp_layers * (counts.mtp_sharded / tp + counts.mtp_replicated + last)
        return [round(value) for value in held]


GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
"""Process groups of a layout: ranks that work together."""


def group_of(layout: Layout, name: str, rank: int) -> list[int]:
    """Ranks of the group ``name`` that holds ``rank``, ascending: ``rank`` moved along its stride."""
    number, stride = int(getattr(layout, name)), int(strides(layout)[name])  # type: ignore[call-overload]
    first = rank - (rank // stride % number) * stride
    return [first + index * stride for index in range(number)]


def layer_parameters(model: ModelSpec, tp: int, expert_ranks: int) -> tuple[float, float]:
    """Parameters that one GPU holds of a dense layer, and of one with experts, which are spread over ``expert_ranks``.

    Key-value heads are repeated above their number of ranks.
    """
    counts = count_parameters(model)
    repeat = max(tp / model.num_kv_heads, 1.0) - 1.0
    attention = (counts.attention_sharded + repeat * counts.key_value_weights) / tp + counts.attention_replicated
    experts = counts.shared_experts / tp + counts.router + model.num_experts * counts.expert / expert_ranks
    return attention + counts.mlp_sharded / tp + counts.mlp_replicated, attention + experts


@record
class Rendered:
    """The files of one trainer and how they are started."""

    files: Mapping[str, str]
    """Name in the bundle -> text."""
    entry: tuple[str, ...]
    """Words that start the training. They are written between double quotes: ``$NAME`` and ``${NAME[@]}`` are expanded."""
    smoke: tuple[str, ...]
    """The same for the smoke run: synthetic data, a few steps, the same parallelism."""
    prepare: tuple[str, ...] = ()
    """Shell lines that every node runs in the bundle's folder before it starts."""
    start: str = "torchrun"
    """Who starts the words: 'torchrun' (one process per GPU), 'node' (once per node, the trainer's own launcher) or
    'once' (on the first node only)."""
    keeps_ranks: bool = True
    """Whether the number of a node decides which of the plan's ranks it holds; not of servers, nor where Ray gives out
    the nodes, in the order of their addresses [verl, single_controller/ray/base.py: sort_placement_group_by_node_ip]."""
    environment: Mapping[str, Setting] = field(default_factory=dict)
    """Environment variables that this trainer needs or that this plan was priced with."""
    variables: Mapping[str, Setting] = field(default_factory=dict)
    """Shell variables that the user sets (paths of code and data), with a default where there is one."""
    notes: tuple[str, ...] = ()
    """What the trainer cannot say in its own words, conversions, and what to look at in its log."""
    vocab_rows: int | None = None
    """Rows of the embedding table after the trainer's padding; None: not padded."""
    install: tuple[str, ...] = ()
    """Shell lines that install the trainer."""

    @property
    def needed(self) -> list[str]:
        """Variables that have no default: the user must set them."""
        return [name for name, one in self.variables.items() if one.value is None]


@record
class Target:
    """One trainer that plans are exported to."""

    name: str
    """Name after --to."""
    title: str
    """Name for people, with the form of its configuration."""
    trainers: tuple[str, ...]
    """Trainers of profiles/trainers whose plans it runs as they were priced."""
    versions: str
    """Versions that the export was checked against, like '>=0.17,<0.20'."""
    package: str
    """Name on the package index."""
    level: str
    """Of LEVELS: how far the tests take the trainer's own code."""
    refusals: Callable[[ExportJob], list[str]]
    """What this trainer cannot run in this job: sentences with the numbers and the remedy; empty = it can."""
    render: Callable[[ExportJob], Rendered]
    """The files."""
    writes: tuple[str, ...] = ()
    """Facts of a trainer's file that decide memory and that its configuration says: of STORED."""
    options: tuple[str, ...] = ()
    """Options of a trainer that its configuration says."""


STORED = ("weight_bytes", "gradient_bytes", "gradient_reduce_bytes", "optimizer_bytes")
"""Facts of a trainer that a file of one's own may change, and that a run would not follow unless its configuration says so."""


OF_PAIRS = ("axolotl", "llama-factory", "ms-swift")
"""Trainers whose exports write DPO."""


def unknown_choices(job: ExportJob, who: str, optimizers: Collection[str], precisions: Collection[str]) -> list[str]:
    """Optimizer and precision that an exporter has no word for: refused, never written as something else."""
    return [
        f"{field} {value}: the export to {who} knows {listed(known)}; choose {_of(known)}"
        for field, value, known in (
            ("optimizer", job.workload.optimizer, optimizers), ("precision", job.workload.precision, precisions)
        )
        if value not in known
    ] + [
        f"{field} {value}: the export to {who} writes adapters on all linear layers of a base in bf16 alone"
        for field, value, usual in (
            ("lora_targets", job.workload.lora_targets, "all"), ("lora_whole", job.workload.lora_whole, "none"),
            ("frozen_weights", job.workload.frozen_weights, "bf16"),
        )
        if job.workload.lora_rank and value != usual
    ] + [f"objective {job.workload.objective}: the export to {who} writes the loss of the next token alone; plan with objective lm "
         f"or with --trainer {' or '.join(OF_PAIRS)}" for _ in range(job.workload.objective != "lm")]  # fmt: skip


def _of(known: Collection[str]) -> str:
    return "one of them" if len(known) > 1 else "it"


def unknown_modules(job: ExportJob, who: str, known: Module) -> list[str]:
    """Modules of selective recompute that an exporter has no word for: refused, never left out in silence."""
    unknown = module_names(job.layout.recompute_modules & ~int(known))
    if job.layout.recompute != Recompute.SELECTIVE or not unknown:
        return []
    names = module_names(int(known))
    use = (
        f"knows {listed(names)}; choose {_of(names)}, or full recompute"
        if names
        else "knows no modules; use full or none"
    )
    return [f"recompute of {', '.join(unknown)}: the export to {who} {use}"]


def library_trainer(name: str) -> str:
    """The trainer of the library that a trainer's file is, or the nearest one that it extends."""
    for _ in range(5):
        name = spelled(name)[0]
        path = library.find("trainers", name)
        if path.parent == library.profiles_directory() / "trainers":
            return path.stem
        base = library.read_yaml(path).get("extends")
        if not isinstance(base, str):
            return Path(name).stem
        name = base
    return Path(name).stem


def in_range(version: str, versions: str) -> bool:
    """Whether a version such as '0.19.2' lies in a range such as '>=0.17,<0.20'; what follows the numbers is ignored."""
    low, _, high = versions.removeprefix(">=").partition(",<")
    return _numbers(low) <= _numbers(version) and (not high or _numbers(version) < _numbers(high))


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found.group().split(".")] if found else []
