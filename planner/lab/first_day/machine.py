"""What this machine is and in which state: ``python -m planner.lab.first_day.machine --device cuda --output FILE``."""

import argparse
import contextlib
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from planner import library
from planner.detect import PATIENT, asked_driver, processor
from planner.lab.profile.node_state import conditions
from planner.units import GIB

PACKAGES = ("planner", "torch", "triton", "numpy", "transformer-engine", "flash-attn", "torchao")


def machine(device: str) -> dict[str, Any]:
    """Versions, GPUs and conditions as plain data; what cannot be found out is null."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": {
            "kernel": platform.platform(), "python": platform.python_version(), "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        },
        "versions": {name: _version(name) for name in PACKAGES},
        "driver": (asked_driver(PATIENT).version or None) if device == "cuda" else None,
        "torch": _torch(device), "conditions": conditions(device),
    }  # fmt: skip


def _torch(device: str) -> dict[str, Any]:
    """What torch was built for and sees; a step of its own fails where it cannot be imported, and says so."""
    import torch

    asked: dict[str, Callable[[], Any]] = {
        "cuda": lambda: torch.version.cuda, "hip": lambda: torch.version.hip, "cudnn": lambda: torch.backends.cudnn.version(),
    }  # fmt: skip
    found = {name: _said(ask) for name, ask in asked.items()}
    if device == "cpu":
        return found
    count = _said(torch.cuda.device_count) or 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return found | {
        "nccl": _said(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        "gpus": [_said(partial(_card, torch.cuda, number)) for number in range(count)],
        "peers": _said(lambda: f"{sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)} of {len(pairs)} pairs"),
    }


def _card(cuda: Any, number: int) -> dict[str, Any]:
    return _gpu(cuda.get_device_properties(number))


def _gpu(card: Any) -> dict[str, Any]:
    """From the properties of a device; a build that lacks one of them has the name and the memory."""
    found = {"name": card.name, "memory_gib": round(card.total_memory / GIB, 2)}
    more = _said(lambda: {"capability": f"{card.major}.{card.minor}", "multiprocessors": card.multi_processor_count})
    return found | (more or {})


def _version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def _said(ask: Callable[[], Any]) -> Any:
    """An answer of torch, None where this build has none."""
    with contextlib.suppress(Exception):  # each build lacks something else, and each raises something else
        return ask()
    return None


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--output", required=True, type=Path)
    given = parser.parse_args()
    library.write_whole(given.output, library.dump_yaml({"machine": machine(given.device)}))


if __name__ == "__main__":
    main()
