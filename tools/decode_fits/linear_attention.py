"""Linear attention: updates of one token and scans of a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.hardware import HardwareProfile
from tools.decode_fits.law_fit import LEAST_MEMORY, Form, entry
from tools.decode_fits.measured import Data, Rows, from_memory, grouped, versions

SHAPE = ("batch", "sequence_length", "key_heads", "key_dim", "value_heads", "value_dim")


def linear_attention(hardware: HardwareProfile, rows: Rows, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(updates, scans): convolution and recurrence of one engine together; the fastest kernel of those an engine has."""
    updates: dict[str, Any] = {}
    scans: dict[str, Any] = {}
    for (engine, phase), own in grouped([row for row in rows if row["phase"] != "verify"], "engine", "phase"):
        data = both_kernels(own)
        if len(data.seconds) < 20:
            continue
        key = f"{kind} {engine}"
        if phase == "generation":
            sizes = data.sizes
            moved = 8.0 * sizes["batch"] * sizes["heads"] * sizes["key_dim"] * sizes["value_dim"]
            data.keep = from_memory(hardware, moved, data.seconds)
            # states of 16 bits where an engine keeps them so
            form = Form(least={"memory": 0.6 if data.keep is None else LEAST_MEMORY})
            if data.keep is None or data.keep.sum() >= 15:
                updates[key] = entry("linear_update", hardware, kind, data, form)
        elif key != "kimi_delta_attention vllm" or data.seconds.min() <= 2e-4:  # else the host launching three convolutions
            scans[key] = entry("linear_scan", hardware, kind, data, Form(least={"memory": 1.0}))
    return updates, scans


def both_kernels(rows: Rows) -> Data:
    """Convolution and recurrence together, by shapes that have both; of each the fastest kernel."""
    shapes: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        name = "convolution" if row["kernel"].startswith("causal_conv1d") else "recurrence"
        parts = shapes.setdefault(tuple(row[column] for column in SHAPE), {})
        parts[name] = min(parts.get(name, np.inf), float(row["time_us"]))
    whole = {key: parts for key, parts in shapes.items() if len(parts) == 2}
    columns = np.array([[float(value) for value in key] for key in whole]).reshape(-1, len(SHAPE))
    batch, length, key_heads, key_dim, heads, value_dim = columns.T
    sizes = {
        "batch": batch, "tokens": length, "heads": heads, "channels": 2.0 * key_heads * key_dim + heads * value_dim,
        "key_dim": key_dim, "value_dim": value_dim,
    }  # fmt: skip
    return Data(sizes, np.array([sum(parts.values()) for parts in whole.values()]) * 1e-6, versions(rows))
