"""The Python API: what commands and notebooks call. ``import planner`` offers the same names, and imports them when asked.

Keywords are the flags of the command line in Python spelling. Quantities are seconds and bytes; text with a unit
('400 Gb/s', '71GiB') is read where a flag reads it. Whatever cannot be done is a PlannerError whose sentence says why.
"""

from pathlib import Path
from typing import Unpack

from planner.api.answers import (
    Accuracy,
    Changes,
    File,
    Progress,
    accuracy,
    calibrate,
    compare,
    compare_profiles,
    doctor,
    import_config,
    load,
    plot_profile,
    sensitivity,
    show_profile,
    silent,
    what_if,
)
from planner.api.results import Estimate, Exported, Imported, Plan, Plans
from planner.api.shown import Answer, Result
from planner.errors import PlannerError
from planner.keywords import JOB, SEARCHED, Keywords, layout_values, request_fields, require_known
from planner.layout import FIELDS


def plan(*, top: int = 5, progress: Progress = silent, **keywords: Unpack[Keywords]) -> Plans:
    """The ``top`` best plans of a job: ``plan(model="llama-70b", gpus=8, tp=8)``. Fields of a layout that are given stay.

    Empty when nothing fits. Raises PlannerError when the job cannot be read, or no layout of it is legal.
    """
    from planner.api.plans_of import plans_of
    from planner.defaults import Request, resolve
    from planner.search import Pins

    require_known("plan", keywords, (*JOB, *SEARCHED))
    said = {name: value for name, value in request_fields(keywords).items() if value is not None}
    for name, flag in (("model", "--model"), ("num_gpus", "--gpus")):
        if name not in said:
            raise PlannerError(f"which job? {flag} is missing")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 100:
        raise PlannerError(f"top is {top!r}; it must be a whole number from 1 to 100")
    pins = Pins(values=layout_values(keywords))
    return plans_of(resolve(Request(**said)), pins, top, keywords, progress)


def estimate(base: Plan | File | None = None, /, **keywords: Unpack[Keywords]) -> Plan:
    """One explicit layout, priced: ``estimate(model="llama-8b", gpus=8, tp=2, recompute="full")``.

    ``base`` is a plan, or a file of a plan or of layout fields; keywords replace what it says. What is left out follows from
    the rest. Raises PlannerError when something is missing or the layout is not legal.
    """
    from planner.explicit import LayoutFile, explicit_plan, read_layout_file

    require_known("estimate", keywords, (*JOB, *FIELDS))
    file = None
    if isinstance(base, Plan):
        file = LayoutFile(values={name: int(one) for name, one in base.layout.columns().items()}, plan=base.file)
    elif base is not None:
        file = read_layout_file(Path(base))
    return Plan(explicit_plan(file, layout_values(keywords), request_fields(keywords)))


__all__ = [
    "Accuracy", "Answer", "Changes", "Estimate", "Exported", "Imported", "Plan", "PlannerError", "Plans", "Result", "accuracy",
    "calibrate", "compare", "compare_profiles", "doctor", "estimate", "import_config", "load", "plan", "plot_profile",
    "sensitivity", "show_profile", "what_if",
]  # fmt: skip
