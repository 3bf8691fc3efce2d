"""SGLang's flags: the names that an exported folder uses, against the installed package."""

from __future__ import annotations

from pathlib import Path

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.setting_names import check_names


def check(job: ExportJob, folder: Path) -> Checked:
    """Whether every name exists. The job says nothing more: the layout is in the files."""
    del job
    return check_names("sglang", folder)
