"""This machine: its GPUs, asked from the driver's own tool, its processor, how busy it is, what its user has set; no torch."""

import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import which

from planner import library
from planner.units import MIB

QUICK = 2.0
"""Seconds that nvidia-smi has where a command only wants a default."""
PATIENT = 30.0
"""Seconds that it has before a measurement: eight GPUs that nothing keeps initialised (no persistence mode) take 3 to 20."""
NODES = {"nvidia": "/dev/nvidia[0-9]*", "amd": "/dev/kfd"}
"""Files that the kernel's driver of a GPU makes."""
MEMORY_OFF = 0.03
"""Between a driver's total and a profile's usable memory, relative: context and rounding; other sizes of a card are 10 % apart."""


@cache
def devices() -> dict[str, str | dict[str, str] | None]:
    """Profile by the expression that finds its device's name, the most specific first; of what is not modelled its nearest;
    None for a card that is not in the library although its name holds that of one that is."""
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
    """Whole words only, so that an H200 is not found in GH200 nor an L4 in L40; a count before it (8xH100) is no part of it."""
    return _found(device)[0]


def beside_device(device: str) -> str:
    """What a text says besides the device that is found in it; all of it where none is."""
    return _found(device)[1]


def _found(device: str) -> tuple[str | dict[str, str] | None, str]:
    """The entry of a text, and the text without what the entry was found by."""
    for text, entry in devices().items():
        match = re.search(rf"(?:(?<![a-z0-9])|(?<=\dx))(?:{text})(?![a-z0-9])", device, re.IGNORECASE)
        if match:
            return entry, f"{device[: match.start()]} {device[match.end() :]}"
    return None, device


@dataclass(frozen=True)
class Driver:
    """What the driver's own tool says of the GPUs here."""

    names: tuple[str, ...] = ()
    memory: tuple[float, ...] = ()
    """Bytes of each; 0 = it does not say."""
    version: str = ""
    """Of the driver."""
    problem: str = ""
    """Why the tool says nothing although it is there, in words."""


def asked_driver(seconds: float = QUICK) -> Driver:
    """What nvidia-smi says within so many seconds; nothing at all where there is no such tool."""
    tool = which("nvidia-smi")
    if tool is None:
        return Driver()
    import subprocess

    command = [tool, "--query-gpu=name,memory.total,mig.mode.current,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return Driver(problem=f"nvidia-smi did not answer within {seconds:g} s")
    except OSError as error:
        return Driver(problem=f"nvidia-smi cannot be started ({error.strerror})")
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not rows or any(len(row) != 4 or not row[0] or not row[3][:1].isdecimal() for row in rows):
        text = "".join(one for one in done.stdout + done.stderr if one.isprintable() or one == "\n").strip()
        said = text.splitlines()[0][:200] if text else "nothing"
        return Driver(problem=f"nvidia-smi ended with exit code {done.returncode} and says: {said}")
    # The tool lists cards: of one that is divided (MIG) a process sees a slice, whose size only that process knows.
    names = tuple(f"{name} MIG" if mig == "Enabled" else name for name, _, mig, _ in rows)
    memory = tuple(float(size) * MIB if size.isdecimal() else 0.0 for _, size, _, _ in rows)
    return Driver(names=names, memory=memory, version=rows[0][3])


def device_nodes() -> list[str]:
    """Files of GPUs that the kernel's drivers have made."""
    return sorted(str(path) for pattern in NODES.values() for path in Path("/").glob(pattern.lstrip("/")))


def memory_is_off(total: float, usable: float) -> bool:
    """Whether a driver's total, bytes, is not that of a profile by its usable memory; False where the driver does not say."""
    return total > 0 and abs(total / usable - 1.0) > MEMORY_OFF


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


def setting(name: str) -> str | None:
    """What the user has set in the environment in place of a default, PLAN_HARDWARE or PLAN_TRAINER; None = nothing."""
    return os.environ.get(f"PLAN_{name}", "").strip() or None


def says_so(name: str) -> str:
    """Why a value is assumed that comes from a setting."""
    return f"PLAN_{name} of the environment"
