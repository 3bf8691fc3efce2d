"""What a calibration changes for the plans whose validations it was fitted on: their step time, and the best layout."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cluster import Cluster
from planner.cost.refine import price_exactly
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.model import load_model
from planner.rules import Job
from planner.runs import Run
from planner.search import search
from planner.trainer import Trainer
from planner.workload import Workload

MOST_JOBS = 4
"""Jobs that are searched again: each takes up to seconds, twice."""


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """One validated plan, priced with the profile before and after, and the best layout of its job with both."""

    run: Run
    """What was validated."""
    before: float
    """Seconds per step of its layout with the profile as it was."""
    after: float
    """The same with the calibrated one."""
    best_before: str
    """Layout that the search picks, in words; '' = nothing fits."""
    best_after: str
    command: str
    """Plans the job again with the calibrated profile."""

    @property
    def moved(self) -> bool:
        """Another layout is the best now."""
        return self.best_before != self.best_after

    def to_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return {
            "source": self.run.source, "id": self.run.id, "measured_seconds": self.run.measured.step_time,
            "predicted_before_seconds": self.before, "predicted_after_seconds": self.after,
            "best_before": self.best_before, "best_after": self.best_after, "best_changed": self.moved, "command": self.command,
        }  # fmt: skip


def replan(
    runs: Sequence[Run], hardware: HardwareProfile, trainer: Trainer | None, *, files: Sequence[str]
) -> list[Replanned]:
    """The validated plans among the runs with a calibrated profile, and trainer where it moved too (None: it did not).

    ``files``: the profile's, and the trainer's where there is one, for the command. At most MOST_JOBS jobs.
    """
    found: list[Replanned] = []
    known: dict[int, tuple[str, str]] = {}
    jobs: list[Job] = []
    for run in runs:
        if not run.of_plan or run.workload is None or run.cluster is None or run.trainer is None or run.layout is None:
            continue
        old = Job(workload=run.workload, cluster=run.cluster, trainer=run.trainer)
        mine = replace(hardware, network_bandwidth=run.cluster.hardware.network_bandwidth)
        new = replace(
            old, cluster=Cluster(hardware=mine, num_gpus=run.cluster.num_gpus), trainer=trainer or run.trainer
        )
        number = next((n for n, job in enumerate(jobs) if _same(job, old)), len(jobs))
        if number == len(jobs):
            if len(jobs) == MOST_JOBS:
                continue
            jobs.append(old)
            known[number] = (_best(old), _best(new))
        found.append(
            Replanned(
                run=run, before=_step(old, run.layout), after=_step(new, run.layout), best_before=known[number][0],
                best_after=known[number][1], command=command(new, files),
            )
        )  # fmt: skip
    return found


def _same(one: Job, other: Job) -> bool:
    def key(job: Job) -> tuple[object, ...]:
        return job.workload, job.cluster.num_gpus, job.trainer, job.cluster.hardware.network_bandwidth

    return key(one) == key(other)


def _step(job: Job, layout: Layout) -> float:
    return float(price_exactly(job.workload, job.cluster, job.trainer, [layout])[0].step_time[0])


def _best(job: Job) -> str:
    try:
        finding = search(job, None, 1)
    except PlannerError:
        return ""
    return layout_text(finding.layouts[0]) if finding.fit else ""


def command(job: Job, files: Sequence[str]) -> str:
    """The command line that plans a job again with a profile, and a trainer, of the user's own."""
    work, plain = job.workload, Workload(model=job.workload.model, sequence_length=1, global_batch_size=1)
    words = [
        "plan", "--model", _model(work), "--gpus", str(job.cluster.num_gpus), "--hardware", files[0],
        "--trainer", files[1] if len(files) > 1 else job.trainer.name,
        "--sequence-length", str(work.sequence_length), "--global-batch-size", str(work.global_batch_size),
    ]  # fmt: skip
    for name in ("precision", "optimizer", "lora_rank", "lora_targets", "document_length", "expert_imbalance"):
        if getattr(work, name) != getattr(plain, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(work, name))]
    return shlex.join(words)


def _model(work: Workload) -> str:
    """The preset of the same sizes, or the model's name, whose file only the user knows."""
    name = work.model.name
    try:
        return name if load_model(name) == work.model else f"{name}.yaml"
    except PlannerError:
        return f"{name}.yaml"
