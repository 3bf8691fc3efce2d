"""Attention of decoding: keys and values per head, one latent (MLA), and sparse attention over prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.hardware import HardwareProfile
from planner.serving.serving_layout import CACHE_BYTES
from tools.decode_fits.law_fit import Form, entry
from tools.decode_fits.measured import FORMATS, Data, Rows, from_memory, grouped, versions
from tools.tables import Row, floats

ROWS, GROUPS, CONTEXTS = tuple(2.0**n for n in range(12)), (1.0, 4.0, 16.0), tuple(2.0**n for n in range(7, 18))
"""Nodes."""
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
        kind, head_dim, blocks = FORMATS[cache], float(width), batch * kv_heads
        key = f"{kind} {width} {engine}"
        sizes = {"rows": blocks, "group": heads / kv_heads, "context": context, "head_dim": np.full(len(own), head_dim)}
        axes = {"rows": ROWS, "group": GROUPS, "context": CONTEXTS, "head_dim": (head_dim,)}
        data = Data(sizes, us * 1e-6, versions(own))
        if window == "0":
            data.keep = from_memory(hardware, 2.0 * blocks * context * head_dim * CACHE_BYTES[kind], data.seconds)
            form = Form(axes=axes if data.keep is None else {}, smooth=("rows", "context"))
            plain[key] = entry("decode_attention", hardware, kind, data, form)
        else:
            sizes |= {"context": np.full(len(own), WINDOW), "walked": context}
            form = Form(without=("compute",), axes={**axes, "context": (WINDOW,), "walked": CONTEXTS[:9:2]})
            windowed[key] = entry("window", hardware, kind, data, form)
    return plain, windowed


def decode_mla(hardware: HardwareProfile, rows: Rows) -> dict[str, Any]:
    """Per engine and format of the cache."""
    entries = {}
    for (cache, engine), own in grouped(rows, "kv_dtype", "engine"):
        batch, heads, context, us = floats(own, "batch", "heads_per_rank", "context", "time_us")
        kind, data = FORMATS[cache], Data({"batch": batch, "heads": heads, "context": context}, us * 1e-6, versions(own))
        data.keep = from_memory(hardware, 576.0 * batch * context * CACHE_BYTES[kind], data.seconds)
        axes = {"batch": ROWS[:9], "heads": (8, 16, 32, 64, 128), "context": (16, *CONTEXTS)}
        form = Form(axes=axes if data.keep is None else {}, smooth=("batch", "context"))
        entries[f"{kind} {engine}"] = entry("decode_mla", hardware, kind, data, form)
    return entries


# ---------------------------------------------------------------------------------------------------- sparse, over prompts

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
        if kept.sum() < 10:
            continue
        sizes = {
            "queries": queries, "pairs": 0.5 * queries * length, "heads": heads, "selected": np.full(len(own), 2048.0),
            "channels": np.full(len(own), 64.0 * 128.0),
        }  # fmt: skip
        found = entry("sparse_prefill", hardware, FORMATS[cache], Data(sizes, left, versions(own)).take(kept), Form(least={}))
        words = found["law"].split()
        numbers = dict(zip(words[::2], words[1::2], strict=True))
        numbers["launch"] = f"{1e6 * hardware.launch_floor * LAUNCHES:g}"
        found["law"] = " ".join(f"{name} {value}" for name, value in numbers.items())
        entries[f"{FORMATS[cache]} {engine}"] = found
    return entries
