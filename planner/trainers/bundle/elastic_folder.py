"""Exports for a job whose number of GPUs changes: a folder for each number, and one script that torchrun starts; each process goes
on in the folder of the world that torchrun brought together."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from planner import library
from planner.errors import PlannerError
from planner.trainers.bundle.folder import Bundle, make_bundle, write_bundle
from planner.trainers.bundle.nearest import require_expressible
from planner.trainers.bundle.quoting import shell_command, text_from
from planner.trainers.bundle.target import ExportJob, Target

RANK, WORKER, JOB = (f"bundle/elastic{one}.sh.j2" for one in ("_rank", "_worker", ""))
Command = Callable[[ExportJob, Sequence[str]], str]
"""The line of bash that starts the program, of a job and the entry of its export."""


def folder_name(gpus: int) -> str:
    """Of the export for so many GPUs."""
    return f"gpus-{gpus}"


def write_worlds(
    target: Target, jobs: Sequence[ExportJob], folder: Path, command: Command, *,
    variables: Mapping[str, str] = MappingProxyType({}), force: bool = False,
) -> dict[int, Bundle]:
    """Writes a folder for each job with rank.sh, and worker.sh, which torchrun starts; what was written by number of GPUs.
    ``variables``: of rank.sh, where the user has not set them. Raises PlannerError."""
    bundles = {}
    for job in jobs:
        bundle = make_bundle(target, job, "torchrun")
        if bundle.rendered.start != "torchrun":
            raise PlannerError(f"{target.title} is not started by torchrun, which brings the nodes together; use 'plan export'")
        rank = text_from(RANK, variables={name: shlex.quote(one) for name, one in variables.items()},
                         nodes=job.num_nodes, gpus_per_node=job.gpus_per_node, prepare=bundle.rendered.prepare,
                         command=command(job, bundle.rendered.entry))  # fmt: skip
        bundles[job.cluster.num_gpus] = replace(bundle, files={**bundle.files, "rank.sh": rank})
    for gpus, bundle in bundles.items():
        write_bundle(bundle, folder / folder_name(gpus), force=force)
    library.write_whole(folder / "worker.sh", text_from(WORKER, worlds=sorted(bundles)))
    return bundles


def write_elastic(target: Target, jobs: Sequence[ExportJob], folder: Path, *, force: bool = False) -> tuple[str, ...]:
    """Writes a folder for each job, worker.sh and elastic.sh, which starts torchrun on every node; names of what was written.
    Raises PlannerError where torchrun does not start the trainer, or a job leaves a part of a node free."""
    for job in jobs:
        require_expressible(target, job, folder / folder_name(job.cluster.num_gpus))
        if job.cluster.num_gpus % job.gpus_per_node:
            raise PlannerError(f"{job.cluster.num_gpus} GPUs are no whole nodes of {job.gpus_per_node}, and only these come and go")
    bundles = write_worlds(target, jobs, folder, lambda _, entry: shell_command(("python", *entry)), force=force)
    worlds, first = sorted(bundles), jobs[0]
    text = text_from(JOB, name=first.model.name, worlds=worlds, gpus_per_node=first.gpus_per_node,
                     low=worlds[0] // first.gpus_per_node, high=worlds[-1] // first.gpus_per_node)  # fmt: skip
    library.write_whole(folder / "elastic.sh", text)
    return ("elastic.sh", "worker.sh", *(folder_name(gpus) for gpus in bundles))
