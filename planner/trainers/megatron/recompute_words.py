"""recompute_granularity and recompute_modules of Megatron Core, where settings of another trainer hold them."""

from collections.abc import Iterable

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.model import ModelSpec
from planner.trainers.megatron.core_settings import MODULES
from planner.trainers.reading.settings import Settings

OF_EXPERTS = ("layernorm", "moe_act", "moe", "shared_experts")
"""Modules whose recompute repeats nothing in dense layers of Transformer Engine."""


def recompute(given: Settings, usual: str) -> dict[str, int]:
    """Fields of Layout; ``usual``: what is recomputed where nothing is said: full, selective or none. Raises PlannerError."""
    mode = str(given.get("recompute_granularity") or usual)
    if mode not in ("full", "selective", "none", "None", "null"):
        raise PlannerError(f"{given.where('recompute_granularity')} is {shown(mode)}; Megatron Core knows full and selective")
    if mode != "selective":
        return {"recompute": int(Recompute.FULL if mode == "full" else Recompute.NONE)}
    named = given.get("recompute_modules") or ["core_attn"]
    known, mask = {name: module for module, name in MODULES.items()}, 0
    for name in named if isinstance(named, list) else str(named).replace(",", " ").split():
        if name not in known:
            raise PlannerError(f"{given.where('recompute_modules')} has {shown(name)}; a plan knows {', '.join(known)}")
        mask |= int(known[name])
    return {"recompute": int(Recompute.SELECTIVE), "recompute_modules": mask}


def of_dense(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(Modules whose recompute repeats something in dense layers, those where it repeats nothing)."""
    named = list(names)
    return [one for one in named if one not in OF_EXPERTS], [one for one in named if one in OF_EXPERTS]


def nothing_repeated(names: Iterable[str]) -> str:
    """The note on modules that are left out."""
    return f"recompute of {', '.join(names)}: nothing in a dense model, whose norms are part of linear layers"


def of_dense_layers(given: Settings, fields: dict[str, int], model: ModelSpec | None) -> tuple[str, ...]:
    """Takes modules that repeat nothing in dense layers out of ``fields``, and says so."""
    model = model or (given.said.spec() if given.said is not None else None)
    if model is None or model.is_moe or model.is_mla or given.get("transformer_impl") == "local":
        return ()
    mask = fields.get("recompute_modules", 0)
    left, still = of_dense(name for module, name in MODULES.items() if mask & int(module))
    if not still:
        return ()
    fields["recompute_modules"] = sum(int(module) for module, name in MODULES.items() if name in left)
    if not fields["recompute_modules"]:
        fields["recompute"] = int(Recompute.NONE)
    return (nothing_repeated(still),)
