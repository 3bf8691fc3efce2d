"""Exports for a job whose number of nodes changes: a folder for each number of GPUs, and one script that torchrun starts with
``--nnodes MIN:MAX``; each process goes on in the folder of the world that torchrun brought together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.nearest import require_expressible
from planner.trainers.bundle.quoting import shell_command, text_from
from planner.trainers.bundle.target import ExportJob, Target


def elastic_files(target: Target, jobs: Sequence[ExportJob]) -> dict[str, str]:
    """The two scripts beside the folders. Raises PlannerError where torchrun does not start the trainer, or a job leaves a part of
    a node free."""
    commands, first = {}, jobs[0]
    for job in jobs:
        rendered = target.render(job)
        if rendered.start != "torchrun":
            raise PlannerError(f"{target.title} is not started by torchrun, which brings the nodes together; use 'plan export'")
        if job.cluster.num_gpus % job.gpus_per_node:
            raise PlannerError(f"{job.cluster.num_gpus} GPUs are no whole nodes of {job.gpus_per_node}, and only these come and go")
        commands[job.cluster.num_gpus] = shell_command(("python", *rendered.entry))
    worlds = sorted(commands)
    facts = {
        "name": first.model.name, "worlds": worlds, "gpus_per_node": first.gpus_per_node, "low": worlds[0] // first.gpus_per_node,
        "high": worlds[-1] // first.gpus_per_node, "commands": dict(sorted(commands.items())),
    }  # fmt: skip
    return {
        "elastic.sh": text_from("bundle/elastic.sh.j2", **facts), "worker.sh": text_from("bundle/elastic_worker.sh.j2", **facts),
    }  # fmt: skip


def write_elastic(target: Target, jobs: Sequence[ExportJob], folder: Path, *, force: bool = False) -> tuple[str, ...]:
    """Write a folder for each job and the two scripts; names of what was written. Raises PlannerError."""
    for job in jobs:
        require_expressible(target, job, folder / f"gpus-{job.cluster.num_gpus}")
    files = elastic_files(target, jobs)
    bundles = {f"gpus-{job.cluster.num_gpus}": make_bundle(target, job, "torchrun") for job in jobs}
    for name, bundle in bundles.items():
        write_bundle(bundle, folder / name, force=force)
    for name, text in files.items():
        library.write_whole(folder / name, text)
    return (*files, *bundles)
