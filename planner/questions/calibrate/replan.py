"""What a calibration changes for the plans whose validations it was fitted on: their step time, and the best layout."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from planner import library
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.hardware import HardwareProfile
from planner.keywords import flag_of
from planner.model import load_model
from planner.rules import Job
from planner.runs import Run
from planner.search import search
from planner.timeline.priced_plan import estimate_of
from planner.trainer import Trainer

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
    jobs: list[tuple[object, ...]] = []
    best: list[tuple[str, str]] = []
    for run in runs:
        if not run.of_plan or run.workload is None or run.cluster is None or run.trainer is None or run.layout is None:
            continue
        old, network = Job(workload=run.workload, cluster=run.cluster, trainer=run.trainer), run.cluster.hardware.network_bandwidth
        cluster = replace(run.cluster, hardware=replace(hardware, network_bandwidth=network))
        new = replace(old, cluster=cluster, trainer=trainer or run.trainer)
        key = (run.workload, run.cluster.num_gpus, run.trainer, network)
        if key not in jobs:
            if len(jobs) == MOST_JOBS:
                continue
            jobs.append(key)
            best.append((_best(old), _best(new)))
        before, after = best[jobs.index(key)]
        steps = (float(estimate_of(job, run.layout).step_time[0]) for job in (old, new))
        found.append(
            Replanned(
                run=run, before=next(steps), after=next(steps), best_before=before, best_after=after,
                command=command(new, files),
            )
        )  # fmt: skip
    return found


def _best(job: Job) -> str:
    try:
        finding = search(job, None, 1)
    except PlannerError:
        return ""
    return layout_text(finding.layouts[0]) if finding.fit else ""


def command(job: Job, files: Sequence[str]) -> str:
    """The command line that plans a job again with a profile, and a trainer, of the user's own."""
    work, name = job.workload, job.model.name
    known = name in library.names("models") and load_model(name) == work.model  # else only the user knows its file
    said = {
        "model": name if known else f"{name}.yaml", "gpus": job.cluster.num_gpus, "hardware": files[0],
        "trainer": files[1] if len(files) > 1 else job.trainer.name,
    }  # fmt: skip
    for field in fields(work):
        if field.name != "model" and getattr(work, field.name) != field.default:
            said[field.name] = getattr(work, field.name)
    return shlex.join(["plan", *(word for flag, value in said.items() for word in (flag_of(flag), str(value)))])
