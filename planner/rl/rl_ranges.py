"""Width of the interval that nine of ten measured values lie in, by quantity: a factor to both sides (docs/log/rl.md)."""

from __future__ import annotations

import math

RANGES = {
    "step_s": 1.3, "tokens_per_s_per_gpu": 1.3, "generate_s": 1.5, "logprob_s": 1.6, "train_s": 1.6, "sync_s": 1.6,
    "memory_gb": 1.45,
}  # fmt: skip
"""step_s: errors of the shipped steps with their source left out; train_s, sync_s and memory_gb: of the shipped updates and syncs;
phases alone were measured in few runs."""
FITTED, OTHERS = "nemo-rl", 2.0
"""Framework whose steps the host times of profiles/rl_phases.yaml are fitted on; those of others may take so many times as
long, or as short."""


def host_doubt(framework: str, hosted: float) -> float:
    """What host times of one framework leave open of a step of another, in ln: ``hosted`` is their share of it."""
    return 0.0 if framework == FITTED else hosted * math.log(OTHERS)


def spread_of(name: str, doubt: float) -> float:
    """Factor to both sides of a quantity, with a further standard error of its ln at the same level."""
    return math.exp(math.hypot(math.log(RANGES[name]), doubt * (name not in ("sync_s", "memory_gb"))))
