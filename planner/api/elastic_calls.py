"""Questions about jobs whose machines come and go, from Python: ``resilience``, ``reshape``, ``watch``; the same as the commands
of those names."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.results import Answer, File, Plan, Progress, Result, silent
from planner.errors import PlannerError, shown
from planner.keywords import require_known
from planner.units import parse

if TYPE_CHECKING:
    from rich.console import Console

    from planner.api.mixed_calls import MixedPlan
    from planner.elastic.elastic_job import ElasticJob, Surroundings
    from planner.elastic.mixed_elastic_job import MixedElasticJob
    from planner.elastic.reshape import Reshape
    from planner.elastic.resilience import Resilience
    from planner.lab.elastic.reshard import Resharded
    from planner.questions.watch.watched import Watched

AROUND = ("mtbf", "spares", "price", "spot", "synchronous", "cluster")
"""Keywords about what a plan file does not say."""


def _job(plan: Plan | MixedPlan | File, said: Mapping[str, Any], size: float | None = None) -> ElasticJob | MixedElasticJob:
    """A plan of one kind of node, or of several, with storage, failures, spares and prices: of flags, else of the cluster file.
    ``size``: bytes of a checkpoint that was looked into. Raises PlannerError."""
    from planner.api.mixed_calls import MixedPlan, load_mixed
    from planner.api.plan_kinds import plan_kind
    from planner.cluster_file import read_cluster
    from planner.elastic.elastic_job import ElasticJob, Surroundings, surroundings_of
    from planner.elastic.mixed_elastic_job import MixedElasticJob, as_said_by
    from planner.plan_file import load_plan

    if not isinstance(plan, (Plan, MixedPlan)):
        kind = plan_kind(plan)
        if kind == "rl":
            raise PlannerError(_of_rl(plan))
        plan = load_mixed(plan) if kind == "mixed" else Plan(load_plan(Path(plan)))
    cluster = None if said.get("cluster") is None else read_cluster(Path(said["cluster"]))
    if isinstance(plan, MixedPlan):
        mixed = plan.file if cluster is None else as_said_by(plan.file, cluster)
        around = Surroundings(storage=mixed.cluster.storage, spares=mixed.cluster.spares)
        return MixedElasticJob(plan=mixed, around=_flagged(around, said), checkpoint_bytes=size)
    around = surroundings_of(cluster, plan.file.cluster().hardware)
    return ElasticJob(plan=plan.file, around=_flagged(around, said), checkpoint_bytes=size)


def _of_rl(path: File) -> str:
    """What to ask instead of an RL plan: the policy's training holds all that a failure loses; engines get weights from it."""
    from planner.rl.rl_plan import load_rl_plan

    plan = load_rl_plan(Path(path))
    return (
        f"{path} is an RL plan, whose engines keep nothing that a failure could lose; ask for the training of its policy: "
        f"plan --model {plan.workload.model.name} --hardware {plan.hardware} --gpus {plan.placement.train_gpus} "
        f"--trainer {plan.trainer} --output train.yaml"
    )


def _seconds(value: Any, flag: str, like: str) -> float | None:
    """A time with its unit, or seconds."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return parse(f"{float(value)!r} s", "seconds", what=flag, like=like)
    return parse(str(value), "seconds", what=flag, like=like)


def _flagged(found: Surroundings, said: Mapping[str, Any]) -> Surroundings:
    """Surroundings with what flags say. Raises PlannerError."""
    changes: dict[str, Any] = {}
    if said.get("mtbf") is not None:
        changes["mtbf"] = _seconds(said["mtbf"], "--mtbf", "900h")
    spares = said.get("spares")
    if spares is not None:
        if isinstance(spares, bool) or not isinstance(spares, int) or not 0 <= spares <= 2**18:
            raise PlannerError(f"--spares is {shown(spares)}; it must be a whole number from 0 to {2**18}")
        changes["spares"] = spares
    price = said.get("price")
    if price is not None:
        changes["price"] = parse(f"{price} USD/h", "USD/h", what="--price", like="2.69")
    if said.get("synchronous"):
        changes["asynchronous"] = False
    if said.get("spot"):
        changes["spot"] = True
    return replace(found, **changes)


@dataclass(frozen=True, repr=False)
class Resilient(Answer["Resilience"]):
    """What failures cost a plan; ``found.answers`` hold goodput, days and dollars, best first."""

    found: Resilience

    def save(self, path: File) -> None:
        """Write a picture (.png, .svg, .pdf), a page (.html) or JSON (.json). Raises PlannerError."""
        from planner.library import write_whole
        from planner.questions.resilience.show import draw

        output = Path(path)
        if output.suffix in (".png", ".svg", ".pdf"):
            draw(self.found, output)
        elif output.suffix == ".json":
            write_whole(output, json.dumps(self.to_dict(), indent=2) + "\n")
        elif output.suffix == ".html":
            title = html.escape(f"Resilience of {self.found.job.model}")
            write_whole(output, f"<!doctype html><meta charset='utf-8'><title>{title}</title>{self._repr_html_()}\n")
        else:
            raise PlannerError(f"{output}: name a file that ends in .png, .svg, .pdf, .html or .json")


def resilience(plan: Plan | MixedPlan | File, *, progress: Progress = silent, **said: Any) -> Resilient:
    """What failures cost a plan: ``resilience("plan.yaml", mtbf="900h", days=30, spares=2)``.

    Keywords are the flags of ``plan resilience``: ``mtbf`` of one node, ``days`` of training, ``spares``, ``repair``, ``shortage``,
    ``restart``, ``interval``, ``synchronous``, ``spot``, ``price``, ``trace`` and ``cluster`` files. Times are text with a unit or
    seconds. Raises PlannerError.
    """
    from planner.elastic.availability import read_trace
    from planner.elastic.replays import replayed, traced_kind
    from planner.elastic.resilience import SHORTAGE, Asked
    from planner.elastic.resilience import resilience as answer
    from planner.questions.resilience.show import print_resilience

    known = (*AROUND, "days", "repair", "shortage", "restart", "interval", "trace")
    require_known("resilience", said, known)
    job = _job(plan, said)
    days, shortage = said.get("days"), said.get("shortage")
    for flag, value in (("--days", days), ("--shortage", shortage)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6):
            raise PlannerError(f"{flag} is {shown(value)}; it must be a number above 0 and below a million")
    asked = Asked(
        days=30.0 if days is None else float(days),
        repair=_seconds(said.get("repair"), "--repair", "24h"),
        shortage=SHORTAGE if shortage is None else float(shortage),
        restart=_seconds(said.get("restart"), "--restart", "90s"), interval=_seconds(said.get("interval"), "--interval", "10min"),
    )  # fmt: skip
    trace = None if said.get("trace") is None else read_trace(Path(said["trace"]))
    if trace is not None:
        traced_kind(job.failures())
    found = answer(job, asked, progress)
    if trace is not None:
        found = replace(found, replay=replayed(found, trace, progress))
    return Resilient(found, print_resilience)


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
        _save(Path(path), self._move.recipe_document())


def reshape(plan: Plan | MixedPlan | File, *, progress: Progress = silent, **said: Any) -> Reshaped:
    """The best plan on another number of GPUs, the move counted: ``reshape("run.yaml", gpus=48, drain="120s")``.

    Keywords are the flags of ``plan reshape``: ``gpus`` or ``nodes``, ``drain``, ``lost``, ``remaining``, ``step``, ``mtbf``,
    ``synchronous``, a ``cluster`` file, and ``checkpoint``, a folder whose real bytes and step count. Raises PlannerError.
    """
    from planner.elastic.elastic_job import ElasticJob
    from planner.elastic.reshape import REMAINING, Wanted
    from planner.elastic.reshape import reshape as answer

    known = ("gpus", "nodes", "drain", "lost", "remaining", "step", "mtbf", "synchronous", "cluster", "checkpoint")
    require_known("reshape", said, known)
    size, seen = None, list[str]()
    if said.get("checkpoint") is not None:
        from planner.lab.elastic.checkpoint_folder import held_by

        size, step = held_by(Path(said["checkpoint"]), seen.append)
        said["step"] = step if said.get("step") is None else said["step"]
    job = _job(plan, said, size)
    if not isinstance(job, ElasticJob):
        raise PlannerError("a plan over several kinds of nodes: plan it again on the nodes that are left, plan --cluster FILE")
    gpus = _gpus_of(said, int(job.hardware.gpus_per_node))
    if said.get("lost") and gpus > job.num_gpus:
        raise PlannerError(f"--lost is for fewer GPUs than the plan's {job.num_gpus}; {gpus} are asked for")
    wanted = Wanted(
        gpus=gpus, drain=_seconds(said.get("drain"), "--drain", "120s"), lost=bool(said.get("lost")), step=said.get("step"),
        remaining=_seconds(said.get("remaining"), "--remaining", "24h") or REMAINING,
    )  # fmt: skip
    found = answer(job, wanted, progress)
    return Reshaped(None if found is None else replace(found, checkpoint=" ".join(seen)), gpus)


def _gpus_of(said: Mapping[str, Any], node: int) -> int:
    """GPUs that a run goes on with; ``node``: of one node. Raises PlannerError."""
    for flag in ("gpus", "nodes", "step"):
        value, least = said.get(flag), 0 if flag == "step" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**21):
            raise PlannerError(f"--{flag} is {shown(value)}; it must be a whole number from {least} to {2**21}")
    if said.get("gpus") is not None and said.get("nodes") is not None:
        raise PlannerError("--gpus and --nodes both say how many GPUs; leave one of them out")
    if said.get("gpus") is None and said.get("nodes") is None:
        raise PlannerError("on how many GPUs does the run go on? give --gpus or --nodes")
    return int(said.get("gpus") or said["nodes"] * node)


@dataclass(frozen=True, repr=False)
class Watching(Answer["Watched"]):
    """A running job at one moment; ``found.findings`` and ``found.actions``."""

    found: Watched

    def parts(self, width: int) -> list[Any]:
        """What is drawn live, for rich: all of ``show`` but what was assumed, for a terminal of ``width`` columns."""
        from planner.questions.watch.show import parts

        return list(parts(self.found, width))

    def save(self, path: File) -> str:
        """Write the best new plan, or order of experts, that pays, as YAML or JSON; returns what it is, '' where none pays and
        nothing was written. Raises PlannerError."""
        for one in self.found.actions:
            if one.pays and one.plan is not None:
                _save(Path(path), one.plan)
                return one.what
        return ""


def _save(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data as YAML or JSON. Raises PlannerError."""
    from planner import library

    if path.suffix not in (".yaml", ".yml", ".json"):
        raise PlannerError(f"{path}: name a file that ends in .yaml or .json")
    text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else library.dump_yaml(dict(data))
    library.write_whole(path, text)


def watch(
    plan: Plan | MixedPlan | File, *logs: File, url: str | None = None, progress: Progress = silent, before: Watching | None = None,
    **said: Any,
) -> Watching:
    """What holds a running job up, and what would pay: ``watch("plan.yaml", "ranks.csv", "gpus.csv")``.

    ``logs``: training logs, tables of ranks' times, of experts, of nvidia-smi or dcgmi dmon; ``url``: a Prometheus endpoint.
    ``before``: the look before, whose plan with the measured speeds is kept while they are the same. Keywords: ``remaining``,
    ``spares``, ``price`` and a ``cluster`` file. Raises PlannerError.
    """
    from planner.elastic.mixed_elastic_job import MixedElasticJob
    from planner.elastic.observed import observe
    from planner.questions.watch.mixed_watched import watched_mixed
    from planner.questions.watch.show import print_watched
    from planner.questions.watch.watched import REMAINING, watched

    require_known("watch", said, (*AROUND, "remaining"))
    remaining = _seconds(said.get("remaining"), "--remaining", "24h") or REMAINING
    last, paths = None if before is None else before.found, [Path(one) for one in logs]
    job = _job(plan, said)
    work = job.plan.workload
    seen = observe(paths, url, work.global_batch_size, work.tokens, job.num_gpus)
    if isinstance(job, MixedElasticJob):
        return Watching(watched_mixed(job, seen, remaining, progress, last), print_watched)
    return Watching(watched(job, seen, remaining, progress, last), print_watched)


__all__: Sequence[str] = ["Reshaped", "Resilient", "reshape", "resilience", "watch"]
