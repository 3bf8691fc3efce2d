"""A recipe of TRL that its project starts with a program: what the program makes of its settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.reading.file_readers import PROGRAM
from planner.trainers.reading.given import Given, OtherStepError, Question
from planner.trainers.reading.guides import Guide, started
from planner.trainers.reading.modules import own_model
from planner.trainers.reading.own_code import take_program
from planner.trainers.reading.own_programs import is_of_unsloth, kind_of
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.running import WithModules
from planner.trainers.reading.script_parts import derived_from
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.training_arguments import HABITS, MODELS, TRL, Habits
from planner.trainers.reading.training_scripts import TRAINERS
from planner.trainers.reading.unsloth_parts import scores_of_unsloth
from planner.trainers.reading.values import read_text


def through_program(path: Path, data: Mapping[str, Any], said: Given) -> tuple[Settings, Habits, int | None, tuple[str, ...]]:
    """(Settings of a recipe as the program that starts it takes them, its habits, its GPUs, notes); those of TRL's own scripts
    where none is known that does anything else."""
    plain = Settings(path, data, said=said)
    found, told = _program(path, plain, said)
    file = program_file(path, found.program) if found is not None else None
    if file is None:
        return plain, TRL, said.num_gpus, told
    given = Settings(path, data, said=said)
    before = len(said.questions)
    try:
        take_program(given, path, str(file), said.num_gpus)
    except OtherStepError:
        raise
    except PlannerError as error:
        del said.questions[before:]
        return plain, TRL, said.num_gpus, (*told, f"its program {file.name} is not read: {str(error).rpartition(': ')[2]}")
    kind, told = kind_of(path, str(file), given), (*told, *of_own_model(path, str(file)))
    if found is not None and found.document and not told and HABITS[kind] != TRL:
        told = (f"read as {file.name} takes it, with which a command in {found.document} starts it",)
    if kind != "unsloth":
        return given, HABITS[kind], said.num_gpus, told
    scores = scores_of_unsloth([read_text(path), read_text(file)], given.label(*MODELS))
    return given, HABITS[kind], said.num_gpus or 1, (*told, *scores)


def _program(path: Path, given: Settings, said: Given) -> tuple[Guide | None, tuple[str, ...]]:
    """(The program that starts a recipe, a note where that is not sure)."""
    found, likely = started(path)
    if (named := said.setting(PROGRAM)) is not None:
        if program_file(path, named) is None:
            raise PlannerError(f"--set {PROGRAM}={shown(named)}: there is no such file near {path}")
        return Guide(file="", document="", counts={}, program=named), ()
    if found is not None or not likely:
        return found, ()
    own = [one for one in likely if _is_own(program_file(path, one))]
    if len(likely) == 1 and own:
        return likely[own[0]], (f"as {likely[own[0]].document} starts other recipes of this folder with {Path(own[0]).name}",)
    if own:
        about = "which program starts it: its project starts other recipes of its folder with these"
        given.ask(Question(name=PROGRAM, about=about, choices=tuple(_short(path, one) for one in likely)))
    return None, ()


def _short(path: Path, program: str) -> str:
    """A program as it is named from a folder above a recipe."""
    return next((str(Path(program).relative_to(one)) for one in path.resolve().parents if one in Path(program).parents), program)


def _is_own(file: Path | None) -> bool:
    """Whether a program does something else than TRL's own: it loads by unsloth, or makes a trainer of its own."""
    if file is None or is_of_unsloth(file):
        return file is not None
    try:
        script = WithModules(file, Given())
    except PlannerError:
        return False
    return bool(derived_from(script, TRAINERS).keys() - {*TRAINERS})


def of_own_model(path: Path, program: str) -> tuple[str, ...]:
    """Note about a program that loads a class of its project for the model."""
    file = program_file(path, program) if program else None
    if file is None or (named := own_model(file)) is None:
        return ()
    what = "a class of its project: what its layers keep that transformers' do not is not in the plan, which may be too low"
    return (f"{file.name} loads {named}, {what}",)
