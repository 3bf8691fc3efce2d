"""The hardware that is meant: by its name, by the environment, or the GPU that is found."""

from __future__ import annotations

import re

from planner.assumption import Assumption
from planner.detect import asked_driver, memory_is_off, profile_of, says_so, setting
from planner.hardware import load_hardware
from planner.hardware.names import profile_named
from planner.units import format_bytes

HARDWARE = "h100-sxm"


def hardware_asked(name: str | None, assumed: list[Assumption]) -> str:
    """What is asked for by its name in the library, or set in the environment; else the local GPU where the library knows it, with
    its memory, else the common training card."""
    if name is None and (usual := setting("HARDWARE")):
        assumed.append(Assumption("hardware", profile_named(usual), says_so("HARDWARE"), "--hardware"))
        return profile_named(usual)
    if name is not None:
        found = profile_named(name)
        if re.sub("[-_ ]", "", found.lower()) != re.sub("[-_ ]", "", name.lower()) and found != name:
            assumed.append(Assumption("hardware", found, f"what '{name}' usually is", "--hardware"))
        return found
    driver = asked_driver()
    device = driver.names[0] if driver.names else None
    profile = profile_of(device) if device else None
    why = f"the local {device} is not in the library" if device else "no GPU found on this machine"
    if driver.problem:
        why = driver.problem
    if profile is not None:
        why, usable = f"found here: {device}", float(load_hardware(profile).usable_memory)
        if memory_is_off(driver.memory[0], usable):
            why = f"the local {device} has {format_bytes(driver.memory[0])}, {profile} of the library {format_bytes(usable)}"
            profile = None
    assumed.append(Assumption("hardware", profile or HARDWARE, why, "--hardware"))
    return profile or HARDWARE
