"""How many tokens the busiest expert rank has in torchtitan, where a configuration says it."""

from collections.abc import Mapping
from typing import Any

from planner.model import ModelSpec

ROOM = {"enable_non_blocking": False, "moe_expert_capacity_factor": None}
"""Keys of [parallelism.hybridep], and their values without a word."""


def is_room(table: object) -> bool:
    """Whether nothing else stands in such a table."""
    return isinstance(table, Mapping) and table.keys() <= ROOM.keys()


def is_even(given: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether tokens are dealt out to the experts in turn, as [debug] says it and [training] did."""
    old = given.get("training", {}).get("debug_moe_force_load_balance")
    return "true" in (str(other.get("balanced")).lower(), str(old).lower())


def loads_of(
    given: Mapping[str, Any], said: Mapping[str, Any], spec: ModelSpec | None, ep: int
) -> tuple[float | None, tuple[str, ...]]:
    """(tokens of the busiest expert rank over the mean, what is to be said of them); None = routers decide it. ``said``: what
    [parallelism] and the rest say. HybridEP that does not wait for the counts has buffers of a fixed part of the worst case.
    [distributed/deepep/hybridep.py, _num_permuted_tokens_for_non_blocking]"""
    if spec is None or not spec.is_moe:
        return None, ()
    even = 1.0 if is_even(given, said) else None
    table = {**ROOM, **said["hybridep"]} if isinstance(said.get("hybridep"), Mapping) else {}
    factor = said.get("capacity") or (table.get("moe_expert_capacity_factor") if table.get("enable_non_blocking") is True else None)
    if ep == 1 or said.get("expert_parallel_comm_backend") != "hybridep" or not isinstance(factor, int | float):
        return even, ()
    room = max(1.0, ep * min(spec.num_experts // ep, spec.top_k) * factor / spec.top_k)
    return room, (f"HybridEP has room for {room:.3g} times the tokens of even routing, and the rest is dropped; priced full",)
