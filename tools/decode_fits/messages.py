"""Messages: the two kernels of DeepEP, and all-reduces inside a node."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.hardware import HardwareProfile
from planner.serving.curves.message_times import exchange_sizes
from tools.decode_fits.law_fit import Form, entry
from tools.decode_fits.measured import Data, Rows, grouped
from tools.tables import floats

ACROSS = {"latency": 1.15, "throughput": 1.3}
"""Time of bytes to another node over that at the line rate: DeepEP's README (128 tokens, 16 to 64 ranks, 43 of 50 GB/s), and H100 2 to 8 nodes."""
SAID = {"latency": "sglang 0.5.12", "throughput": "DeepEP 0.5.6, 20 to 24 multiprocessors"}


def exchange(hardware: HardwareProfile, low: Rows, high: Rows) -> dict[str, Any]:
    """DeepEP's two kernels, both directions."""
    entries: dict[str, Any] = {}
    for phase in ("dispatch", "combine"):
        thorough = [row for row in high if row["phase"] == phase and row["sms"] in ("20", "24")]
        for kernel, rows in (("latency", low), ("throughput", thorough)):
            if not rows:
                continue
            tokens, hidden, top_k, number = floats(rows, "tokens_per_rank", "hidden", "topk", "experts")
            (us,) = floats(rows, f"{phase}_us" if kernel == "latency" else "time_us")
            ep = np.full(len(rows), 8.0) if kernel == "latency" else floats(rows, "world")[0]
            shape = {"tokens": tokens, "hidden": hidden, "top_k": top_k, "experts": number, "ep": ep}
            data = Data(exchange_sizes(hardware, kernel, phase, shape), us * 1e-6, SAID[kernel])
            found = entry("exchange", hardware, kernel, data, Form(least={"link": 1.0, "network": 1.0}))
            if " network" not in found["law"]:
                found["law"] += f" network {ACROSS[kernel]:g}"
                found["note"] = "network: not measured here"
            entries[f"{kernel} {phase}"] = found
    return entries


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
