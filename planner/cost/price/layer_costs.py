"""Priced building blocks: a dense layer, an expert layer, the embedding, the head; each one row of numbers per shape.

A search has millions of layouts but few distinct shapes of a layer. The blocks are priced once per shape and gathered;
a pipeline stage is then a sum of blocks, as every quantity here is additive.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster, expert_stride
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Collective, Number, Operator, Shard
from planner.cost.layer.vision_layer import image_encoder, kept_inputs
from planner.cost.price.communication import collective_seconds, exposed_seconds, slowdown_of
from planner.cost.price.compute import GRAPH_LAUNCHES, Work, price, repeated
from planner.cost.price.deduplicate import distinct, stacked
from planner.cost.state_dtypes import stored_as
from planner.hardware import Slowdown
from planner.layout import Layout, Module, Recompute
from planner.record import record
from planner.trainer import Trainer
from planner.workload import Workload

QUANTITIES = (
    "forward", "dgrad", "wgrad", "recompute",
    "tp_forward", "tp_backward", "cp_forward", "cp_backward", "ep_forward", "ep_backward",
    "tp_hidden", "cp_hidden", "ep_hidden",
    "launches_forward", "launches_backward", "behind",
    "saved", "working", "flop",
)  # fmt: skip
"""Rows of a block. Seconds of computation by pass (backward = dgrad + wgrad, and recompute); exposed seconds of
communication by group and pass, hidden ones by group; kernels launched; seconds that the GPU waits for the host after it
said how many tokens each expert gets; bytes saved per microbatch, bytes that recompute
brings back for one layer at a time; FLOP forward."""
INDEX = {name: number for number, name in enumerate(QUANTITIES)}
FORWARD = [INDEX[name] for name in ("forward", "tp_forward", "cp_forward", "ep_forward", "launches_forward", "behind")]
"""Rows of the forward pass, which a reference model goes through as well."""

SHAPE_FIELDS = (
    "tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "cp_method", "recompute", "recompute_modules",
)  # fmt: skip


@record
class Blocks:
    """Blocks of all candidates, each of shape (len(QUANTITIES), N)."""

    dense: Floats
    moe: Floats
    dense_stored: Floats
    """The layers that full recompute leaves out when it covers a part of each stage."""
    moe_stored: Floats
    embedding: Floats
    head: Floats


def price_blocks(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> Blocks:
    """The blocks of every candidate: distinct shapes are priced once, then gathered."""
    return ShapePrices(workload, cluster, trainer).blocks(layout)


class ShapePrices:
    """The blocks of one job on one cluster: each shape is priced once, however many batches of candidates ask for it, and
    shapes that differ in what is recomputed share the seconds of their operators and collectives."""

    def __init__(self, workload: Workload, cluster: Cluster, trainer: Trainer) -> None:
        self._workload, self._cluster, self._trainer = workload, cluster, stored_as(workload, trainer)
        self._numbers, self._blocks = _Numbers(), dict[str, Floats]()
        self._bare_numbers, self._bare = _Numbers(), list[_Bare]()

    def blocks(self, layout: Layout) -> Blocks:
        """Those of every candidate."""
        shapes, inverse = distinct_shapes(layout)
        rows, new = self._numbers.of(shapes)
        if len(new) or not self._blocks:
            more, known = self._summed(shapes.take(new)), self._blocks
            self._blocks = {name: np.concatenate([known[name], one], axis=1) for name, one in more.items()} if known else more
        rows = rows[inverse]
        return Blocks(**{name: block.take(rows, axis=1) for name, block in self._blocks.items()})

    def _summed(self, shapes: Layout) -> dict[str, Floats]:
        """The blocks of distinct shapes."""
        none = int(Recompute.NONE)
        bare, rows = self._operators(shapes.replace(recompute=none, recompute_modules=0))
        if bare.is_all_of(shapes, rows):
            return bare.blocks(bare.shard, None)
        shard, ends, priced = self._shard(shapes), self._shard(shapes.replace(recompute=none)), bare.priced
        whole = operators_of(shard)
        blocks = _Bare(shard, ends_of(ends), whole, priced).blocks(ends, rows)
        full = np.flatnonzero(np.broadcast_to(np.asarray(shapes.recompute) == int(Recompute.FULL), len(shapes)))
        for kind in ("dense", "moe"):
            if len(full) and whole[kind]:
                stored = self._shard(shapes.take(full).replace(recompute=none))
                kept = _mean_layer(operators_of(stored)[kind], priced[kind], rows[full], stored)
                blocks[f"{kind}_stored"] = blocks[kind].copy()
                blocks[f"{kind}_stored"][:, full] = kept
        return blocks

    def _operators(self, shapes: Layout) -> tuple[_Bare, NDArray[np.intp]]:
        """What each block is made of, with its seconds, where nothing is recomputed; and the row of every shape in it. Kept is
        that of the last shapes of which some were new."""
        rows, new = self._bare_numbers.of(shapes)
        if len(new) or not self._bare:
            self._bare_numbers = _Numbers()
            rows, new = self._bare_numbers.of(shapes)
            shard = self._shard(shapes.take(new))
            ends, layers = ends_of(shard), operators_of(shard)
            made = {name: [one] for name, one in ends.items()} | {name: [one for _, one in kinds] for name, kinds in layers.items()}
            priced = {name: [_price(*one, shard, self._cluster) for one in kinds] for name, kinds in made.items()}
            self._bare = [_Bare(shard, ends, layers, priced)]
        return self._bare[0], rows

    def _shard(self, shapes: Layout) -> Shard:
        return shard_of(self._workload, self._trainer, shapes)


class _Numbers:
    """Numbers of shapes, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def of(self, shapes: Layout) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The number of every shape, and the places of the new ones in the order of their numbers."""
        table = np.empty((len(shapes), len(SHAPE_FIELDS) + 1), dtype=np.int64)
        for place, values in enumerate((*(getattr(shapes, name) for name in SHAPE_FIELDS), _ep_stride(shapes))):
            table[:, place] = values
        text, width, known, before = table.tobytes(), table.itemsize * table.shape[1], self._known, len(self._known)
        starts = range(0, width * len(table), width)
        rows = np.array([known.setdefault(text[start : start + width], len(known)) for start in starts], dtype=np.intp)
        if len(known) == before:
            return rows, rows[:0]
        numbers, first = np.unique(rows, return_index=True)
        return rows, first[numbers >= before]


Made = tuple[list[Operator], list[Collective]]


def operators_of(shard: Shard) -> dict[str, list[tuple[float, Made]]]:
    """Operators and collectives of a microbatch in the layers of each block, with the share that each kind of layer has of
    it: dense, moe; and images, in one."""
    model, images = shard.model, image_encoder(shard)
    made: dict[str, list[tuple[float, Made]]] = {"images": [(1.0, (images, []))] if images else []}
    for kind, number in (("dense", model.num_plain_layers), ("moe", model.num_moe_layers)):
        every = model.layer_kinds if number > 0 else ()
        made[kind] = [(one.share, layers.layer(shard, kind == "moe", one)) for one in every]
    return made


def ends_of(shard: Shard) -> dict[str, Made]:
    """The same of embedding and head, of which no recompute frees anything."""
    return {"embedding": layers.embedding(shard), "head": layers.head(shard)}


def shard_of(workload: Workload, trainer: Trainer, shapes: Layout) -> Shard:
    """The sizes that one rank of each layout sees."""
    return Shard(workload=workload, trainer=trainer, layout=shapes, ep_stride=_ep_stride(shapes))


def distinct_shapes(layout: Layout) -> tuple[Layout, NDArray[np.intp]]:
    """A layout of each shape, and for every candidate its row in it."""
    return distinct(layout, SHAPE_FIELDS, _ep_stride(layout))


def _ep_stride(layout: Layout) -> NDArray[Any]:
    return np.where(np.asarray(layout.ep) > 1, expert_stride(layout), 1)


class _Bare(NamedTuple):
    """What the blocks of some shapes are made of, and the seconds of that where nothing is recomputed."""

    shard: Shard
    ends: dict[str, Made]
    layers: dict[str, list[tuple[float, Made]]]
    priced: dict[str, list[_Priced]]

    def is_all_of(self, shapes: Layout, rows: NDArray[np.intp]) -> bool:
        """Whether it is of some shapes themselves, in their order: of them nothing is recomputed."""
        plain = not (np.any(shapes.recompute) or np.any(shapes.recompute_modules))
        return plain and len(rows) == len(self.shard.layout) and np.array_equal(rows, np.arange(len(rows)))

    def blocks(self, ends: Shard, rows: NDArray[np.intp] | None) -> dict[str, Floats]:
        """The blocks, with the seconds of some rows; None: of its own shapes."""
        shard, priced = self.shard, self.priced
        blocks = {name: _block(priced[name][0].of(made, rows), ends) for name, made in self.ends.items()}
        for (_, made), one in zip(self.layers["images"], priced["images"], strict=True):
            encoder = _block(one.of(made, rows), shard, kept_inputs(shard))
            blocks["embedding"] = blocks["embedding"] + encoder
        for kind in ("dense", "moe"):
            blocks[kind] = blocks[f"{kind}_stored"] = _mean_layer(self.layers[kind], priced[kind], rows, shard)
        return blocks


class _Priced(NamedTuple):
    """A block's operators and collectives with their seconds, which do not depend on what is recomputed."""

    operators: list[Operator]
    work: dict[str, Work]
    collectives: list[tuple[Collective, Floats, Slowdown]]
    """Each with its seconds when no computation overlaps with it, and what the two cost each other where some does."""
    compute_units: float
    """Multiprocessors of the device."""
    serial: bool
    """Its kernels run one after the other, and hide neither launches nor collectives."""

    def of(self, made: Made, rows: NDArray[np.intp] | None) -> _Priced:
        """The same operators and collectives as other shapes have them, each with the seconds of a row; None: these shapes."""
        if rows is None:
            return self
        operators, collectives = made
        work = {name: Work(**{part: _rows_of(one, rows) for part, one in vars(found).items()}) for name, found in self.work.items()}
        alone = [_rows_of(seconds, rows) for _, seconds, _ in self.collectives]
        each = [Slowdown(compute=_rows_of(one.compute, rows), communication=_rows_of(one.communication, rows))
                for _, _, one in self.collectives]  # fmt: skip
        return self._replace(operators=operators, work=work, collectives=list(zip(collectives, alone, each, strict=True)))


def _rows_of(values: Any, rows: NDArray[np.intp]) -> Any:
    return values if np.ndim(values) == 0 else np.asarray(values).take(rows)


def _price(operators: list[Operator], collectives: list[Collective], shard: Shard, cluster: Cluster) -> _Priced:
    seconds = collective_seconds(collectives, cluster, len(shard.layout))
    work = price(operators, shard, cluster.hardware)
    for term in shard.trainer.terms:
        seconds = [term.collective_seconds(one, alone) for one, alone in zip(collectives, seconds, strict=True)]
    among_kernels = [
        (one, alone, slowdown_of(cluster, one.n, one.stride)) for one, alone in zip(collectives, seconds, strict=True)
    ]
    hardware = cluster.hardware
    return _Priced(operators, work, among_kernels, hardware.compute_units, hardware.serial_launches)


def _mean_layer(kinds: list[tuple[float, Made]], priced: list[_Priced], rows: NDArray[np.intp] | None, shard: Shard) -> Floats:
    """The mean block of the kinds of layers, by their shares; what recompute brings back for one layer is the largest."""
    if not kinds:
        return np.zeros((len(QUANTITIES), len(shard.layout)))
    tables = [(share, _layer(one.of(made, rows), shard)) for (share, made), one in zip(kinds, priced, strict=True)]
    mean = functools.reduce(np.add, [share * table for share, table in tables])
    row = INDEX["working"]
    mean[row] = functools.reduce(np.maximum, [table[row] for _, table in tables])
    return np.asarray(mean)


def _layer(priced: _Priced, shard: Shard) -> Floats:
    """The block of a layer, whose forward pass may take a host next to the GPU a least time, counted in kernels launched."""
    table, trainer = _block(priced, shard), shard.trainer
    least = max((term.least_forward_host_time() for term in trainer.terms), default=0.0)
    if least and trainer.host.host_time and not trainer.host.graphs:
        row = INDEX["launches_forward"]
        table[row] = np.maximum(table[row], least / trainer.host.host_time)
    return table


def _block(priced: _Priced, shard: Shard, inputs: Number | None = None) -> Floats:
    """Sum a block's operators and collectives into the rows of QUANTITIES, shape (quantities, shapes).

    ``inputs``: bytes that full recompute keeps of the block; None = those of one layer of the text model.
    """
    trainer, sums = shard.trainer, _Sums(shard)
    for operator in priced.operators:
        sums.operator(operator, priced.work[operator.name])
    layer_inputs = sums.full * shard.tokens_split * shard.model.hidden_size * shard.element
    sums.add("saved", layer_inputs if inputs is None else inputs)
    if trainer.host.graphs:
        sums.add("launches_forward", GRAPH_LAUNCHES)
        sums.add("launches_backward", GRAPH_LAUNCHES)
    sums.routed()
    forward, backward = sums.values["forward"], sums.values["dgrad"] + sums.values["wgrad"]
    for collective, alone, slowdown in priced.collectives:
        pass_seconds = backward if collective.backward else forward
        added = exposed_seconds(collective, alone, trainer, priced.work, pass_seconds, priced.compute_units, slowdown)
        sums.collective(collective, alone, alone if priced.serial else added)
        if priced.serial:
            sums.add(f"launches_{'backward' if collective.backward else 'forward'}", (np.asarray(collective.n) > 1).astype(float))
    return sums.table()


class _Sums:
    """Adds up one block for all its shapes."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._rows = shard, len(shard.layout)
        self._repeated: dict[tuple[int, float], Floats] = {}
        self.values: dict[str, Number] = dict.fromkeys(QUANTITIES, 0.0)
        self.full = (np.asarray(shard.layout.recompute) == int(Recompute.FULL)).astype(float)
        self._whole = 1.0 - self.full
        self._routed: tuple[Number, Number] = (0.0, 0.0)

    def add(self, name: str, value: Number) -> None:
        self.values[name] = self.values[name] + value

    def table(self) -> Floats:
        found = stacked([self.values[name] for name in QUANTITIES], self._rows)
        found[FORWARD] *= self._shard.workload.forwards
        return found

    def _freed(self, module: Module, share: float = 1.0) -> Floats:
        """1 where what belongs to a module is dropped and computed again, ``share`` where a part of it is."""
        key = (int(module), share)
        if key not in self._repeated:
            self._repeated[key] = repeated(key[0], self._shard, share)
        return self._repeated[key]

    def _again(self, freed: Floats, ends: bool) -> Floats:
        """The part that is really computed again: recompute may stop before what ends the layer, which nothing needs."""
        return np.zeros_like(freed) if ends and self._shard.trainer.stored.recompute_stops_early else freed

    def routed(self) -> None:
        """Forward, the host waits until it knows how many tokens each expert gets, and nothing is queued on the GPU then:
        what its launches for the experts exceed their own time stays, whatever time attention leaves later. So it is
        after every operator that the host waits for."""
        trainer, (seconds, launches) = self._shard.trainer, self._routed
        each = trainer.host.host_time * np.where(self._shard.tp > 1, trainer.host.tensor_parallel_factor, 1.0)
        if not trainer.host.static_experts:
            self.add("behind", np.maximum(each * launches - seconds, 0.0))
        self._routed = (0.0, 0.0)

    def operator(self, operator: Operator, work: Work) -> None:
        freed = self._freed(operator.module, operator.share)
        again = self._again(freed, operator.ends)
        whole: Number = self._whole
        if operator.kept_by_recompute:
            again, whole = again * whole, 1.0
        again = again + operator.again
        self.add("forward", work.forward)
        self.add("dgrad", work.dgrad)
        self.add("wgrad", work.wgrad)
        self.add("recompute", again * work.forward)
        trainer = self._shard.trainer
        if not operator.captured:
            self._routed = self._routed[0] + work.forward, self._routed[1] + operator.launches[0]
        if operator.waits:
            self.routed()
        if not (trainer.host.graphs and (operator.captured or trainer.host.static_experts)):
            self.add("launches_forward", operator.launches[0])
            self.add("launches_backward", operator.launches[1] + again * operator.launches[0])
        self.add("saved", (1.0 - freed) * operator.saved + whole * operator.kept)
        self.add("working", freed * operator.saved + (1.0 - whole) * operator.kept)
        self.add("flop", work.flop)

    def collective(self, collective: Collective, alone: Floats, added: Floats) -> None:
        again: Number = 0.0
        if not collective.backward:
            again = self._again(self._freed(collective.module), collective.ends)
            if collective.kept_by_recompute:
                again = again * self._whole
        self.add(f"{collective.group}_{'backward' if collective.backward else 'forward'}", added)
        self.add(f"{collective.group}_backward", again * added)
        passes = 1.0 if collective.backward else self._shard.workload.forwards
        self.add(f"{collective.group}_hidden", (passes + again) * (alone - added))
