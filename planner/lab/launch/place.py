"""Where a process stands: alone, or a rank that torchrun or srun started; and the commands for many nodes."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from planner.errors import PlannerError

PORT = 29400
"""torchrun's own default."""
SLURM_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands, as torchrun or srun says it."""

    rank: int
    """Of all."""
    world: int
    """All ranks."""
    local_rank: int
    """On its node."""
    node: int
    """Number of the node."""
    address: str
    """Of the store."""
    port: int
    """Of the store."""
    agent_store: bool
    """torchrun's agent holds the store; otherwise rank 0 opens it."""


def place_from(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun (RANK, WORLD_SIZE, ...) or srun (SLURM_PROCID, ...) gave this process; None outside both.

    Inside a SLURM allocation but outside a job step only the first node's shell runs, so only step variables count.
    Raises PlannerError where the variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        for name in ("LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
            if name not in environment:
                raise PlannerError(f"RANK and WORLD_SIZE are set but {name} is not; start it with torchrun")
        rank, world = _whole(environment, "RANK"), _whole(environment, "WORLD_SIZE")
        local = _whole(environment, "LOCAL_WORLD_SIZE", world)
        return _checked(Place(
            rank=rank, world=world, local_rank=_whole(environment, "LOCAL_RANK"),
            node=_whole(environment, "GROUP_RANK", rank // max(local, 1)), address=environment["MASTER_ADDR"],
            port=_whole(environment, "MASTER_PORT"),
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        ))  # fmt: skip
    if "SLURM_PROCID" in environment and _whole(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        return _checked(Place(
            rank=_whole(environment, "SLURM_PROCID"), world=_whole(environment, "SLURM_STEP_NUM_TASKS"),
            local_rank=_whole(environment, "SLURM_LOCALID"), node=_whole(environment, "SLURM_NODEID"),
            address=environment.get("MASTER_ADDR") or first_host(nodes), port=_whole(environment, "MASTER_PORT", SLURM_PORT),
            agent_store=False,
        ))  # fmt: skip
    return None


def _whole(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise PlannerError(f"{name} is '{text}'; torchrun and srun set it to a whole number")
    return int(text)


def _checked(place: Place) -> Place:
    if place.rank >= place.world or not place.address:
        raise PlannerError(
            f"rank {place.rank} of {place.world} at '{place.address}': the launcher's variables disagree"
        )
    return place


def first_host(nodes: str) -> str:
    """First host of SLURM's list: ``gpu[003-007,9]-x,b`` -> gpu003-x."""
    match = re.match(r"([^\[\],]+)(?:\[(\d+)[^\]]*\]([^\[\],]*))?", nodes)
    if match is None:
        raise PlannerError(f"SLURM's list of nodes is '{nodes}'; set MASTER_ADDR to the first host")
    return "".join(part or "" for part in match.groups())


def torchrun_command(name: str, nodes: int, per_node: int, host: str, program: list[str]) -> list[str]:
    """torchrun on each of ``nodes`` machines; ``host`` is the first one, ``name`` what the job is called."""
    if nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node={per_node}", *program]
    return [
        "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={per_node}", "--max-restarts=0", "--rdzv-backend=c10d",
        f"--rdzv-id={name}", f"--rdzv-endpoint={host}:{PORT}", *program,
    ]  # fmt: skip


def commands(name: str, nodes: int, per_node: int, program: list[str], *, on_cpu: bool = False) -> str:
    """What to type for ``nodes`` machines: torchrun by hand, and a batch file for SLURM, which asks for GPUs unless the ranks are
    on processors. Raises PlannerError."""
    if nodes < 1 or per_node < 1:
        raise PlannerError(f"{nodes} nodes of {per_node} ranks: both must be at least 1")
    by_hand = shlex.join(torchrun_command(name, nodes, per_node, "FIRST_HOST", program))
    all_ = f"On each of the {nodes} machines at the same time (FIRST_HOST is one of them)"
    inner = torchrun_command(name, nodes, per_node, "$head", program)
    batch = " ".join(word if "$head" in word else shlex.quote(word) for word in inner)
    gpus = "" if on_cpu else f" --gpus-per-node={per_node}"
    tasks = f"--nodes={nodes} --ntasks-per-node={per_node}{gpus} --distribution=block"
    return f"""# {'On the machine' if nodes == 1 else all_}:
{by_hand}

# With SLURM: put this into {name}.sbatch, then: sbatch {name}.sbatch
#!/bin/bash
#SBATCH --job-name={name} --nodes={nodes} --ntasks-per-node=1{gpus} --exclusive --time=00:30:00
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 {batch}

# Or one task per {"rank" if on_cpu else "GPU"}, without torchrun, inside an allocation:
srun {tasks} --kill-on-bad-exit=1 {" ".join(_plain(program))}
"""


def _plain(program: list[str]) -> list[str]:
    """The program as a shell runs it, without torchrun's own flags."""
    words = [word for word in program if word != "--no-python"]
    if words and words[0].endswith(".py"):
        words = ["python", *words]
    return [shlex.quote(word) for word in words]
