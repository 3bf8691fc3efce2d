"""Answers to published runs of elastic jobs: changes of layout, recoveries, goodput under failures, traces of machines.

The state's bytes come from the model, the boxes from the two layouts, rates from the hardware; nothing is fitted to a row. What a
source does not state is taken the same for all and said in the answer:
- the network card of a node where the profile's is below it: EDR InfiniBand, 100 Gb/s, as clusters of several nodes have;
- storage: as fast as the network card of a node;
- a recovery counts from when the loss is known; the machines with the highest numbers are lost.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from planner.cluster_file import Storage
from planner.elastic.checkpoints import transfer_seconds, wall_over_work
from planner.elastic.elastic_job import COPIES, TENSORS_OF_LAYER, load_seconds, start_parts
from planner.elastic.failure_answers import group_shares, kept_steps
from planner.elastic.move_costs import exchange_seconds, host_exchange_seconds, to_devices
from planner.elastic.moves import Move, move_of
from planner.elastic.shards import Places, Saved, places_of, saved_of
from planner.errors import PlannerError, shown
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout
from planner.model import ModelSpec, load_model
from planner.published_rows import NOT_RUN, PREDICTED, REFUSED, AnsweredRow, Quantity, rows_of, source_of
from planner.trainer import Trainer, load_trainer
from planner.units import GIGA, parse
from planner.workload import Workload

LEAST_NETWORK = parse("100 Gb/s", "bytes/s")
"""Bytes/s of a node's network card where neither source nor profile say more."""
RANGE = 1.5
"""Nine of ten are expected within this factor: start of processes and set-up of communicators differ so much between sites."""
SHARES = ("goodput", "utilisation", "utilization", "ettr", "steps_kept", "kept", "work_kept", "efficiency", "useful_work")
"""Names of shares of the wall time, or of the steps."""
DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "dp_shard", "vpp")
TRAINERS = (
    ("megatron-deepspeed", "megatron-deepspeed"), ("deepspeed", "deepspeed"), ("torchtitan", "torchtitan"), ("fsdp", "fsdp"),
)  # fmt: skip
"""Words of a framework -> trainer, whose states these are; the first that fits, else Megatron."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published row with what its file says of all."""

    row: Mapping[str, Any]
    document: Mapping[str, Any]
    where: str

    def value(self, *names: str) -> Any:
        """The first of some keys that the row, its hardware, or the file gives; None where none does."""
        groups = (self.row, self.row.get("hardware"), self.row.get("cluster"), self.document.get("hardware"), self.document)
        for group in groups:
            for name in names:
                if isinstance(group, Mapping) and group.get(name) is not None:
                    return group[name]
        return None

    def number(self, *names: str) -> float | None:
        """The same as a number; None for what is none."""
        found = self.value(*names)
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found) else None

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
        if gpus:
            changes["gpus_per_node"] = gpus
        stated = self.value("network", "network_bandwidth", "inter_node")
        each = parse(stated, "bytes/s", what=self.where) if isinstance(stated, str) and re.search(r"b/s|bps|bit", stated) else 0.0
        node = each or max(profile.network_bandwidth * profile.gpus_per_node, LEAST_NETWORK)
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
        precision = self.value("precision")
        precision = precision if isinstance(precision, str) else "bf16"
        return Workload(model=_model(name), sequence_length=2048, global_batch_size=1, precision=precision)

    @cached_property
    def saved(self) -> Saved:
        """What is saved."""
        return saved_of(self.workload, self.trainer)

    def layout(self, key: str) -> Layout | None:
        """The layout under a key; None where there is none."""
        said = self.row.get(key)
        if not isinstance(said, Mapping):
            return None
        return Layout.from_dict({name: said[name] for name in DEGREES if said.get(name) is not None}, where=f"{self.where}: {key}")

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

    def start(self, layout: Layout) -> dict[str, float]:
        """Seconds of a new start, in parts."""
        tensors = self.workload.model.num_layers * TENSORS_OF_LAYER * sum(COPIES.values())
        return start_parts(layout, float(tensors), float(self.places(layout).shards["optimizer_states"][0]))


def _model(name: str) -> ModelSpec:
    """The model of a name; a GPT of some size is that of the GPT-3 paper. Raises PlannerError.  [Brown 2020, table 2.1]"""
    found = re.fullmatch(r"(?i)(?:megatron-)?gpt[-_ ]?(?:3[-_ ])?(\d+(?:\.\d+)?[mb])", name.strip())
    return load_model(f"gpt3-{found[1].lower()}" if found else name)


def _after_loss(old: Layout, left: int) -> Layout:
    """The layout on what is left: fewer replicas, then fewer stages, then a smaller tensor parallel degree."""
    tp, pp = int(old.tp), int(old.pp)
    while pp > 1 and tp * pp * int(old.cp) > left:
        pp = max(n for n in range(1, pp) if pp % n == 0)
    while tp > 1 and tp * pp * int(old.cp) > left:
        tp //= 2
    return old.replace(tp=tp, pp=pp, dp=max(left // (tp * pp * int(old.cp)), 1), dp_shard=0)


def reconfigure(row: Row) -> float:
    """Seconds of a change of layout. Raises PlannerError where the source does not say enough."""
    old, new = row.layout("from"), row.layout("to")
    if old is None or new is None:
        raise PlannerError(f"{row.where}: the source does not say both layouts")
    move, start = row.move(old, new), row.start(new)
    ranks = int(row.hardware.gpus_per_node)
    if re.search(r"nccl|rdma|live|p2p", row.system):
        return start["communicators"] + exchange_seconds(move, row.hardware, ranks)
    if re.search(r"checkpoint|restart|universal|ucp|dcp", row.system):
        of_node = row.saved.size / int(old.num_gpus) * ranks
        save = transfer_seconds(row.storage, row.saved.size, of_node, row.storage.write)
        return save + sum(start.values()) + load_seconds(row.storage, move.read, ranks) + to_devices(move, row.hardware)
    return start["communicators"] + start["planning"] + host_exchange_seconds(move, row.node_bandwidth)


def recover(row: Row) -> float:
    """Seconds from a known loss of GPUs until training goes on: new processes, and the state of survivors or of a checkpoint."""
    old = row.layout("from") or row.layout("parallel")
    lost = row.number("lost_gpus", "failed_gpus")
    if old is None or lost is None:
        raise PlannerError(f"{row.where}: the source does not say the layout and how many GPUs were lost")
    left = int(old.num_gpus) - int(lost)
    if left < 1:
        raise PlannerError(f"{row.where}: no GPU is left")
    new = row.layout("to") or _after_loss(old, left)
    move, ranks = row.move(old, new, range(left)), int(row.hardware.gpus_per_node)
    start = sum(row.start(new).values())
    if move.complete:
        return start + host_exchange_seconds(move, row.node_bandwidth) + to_devices(move, row.hardware)
    return start + load_seconds(row.storage, move.read, ranks) + to_devices(move, row.hardware)


def share(row: Row, name: str) -> float:
    """A share of the wall time that stays, or of the steps: of replica groups, else of a job that restarts from checkpoints."""
    step, mtbf = row.number("step_s", "step_time_s", "t_step_s"), row.number("mtbf_s", "mtbf_job_s")
    hours, minutes = row.number("mtbf_h"), row.number("mtbf_min")
    mtbf = mtbf or (hours * 3600.0 if hours else None) or (minutes * 60.0 if minutes else None)
    if mtbf is None:
        raise PlannerError(f"{row.where}: the source does not say the time between failures")
    interval = row.number("interval_s", "checkpoint_interval_s")
    if interval:
        stall, behind = row.number("stall_s", "save_s") or 0.0, row.number("behind_s") or 0.0
        restart = row.number("restart_s", "recover_s") or sum(start_parts(Layout(dp=2), 0.0, 1.0).values())
        return 1.0 / float(wall_over_work(interval, stall=stall, mtbf=mtbf, restart=restart, behind=behind))
    if step is None:
        raise PlannerError(f"{row.where}: the source says neither the time of a step nor an interval between checkpoints")
    groups = row.number("groups", "replica_groups", "replicas")
    if groups is None or "kept" in name:
        return kept_steps(step, mtbf)
    away = row.number("rejoin_s", "restart_s", "recover_s") or sum(start_parts(Layout(dp=int(groups)), 0.0, 1.0).values())
    return group_shares(step_time=step, mtbf=mtbf, groups=int(groups), away=away)["work"]


def _measured(value: Any) -> float | None:
    """One measured number: a range by its middle; None for what is none, or zero."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(one, (int, float)) for one in value):
        value = float(np.mean(value))
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) and value > 0 else None


def _quantities(row: Row, measured: Mapping[str, Any]) -> tuple[dict[str, Quantity], list[str]]:
    """What can be predicted of what was measured, and why the rest cannot."""
    found, reasons = dict[str, Quantity](), list[str]()
    for name, raw in measured.items():
        value = _measured(raw)
        base = re.sub(r"_(share|percent|pct)$", "", str(name))
        if value is None or not (name in ("reconfigure_s", "recover_s") or base in SHARES):
            continue
        try:
            predicted = {"reconfigure_s": reconfigure, "recover_s": recover}[name](row) if base not in SHARES else share(row, base)
        except PlannerError as error:
            reasons.append(str(error))
            continue
        if base in SHARES:
            scale = 100.0 if value > 1.5 else 1.0
            ends = scale * max(predicted - 0.05, 0.0), scale * min(predicted + 0.05, 1.0)
            found[name] = Quantity(measured=value, predicted=scale * predicted, range=ends)
        else:
            found[name] = Quantity(measured=value, predicted=predicted, range=(predicted / RANGE, predicted * RANGE))
    return found, reasons


def answers(document: Mapping[str, Any], where: str) -> list[AnsweredRow]:
    """The answer to each row of a file, in its order. Raises PlannerError for a file that is none."""
    source = source_of(document, where)
    return [_answer(Row(row=row, document=document, where=f"{where}: {row['id']}"), source) for row in rows_of(document, where)]


def _answer(row: Row, source: str) -> AnsweredRow:
    measured = row.row.get("measured")
    plain: dict[str, Any] = {"source": source, "id": row.row["id"], "topic": "elastic", "counts": not row.row.get("suspect")}
    if not isinstance(measured, Mapping):
        raise PlannerError(f"{row.where}: measured is {shown(measured)}; it must be a mapping of quantities")
    if measured.get("ran") is False:
        return AnsweredRow(**plain, status=NOT_RUN, reason="the source measured nothing")
    found, reasons = _quantities(row, measured)
    if found:
        said = "storage and network card: what the source leaves open is taken alike for all files"
        return AnsweredRow(**plain, status=PREDICTED, reason=said, quantities=found)
    if reasons:
        return AnsweredRow(**plain, status=REFUSED, reason="; ".join(dict.fromkeys(reasons)))
    reason = "nothing that a plan predicts; a trace of machines is replayed with 'plan resilience --trace'"
    return AnsweredRow(**plain, status=NOT_RUN, reason=reason)
