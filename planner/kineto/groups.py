"""Which parallel dimension a process group is: by its description, by its ranks in the plan's rank order, or by its size."""

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from planner.kineto.rank_trace import Collective
from planner.layout import Layout, Order

KINDS = ("tensor", "context", "expert", "pipeline", "data", "other")
"""Kinds of communication of a plan; other: groups over several dimensions (losses, gradient norms), or unknown ones."""
_WORDS = (
    # Megatron-Core's group_desc, and names of torch's device meshes (mesh_tp) of torchtitan, FSDP2, automodel
    ("data", r"DATA_PARALLEL|(^|_)(e?fsdp|e?dp|dp_shard|dp_replicate|shard|replica|replicate|expert_shard|dp_shard_cp|dp_cp)(_|$)"),
    ("expert", r"EXPERT_(MODEL|TENSOR)|(^|_)(ep|etp|ep_tp)$"),
    ("context", r"CONTEXT_PARALLEL|(^|_)cp$|ulysses|sequence_parallel"),
    ("tensor", r"TENSOR_MODEL_PARALLEL|(^|_)tp$"),
    ("pipeline", r"PIPELINE_MODEL_PARALLEL|(^|_)pp$"),
)  # fmt: skip
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _WORDS)
_ANY = re.compile(r"default_pg|undefined|^$")
_BY_OP = {
    "all_reduce": ("tensor", "data"), "all_gather": ("tensor", "data", "context"), "reduce_scatter": ("tensor", "data"),
    "all_to_all": ("expert", "context"), "send_recv": ("pipeline", "context", "expert"), "broadcast": ("data",),
}  # fmt: skip
"""Kinds that use a collective, for groups of which only the size is known."""


def kinds_of(layout: Layout) -> Callable[[Collective], str]:
    """The function that names the kind of a collective in a plan's layout."""
    places = _places(layout)
    degrees = {"tensor": layout.tp, "context": layout.cp, "expert": layout.ep * layout.etp if layout.ep > 1 else 1,
               "pipeline": layout.pp, "data": layout.dp}  # fmt: skip

    @cache
    def kind(one: Collective) -> str:
        if not _ANY.search(one.about):
            for name, pattern in _COMPILED:
                if pattern.search(one.about):
                    return name
        if len(one.ranks) > 1 and max(one.ranks) < int(layout.num_gpus):
            return _by_ranks(one, places)
        asked = [name for name in _BY_OP.get(one.op, ()) if degrees[name] > 1]
        sized = [name for name in asked if int(degrees[name]) == one.size]
        if one.op == "send_recv":  # its group may be a pair, or a whole dimension
            sized = asked
        found = sized if one.size else asked
        return found[0] if len(found) == 1 else "other"

    return kind


def _places(layout: Layout) -> dict[str, np.ndarray]:
    """Coordinates of every rank in the dimensions of dense layers and of experts, arrays of length num_gpus."""
    tp, cp, dp, pp, ep, etp = (int(getattr(layout, name)) for name in ("tp", "cp", "dp", "pp", "ep", "etp"))
    rank, order = np.arange(int(layout.num_gpus)), int(layout.order)
    found = {"tp": rank % tp, "cp": rank // tp % cp}
    inner = tp * cp
    if order == Order.TP_CP_EP_PP_DP:
        found |= {"pp": rank // inner % pp, "dp": rank // (inner * pp)}
    elif order == Order.TP_CP_DP_PP_EP:
        own = max(dp // ep, 1)
        found["pp"] = rank // (inner * own) % pp
        found["dp"] = rank // inner % own + own * (rank // (inner * own * pp))
    else:
        found |= {"dp": rank // inner % dp, "pp": rank // (inner * dp)}
    if order == Order.TP_CP_DP_PP_EP:
        found |= {"ep": rank // max(len(rank) // ep, 1), "etp": rank % etp}
        found["edp"] = rank % inner // etp + inner * (rank // inner % max(dp // ep, 1))
    else:
        stage = (
            found["tp"] + tp * found["cp"] + inner * found["dp"]
        )  # place of a rank among those of its pipeline stage
        found |= {"etp": stage % etp, "ep": stage // etp % ep, "edp": stage // (etp * ep)}
    return found


def _by_ranks(one: Collective, places: dict[str, np.ndarray]) -> str:
    """The dimension along which the ranks of a group differ."""
    ranks = np.array(one.ranks)
    dense, expert = (
        {name for name in names if len(np.unique(places[name][ranks])) > 1}
        for names in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"))
    )
    if one.op == "all_to_all" and expert and expert <= {"ep", "etp"} and dense != {"cp"}:
        return "expert"
    single = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    if len(dense) == 1:
        return single[dense.pop()]
    if dense == {"dp", "cp"} and one.op != "all_to_all":
        return "data"
    if expert and expert <= {"ep", "etp"}:
        return "expert"
    return "data" if expert == {"edp"} else "other"
