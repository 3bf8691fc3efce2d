"""Products of weights: those of every token, and those of experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from planner.hardware import HardwareProfile
from planner.serving.curves.kernel_tables import kernel_from
from planner.serving.serving_layout import WEIGHT_BYTES
from tools.decode_fits.law_fit import Form, entry, errors_of
from tools.decode_fits.measured import FORMATS, Data, Rows, from_memory, grouped, versions
from tools.tables import floats

PRODUCTS = {"m": (1, 8, 32, 64, 128), "n": (256, 512, 1024, 2048, 4096, 8192), "k": (256, 512, 1024, 2048, 4096, 8192)}
"""Nodes; 2560, 5120 and 7168 were measured too and test what lies between."""
CHOSEN = {"fp8": "vllm", "fp8_block": "trtllm", "nvfp4": "vllm"}
"""The engine whose rows stand for a format: vLLM's of fp8 hold no more than one quantisation; its blocks of fp8 are the host
launching Triton (55 to 1,000 us whatever the shape). TensorRT-LLM's of nvfp4 walk along k 3.7 times slower, at 2 TB/s where few outputs
leave no other work: its autotuner, which servers run, was not."""
CACHED_MEMORY = 1.2
"""Share of the bandwidth on devices of ``CACHED``, from the few rows beyond the cache (8192 x 8192 in bf16: 0.80 to 0.81)."""


def linear(hardware: HardwareProfile, rows: Rows) -> dict[str, Any]:
    """bf16 from all engines together (one library); the others from the engine of ``CHOSEN``."""
    entries: dict[str, Any] = {}
    for (dtype,), of_dtype in grouped(rows, "dtype"):
        if dtype == "sq":
            continue
        name = FORMATS[dtype]
        own = [row for row in of_dtype if row["engine"] == CHOSEN.get(dtype)] or of_dtype
        m, n, k, us = floats(own, "m", "n", "k", "time_us")
        data = Data({"m": m, "n": n, "k": k}, us * 1e-6, versions(own))
        data.keep = from_memory(hardware, n * k * WEIGHT_BYTES[name], data.seconds)
        form = Form(axes=PRODUCTS)
        if data.keep is not None:
            form = Form(least={"launch": 1e6 * hardware.graph_launch_floor}, memory=CACHED_MEMORY)
        entries[name] = entry("linear", hardware, name, data, form)
    return entries


# ---------------------------------------------------------------------------------------------------- experts

GROUPED = ("7168", "256")
"""Hidden size and experts of DeepSeek-V3, whose router picks 4 of 8 groups first: the rows touch half of what their routing says."""
DRAWS = 60


@cache
def drawn(tokens: int, top_k: int, experts: int, ep: int) -> tuple[float, float]:
    """(experts touched, copies) on the busiest rank, as the collector draws its power law of 1.2, mean of DRAWS draws.

    Popularity x^-1.2 between 1 and 0.8 x tokens (between 0.01 and 2 with fewer copies than experts), rounded to whole copies.
    """
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    random = np.random.default_rng(1)
    popular = ((high**-0.2 - low**-0.2) * random.random((DRAWS, experts)) + low**-0.2) ** -5.0
    copies = np.round(popular / popular.sum(axis=1, keepdims=True) * tokens * top_k)
    for draw in copies:
        order = np.argsort(-draw)
        missing = int(tokens * top_k - draw.sum())
        for step in range(abs(missing)):
            first, last = order[step % experts], order[-(step % experts) - 1]
            draw[first if missing > 0 or draw[last] <= 0 else last] += np.sign(missing)
    copies = np.clip(copies, 0, tokens)
    copies = copies.reshape(DRAWS, ep, -1) if experts >= ep else copies[:, :, None]
    busiest = copies[np.arange(DRAWS), copies.sum(axis=2).argmax(axis=1)]
    return float((busiest > 0).sum(axis=1).mean()), float(busiest.sum(axis=1).mean())


def stands_for_nothing(hardware: HardwareProfile, dtype: str) -> bool:
    """Rows that no server should run: mxfp4 unpacked for 16-bit cores where engines use those for 4 bits (nvfp4 stands for it),
    and fp8 on Hopper, a fallback 5 times slower than bf16 (fp8_block stands for it)."""
    unpacked = dtype == "w4a16_mxfp4" and hardware.arch in ("Blackwell", "Blackwell Ultra")
    return unpacked or (dtype == "fp8" and hardware.name in ("h100-sxm", "h200-sxm"))


def experts_data(rows: Rows) -> tuple[Data, Any]:
    """(rows of one format and engine, which of them are of balanced routing)."""
    tokens, hidden, ffn, top_k, number, moe_tp, ep, us = floats(
        rows, "tokens", "hidden", "ffn", "topk", "experts", "moe_tp", "ep", "time_us"
    )
    mean = tokens * top_k / ep
    balanced = np.stack([np.maximum(np.minimum(number / ep, mean), 1.0), mean], axis=1)
    skewed = np.array([drawn(*(int(row[name]) for name in ("tokens", "topk", "experts", "ep"))) for row in rows])
    even = np.array([row["distribution"] == "balanced" for row in rows])
    touched, copies = np.where(even[:, None], balanced, skewed).T
    touched = np.maximum(touched, 0.5)
    sizes = {"touched": touched, "rows": copies, "pairs": tokens * top_k, "hidden": hidden, "ffn": ffn / moe_tp}
    return Data(sizes, us * 1e-6, versions(rows)), even


def experts(hardware: HardwareProfile, rows: Rows) -> dict[str, Any]:
    """Per format and engine, on rows of balanced routing, where it is known which experts are touched; skewed rows test it.

    They differ from the balanced ones by the experts touched and the copies alone, which are drawn as the collector drew them.
    """
    entries: dict[str, Any] = {}
    for (dtype, engine), own in grouped(rows, "dtype", "engine"):
        if stands_for_nothing(hardware, dtype):
            continue
        data, even = experts_data([row for row in own if (row["hidden"], row["experts"]) != GROUPED])
        name, sizes = FORMATS[dtype], data.sizes
        moved = sizes["touched"] * 3.0 * sizes["hidden"] * sizes["ffn"] * WEIGHT_BYTES[name]
        kept = from_memory(hardware, moved, data.seconds)
        kept = np.ones(len(even), bool) if kept is None else kept
        found = entry("experts", hardware, name, data.take(kept & even if even.any() else kept), Form())
        if even.any():
            law = kernel_from(found, "experts", name, hardware, "law")
            found["errors"]["skewed"] = errors_of(law, data.take(kept & ~even))
        entries[f"{name} {engine}"] = found
    return entries
