"""Which machine this is: what a profile's provenance says, and what must be equal for a journal to go on (torch)."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from typing import Any

import torch

from planner.detect import processor
from planner.lab.profile.rank_groups import Ranks


def versions(device: str) -> dict[str, str]:
    """Of every library that has a part in the figures."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "linux": platform.release()}
    try:
        found["planner"] = metadata.version("planner")
    except metadata.PackageNotFoundError:
        found["planner"] = "of a checkout that is not installed"
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cudnn"] = str(torch.backends.cudnn.version())
    else:
        found["gloo"] = f"of torch {torch.__version__}"
    return found


def driver() -> str:
    """Version of the GPU's driver, as nvidia-smi says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split()[0] if done.stdout.split() else ""


def header(ranks: Ranks) -> dict[str, Any]:
    """Of the journal: what the results belong to."""
    hosts = sorted(set(ranks.hosts))
    cuda = ranks.device == "cuda"
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device()) if cuda else None
    return {
        "device": ranks.device, "name": ranks.names[0] if cuda else processor(), "host": hosts[0].split(" node ")[0],
        "nodes": len(hosts), "world": ranks.world, "local": ranks.local, "cores": os.cpu_count() or 1,
        "memory": float(properties.total_memory) if cuda else _memory(),
        "units": int(properties.multi_processor_count) if cuda else 1,
        "driver": driver() if cuda else "", "versions": versions(ranks.device),
    }  # fmt: skip


def _memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
