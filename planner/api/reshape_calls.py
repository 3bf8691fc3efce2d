"""``reshape`` from Python: another number of GPUs, or other nodes of several kinds; the same as ``plan reshape``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.elastic_jobs import elastic_job, save_data, seconds_of
from planner.api.results import File, Plan, Progress, Result, silent
from planner.errors import PlannerError, shown
from planner.keywords import require_known

if TYPE_CHECKING:
    from rich.console import Console

    from planner.api.mixed_calls import MixedPlan
    from planner.elastic.mixed_elastic_job import MixedElasticJob
    from planner.elastic.mixed_reshape import MixedReshape
    from planner.elastic.reshape import Reshape, Wanted
    from planner.lab.elastic.reshard import Resharded


@dataclass(frozen=True, repr=False)
class Reshaped(Result):
    """The move of a plan to another number of GPUs; ``plan`` is the new one."""

    found: Reshape | None
    """None where nothing fits."""
    gpus: int
    """GPUs that were asked for."""

    @property
    def fits(self) -> bool:
        """A layout was found that fits."""
        return self.found is not None

    @property
    def _move(self) -> Reshape:
        if self.found is None:
            raise PlannerError(f"no layout of the job fits on {self.gpus} GPUs; ask for more, or change the job and plan it again")
        return self.found

    @property
    def plan(self) -> Plan:
        """The new plan. Raises PlannerError where nothing fits."""
        return Plan(self._move.plan)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan reshape --json`` prints."""
        return {"fits": False, "gpus": self.gpus} if self.found is None else {"fits": True, **self.found.to_dict()}

    def show(self, console: Console) -> None:
        """Print all of it on a console of rich."""
        from planner.questions.reshape.show import print_reshape

        if self.found is None:
            console.print(f"[bold red]Nothing fits[/bold red] on {self.gpus} GPUs with the job's batch, nor with fewer of them.")
        else:
            print_reshape(console, self.found)

    def save(self, path: File) -> None:
        """Write the new plan. Raises PlannerError."""
        self._move.plan.save(Path(path))

    def export(self, trainer: str, folder: File, *, force: bool = False) -> tuple[str, ...]:
        """Write a folder for each number of nodes between the old plan and the new one, and a script that starts them with
        ``torchrun --nnodes MIN:MAX``; returns what was written. Raises PlannerError."""
        from planner.elastic.worlds_between import worlds_between
        from planner.trainers.bundle.elastic_folder import write_elastic
        from planner.trainers.bundle.target import ExportJob
        from planner.trainers.targets import load_target

        target = load_target(trainer)
        jobs = [ExportJob.of(one) for one in worlds_between(self._move.job.plan, self._move.plan)]
        return write_elastic(target, jobs, Path(folder), force=force)

    def reshard(self, checkpoint: File, to: File, *, progress: Progress = silent) -> Resharded:
        """Rewrite the newest whole checkpoint of a folder in the new split with its own engine, and check every tensor: names,
        shapes, values, sums. Raises PlannerError, with the command where another tool does it."""
        from planner.lab.elastic.reshard import reshard

        return reshard(Path(checkpoint), self._move.plan, Path(to), progress)

    def save_recipe(self, path: File) -> None:
        """Write the resharding recipe as YAML or JSON: engine, flags, samples and step. Raises PlannerError."""
        save_data(Path(path), self._move.recipe_document())


@dataclass(frozen=True, repr=False)
class MixedReshaped(Result):
    """The move of a plan over several kinds of nodes to those of a cluster file; ``plan`` is the new one."""

    found: MixedReshape | None
    """None where nothing fits."""

    @property
    def fits(self) -> bool:
        """A plan was found that fits."""
        return self.found is not None

    @property
    def _move(self) -> MixedReshape:
        if self.found is None:
            raise PlannerError("no plan of the job fits on these nodes; add nodes, or change the job and plan it again")
        return self.found

    @property
    def plan(self) -> MixedPlan:
        """The new plan. Raises PlannerError where nothing fits."""
        from planner.api.mixed_calls import MixedPlan

        return MixedPlan(self._move.plan)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan reshape --json`` prints."""
        return {"fits": False} if self.found is None else {"fits": True, **self.found.to_dict()}

    def show(self, console: Console) -> None:
        """Print all of it on a console of rich."""
        from planner.questions.reshape.show import print_mixed_reshape

        if self.found is None:
            console.print("[bold red]Nothing fits[/bold red] on these nodes with the job's batch.")
        else:
            print_mixed_reshape(console, self.found)

    def save(self, path: File) -> None:
        """Write the new plan. Raises PlannerError."""
        self._move.plan.save(Path(path))

    def save_recipe(self, path: File) -> None:
        """Write the resharding recipe as YAML or JSON: engine, flags, samples and step. Raises PlannerError."""
        save_data(Path(path), self._move.recipe_document())

    def export(self, trainer: str, folder: File, *, force: bool = False) -> tuple[str, ...]:
        """Raises PlannerError: torchrun's MIN:MAX counts nodes and does not know their kinds."""
        raise PlannerError(
            "torchrun --nnodes MIN:MAX counts nodes and does not know their kinds; write the new plan with --output, and export it "
            f"with 'plan export PLAN --to {trainer} --output {folder}'"
        )

    def reshard(self, checkpoint: File, to: File, *, progress: Progress = silent) -> Resharded:
        """Raises PlannerError: the trainer loads it into the new plan."""
        raise PlannerError(
            "checkpoints of plans over several kinds of nodes are rewritten by none of planner's own commands; "
            f"{self._move.recipe.title} reads them into the new plan"
        )


def reshape(plan: Plan | MixedPlan | File, *, progress: Progress = silent, **said: Any) -> Reshaped | MixedReshaped:
    """The best plan on another number of GPUs, the move counted: ``reshape("run.yaml", gpus=48, drain="120s")``.

    Keywords are the flags of ``plan reshape``: ``gpus`` or ``nodes``, ``drain``, ``lost``, ``remaining``, ``step``, ``mtbf``,
    ``synchronous``, a ``cluster`` file, and ``checkpoint``, a folder whose real bytes and step count. The ``cluster`` of a plan
    over several kinds of nodes holds the nodes that it goes on with, in place of a number. Raises PlannerError.
    """
    from planner.elastic.mixed_elastic_job import MixedElasticJob
    from planner.elastic.reshape import reshape as answer

    known = ("gpus", "nodes", "drain", "lost", "remaining", "step", "mtbf", "synchronous", "cluster", "checkpoint")
    require_known("reshape", said, known)
    size, seen = None, list[str]()
    if said.get("checkpoint") is not None:
        from planner.lab.elastic.checkpoint_folder import held_by

        size, step = held_by(Path(said["checkpoint"]), seen.append)
        said["step"] = step if said.get("step") is None else said["step"]
    job = elastic_job(plan, said, size, other_nodes=True)
    if isinstance(job, MixedElasticJob):
        return _mixed(job, said, " ".join(seen), progress)
    gpus = _gpus_of(said, int(job.hardware.gpus_per_node))
    if said.get("lost") and gpus > job.num_gpus:
        raise PlannerError(f"--lost is for fewer GPUs than the plan's {job.num_gpus}; {gpus} are asked for")
    found = answer(job, _wanted(said, gpus), progress)
    return Reshaped(None if found is None else replace(found, checkpoint=" ".join(seen)), gpus)


def _wanted(said: Mapping[str, Any], gpus: int) -> Wanted:
    """What was asked beside the plan. Raises PlannerError."""
    from planner.elastic.reshape import REMAINING, Wanted

    return Wanted(
        gpus=gpus, drain=seconds_of(said.get("drain"), "--drain", "120s"), lost=bool(said.get("lost")), step=said.get("step"),
        remaining=seconds_of(said.get("remaining"), "--remaining", "24h") or REMAINING,
    )  # fmt: skip


def _mixed(job: MixedElasticJob, said: Mapping[str, Any], checkpoint: str, progress: Progress) -> MixedReshaped:
    """The move of a mixed plan to the nodes of a cluster file. Raises PlannerError."""
    from planner.cluster_file import read_cluster
    from planner.elastic.mixed_reshape import mixed_reshape

    _check_numbers(said)
    if said.get("cluster") is None or said.get("gpus") is not None or said.get("nodes") is not None:
        raise PlannerError(
            "the plan runs on several kinds of nodes: write those that it goes on with as a cluster file, and give --cluster FILE "
            "in place of a number"
        )
    cluster = read_cluster(Path(said["cluster"]))
    around = replace(job.around, storage=cluster.storage or job.around.storage)
    found = mixed_reshape(replace(job, around=around), cluster, _wanted(said, cluster.num_gpus), progress)
    return MixedReshaped(None if found is None else replace(found, checkpoint=checkpoint))


def _check_numbers(said: Mapping[str, Any]) -> None:
    """Raise PlannerError for what is no number of GPUs, nodes or steps."""
    for flag in ("gpus", "nodes", "step"):
        value, least = said.get(flag), 0 if flag == "step" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**21):
            raise PlannerError(f"--{flag} is {shown(value)}; it must be a whole number from {least} to {2**21}")


def _gpus_of(said: Mapping[str, Any], node: int) -> int:
    """GPUs that a run goes on with; ``node``: of one node. Raises PlannerError."""
    _check_numbers(said)
    if said.get("gpus") is not None and said.get("nodes") is not None:
        raise PlannerError("--gpus and --nodes both say how many GPUs; leave one of them out")
    if said.get("gpus") is None and said.get("nodes") is None:
        raise PlannerError("on how many GPUs does the run go on? give --gpus or --nodes")
    return int(said.get("gpus") or said["nodes"] * node)


__all__ = ["MixedReshaped", "Reshaped", "reshape"]
