"""This machine: its GPUs, asked from the driver's own tool, its processor, and how busy it is; no torch."""

import platform
import subprocess
from pathlib import Path
from shutil import which

NAMES: tuple[tuple[str, str], ...] = (
    ("GB300", "gb300-nvl72"), ("GB200", "gb200-nvl72"), ("B300", "b300-sxm"), ("B200", "b200-sxm"), ("H200", "h200-sxm"),
    ("H100 NVL", "h100-nvl"), ("H100 PCIe", "h100-pcie"), ("H100", "h100-sxm"), ("H800", "h800-sxm"),
    ("A100-SXM4-40GB", "a100-sxm-40gb"), ("A100-SXM", "a100-sxm-80gb"), ("A100 80GB PCIe", "a100-pcie-80gb"),
    ("A100", "a100-sxm-80gb"), ("A800", "a100-sxm-80gb"), ("L40S", "l40s"), ("L4", "l4"), ("A10G", "a10g"),
    ("RTX PRO 6000", "rtx-pro-6000"), ("RTX 5090", "rtx-5090"), ("RTX 4090", "rtx-4090"), ("RTX 3090", "rtx-3090"),
    ("V100-SXM2-16GB", "v100-sxm2-16gb"), ("V100", "v100-sxm2-32gb"),
    ("MI355", "mi355x"), ("MI325", "mi325x"), ("MI300X", "mi300x"), ("MI250", "mi250x"), ("GAUDI3", "gaudi3"),
    ("GAUDI2", "gaudi2"),
)  # fmt: skip
"""Text in the name that a driver reports, and the profile; the first that is found counts."""


def profile_of(device: str) -> str | None:
    """Library profile of a device by the name its driver reports, or None."""
    return next((profile for text, profile in NAMES if text.lower() in device.lower()), None)


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
