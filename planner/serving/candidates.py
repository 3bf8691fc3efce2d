"""The space of a serving search: every split of one engine, and the loads that it is priced at, as columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

from planner.arrays import Floats, NDArray
from planner.layout import divisors
from planner.model import ModelSpec
from planner.serving.serving_layout import ServingLayout

DEGREES = ("tp", "pp", "attn_dp", "ep", "moe_tp", "dcp")
"""Degrees of one engine; replicas of it are counted afterwards."""
LARGEST_TP = 64
"""Tensor parallel ranks: beyond a scale-up domain the all-reduces of every layer cross the network."""
STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Pipeline stages that are tried."""
NODE = 8
"""GPUs that a fast link joins in most machines."""
LARGEST_ENGINE = 256
"""GPUs of one engine: DeepSeek's largest published decode unit has 320, in EP 320; a question of more GPUs gets more replicas."""
OCTAVE = (4, 5, 6, 7)
"""Steps of the load inside of a factor of two: 4/4, 5/4, 6/4 and 7/4 of a power of two."""


def engine_layouts(model: ModelSpec, gpus: int, pins: Mapping[str, int]) -> ServingLayout:
    """All splits of one engine of at most ``gpus`` GPUs, as columns with one replica; not every row is legal: rules say which.

    tp divides the query heads; attention is data parallel in models with experts alone, where powers of two are tried; ep x
    moe_tp is the number of ranks of a stage. Stages of more than NODE ranks are not pipelined: experts spread over more ranks
    instead. The cache is shared out by position over all ranks that would repeat it, or over none. ``pins`` fixes fields.
    """
    return _engine_layouts(model, gpus, tuple(sorted(pins.items())))


@lru_cache(maxsize=16)
def _engine_layouts(model: ModelSpec, gpus: int, pinned: tuple[tuple[str, int], ...]) -> ServingLayout:
    """The same for every engine and format of a search: worked out once, its columns read only."""
    pins = dict(pinned)
    most = min(gpus, max(LARGEST_ENGINE, pins.get("tp", 1) * pins.get("pp", 1) * pins.get("attn_dp", 1)))
    tps = _options(pins, "tp", [n for n in divisors(model.num_heads) if n <= min(most, LARGEST_TP)])
    pps = _options(pins, "pp", [n for n in STAGES if n <= model.num_layers])
    dps = _options(pins, "attn_dp", _powers(most) if model.is_moe else [1])
    rows = []
    for tp, pp, dp in itertools.product(tps, pps, dps):
        ranks = tp * dp
        if ranks * pp <= most and (pp == 1 or ranks <= NODE or "pp" in pins):
            dcps = _options(pins, "dcp", [1, max(tp // _cache_copies(model), 1)])
            rows += [
                (tp, pp, dp, ep, moe, dcp) for (ep, moe), dcp in itertools.product(_experts(model, ranks, pins), dcps)
            ]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(DEGREES))
    columns = {name: table[:, number].copy() for number, name in enumerate(DEGREES)}
    for column in columns.values():
        column.flags.writeable = False
    return ServingLayout(**columns)


def _options(pins: Mapping[str, int], name: str, found: Iterable[int]) -> list[int]:
    return [pins[name]] if name in pins else sorted(set(found))


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]


def _cache_copies(model: ModelSpec) -> int:
    """Tensor ranks beyond which the cache repeats, so that splitting its positions saves some: KV heads, one with MLA."""
    return 1 if model.is_mla else model.num_kv_heads


def _experts(model: ModelSpec, ranks: int, pins: Mapping[str, int]) -> list[tuple[int, int]]:
    """(ep, moe_tp) of the ranks of a stage: whole experts, every expert over all ranks of a node, and what lies between in a
    node."""
    if not model.is_moe:
        return [(pins.get("ep", 1), pins.get("moe_tp", 1))]
    found = [(ep, ranks // ep) for ep in divisors(ranks) if model.num_experts % ep == 0 and _together(ep, ranks)]
    if {"ep", "moe_tp"} & pins.keys():
        found = [(ep, ranks // ep) for ep in divisors(ranks)]
    return [(ep, moe) for ep, moe in found if pins.get("ep", ep) == ep and pins.get("moe_tp", moe) == moe]


def _together(ep: int, ranks: int) -> bool:
    """Ranks that share an expert stay in a node; of engines of several nodes at most two share one."""
    return ranks // ep <= (NODE if ranks <= NODE else 2)


def loads(most: float, every: int = 1) -> NDArray[np.int64]:
    """Requests in flight at one engine, from 1 up to ``most``: four in every factor of two, of these every n-th."""
    found = {step * 2**n // 4 for n in range(15) for step in OCTAVE if (step * 2**n) % 4 == 0}
    return np.array(sorted(one for one in found if one <= most), dtype=np.int64)[::every]


def at_loads(most: Floats, every: int = 1) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Rows and their loads: row n appears with loads up to ``most[n]``, the largest whole one included."""
    last = np.maximum(most, 1.0).astype(np.int64)
    grid = loads(float(np.max(last, initial=1)), every)
    more = np.searchsorted(grid, last)  # of the grid, below the last
    rows = np.repeat(np.arange(len(last)), more + 1)
    at = np.arange(len(rows)) - np.repeat(np.cumsum(more + 1) - more - 1, more + 1)
    return rows, np.where(at < more[rows], grid[np.minimum(at, len(grid) - 1)], last[rows])
