"""Which card the names of MLPerf's systems and configurations mean: DGXH100, NVLink_H100, PCIeH100, h100-nvl."""

import re
from collections.abc import Mapping
from pathlib import Path

from planner.errors import PlannerError
from planner.hardware.names import profile_named
from planner.trainers.reading.given import Question

GPUS = "L40S|A100|H100|H200|GB200|B200|GB300|B300|MI300X|MI325X|MI350X|MI355X"
NAMED = re.compile(
    rf"(?<![a-z])(?:\d+x)*(?:(DGX|HGX)|(NVLink|NVL|PCIe|SXM)\d?[-_ ]?)?({GPUS})(?=x\d|[^a-z0-9]|$)"
    r"(?:[-_ ](NVL|PCIE|SXM)\d?(?![a-z]))?",
    re.IGNORECASE,
)
"""A machine or a form before the name of a GPU, the name, and a form after it."""
FORMS = ("nvl", "pcie", "sxm")
"""Forms of one card, which differ in memory, power and links."""
FEW = ("1", "2")
"""GPUs of a node that has no NVSwitch: of cards that are joined by bridges, or of a part of a bigger machine."""


def hardware(
    path: Path, values: Mapping[str, str], each: str
) -> tuple[str | None, tuple[str, ...], tuple[Question, ...]]:
    """(Profile, notes, questions) by the name of the system, else of the file; ``each``: GPUs of a node, as text."""
    system = values.get("MLPERF_SYSTEM_NAME", "")
    by = "MLPERF_SYSTEM_NAME" if NAMED.search(system) else "the file's name"
    found = NAMED.search(system) or NAMED.search(path.name)
    if found is None:
        return None, (), ()
    machine, before, gpu, after = (one.lower() if one else "" for one in found.groups())
    form = after or before.replace("nvlink", "")
    named = f"{gpu}-{form}" if form else gpu
    known = [one for one in dict.fromkeys(_profile(f"{gpu}-{one}") for one in FORMS) if one]
    if len(known) > 1 and not form and not machine and each in FEW:
        about = f"which {gpu.upper()} it is: {by} says {found[0]}, and a node has {each}"
        return None, (), (Question(name="--hardware NAME", about=f"{about}: {', '.join(known)}"),)
    profile = _profile(named) or profile_named(gpu)
    missing = form not in ("", "sxm") and _profile(named) is None
    notes = [f"hardware {profile}: by {by}", *[f"the library has no {named}: {profile} stands for it"] * missing]
    if form == "pcie" and f"{gpu}-nvl" in known:  # which fits into the same slot
        notes.append(f"--hardware {gpu}-nvl where {found[0]} means that one")
    return profile, tuple(notes), ()


def _profile(name: str) -> str | None:
    try:
        return profile_named(name)
    except PlannerError:
        return None
