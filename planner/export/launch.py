"""How the processes of a bundle are started: one file per launcher, around the words that the trainer gave."""

from __future__ import annotations

from planner.export.environment import environment
from planner.export.target import ExportJob, Rendered

LAUNCHERS = ("torchrun",)
"""Names after --launcher."""
PORT = 29500
"""Port of the rendezvous, torchrun's own default."""


def launch(job: ExportJob, rendered: Rendered, launcher: str) -> dict[str, str]:
    """Scripts of one launcher: file name -> text. All of them read ``environment.sh``."""
    return {
        "environment.sh": environment_script(job, rendered),
        "run.sh": _script(job, rendered, rendered.entry, "Trains."),
        "smoke.sh": _script(job, rendered, rendered.smoke, "A few steps on synthetic data, with the same parallelism."),
    }


def environment_script(job: ExportJob, rendered: Rendered) -> str:
    """``environment.sh``: what the user says, then what the trainer and the network need, each with its reason."""
    lines = ["# Sourced by the launch scripts on every node."]
    for name, one in rendered.variables.items():
        lines += ["", f"# {one.why}"]
        if one.value is None:
            lines.append(f': "${{{name}:?set {name}: {one.why}}}"')
        else:
            lines.append(f'export {name}="${{{name}:-{one.value}}}"')
    for name, one in environment(job, rendered).items():
        lines += ["", f"# {one.why}", f"export {name}={one.value}"]
    return "\n".join(lines) + "\n"


def quoted(words: tuple[str, ...]) -> str:
    """Words as one shell command over several lines; ``$NAME`` and ``${NAME[@]}`` stay expansions."""
    escaped = [word.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") for word in words]
    return " \\\n    ".join(word if word.replace("-", "").isalnum() else f'"{word}"' for word in escaped)


def torchrun(job: ExportJob) -> tuple[str, ...]:
    """torchrun and its flags: one process per GPU, all nodes meet at the first one."""
    return (
        "torchrun", "--nnodes", str(job.num_nodes), "--nproc-per-node", str(job.gpus_per_node),
        "--rdzv-backend", "c10d", "--rdzv-id", "${JOB_ID:-plan}",
        "--rdzv-endpoint", f"${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-{PORT}}}",
    )  # fmt: skip


def _script(job: ExportJob, rendered: Rendered, entry: tuple[str, ...], what: str) -> str:
    nodes, words = job.num_nodes, entry if rendered.start != "torchrun" else (*torchrun(job), *entry)
    how = (
        f"Run it on each of the {nodes} nodes, with MASTER_ADDR set to the address of the first."
        if nodes > 1
        else "Run it on the node."
    )
    lines = ["#!/usr/bin/env bash", f"# {what} {how}", "set -euo pipefail", 'cd "$(dirname "$0")"']
    if nodes > 1:
        lines.append(': "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"')
    lines += ["source ./environment.sh", *rendered.prepare, "", f"exec {quoted(words)}"]
    return "\n".join(lines) + "\n"
