"""What a calibration writes, and what it changes for the plans whose validations it was fitted on.

A hardware profile extends the base, and a trainer its base when it moved. Both are small files: the base keeps its curves,
``scale`` multiplies what the machine achieves. Where each number comes from stands with it.
"""

import datetime
import math
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.hardware import HardwareProfile
from planner.keywords import flag_of
from planner.model import load_model
from planner.questions.calibrate.numbers import Calibration, Moved
from planner.questions.calibrate.traced_runs import TracedRun
from planner.record import record
from planner.rules import Job
from planner.runs import Run
from planner.search import search
from planner.timeline.priced_plan import estimate_of
from planner.trainer import Trainer

DIGITS = 4
MOST_JOBS = 4
"""Jobs that are searched again: each takes up to seconds, twice."""


@record
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
        "trainer": files[1] if len(files) > 1 else job.trainer.choices.written or job.trainer.name,
    }  # fmt: skip
    for field in fields(work):
        if field.name != "model" and getattr(work, field.name) != field.default:
            said[field.name] = getattr(work, field.name)
    return shlex.join(["plan", *(word for flag, value in said.items() for word in (flag_of(flag), str(value)))])


@record
class Calibrated:
    """A calibration with the files that hold it, and what it changes for validated plans."""

    base: str
    """Name or file of the profile that was calibrated."""
    calibration: Calibration
    files: tuple[Path, ...]
    """The profile, and the trainer where its factors moved."""
    plans: tuple[Replanned, ...]
    """Validated plans, priced and searched again."""
    traced: tuple[TracedRun, ...] = ()
    """Plans whose traces were read."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json; errors are predicted / measured - 1."""
        rows = [
            {"source": one.run.source, "id": one.run.id, "of": one.fits, "before": one.before, "after": one.after,
             "held_out": one.held_out}
            for one in self.calibration.checked
        ]  # fmt: skip
        more: dict[str, Any] = {"files": list(map(str, self.files)), "errors": rows, "plans": [one.to_dict() for one in self.plans]}
        if self.traced:
            more["traces"] = [one.to_dict() for one in self.traced]
        return {**provenance(self.calibration, self.base), **more}


def write(
    calibration: Calibration, base: str, trainer: Trainer | None, output: Path, *, trainer_base: str | None = None
) -> list[Path]:
    """Write the profile, and ``<output>.trainer.yaml`` when factors of the trainer moved; each whole or not at all.

    ``base`` is the name or file of the profile that was calibrated, ``trainer_base`` that of the trainer. Raises
    PlannerError, and then nothing is written.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise PlannerError(f"{output}: a profile is a .yaml file; write --output {output}.yaml")
    texts = {output: profile_text(calibration, base, output)}
    if trainer is not None and any(one.factor.of == "trainer" for one in calibration.moved):
        texts[output.with_suffix(".trainer.yaml")] = trainer_text(calibration, trainer, trainer_base)
    for path, text in texts.items():
        library.write_whole(path, text)
    return list(texts)


def profile_text(calibration: Calibration, base: str, output: Path) -> str:
    """The YAML of the calibrated profile; refuses what ``load_hardware`` would refuse."""
    scale = {one.factor.key: _rounded(one.value) for one in calibration.moved if one.factor.of == "hardware"}
    data: dict[str, Any] = {"extends": _extends(base), "name": output.stem}
    data |= {"scale": scale} if scale else {}
    data["calibration"] = provenance(calibration, base)
    HardwareProfile.from_dict(dict(data), where=str(output))
    return f"# {base} as calibrated with measured runs; written by plan calibrate.\n{library.dump_yaml(data)}"


def trainer_text(calibration: Calibration, trainer: Trainer, base: str | None = None) -> str:
    """The YAML of the calibrated trainer: what moved, over the trainer that it extends."""
    name = base or trainer.choices.written or trainer.name
    data: dict[str, Any] = {"extends": _extends(name), "title": f"{trainer.title}, calibrated"}
    said = []
    for one in calibration.moved:
        if one.factor.of == "trainer":
            value = _rounded(trainer.fact(one.factor.key) * one.value)
            data[one.factor.key] = f"{value:g} s" if one.factor.key in ("host_time", "step_overhead") else value
            said.append(f"{one.factor.key} times {one.value:.3g} ({one.low:.3g} to {one.high:.3g})")
    names = ", ".join(dict.fromkeys(one.run.source for one in calibration.checked))
    data["source"] = f"plan calibrate, {datetime.date.today().isoformat()}, {names}: {', '.join(said)}"
    return f"# {trainer.name} as calibrated with measured runs; written by plan calibrate.\n{library.dump_yaml(data)}"


def provenance(calibration: Calibration, base: str) -> dict[str, Any]:
    """Where the factors come from: base, date, runs, each factor with its interval, errors before and after."""
    files: dict[str, dict[str, None]] = {}
    for one in calibration.checked:
        files.setdefault(one.run.source, {})[one.run.id] = None
    errors = {
        fits: {name: round(value, DIGITS) for name, value in found.items()}
        for fits in ("time", "memory")
        if (found := calibration.medians(fits)) is not None
    }
    return {
        "base": base,
        "date": datetime.date.today().isoformat(),
        "runs": {source: list(ids) for source, ids in files.items()},
        "factors": {one.factor.key: _factor(one) for one in calibration.moved},
        "kept_at_1": dict(calibration.kept),
        "median_error": errors,
    }


def _factor(one: Moved) -> dict[str, Any]:
    data: dict[str, Any] = {"times": _rounded(one.value), "interval_90": [_rounded(one.low), _rounded(one.high)]}
    if not math.isnan(one.before):
        data |= {"was": _rounded(one.before), "is": _rounded(one.after)}
    return {**data, "what": one.factor.what}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _extends(base: str) -> str:
    """A library name as it is, a file by its whole path: the new file may stand anywhere."""
    return str(Path(base).resolve()) if Path(base).suffix in (".yaml", ".yml") else base


def shared_trainer(runs: Sequence[Run]) -> Trainer | None:
    """The trainer that all supported runs have in common, as it was set up for the first of them; None when they differ."""
    found = [run.trainer for run in runs if run.trainer is not None]
    return found[0] if found and len({one.name for one in found}) == 1 else None
