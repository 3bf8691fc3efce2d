"""The GPUs that a measurement here can use, as torch counts them, or one sentence why there are none; no torch in this process.

The driver's tool lists the cards of the machine. A process sees those that CUDA_VISIBLE_DEVICES, a container or a slice (MIG)
leave it, and only if its torch was built for the driver. So torch counts, and the tool explains what torch does not see. A
machine whose kernel has made files for GPUs is never taken for one without them.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from shutil import which
from typing import Any

from planner.detect import NODES, PATIENT, Driver, asked_driver, device_nodes, memory_is_off, profile_of
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.lab.launch.place import place_from
from planner.lab.launch.torchrun import ask_torch
from planner.units import GIB

DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
"""Least version of the Linux driver for each major release of CUDA.  [NVIDIA, CUDA Compatibility, minor version compatibility]"""
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
BUILDS = "https://pytorch.org/get-started/locally"
ON_THE_CPU = "or measure the CPU with --device cpu"


@dataclass(frozen=True)
class Gpus:
    """What torch sees."""

    names: tuple[str, ...] = ()
    memory: tuple[float, ...] = ()
    """Bytes of each, as the driver gives them to a process."""

    @property
    def count(self) -> int:
        """How many."""
        return len(self.names)


def gpus_here(device: str | None, environment: Mapping[str, str] = os.environ) -> Gpus:
    """The GPUs for ``--device``: none for cpu; None = those there are. Raises PlannerError where there should be some and torch
    sees none, with the remedy. A machine without a sign of a GPU is not asked."""
    nodes = device_nodes()
    if device == "cpu" or not (device == "cuda" or nodes or which("nvidia-smi")):
        return Gpus()
    if place_from(environment) is not None:  # a rank, which imports torch anyway
        said: dict[str, Any] | None = seen_by_torch()
    else:
        said = (ask_torch("seen_by_torch()", "from planner.lab.launch.gpus import seen_by_torch") or [None])[0]
    if said and said["gpus"]:
        names, memory = zip(*said["gpus"], strict=True)
        return Gpus(tuple(names), tuple(memory))
    driver = asked_driver(PATIENT)
    if said is None:
        raise PlannerError(
            f"{_there(driver, nodes)}and torch cannot be asked: it cannot be imported, or did not answer within two minutes; look "
            f"at `python -c 'import torch; torch.cuda.init()'`, {ON_THE_CPU}"
        )
    if not (driver.names or driver.problem or nodes) and device is None:
        return Gpus()  # the tool is there, and there is nothing that it reports
    raise PlannerError(_none(said, driver, nodes, environment))


def seen_by_torch() -> dict[str, Any]:
    """Versions of torch, name and bytes of every GPU that it sees, and why it sees none; imports torch."""
    import torch

    gpus, error = [], ""
    try:
        for number in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(number)
            gpus.append([str(card.name), float(card.total_memory)])
        if not gpus:
            torch.cuda.init()
    except Exception as raised:
        error = (str(raised).strip().splitlines() or [type(raised).__name__])[0][:200]
    hip = getattr(torch.version, "hip", None)
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": hip, "gpus": gpus, "error": error}


def _there(driver: Driver, nodes: list[str]) -> str:
    """What speaks for GPUs here, in words that go on; nothing where nothing does."""
    if driver.names:
        same = f"{len(driver.names)} x {driver.names[0]}"
        return f"the driver {driver.version} reports {same} here, "
    files = f"{', '.join(nodes[:2])}{' and more' if len(nodes) > 2 else ''} {'are' if len(nodes) > 1 else 'is'} there"
    parts = [part for part in (driver.problem, files if nodes else "") if part]
    return f"{' although '.join(parts)}, " if parts else ""


def _none(said: Mapping[str, Any], driver: Driver, nodes: list[str], environment: Mapping[str, str]) -> str:
    """Why torch sees no GPU, and what to do."""
    torch, cuda, error = said["torch"], said["cuda"], said["error"]
    hidden = [f"{name}='{environment[name]}'" for name in HIDING if name in environment]
    if not (driver.names or driver.problem or nodes):
        why = error or f"torch {torch}"
        return f"--device cuda: neither the driver nor torch reports a GPU here ({why}); leave it out to use the CPU"
    there = _there(driver, nodes)
    if cuda is None and said["hip"] is None:
        kind = "ROCm" if not driver.names and NODES["amd"] in nodes else _release(driver)
        return f"{there}and torch {torch} is built for the CPU alone: install a build for {kind} ({BUILDS}), {ON_THE_CPU}"
    need, have = DRIVER_OF_CUDA.get(_major(cuda), 0), _major(driver.version)
    if 0 < have < need:
        return (
            f"{there}and torch {torch} is built for CUDA {cuda}, which needs a driver of version {need} or above: update the "
            f"driver, or install a build for {_release(driver)} ({BUILDS}), {ON_THE_CPU}"
        )
    if hidden:
        return f"{there}and torch sees none of it with {', '.join(hidden)}: unset or correct it, {ON_THE_CPU}"
    remedy = "look at `nvidia-smi`, `dmesg` and the rights of /dev/nvidia*"
    if "802" in error or "not yet initialized" in error:
        remedy = "the NVSwitches are not set up: `systemctl status nvidia-fabricmanager`, of the driver's own version"
    return f"{there}and torch {torch} sees no GPU ({error or 'it gives no reason'}): {remedy}, {ON_THE_CPU}"


def _major(version: str | None) -> int:
    """Of ``13.0`` or ``550.54.14``; 0 where there is none."""
    first = (version or "").split(".")[0]
    return int(first) if first.isdecimal() else 0


def _release(driver: Driver) -> str:
    """The newest release of CUDA that a driver runs; the newest of all where it is not known."""
    have = _major(driver.version)
    return f"CUDA {max((cuda for cuda, need in DRIVER_OF_CUDA.items() if not have or need <= have), default=11)}"


def require_ranks(ranks: int, gpus: Gpus) -> None:
    """Raises PlannerError for more ranks than GPUs: two of them on one would be refused by NCCL."""
    if ranks > gpus.count:
        seen = f"torch sees {gpus.count} GPU{'s' if gpus.count != 1 else ''} here"
        hidden = [f"{name}={os.environ[name]}" for name in HIDING if os.environ.get(name)]
        seen += f" with {', '.join(hidden)}" if hidden else ""
        raise PlannerError(f"{ranks} ranks: each needs a GPU of its own, and {seen}")


def require_known(gpus: Gpus) -> str:
    """The library's profile of these GPUs. Raises PlannerError for a card that it does not know, or of another size than that."""
    name, profile = gpus.names[0], profile_of(gpus.names[0])
    if profile is None:
        raise PlannerError(
            f"the library has no profile of '{name}'; give --hardware with the nearest relative ('plan hardware' lists "
            "them), for its peaks and for what is not measured"
        )
    usable = float(load_hardware(profile).usable_memory)
    if memory_is_off(gpus.memory[0], usable):
        raise PlannerError(sizes_differ(name, gpus.memory[0], profile, usable))
    return profile


def sizes_differ(name: str, found: float, profile: str, usable: float) -> str:
    """The sentence about a card whose memory is not that of the profile its name leads to."""
    return (
        f"{name} has {found / GIB:.1f} GiB of memory here and {usable / GIB:.1f} GiB in the library's {profile}: it is another "
        "card (or a slice of one, or ECC takes a part); name the nearest relative with --hardware"
    )
