"""vLLM's flags: the names that an exported folder uses, against the installed package."""

from __future__ import annotations

from pathlib import Path

from planner.export.check import Checked
from planner.export.check.names import check_names
from planner.export.target import ExportJob


def check(job: ExportJob, folder: Path) -> Checked:
    """Whether every name exists. The job says nothing more: the layout is in the files."""
    del job
    return check_names("vllm", folder)
