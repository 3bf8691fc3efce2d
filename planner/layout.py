"""Layout: how a job is split over GPUs. Integers for one layout, or integer columns of equal length for many."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Annotated, Any

import numpy as np

from planner.arrays import NDArray
from planner.errors import PlannerError, shown
from planner.record import record
from planner.schema import Rule, group, one_of, value_of, within

Column = int | NDArray[np.integer]
"""An integer, or a column of integers: one per candidate."""


class Recompute(IntEnum):
    """What is computed again in the backward pass instead of being stored."""

    NONE = 0
    SELECTIVE = 1
    FULL = 2


class Module(IntFlag):
    """Units of selective recompute; a trainer says which of them it knows."""

    CORE_ATTENTION = 1
    NORM = 2
    MLP_ACTIVATION = 4
    MLP = 8
    MOE = 16
    MLA_UP_PROJECTION = 32
    SHARED_EXPERTS = 64
    EVERY_SECOND_MATMUL = 128
    """Second, fourth, ... matrix product of a layer, and all norms and element-wise operations (torchtitan's per-operator mode)."""


class Schedule(IntEnum):
    """Order of forward and backward passes on the stages of a pipeline."""

    GPIPE = 0
    ONE_F_ONE_B = 1
    INTERLEAVED = 2
    ZB_H1 = 3
    ZBV = 4
    DUALPIPE_V = 5
    ZB_2P = 6


SPLIT_BACKWARD = (Schedule.ZB_H1, Schedule.ZB_2P, Schedule.ZBV, Schedule.DUALPIPE_V)
"""Schedules whose backward pass is two: gradients of inputs first, those of weights later."""


def is_v_shaped(schedule: Column) -> bool | NDArray[np.bool_]:
    """Whether rank i of p holds the stages i and 2 p - 1 - i, so that the first one has both embedding and head."""
    return (schedule == Schedule.ZBV) | (schedule == Schedule.DUALPIPE_V)


class CpMethod(IntEnum):
    """How attention sees the whole sequence under context parallelism."""

    RING = 0
    A2A = 1
    ALLGATHER = 2


class Order(IntEnum):
    """Rank order, innermost (adjacent ranks) first."""

    TP_CP_EP_DP_PP = 0
    TP_CP_EP_PP_DP = 1
    TP_CP_DP_PP_EP = 2


NAMES: dict[str, dict[int, str]] = {
    "recompute": {0: "none", 1: "selective", 2: "full"},
    "schedule": {0: "gpipe", 1: "1f1b", 2: "interleaved_1f1b", 3: "zb_h1", 4: "zbv", 5: "dualpipe_v", 6: "zb_2p"},
    "cp_method": {0: "ring", 1: "a2a", 2: "allgather"},
    "order": {0: "tp-cp-ep-dp-pp", 1: "tp-cp-ep-pp-dp", 2: "tp-cp-dp-pp-ep"},
}
"""Text of the fields that are choices, as written in YAML, flags and tables."""

MODULE_NAMES: dict[Module, str] = {module: str(module.name).lower() for module in Module}

BOOLEANS = ("sequence_parallel", "offload_activations", "offload_parameters")
LARGEST = 2**24
"""No degree, count or size of a layout is larger than this; anything above is a typing error."""


@record
class Layout:
    """Every degree and option of one way to run a job; ``num_gpus = tp * pp * dp * cp``.

    Each field is an integer, or an integer column: then all columns have the same length and row i is candidate i. The text
    next to its type says what it is, also in ``--help``.
    """

    tp: Annotated[Column, "Tensor parallel degree."] = 1
    pp: Annotated[Column, "Pipeline parallel degree."] = 1
    dp: Annotated[Column, "Data parallel degree: replicas times shards."] = 1
    cp: Annotated[Column, "Context parallel degree."] = 1
    ep: Annotated[Column, "Expert parallel degree."] = 1
    """Re-tiles the same ranks: etp * ep * edp * pp = num_gpus."""
    etp: Annotated[Column, "Expert tensor parallel degree."] = 1
    vpp: Annotated[Column, "Virtual stages per pipeline rank; 1 = none."] = 1
    dp_shard: Annotated[Column, "Data parallel ranks that share states (HSDP); 0 = all."] = 0
    micro_batch_size: Annotated[Column, "Sequences per forward pass and replica."] = 1
    """Before context parallelism splits them."""
    num_microbatches: Annotated[Column, "Microbatches per step and replica."] = 1
    sequence_parallel: Annotated[Column, "Split norms and dropout in the tensor parallel group."] = 0
    cp_method: Annotated[Column, "How attention sees the whole sequence."] = CpMethod.RING
    zero: Annotated[Column, "State sharding: 0 none, 1 optimizer, 2 and gradients, 3 and weights."] = 0
    schedule: Annotated[Column, "Pipeline schedule."] = Schedule.ONE_F_ONE_B
    order: Annotated[Column, "Rank order, innermost first."] = Order.TP_CP_EP_DP_PP
    recompute: Annotated[Column, "What the backward pass computes again."] = Recompute.NONE
    recompute_layers: Annotated[Column, "Layers per stage under full recompute; 0 = all."] = 0
    recompute_modules: Annotated[Column, "Modules of selective recompute, separated by commas."] = 0
    """A bit mask of Module."""
    offload_optimizer: Annotated[Column, "Percent of the optimizer states in host memory."] = 0
    offload_activations: Annotated[Column, "Keep activations in host memory between the passes."] = 0
    offload_layers: Annotated[
        Column, "Layers whose activations are offloaded where nothing is recomputed; 0 = all."
    ] = 0
    offload_parameters: Annotated[Column, "Keep weights, gradients and optimizer states in host memory."] = 0
    """Each unit is copied to the GPU before it is gathered; optimizer states follow whatever ``offload_optimizer`` says."""
    first_stage_layers: Annotated[Column, "Layers of the first pipeline stage; 0 = even share."] = 0
    last_stage_layers: Annotated[Column, "Layers of the last pipeline stage; 0 = even share."] = 0

    @property
    def num_gpus(self) -> Column:
        """GPUs in the job."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def edp(self) -> Column:
        """Expert data parallel degree: ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def shard(self) -> Column:
        """Data parallel ranks over which states are sharded, with the default filled in."""
        return np.where(np.asarray(self.dp_shard) == 0, self.dp, self.dp_shard)

    @property
    def offloads(self) -> bool | NDArray[np.bool_]:
        """Whether anything waits in host memory."""
        return (self.offload_optimizer + self.offload_activations + self.offload_parameters) > 0

    @property
    def global_batch_size(self) -> Column:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.num_microbatches * self.dp

    def __len__(self) -> int:
        """Number of candidates: 1 when every field is an integer."""
        return next((len(value) for value in vars(self).values() if isinstance(value, np.ndarray) and value.ndim), 1)

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_] | slice) -> Layout:
        """The chosen rows of the columns; fields that are one integer for all stay so."""
        if isinstance(rows, np.ndarray) and rows.dtype == bool:
            rows = np.flatnonzero(rows)

        def some(column: Any) -> Any:
            if not isinstance(column, np.ndarray) or not column.ndim:
                return column
            if isinstance(rows, slice):
                return column[rows]
            return repeated(column, len(rows)) if alike(column) else column.take(rows)

        return Layout(**{name: some(one) for name, one in self.columns().items()})

    def row(self, index: int) -> Layout:
        """One candidate as a layout of plain integers."""
        return Layout(**{n: int(v) if np.ndim(v) == 0 else int(v[index]) for n, v in self.columns().items()})

    def columns(self) -> dict[str, Any]:
        """Fields by name, as they are."""
        return {name: getattr(self, name) for name in FIELDS}

    def arrays(self) -> Layout:
        """The same with every field as a numpy array, also where it is one integer."""
        return Layout(**{name: np.asarray(value) for name, value in self.columns().items()})

    def replace(self, **changes: Column) -> Layout:
        """The layout with some fields changed."""
        return dataclasses.replace(self, **changes)

    @staticmethod
    def stack(layouts: list[Layout]) -> Layout:
        """Many layouts of one candidate each as one layout of columns."""
        return Layout(**{n: np.array([getattr(one, n) for one in layouts], dtype=np.int64) for n in FIELDS})

    def to_dict(self) -> dict[str, Any]:
        """Plain data of one layout, choices as text."""
        return {name: _WRITTEN.get(name, int)(int(value)) for name, value in self.columns().items()}

    @staticmethod
    def from_dict(data: object, *, where: str = "layout") -> Layout:
        """One layout from plain data. Raises PlannerError that names the key, what was found and what is allowed."""
        found = value_of(_FIELD_KINDS, data, where, "")
        numbers = {field: {text: number for number, text in texts.items()} for field, texts in NAMES.items()}
        return Layout(**{name: numbers[name][value] if name in NAMES else int(value) for name, value in found.items()})


def alike(column: Any) -> bool:
    """Whether a column is known to hold one integer for all rows without looking at them."""
    return not isinstance(column, np.ndarray) or not column.ndim or (column.strides == (0,) and len(column) > 0)


def repeated(column: NDArray[Any], rows: int) -> NDArray[Any]:
    """The first value of a column in so many rows, as ``np.broadcast_to`` gives it, at a fifth of its cost."""
    return np.ndarray(rows, column.dtype, column[:1], 0, (0,))


FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Layout))
MAY_BE_ZERO = {
    "dp_shard", "zero", "recompute_layers", "recompute_modules", "offload_optimizer", "offload_layers",
    "first_stage_layers", "last_stage_layers",
}  # fmt: skip


def module_names(mask: int) -> list[str]:
    """Names of the modules in a bit mask, in the order of Module."""
    return [name for module, name in MODULE_NAMES.items() if mask & module]


def module_mask(names: object, *, where: str = "recompute_modules") -> int:
    """Bit mask of modules named in a list or a comma-separated text. Raises PlannerError on an unknown name."""
    items = [part.strip() for part in names.split(",")] if isinstance(names, str) else names
    by_name = {text: module for module, text in MODULE_NAMES.items()}
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise PlannerError(f"{where} must be a list of {', '.join(by_name)}")
    mask = 0
    for item in filter(None, items):
        if item not in by_name:
            raise PlannerError(f"{where}: unknown module {shown(item)}; known: {', '.join(by_name)}")
        mask |= by_name[item]
    return mask


_WRITTEN: dict[str, Callable[[int], Any]] = {
    **{name: texts.__getitem__ for name, texts in NAMES.items()},
    **dict.fromkeys(BOOLEANS, bool),
    "recompute_modules": module_names,
}
"""How a field is written that is no number."""
_KINDS: dict[str, Any] = {
    **{name: Annotated[int, within(0 if name in MAY_BE_ZERO else 1, LARGEST)] for name in FIELDS},
    **{name: Annotated[str, one_of(*texts.values())] for name, texts in NAMES.items()},
    **dict.fromkeys(BOOLEANS, bool),
    "recompute_modules": Annotated[int, Rule(reader=lambda names, where: module_mask(names, where=where))],
    "zero": Annotated[int, within(0, 3)],
    "offload_optimizer": Annotated[int, within(0, 100)],
}
_FIELD_KINDS = Annotated[dict[str, Any], group(_KINDS)]


def divisors(number: int) -> list[int]:
    """Degrees that divide a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
