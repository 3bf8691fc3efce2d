"""Environment variables of a run, each with its reason."""

from __future__ import annotations

from planner.export.target import ExportJob, Rendered, Setting


def environment(job: ExportJob, rendered: Rendered) -> dict[str, Setting]:
    """Variables of the run: what the trainer asks for comes last and wins."""
    return {**dict(rendered.environment)}
