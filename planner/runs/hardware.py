"""Hardware of a row: the profile of its GPU, with the node and the network that the row states or measured."""

import dataclasses
import math
import re
from functools import cache
from typing import Any

from planner import library, units
from planner.detect import not_modelled, profile_of
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, joined_by, load_hardware
from planner.runs.rows import CLUSTER_FIGURES, Row, UnsupportedError

_read_once = cache(load_hardware)


def hardware_of(row: Row, base: str = "") -> tuple[HardwareProfile, str]:
    """The profile with the row's node and network, and its network: 'normal', 'slow', 'checked' or 'not measured'.

    'checked': the job's own benchmark shows host work before every collective; the network itself is normal.
    ``base``: the profile (name or file) to use instead of the one that the row's GPU stands for.
    """
    name = base or gpu_profile(str(row.hardware["gpu"]))
    per_node = row.hardware.get("gpus_per_node") or 0
    changes: dict[str, float | None] = {
        "network_bandwidth": _stated_bandwidth(str(row.hardware.get("inter_node") or ""), per_node)
    }
    latencies = 1.0, 1.0
    if not row.generic:
        own = {key: float(row.hardware.get(key) or 0.0) for key in CLUSTER_FIGURES}
        changes["sustained_clock"] = own["sustained_clock"] or None
        if row.hardware.get("context_memory"):
            changes["context_memory"] = units.parse(row.hardware["context_memory"], "bytes", what=f"{row.source}: context_memory")
        if own["network_share"]:
            stated = changes["network_bandwidth"] or _read_once(name).network_bandwidth
            changes["network_bandwidth"] = stated * own["network_share"]
        latencies = own["ring_latency"] or 1.0, own["tree_latency"] or 1.0
    simple = not row.generic and row.hardware.get("nccl_protocol") == "simple"
    joined = str(row.hardware.get("intra_node") or "")
    hardware = _node(name, per_node, latencies, tuple(changes.items()), joined, simple)
    times = _bench_times(row, hardware)
    if times is None:
        one_node = (row.get("parallel.gpus") or 0) <= hardware.scale_up_domain
        return hardware, "normal" if one_node else "not measured"
    if _check_seconds(row, times) > 0:
        return hardware, "checked"
    share = min(1.0, times[1] / times[0])
    # Steps of 3 % keep the groups that are priced in one call few.
    step = math.floor(math.log(share) / math.log(1.03))
    changes["network_bandwidth"] = min(hardware.network_bandwidth, hardware.network_bandwidth * 1.03**step)
    slow = share < 0.5
    if slow:  # what the cluster's network keeps on the GPU (EFA: 6 GiB) is not there on another
        changes.pop("context_memory", None)
    return _node(name, per_node, latencies, tuple(changes.items()), joined, simple), "slow" if slow else "normal"


@cache
def gpu_profile(text: str) -> str:
    """Name of the profile of a GPU's text. Raises UnsupportedError."""
    profile = text.lower() if text.lower() in library.names("hardware") else profile_of(text)
    if profile is not None:
        return profile
    raise UnsupportedError(not_modelled(text) or f"GPU '{text}' is not in profiles/devices.yaml")


@cache
def _node(
    name: str, per_node: int, latencies: tuple[float, float], changes: tuple[tuple[str, float | None], ...], joined: str = "",
    simple: bool = False,
) -> HardwareProfile:
    """A library profile with another node size (0 = its own) and what is known about the cluster; None = as the profile says.

    ``latencies``: of rings across nodes over those of the profile, and of what is not a ring: all-reduces, exchanges, messages.
    ``simple``: NCCL's protocols of low latency are off across nodes.
    A scale-up domain inside one box shrinks with the box; one that spans boxes (NVL72) stays.
    """
    profile = _read_once(name).stretched(rings=latencies[0], others=latencies[1])
    values: dict[str, Any] = {key: value for key, value in changes if value is not None}
    if simple:
        values["scale_out"] = {op: curve.simple() for op, curve in profile.scale_out.items()}
    if per_node:
        inside = profile.scale_up_domain <= profile.gpus_per_node
        values["scale_up_domain"] = min(profile.scale_up_domain, per_node) if inside else profile.scale_up_domain
        values["gpus_per_node"] = per_node
    return _joined(dataclasses.replace(profile, **values), joined)


def _joined(profile: HardwareProfile, text: str) -> HardwareProfile:
    """With the link inside a node that the row states, '2x NVLink bridge' or 'PCIe 4.0 x16', where the profile has another."""
    try:
        return joined_by(profile, text) if text else profile
    except PlannerError:  # a text of another kind says nothing that the profile does not
        return profile


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


def _bench_times(row: Row, hardware: HardwareProfile) -> tuple[float, float] | None:
    """Seconds of the job's own all-gather and reduce-scatter over all ranks, measured and modelled, on average.

    The notes print bus bandwidths. In a ring over whole nodes each node's NICs carry that bandwidth together. None when
    nothing was measured, or inside one node. All-reduce is left out (in-switch reduction).
    """
    match, n = _BENCH.search(row.notes), row.get("parallel.gpus") or 0
    if match is None or n <= hardware.gpus_per_node:
        return None
    figures = [float(match.group(2)), float(match.group(3))]
    if min(figures) <= 0:
        return None
    measured = [(n - 1) / n * _BENCH_SIZE / (figure * units.GIGA) for figure in figures]
    modelled = [
        float(hardware.scale_out_time(op, _BENCH_SIZE, float(n), hardware.gpus_per_node))
        for op in ("all_gather", "reduce_scatter")
    ]
    return sum(measured) / 2, sum(modelled) / 2


_CHECK = (0.1e-3, 0.4e-3)
"""Seconds per rank between which time beyond the network's is host work before the collective, not a slow network.

TORCH_DISTRIBUTED_DEBUG=DETAIL, which nanotron's run_multinode.sh exports, compares shapes over a socket barrier before every
collective: work that grows with the ranks, not with the size. Jobs with 32 to 512 ranks in the sweep behind
runs/oss-ultrascale-nanotron-* show either less than 0.03 ms per rank or 0.19 to 0.30; the few above 0.4 ms have 40 GB/s
with 8 ranks as with 64: a network of another kind.  [torch, ProcessGroupWrapper.cpp]
"""


def _check_seconds(row: Row, times: tuple[float, float]) -> float:
    """Host seconds per collective and rank, rounded to 10 us so that few groups are priced; 0 = no sign of checks."""
    each = (times[0] - times[1]) / (row.get("parallel.gpus") or 1)
    return round(each, 5) if _CHECK[0] <= each <= _CHECK[1] else 0.0
