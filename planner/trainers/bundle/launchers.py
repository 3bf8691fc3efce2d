"""How the processes of a bundle are started: one set of files per launcher, around the words that the trainer gave.

``run.sh`` runs on every node, whatever starts it; SLURM, Kubernetes, SkyPilot and Ray only give it its place. Nodes have fixed
ranks (torchrun's static rendezvous): the dynamic one sorts nodes by host name, which need not be the order that puts
neighbouring pipeline stages next to each other. Which host gets which rank is the user's to say, in ``hosts.txt``, where
hosts are known before the job runs and the trainer keeps the order (``has_host_order``).
"""

import re
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from planner.cluster import strides
from planner.cluster_file import ClusterFile
from planner.errors import PlannerError
from planner.trainers.bundle.quoting import filled_text, filled_yaml, shell_command, yaml_blocks
from planner.trainers.bundle.sky_places import places
from planner.trainers.bundle.target import ExportJob, Rendered, Setting

LAUNCHERS = ("torchrun", "slurm", "kubernetes", "skypilot", "ray")
"""Names after --launcher."""
RUNS = {"run": "The run itself.", "smoke": "A few steps on synthetic data, with the same parallelism."}
SCHEDULED = {"slurm": {"sbatch": "slurm.sbatch.j2"}, "ray": {"ray.py": "ray_train.py.j2"}}
"""Ending of the file that a launcher gets with the scripts, and its template."""
LARGEST_CONFIG_MAP = 900_000
"""Bytes of files that go into a ConfigMap; the API server stores up to 1 MiB with its metadata."""
MOST_LINES = 64
"""Runs of nodes that a script's comment lists."""


def launch(job: ExportJob, rendered: Rendered, launcher: str, cluster: ClusterFile | None = None) -> dict[str, str]:
    """Scripts of one launcher: file name -> text. All of them read ``environment.sh``: variables that the plan was priced
    with or that only the site knows; what the trainer asks for wins. ``cluster``: where SkyPilot may start the job."""
    if cluster is not None and launcher != "skypilot":
        raise PlannerError("regions of a cluster file are for --launcher skypilot; leave --cluster out")
    known = filled_yaml(job, "bundle", "environment.yaml.j2", start=rendered.start)
    facts: dict[str, Any] = {
        "environment": {**{name: Setting(*pair) for name, pair in known.items()}, **rendered.environment},
        "rendered": rendered, "ordered": has_host_order(job, rendered, launcher),
        "stages_of_nodes": node_stages(job), "gpus_of_last_node": gpus_of_last_node(job),
    }  # fmt: skip
    files = {"environment.sh": filled_text(job, "environment.sh.j2", **facts)}
    for run, entry in (("run", rendered.entry), ("smoke", rendered.smoke)):
        words = (*torchrun(job), *_ended(entry)) if rendered.start == "torchrun" else entry
        command = shell_command(words)
        files[f"{run}.sh"] = filled_text(job, "node.sh.j2", run=run, what=RUNS[run], command=command, **facts)
    if facts["ordered"]:
        files["hosts.txt"] = filled_text(job, "hosts.txt.j2", **facts)
    for ending, source in SCHEDULED.get(launcher, {}).items():
        files |= {f"{run}.{ending}": filled_text(job, source, run=run, what=what, **facts) for run, what in RUNS.items()}
    carried = {**rendered.files, **files}
    if launcher == "kubernetes":
        files |= {f"{run}.trainjob.yaml": _train_job(job, rendered, run, carried) for run in RUNS}
    if launcher == "skypilot":
        where = places(job, cluster) if cluster else ()
        files |= {f"{run}.skypilot.yaml": _sky_task(job, rendered, run, where) for run in RUNS}
    return files


def torchrun(job: ExportJob) -> tuple[str, ...]:
    """torchrun and its flags: one process per GPU; on one node it finds a free port itself."""
    if job.num_nodes == 1:
        one = f"torchrun --standalone --nnodes 1 --nproc-per-node {job.gpus_per_node} --max-restarts 0"
        return tuple(one.split())
    return (
        "torchrun", "--nnodes", str(job.num_nodes), "--node-rank", "$NODE_RANK", "--nproc-per-node", "$GPUS_PER_NODE",
        "--rdzv-backend", "static", "--rdzv-endpoint", "$MASTER_ADDR:$MASTER_PORT", "--max-restarts", "0",
    )  # fmt: skip


def _ended(entry: tuple[str, ...]) -> tuple[str, ...]:
    """Words of the script after a ``--``: torchrun's parser looks at all of them, and stops at one such as --start, which is
    the beginning of two of its own options."""
    return ("-m", "--", *entry[1:]) if entry[0] == "-m" else ("--", *entry)


def gpus_of_last_node(job: ExportJob) -> int:
    """GPUs of the last node; fewer than of the others when the job does not fill it."""
    return job.cluster.num_gpus - (job.num_nodes - 1) * job.gpus_per_node


def has_host_order(job: ExportJob, rendered: Rendered, launcher: str) -> bool:
    """Whether a file with the hosts in rank order helps.

    Not on one node, not where the trainer does not keep it, and not on Kubernetes and SkyPilot, which choose the hosts when
    the job starts: there the scheduler decides what lies together.
    """
    return job.num_nodes > 1 and rendered.keeps_ranks and launcher in ("torchrun", "slurm")


def node_stages(job: ExportJob) -> list[tuple[int, int, str]]:
    """(first node, last node, pipeline stages that they hold) for runs of nodes that hold the same, in order of nodes."""
    layout, gpus, texts = job.layout, job.gpus_per_node, []
    inner = int(strides(layout)["pp"])  # type: ignore[call-overload]
    for first in range(0, job.cluster.num_gpus, gpus):
        held = sorted({rank // inner % layout.pp for rank in range(first, min(first + gpus, job.cluster.num_gpus))})
        texts.append(f"pipeline stage {held[0]}" if len(held) == 1 else f"pipeline stages {held[0]} to {held[-1]}")
    found = equal_neighbours(texts)
    return found if len(found) <= MOST_LINES else [(0, job.num_nodes - 1, f"all {layout.pp} pipeline stages, in order")]


def equal_neighbours(values: Iterable[Any]) -> list[tuple[int, int, Any]]:
    """(first place, last place, value) of values that follow each other and are equal."""
    groups = [list(group) for _, group in groupby(enumerate(values), key=itemgetter(1))]
    return [(group[0][0], group[-1][0], group[0][1]) for group in groups]


def _train_job(job: ExportJob, rendered: Rendered, run: str, files: dict[str, str]) -> str:
    """A ConfigMap with the files and a Kubeflow TrainJob (trainer.kubeflow.org/v1alpha1) that runs them on every node.

    The runtime's torch policy gives every pod PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT. ConfigMaps are
    read-only and have flat keys: the files are mounted under their names and copied before they run.
    """
    size = sum(len(text.encode()) for text in files.values())
    if size > LARGEST_CONFIG_MAP:
        raise PlannerError(
            f"the bundle's files are {size} bytes, more than the {LARGEST_CONFIG_MAP} of a ConfigMap; use another launcher, "
            "and put the files on a volume"
        )
    title, keys = job.name_of(run), {file: re.sub(r"[^\w.-]", "__", file) for file in files}
    items = [{"key": key, "path": file} for file, key in keys.items()]
    task = filled_yaml(job, "bundle", "train_job.yaml.j2", rendered=rendered, run=run, title=title, items=items)
    config = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{title}-files"},
        "data": {keys[file]: text for file, text in files.items()},
    }  # fmt: skip
    more = f"and the values of {', '.join(rendered.needed)}" if rendered.needed else "nothing else"
    network = (
        "# Network: add the cards of InfiniBand or RoCE below spec.trainer.resourcesPerNode, limits and requests, by the name\n"
        "# that this cluster's device plugin gives them (kubectl describe node shows it: rdma/ib, nvidia.com/hostdev,\n"
        "# vpc.amazonaws.com/efa, ...); without them NCCL sends over TCP, which the plan was not priced with.\n"
    )
    return (
        f"# Submit: kubectl apply -f {run}.trainjob.yaml\n"
        f"# Before: set spec.trainer.image to an image with the trainer (below it is not a legal name), {more}.\n"
        "# A runtime other than the cluster's torch-distributed goes into spec.runtimeRef.\n"
        f"{network if job.num_nodes > 1 else ''}{yaml_blocks(config)}---\n{yaml_blocks(task)}"
    )


def _sky_task(job: ExportJob, rendered: Rendered, run: str, where: tuple[dict[str, object], ...]) -> str:
    """A SkyPilot task: this folder is its work directory; variables without a value are asked for at launch.

    Spot nodes are taken away: ``sky jobs launch`` starts the task again, where ``sky launch`` leaves it dead.
    """
    task = filled_yaml(job, "bundle", "sky_task.yaml.j2", rendered=rendered, run=run, title=job.name_of(run), places=where)
    flags = "".join(f" --env {variable}=..." for variable in rendered.needed)
    verb = "jobs launch" if any(one["use_spot"] for one in where) else "launch"
    return f"# Submit in this folder: sky {verb}{flags} {run}.skypilot.yaml\n{yaml_blocks(task)}"
