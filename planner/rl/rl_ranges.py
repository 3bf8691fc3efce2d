"""Width of the interval that nine of ten measured values lie in, by quantity: a factor to both sides (docs/log/rl.md)."""

from __future__ import annotations

RANGES = {
    "step_s": 1.35, "tokens_per_s_per_gpu": 1.35, "generate_s": 1.5, "logprob_s": 1.6, "train_s": 1.6, "sync_s": 1.6,
    "memory_gb": 1.6,
}  # fmt: skip
"""step_s: errors of the shipped steps with their source left out; sync_s: of the shipped syncs; phases alone were measured in few
runs."""
