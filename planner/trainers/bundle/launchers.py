"""How the processes of a bundle are started: one set of files per launcher, around the words that the trainer gave.

``run.sh`` runs on every node, whatever starts it; SLURM, Kubernetes and SkyPilot only give it its place. Nodes have fixed
ranks (torchrun's static rendezvous): the dynamic one sorts nodes by host name, which need not be the order that puts
neighbouring pipeline stages next to each other. Which host gets which rank is the user's to say, in ``hosts.txt``, where
hosts are known before the job runs and the trainer keeps the order (``has_host_order``).
"""

from planner.layout import Order
from planner.trainers.bundle import cloud
from planner.trainers.bundle.environment import environment
from planner.trainers.bundle.quoting import shell_command, shell_message
from planner.trainers.bundle.target import ExportJob, Rendered

LAUNCHERS = ("torchrun", "slurm", "kubernetes", "skypilot")
"""Names after --launcher."""
PORT = 29500
"""Port of the rendezvous, torchrun's own default."""
RUNS = (("run", "The run itself."), ("smoke", "A few steps on synthetic data, with the same parallelism."))


def launch(job: ExportJob, rendered: Rendered, launcher: str) -> dict[str, str]:
    """Scripts of one launcher: file name -> text. All of them read ``environment.sh``."""
    files = {"environment.sh": environment_script(job, rendered)}
    ordered = has_host_order(job, rendered, launcher)
    for name, what in RUNS:
        files[f"{name}.sh"] = node_script(job, rendered, name, what, ordered)
    if ordered:
        files["hosts.txt"] = host_order(job)
    if launcher == "slurm":
        files |= {f"{name}.sbatch": slurm(job, rendered, name, what) for name, what in RUNS}
    elif launcher != "torchrun":
        make = cloud.train_job if launcher == "kubernetes" else cloud.sky_task
        ending = {"kubernetes": "trainjob", "skypilot": "skypilot"}[launcher]
        carried = {**rendered.files, **files}
        files |= {f"{name}.{ending}.yaml": make(job, rendered, name, carried) for name, _ in RUNS}
    return files


def environment_script(job: ExportJob, rendered: Rendered) -> str:
    """``environment.sh``: what the user says, then what the trainer and the network need, each with its reason."""
    lines = ["# shellcheck shell=bash", "# Sourced by the launch scripts on every node."]
    for name, one in rendered.variables.items():
        lines += ["", f"# {one.why}"]
        if one.value is None:
            lines += [f': "${{{name}:?set {name}: {shell_message(one.why)}}}"', f"export {name}"]
        else:
            lines.append(f'export {name}="${{{name}:-{one.value}}}"')
    for name, one in environment(job, rendered).items():
        lines += ["", f"# {one.why}", f'export {name}="{one.value}"' if one.value is not None else f"# export {name}="]
    return "\n".join(lines) + "\n"


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


def host_order(job: ExportJob) -> str:
    """``hosts.txt``: comments that say which lines belong together; the user writes the hosts below them."""
    lines = [
        f"# The {job.num_nodes} hosts of the job in the order of their ranks, one a line: every node finds its own rank here.",
        "# Without hosts, NODE_RANK and MASTER_ADDR say it, and under SLURM the order of its topology.",
    ]
    domain = int(job.cluster.hardware.scale_up_domain) // job.gpus_per_node
    if 1 < domain < job.num_nodes:
        lines += [
            f"# The plan counts on one NVLink domain in lines 1 to {domain}, one in the next {domain}, and so on: what is",
            "# priced on NVLink goes over the network where the hosts of a domain are apart here.",
        ]
    if job.layout.pp > 1:
        lines.append(
            "# Neighbouring pipeline stages exchange activations: hosts that are near each other, one after the other."
        )
        for first, last, stages in node_stages(job):
            where = f"line {first + 1}" if first == last else f"lines {first + 1} to {last + 1}"
            lines.append(f"#   {where}: {stages}")
    return "\n".join(lines) + "\n"


def _find_place(job: ExportJob) -> list[str]:
    """Shell lines that look this host up in hosts.txt, by its name or one of its addresses."""
    return [
        "mapfile -t hosts < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' hosts.txt)",
        'if [ "${#hosts[@]}" -gt 0 ]; then',
        f'    if [ "$(printf \'%s\\n\' "${{hosts[@]}}" | sort -u | wc -l)" != {job.num_nodes} ] || '
        f'[ "${{#hosts[@]}}" != {job.num_nodes} ]; then',
        f'        echo "hosts.txt must name {job.num_nodes} different hosts, and has ${{#hosts[@]}} lines with one" >&2; exit 1',
        "    fi",
        '    mine=" $(uname -n) $(hostname -s 2> /dev/null || true) $(hostname -I 2> /dev/null || true) " NODE_RANK=""',
        '    for i in "${!hosts[@]}"; do',
        '        case "$mine" in *" ${hosts[i]} "*) NODE_RANK=$i ;; esac',
        "    done",
        '    : "${NODE_RANK:?hosts.txt does not name this host, $(uname -n)}"',
        '    MASTER_ADDR="${hosts[0]}"',
        "fi",
    ]


def node_script(job: ExportJob, rendered: Rendered, name: str, what: str, ordered: bool) -> str:
    """What every node runs: its place, the environment, the trainer's preparation, the start."""
    entry = rendered.entry if name == "run" else rendered.smoke
    lines = [
        "#!/usr/bin/env bash",
        f"# {what}",
        *_how_to_start(job, rendered, f"{name}.sh"),
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
    ]
    lines += [*(_find_place(job) if ordered else ()), *_place(job)]
    lines += ["# shellcheck disable=SC1091", "source ./environment.sh", *rendered.prepare, ""]
    if rendered.start == "once" and job.num_nodes > 1:
        lines += ['[ "$NODE_RANK" = 0 ] || exit 0']
    words = (*torchrun(job), *_ended(entry)) if rendered.start == "torchrun" else entry
    return "\n".join([*lines, f"exec {shell_command(words)}"]) + "\n"


def _place(job: ExportJob) -> list[str]:
    """Shell lines that set the number of nodes, the node's rank, its GPUs, and where the first node is."""
    lines = [f"export NUM_NODES={job.num_nodes} GPUS_PER_NODE={job.gpus_per_node}"]
    if job.num_nodes == 1:
        return [*lines, "export NODE_RANK=0 MASTER_ADDR=localhost", f'export MASTER_PORT="${{MASTER_PORT:-{PORT}}}"']
    lines += [
        f': "${{NODE_RANK:?set NODE_RANK to the number of this node, 0 to {job.num_nodes - 1}}}"',
        ': "${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"',
        f'export NODE_RANK MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-{PORT}}}"',
    ]
    if gpus_of_last_node(job) != job.gpus_per_node:
        lines.append(f'if [ "$NODE_RANK" = {job.num_nodes - 1} ]; then GPUS_PER_NODE={gpus_of_last_node(job)}; fi')
    return lines


def _how_to_start(job: ExportJob, rendered: Rendered, file: str) -> list[str]:
    """Comment with the exact command of every node, and which pipeline stages it holds."""
    if job.num_nodes == 1:
        return [f"# Run it on the node: bash {file}"]
    together = f"# Run it on each of the {job.num_nodes} nodes at the same time, with ADDRESS the address of node 0."
    if rendered.start != "torchrun":
        return [together, f"#   NODE_RANK=0..{job.num_nodes - 1} MASTER_ADDR=ADDRESS bash {file}"]
    lines = [
        f"{together} Neighbouring stages",
        "# exchange activations: number the nodes in the order in which the network joins them.",
    ]
    for first, last, stages in node_stages(job):
        number = str(first) if first == last else f"{first}..{last}"
        lines.append(f"#   NODE_RANK={number} MASTER_ADDR=ADDRESS bash {file}    # {stages}")
    return lines


def node_stages(job: ExportJob) -> list[tuple[int, int, str]]:
    """(first node, last node, pipeline stages that they hold) for runs of nodes that hold the same, in order of nodes."""
    layout, gpus = job.layout, job.gpus_per_node
    inner = {
        Order.TP_CP_EP_DP_PP: layout.tp * layout.cp * layout.dp, Order.TP_CP_EP_PP_DP: layout.tp * layout.cp,
        Order.TP_CP_DP_PP_EP: layout.tp * layout.cp * layout.dp // layout.ep,
    }[Order(layout.order)]  # fmt: skip
    found: list[tuple[int, int, str]] = []
    for node in range(job.num_nodes):
        ranks = range(node * gpus, min((node + 1) * gpus, job.cluster.num_gpus))
        held = sorted({rank // max(inner, 1) % layout.pp for rank in ranks})
        text = f"pipeline stage {held[0]}" if len(held) == 1 else f"pipeline stages {held[0]} to {held[-1]}"
        first = found.pop()[0] if found and found[-1][2] == text else node
        found.append((first, node, text))
    return (
        found if len(found) <= _MOST_LINES else [(0, job.num_nodes - 1, f"all {layout.pp} pipeline stages, in order")]
    )


_MOST_LINES = 64
"""Runs of nodes that a script's comment lists."""


def slurm(job: ExportJob, rendered: Rendered, name: str, what: str) -> str:
    """Batch script: one task per node, which starts ``run.sh`` or ``smoke.sh``."""
    given = ",".join(["ALL", *(f"{variable}=..." for variable in rendered.needed)])
    export = f" --export={given}" if rendered.needed else ""
    gpus = "" if job.cluster.hardware.is_cpu else f"#SBATCH --gpus-per-node={job.gpus_per_node}\n"
    return f"""#!/usr/bin/env bash
# {what} Submit it in this folder, with what your site asks for:
#   sbatch --partition=... --account=... --time=...{export} {name}.sbatch
#SBATCH --job-name={job.name_of(name)}
#SBATCH --nodes={job.num_nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${{hosts[0]}}" MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"
# SLURM numbers the nodes in the order of its topology. The one task of a node must not be bound to a part of its cores.
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 --cpu-bind=none bash -c 'NODE_RANK=$SLURM_NODEID exec bash {name}.sh'
"""
