"""Kubernetes (Kubeflow TrainJob) and SkyPilot: the bundle's files and scripts as one object to submit."""

import re
from typing import Any

from planner.errors import PlannerError
from planner.trainers.bundle.quoting import yaml_blocks
from planner.trainers.bundle.target import ExportJob, Rendered

LARGEST_CONFIG_MAP = 900_000
"""Bytes of files that go into a ConfigMap; the API server stores up to 1 MiB with its metadata."""
GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "habana.ai/gaudi"}
"""Names under which device plugins offer accelerators."""
SKY_NAMES = {
    "a100-sxm-40gb": "A100", "a100-sxm-80gb": "A100-80GB", "a100-pcie-80gb": "A100-80GB", "a10g": "A10G",
    "b200-sxm": "B200", "b300-sxm": "B300", "gb200-nvl72": "GB200", "gb300-nvl72": "GB300", "gaudi2": "Gaudi HL-205",
    "h100-nvl": "H100-NVLINK", "h100-pcie": "H100", "h100-sxm": "H100", "h100-sxm-96gb": "H100", "h200-sxm": "H200",
    "l4": "L4", "l40s": "L40S", "mi300x": "MI300X", "mi325x": "MI325X", "mi355x": "MI355X", "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090", "rtx-5090": "RTX5090", "rtx-pro-6000": "RTXPRO6000", "v100-sxm2-16gb": "V100",
    "v100-sxm2-32gb": "V100-32GB",
}  # fmt: skip
"""Hardware profile -> name of the accelerator in SkyPilot's catalogs."""


def train_job(job: ExportJob, rendered: Rendered, name: str, files: dict[str, str]) -> str:
    """A ConfigMap with the files and a TrainJob (trainer.kubeflow.org/v1alpha1) that runs them on every node.

    The runtime's torch policy gives every pod PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT. ConfigMaps are
    read-only and have flat keys: the files are mounted under their names and copied before they run.
    """
    size = sum(len(text.encode()) for text in files.values())
    if size > LARGEST_CONFIG_MAP:
        raise PlannerError(
            f"the bundle's files are {size} bytes, more than the {LARGEST_CONFIG_MAP} of a ConfigMap; use another launcher, "
            "and put the files on a volume"
        )
    title = job.name_of(name)
    keys = {file: re.sub(r"[^\w.-]", "__", file) for file in files}
    config = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{title}-files"},
        "data": {keys[file]: text for file, text in files.items()},
    }  # fmt: skip
    needed = rendered.needed
    header = [
        "# Submit: kubectl apply -f " + f"{name}.trainjob.yaml",
        "# Before: set spec.trainer.image to an image with the trainer (below it is not a legal name), "
        + (f"and the values of {', '.join(needed)}." if needed else "nothing else."),
        "# A runtime other than the cluster's torch-distributed goes into spec.runtimeRef.",
    ]
    documents = [yaml_blocks(config), yaml_blocks(_job_object(job, needed, name, keys, rendered))]
    return "\n".join(header) + "\n" + "---\n".join(documents)


def _job_object(
    job: ExportJob, needed: list[str], name: str, keys: dict[str, str], rendered: Rendered
) -> dict[str, Any]:
    title = job.name_of(name)
    gpus = {GPU_RESOURCES.get(job.cluster.hardware.vendor, "nvidia.com/gpu"): job.gpus_per_node}
    volumes = [
        {"name": "plan", "configMap": {
            "name": f"{title}-files", "items": [{"key": key, "path": file} for file, key in keys.items()]}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]  # fmt: skip
    mounts = [{"name": "plan", "mountPath": "/plan"}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    pod = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    patched = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    start = (
        "set -e; cp -rL /plan /tmp/plan; "
        'export NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"; '
        f"exec bash /tmp/plan/{name}.sh"
    )
    trainer = {
        "image": "SET-AN-IMAGE", "command": ["bash", "-c"], "args": [start], "numNodes": job.num_nodes,
        "numProcPerNode": job.gpus_per_node if rendered.start == "torchrun" else 1,
        "resourcesPerNode": {"limits": gpus, "requests": gpus},
        "env": [{"name": variable, "value": ""} for variable in needed],
    }  # fmt: skip
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": title},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"},
            "trainer": trainer if needed else {key: value for key, value in trainer.items() if key != "env"},
            "runtimePatches": [{"manager": "planner.dev/export", "trainingRuntimeSpec": {"template": patched}}],
        },
    }  # fmt: skip


def sky_task(job: ExportJob, rendered: Rendered, name: str, files: dict[str, str]) -> str:
    """A SkyPilot task: this folder is its work directory; variables without a value are asked for at launch."""
    del files
    needed = rendered.needed
    flags = "".join(f" --env {variable}=..." for variable in needed)
    task: dict[str, Any] = {
        "name": job.name_of(name),
        "workdir": ".",
        "num_nodes": job.num_nodes,
        "resources": {"accelerators": f"{_sky_name(job)}:{job.gpus_per_node}", "use_spot": False},
        "envs": dict.fromkeys(needed),
        "setup": "\n".join(rendered.install) + "\n",
        "run": "\n".join([
            "set -euo pipefail",
            'mapfile -t hosts <<< "$SKYPILOT_NODE_IPS"',
            'export MASTER_ADDR="${hosts[0]}" NODE_RANK="$SKYPILOT_NODE_RANK"',
            f"exec bash {name}.sh",
        ]) + "\n",
    }  # fmt: skip
    kept = {key: value for key, value in task.items() if value not in ({}, "\n")}
    return f"# Submit in this folder: sky launch{flags} {name}.skypilot.yaml\n" + yaml_blocks(kept)


def _sky_name(job: ExportJob) -> str:
    """Name of the accelerator in SkyPilot's catalogs; a user's own profile is named by its device."""
    hardware = job.cluster.hardware
    return SKY_NAMES.get(hardware.name, hardware.device.split("-")[0])
