"""From the flags of ``plan run`` to a job that is ready: numbers of GPUs, their plans, the interval between checkpoints."""

import contextlib
import fcntl
import math
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path

from planner import library
from planner.cluster_file import ClusterFile, read_cluster
from planner.errors import PlannerError, listed
from planner.lab.elastic.attempt import Meeting
from planner.lab.elastic.checkpoint_folder import newest_step, set_aside
from planner.lab.elastic.loop import Job, patience
from planner.lab.elastic.notices import gpus_here, taken_away
from planner.lab.elastic.run_flags import Adapter, Saving, adapter_of, command_line
from planner.lab.elastic.save_interval import Interval, best_interval_of
from planner.lab.elastic.worlds import World, worlds_of
from planner.lab.launch.torchrun import ask_torch
from planner.plan_file import Plan, load_plan
from planner.record import record
from planner.trainers.bundle.elastic_folder import write_worlds
from planner.trainers.bundle.target import ExportJob
from planner.trainers.megatron.core_settings import fully_sharded
from planner.trainers.targets import load_target
from planner.units import format_seconds, parse

PREDICTED = 10.0
"""A step that takes so many times its prediction has hung, where that is longer than --silence."""
MOST_WORLDS = 64
"""Plans that are made before a start."""
NOTICE_EVERY = 5.0
"""Seconds between two looks whether a notice has come."""


@record
class Asked:
    """The flags of ``plan run``, as they were typed."""

    plan: Plan
    """What is trained."""
    command: tuple[str, ...]
    """Program and arguments; empty = the exported script."""
    folder: Path
    """--to."""
    checkpoints: Path | None = None
    counts: str = ""
    """--gpus, MIN:MAX."""
    nnodes: str = "1:1"
    nproc_per_node: int = 0
    rdzv_endpoint: str = ""
    rdzv_id: str = "plan-run"
    rdzv_conf: str = ""
    world: str | None = None
    notice: str | None = None
    interval: str = "auto"
    every: int = 0
    mtbf: str = ""
    cluster: Path | None = None
    keep: int = 2
    grace: str = "60s"
    first_step: str = "20min"
    silence: str = "10min"
    restarts: int = 3
    target: str | None = None


@record
class Ready:
    """A job before its first attempt."""

    job: Job
    """What is run."""
    ranks: int
    """Of this node, at most."""
    lines: list[str] = field(default_factory=list)
    """What is said before the start: plans, interval, limits."""
    needed: dict[str, str] = field(default_factory=dict)
    """Variables that the user must set, and what they are."""
    cuda: str = ""
    """The program whose training loop runs on CUDA GPUs alone; '' = any."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block nobody else runs this job in its folder; raises PlannerError where somebody does, or a variable that is
        needed is not set, or there are no GPUs that the program needs."""
        if missing := [f"{name} ({what})" for name, what in self.needed.items() if not os.environ.get(name)]:
            raise PlannerError(f"{', '.join(missing)} is not set; export it and start again")
        if self.cuda and ask_torch("torch.cuda.is_available()") == [False]:
            raise PlannerError(
                f"{self.cuda} trains on CUDA GPUs alone, and torch finds none here; start the same command where they are. "
                "--print-commands shows what it would start, and train.py (--target pytorch) runs without a GPU"
            )
        path = self.job.folder / f"lock-{socket.gethostname()}"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise PlannerError(f"another plan run works in {self.job.folder}; stop it, or choose another --to") from None
            yield


def between(text: str, flag: str, default: tuple[int, int]) -> tuple[int, int]:
    """``4:8`` or ``8`` as (least, most). Raises PlannerError."""
    if not text:
        return default
    parts = text.split(":")
    if len(parts) > 2 or not all(one.isdecimal() and 1 <= len(one) <= 6 and int(one) for one in parts):
        raise PlannerError(f"{flag} {text}: write MIN:MAX, like 4:8, or one number")
    least, most = int(parts[0]), int(parts[-1])
    if least > most:
        raise PlannerError(f"{flag} {text}: {least} is more than {most}; write the smaller number first")
    return least, most


def set_up(asked: Asked, say: Callable[[str], object]) -> Ready:
    """Plans, exports and limits. Raises PlannerError before anything is started."""
    plan = asked.plan
    adapter = adapter_of(asked.command, plan.load_trainer().name, asked.target)
    command = _found_program(asked.command)
    meeting, ranks, counts = _counts(asked)
    grace, silence, first = (_time(getattr(asked, name), name) for name in ("grace", "silence", "first_step"))
    silence = max(silence, PREDICTED * plan.prediction.step_time_s)
    several = meeting.most > 1  # rank 0, which prints the steps, may be on another node: then the ranks' own limit ends a hang
    cluster = read_cluster(asked.cluster) if asked.cluster is not None else None
    interval = _interval(asked, cluster)
    worlds, missing = worlds_of(plan, counts, adapter, say)
    meeting = _met(meeting, ranks, worlds, missing)
    folder = asked.folder.resolve()
    checkpoints = (asked.checkpoints or folder / "checkpoints").resolve()
    _make(folder, checkpoints)
    _same_job(plan, folder, checkpoints)

    def line(one: ExportJob, entry: Sequence[str]) -> str:
        saving = Saving(folder=os.fspath(checkpoints), interval=interval.seconds, steps=asked.every, keep=asked.keep,
                        step_time=one.plan.prediction.step_time_s, timeout=silence, sharded=fully_sharded(one))  # fmt: skip
        return f"{shlex.quote(sys.executable)} {command_line(adapter, command, entry, saving)}"

    jobs, known = [ExportJob.of(world.plan) for world in worlds.values()], adapter.variables(command)
    bundles = write_worlds(load_target(adapter.target), jobs, folder / "worlds", line, variables=known, force=True)
    job = Job(
        worlds=worlds, start=folder / "worlds" / "worker.sh", folder=folder, adapter=adapter, gpus=gpus_here(asked.world, ranks),
        watched=asked.world is not None, notice=taken_away(asked.notice, NOTICE_EVERY), meeting=meeting, grace=grace,
        before=partial(set_aside, checkpoints) if adapter.target == "torchtitan" else list, saved=partial(newest_step, checkpoints),
        first=math.inf if several else first + silence, silence=math.inf if several else silence, restarts=asked.restarts,
    )  # fmt: skip
    lines = [*_about(worlds, missing, adapter), _saved(asked, interval, checkpoints, adapter), _limits(job, silence)]
    needed = {name: rendered.variables[name].why for rendered in (one.rendered for one in bundles.values())
              for name in rendered.needed if name not in known}  # fmt: skip
    return Ready(job=job, ranks=ranks, lines=lines, needed=needed, cuda=adapter.cuda)


def _counts(asked: Asked) -> tuple[Meeting, int, list[int]]:
    """(how nodes meet, ranks of a node, numbers of GPUs of the job)."""
    gpus = asked.plan.num_gpus
    least, most = between(asked.nnodes, "--nnodes", (1, 1))
    if most == 1:
        low, high = between(asked.counts, "--gpus", ((gpus + 1) // 2, gpus))
        if high - low >= MOST_WORLDS:
            raise PlannerError(f"--gpus {asked.counts}: {high - low + 1} plans are too many; at most {MOST_WORLDS}")
        return Meeting(name=asked.rdzv_id), high, list(range(low, high + 1))
    if asked.counts:
        raise PlannerError("--gpus is for one node; with --nnodes the nodes change, each with --nproc-per-node ranks")
    if not asked.rdzv_endpoint:
        raise PlannerError(f"--nnodes {asked.nnodes}: say where the nodes meet, --rdzv-endpoint HOST:PORT of one of them")
    ranks = asked.nproc_per_node or min(int(asked.plan.cluster().hardware.gpus_per_node), gpus)
    if most - least >= MOST_WORLDS:
        raise PlannerError(f"--nnodes {asked.nnodes}: {most - least + 1} plans are too many; at most {MOST_WORLDS}")
    meeting = Meeting(
        least=least, most=most, endpoint=asked.rdzv_endpoint, name=asked.rdzv_id, conf=asked.rdzv_conf
    )  # fmt: skip
    return meeting, ranks, [ranks * nodes for nodes in range(least, most + 1)]


def _met(meeting: Meeting, ranks: int, worlds: dict[int, World], missing: list[str]) -> Meeting:
    """Several nodes go on with so many of them that each number up to the most has a plan. Raises PlannerError."""
    if meeting.most == 1:
        return meeting
    least = meeting.most + 1
    while least > meeting.least and ranks * (least - 1) in worlds:
        least -= 1
    if least > meeting.most:
        raise PlannerError(f"{meeting.most} nodes of {ranks} ranks have no plan: {'; '.join(missing)}")
    return replace(meeting, least=least)


def _time(text: str, name: str) -> float:
    return parse(text, "seconds", what=f"--{name.replace('_', '-')}", like="90s or 20min")


def _interval(asked: Asked, cluster: ClusterFile | None) -> Interval:
    mtbf = _time(asked.mtbf, "mtbf") if asked.mtbf else None
    if asked.interval != "auto" and asked.every:
        raise PlannerError("--interval and --every both say when to save; leave one of them out")
    if asked.interval != "auto":
        return Interval(seconds=_time(asked.interval, "interval"), why="as asked for")
    return best_interval_of(asked.plan, cluster, mtbf)


def _make(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlannerError(f"{folder}: cannot be made ({error.strerror})") from error


def _same_job(plan: Plan, folder: Path, checkpoints: Path) -> None:
    """Keeps what the folder trains. Raises PlannerError where it has begun with something else."""
    kept = folder / "plan.yaml"
    if library.is_file(kept) and (newest_step(checkpoints) or library.is_file(folder / "history.json")):
        before, now = load_plan(kept).workload.to_dict(), plan.workload.to_dict()
        if changed := [name for name in now if now[name] != before.get(name)]:
            raise PlannerError(
                f"{folder} has begun with another job, whose plan has another "
                f"{listed([name.replace('_', ' ') for name in changed], 'and')}; "
                "choose another --to, or remove the folder"
            )
    plan.save(kept)


def _found_program(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command with its program by its whole path: ranks start elsewhere. train.py is that of the export where there is none."""
    if not command or command[0] == "-m":
        return command
    path = shutil.which(command[0], mode=os.F_OK) or command[0]
    if library.is_file(path):
        return (os.path.abspath(path), *command[1:])
    if command[0] == "train.py":
        return command
    raise PlannerError(f"the command {command[0]}: there is no such file; give the program's path")


def _about(worlds: dict[int, World], missing: list[str], adapter: Adapter) -> list[str]:
    lines = [f"{gpus} GPUs: {one.words}, {format_seconds(one.plan.prediction.step_time_s)} per step as predicted"
             for gpus, one in sorted(worlds.items(), reverse=True)]  # fmt: skip
    lines += [f"no plan for {one.replace(': misses by', ': the nearest misses the memory by')}" for one in missing]
    if not adapter.stops:
        lines.append(f"{adapter.target} does not save on SIGTERM: a notice, too, loses what was trained since its last checkpoint")
    return lines


def _saved(asked: Asked, interval: Interval, checkpoints: Path, adapter: Adapter) -> str:
    how = f"every {asked.every} steps" if asked.every else f"every {format_seconds(interval.seconds)}, {interval.why}"
    stay = f"the last {asked.keep} whole ones stay" if adapter.forgets else f"{adapter.target} keeps all of them"
    return f"checkpoints: {how}, {stay} in {checkpoints}"


def _limits(job: Job, timeout: float) -> str:
    steps = f"first step within {format_seconds(job.first)}, each further one within {format_seconds(timeout)}"
    if not math.isfinite(job.first):
        meeting = f"nodes {format_seconds(patience(job))} for {job.meeting.endpoint}"
        steps = f"ranks wait {format_seconds(timeout)} for each other, {meeting}"
    saved = f"saved within {format_seconds(job.grace)} of a notice"
    return f"limits: {steps}, {saved}, {job.restarts} failures in a row without progress"
