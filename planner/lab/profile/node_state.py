"""Under which conditions a node was measured: clocks, power and ECC of its GPUs, their links, its NICs, what the environment sets.

A profile is of the machine in this state: a power limit, ECC or NCCL_ALGO moves it by more than its spread. No torch.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from shutil import which

from planner.detect import PATIENT

ASKED = (
    "clocks.current.sm", "clocks.max.sm", "clocks.current.memory", "clocks_throttle_reasons.active", "power.limit",
    "power.default_limit", "temperature.gpu", "ecc.mode.current", "persistence_mode", "compute_mode",
)  # fmt: skip
"""Of every GPU, as nvidia-smi calls it."""
STEADY = (
    "clocks.max.sm", "power.limit", "power.default_limit", "ecc.mode.current", "persistence_mode", "infiniband", "environment",
)  # fmt: skip
"""What should be the same on every node; the others move with the load, or name the node's own parts."""
ENVIRONMENT = ("NCCL_", "TORCH_NCCL_", "CUDA_", "GLOO_", "UCX_", "HIP_", "HSA_", "RCCL_", "OMP_NUM_THREADS", "PYTORCH_")
"""How the variables begin that change what is measured."""
NICS = Path("/sys/class/infiniband")


def conditions(device: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of this node by name; what cannot be found out is not there. ``device`` cpu or cuda: the driver is asked for the latter."""
    found = _gpus() | _links() if device == "cuda" else {}
    nics = [
        " ".join([nic.name, *(" ".join(_read(port / name).split()) for name in ("rate", "link_layer", "state"))])
        for nic in _entries(NICS) for port in _entries(nic / "ports")
    ]  # fmt: skip
    if nics:
        found["infiniband"] = "; ".join(nics)
    variables = [f"{name}={environment[name]}" for name in sorted(environment) if name.startswith(ENVIRONMENT)]
    if variables:
        found["environment"] = " ".join(variables)
    governor = _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    return found | ({"governor": governor} if governor else {})


def unlike(nodes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Sentences about nodes, by host, whose steady conditions are not those of most."""
    found = []
    for name in STEADY:
        values = {host: one.get(name, "unknown") for host, one in nodes.items()}
        usual = max(sorted(set(values.values())), key=list(values.values()).count)
        odd = [f"{host} {value}" for host, value in values.items() if value != usual]
        if odd:
            found.append(f"nodes differ in {name}: {'; '.join(odd[:4])}{' and more' if len(odd) > 4 else ''}, the others {usual}")
    return found


def _gpus() -> dict[str, str]:
    """One value where all GPUs of the node have the same, else all of them in order."""
    rows = [line.split(", ") for line in _asked(f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader").splitlines()]
    if not rows or any(len(row) != len(ASKED) for row in rows):
        return {}
    columns = dict(zip(ASKED, zip(*rows, strict=True), strict=True))
    return {name: column[0] if len(set(column)) == 1 else ", ".join(column) for name, column in columns.items()}


def _links() -> dict[str, str]:
    """The matrix of ``nvidia-smi topo -m``, one line per GPU and NIC, blanks instead of tabs."""
    rows = [" ".join(line.split()) for line in _asked("topo", "-m").splitlines() if line.startswith(("GPU", "NIC", "mlx"))]
    return {"topology": " | ".join(rows)} if rows else {}


def _asked(*words: str) -> str:
    tool = which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=PATIENT, check=True, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return "".join(one for one in done.stdout if one.isprintable() or one in "\n\t")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
