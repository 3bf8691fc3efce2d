"""One published row of an elastic job: model, layouts, hardware and storage as its source states them, gaps filled alike for all.

What a source does not state is taken the same for all files, never by row:
- the network card of a node where the profile's is below it: EDR InfiniBand, 100 Gb/s, as clusters of several nodes have;
- storage: as fast as the network card of a node;
- the layout, where only GPUs and a model are named: the fastest that fits with a batch of usual size.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from planner.cluster import Cluster
from planner.cluster_file import Storage
from planner.cost.parameters import total_parameters
from planner.elastic.elastic_job import COPIES, TENSORS_OF_LAYER, groups_of, start_parts
from planner.elastic.moves import Move, move_of
from planner.elastic.shards import Places, Saved, places_of, saved_of
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout
from planner.model import ModelSpec, load_model
from planner.record import record
from planner.rules import Job
from planner.search import search
from planner.trainer import Trainer, load_trainer
from planner.units import GIGA, parse
from planner.workload import PRECISIONS, Workload, default_global_batch_size, usual_name

LEAST_NETWORK = parse("100 Gb/s", "bytes/s")
"""Bytes/s of a node's network card where neither source nor profile say more."""
DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "dp_shard", "vpp")
TRAINERS = (
    ("megatron-deepspeed", "megatron-deepspeed"), ("deepspeed", "deepspeed"), ("torchtitan", "torchtitan"), ("fsdp", "fsdp"),
)  # fmt: skip
"""Words of a framework -> trainer, whose states these are; the first that fits, else Megatron."""

MOST = 1e9
"""No number of a row is larger."""
RATE = r"(?:(\d+) ?x[^\d]*)?(\d+(?:\.\d+)?) ?([GMT](?:B/s|b/s|bps|bit/s))"
"""Number of cards of a node, and the rate of one."""


def number_of(value: Any) -> float | None:
    """A number from 0 to MOST, a range of two by its middle; None for what is none."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(number_of(one) is not None for one in value):
        return float(np.mean(value))
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and 0 <= value <= MOST else None


def model_of(name: str) -> ModelSpec:
    """The model of a name; a GPT of some size is that of the GPT-3 paper. Raises PlannerError.  [Brown 2020, table 2.1]"""
    found = re.fullmatch(r"(?i)(?:megatron-)?gpt[-_ ]?(?:3[-_ ])?(\d+(?:\.\d+)?[mb])", name.strip())
    return load_model(f"gpt3-{found[1].lower()}" if found else name)


@record
class Row:
    """One published row with what its file says of all."""

    row: Mapping[str, Any]
    document: Mapping[str, Any]
    where: str

    def value(self, *names: str) -> Any:
        """The first of some keys that the row, its hardware, or the file gives; None where none does."""
        groups = (self.row, self.row.get("hardware"), self.row.get("cluster"), self.document.get("hardware"), self.document)
        found = (group[name] for group in groups if isinstance(group, Mapping) for name in names if group.get(name) is not None)
        return next(found, None)

    def number(self, *names: str) -> float | None:
        """The same as a number, a range of two by its middle; None for what is none."""
        return number_of(self.value(*names))

    @property
    def system(self) -> str:
        """What moved the state, in the source's words."""
        return f"{self.row.get('system') or ''} {self.value('framework') or ''}".lower()

    @cached_property
    def hardware(self) -> HardwareProfile:
        """The profile with the node and the network that the source states. Raises PlannerError."""
        name = self.value("gpu")
        if not isinstance(name, str):
            raise PlannerError(f"{self.where}: the source names no GPU")
        profile = load_hardware(name)
        changes: dict[str, float] = {}
        gpus = self.number("gpus_per_node")
        if gpus is not None:
            if not 1 <= gpus <= 4096 or gpus % 1:
                raise PlannerError(f"{self.where}: gpus_per_node is {gpus:g}; it must be a whole number from 1 to 4096")
            changes["gpus_per_node"] = gpus
        stated = re.search(RATE, str(self.value("network", "network_bandwidth", "inter_node") or ""))
        rate = parse(f"{stated[2]} {stated[3]}", "bytes/s", what=self.where) * int(stated[1] or 1) if stated else 0.0
        node = rate or max(profile.network_bandwidth * profile.gpus_per_node, LEAST_NETWORK)
        changes["network_bandwidth"] = node / (gpus or profile.gpus_per_node)
        return dataclasses.replace(profile, **changes)  # type: ignore[arg-type]

    @property
    def node_bandwidth(self) -> float:
        """Bytes/s of a node's network card."""
        return self.hardware.network_bandwidth * self.hardware.gpus_per_node

    @cached_property
    def trainer(self) -> Trainer:
        """Whose states these are."""
        named = next((trainer for word, trainer in TRAINERS if word in self.system), "megatron")
        return load_trainer(named)

    @cached_property
    def workload(self) -> Workload:
        """The model, with what else decides its states. Raises PlannerError."""
        name = self.value("model")
        if isinstance(name, Mapping):
            name = name.get("name")
        if not isinstance(name, str):
            raise PlannerError(f"{self.where}: the source does not say which model")
        model, precision = model_of(name), usual_name(str(self.value("precision") or "bf16"))
        length = int(self.number("seq", "sequence_length") or 2048)
        usual = default_global_batch_size(total_parameters(model), length, self.gpus or 8)
        batch = int(self.number("batch", "global_batch_size") or usual)
        known = precision if precision in PRECISIONS else "bf16"
        return Workload(model=model, sequence_length=length, global_batch_size=batch, precision=known)

    @property
    def gpus(self) -> int:
        """GPUs before anything happens; 0 where the source does not say."""
        said = self.value("gpus", "num_gpus", "world_size")
        first = said[0] if isinstance(said, (list, tuple)) and said else said
        return int(number_of(first) or 0)

    @cached_property
    def saved(self) -> Saved:
        """What is saved."""
        return saved_of(self.workload, self.trainer)

    def layout(self, *keys: str) -> Layout | None:
        """The layout under the first of some keys; None where there is none."""
        key, said = next(((key, self.row[key]) for key in keys if isinstance(self.row.get(key), Mapping)), ("", None))
        if said is None:
            return None
        return Layout.from_dict({name: said[name] for name in DEGREES if said.get(name) is not None}, where=f"{self.where}: {key}")

    def searched(self, gpus: int) -> tuple[Layout, float]:
        """The fastest layout of the model on some GPUs, and seconds of its step. Raises PlannerError where nothing fits."""
        job = Job(workload=self.workload, cluster=Cluster(hardware=self.hardware, num_gpus=gpus), trainer=self.trainer)
        found = search(job, None, 1)
        if not found.fit:
            raise PlannerError(f"{self.where}: no layout of the model fits on {gpus} GPUs")
        return found.layouts[0], float(found.estimates[0].step_time[0])

    def places(self, layout: Layout) -> Places:
        """Where a layout puts what is saved."""
        return places_of(self.workload, self.trainer, layout)

    def move(self, old: Layout, new: Layout, left: range | None = None) -> Move:
        """What a change moves."""
        return move_of(self.saved, self.places(old), self.places(new), int(self.hardware.gpus_per_node), left)

    @property
    def storage(self) -> Storage:
        """As fast as the network card of each node, where the source says nothing."""
        said = self.number("storage_gb_per_s")
        rate = said * GIGA if said else 1e4 * self.node_bandwidth
        return Storage(read=rate, write=rate, per_node=self.node_bandwidth)

    def start(self, layout: Layout, end: str = "") -> dict[str, float]:
        """Seconds of a new start, in parts; ``end``: as ``constants`` takes it."""
        tensors = self.workload.model.num_layers * TENSORS_OF_LAYER * sum(COPIES.values())
        return start_parts(groups_of(layout), float(tensors), float(self.places(layout).shards["optimizer_states"][0]), end)
