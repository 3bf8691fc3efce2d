"""Hardware of a row: the profile of its GPU, with the node and the network that the row states or measured."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cache
from typing import Any

from planner import library, units
from planner.detect import profile_of
from planner.hardware import HardwareProfile, load_hardware
from planner.runs.names import UnsupportedError, entry_of, frameworks
from planner.runs.schema import Row


def hardware_of(row: Row, base: str = "") -> tuple[HardwareProfile, str]:
    """The profile with the row's node and network, and whether its network was 'normal', 'slow' or 'not measured'.

    ``base``: the profile (name or file) to use instead of the one that the row's GPU stands for.
    """
    name = base or gpu_profile(str(row.hardware["gpu"]))
    per_node = row.hardware.get("gpus_per_node") or 0
    stated = _stated_bandwidth(str(row.hardware.get("inter_node") or ""), per_node)
    hardware = _node(name, per_node, stated)
    latency = _network_latency(row)
    share = _measured_share(row, hardware)
    if share is None:
        one_node = (row.get("parallel.gpus") or 0) <= hardware.scale_up_domain
        return _node(name, per_node, stated, latency), "normal" if one_node else "not measured"
    # Steps of 3 % keep the groups that are priced in one call few.
    step = math.floor(math.log(share) / math.log(1.03))
    bandwidth = min(hardware.network_bandwidth, hardware.network_bandwidth * 1.03**step)
    return _node(name, per_node, bandwidth, latency), "normal" if share >= 0.5 else "slow"


def _network_latency(row: Row) -> float:
    """Latencies of the framework's cluster over those of the profile; 1 where nothing is known."""
    try:
        return float(entry_of(row).get("network_latency", 1.0))
    except UnsupportedError:
        return 1.0


@cache
def gpu_profile(text: str) -> str:
    """Name of the profile of a GPU's text. Raises UnsupportedError."""
    for entry in frameworks()["hardware"]:
        if entry["match"].search(text):
            return str(entry["hardware"])
    profile = text.lower() if text.lower() in library.names("hardware") else profile_of(text)
    if profile is not None:
        return profile
    raise UnsupportedError(f"GPU '{text}' is not in profiles/frameworks.yaml")


@cache
def _load_hardware(name: str) -> HardwareProfile:
    """A profile of the library, read once."""
    return load_hardware(name)


@cache
def _node(name: str, per_node: int, bandwidth: float | None, latency: float = 1.0) -> HardwareProfile:
    """A library profile with another node size (0 = its own) and network: bytes/s per GPU (None = its own), and what
    multiplies its latencies.

    A scale-up domain inside one box shrinks with the box; one that spans boxes (NVL72) stays.
    """
    profile = _load_hardware(name)
    changes: dict[str, Any] = {} if bandwidth is None else {"network_bandwidth": bandwidth}
    if per_node:
        inside = profile.scale_up_domain <= profile.gpus_per_node
        changes["scale_up_domain"] = min(profile.scale_up_domain, per_node) if inside else profile.scale_up_domain
        changes["gpus_per_node"] = per_node
    if latency != 1.0:
        changes["network_latency"] = profile.network_latency * latency
        changes["scale_out"] = {op: curve.stretched(latency) for op, curve in profile.scale_out.items()}
    return dataclasses.replace(profile, **changes)


_LINK = re.compile(r"(?:(\d+)x\s)?[^\d]*?(\d+(?:\.\d+)?) Gb/s([^;]*)")


def _stated_bandwidth(text: str, per_node: int) -> float | None:
    """Bytes/s per GPU from the text of a node's network, '8x NDR InfiniBand 400 Gb/s'; None when it has no number.

    Without a number of links and without 'per node' the figure is that of one adapter, and every GPU is given one.
    """
    match = _LINK.match(text)
    if match is None:
        return None
    links, rate = match.group(1), float(match.group(2)) * units.GIGA / 8
    if links is None and "per node" not in match.group(3):
        return rate
    return float(links or 1) * rate / max(per_node, 1)


_BENCH = re.compile(r"world AR/AG/RS ([\d.]+)/([\d.]+)/([\d.]+) GB/s")
_BENCH_SIZE = 2.0**30
"""Bytes per collective in the benchmark of the allocation; the source does not print it, large sizes hardly differ."""


def _measured_share(row: Row, hardware: HardwareProfile) -> float | None:
    """Part of its line rate that the network of this job reached, at most 1; None when not measured or not used.

    The notes give the bus bandwidth of all-gather and reduce-scatter over all ranks, measured by the job itself. In a
    ring over whole nodes each node's NICs carry that bandwidth together, so it stands for figure / gpus_per_node per
    GPU. It already contains protocol losses, which ``scale_out_time`` adds again: the share is therefore the measured
    over the modelled bus bandwidth of the same collective. All-reduce is left out (in-switch reduction).
    """
    match, n = _BENCH.search(row.notes), row.get("parallel.gpus") or 0
    if match is None or n <= hardware.gpus_per_node:
        return None
    figures = [float(match.group(2)), float(match.group(3))]
    if min(figures) <= 0:
        return None
    shares = []
    for op, figure in zip(("all_gather", "reduce_scatter"), figures, strict=True):
        time = float(hardware.scale_out_time(op, _BENCH_SIZE, float(n), hardware.gpus_per_node))
        shares.append(figure * units.GIGA / ((n - 1) / n * _BENCH_SIZE / time))
    return float(min(1.0, sum(shares) / len(shares)))
