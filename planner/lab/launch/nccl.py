"""What NCCL's errors say to a user; no torch."""

import os
import re
import sys
from collections.abc import Callable
from typing import TypeVar

from planner.errors import PlannerError

T = TypeVar("T")
NVLS = "NCCL_NVLS_ENABLE"
"""0 = no multicast and no sums inside of NVSwitches."""
MULTICAST = re.compile(r"nvls|multicast|unhandled cuda error|cuda (?:error|failure) '?401", re.IGNORECASE)
"""In an error of NCCL: each communicator takes some of the switches' 128 multicast slots, a container may have no right to any,
and NCCL 2.29 falls back to nothing (NVIDIA/nccl#2077)."""
OF_A_PEER = (
    "remote process exit", "remoteerror", "connection closed", "connection reset", "connection refused", "timed out", "timeout",
)  # fmt: skip
"""Words of an error of NCCL that is another rank's."""


def of_nccl(text: str) -> bool:
    """Whether an exception's text is NCCL's about this rank, not about a peer that is gone."""
    low = text.lower()
    return "nccl" in low and not any(words in low for words in OF_A_PEER)


def in_words(text: str) -> str:
    """Its first line, its own last error, and for multicast the remedy."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    after = [lines[i + 1] for i, line in enumerate(lines[:-1]) if line.lower().startswith("last error")]
    said = "; ".join([*[line[:200] for line in lines[:1]], *[line[:300] for line in after[:1]]])
    if not MULTICAST.search(text) or "out of memory" in text.lower():
        return said
    return (
        f"{said}: NCCL could not set up what the NVSwitches share (NVLS multicast: too few slots for so many communicators, or no "
        f"right to them in this container); {NVLS}=0 goes without, and all-reduces inside a node are then slower"
    )


def without_multicast(run: Callable[[bool], T]) -> T:
    """``run(False)``, and where NCCL fails at multicast ``run(True)`` with NCCL_NVLS_ENABLE=0 for all that is started from here on,
    unless the user has set it. Raises what ``run`` raises."""
    try:
        return run(False)
    except PlannerError as error:
        if f"{NVLS}=0" not in str(error) or NVLS in os.environ:
            raise
        print(f"{error}; once more with {NVLS}=0", file=sys.stderr, flush=True)
    os.environ[NVLS] = "0"
    return run(True)
