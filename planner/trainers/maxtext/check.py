"""MaxText's own configuration, validated, and its mesh on as many pretended CPU devices as the plan has GPUs."""

import os
from pathlib import Path
from typing import Any

from planner.layout import Layout
from planner.trainers.bundle.target import ExportJob, group_of
from planner.trainers.checking import Checked, Request
from planner.trainers.checking import setting_names as names
from planner.trainers.checking.import_standins import stand_in

NEEDED = ("jax", "maxtext", "omegaconf")
MOST_DEVICES = 1024
"""JAX on a CPU pretends that many devices within seconds."""


def environment(job: ExportJob) -> dict[str, str]:
    """The number of devices is fixed when JAX starts."""
    devices = min(job.cluster.num_gpus, MOST_DEVICES)
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    os.chdir(asked["folder"])
    stand_in("aqt")  # deprecated quantisation, imported and not used by any setting of an export
    from maxtext.configs import pyconfig

    words = (
        "maxtext.yml skip_jax_distributed_system=true hardware=cpu attention=dot_product run_name=check steps=3 "
        "enable_checkpointing=false base_output_directory=/tmp dataset_type=synthetic"
    )
    found = pyconfig.initialize(["", *words.split()])
    answer.reached("validated")
    if asked["world"] > MOST_DEVICES:
        answer.missing = f"{asked['world']} devices are more than the {MOST_DEVICES} that are pretended"
        return
    answer.same("global batch", found.global_batch_size_to_train_on, asked["batch"])
    answer.same("microbatches", found.gradient_accumulation_steps, asked["layout"]["num_microbatches"])
    _mesh(asked, found, answer)
    answer.reached("groups built")


def _mesh(asked: Request, found: Any, answer: Checked) -> None:
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


def known_names(root: Path) -> dict[str, names.Names]:
    """Keys of base.yml."""
    data = names.load(root / "maxtext" / "configs" / "base.yml")
    return {"base.yml": {name: type(value).__name__ for name, value in data.items()}}


def used_names(folder: Path) -> names.Uses:
    """(section, name) of everything that the exported folder sets."""
    yield from (("base.yml", name) for name in names.load(folder / "maxtext.yml") if name != "base_config")
    yield from (("base.yml", name) for name in names.script_settings(folder))
