"""What kind of plan a file holds: commands that take several kinds ask once."""

from __future__ import annotations

from pathlib import Path

from planner.api.results import File

KINDS = {
    "planner_plan": "training", "planner_serve_plan": "serve", "planner_mixed_plan": "mixed", "planner_rl_plan": "rl",
}  # fmt: skip
"""Kind by the key that only its files have."""


def plan_kind(path: File) -> str:
    """"training", "serve", "mixed" or "rl"; "" of another YAML mapping. Raises PlannerError where it cannot be read."""
    from planner.plan_file import read_plan

    data = read_plan(Path(path))
    return next((kind for key, kind in KINDS.items() if key in data), "")


__all__ = ["plan_kind"]
