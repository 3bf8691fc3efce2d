"""A user's measured runs: tables in the schema of profiles/runs, and training logs, as runs on one hardware profile."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.keywords import layout_values, request_fields
from planner.layout import NAMES
from planner.model import ModelSpec, load_model
from planner.runs import Row, Run, read_rows, share, to_run
from planner.runs.hardware import gpu_profile
from planner.runs.rows import UnsupportedError
from planner.trainer import Trainer
from planner.trainers.logs import Given, is_log, read_log, row_of_log


def read_measured(
    paths: Sequence[Path], hardware: str, *, trainer: Trainer | None = None, given: Given | None = None
) -> list[Run]:
    """The runs of tables (.yaml, or a directory of them) and logs (any other file), on ``hardware`` (name or file).

    ``trainer`` replaces what the framework's name stands for; ``given`` fills what logs leave open. Raises PlannerError.
    """
    profile, given = load_hardware(hardware), given or Given()
    rows: list[tuple[Row, ModelSpec | None]] = []
    logs = [path for path in paths if path.is_file() and is_log(path)]
    seen = Counter(path.stem for path in logs)
    for path in paths:
        if path not in logs:
            rows += [(row, None) for row in read_rows([path])]
            continue
        row = row_of_log(read_log(path), given, where=str(path), gpu=hardware)
        if seen[path.stem] > 1:
            row = replace(row, data={**row.data, "id": str(path)})
        rows.append((row, given.model))
    runs = []
    for row, model in rows:
        check_same_device(row, hardware, profile)
        run = to_run(row, hardware=hardware, model=model)
        runs.append(run if trainer is None or run.unsupported else replace(run, trainer=trainer))
    return share(runs)


def given_of(said: Mapping[str, Any]) -> Given:
    """Keywords of the API as what logs leave open. Raises PlannerError."""
    job, values = request_fields(said), layout_values(said)
    facts = {
        "parallel.gpus": job.get("num_gpus"), "model.seq": job.get("sequence_length"),
        "batch.global": job.get("global_batch_size"),
        "batch.micro": values.get("micro_batch_size"), "precision": job.get("precision"),
        "recompute": NAMES["recompute"][values["recompute"]] if "recompute" in values else None,
    }  # fmt: skip
    facts |= {f"parallel.{name}": values.get(name) for name in ("tp", "pp", "cp", "ep", "vpp", "zero")}
    model = job.get("model")
    return Given(model=load_model(model) if isinstance(model, str) else model, facts=facts)


def check_same_device(row: Row, hardware: str, profile: HardwareProfile) -> None:
    """Raise PlannerError when a run says that it ran on another generation of GPU."""
    text = str(row.hardware["gpu"])
    if text == hardware:
        return
    try:
        stated = load_hardware(gpu_profile(text))
    except (UnsupportedError, PlannerError):
        return  # a device that the library does not know: the user's own profile stands for it
    if stated.arch != profile.arch:
        raise PlannerError(
            f"{row.source}/{row.id} ran on {text} ({stated.arch}), but --hardware {hardware} is a {profile.device} "
            f"({profile.arch}); calibrate each device with its own runs"
        )
