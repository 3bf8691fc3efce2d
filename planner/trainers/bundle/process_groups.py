"""Process groups of a layout: which ranks work together, as the cost model placed them."""

from planner.cluster import strides
from planner.layout import Layout

GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")


def group_of(layout: Layout, name: str, rank: int) -> list[int]:
    """Ranks of the group ``name`` that holds ``rank``, ascending: ``rank`` moved along its stride."""
    number, stride = int(getattr(layout, name)), int(strides(layout)[name])  # type: ignore[call-overload]
    first = rank - (rank // stride % number) * stride
    return [first + index * stride for index in range(number)]


def groups(layout: Layout, name: str) -> list[list[int]]:
    """All groups of one kind, by their first rank."""
    seen: set[int] = set()
    found = []
    for rank in range(int(layout.num_gpus)):
        if rank not in seen:
            found.append(group_of(layout, name, rank))
            seen.update(found[-1])
    return found
