"""Fit measured kernels of serving into ``profiles/decode/*.yaml``.

    python tools/build_decode_curves.py DIRECTORY [device ...]

DIRECTORY holds decode/*.csv, hybrid/*.csv, moe_a2a.csv and sources.yaml: public measurements, one row each. The planner never needs
them. A kernel is a law of few positive numbers (``planner/serving/curves/kernel_laws.py``) and, where shapes differ beyond that, a mesh
of measured over law at a few nodes. Every fit is made on a random half first (seed 0) and scored on the other half; the errors are
written beside the numbers, then it is repeated on all rows.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import nnls
from scipy.sparse import coo_matrix, vstack
from scipy.sparse.linalg import lsqr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.curves import Column
from planner.hardware import HardwareProfile, load_hardware
from planner.serving.curves.decode_curves import ENGINES
from planner.serving.curves.kernel_laws import LAWS
from planner.serving.curves.kernel_tables import INDEX, Kernel, Likeness, kernel_from
from planner.serving.curves.message_times import exchange_sizes
from planner.serving.serving_layout import CACHE_BYTES, WEIGHT_BYTES

DATE = "2026-11-22"
"""Day the rows were read."""
HEADER = "# Devices of profiles/decode: arch, scale-up domain, bf16 peak, memory bandwidth; written by tools/build_decode_curves.py."
OUTPUT = Path(__file__).resolve().parent.parent / "profiles" / "decode"
PAGE = OUTPUT.parent.parent / "docs" / "serving-kernels.md"
MARKS = ("<!-- errors -->", "<!-- /errors -->")
FORMATS = {
    "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4", "int8_wo": "int8",
    "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4",
}  # fmt: skip
LEAST_MEMORY = 1.08
"""No kernel reads faster than 93 % of the nominal bandwidth; smaller numbers come from operands that stayed in the cache."""
CACHED = {"l40s": 96e6, "rtx-pro-6000": 128e6}
"""Devices whose second-level cache holds what a benchmark reads again and again, bytes; a model's weights come from memory."""
CACHED_MEMORY = 1.2
"""Their share of the bandwidth, from the few rows beyond the cache (8192 x 8192 in bf16: 0.80 to 0.81)."""
Row = dict[str, str]
Rows = list[Row]


@dataclass
class Data:
    """Rows of one kernel: sizes as the law names them, and seconds."""

    sizes: dict[str, Column]
    seconds: Column
    said: str = ""
    keep: Column | None = None

    def take(self, which: Any) -> Data:
        """Some of the rows."""
        return Data({name: values[which] for name, values in self.sizes.items()}, self.seconds[which], self.said)


@dataclass
class Form:
    """How a kernel is fitted: least numbers of terms, terms left out, and the nodes of its mesh."""

    least: dict[str, float] = field(default_factory=lambda: {"memory": LEAST_MEMORY})
    without: tuple[str, ...] = ()
    smooth: tuple[str, ...] = ()
    """Two sizes along whose product the mesh is filled in (``between``)."""
    memory: float = 0.0
    """Known share of the bandwidth: rows that a cache served show the other numbers all the same; 0 = fitted."""
    axes: dict[str, tuple[float, ...]] = field(default_factory=dict)


def floats(rows: Rows, *keys: str) -> list[Column]:
    """Columns of the rows as float64."""
    return [np.array([float(row[key]) for row in rows]) for key in keys]


def table(path: Path) -> Rows:
    """Rows of a csv file."""
    with open(path, encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def versions(rows: Rows) -> str:
    """Engines and versions that rows come from."""
    return ", ".join(sorted({f"{row['engine']} {row['version']}" for row in rows if "engine" in row}))


# ---------------------------------------------------------------------------------------------------- fits


def quantiles(error: Column) -> list[float]:
    """Median and 90th percentile of |error|, percent."""
    return [round(100.0 * float(np.quantile(np.abs(error), share)), 1) for share in (0.5, 0.9)]


def fit_numbers(operator: str, hardware: HardwareProfile, dtype: str, data: Data, form: Form) -> dict[str, float]:
    """Positive numbers of the law, least absolute relative error by reweighting, none below its least."""
    terms = {
        name: np.broadcast_to(value, data.seconds.shape)
        for name, value in LAWS[operator](hardware, data.sizes, dtype).items()
    }
    names = [name for name in terms if name not in form.without and np.any(terms[name] > 0)]
    matrix = np.stack([terms[name] for name in names], axis=1) / data.seconds[:, None]
    base = np.array([form.least.get(name, 0.0) for name in names])
    weight = np.ones(len(matrix))
    found = base
    for _ in range(12):
        extra, _ = nnls(matrix * weight[:, None], (1.0 - matrix @ base) * weight)
        found = base + extra
        weight = 1.0 / np.sqrt(np.maximum(np.abs(matrix @ found - 1.0), 0.03))
    return {name: float(f"{value:.4g}") for name, value in zip(names, found, strict=True) if value > 0}


def weights_at(axes: dict[str, Column], sizes: dict[str, Column], count: int) -> tuple[Column, Column, Column]:
    """Of the linear interpolation: (row, node, weight) of every corner of every row's cell, as one list."""
    rows, nodes, weights = [np.arange(count)], [np.zeros(count, int)], [np.ones(count)]
    for name, values in axes.items():
        if values.size == 1:
            continue
        x = np.clip(np.broadcast_to(sizes[name], (count,)), values[0], values[-1])
        below = np.clip(np.searchsorted(values, x, side="right") - 1, 0, values.size - 2)
        share = (x - values[below]) / (values[below + 1] - values[below])
        rows, nodes, weights = (
            [one for r in rows for one in (r, r)],
            [node * values.size + below + side for node in nodes for side in (0, 1)],
            [weight * (share if side else 1.0 - share) for weight in weights for side in (0, 1)],
        )
    return np.concatenate(rows), np.concatenate(nodes), np.concatenate(weights)


def neighbours(shape: tuple[int, ...]) -> list[tuple[Column, Column]]:
    """Pairs of nodes next to each other."""
    order = np.arange(int(np.prod(shape))).reshape(shape)
    pairs = []
    for axis in range(len(shape)):
        if shape[axis] > 1:
            pairs.append((np.delete(order, -1, axis).ravel(), np.delete(order, 0, axis).ravel()))
    return pairs


def isotonic(times: Column, weight: Column) -> Column:
    """Times at the nodes made rising along every axis, by pooling neighbours that fall; a few sweeps over the axes."""
    for _ in range(6):
        for axis in range(times.ndim):
            moved, support = np.moveaxis(times, axis, -1), np.moveaxis(weight, axis, -1)
            for line in np.ndindex(moved.shape[:-1]):
                moved[line] = pooled(moved[line].copy(), support[line])
    return times


def pooled(values: Column, weight: Column) -> Column:
    """Pool adjacent violators on the logarithm."""
    blocks: list[list[float]] = []
    for value, w in zip(np.log(values), weight, strict=True):
        blocks.append([value, w, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            value2, w2, n2 = blocks.pop()
            value1, w1, n1 = blocks.pop()
            blocks.append([(value1 * w1 + value2 * w2) / (w1 + w2), w1 + w2, n1 + n2])
    return np.exp(np.concatenate([np.full(int(n), value) for value, _, n in blocks]))


def fit_mesh(kernel: Kernel, data: Data, axes: dict[str, tuple[float, ...]]) -> Kernel:
    """The kernel with a mesh: factors on the law at the nodes that fit best, near one and smooth where rows say little."""
    nodes = {name: np.array(values, float) for name, values in axes.items()}
    grid = dict(zip(nodes, np.meshgrid(*nodes.values(), indexing="ij"), strict=True))
    plain = Kernel(kernel.operator, kernel.dtype, kernel.hardware, kernel.numbers)
    law = plain._sum(plain._terms(grid))
    inside = {
        name: np.clip(values, nodes[name][0], nodes[name][-1]) if name in nodes else values
        for name, values in data.sizes.items()
    }
    beyond = np.maximum(plain._sum(plain._terms(data.sizes)) - plain._sum(plain._terms(inside)), 0.0)
    count = len(data.seconds)
    row, node, weight = weights_at(nodes, inside, count)
    matrix = coo_matrix((weight * law.ravel()[node] / data.seconds[row], (row, node)), shape=(count, law.size)).tocsr()
    target = 1.0 - beyond / data.seconds
    pairs = neighbours(law.shape)
    ends = np.concatenate([np.concatenate(pair) for pair in pairs]).reshape(-1)
    starts = np.concatenate([np.repeat(np.arange(len(pair[0])), 1) for pair in pairs])
    number = len(starts)
    low, high = np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])
    smooth = coo_matrix(
        (
            np.concatenate([np.full(number, 0.15), np.full(number, -0.15)]),
            (np.tile(np.arange(number), 2), np.concatenate([low, high])),
        ),
        shape=(number, law.size),
    )
    near = coo_matrix((np.full(law.size, 0.05), (np.arange(law.size), np.arange(law.size))), shape=(law.size, law.size))
    del ends
    confidence = np.ones(count)
    factor = np.ones(law.size)
    for _ in range(8):
        scaled = coo_matrix((confidence, (np.arange(count), np.arange(count)))) @ matrix
        system = vstack([scaled, smooth, near]).tocsr()
        wanted = np.concatenate([confidence * target, np.zeros(number), np.full(law.size, 0.05)])
        factor = lsqr(system, wanted, x0=factor, iter_lim=200)[0]
        confidence = 1.0 / np.sqrt(np.maximum(np.abs(matrix @ factor - target), 0.03))
        confidence /= np.sqrt(np.median(confidence**2))
    support = np.asarray(np.abs(matrix).sum(axis=0)).ravel().reshape(law.shape) + 0.05
    times = isotonic(np.clip(factor, 0.2, 5.0).reshape(law.shape) * law, support)
    return Kernel(
        kernel.operator, kernel.dtype, kernel.hardware, kernel.numbers, nodes, np.round(100.0 * times / law, 0)
    )


def between(data: Data, first: str, second: str) -> Data:
    """The rows, and others half-way in both sizes: (a, b) as the geometric mean of (2 a, b / 2) and (a / 2, 2 b), where it is missing.

    Attention turns from waiting to reading at so many cached tokens, the product of both: along equal products it is smooth, while a
    straight line from 512 to 2,048 tokens of context passes a third above the corner.
    """
    names = sorted(data.sizes)
    known: dict[tuple[float, ...], list[float]] = {}
    for row in zip(*(data.sizes[name] for name in names), data.seconds, strict=True):
        known.setdefault(tuple(row[:-1]), []).append(row[-1])
    a, b = names.index(first), names.index(second)

    def moved(key: tuple[float, ...], up: float) -> tuple[float, ...]:
        return tuple(
            value * up if place == a else value / up if place == b else value for place, value in enumerate(key)
        )

    added = {}
    for key, times in known.items():
        middle, other = moved(key, 0.5), moved(key, 0.25)
        if other in known and middle not in known:
            added[middle] = float(np.sqrt(np.median(times) * np.median(known[other])))
    rows = np.array([[*key, seconds] for key, seconds in added.items()]).reshape(-1, len(names) + 1)
    sizes = {name: np.concatenate([data.sizes[name], rows[:, place]]) for place, name in enumerate(names)}
    return Data(sizes, np.concatenate([data.seconds, rows[:, -1]]), data.said)


def fitted(operator: str, hardware: HardwareProfile, dtype: str, data: Data, form: Form) -> tuple[Kernel, Kernel]:
    """(law alone, law with its mesh) on these rows."""
    fit_on = data if data.keep is None or form.memory else data.take(data.keep)
    numbers = fit_numbers(operator, hardware, dtype, fit_on, form)
    if form.memory:
        numbers["memory"] = form.memory
        numbers["compute"] = min(
            numbers.get("compute", 0.0), form.memory
        )  # rows too short for the rate say too little of it
    law = Kernel(operator, dtype, hardware, numbers)
    shapes = between(data, *form.smooth) if form.smooth else data
    return law, fit_mesh(law, shapes, form.axes) if form.axes else law


def entry(operator: str, hardware: HardwareProfile, dtype: str, data: Data, form: Form) -> dict[str, Any]:
    """What the file says about one kernel, with its errors."""
    half = np.random.default_rng(0).random(len(data.seconds)) < 0.5
    errors: dict[str, Any] = {}
    if half.sum() > 20 and data.keep is None:
        _, first = fitted(operator, hardware, dtype, data.take(half), form)
        outside = data.take(~half)
        errors["held_out"] = quantiles(first.time(outside.sizes) / outside.seconds - 1.0)
    law, whole = fitted(operator, hardware, dtype, data, form)
    scored = data if data.keep is None else data.take(data.keep)
    errors["all"] = quantiles(whole.time(scored.sizes) / scored.seconds - 1.0)
    if form.axes:
        errors["law"] = quantiles(law.time(scored.sizes) / scored.seconds - 1.0)
    result: dict[str, Any] = {
        "from": data.said,
        "law": " ".join(f"{name} {value:g}" for name, value in whole.numbers.items()),
    }
    if form.axes:
        result["axes"] = {name: " ".join(f"{node:g}" for node in nodes) for name, nodes in whole.axes.items()}
        result["percent"] = " ".join(f"{value:.0f}" for value in whole.percent.ravel())
    return {**result, "rows": len(scored.seconds), "errors": errors}


# ---------------------------------------------------------------------------------------------------- operators


def grouped(rows: Rows, *keys: str) -> Iterable[tuple[tuple[str, ...], Rows]]:
    """Rows by the values of some columns."""
    found: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return sorted(found.items())


def from_memory(hardware: HardwareProfile, moved: Column, seconds: Column) -> Column | None:
    """Rows that a cache cannot have served, where a device has a large one: few bytes, whose launch counts, or more than it holds."""
    size = CACHED.get(hardware.name)
    if size is None:
        return None
    possible = seconds > moved / (0.95 * hardware.memory_bandwidth)
    return possible & ((moved > 1.2 * size) | (moved < 0.02 * size))


PRODUCTS = {"m": (1, 8, 32, 64, 128), "n": (256, 512, 1024, 2048, 4096, 8192), "k": (256, 512, 1024, 2048, 4096, 8192)}
"""Nodes; 2560, 5120 and 7168 were measured too and test what lies between."""


def linear(hardware: HardwareProfile, rows: Rows) -> dict[str, Any]:
    """bf16 from all engines together (one library); fp8 from vLLM, whose rows hold no more than one quantisation; fp8_block from
    TensorRT-LLM, as vLLM's rows are the host launching Triton (55 to 1,000 us whatever the shape); nvfp4 per engine."""
    chosen = {"fp8": ("vllm",), "fp8_block": ("trtllm",)}
    entries: dict[str, Any] = {}
    for (dtype,), of_dtype in grouped(rows, "dtype"):
        if dtype == "sq":
            continue
        for engine, own in (
            [("", of_dtype)] if dtype != "nvfp4" else [(f" {e}", r) for (e,), r in grouped(of_dtype, "engine")]
        ):
            if dtype in chosen and not engine:
                own = [row for row in own if row["engine"] in chosen[dtype]] or own
            m, n, k, us = floats(own, "m", "n", "k", "time_us")
            data = Data({"m": m, "n": n, "k": k}, us * 1e-6, versions(own))
            name = FORMATS[dtype]
            moved = n * k * WEIGHT_BYTES[name]
            data.keep = from_memory(hardware, moved, data.seconds)
            form = Form(axes={} if data.keep is not None else PRODUCTS)
            if data.keep is not None:
                form = Form(least={"launch": 1e6 * hardware.graph_launch_floor}, memory=CACHED_MEMORY)
            entries[f"{name}{engine}"] = entry("linear", hardware, name, data, form)
    return entries


ROWS, GROUPS, CONTEXTS = tuple(2.0**n for n in range(12)), (1.0, 4.0, 16.0), tuple(2.0**n for n in range(7, 18))
WINDOW = 128.0
"""The one window that was measured, tokens."""


def decode_attention(hardware: HardwareProfile, rows: Rows) -> tuple[dict[str, Any], dict[str, Any]]:
    """Kernels without and with a window, per engine, format of the cache and width of a head.

    A window is fitted over what was cached, not what it shows: TensorRT-LLM's kernel on Hopper takes 35 us on 8,192 tokens and 10
    on 128.
    """
    plain: dict[str, Any] = {}
    windowed: dict[str, Any] = {}
    for (cache, width, engine, window), own in grouped(rows, "kv_dtype", "head_dim", "engine", "window"):
        if (hardware.name, engine) == ("a100-sxm-80gb", "trtllm"):  # untrusted: above the bandwidth of the memory
            continue
        batch, heads, kv_heads, context, us = floats(own, "batch", "heads", "kv_heads", "context", "time_us")
        blocks, key, kind = batch * kv_heads, f"{FORMATS[cache]} {width} {engine}", FORMATS[cache]
        sizes = {
            "rows": blocks,
            "group": heads / kv_heads,
            "context": context,
            "head_dim": np.full(len(own), float(width)),
        }
        data = Data(sizes, us * 1e-6, versions(own))
        axes: dict[str, tuple[float, ...]] = {
            "rows": ROWS,
            "group": GROUPS,
            "context": CONTEXTS,
            "head_dim": (float(width),),
        }
        if window == "0":
            data.keep = from_memory(hardware, 2.0 * blocks * context * float(width) * CACHE_BYTES[kind], data.seconds)
            form = Form(axes=axes if data.keep is None else {}, smooth=("rows", "context"))
            plain[key] = entry("decode_attention", hardware, kind, data, form)
            continue
        sizes |= {"context": np.full(len(own), WINDOW), "walked": context}
        form = Form(without=("compute",), axes={**axes, "context": (WINDOW,), "walked": CONTEXTS[:9:2]})
        windowed[key] = entry("window", hardware, kind, data, form)
    return plain, windowed


def decode_mla(hardware: HardwareProfile, rows: Rows) -> dict[str, Any]:
    """Per engine and format of the cache."""
    entries = {}
    for (cache, engine), own in grouped(rows, "kv_dtype", "engine"):
        batch, heads, context, us = floats(own, "batch", "heads_per_rank", "context", "time_us")
        data = Data({"batch": batch, "heads": heads, "context": context}, us * 1e-6, versions(own))
        axes = {
            "batch": ROWS[:9],
            "heads": (8, 16, 32, 64, 128),
            "context": (16, *CONTEXTS),
        }
        moved = 576.0 * batch * context * CACHE_BYTES[FORMATS[cache]]
        data.keep = from_memory(hardware, moved, data.seconds)
        entries[f"{FORMATS[cache]} {engine}"] = entry(
            "decode_mla",
            hardware,
            FORMATS[cache],
            data,
            Form(axes=axes if data.keep is None else {}, smooth=("batch", "context")),
        )
    return entries


SPARSE = "deepseek-ai/DeepSeek-V3.2"
LAUNCHES = 25.0
"""Kernels of one module, about; the host took 0.2 to 0.4 ms to launch them where it was measured, which is left out."""


def projections(hardware: HardwareProfile, row: Row) -> float:
    """Seconds of the products of one module of DeepSeek-V3.2, with its absorbed up-projections, for the tokens of a row."""
    tokens, heads = float(row["batch"]) * float(row["sequence_length"]), float(row["heads"])
    dtype = FORMATS[row["gemm_dtype"]]
    shapes = [(2112.0, 7168.0), (192.0 * heads, 1536.0), (8192.0, 1536.0), (192.0, 7168.0), (7168.0, 128.0 * heads)]
    whole = sum(float(hardware.gemm_time(tokens, n, k, dtype)) for n, k in shapes)
    return whole + 2.0 * float(hardware.gemm_time(tokens, 128.0 * heads, 512.0, "bf16"))


def sparse_prefill(hardware: HardwareProfile, rows: Rows) -> dict[str, Any]:
    """DeepSeek sparse attention over whole prompts per engine and format of the cache: modules, less their projections."""
    entries: dict[str, Any] = {}
    for (cache, engine), own in grouped([row for row in rows if row["model"] == SPARSE], "kv_dtype", "engine"):
        least = 8192 if engine == "vllm" else 4096  # shorter prompts attend to all keys, or wait for the host
        own = [row for row in own if int(row["sequence_length"]) >= least]
        batch, length, heads, us = floats(own, "batch", "sequence_length", "heads", "time_us")
        left = us * 1e-6 - np.array([projections(hardware, row) for row in own])
        queries, kept = batch * length, left > 0.3e-6 * us
        sizes = {
            "queries": queries, "pairs": 0.5 * queries * length, "heads": heads, "selected": np.full(len(own), 2048.0),
            "channels": np.full(len(own), 64.0 * 128.0),
        }  # fmt: skip
        data = Data(sizes, left, versions(own)).take(kept)
        data.said = versions(own)
        if kept.sum() < 10:
            continue
        found = entry("sparse_prefill", hardware, FORMATS[cache], data, Form(least={}))
        words = found["law"].split()
        numbers = dict(zip(words[::2], words[1::2], strict=True)) | {
            "launch": f"{1e6 * hardware.launch_floor * LAUNCHES:g}"
        }
        found["law"] = " ".join(f"{name} {value}" for name, value in numbers.items())
        entries[f"{FORMATS[cache]} {engine}"] = found
    return entries


def drawn(tokens: int, top_k: int, experts: int, ep: int) -> tuple[float, float]:
    """(experts touched, copies) on the busiest rank, as the collector draws its power law of 1.2, mean of 60 draws.

    Popularity x^-1.2 between 1 and 0.8 x tokens (between 0.01 and 2 with fewer copies than experts), rounded to whole copies.
    """
    key = (tokens, top_k, experts, ep)
    if key in _DRAWN:
        return _DRAWN[key]
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    random = np.random.default_rng(1)
    popular = ((high**-0.2 - low**-0.2) * random.random((60, experts)) + low**-0.2) ** -5.0
    copies = np.round(popular / popular.sum(axis=1, keepdims=True) * tokens * top_k)
    for draw in copies:
        order = np.argsort(-draw)
        missing = int(tokens * top_k - draw.sum())
        for step in range(abs(missing)):
            at = (
                order[step % experts]
                if missing > 0 or draw[order[-(step % experts) - 1]] <= 0
                else order[-(step % experts) - 1]
            )
            draw[at] += np.sign(missing)
    copies = np.clip(copies, 0, tokens).reshape(60, ep, -1) if experts >= ep else np.clip(copies, 0, tokens)[:, :, None]
    busiest = copies[np.arange(60), copies.sum(axis=2).argmax(axis=1)]
    _DRAWN[key] = float((busiest > 0).sum(axis=1).mean()), float(busiest.sum(axis=1).mean())
    return _DRAWN[key]


GROUPED = ("7168", "256")
"""Hidden size and experts of DeepSeek-V3, whose router picks 4 of 8 groups first: the rows touch half of what their routing says."""
_DRAWN: dict[tuple[int, int, int, int], tuple[float, float]] = {}


def experts(hardware: HardwareProfile, rows: Rows) -> dict[str, Any]:
    """Per format and engine, on rows of balanced routing, where it is known which experts are touched; skewed rows test it.

    They differ from the balanced ones by the experts touched and the copies alone, which are drawn as the collector drew them.
    """
    entries: dict[str, Any] = {}
    for (dtype, engine), own in grouped(rows, "dtype", "engine"):
        if dtype == "w4a16_mxfp4" and hardware.arch in ("Blackwell", "Blackwell Ultra"):
            continue  # weights unpacked for 16-bit cores, where engines use those for 4 bits: nvfp4 stands for it
        if dtype == "fp8" and hardware.name in ("h100-sxm", "h200-sxm"):
            continue  # 5 times slower than bf16: a fallback that no server should run; fp8_block stands for it
        own = [row for row in own if (row["hidden"], row["experts"]) != GROUPED]
        tokens, hidden, ffn, top_k, number, moe_tp, ep, us = floats(
            own, "tokens", "hidden", "ffn", "topk", "experts", "moe_tp", "ep", "time_us"
        )
        mean = tokens * top_k / ep
        balanced = np.stack([np.maximum(np.minimum(number / ep, mean), 1.0), mean], axis=1)
        skewed = np.array([drawn(*(int(row[name]) for name in ("tokens", "topk", "experts", "ep"))) for row in own])
        even = np.array([[row["distribution"] == "balanced"] for row in own])
        touched, copies = np.where(even, balanced, skewed).T
        sizes = {
            "touched": np.maximum(touched, 0.5),
            "rows": copies,
            "pairs": tokens * top_k,
            "hidden": hidden,
            "ffn": ffn / moe_tp,
        }
        data = Data(sizes, us * 1e-6, versions(own))
        moved = touched * 3.0 * hidden * ffn / moe_tp * WEIGHT_BYTES[FORMATS[dtype]]
        keep = from_memory(hardware, moved, data.seconds)
        exact = even.ravel() if even.any() else np.ones(len(own), bool)
        exact = exact if keep is None else exact & keep
        found = entry("experts", hardware, FORMATS[dtype], data.take(exact), Form())
        if even.any():
            law = kernel_from(found, "experts", FORMATS[dtype], hardware, "law")
            rest = data.take(~even.ravel() if keep is None else ~even.ravel() & keep)
            found["errors"]["skewed"] = quantiles(law.time(rest.sizes) / rest.seconds - 1.0)
        entries[f"{FORMATS[dtype]} {engine}"] = found
    return entries


def exchange(hardware: HardwareProfile, low: Rows, high: Rows) -> dict[str, Any]:
    """DeepEP's two kernels, both directions."""
    entries: dict[str, Any] = {}
    for phase in ("dispatch", "combine"):
        for kernel, rows in (
            ("latency", low),
            ("throughput", [row for row in high if row["phase"] == phase and row["sms"] in ("20", "24")]),
        ):
            if not rows:
                continue
            tokens, hidden, top_k, number = floats(rows, "tokens_per_rank", "hidden", "topk", "experts")
            (us,) = floats(rows, f"{phase}_us" if kernel == "latency" else "time_us")
            ep = np.full(len(rows), 8.0) if kernel == "latency" else floats(rows, "world")[0]
            sizes = exchange_sizes(
                hardware,
                kernel,
                phase,
                {"tokens": tokens, "hidden": hidden, "top_k": top_k, "experts": number, "ep": ep},
            )
            data = Data(
                sizes, us * 1e-6, "sglang 0.5.12" if kernel == "latency" else "DeepEP 0.5.6, 20 to 24 multiprocessors"
            )
            found = entry("exchange", hardware, kernel, data, Form(least={"link": 1.0, "network": 1.0}))
            if " network" not in found["law"]:
                found["law"] += f" network {ACROSS[kernel]:g}"
                found["note"] = "network: not measured here"
            entries[f"{kernel} {phase}"] = found
    return entries


ACROSS = {"latency": 1.15, "throughput": 1.3}
"""Time of bytes to another node over that at the line rate: DeepEP's README (128 tokens, 16 to 64 ranks, 43 of 50 GB/s), and H100 2 to 8 nodes."""


def linear_attention(hardware: HardwareProfile, rows: Rows, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Updates and scans, convolution and recurrence of one engine together; the fastest kernel of those an engine has."""
    updates: dict[str, Any] = {}
    scans: dict[str, Any] = {}
    for (engine, phase), own in grouped([row for row in rows if row["phase"] != "verify"], "engine", "phase"):
        shapes: dict[tuple[str, ...], dict[str, float]] = {}
        for row in own:
            name = "convolution" if row["kernel"].startswith("causal_conv1d") else "recurrence"
            key = tuple(
                row[c] for c in ("batch", "sequence_length", "key_heads", "key_dim", "value_heads", "value_dim")
            )
            parts = shapes.setdefault(key, {})
            parts[name] = min(parts.get(name, np.inf), float(row["time_us"]))
        whole = {key: parts for key, parts in shapes.items() if len(parts) == 2}
        if len(whole) < 20:
            continue
        batch, length, key_heads, key_dim, heads, value_dim = np.array([[float(x) for x in key] for key in whole]).T
        seconds = np.array([sum(parts.values()) for parts in whole.values()]) * 1e-6
        if kind == "kimi_delta_attention" and engine == "vllm" and phase == "context" and seconds.min() > 2e-4:
            continue  # the host launching three convolutions
        channels = 2.0 * key_heads * key_dim + heads * value_dim
        sizes = {
            "batch": batch,
            "tokens": length,
            "heads": heads,
            "channels": channels,
            "key_dim": key_dim,
            "value_dim": value_dim,
        }
        operator = "linear_update" if phase == "generation" else "linear_scan"
        # states of 16 bits where an engine keeps them so
        form = Form(least={"memory": 0.6 if phase == "generation" else 1.0})
        data = Data(sizes, seconds, versions(own))
        if phase == "generation":
            data.keep = from_memory(hardware, 8.0 * batch * heads * key_dim * value_dim, seconds)
        if data.keep is not None:
            form.least = {"memory": LEAST_MEMORY}
            if data.keep.sum() < 15:
                continue
        found = entry(operator, hardware, kind, data, form)
        (updates if phase == "generation" else scans)[f"{kind} {engine}"] = found
    return updates, scans


# ---------------------------------------------------------------------------------------------------- all-reduce


def all_reduce(rows: Rows) -> dict[str, Any]:
    """Microseconds per octave, per engine and kind; TensorRT-LLM's are launched in a graph. Up to 128 MiB; the newest version."""
    entries: dict[str, Any] = {}
    for (engine, impl), own in grouped(rows, "engine", "impl"):
        kind = "eager" if impl.endswith("eager") else "graph"
        newest = max((row["version"] for row in own), key=lambda v: [int(x) for x in v.split("rc")[0].split(".")])
        own = [row for row in own if row["version"] == newest and 128 <= int(row["elements"]) <= 2**26]
        octaves = sorted({int(row["elements"]) for row in own})
        table_us: dict[int, str] = {}
        for (gpus,), of_group in grouped(own, "gpus"):
            us = {int(row["elements"]): float(row["time_us"]) for row in of_group}
            logs = np.interp(np.log2(octaves), np.log2(sorted(us)), np.log([us[e] for e in sorted(us)]))
            table_us[int(gpus)] = " ".join(f"{value:.3g}" for value in np.exp(logs))
        entries[f"{engine} {kind}"] = {
            "from": f"{engine} {newest}",
            "first_bytes": 2 * octaves[0],
            "us": dict(sorted(table_us.items())),
        }
    return entries


# ---------------------------------------------------------------------------------------------------- files


def flow(value: Any) -> str:
    """YAML on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).splitlines()[0])


def written(data: dict[str, Any]) -> str:
    """YAML with one line per field of a kernel, and texts of numbers that load fast."""
    title = "written by tools/build_decode_curves.py; numbers of the laws in planner/serving/curves/kernel_laws.py."
    lines = [f"# {data['name']}: {title}", f"name: {data['name']}", f"source: {flow(data['source'])}", "kernels:"]
    for operator, entries in data["kernels"].items():
        lines.append(f"  {operator}:")
        for key, fields in entries.items():
            lines += [f"    {key}:", *(f"      {name}: {flow(value)}" for name, value in fields.items())]
    lines.append("all_reduce:")
    for key, fields in data["all_reduce"].items():
        lines += [f"  {key}:", *(f"    {name}: {flow(value)}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


TABLES = (
    "decode/gemm_decode", "decode/decode_attention", "decode/decode_mla", "decode/moe_decode", "decode/custom_allreduce",
    "decode/deepep_low_latency", "hybrid/gated_delta_net", "hybrid/kimi_delta_attention", "hybrid/sparse_attention_context",
    "moe_a2a",
)  # fmt: skip


def kernels_of(hardware: HardwareProfile, rows: dict[str, Rows]) -> dict[str, Any]:
    """Entries of every operator that was measured on a device."""
    kernels: dict[str, Any] = {"linear": linear(hardware, rows["decode/gemm_decode"])}
    kernels["decode_attention"], kernels["window"] = decode_attention(hardware, rows["decode/decode_attention"])
    kernels["decode_mla"] = decode_mla(hardware, rows["decode/decode_mla"])
    kernels["sparse_prefill"] = sparse_prefill(hardware, rows["hybrid/sparse_attention_context"])
    kernels["experts"] = experts(hardware, rows["decode/moe_decode"])
    thorough = [row for row in rows["moe_a2a"] if row["impl"] == "deepep-normal"]
    kernels["exchange"] = exchange(hardware, rows["decode/deepep_low_latency"], thorough)
    kernels["linear_update"], kernels["linear_scan"] = {}, {}
    for kind in ("gated_delta_net", "kimi_delta_attention"):
        updates, scans = linear_attention(hardware, rows[f"hybrid/{kind}"], kind)
        kernels["linear_update"] |= updates
        kernels["linear_scan"] |= scans
    return {operator: entries for operator, entries in kernels.items() if entries}


def build(directory: Path, names: list[str], output: Path = OUTPUT) -> None:
    """Write the file of every device that was measured, the index of devices, and the errors of all into the documentation."""
    rows = {name: table(directory / f"{name}.csv") for name in TABLES}
    source = yaml.safe_load((directory / "sources.yaml").read_text(encoding="utf-8"))
    source = source.get("sources", source)["aic-012"]
    said = {**{key: source[key] for key in ("package", "licence", "trust")}, "date": DATE}
    devices = output.parent / INDEX
    index = yaml.safe_load(devices.read_text(encoding="utf-8")) if devices.exists() else {}
    for device in sorted({row["gpu"] for row in rows["decode/gemm_decode"]}):
        name = device.lower()
        if names and name not in names:
            continue
        own = {file: [row for row in of_file if row["gpu"] == device] for file, of_file in rows.items()}
        hardware = load_hardware(name)
        kernels = kernels_of(hardware, own)
        messages = all_reduce(own["decode/custom_allreduce"])
        data = {"name": name, "source": said, "kernels": kernels, "all_reduce": messages}
        (output / f"{name}.yaml").write_text(written(data), encoding="utf-8")
        index[name] = list(Likeness.of(hardware))
        print(name)
        for operator, entries in kernels.items():
            for key, fields in entries.items():
                print("  ", operator, key, fields["rows"], fields["errors"], fields["law"])
    lines = [f"{key}: {flow(row)}" for key, row in sorted(index.items())]
    devices.write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")
    if output == OUTPUT:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(f"{before}{MARKS[0]}\n{errors_table()}\n{MARKS[1]}{after}", encoding="utf-8")


SHOWN = {
    "bf16 products": ("linear", "bf16"), "fp8": ("linear", "fp8"), "nvfp4": ("linear", "nvfp4"),
    "attention, bf16 cache": ("decode_attention", "bf16 128"), "fp8 cache": ("decode_attention", "fp8 128"),
    "MLA": ("decode_mla", "bf16"), "experts, bf16": ("experts", "bf16"), "fp8 blocks": ("experts", "fp8_block"), "experts, nvfp4": ("experts", "nvfp4"),
}  # fmt: skip
"""Columns of the table of errors: operator and beginning of the key."""


def errors_table(folder: Path = OUTPUT) -> str:
    """Markdown: median / 90th percentile of the error on all rows, percent, by device and kernel; the first engine of ENGINES."""
    lines = ["| | " + " | ".join(SHOWN) + " |", "|---|" + "--:|" * len(SHOWN)]
    for path in sorted(folder.glob("*.yaml")):
        kernels = yaml.safe_load(path.read_text(encoding="utf-8"))["kernels"]
        cells = []
        for operator, start in SHOWN.values():
            names = (start, *(f"{start} {engine}" for engine in ENGINES))
            found = next((kernels[operator][one] for one in names if one in kernels.get(operator, {})), None)
            cells.append("-" if found is None else "{:.0f} / {:.0f}".format(*found["errors"]["all"]))
        lines.append(f"| {path.stem} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    build(Path(sys.argv[1]), sys.argv[2:])
