"""From a truncated run to the whole plan: what was measured over what was predicted, part by part, times the prediction.

    T = sum over parts of  predicted(whole) * measured(small) / predicted(small),  1 where the small run does not show a part

The ratio of the pipeline's bubble is that of the passes it is made of. The error is how far the ratios of two depths are
apart; what a few devices in one node do not show at all is listed, with its share of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.cost.estimate import PARTS

OWN = ("compute", "recompute", "host")
"""Parts of the step that passes of one rank take without any other."""
INSIDE = ("tensor_communication", "context_communication", "expert_communication")
"""Parts that passes wait inside of: in their time by events of a GPU, not in a CPU's processor time."""
PASSES, UPDATE = "forward_backward", "optimizer"
"""Rows of a run's times that are scaled."""
UNSEEN = {
    "data_communication": "traffic of data parallelism over all replicas and nodes",
    "pipeline_communication": "sends between nodes",
    "tensor_communication": "tensor-parallel traffic of the whole group",
    "context_communication": "context-parallel traffic of the whole group",
    "expert_communication": "all-to-all of the whole group",
    "stragglers": "the slowest of all GPUs",
    "overhead": "fixed overhead of a step",
}  # fmt: skip
"""Parts that a truncated run does not show, in words."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """One part of the whole plan's step."""

    what: str
    """Part of the step time."""
    predicted: float
    """Seconds."""
    ratio: float | None
    """Measured over predicted in the deeper truncated run; None where it does not show the part."""
    shallow_ratio: float | None
    """The same of the other depth."""

    @property
    def seconds(self) -> float:
        """Predicted seconds times the ratio."""
        return self.predicted * (1.0 if self.ratio is None else self.ratio)

    @property
    def error(self) -> float:
        """Seconds by which the two depths disagree."""
        if self.ratio is None or self.shallow_ratio is None:
            return 0.0
        return self.predicted * abs(self.ratio - self.shallow_ratio)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the note that goes with it included."""
        return {
            "what": self.what, "predicted_seconds": self.predicted, "ratio": self.ratio, "shallow_ratio": self.shallow_ratio,
            "scaled_seconds": self.seconds, "depth_error_seconds": self.error,
            "note": "" if self.ratio is not None else UNSEEN.get(self.what, "not shown by a truncated run"),
        }  # fmt: skip


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Measured over predicted of the rows of a truncated run, by part of the step; {} where nothing was compared."""
    found: dict[str, float] = {}
    for row in rows:
        if row["error"] is None or row["what"] not in (PASSES, UPDATE):
            continue
        ratio = row["measured_seconds"] / row["predicted_seconds"]
        if row["what"] == UPDATE:
            found[UPDATE] = ratio
            continue
        found |= dict.fromkeys((*OWN, "bubble"), ratio)
        if row["currency"] == "device":
            found |= dict.fromkeys(INSIDE, ratio)
    return found


def scaled(
    predicted: Mapping[str, float], deep: Sequence[Mapping[str, Any]], shallow: Sequence[Mapping[str, Any]] | None
) -> list[Scaled]:
    """The parts of the whole plan's step, those of 0 seconds left out; [] where the truncated run was not compared.

    ``predicted``: seconds by part (PARTS) of the whole plan. ``deep``, ``shallow``: rows of times of the truncated runs.
    """
    first, second = ratios(deep), ratios(shallow or ())
    if not first:
        return []
    return [
        Scaled(what=part, predicted=predicted[part], ratio=first.get(part), shallow_ratio=second.get(part))
        for part in PARTS
        if predicted[part] != 0.0
    ]


def summary(parts: Sequence[Scaled], interval: tuple[float, float], with_depths: bool) -> dict[str, Any]:
    """The whole step: predicted, scaled, its error by depth and the share of it that was priced alone."""
    told, found = sum(one.predicted for one in parts), sum(one.seconds for one in parts)
    unseen = sum(one.seconds for one in parts if one.ratio is None)
    return {
        "predicted_seconds": told, "scaled_seconds": found, "error": told / found - 1.0,
        "interval": list(interval), "inside": interval[0] <= found <= interval[1],
        "depth_error": sum(one.error for one in parts) / found if with_depths else None, "priced_share": unseen / found,
    }  # fmt: skip
