"""The space of a search: every layout of a job without memory options, and the options that trade time for memory."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import field
from typing import Any

import numpy as np

from planner.arrays import NDArray
from planner.layout import (
    FIELDS,
    NAMES,
    Layout,
    Module,
    Order,
    Recompute,
    Schedule,
    alike,
    divisors,
    is_v_shaped,
    module_mask,
    repeated,
)
from planner.model import ModelSpec
from planner.record import record
from planner.rules import Job, absent_modules
from planner.trainer import Trainer

MICRO_BATCHES = (1, 2, 4, 8, 16)
LEAST_TOKENS = 512
"""Context parallelism leaves every rank at least this many tokens of a sequence: smaller pieces only add latency."""
LARGEST_VPP = 16
OFFLOADS = (50, 100)
"""Percents of the optimizer states in host memory."""
OPTIONS = (
    "recompute", "recompute_layers", "recompute_modules", "offload_optimizer", "offload_activations", "offload_layers",
    "offload_parameters",
)  # fmt: skip
"""Fields that trade time for memory, which the search varies after all others."""


@record
class Pins:
    """Degrees and options that the user fixed, by field of Layout; the search varies the others."""

    values: dict[str, int] = field(default_factory=dict)

    def options(self, name: str, found: Iterable[int]) -> list[int]:
        """The pinned value alone, or what was found."""
        return [self.values[name]] if name in self.values else sorted(set(found))

    def indivisible(self, gpus: int) -> str:
        """That the product of the pinned degrees does not divide a number of GPUs, in words; '' where it does."""
        pinned = {name: self.values[name] for name in ("tp", "pp", "cp", "dp") if name in self.values}
        degrees = " x ".join(f"{name} {value}" for name, value in pinned.items())
        return f"{degrees} does not divide {gpus} GPUs" if gpus % math.prod(pinned.values()) else ""


def base_layouts(job: Job, pins: Pins) -> Layout:
    """All combinations of degrees, micro batch, schedule, sharding and stage split, without recompute and offload.

    Degrees are divisors of the number of GPUs within the model's sizes (tp: heads, pp: layers, cp: tokens, ep: experts),
    the micro batch a power of two or, where a replica's share of the batch is no multiple of 16, any divisor of that share up to
    16. Not every row is legal: planner.rules says which are.
    """
    gpus, model, trainer = job.cluster.num_gpus, job.model, job.trainer
    tps = pins.options("tp", [n for n in divisors(gpus) if n <= model.num_heads] if trainer.legal.tp else [1])
    pps = pins.options("pp", [n for n in divisors(gpus) if n <= model.num_layers] if trainer.legal.pp else [1])
    longest = max(1, job.workload.sequence_length // LEAST_TOKENS)
    cps = pins.options("cp", [n for n in divisors(gpus) if n <= longest] if trainer.legal.cp_methods else [1])
    pipelines = {pp: np.array(_pipelines(job, pins, pp), dtype=np.int64).reshape(-1, 4) for pp in pps}
    tables = []
    for tp, pp, cp in itertools.product(tps, pps, cps):
        if gpus % (tp * pp * cp) == 0:
            tables.append(_combinations(job, pins, tp, cp, pp, pipelines[pp]))
    filled = [table for table in tables if table.size]
    rows = np.concatenate(filled) if filled else np.zeros((0, len(_VARIED)), dtype=np.int64)
    for number, name in enumerate(_VARIED):  # a pin on something that a degree of 1 or the model fixes leaves nothing
        rows = rows[rows[:, number] == pins.values[name]] if name in pins.values else rows
    values: dict[str, Any] = dict(zip(_VARIED, np.ascontiguousarray(rows.T), strict=True))
    pinned = {name: value for name, value in pins.values.items() if name not in (*OPTIONS, *_VARIED)}
    return Layout(**{"order": int(Order.TP_CP_EP_DP_PP), **pinned, **values})


_VARIED = (
    "tp", "pp", "cp", "dp", "dp_shard", "micro_batch_size", "num_microbatches", "ep", "etp", "vpp", "schedule",
    "first_stage_layers", "last_stage_layers", "zero", "cp_method", "sequence_parallel",
)  # fmt: skip


def _combinations(job: Job, pins: Pins, tp: int, cp: int, pp: int, pipelines: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of _VARIED for one tp, pp, cp; ``pipelines``: those of ``_pipelines``, (n, 4)."""
    trainer, batch = job.trainer, job.workload.global_batch_size
    dp = job.cluster.num_gpus // (tp * pp * cp)
    if dp != pins.values.get("dp", dp) or batch % dp:
        return np.zeros((0, len(_VARIED)), dtype=np.int64)
    most = MICRO_BATCHES[-1]  # a share of the batch that powers of two do not divide finely has other divisors
    micro = MICRO_BATCHES if batch // dp % most == 0 else [b for b in divisors(batch // dp) if b <= most]
    batches = [(b, batch // (dp * b)) for b in pins.options("micro_batch_size", micro) if batch % (dp * b) == 0]
    shards = pins.options("dp_shard", _shards(job, dp))
    methods = [n for n, name in NAMES["cp_method"].items() if name in trainer.legal.cp_methods] if cp > 1 else [0]
    always = {"optional": [0, 1], "usual": [1], "always": [1], "never": [0]}[trainer.legal.sequence_parallel] if tp > 1 else [0]
    levels = [level for level in trainer.legal.zero if pp == 1 or level in trainer.legal.zero_with_pp]
    # One replica shards nothing, and its level means nothing but in FSDP2, whose cast weights level 3 frees even there.
    zero = levels if dp * cp > 1 or min(trainer.legal.zero) >= 2 else [min(trainer.legal.zero)]
    degrees = [
        (tp, pp, cp, dp, shard, b, m, ep, etp)
        for shard, (b, m), (ep, etp) in itertools.product(shards, batches, _experts(job, pins, tp, cp, dp))
    ]
    found = (pins.options("zero", zero), pins.options("cp_method", methods), pins.options("sequence_parallel", always))
    options = list(itertools.product(*found))
    rows = np.empty((len(degrees), len(pipelines), len(options), len(_VARIED)), dtype=np.int64)
    if rows.size:  # each with each, the last fastest
        rows[..., :9], rows[..., 9:13] = np.array(degrees)[:, None, None], pipelines[:, None]
        rows[..., 13:] = np.array(options)
    return rows.reshape(-1, len(_VARIED))


def _shards(job: Job, dp: int) -> list[int]:
    """0 (all of dp) and, with HSDP, the shard groups that end at a boundary of the fast local link."""
    if not job.trainer.legal.hsdp or dp == 1:
        return [0]
    return [0, *(n for n in divisors(dp) if 1 < n < dp and n % 2 == 0)]


def _experts(job: Job, pins: Pins, tp: int, cp: int, dp: int) -> list[tuple[int, int]]:
    """(ep, etp): experts over the ranks of one stage, with their own tensor parallelism of 1 or tp."""
    if not job.model.is_moe:
        return [(1, 1)]
    kind = job.trainer.legal.expert_parallel
    if kind == "none":
        return [(1, tp)]
    ranks = dp if kind in ("dp", "alone") else tp * cp * dp
    eps = pins.options("ep", [n for n in divisors(job.model.num_experts) if ranks % n == 0])
    etps = [tp] if kind in ("dp", "alone") else [1, tp] if job.trainer.legal.etp else [1]
    return [(ep, etp) for ep in eps for etp in pins.options("etp", etps)]


def _pipelines(job: Job, pins: Pins, pp: int) -> list[tuple[int, int, int, int]]:
    """(vpp, schedule, first_stage_layers, last_stage_layers) for one pp: even split, and one with lighter ends."""
    if pp == 1:
        return [(1, Schedule.ONE_F_ONE_B, 0, 0)]
    found = []
    names = {name: number for number, name in NAMES["schedule"].items()}
    for first, last, largest in _splits(job.model, job.trainer, pins, pp):
        for name in job.trainer.legal.schedules:
            schedule = names[name]
            if schedule == Schedule.INTERLEAVED:
                vpps = [v for v in divisors(largest) if v > 1 and (v <= LARGEST_VPP or v == pins.values.get("vpp"))]
            else:
                vpps = [2] if is_v_shaped(schedule) else [1]
            found += [(v, schedule, first, last) for v in vpps]
    return found


def _splits(model: ModelSpec, trainer: Trainer, pins: Pins, pp: int) -> list[tuple[int, int, int]]:
    """(first, last, layers of a middle stage): even when it divides, else the middle rounded up and the ends sharing the rest.

    A split with lighter ends is also tried when it divides, as the ends carry embedding and loss. Pinned ends are taken
    as they are.
    """
    total, splits = model.num_layers, []
    first, last = (pins.values.get(f"{end}_stage_layers", 0) for end in ("first", "last"))
    if first or last:
        rest = pp - (first > 0) - (last > 0)
        pinned = [(first, last, max(1, -(-(total - first - last) // rest) if rest > 0 else max(first, last)))]
        free = "first_stage_layers" not in pins.values or "last_stage_layers" not in pins.values
        return pinned + (_other_ends(total, first, last, pp) if free and trainer.legal.uneven_stages else [])
    if total % pp == 0:
        splits.append((0, 0, total // pp))
    elif not trainer.legal.drops_remainder:
        splits.append((0, 0, -(-total // pp)))
    if trainer.legal.uneven_stages:
        middles = {-(-total // pp), -(-(total + 2) // pp)}
        for middle in sorted(middles):
            ends = total - middle * (pp - 2)
            first, last = -(-ends // 2), ends // 2
            if pp >= 2 and last >= 1 and first <= middle and (first, last) != (middle, middle):
                splits.append((first, last, middle))
    return splits


def _other_ends(total: int, first: int, last: int, pp: int) -> list[tuple[int, int, int]]:
    """(first, last, layers of a middle stage) where one end is pinned and the other, 0, takes what middle stages leave of the rest:
    their share of it rounded down, and up."""
    rest, found = total - first - last, []
    for middle in sorted({rest // (pp - 1), -(-rest // (pp - 1))}) if pp > 2 else ():
        other = rest - middle * (pp - 2)
        if middle >= 1 and other >= 1 and other != middle:
            found.append((first or other, last or other, middle))
    return found


@record
class MemoryOption:
    """A way to save memory in the layers, at the price of time."""

    recompute: int
    recompute_modules: int = 0
    recompute_layers_share: float = 1.0
    """Part of each stage's layers under full recompute; 1 = all."""

    def apply(self, layout: Layout, model: ModelSpec) -> Layout:
        """The layouts with this option applied."""
        layers = np.maximum(model.num_layers // np.maximum(np.asarray(layout.pp), 1), 1)
        chunks = np.maximum(np.asarray(layout.vpp), 1)  # layers are counted per virtual stage
        covered = (np.maximum(np.round(layers * self.recompute_layers_share / chunks), 1) * chunks).astype(np.int64)
        return layout.replace(
            recompute=self.recompute, recompute_modules=self.recompute_modules,
            recompute_layers=np.where(covered < layers, covered, 0) if 0 < self.recompute_layers_share < 1 else 0,
        )  # fmt: skip


def usual_modules(trainer: Trainer, model: ModelSpec) -> int:
    """What 'selective' means when no module is named: the score matrix where it is stored, else norms and activations,
    else the MLP, else the first module that the trainer knows."""
    known = module_mask(list(trainer.legal.recompute_modules)) & ~absent_modules(model, trainer)
    stored = trainer.kernels.attention == "unfused"
    wanted = int(Module.CORE_ATTENTION if stored else Module.NORM | Module.MLP_ACTIVATION)
    if wanted & known == wanted:
        return wanted
    if known & Module.MLP:
        return int(Module.MLP)
    return module_mask(list(trainer.legal.recompute_modules[:1]))


def recompute_options(job: Job, pins: Pins) -> list[MemoryOption]:
    """Recompute options other than 'none', cheapest first: modules, then a part of the layers, then all of them."""
    legal, model = job.trainer.legal, job.model
    if {"recompute", "recompute_modules", "recompute_layers"} & set(pins.values):
        return []
    known = module_mask(list(legal.recompute_modules))
    sets = [mask for mask in _module_sets(model, job.trainer) if mask & known == mask]
    shares = (0.25, 0.5, 0.75, 1.0) if legal.recompute_layers else (0.25, 0.5, 1.0) if legal.every_nth_layer else (1.0,)
    return [MemoryOption(recompute=Recompute.SELECTIVE, recompute_modules=mask) for mask in sets] + [
        MemoryOption(recompute=Recompute.FULL, recompute_layers_share=share) for share in shares
    ]


COMBINED = (
    Module.CORE_ATTENTION | Module.NORM | Module.MLP_ACTIVATION | Module.MLP | Module.MOE | Module.MLA_UP_PROJECTION
    | Module.SHARED_EXPERTS | Module.EVERY_SECOND_MATMUL
)  # fmt: skip
"""Modules whose sets ``_module_sets`` chooses by what each is worth."""


def _module_sets(model: ModelSpec, trainer: Trainer) -> list[int]:
    """Sets of modules worth repeating: cheap ones alone, cheap ones together, the whole MLP; any other alone and with the cheap."""
    core = Module.CORE_ATTENTION if trainer.kernels.attention == "unfused" else Module(0)
    cheap = Module.NORM | Module.MLP_ACTIVATION | core
    up = Module.MLA_UP_PROJECTION if model.is_mla else Module(0)
    block = Module.MOE if model.is_moe else Module.MLP
    sets = [
        Module.EVERY_SECOND_MATMUL,
        core,
        up,
        Module.MLP_ACTIVATION | core,
        cheap,
        cheap | up,
        block | core,
        block | Module.NORM | core | up,
    ]
    others = [one for one in Module if not one & COMBINED]
    sets += others + [one | cheap for one in others]
    return list(dict.fromkeys(int(one) for one in sets if one))


def stack(layouts: list[Layout]) -> Layout:
    """Layouts of columns one after the other."""
    none, sized = np.zeros(0, dtype=np.int64), [(one, len(one)) for one in layouts]
    total = sum(rows for _, rows in sized)

    def joined(name: str) -> NDArray[np.int64]:
        columns = [getattr(one, name) for one, _ in sized]
        if columns and all(map(alike, columns)):
            values = {int(one if np.ndim(one) == 0 else one[0]) for one in columns}
            if len(values) == 1:
                return repeated(np.array([*values], dtype=np.int64), total)
        return np.concatenate([none, *(np.broadcast_to(one, rows) for one, (_, rows) in zip(columns, sized, strict=True))])

    return Layout(**{name: joined(name) for name in FIELDS})


def host_options(job: Job, pins: Pins) -> list[dict[str, int]]:
    """What may live in host memory with optimizer states: activations, weights with all states, both."""
    legal = job.trainer.legal
    can = {"offload_activations": legal.offload_activations or legal.offload_saved_tensors,
           "offload_parameters": legal.offload_parameters}  # fmt: skip
    free = [name for name, possible in can.items() if possible and name not in pins.values]
    return [{name: 1} for name in free] + [dict.fromkeys(free, 1)] * (len(free) == 2)
