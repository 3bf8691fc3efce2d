"""The trainers' own code on an exported mixed plan, where it is installed: each site's part by itself."""

from __future__ import annotations

from pathlib import Path

from planner.mixed.export.cut_job import cut_job
from planner.mixed.export.export_job import MixedExport
from planner.mixed.export.mixed_targets import ONE_KIND, TARGETS
from planner.mixed.export.torchft_sites import site_folder, sites
from planner.trainers.checking.child import check_folder


def check_text(mixed: MixedExport, to: str, folder: Path) -> str:
    """How far the trainer's code goes with the folder, or why nothing was checked."""
    if to not in ONE_KIND:
        return f"not checked: planner runs no code of {to} on mixed plans; what its options mean was read in {TARGETS[to].source}"
    if mixed.layout.outer:
        parts = [
            (f"{one.site}: ", cut_job(one.mixed), folder / site_folder(number))
            for number, one in enumerate(sites(mixed))
        ]
        return "\n".join(name + check_folder(to, job, path).text() for name, job, path in parts)
    return check_folder(to, cut_job(mixed), folder).text()
