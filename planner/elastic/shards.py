"""Which box of every tensor a rank of a layout holds, and where the boxes of two layouts meet.

A tensor is one of a *kind*: weights that tensor parallelism cuts by rows (``rows``) or by columns (``columns``), weights that it
keeps whole (``whole``), routed experts (``experts``); each kind in two *streams*: the weights themselves, and the optimizer
states. A rank holds of each layer of its stage the same part of every tensor of a kind: an interval of experts, an interval of the
axis that tensor parallelism cuts, and one of the axis that state sharding cuts (dimension 0: of ``rows`` the same axis, so that
both together make one interval). Boxes of one layout that are not equal do not meet: their overlaps with another box add up.
[PyTorch, FSDP2: Shard(0) over the data parallel mesh, strided under tensor parallelism; Megatron, ShardedTensor: global offsets]
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cost.parameters import ParameterCounts, count_parameters
from planner.cost.pipeline.partition import (
    assign_layers,
    base_bytes,
    experts_outside,
    shard_groups,
    split_stages,
    stage_parameters,
)
from planner.layout import Layout, Order
from planner.model import ModelSpec
from planner.plan_file import Plan
from planner.record import record
from planner.trainer import Trainer
from planner.trainers.bundle.target import layers_per_chunk, virtual_stages
from planner.workload import Workload

KINDS = ("rows", "columns", "whole", "experts")
STREAMS = ("weights", "optimizer_states")
Ints = NDArray[np.int64]


@record
class Saved:
    """What is saved of a job, whatever its layout: bytes by stream, kind and layer."""

    slots: Floats
    """Parameters, (kinds, layers + 2): before the first layer the embedding, behind the last the head."""
    bytes_each: dict[str, float]
    """Bytes per parameter, by stream."""

    @property
    def parameters(self) -> float:
        """Parameters that are saved."""
        return float(self.slots.sum())

    @property
    def size(self) -> float:
        """Bytes of a checkpoint, everything once."""
        return self.parameters * sum(self.bytes_each.values())

    def of_size(self, size: float | None) -> Saved:
        """The same with so many bytes in all; None = as it is."""
        ratio = 1.0 if size is None else size / self.size
        return replace(self, bytes_each={name: ratio * each for name, each in self.bytes_each.items()})


def saved_of(workload: Workload, trainer: Trainer) -> Saved:
    """The state that a checkpoint holds: trained weights as they lie in memory, optimizer states with master weights.

    bf16 with Adam in Megatron 2 + 12 bytes per parameter, with fp32 weights (torchtitan) 4 + 8. Under adapters these alone.
    Gradients are not saved. Padding of the vocabulary and step counters are left out.
    """
    slots = parameter_slots(workload.model, count_parameters(workload.model))
    weights = float(trainer.stored.weight_bytes)
    if workload.lora_rank:
        whole = Layout()
        held = stage_parameters(workload, whole, split_stages(workload.model, whole), trainer.kernels)
        slots = slots * (float(held.adapters[0, 0]) / float(slots.sum()))
    else:
        weights = float(base_bytes_of(workload, trainer))
    return Saved(slots=slots, bytes_each={"weights": weights, "optimizer_states": float(trainer.states_of(workload.optimizer))})


def base_bytes_of(workload: Workload, trainer: Trainer) -> float:
    """Bytes of a trained weight as a checkpoint holds it: as it lies in memory, without the copies of low precisions."""
    held = stage_parameters(workload, Layout(), split_stages(workload.model, Layout()), trainer.kernels)
    return float(base_bytes(workload.replace(precision="bf16") if trainer.kernels.fp8 else workload, trainer, held)[0][0, 0])


def parameter_slots(model: ModelSpec, counts: ParameterCounts) -> Floats:
    """Parameters of every kind in the embedding, each layer, and what follows the last one; (kinds, layers + 2).

    Of attention the output projection is cut by columns, a d h, of an MLP the last matrix, 1 of 2 or 3 (Megatron's
    RowParallelLinear, whose weights are cut along their second dimension).  [Shoeybi 2019, arXiv 1909.08053, section 3]
    """
    slots = np.zeros((len(KINDS), model.num_layers + 2))
    rows, columns, whole, experts = slots
    out = min(float(model.attention_output_size * model.hidden_size), counts.attention_sharded)
    down = 1.0 / model.num_mlp_matrices
    for layer in range(model.num_layers):
        at, sparse = layer + 1, model.is_moe_layer(layer)
        mlp = counts.shared_experts if sparse else counts.mlp_sharded
        rows[at] = counts.attention_sharded - out + (1.0 - down) * mlp
        columns[at] = out + down * mlp
        whole[at] = counts.attention_replicated + (counts.router if sparse else counts.mlp_replicated)
        experts[at] = sparse * model.num_experts * counts.expert
    rows[0], whole[0] = counts.input_embedding, counts.position_embedding + counts.vision
    rows[-1] = counts.head + model.mtp_layers * counts.mtp_sharded
    whole[-1] = counts.final_norm + model.mtp_layers * counts.mtp_replicated
    for kind in range(len(KINDS)):  # prediction modules repeat the last layer
        slots[kind, -1] += model.mtp_layers * model.layers_per_mtp * slots[kind, -2]
    return slots


@record
class Places:
    """Coordinates of every rank of a layout, by rank number."""

    layout: Layout
    stages: NDArray[np.bool_]
    """Slots of each pipeline rank, (pp, layers + 2)."""
    shards: dict[str, tuple[int, int]]
    """Ranks that share dense weights, and experts, of each stream; 1 = not sharded."""

    @property
    def ranks(self) -> int:
        """GPUs of the layout."""
        return int(self.layout.num_gpus)

    @cached_property
    def stage(self) -> Ints:
        """Pipeline rank."""
        number, pp, inner = np.arange(self.ranks), int(self.layout.pp), int(self.layout.tp * self.layout.cp)
        if int(self.layout.order) == Order.TP_CP_EP_DP_PP:
            return number // (self.ranks // pp)
        return number // inner % pp

    @cached_property
    def inside(self) -> Ints:
        """Number of a rank among those of its stage, tp innermost, then cp, then dp."""
        number, pp, inner = np.arange(self.ranks), int(self.layout.pp), int(self.layout.tp * self.layout.cp)
        if int(self.layout.order) == Order.TP_CP_EP_DP_PP:
            return number % (self.ranks // pp)
        return number // (inner * pp) * inner + number % inner

    def axes(self, kind: str, stream: str) -> tuple[tuple[Ints, int], tuple[Ints, int], tuple[Ints, int]]:
        """Index of every rank and number of parts, along experts, along the axis of tensor parallelism, and of state sharding."""
        one, n = np.zeros(self.ranks, dtype=np.int64), self.inside
        tp, cp = int(self.layout.tp), int(self.layout.cp)
        dense, expert = self.shards[stream]
        if kind == "experts":
            etp, ep, edp = int(self.layout.etp), int(self.layout.ep), int(self.layout.edp)
            last = int(self.layout.order) == Order.TP_CP_DP_PP_EP
            number = n // (etp * edp) if last else n // etp % ep
            copy = n // etp % edp if last else n // (etp * ep)
            return (number, ep), (n % etp, etp), (copy % expert, expert)
        shard = (n // tp % cp + n // (tp * cp) % max(dense // cp, 1) * cp) % dense
        return (one, 1), ((one, 1) if kind == "whole" else (n % tp, tp)), (shard, dense)


def places_of(workload: Workload, trainer: Trainer, layout: Layout) -> Places:
    """Where a layout puts what is saved.

    Weights are sharded from the level on from which the trainer does so, optimizer states from ``zero`` 1 on.
    [ZeRO, arXiv 1910.02054, section 3]
    """
    model = workload.model
    assigned = assign_layers(model, trainer, layout).row(0)
    stages = np.zeros((int(layout.pp), model.num_layers + 2), dtype=bool)
    passed = virtual_stages(layers_per_chunk(model.num_layers, assigned), assigned)
    for rank, _, layers in passed:
        stages[rank, [one + 1 for one in layers]] = True
    stages[passed[0][0], 0] = stages[passed[-1][0], -1] = True
    groups = [int(one[0, 0]) for one in shard_groups(layout, trainer)]
    groups[1] = 1 if float(experts_outside(layout, trainer)[0, 0]) else groups[1]
    zero = int(layout.zero)
    shards = {
        stream: (groups[0], groups[1]) if zero >= level else (1, 1)
        for stream, level in (("weights", max(trainer.stored.weight_sharding_level, 1)), ("optimizer_states", 1))
    }
    return Places(layout=layout, stages=stages, shards=shards)


def places_of_plan(plan: Plan) -> Places:
    """Where a plan's layout puts what is saved."""
    return places_of(plan.workload, plan.load_trainer(), plan.layout)


def interval_overlaps(new: int, old: int) -> Floats:
    """Length of [i/new, (i+1)/new) that lies in [j/old, (j+1)/old), (new, old)."""
    at, of = np.arange(new)[:, None], np.arange(old)[None, :]
    return np.maximum(np.minimum((at + 1) / new, (of + 1) / old) - np.maximum(at / new, of / old), 0.0)


def met(index: Ints, new: int, old: int) -> Ints:
    """Intervals [j/old, (j+1)/old) that [i/new, (i+1)/new) meets."""
    return -(-(index + 1) * old // new) - index * old // new


def read_factor(new: int, old: int) -> float:
    """Bytes read over bytes needed where stored shards are read whole, mean over the new ones: new / old met."""
    return new / old * float(met(np.arange(new), new, old).mean())


def nested(new: int, old: int) -> bool:
    """No interval of the finer partition is cut by the coarser one: one number divides the other."""
    return max(new, old) % min(new, old) == 0


@record
class Item:
    """One kind in one stream, with the boxes of two layouts."""

    kind: str
    stream: str
    slots: Floats
    """Bytes of each slot."""
    new: Places
    old: Places

    @cached_property
    def stage_overlaps(self) -> Floats:
        """Bytes of the slots that two pipeline ranks both hold, (new, old)."""
        found: Floats = (self.new.stages * self.slots) @ self.old.stages.T.astype(float)
        return found

    def _codes(self, places: Places) -> tuple[tuple[Ints, int], ...]:
        """Indices along the axes; rows and shards of one dimension as one axis."""
        experts, tensor, shard = places.axes(self.kind, self.stream)
        if self.kind in ("rows", "whole", "experts"):
            return experts, (tensor[0] * shard[1] + shard[0], tensor[1] * shard[1])
        return experts, tensor, shard

    @cached_property
    def codes(self) -> tuple[tuple[tuple[Ints, int], ...], tuple[tuple[Ints, int], ...]]:
        """The same of the new and of the old layout."""
        return self._codes(self.new), self._codes(self.old)

    def own(self) -> Floats:
        """Bytes that every new rank holds."""
        part = np.prod([1.0 / n for _, n in self.codes[0]])
        return np.asarray((self.new.stages @ self.slots)[self.new.stage] * part)

    def read(self) -> Floats:
        """Bytes that every new rank reads where each old shard that its box meets is read whole.

        Per axis (shards met) / (old shards); of tensors that were not cut there: 1. [torch.distributed.checkpoint, filesystem.py,
        FileSystemReader.read_data: loads the stored tensor, then narrow_tensor_by_index]
        """
        factor = np.ones(self.new.ranks)
        for (index, n), (_, before) in zip(*self.codes, strict=True):
            factor *= met(index, n, before) / before
        return np.asarray((self.new.stages @ self.slots)[self.new.stage] * factor)

    @property
    def copies(self) -> float:
        """Ranks of the new layout that hold the same box."""
        distinct = int(self.new.layout.pp) * np.prod([n for _, n in self.codes[0]])
        return float(self.new.ranks / distinct)

    def boxes(self) -> Ints:
        """Number of the box that every old rank holds; equal numbers are copies."""
        number = self.old.stage.astype(np.int64)
        for index, n in self.codes[1]:
            number = number * n + index
        return number

    @cached_property
    def overlaps(self) -> tuple[Floats, ...]:
        """Along every axis the part of a tensor that two intervals share, (new, old)."""
        return tuple(interval_overlaps(n, before) for (_, n), (_, before) in zip(*self.codes, strict=True))

    @property
    def old_part(self) -> float:
        """Part of a tensor that an old rank holds."""
        return float(np.prod([1.0 / n for _, n in self.codes[1]]))

    def parts(self, new: Ints, old: Ints) -> Floats:
        """Part of each tensor that some new ranks' boxes share with some old ranks' boxes, layers aside, (new, old)."""
        found = np.ones((len(new), len(old)))
        for (index, _), (where, _), shared in zip(*self.codes, self.overlaps, strict=True):
            found *= shared[index[new][:, None], where[old][None, :]]
        return found

    def layers(self, new: Ints, old: Ints) -> Floats:
        """Bytes of the layers, whole, that some new ranks have together with some old ranks, (new, old)."""
        return np.asarray(self.stage_overlaps[self.new.stage[new][:, None], self.old.stage[old][None, :]])

    def meets(self, new: Ints, old: Ints) -> Floats:
        """Bytes that some new ranks' boxes share with some old ranks' boxes, (new, old)."""
        return self.layers(new, old) * self.parts(new, old)


def items_of(saved: Saved, new: Places, old: Places) -> list[Item]:
    """All that is saved, by kind and stream, with the boxes of two layouts; nothing that has no bytes."""
    return [
        Item(kind=kind, stream=stream, slots=saved.slots[row] * each, new=new, old=old)
        for row, kind in enumerate(KINDS)
        for stream, each in saved.bytes_each.items()
        if each > 0 and saved.slots[row].sum() > 0
    ]
