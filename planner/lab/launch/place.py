"""Where a process stands: alone, or a rank that torchrun, srun or mpirun started; and the commands for many nodes."""

import re
import shlex
from collections.abc import Mapping

from planner.errors import PlannerError
from planner.record import record

PORT = 29400
"""torchrun's own default."""
SLURM_PORT = 29500


@record
class Place:
    """Where a process stands, as its launcher says it."""

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
    part: str = ""
    """Which of several runs on one store; "" where there is one."""


MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""What mpirun of Open MPI, of MVAPICH and of MPICH or Intel MPI sets: rank, ranks, rank on the node, ranks on the node."""


def place_from(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun (RANK, WORLD_SIZE, ...), srun (SLURM_PROCID, ...) or mpirun gave this process; None outside them.

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
    return next((_of_mpi(environment, names) for names in MPI if _whole(environment, names[1], 1) > 1), None)


def _of_mpi(environment: Mapping[str, str], names: tuple[str, str, str, str]) -> Place:
    """The place that mpirun gave. It does not say where rank 0 is."""
    rank, world, local, on_node = (_whole(environment, name) for name in names)
    address = environment.get("MASTER_ADDR") or ("127.0.0.1" if on_node == world else "")
    if not address:
        raise PlannerError(
            f"mpirun started {world} ranks, {on_node} on this node, and does not say where rank 0 is: mpirun -x "
            "MASTER_ADDR=FIRST_HOST (Open MPI), -genv MASTER_ADDR FIRST_HOST (MPICH, Intel MPI)"
        )
    return _checked(Place(
        rank=rank, world=world, local_rank=local, node=rank // max(on_node, 1), address=address,
        port=_whole(environment, "MASTER_PORT", SLURM_PORT), agent_store=False,
    ))  # fmt: skip


def _whole(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise PlannerError(f"{name} is '{text}'; torchrun, srun and mpirun set it to a whole number")
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

# Or with mpirun (Open MPI), which does not say where rank 0 is:
mpirun -np {nodes * per_node} --map-by ppr:{per_node}:node -x MASTER_ADDR=FIRST_HOST {" ".join(_plain(program))}
"""


def _plain(program: list[str]) -> list[str]:
    """The program as a shell runs it, without torchrun's own flags."""
    words = [word for word in program if word != "--no-python"]
    if words and words[0].endswith(".py"):
        words = ["python", *words]
    return [shlex.quote(word) for word in words]
