"""What no machine can be: a profile faster than its peak, its memory or its link is refused with the numbers."""

from collections.abc import Iterator

import numpy as np

from planner import units
from planner.curves import bus_factor, least_factor
from planner.hardware.compute import Compute
from planner.hardware.links import Links

LINK_TOLERANCE = 1.02
"""Timers, and 1000-against-1024 rounding in published tables."""
CLOCK_TOLERANCE = 1.05
"""Two measured times of the same thing may be in the wrong order by this."""
GRID_TOLERANCE = 1.02
"""A grid's nodes are rounded to percent; the price itself is never below 2 m n k / peak."""


def compute_faults(profile: Compute, measured: bool) -> Iterator[str]:
    """What is faster than the peak or the memory, and by how much; ``measured``: the GEMM curves are the device's own."""
    if profile.sustained_clock > 1:
        yield (f"sustained_clock is {profile.sustained_clock:.2f}, faster than a short burst; at most 1")
    yield from _check_memory(profile)
    yield from _check_gemm(profile, measured)
    for key, attention in profile.attention.items():
        if np.any(attention.efficiency > 1) or np.any(attention.efficiency <= 0):
            yield (f"attention {' '.join(key)} runs faster than the peak; efficiency must be in 0..1")


def link_faults(profile: Links) -> Iterator[str]:
    """What is faster than the link, the line rate of the NICs or the host's memory."""
    if profile.cpu_adam_bandwidth_fraction > 1:
        yield (
            f"cpu_adam_bandwidth_fraction is {profile.cpu_adam_bandwidth_fraction:.2f}, faster than the host's "
            "memory; at most 1"
        )
    yield from _check_network(profile)
    yield from _check_scale_up(profile)


def _check_memory(profile: Compute) -> Iterator[str]:
    """Sizes and shares of the device's memory, and its launches."""
    for op, fraction in profile.memory_fraction.items():
        if fraction > 1:
            yield f"memory_fraction {op} is {fraction:.2f}, faster than the memory; at most 1"
    if profile.usable_memory > profile.memory * 1.08:  # 80 GB parts hold 80 GiB less the reserve
        yield "usable_memory is larger than memory; check GB against GiB"
    reserve = profile.context_memory + profile.communicator_memory + profile.workspace_memory
    if reserve >= profile.usable_memory:
        yield (
            f"context, one communicator and workspace take {units.format_bytes(reserve)} of "
            f"{units.format_bytes(profile.usable_memory)} usable memory; nothing would be left to train in"
        )
    if profile.graph_launch_floor > profile.launch_floor * CLOCK_TOLERANCE:
        yield (
            f"graph_launch_floor {units.format_seconds(profile.graph_launch_floor)} is longer than launch_floor "
            f"{units.format_seconds(profile.launch_floor)}; a graph only takes launches away"
        )


def _check_gemm(profile: Compute, measured: bool) -> Iterator[str]:
    """No curve above its peak, in its constants or at a node of its residual grid."""
    for recipe, curve in profile.gemm.items():
        if not 0 < curve.efficiency <= 1:
            yield f"gemm {recipe} runs at {curve.efficiency:.2f} of the peak; it cannot pass 1"
        if curve.memory_efficiency > 1:
            yield (
                f"gemm {recipe} reads its operands at {curve.memory_efficiency:.2f} of the memory bandwidth; at most 1"
            )
        if max(curve.grouped_efficiency) > 1:
            yield (
                f"gemm {recipe}: grouped products at {max(curve.grouped_efficiency):.2f} of the rate of one large "
                "product; at most 1"
            )
        if curve.grid is None or recipe not in profile.peak_flops or not measured:
            continue  # the grid of a relative may not suit this peak; the price is bounded by it anyway
        m, n, k = (axis.ravel() for axis in np.meshgrid(curve.grid.m, curve.grid.n, curve.grid.k, indexing="ij"))
        flop = 2.0 * m * n * k
        work = curve.unbounded_time(m, n, k, profile.peak_flops[recipe], profile.memory_bandwidth)
        share = flop / (work * profile.peak_flops[recipe])
        worst = int(np.argmax(share))
        if share[worst] > GRID_TOLERANCE:
            yield (
                f"gemm {recipe} runs at {share[worst]:.2f} of the peak of "
                f"{profile.peak_flops[recipe] / units.TERA:.4g} TFLOP/s at m {m[worst]:.0f}, n {n[worst]:.0f}, k "
                f"{k[worst]:.0f}; it cannot pass 1"
            )


def _check_network(profile: Links) -> Iterator[str]:
    """Collectives across nodes within the line rate; on two whole nodes an all_reduce in the switch may pass it."""
    for op, network in profile.scale_out.items():
        share = max(network.fast.efficiency, network.bulk.efficiency)
        if share > 1:
            yield f"scale_out {op} reaches {share:.2f} of the line rate of the NICs; at most 1"
        if network.two_nodes is not None:
            ranks = 2.0 * profile.gpus_per_node
            most = float(bus_factor(op, ranks) / least_factor(op, ranks))
            if network.two_nodes > most:
                yield (
                    f"scale_out {op} on two nodes reaches {network.two_nodes:.2f} of the line rate of the NICs; at most "
                    f"{most:.2f}, where every GPU receives each byte once"
                )


def _check_scale_up(profile: Links) -> Iterator[str]:
    """No measured collective moves more than its link carries."""
    for op, collective in profile.scale_up.items():
        for group, row in zip(collective.groups, collective.seconds, strict=True):
            link = profile.scale_up_bandwidth if group <= profile.scale_up_domain else profile.pcie_bandwidth
            shortest = least_factor(op, group) * collective.sizes / (link * LINK_TOLERANCE)
            if np.any(row < shortest):
                worst = int(np.argmin(row / shortest))
                rate = units.format_bytes(float(least_factor(op, group) * collective.sizes[worst] / row[worst]))
                yield (
                    f"scale_up {op} on {group:.0f} GPUs moves {rate}/s at "
                    f"{units.format_bytes(float(collective.sizes[worst]))}, "
                    f"above the link of {units.format_bytes(link)}/s"
                )
