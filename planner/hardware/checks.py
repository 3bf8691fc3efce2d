"""What no machine can be: a profile faster than its peak, its memory or its link is refused with the numbers."""

from __future__ import annotations

import numpy as np

from planner import units
from planner.curves import least_factor
from planner.errors import PlannerError
from planner.hardware.profile import HardwareProfile
from planner.hardware.vocabulary import LINK_TOLERANCE


def check_values(profile: HardwareProfile, where: str) -> None:
    """Physics: nothing faster than the peak, the memory or the link."""
    if profile.sustained_clock > 1:
        raise PlannerError(
            f"{where}: sustained_clock is {profile.sustained_clock:.2f}, faster than a short burst; at most 1"
        )
    for op, network in profile.scale_out.items():
        if max(network.fast.efficiency, network.bulk.efficiency) > 1:
            share = max(network.fast.efficiency, network.bulk.efficiency)
            raise PlannerError(f"{where}: scale_out {op} reaches {share:.2f} of the line rate of the NICs; at most 1")
    for recipe, curve in profile.gemm.items():
        if not 0 < curve.efficiency <= 1:
            raise PlannerError(f"{where}: gemm {recipe} runs at {curve.efficiency:.2f} of the peak; it cannot pass 1")
    for key, attention in profile.attention.items():
        if np.any(attention.efficiency > 1) or np.any(attention.efficiency <= 0):
            raise PlannerError(
                f"{where}: attention {' '.join(key)} runs faster than the peak; efficiency must be in 0..1"
            )
    for op, fraction in profile.memory_fraction.items():
        if fraction > 1:
            raise PlannerError(f"{where}: memory_fraction {op} is {fraction:.2f}, faster than the memory; at most 1")
    if profile.usable_memory > profile.memory * 1.08:  # 80 GB parts hold 80 GiB less the reserve
        raise PlannerError(f"{where}: usable_memory is larger than memory; check GB against GiB")
    for op, collective in profile.scale_up.items():
        for group, row in zip(collective.groups, collective.seconds, strict=True):
            link = profile.scale_up_bandwidth if group <= profile.scale_up_domain else profile.pcie_bandwidth
            shortest = least_factor(op, group) * collective.sizes / (link * LINK_TOLERANCE)
            if np.any(row < shortest):
                worst = int(np.argmin(row / shortest))
                rate = units.format_bytes(float(least_factor(op, group) * collective.sizes[worst] / row[worst]))
                raise PlannerError(
                    f"{where}: scale_up {op} on {group:.0f} GPUs moves {rate}/s at "
                    f"{units.format_bytes(float(collective.sizes[worst]))}, "
                    f"above the link of {units.format_bytes(link)}/s"
                )
