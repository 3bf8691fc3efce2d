"""The command that starts a recipe, of accelerate or another one, as a document beside the recipe gives it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.record import record
from planner.trainers.reading.fine_tuning import QUIET
from planner.trainers.reading.given import Given
from planner.trainers.reading.parsed_words import PARSERS
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.settings import parsed
from planner.trainers.reading.shell import evaluate
from planner.trainers.reading.shell.text import Word, gap, options, quoted_words, shown_text
from planner.trainers.reading.steps import NOT_LM
from planner.trainers.reading.values import read_text

MOST_SCRIPTS = 20
"""Scripts beside a recipe that are looked through."""
MOST_ABOVE = 5
"""Folders whose README.md may launch it: recipes/model/step/recipe.yaml, and a project inside another."""
LAUNCHERS = ("", "scripts", "slurm", "jobs", "launch")
"""Folders of a project in which scripts start recipes of other folders; '' = itself."""
STARTS = re.compile(r"(?<![\w./-])(?:accelerate(?: +|\.commands\.)launch|torchrun|deepspeed|python[\d.]*|uv +run)(?= )[^\n]*")
"""Commands that start a program."""
TRAINS = re.compile(rf"Trainer\b|\b({'|'.join(PARSERS)})\(")
ASIDE = re.compile(r"(?i)eval|infer|test|merge|predict|export|generat|chat|serve|convert|plot|upload")
"""What a program has that takes a recipe and trains, and names of such as do something else with it."""
PROGRAM = re.compile(r"(?<![\w./-])[\w./-]+\.py\b|(?<= -m )(?!accelerate|torch\.)[\w.]+")


@record
class Guide:
    """What the first command says that launches a file."""

    file: str
    """The configuration of accelerate."""
    document: str
    """The end of the path of the document that has the command."""
    counts: dict[str, int | None] = field(default_factory=dict)
    """num_processes and num_machines, where the command has these options; None = with what is no number above 0."""
    others: int = 0
    """Commands of the same document that launch the file in another way."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it says behind the program: goes before the file itself."""
    differ: tuple[str, ...] = ()
    """What those others say behind the program, where it decides something and is not the same."""
    program: str = ""
    """The program that it starts, where it is there."""

    def __str__(self) -> str:
        """As a note says it."""
        said = "".join(f" --{name} {value}" for name, value in self.counts.items() if value)
        more = f", the first of its {self.others + 1} ways to launch it" if self.others else ""
        return f"launched with {self.file}{said} by a command in {self.document}{more}"


def guide(path: Path) -> Guide | None:
    """The command of accelerate that launches a recipe: in its own comment, in a script of its folder, in a README.md there or
    above, or in a script of the folders above. None = there is none."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        return None
    path = path.resolve()
    for document, folder, text in _documents(path, own=not _launched_otherwise(path)):
        commands = re.findall(r"accelerate(?: +|\.commands\.)launch[^\n]*", text)
        named = [one for one in commands if document == path or _names(one, path, folder)]
        ways = {one: given for text in named for one, given in _way(text, path)}
        if ways:
            (file, processes, machines, deciding), given = next(iter(ways.items()))
            said = {"num_processes": processes, "num_machines": machines}
            counts = {name: int(text) or None if text.isdecimal() else None for name, text in said.items() if text is not None}
            differ = dict.fromkeys(one[3] or "none of them" for one in ways if one[3] != deciding)
            end, others = "/".join(document.parts[-2:]), len(ways) - 1
            return Guide(file=file, document=end, counts=counts, others=others, options=given, differ=tuple(differ))
    return None


def started(path: Path) -> tuple[Guide | None, dict[str, Guide]]:
    """(The command that starts a recipe, whatever launches it; else programs that start other recipes of its folder)."""
    path, likely = path.resolve(), dict[str, Guide]()
    for document, folder, text in _documents(path, own=True):
        for command in STARTS.findall(text):
            named = PROGRAM.search(command)
            program = program_file(document, named[0]) if named is not None else None
            if program is None or ASIDE.search(program.stem) or TRAINS.search(read_text(program)) is None:
                continue
            found = Guide(file="", document="/".join(document.parts[-2:]), options=_behind(command, path), program=str(program))
            if _names(command, path, folder):
                return found, {}
            files = {path.with_name(Path(one).name) for one in re.findall(r"[\w./-]+\.ya?ml\b", command)}
            apart = steps_of(path) and steps_of(program) and not steps_of(path) & steps_of(program)
            if not apart and any(_names(command, one, folder) for one in files):
                likely.setdefault(found.program, found)
    return None, likely


def steps_of(file: Path) -> set[str]:
    """Words of a file's name that say with which step it trains."""
    return {*re.split(r"[^a-z]+", file.stem.lower())} & {"sft", "dpo", "cpt", *NOT_LM}


def _documents(path: Path, own: bool) -> Iterator[tuple[Path, Path, str]]:
    """(Document that may start a recipe, the folder from which it names files, its text with long commands in one line)."""
    above = [folder / "README.md" for folder in list(path.parents)[:MOST_ABOVE]]
    beside = sorted(path.parent.glob("*.sh"))[:MOST_SCRIPTS]
    for document in (*[path] * own, *beside, *(one for one in above if one.is_file())):
        yield document, document.parent, _joined(document)
    root = next((i for i, one in enumerate(path.parents) if (one / ".git").exists()), MOST_ABOVE)
    for folder in list(path.parents)[1 : min(root + 1, MOST_ABOVE)]:
        places = [folder / one for one in LAUNCHERS if folder / one not in path.parents[:1]]
        texts = {one: _joined(one) for place in places for ending in ("sh", "slurm", "sbatch")
                 for one in sorted(place.glob(f"*.{ending}"))[:MOST_SCRIPTS]}  # fmt: skip
        found = sorted(  # those of which a command names it itself come first
            (not any(_names(each, path, folder) for each in STARTS.findall(text)), one) for one, text in texts.items()
            if path.name in text and _names(text, path, folder)
        )  # fmt: skip
        if found:  # those of one folder are ways to start it
            yield found[0][1], folder, "\n".join(_run(one, texts[one]) if by_words else texts[one] for by_words, one in found)
        yield from ((script, folder, command) for script, command in _of_any_recipe(texts, path))


_ANY = re.compile(r"(?<=--config)[= ]+[\"']?\$(?:\w+|\{\w+(?::?[-?][^}\s]*)?\})[\"']?(?=\s|$)")
"""The recipe of a command, as a variable that nothing sets."""
_SET = re.compile(r"(?m)^[ \t]*(?:(?:export|readonly|local) +)?([A-Za-z_]\w*)=[\"']?([^\s\"'`();|&]+)[\"']?[ \t]*(?:#.*)?$")


def _of_any_recipe(texts: Mapping[Path, str], path: Path) -> list[tuple[Path, str]]:
    """Commands of scripts that start a program of training with any recipe, --config "$CONFIG", as such of this one: with values of
    variables that a script sets once, without folders that only the shell knows. Of several programs it is the one whose step the
    recipe's name says; else what launches all of them alike, without a program."""
    found: dict[str, tuple[Path, str]] = {}
    for script, text in texts.items() if any(map(_ANY.search, texts.values())) else ():
        held: dict[str, str] = {}
        for name, value in _SET.findall(text):
            held[name] = value if held.get(name, value) == value else f"${name}"
        filled = re.sub(r"\$\{?([A-Za-z_]\w*)\b\}?", lambda one, held=held: held.get(one[1], one[0]), text)  # type: ignore[misc]
        for command in STARTS.findall(filled):
            named = PROGRAM.search(plain := re.sub(r"\$\{?\w+\}?/", "", command))
            program = program_file(script, named[0]) if named is not None and _ANY.search(command) else None
            if program is not None and not ASIDE.search(program.stem) and re.search(r"Trainer\b", read_text(program)):
                found.setdefault(program.stem, (script, _ANY.sub(f" {path}", plain)))
    steps = steps_of(path)
    own = [one for name, one in found.items() if not (steps and steps_of(Path(name))) or steps & steps_of(Path(name))]
    alike = {file for _, command in own for file in re.findall(r"--config_file[= ]+\S+", command)}
    return own if len(own) < 2 else [(script, PROGRAM.sub("", command)) for script, command in own if len(alike) == 1]


def _run(script: Path, text: str) -> str:
    """The commands of a script as its variables and functions make them."""
    try:
        commands = evaluate(text, str(script), {}, script.parent).commands
    except PlannerError:
        return text
    return "\n".join(" ".join(one.words) for one in commands)


def over_recipe(path: Path, data: Mapping[str, Any], said: Given, own: str = "") -> tuple[dict[str, Any], tuple[str, ...]]:
    """(Settings of a recipe with those that the command which launches it has behind it, a note that names them): the parsers of
    TRL, LLaMA-Factory and axolotl take options over their file. ``own``: the trainer's own command, which counts in a comment of
    the file. What the user says goes before all of it."""
    found = guide(path) or (_commented(path, own) if own else started(path)[0])
    given = {} if found is None else {name: value for name, value in found.options.items() if name not in said.settings}
    text = _deciding(given)
    if found is None or not (text or found.differ):
        return {**data, **given}, ()
    more = f"; another command there says {' or '.join(found.differ[:MOST_SAID])}" if found.differ else ""
    what = f"{text} of a command in {found.document} goes over the file" if text else f"as the first command of {found.document}"
    return {**data, **given}, (f"{what}{more}",)


def _commented(path: Path, own: str) -> Guide | None:
    """The first command of a trainer's own that starts a file in its own comment."""
    command = re.search(rf"^#[^\n]*?\b({own} [^\n]{{0,200}}\b{re.escape(path.name)}[^\n]*)", _joined(path), re.MULTILINE)
    return Guide(file="", document=path.name, options=_behind(command[1], path)) if command is not None else None


MOST_SAID = 4
"""Other ways that a note tells."""


def _joined(path: Path) -> str:
    """The text of a file without the breaks of its long commands."""
    return re.sub(r"\\\n[ #]*", " ", read_text(path))


def _way(command: str, path: Path) -> Iterator[tuple[tuple[str, str | None, str | None, str], dict[str, Any]]]:
    """((configuration of accelerate, text of --num_processes, of --num_machines, options that decide), all options of the
    program) of a command that names the first."""
    file = re.search(r"--config_file[= ]+[\"']?([\w./-]+\.(?:ya?ml|json))", command)
    if file is not None:
        found = (re.search(rf"--num[_-]{name}[= ]+[\"']?([^\s\"']+)", command) for name in ("processes", "machines"))
        processes, machines = (one[1][:20] if one is not None else None for one in found)
        given = _behind(command, path)
        yield (file[1], processes, machines, _deciding(given)), given


_ENDS = re.compile(r"[;|&#]|&&|\|\||\d?>.*|.*`.*")
"""Words that end a command, in a shell and in a document."""


def _behind(command: str, path: Path) -> dict[str, Any]:
    """Options behind the program of a command, and its key=value; a value that only the shell knows is a gap."""
    words = quoted_words(re.sub(r"[;`]", r" \g<0> ", command))
    words = words[: next((i for i, one in enumerate(words) if _ENDS.fullmatch(one)), len(words))]
    ends = (".py", "-cli", path.name)
    program = (i for i, one in enumerate(words) if one.endswith(ends) or (i and words[i - 1] in ("-m", "--module")))
    words = words[next(program, len(words)) + 1 :]
    files = [Path(one.rpartition("=")[2]).name for one in words if one.endswith((".yaml", ".yml"))]
    if files and path.name not in files:  # a comment of this file about another one
        return {}
    keyed = {name: value for name, mark, value in (one.partition("=") for one in words) if mark and re.fullmatch(r"[a-z]\w*", name)}
    found: dict[str, Any] = {name: _value(name, [value]) for name, value in keyed.items()}
    for dashed, values, _ in options(Word(one) for one in words):
        name, values = dashed.replace("-", "_"), [one for one in values if one.partition("=")[0] not in keyed]
        if not values and name.startswith("no_") and name != "no_cuda":
            found[name.removeprefix("no_")] = False
        elif not any(Path(one).name == path.name for one in values):
            found[name] = _value(name, values)
    return found


def _value(name: str, values: list[str]) -> Any:
    """The value of an option with the words behind it."""
    if any(re.search(r"[$<>{}]", one) for one in values if not one.startswith("{")):
        return gap([name])
    return True if not values else parsed(values[0]) if len(values) == 1 else [parsed(one) for one in values]


def _deciding(given: Mapping[str, Any]) -> str:
    """Those of some options that may change time or memory, as a command has them."""
    kept = sorted((name, value) for name, value in given.items() if not QUIET.fullmatch(name))
    return " ".join(f"--{name}={str(value).lower() if isinstance(value, bool) else shown_text(str(value))}" for name, value in kept)


def _names(command: str, path: Path, folder: Path) -> bool:
    """Whether a command names a file: by a path that is the end of the file's path as a whole. The file's name alone counts in a
    document of its folder; a path on the author's machine from the ``folder`` of the document on."""
    inner = path.relative_to(folder).parts
    for word in re.split(r"[\s\"'`=]+", command):
        parts = [one for one in word.strip(",;()").split("/") if one not in ("", ".")]
        if not parts or parts[-1] != path.name:
            continue
        open_ = max((i + 1 for i, one in enumerate(parts) if re.search(r"[$~{}<>]", one)), default=0)
        if word.startswith("/") or open_:  # from a root that is not here
            ends = [(folder.name, *inner)] + ([inner] if open_ and len(parts) - open_ == len(inner) else [])
            if any(tuple(parts[open_:][-len(end) :]) == end for end in ends):
                return True
        elif len(parts) >= len(inner) and tuple(parts) == path.parts[-len(parts) :]:
            return True
    return False


def _launched_otherwise(path: Path) -> bool:
    """Whether a comment of a recipe starts it by another command than accelerate's, which then starts another file."""
    ends = ["/".join(path.parts[one:]) for one in range(1, len(path.parts) - 1)]
    lines = [line for line in _joined(path).splitlines() if line.lstrip().startswith("#")]
    named = [line for line in lines if re.search(r"[\w-]+ ", line) and any(word in ends for word in line.split())]
    return bool(named) and not any("accelerate" in line for line in named)
