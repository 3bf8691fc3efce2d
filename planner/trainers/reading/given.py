"""What a user says beside the file: flags, values of variables and keys; and what is still to be asked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NoReturn

import yaml

from planner import library
from planner.errors import PlannerError, nearest_first, shown
from planner.model import ModelSpec, load_model
from planner.record import record

ARGUMENTS = "ARGS"
"""Setting that holds the words a script is started with."""
CONFIG_FILE = "config_file"
"""Setting that names the file of settings that a program reads."""
WHICH_TRAINING = "which_training"
"""The setting that says by its number which of several trainings of a script is meant."""
NOT_KEYS = ("gradient_checkpointing", "config", ARGUMENTS, CONFIG_FILE, WHICH_TRAINING)
"""Settings that are no keys of a configuration: what stands in the script, and which function of a module is meant."""
MOST_SHOWN = 8
"""Names that a sentence lists."""
MOST_ASKED = 24
"""Questions of one sentence: what it leaves out would be asked in a second one."""


@record
class Question:
    """What decides time or memory and stands nowhere."""

    name: str
    """What answers it: a variable or key for --set, or a flag with its dashes."""
    about: str = ""
    """What it decides, for people."""
    choices: tuple[str, ...] = ()
    """Values that the file knows."""

    def __str__(self) -> str:
        """As a sentence asks it."""
        known = [one for one in dict.fromkeys(self.choices) if one]
        few = known if len(known) < 2 * MOST_SHOWN else [*known[:MOST_SHOWN], "..."]
        values = "|".join(few) if few else "VALUE"
        say = self.name if self.name.startswith("-") else f"--set {self.name}={values}"
        return f"{say} ({self.about})" if self.about else say


def setting_of_a_fork(name: str, trainer: str, without: str = "false") -> Question:
    """What is asked about a setting that nobody here knows and that may decide memory or degrees; ``without``: its value in a job
    that does not have it."""
    about = f"no setting of {trainer} known here, so one of a fork; {without} imports the job without it"
    return Question(name=name, about=about, choices=(without,))


class OpenQuestionsError(PlannerError):
    """A configuration that needs answers before it is a plan."""

    def __init__(
        self, where: str, questions: Sequence[Question], refused: Sequence[str] = (), settles: Sequence[Question] = ()
    ) -> None:
        """``refused``: sentences that say what is not priced, whose words ``settles`` asks for."""
        self.questions = (*settles, *questions)
        said = "; ".join(str(one) for one in questions[:MOST_ASKED])
        more = f"; and {len(questions) - MOST_ASKED} more" if len(questions) > MOST_ASKED else ""
        asked = f"{where} leaves open what decides time or memory; say {said}{more}" if questions else ""
        super().__init__("; ".join([*refused, *[asked] * bool(asked)]))


class OtherStepError(PlannerError):
    """A job whose step is another one than a language model's or DPO's, whoever reads it."""


class OtherMachineError(PlannerError):
    """A job for another machine than GPUs: said before anything is asked, as no answer to a question mends it."""


@record
class Given:
    """What a user says; None = not said."""

    num_gpus: int | None = None
    model: str | ModelSpec | None = None
    """Preset, file or hub id, or the model itself."""
    sequence_length: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values of variables and keys (--set), as text."""
    used: set[str] = field(default_factory=set)
    """Settings that a reader has taken."""
    questions: list[Question] = field(default_factory=list)
    """What a reader has met that is still to be asked, so that one sentence asks for all of it."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """Values that a script itself has for a variable that it leaves open."""
    trainings: list[str] = field(default_factory=list)
    """Commands of a script that train, in the order of the script, where it has several."""

    def setting(self, name: str) -> str | None:
        """The text that is given for a name, which counts as taken then."""
        if name in self.settings:
            self.used.add(name)
        return self.settings.get(name)

    def with_settings(self, settings: Mapping[str, str]) -> "Given":
        """The same with other settings; what is taken and asked is remembered together."""
        return replace(self, settings=settings)

    def spec(self) -> ModelSpec | None:
        """The model that is named. Raises PlannerError for one that is not known."""
        return load_model(self.model) if isinstance(self.model, str) else self.model

    def filled(self, data: dict[str, Any]) -> dict[str, Any]:
        """Nested data with the keys replaced that are given: 'a.b', or the last part alone where one key only is called so.

        Keys that the data does not have are added where their section is there, or where they have no dot. Values are read as
        YAML reads them: numbers, true, null.
        """
        result = _copied(data)
        for name in (one for one in self.settings if one not in NOT_KEYS):
            for place in _places(result, name.split(".")):
                section = result
                for part in place[:-1]:
                    section = section[part]
                section[place[-1]] = value_of(self.settings[name])
                self.used.add(name)
        return result

    def require_used(self, where: str, known: Iterable[str] = ()) -> None:
        """Raises PlannerError for a setting that no reader has taken."""
        for name in self.settings:
            if name not in self.used:
                near = nearest_first(name, dict.fromkeys(known))[:MOST_SHOWN]
                there = f"; it has {', '.join(near)}" if near else ""
                raise PlannerError(f"--set {name}: {where} has no variable or setting of that name{there}")


def value_of(text: str) -> Any:
    """A value as YAML writes it; a text where it is nothing else."""
    if len(text) > 200 or (text.startswith(("[", "{", "&", "*", "!")) and text.count("[") + text.count("{") > 8):
        return text
    try:
        return yaml.safe_load(text)
    except library.BROKEN:
        return text


def parse_settings(given: Mapping[str, str] | Sequence[str] | str) -> dict[str, str]:
    """NAME=VALUE texts as a mapping. Raises PlannerError."""
    if isinstance(given, Mapping):
        return {str(name): str(value) for name, value in given.items()}
    found = {}
    for one in [given] if isinstance(given, str) else given:
        name, mark, value = one.partition("=")
        if not mark or not name.strip():
            raise PlannerError(f"--set {shown(one)}: write it as NAME=VALUE, like --set PP_SIZE=8")
        found[name.strip().lstrip("-").lstrip("$")] = value.strip()
    return found


MODEL = Question(name="--model NAME", about="which model it trains")
MODEL_OF_FILE = replace(MODEL, about="only where that file names a checkpoint of your own")
FIRST = (CONFIG_FILE, "accelerate", "--gpus N", MODEL.name)
"""What is asked for where a file is not there that holds most of the settings; the rest may stand in it."""


def ask(where: str, questions: Sequence[Question]) -> NoReturn:
    """Raises OpenQuestionsError."""
    waits = any(one.name == CONFIG_FILE for one in questions)
    first = [MODEL_OF_FILE if one == MODEL else one for one in questions if one.name in FIRST]
    raise OpenQuestionsError(where, first if waits else questions)


def _copied(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in data.items()}


def _places(data: Mapping[str, Any], parts: list[str]) -> list[list[str]]:
    """Where a key stands: exactly there, or the one key of that name; where it may be added; else nowhere."""
    section: Any = data
    for part in parts[:-1]:
        section = section.get(part) if isinstance(section, dict) else None
    if isinstance(section, dict) and (len(parts) > 1 or parts[0] in section):
        return [parts]
    if len(parts) > 1:
        return []
    found: list[list[str]] = []
    waiting: list[tuple[list[str], Mapping[str, Any]]] = [([], data)]
    while waiting and len(found) < 2:
        prefix, section = waiting.pop()
        found += [[*prefix, key] for key in section if key == parts[0]]
        waiting += [([*prefix, key], value) for key, value in section.items() if isinstance(value, dict)]
    return found if len(found) == 1 else [] if found else [parts]


def note_of_several(said: Given) -> tuple[str, ...]:
    """Note that a script has several commands that train."""
    which = said.settings.get(WHICH_TRAINING)
    what = "the first" if which is None else f"number {which}"
    return (f"of {len(said.trainings)} commands that train, {what} is read",) if len(said.trainings) > 1 else ()
