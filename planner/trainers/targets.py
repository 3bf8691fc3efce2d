"""Targets of ``plan export`` by name: what a trainer's folder declares, with its exporter."""

from planner import library
from planner.errors import PlannerError, UnknownNameError, listed
from planner.trainer import known_as
from planner.trainers import having, load
from planner.trainers.bundle.launchers import LAUNCHERS
from planner.trainers.bundle.target import Target

TARGETS = tuple(having("export"))
"""Names after --to."""


def load_target(name: str) -> Target:
    """The target of a name, or of another name of its trainer. Raises PlannerError."""
    if name in LAUNCHERS:
        raise PlannerError(f"{name} is a launcher: add --launcher {name}, and give --to a trainer ('plan export --list')")
    name = name if name in TARGETS else known_as(name)
    if name not in TARGETS and name in library.names("trainers"):
        taken = [one for one in TARGETS if name in (having("export")[one].TRAINERS or ())]
        if taken:
            raise PlannerError(f"no target is called '{name}', which is a trainer; its plans are written for {listed(taken)}")
        serving = [one for one in TARGETS if not having("export")[one].TRAINERS]
        raise PlannerError(
            f"no target writes the training of trainer {name}, only {listed(serving)} to serve its model; 'plan export --list' has "
            "the trainers that are written, and plan estimate PLAN --trainer NAME prices the plan for one of them"
        )
    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    facts, exporter = having("export")[name], load(name, "export")
    return Target(
        name=name, title=facts.TITLE, trainers=facts.TRAINERS or tuple(library.names("trainers")),
        versions=facts.VERSIONS, package=facts.PACKAGE, level=facts.LEVEL,
        writes=getattr(facts, "WRITES", ()), options=getattr(facts, "OPTIONS", ()),
        refusals=exporter.refusals, render=exporter.render,
    )  # fmt: skip
