"""MaxText's own configuration, validated, and its mesh on as many pretended CPU devices as the plan has GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.layout import Layout
from planner.trainers.bundle.process_groups import group_of
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.child import Answer, Request, ask, request, serve
from planner.trainers.checking.import_standins import stand_in

MOST_DEVICES = 1024
"""JAX on a CPU pretends that many devices within seconds."""


def check(job: ExportJob, folder: Path) -> Checked:
    """How far MaxText goes with one folder."""
    return check_many([(job, folder)])[0]


def check_many(pairs: Sequence[tuple[ExportJob, Path]]) -> list[Checked]:
    """The same for many: the number of devices is fixed when JAX starts, so there is a process for each number."""
    found: dict[int, Checked] = {}
    for world in sorted({job.cluster.num_gpus for job, _ in pairs}):
        rows = [row for row, (job, _) in enumerate(pairs) if job.cluster.num_gpus == world]
        requests = [request(*pairs[row], batch=pairs[row][0].workload.global_batch_size) for row in rows]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={min(world, MOST_DEVICES)}",
        }
        answers = ask(
            "maxtext", "planner.trainers.maxtext.check", ("jax", "maxtext", "omegaconf"), requests, environment
        )
        found |= dict(zip(rows, answers, strict=True))
    return [found[row] for row in range(len(pairs))]


def _one(asked: Request, answer: Answer) -> None:
    os.chdir(asked["folder"])
    stand_in("aqt")  # deprecated quantisation, imported and not used by any setting of an export
    from maxtext.configs import pyconfig

    words = [
        "",
        "maxtext.yml",
        "skip_jax_distributed_system=true",
        "hardware=cpu",
        "attention=dot_product",
        "run_name=check",
    ]
    words += ["enable_checkpointing=false", "base_output_directory=/tmp", "dataset_type=synthetic", "steps=3"]
    found = pyconfig.initialize(words)
    answer.reached("validated")
    if asked["world"] > MOST_DEVICES:
        answer.missing = f"{asked['world']} devices are more than the {MOST_DEVICES} that are pretended"
        return
    answer.same("global batch", found.global_batch_size_to_train_on, asked["batch"])
    answer.same("microbatches", found.gradient_accumulation_steps, asked["layout"]["num_microbatches"])
    _mesh(asked, found, answer)
    answer.reached("groups built")


def _mesh(asked: Request, found: Any, answer: Answer) -> None:
    """The last rank's groups on MaxText's mesh are those that the plan was priced with."""
    from maxtext.utils.maxtext_utils import create_device_mesh

    mesh, names = create_device_mesh(found), list(found.mesh_axes)
    layout, last = Layout(**asked["layout"]), asked["world"] - 1
    axes = {
        "tp": ("tensor", "tensor_sequence"),
        "cp": ("context",),
        "dp": ("data", "fsdp", "expert"),
        "ep": ("expert",),
    }
    for name, along in axes.items():
        index = tuple(slice(None) if axis in along else -1 for axis in names)
        ranks = sorted(int(device.id) for device in mesh[index].flatten())
        answer.same(f"{name} group of the last rank", ranks, group_of(layout, name, last))


if __name__ == "__main__":
    serve(_one)
