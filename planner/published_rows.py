"""What a package answers to a published run beyond one training or serving job (mixed clusters, links, elastic jobs, RL).

A file of such runs has ``source``, ``topic`` and ``rows`` (profiles/beyond-runs/README.md). The package of a topic has a module
``published`` with ``answers(document, where) -> list[AnsweredRow]``, one per row and in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from planner.errors import PlannerError, shown
from planner.record import record

PREDICTED, DOES_NOT_FIT, REFUSED, NOT_RUN = "predicted", "does not fit", "refused", "not run"
STATUSES = (PREDICTED, DOES_NOT_FIT, REFUSED, NOT_RUN)
"""``does not fit`` is priced as if it did; ``not run``: the source measured nothing of this row."""


@record
class Quantity:
    """One measured number beside its prediction, in the unit that ends its name."""

    measured: float
    predicted: float
    range: tuple[float, float]
    """Nine of ten measurements are expected within."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1.0


@record
class AnsweredRow:
    """The answer to one row of a published file."""

    source: str
    id: str
    topic: str
    status: str
    """One of STATUSES."""
    reason: str = ""
    """Why it was refused, or what had to be assumed."""
    counts: bool = True
    """False where the source itself doubts the row."""
    sweep: str = ""
    """Rows that carry the same name compare alternatives of one job: their order and the regret of the pick are judged."""
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    """By schema name: step_s, tokens_per_s_per_gpu, memory_gb, gb_per_s, reconfigure_s, ..."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"{self.id}: status {self.status}")

    def to_dict(self) -> dict[str, Any]:
        """``{source, id, topic, status, reason, counts, quantities: {name: {measured, predicted, range}}}``."""
        return {
            "source": self.source, "id": self.id, "topic": self.topic, "status": self.status, "reason": self.reason,
            "counts": self.counts,
            "quantities": {
                name: {"measured": one.measured, "predicted": one.predicted, "range": list(one.range)}
                for name, one in self.quantities.items()
            },
        }  # fmt: skip


def rows_of(document: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The rows of a file, each a mapping with an ``id`` of its own. Raises PlannerError."""
    rows = document.get("rows")
    if not isinstance(rows, list) or not rows:
        raise PlannerError(f"{where}: rows is {shown(rows)}; it must be a list of runs")
    seen = set[str]()
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping) or not isinstance(row.get("id"), str):
            raise PlannerError(f"{where}: row {number} is {shown(row)}; it must be a mapping with an id")
        if row["id"] in seen:
            raise PlannerError(f"{where}: the id {shown(row['id'])} stands twice")
        seen.add(row["id"])
    return rows


def source_of(document: Mapping[str, Any], where: str) -> str:
    """The id of a file's source. Raises PlannerError."""
    source = document.get("source")
    if not isinstance(source, Mapping) or not isinstance(source.get("id"), str):
        raise PlannerError(f"{where}: source is {shown(source)}; it must be a mapping with an id")
    return str(source["id"])
