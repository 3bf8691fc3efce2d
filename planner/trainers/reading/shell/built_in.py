"""What a script says; commands of the shell itself that give values: let, read, arrays with keys; and what ssh runs elsewhere."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planner import library
from planner.trainers.reading.shell.expansion import Variables, calculated, joined
from planner.trainers.reading.shell.starting import SHELLS, read_line
from planner.trainers.reading.shell.text import OPTION, SETTINGS, is_open
from planner.trainers.reading.shell.tree import Command, Loop, Simple

_KEYED = re.compile(r"\[(['\"]?)([^\]]+)\1\]=(.*)", re.DOTALL)
MOST_WORDS = 16
"""Words of a loop that is run word by word: loops lie inside of loops."""
MOST_FILES = 8
"""Of one whose words are part of the name of a file."""
MOST_ROUNDS = 60
"""Words that a loop takes one after the other."""


@dataclass
class Script:
    """What a script says."""

    variables: Variables
    commands: list[Command] = field(default_factory=list)
    bare: list[Command] = field(default_factory=list)
    """Those without options."""
    documents: list[tuple[str, str]] = field(default_factory=list)
    """(file that it is written to, text) of its here-documents."""
    edits: list[list[str]] = field(default_factory=list)
    """Words behind sed, which writes files from templates."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """Values that it compares an unknown variable with."""
    missing: list[str] = field(default_factory=list)
    """Scripts that it reads and that are not there."""
    exported: dict[str, str] = field(default_factory=dict)
    """Variables that the programs which it starts see, as they were when it last said so."""
    batch: dict[str, str] = field(default_factory=dict)
    """Options of #SBATCH lines, and nodes and GPUs of #PBS and #BSUB lines in the same words."""


def bare_programs(script: Script) -> list[Command]:
    """Commands that start a program in Python and say no more, of a script that gives options to none."""
    if any(re.search(r"\.py$|^-m$", word) for one in script.commands for word in one.words):
        return []
    starts = r"(.*/)?python[\d.]* (?!-)[^ ]+\.py"
    return [one for one in script.bare if re.fullmatch(starts, " ".join(one.words[-2:]))]


class StopError(Exception):
    """``exit`` or ``return``; a code other than 0 is a failure, which no training follows."""

    def __init__(self, failed: bool) -> None:
        self.failed = failed


def let(words: Sequence[str], variables: Variables) -> None:
    """Assigns what ``let A=1+2 B*=3`` or ``(( A = 1 + 2 ))`` calculates."""
    for one in words:
        one = one.replace('"', "").strip()
        if match := re.fullmatch(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.+)", one, re.DOTALL):
            text = f"{match[1]}{match[2]}({match[3]})" if match[2] else match[3]
            variables.put(match[1], calculated(text, variables))


def keyed(name: str, raw: Sequence[str], variables: Variables) -> bool:
    """Puts the elements of ``A=([x]=1 [y]=2)`` under their keys; False for an array without."""
    found = [_KEYED.fullmatch(one) for one in raw]
    for one in found if raw and all(found) else ():
        assert one is not None
        variables.put(f"{name}[{joined(one[2], variables)}]", joined(one[3], variables))
    return bool(raw) and all(found)


def refer(words: Sequence[str], name: str, variables: Variables) -> None:
    """After ``local -n name=OTHER``: what the other variable and its elements hold, under this name too."""
    if list(words[1:2]) != ["-n"] or words[0] not in ("local", "declare", "typeset"):
        return
    other = variables.text(name) or ""
    for one, value in list(variables.values.items()):
        if one == other or one.startswith(f"{other}["):
            variables.put(name + one[len(other) :], value)


def read_into(node: Simple, words: Sequence[str], written: str | None, variables: Variables) -> None:
    """Assigns what ``read`` takes from a here-document or a text."""
    marks = variables.values.pop("IFS", "") if any(one[0] == "IFS" for one in node.assignments) else ""
    line = written if node.input is None else joined(node.input, variables)
    for one, part in read_line(list(words), line, marks).items():
        variables.put(one, part)


def in_turn(words: Sequence[str], node: Loop, commands: bool, variables: Variables) -> bool:
    """Whether a loop is run word by word: its words are known, it does not leave early, and its body starts no command with
    options, or its variable is part of the name of a file of settings, each of which is a training."""
    known = 1 < len(words) <= MOST_WORDS and not any(is_open(one) for one in words)
    files = rf"\$({node.name}\b|{{{node.name}}})[\w./-]*\.(ya?ml|toml)\b"
    each = len(words) <= MOST_FILES and node.name not in variables.given and re.search(files, str(node.body)) is not None
    return known and (each or not commands) and not re.search(r"\['(break|continue|exit|return)'", str(node.body))


def remote_text(words: list[str]) -> str:
    """What ssh runs where it is given in several words, which the shell there reads as one text; '' = another command."""
    if words[0] != "ssh":
        return ""
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 2 if re.fullmatch(r"-[bceilmopEFIJLOQRSWw]", words[place]) else 1
    rest = words[place + 1 :]
    return " ".join(rest) if len(rest) > 1 and rest[0] in SHELLS else ""


def recorded(words: Sequence[str]) -> bool:
    """Whether a command may be a training: it has options, settings, or a file of settings that a variable names."""
    if any(OPTION.search(word) or SETTINGS.search(word) for word in words):
        return True
    runs = words[0].startswith("python") or any(word.endswith(".py") for word in words)  # uv run, poetry run and their like
    file = list(words[1:2]) in (["train"], ["sft"], ["pt"]) and is_open("".join(words[2:3]))
    return file or (runs and any(re.match(r"[+~]*\w+(\.\w+)+=", word) for word in words))


def called_from_above(directory: Path, name: str) -> Path | None:
    """A script by its path from a folder above, as one is called from the root of a repository."""
    folders = list(directory.resolve().parents)[:3] if "/" in name else []
    return next((one for up in folders if library.is_file(one := up / name)), None)
