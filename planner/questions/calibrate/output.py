"""What a calibration writes: a hardware profile that extends the base, and a trainer that extends its base when it moved.

Both are small files: the base keeps its curves, ``scale`` multiplies what the machine achieves. Where each number comes from
stands next to it.
"""

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.questions.calibrate.numbers import Calibration, Moved
from planner.questions.calibrate.replan import Replanned
from planner.runs import Run
from planner.trainer import Trainer

DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A calibration with the files that hold it, and what it changes for validated plans."""

    base: str
    """Name or file of the profile that was calibrated."""
    calibration: Calibration
    files: tuple[Path, ...]
    """The profile, and the trainer where its factors moved."""
    plans: tuple[Replanned, ...]
    """Validated plans, priced and searched again."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json; errors are predicted / measured - 1."""
        rows = [
            {"source": one.run.source, "id": one.run.id, "of": one.fits, "before": one.before, "after": one.after,
             "held_out": one.held_out}
            for one in self.calibration.checked
        ]  # fmt: skip
        more = {"files": list(map(str, self.files)), "errors": rows, "plans": [one.to_dict() for one in self.plans]}
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
    data: dict[str, Any] = {"extends": _extends(base or trainer.name), "title": f"{trainer.title}, calibrated"}
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
        "kept_at_1": {one.factor.key: one.reason for one in calibration.kept},
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
