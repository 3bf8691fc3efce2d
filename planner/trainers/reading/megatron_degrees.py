"""Degrees as Megatron Core names them, wherever a configuration of another trainer holds its settings."""

import re

from planner.layout import Schedule
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import percent

NAMES = {
    "tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model", "etp": "expert_tensor",
    "vpp": "virtual_pipeline_model",
}  # fmt: skip


def degrees(given: Settings, prefix: str = "", **usual: int) -> dict[str, int]:
    """Fields of Layout by NAMES, 1 or the ``usual`` degree where nothing is said, and the schedule that virtual stages mean."""
    found = {field: given.size(f"{prefix}{name}_parallel_size", usual.get(field, 1)) for field, name in NAMES.items()}
    return {**found, "schedule": int(Schedule.INTERLEAVED if found["vpp"] > 1 else Schedule.ONE_F_ONE_B)}


def states_on_the_host(given: Settings, prefix: str = "", usual: float = 1.0) -> dict[str, int]:
    """The percent of the optimizer states in host memory, where they are offloaded; ``usual``: the fraction where none is said."""
    if not given.flag(f"{prefix}optimizer_cpu_offload"):
        return {}
    key = f"{prefix}optimizer_offload_fraction"
    return {"offload_optimizer": percent(given.get(key, usual), given.where(key))}


def padded_experts(factor: object, padded: object, ranks: int) -> float | None:
    """Tokens of every expert over the mean, where each is padded to its capacity and drops what is above; None = routers decide it.
    With all experts on one rank a plan knows a factor of 1 alone.  [transformer/moe/moe_utils.py, topk_softmax_with_capacity]"""
    text = str(factor)
    known = padded in (True, "True", "true") and re.fullmatch(r"[1-9]\d?(\.\d{1,4})?", text) is not None
    return float(text) if known and (ranks > 1 or float(text) == 1.0) else None


def forced_balance(said: object) -> float | None:
    """The same where routers send every expert as many tokens by force, as benchmarks do; None = they do not.
    [transformer/moe/moe_utils.py, apply_random_logits]"""
    return 1.0 if said in (True, "True", "true") else None
