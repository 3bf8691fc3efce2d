"""recompute_granularity and recompute_modules of Megatron Core, where settings of another trainer hold them."""

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.trainers.megatron.core_settings import MODULES
from planner.trainers.reading.settings import Settings


def recompute(given: Settings, usual: str) -> dict[str, int]:
    """Fields of Layout; ``usual``: what is recomputed where nothing is said: full, selective or none. Raises PlannerError."""
    mode = str(given.get("recompute_granularity", usual))
    if mode == "full":
        return {"recompute": int(Recompute.FULL)}
    if mode == "none":
        return {"recompute": int(Recompute.NONE)}
    named = given.get("recompute_modules", ["core_attn"])
    known, mask = {name: module for module, name in MODULES.items()}, 0
    for name in named if isinstance(named, list) else str(named).replace(",", " ").split():
        if name not in known:
            raise PlannerError(f"{given.where('recompute_modules')} has {shown(name)}; a plan knows {', '.join(known)}")
        mask |= int(known[name])
    return {"recompute": int(Recompute.SELECTIVE), "recompute_modules": mask}
