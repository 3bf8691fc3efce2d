"""RL plans as files: what ``plan export``, ``plan import`` and ``plan doctor`` do with them, and logs of RL frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.results import Answer, Exported, File
from planner.keywords import require_known
from planner.units import parse_count

if TYPE_CHECKING:
    from planner.rl.phase_factors import PhaseFit
    from planner.rl.readback.rl_found import RlRead
    from planner.rl.rl_doctor import RlComparison
    from planner.rl.rl_log import RlLog


def export_rl_file(plan: File, to: str, output: File, *, force: bool = False) -> Exported:
    """Write an RL plan as a folder for one of the frameworks. Raises PlannerError when it cannot run there."""
    from planner.rl.export.framework_check import check_export
    from planner.rl.export.rl_folder import export_rl
    from planner.rl.rl_plan import load_rl_plan

    read = load_rl_plan(Path(plan))
    made = export_rl(read, to, Path(output), force=force)
    return Exported.of(read, to, output, made, lambda: check_export(made, Path(output)).text())


def read_rl_log(path: File, framework: str = "") -> RlLog:
    """Phase times of every step of a log of verl, NeMo RL, OpenRLHF, TRL, slime, AReaL or prime-rl. Raises PlannerError."""
    from planner.rl import rl_log

    return rl_log.read_rl_log(Path(path), framework)


def doctor_rl(plan: File, measured: File, framework: str = "") -> Answer[RlComparison]:
    """The phases of a log compared with an RL plan: the largest gap, and what usually makes it. Raises PlannerError."""
    from planner.questions.measured.show_rl import print_rl_comparison
    from planner.rl.rl_doctor import compare_log
    from planner.rl.rl_plan import load_rl_plan

    return Answer(compare_log(load_rl_plan(Path(plan)), read_rl_log(measured, framework)), print_rl_comparison)


def is_rl_configuration(path: File, format: str | None = None) -> bool:
    """Whether a file is read as an RL plan: by ``--from rl:NAME``, else where its framework trains by RL alone."""
    from planner.rl.readback.rl_reading import is_rl_configuration as is_one

    return is_one(Path(path), format)


def import_rl(
    file: File,
    *,
    format: str | None = None,
    settings: Mapping[str, str] | Sequence[str] = (),
    **said: Any,
) -> RlRead:
    """A configuration of an RL framework as an RL plan, priced, with what was taken for what.

    ``format``: a framework, or rl:NAME; None = by the file's content. Keywords: model, hardware, gpus, answers, prompt_length.
    Raises PlannerError with what decides time or memory and is said nowhere: the length of answers above all, of which
    configurations have the limit alone.
    """
    from planner.rl.readback.rl_found import RlSaid
    from planner.rl.readback.rl_reading import priced, read_rl
    from planner.trainers.reading.given import Given, parse_settings

    require_known("import_rl", said, ("model", "hardware", "gpus", "answers", "prompt_length"))
    prompt = said.get("prompt_length")
    if isinstance(prompt, str):
        said["prompt_length"] = float(parse_count(prompt, what="the length of prompts")[0])
    return priced(read_rl(Path(file), RlSaid(**said), Given(settings=parse_settings(settings)), format))


def calibrate_rl(runs: Sequence[tuple[File, File]], *, output: File) -> Answer[PhaseFit]:
    """Factors of the phases of RL from logs of one's own runs, written to ``output`` for ``plan rl --calibrated``.

    ``runs``: priced RL plans with the logs of their runs, two or more of one framework and kind of GPU. Raises PlannerError, and
    then nothing is written.
    """
    from planner.questions.calibrate.rl_show import print_phase_fit
    from planner.rl.phase_factors import fit_factors, write_factors
    from planner.rl.rl_doctor import compare_log
    from planner.rl.rl_plan import load_rl_plan

    compared = [(Path(log).name, compare_log(load_rl_plan(Path(plan)), read_rl_log(log))) for plan, log in runs]
    found = fit_factors(compared)
    write_factors(found.found, Path(output))
    return Answer(found, print_phase_fit)
