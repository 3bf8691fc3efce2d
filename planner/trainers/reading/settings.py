"""Settings of a file by name, with types checked where they are read; what nobody read is listed."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from planner import library
from planner.errors import PlannerError, shown
from planner.trainers.reading.given import CONFIG_FILE, Given, Question, ask, value_of
from planner.trainers.reading.shell.text import CLOSE, gap, is_open, roots, shown_text
from planner.trainers.reading.twice import given_twice
from planner.trainers.reading.values import MOST, Written, json_mapping, percent, read_text, whole_number

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null", "")


SWITCHED = ("true", "false")
"""Answers of a switch."""
_SWITCH = re.compile(r"(use|with|is|do|enable|no)_(?!.*(type|dtype|name|mode|method)$)", re.IGNORECASE)
"""Variables that are on or off, whatever setting they decide."""
_PLACEHOLDER = re.compile(
    r"(TO_?BE_?(FILLED|SET)|TODO|FIXME|X{2,80}|YOUR_\w{1,80}|<[^<>]{1,80}>|\{\{ ?\w{1,80} ?\}\}|\.{3,80})", re.IGNORECASE
)
"""What people leave to be filled in."""


class Settings:
    """A mapping of settings that remembers which were asked for; sections are settings too, and share that memory."""

    def __init__(
        self, path: Path, data: Mapping[str, Any], place: str = "", asked: set[str] | None = None, said: Given | None = None
    ) -> None:
        self.path, self.data, self.place, self.said = path, data, place, said
        self.usual: Mapping[str, Any] = {}
        """What the program takes where nothing is said: answers too, and never listed as not read."""
        self.asked: set[str] = set() if asked is None else asked
        self.late: list[Question] = []
        """What its program leaves open, to be asked where nothing refuses the job."""
        self.one_gpu = False
        """Its program puts the whole model on one GPU by its number."""
        self.program_notes: tuple[str, ...] = ()
        """What its program does that is not read, as notes."""
        self.built = ""
        """The step of the trainer that its program builds, lm or dpo; empty = not known."""
        self.attention_put: bool | None = None
        """Whether its program puts flash attention into its model's class under its options; None = its text says it, or not."""
        self.calls: frozenset[str] | None = None
        """Classes of trainers that its program builds under its options, and unsloth's models that it loads; None = not known."""

    def ask(self, question: Question) -> None:
        """Leaves a question with the others, so that one sentence asks for all; raises OpenQuestionsError where nobody collects."""
        if self.said is None:
            ask(str(self.path), [question])
        there = next((i for i, one in enumerate(self.said.questions) if one.name == question.name), None)
        if there is None:
            self.said.questions.append(question)
        elif question.choices and not self.said.questions[there].choices:  # who asks again knows its answers
            self.said.questions[there] = question

    def _said(self, name: str) -> str | None:
        """What the user says for a name."""
        return self.said.setting(name) if self.said is not None and name != CONFIG_FILE else None

    def where(self, name: str) -> str:
        """File and setting, for messages."""
        return f"{self.path}: {self.place}{name}"

    def get(self, name: str, default: Any = None, choices: tuple[str, ...] = ()) -> Any:
        """A value; a missing one, null and an empty text are the default. Dots lead into sections. ``choices`` of one that is
        asked for."""
        head, _, rest = name.partition(".")
        if rest and name not in self.data:
            return self.section(head).get(rest, default, choices)
        self.asked.add(f"{self.place}{name}")
        value = self.data.get(name, self.usual.get(name))
        waits = roots(value) if isinstance(value, str) else []
        if len(waits) == 1 and value == gap(waits) and (text := self._said(waits[0])) is not None:
            value = value_of(text)  # of a keyword that has another name here: r of lora_r
        if isinstance(value, str) and is_open(value):
            for one in roots(value) or (f"{self.place}{name}",):
                about = "" if one == f"{self.place}{name}" else f"of {self.place}{name}"
                about = "YAML, JSON or TOML that its program reads" if one == CONFIG_FILE else about
                known = tuple(self.said.choices.get(one, ())) if self.said else ()
                usual = choices if value == gap([one]) and one != CONFIG_FILE else ()
                usual = SWITCHED if usual and _SWITCH.match(one) else usual
                self.ask(Question(name=one, about=about, choices=known or usual))
            value = None
        return default if value is None or value == "" else value

    def first(self, *names: str, default: Any = None) -> Any:
        """The first of the settings that has a value; all of them count as read."""
        found = [self.get(name) for name in names]
        return next((value for value in found if value is not None), default)

    def label(self, *names: str) -> str:
        """The name of a model: of a path with unknown folders its end, '' where nothing is said or it is open."""
        for name in names:
            section, _, last = name.rpartition(".")
            part = self.section(section) if section and "." not in section else self
            value = part.data.get(last if part is not self else name)
            if isinstance(value, str) and is_open(value) and "/" in value and not is_open(value.rstrip("/").rpartition("/")[2]):
                part.asked.add(f"{part.place}{last}")
                cached = re.search(r"models--[^/]+/snapshots/[^/]+", value)  # of the hub's cache
                return cached[0] if cached else value.rstrip("/").rpartition("/")[2]
            if isinstance(value, str) and is_open(value):
                part.asked.add(f"{part.place}{last}")
                continue
            if (found := self.get(name)) is not None:
                return str(found)
        return ""

    def flag(self, name: str, default: bool = False) -> bool:
        """Yes or no. Raises PlannerError."""
        value = self.get(name, choices=SWITCHED)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        text = str(value).lower()
        if text not in _TRUE + _FALSE and self.said is not None:  # a word of the program's own: asked with all else that is open
            self.ask(Question(name=f"{self.place}{name}", about=f"it is {shown(value)}", choices=SWITCHED))
            return default
        if text not in _TRUE + _FALSE:
            raise PlannerError(f"{self.where(name)} is {shown(value)}; it must be true or false")
        return text in _TRUE

    def number(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int | None:
        """A whole number, also one written as text or as 1e3. Raises PlannerError."""
        value = self.get(name, default)
        if isinstance(value, str) and _PLACEHOLDER.fullmatch(value):
            self.ask(Question(name=f"{self.place}{name}", about=f"it is {value}"))
            value = default
        if isinstance(value, str) and re.fullmatch(r"-?\d[\d_]{0,15}", value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return None if value is None else whole_number(value, self.where(name), least=least, most=most)

    def above_zero(self, name: str, default: float = 0.0) -> bool:
        """Whether a share, of dropout say, is more than none. Raises PlannerError."""
        return percent(self.get(name, default), self.where(name)) > 0

    def size(self, name: str, default: int = 1, least: int = 1) -> int:
        """A whole number that has a default."""
        found = self.number(name, default, least)
        return default if found is None else found

    def section(self, name: str) -> "Settings":
        """A section, empty where it is missing. Raises PlannerError for anything else."""
        usual = self.usual.get(name)
        value = self.data.get(name, usual if isinstance(usual, Mapping) else None)
        if value is not None and not isinstance(value, Mapping):
            raise PlannerError(f"{self.where(name)} is {shown(value)}; it must be a section of settings")
        return Settings(self.path, value or {}, f"{self.place}{name}.", self.asked, self.said)

    def choice(self, name: str, known: Mapping[str, Any], default: str) -> Any:
        """What a word stands for. Raises PlannerError with the words that are known."""
        word = str(self.get(name, default))
        found = {one.lower(): value for one, value in known.items()}
        if word.lower() not in found:
            raise PlannerError(f"{self.where(name)} is {shown(word)}; a plan knows {', '.join(known)}")
        return found[word.lower()]

    def left(self) -> Iterator[str]:
        """Settings that nobody asked for, each with its value; one that is null or false changes nothing."""
        for key, value in self.data.items():
            name = f"{self.place}{key}"
            if isinstance(value, Mapping) and name not in self.asked:
                yield from Settings(self.path, value, f"{name}.", self.asked, self.said).left()
            elif name not in self.asked and value not in (None, "", False, {}, []):
                yield f"{shown_text(name)} = {shown(shown_text(value) if isinstance(value, str) else value)}"


def parsed(text: str) -> Any:
    """The value of a word on a command line: a number, true, a list in JSON, else the text itself."""
    if not re.fullmatch(r"[\w.+-]+|[\[{].*[\]}]", text, re.DOTALL):
        return text
    try:
        value = yaml.safe_load(text)
    except library.BROKEN:
        return text
    if value is None:
        return None
    return value if isinstance(value, bool | int | float | str | list | dict) else text


JSON = (".json", ".conf", ".config", ".jsonc")
"""Endings of files that hold JSON."""


TWICE = "of keys that are given twice the last counts"
"""Under it the names of such keys are listed with what is not read: PyYAML, with which trainers read such files, says nothing."""
_NO_MATTER = re.compile(
    r"learning_rate|lr\w*|weight_decay|warmup\w*|num_(train_)?epochs|max_steps|seed|(val|eval|save|saves|logging|wandb|hub)_\w+"
    r"|output_dir|run_name|report_to|push_to_hub|(special_tokens|(test_)?datasets?)\b.*|dataset_\w+|train_on_inputs|strict|debug"
    r"|early_stopping_\w+|resume_from_\w+|auto_resume_\w+|local_rank|loss_watchdog_\w+|overwrite_\w+|preprocessing_num_workers"
)
"""Keys that change neither time nor memory: of others one value is meant, and which is not said."""


def file_settings(path: Path, what: str, last: bool = False) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; ``what`` it should be; ``last``: of any key that is given twice the last counts, as its
    reader is known to have it. Raises PlannerError."""
    if path.suffix.lower() in JSON:
        return json_mapping(path, read_text(path), what)
    try:
        return library.parse_yaml(path.text, str(path)) if isinstance(path, Written) else library.read_yaml(path)
    except PlannerError as error:
        keys = given_twice(read_text(path)) if "is given twice" in str(error) else []
        if keys and (last or all(_NO_MATTER.fullmatch(one) for one in keys)):
            return {**library.parse_yaml(read_text(path), str(path), last=True), TWICE: ", ".join(keys)}
        place = r"\{\w{1,80}\}[^\s{}]{1,300}|\{\{ ?\w{1,80} ?\}\}[^\s{}]{0,300}"
        text = re.sub(rf"^([ ]*[\w.-]{{1,80}}:[ ]+)({place})[ ]*$", r"\1'\2'", read_text(path), flags=re.MULTILINE)
        return library.parse_yaml(text, str(path))  # a place that is left to be filled in, without quotes


def rooted(name: str) -> str:
    """A path whose root nobody here knows, like $HOME/job/config.yaml, as one of the author's machine: found by its end."""
    return re.sub(f".*{CLOSE}/+", "/", name)


def beside(path: Path, name: str, endings: tuple[str, ...] = (*JSON, ".yaml", ".yml")) -> Path | None:
    """A file that another one names: from its folder or one above, by the end of a path on the author's machine, or of the same
    name beside it; None = not there."""
    asked = Path(name)
    if len(name) > 500 or "\0" in name:
        return None
    folder = path.resolve().parent
    above = (folder, *list(folder.parents)[:8])
    rooted = asked.is_absolute() or name.startswith("~")
    ends = [Path(*asked.parts[one:]) for one in range(1, len(asked.parts) - 1)] if rooted else [asked]
    places = [*([asked] if rooted else ()), *(one / end for end in ends for one in above)]
    for place in [*places, folder / asked.name]:
        if library.is_file(place) and place.suffix.lower() in endings:
            return place
    return None


def below(path: Path, name: str) -> Path | None:
    """The one file of that name in a folder next to a script, which may change to it first."""
    if Path(name).is_absolute() or ".." in Path(name).parts or len(name) > 200 or "\0" in name:
        return None
    folders = islice((one for one in path.resolve().parent.iterdir() if one.is_dir()), MOST_FOLDERS)
    found = [one / name for one in folders if library.is_file(one / name)]
    return found[0] if len(found) == 1 else None


MOST_FOLDERS = 100
"""Folders next to a script that are looked into."""
MOST_FILES = 20_000
"""Files of a project that are looked through."""


def in_project(path: Path, name: str) -> Path | None:
    """The one file of a project with that end, of a folder and a name at least: what an image or a chart puts in another place."""
    end, above = Path(name).parts[-2:], list(path.resolve().parents)[:8]
    root = next((one for one in above if (one / ".git").exists() or (one / "LICENSE").exists()), None)
    found = [one for one in _programs(root) if one.parts[-2:] == end] if root is not None and len(end) == 2 else []
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=8)
def _programs(root: Path) -> tuple[Path, ...]:
    return tuple(one for one in islice(root.rglob("*"), MOST_FILES) if one.suffix == ".py")
