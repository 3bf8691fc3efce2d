"""Questions about plans, profiles and runs: each call gives the numbers of one question with its tables and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.results import Answer, Plan
from planner.units import parse

if TYPE_CHECKING:  # each call imports what it needs
    from planner.questions.compare.numbers import Comparison
    from planner.questions.doctor.numbers import Diagnosis

File = str | PathLike[str]


def load(path: File) -> Plan:
    """The plan of a plan file. Raises PlannerError when it is damaged, or newer than this planner."""
    from planner.plan_file import load_plan

    return Plan(load_plan(Path(path)), name=str(path))


def loaded(one: Plan | File) -> Plan:
    """A plan, or that of a plan file."""
    return one if isinstance(one, Plan) else load(one)


def compare(*plans: Plan | File) -> Answer[Comparison]:
    """Plans, or plan files, with the first: what differs, and what each difference does to time and memory.

    Raises PlannerError for fewer than two plans, and for one that no longer prices as it says.
    """
    from planner.questions.compare.numbers import compare as compare_plans
    from planner.questions.compare.numbers import to_dict
    from planner.questions.compare.show import print_comparison

    read = [loaded(one) for one in plans]
    names = [one.name or f"plan {number}" for number, one in enumerate(read, 1)]
    found = compare_plans([one.file for one in read], names)
    return Answer(found, to_dict(found), lambda console: print_comparison(console, found))


def doctor(
    plan: Plan | File,
    *,
    measured: str | float | None = None,
    memory: str | float | None = None,
    memory_kind: str = "device",
) -> Answer[Diagnosis]:
    """What was measured against a plan, and what would explain the gap.

    ``measured``: time of one optimizer step, '14.2s' or seconds. ``memory``: peak of one GPU, '71GiB' or bytes, of the
    ``memory_kind`` device, reserved or allocated. Raises PlannerError.
    """
    from planner.questions.doctor.numbers import diagnose, to_dict
    from planner.questions.doctor.show import print_diagnosis

    file = loaded(plan).file
    seconds = parse(measured, "seconds", what="--measured") if isinstance(measured, str) else measured
    size = parse(memory, "bytes", what="--memory") if isinstance(memory, str) else memory
    found = diagnose(file, seconds, size, memory_kind)
    return Answer(found, to_dict(found), lambda console: print_diagnosis(console, file, found))


def accuracy(paths: Sequence[File] | None = None) -> Answer[dict[str, Any]]:
    """Published runs, or those of files and folders, predicted; errors are predicted / measured - 1. Raises PlannerError."""
    from planner.questions.accuracy.numbers import accuracy as report
    from planner.questions.accuracy.show import print_accuracy

    found = report(None if paths is None else [Path(one) for one in paths])
    return Answer(found, found, lambda console: print_accuracy(console, found))
