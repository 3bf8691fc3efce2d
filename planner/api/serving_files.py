"""Serve plans as files: what ``plan export``, ``plan import``, ``plan validate`` and ``plan doctor`` do with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.api.results import File

if TYPE_CHECKING:
    from planner.serving.export.serving_folder import ServeExport


def is_serve_file(path: File) -> bool:
    """Whether a file says that it is a serve plan. Raises PlannerError where it cannot be read."""
    from planner.library import read_yaml
    from planner.serving.serve_plan import is_serve_plan

    return is_serve_plan(read_yaml(Path(path)))


def export_file(plan: File, to: str, output: File, *, force: bool = False) -> ServeExport:
    """Write a serve plan as a folder for an engine, Dynamo or llm-d. Raises PlannerError."""
    from planner.serving.export.serving_folder import export_serving
    from planner.serving.serve_plan import load_serve_plan

    return export_serving(load_serve_plan(Path(plan)), to, Path(output), force=force)


def check_text(made: ServeExport) -> str:
    """What the engines' own flags said of an export."""
    from planner.serving.export.serving_folder import check_text as told

    return told(made)
