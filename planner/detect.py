"""This machine: its GPUs, asked from the driver's own tool, its processor, and how busy it is; no torch."""

import platform
import re
import subprocess
from functools import cache
from pathlib import Path
from shutil import which

from planner import library


@cache
def devices() -> dict[str, str | dict[str, str]]:
    """Profile by the expression that finds its device's name, the most specific first; of what is not modelled its nearest."""
    return library.read_yaml(library.profiles_directory() / "devices.yaml")


def profile_of(device: str) -> str | None:
    """Library profile of a device by the name its driver or a table gives it, or None."""
    found = _entry(device)
    return found if isinstance(found, str) else None


def not_modelled(device: str) -> str | None:
    """The sentence that refuses a device of a kind that the planner does not know; None for any other."""
    found = _entry(device)
    if not isinstance(found, dict):
        return None
    return (
        f"{device}: TPUs and Trainium are not modelled (other kernels, a torus, one compiled program); the nearest that is known, "
        f"by rate and memory, is {found['nearest']}; a datasheet of one's own works as --hardware FILE (docs/extend.md)"
    )


def _entry(device: str) -> str | dict[str, str] | None:
    found = (entry for text, entry in devices().items() if re.search(rf"(?:{text})(?!\d)", device, re.IGNORECASE))
    return next(found, None)


def local_devices() -> list[str]:
    """Names of the GPUs that nvidia-smi reports; none without one, or when it does not answer in two seconds."""
    tool = which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.splitlines() if line.strip()]


def local_device() -> str | None:
    """Name of the first of them, or None."""
    names = local_devices()
    return names[0] if names else None


def processor() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def pressure() -> float | None:
    """Percent of the last ten seconds in which some process waited for a core; None where the kernel does not say."""
    try:
        line = Path("/proc/pressure/cpu").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    return float(line.split("avg10=")[1].split()[0])
