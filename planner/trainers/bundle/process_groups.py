"""Process groups of a layout: which ranks work together, as the cost model placed them."""

from planner.cluster import strides
from planner.layout import Layout

GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")


def group_of(layout: Layout, name: str, rank: int) -> list[int]:
    """Ranks of the group ``name`` that holds ``rank``, ascending: ``rank`` moved along its stride."""
    number, stride = int(getattr(layout, name)), int(strides(layout)[name])  # type: ignore[call-overload]
    first = rank - (rank // stride % number) * stride
    return [first + index * stride for index in range(number)]
