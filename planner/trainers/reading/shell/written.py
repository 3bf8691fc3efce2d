"""Files that a script writes: here-documents, echo, tee, what is appended, copied, filled in and edited in place. None is written
here."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.shell.built_in import Script
from planner.trainers.reading.shell.expansion import Variables, document, joined
from planner.trainers.reading.shell.starting import in_container, script_near
from planner.trainers.reading.shell.text import gap
from planner.trainers.reading.shell.tree import Simple
from planner.trainers.reading.values import read_text

SETTINGS = (".yaml", ".yml", ".json")
TEMPLATES = (*SETTINGS, ".template", ".tmpl", ".tpl", ".in")
_SUBSTITUTION = re.compile(r"s([/|#,@])((?:(?!\1).)*)\1((?:(?!\1).)*)\1(g?)")
_PLAIN = re.compile(r"\^?([\w\s:\"'=,/${}-]|\.\*?|\s\*)*\$?")
"""Patterns that mean the same to sed and here."""


def record(node: Simple, words: Sequence[str], script: Script, directory: Path | None) -> None:
    """Keeps what a command writes, each text in full: one that is appended to is there as a whole."""
    variables = script.variables
    if words and words[0] not in ("declare", "local", "readonly", "typeset"):  # export A=b, A=b program
        names = [*(one[0] for one in node.assignments), *(one.partition("=")[0] for one in words[1:] if words[0] == "export")]
        given = {one: text for one in names if (text := variables.text(one)) is not None}
        script.exported |= {**given, **in_container(given, ())}
    target, adds = joined(node.target, variables), node.appends
    name, rest = (words[0], list(words[1:])) if words else ("", [])
    files = [one for one in rest if one and not one.startswith("-")]
    if name == "tee" and files:
        target, adds = files[-1], bool({"-a", "--append"} & set(rest))
    texts = [text if literal else document(text, variables) for text, literal in node.documents]
    if name in ("echo", "printf") and node.target:
        texts.append(_said(name, [one for one in rest if one not in ("-e", "-n", "-E")]))
    for text in texts:
        before = _contents(script, directory, target) if adds and target else None
        script.documents.append((target, text if before is None else f"{before.rstrip(chr(10))}\n{text}"))
    if name == "cp" and len(files) > 1 and files[-1].endswith(SETTINGS):
        copied = _contents(script, directory, files[-2])
        script.documents += [] if copied is None else [(files[-1], copied)]
    if name == "envsubst" and node.target and node.source:
        plain = _contents(script, directory, joined(node.source, variables))
        script.documents += [] if plain is None else [(target, _filled(plain, rest, variables))]
    inner = any(re.match(r"-\w*i|--in-?place", one) for one in rest)
    if name in ("sed", "yq") and files and files[-1].endswith(SETTINGS) and (inner or (name == "sed" and node.target)):
        there = _contents(script, directory, files[-1])
        edited = _edited(there, files[:-1]) if name == "sed" and there is not None else None
        script.documents += [] if there is None else [(files[-1] if inner else target, gap([]) if edited is None else edited)]


def hand_on(given: Mapping[str, str], words: Sequence[str], script: Script) -> None:
    """Puts what ``env`` gives a command, and what a container is given."""
    for name, value in {**given, **in_container(given, words)}.items():
        script.variables.put(name, value)
        script.exported[name] = script.variables.text(name) or ""


def of_arms(found: Iterable[Sequence[tuple[str, str]]], names: Sequence[str]) -> list[tuple[str, str]]:
    """What the arms of a condition that is not known have written: a file that they write differently waits for the variables
    that decide."""
    ends = [dict(one) for one in found]
    every = dict.fromkeys(one for end in ends for one in end)
    differ = [one for one in every if one and len({end[one] for end in ends if one in end}) > 1]
    return [(one, gap(names)) for one in differ if names]


def _contents(script: Script, directory: Path | None, name: str) -> str | None:
    """The text of a file as the script has it by now; None where it is not there."""
    if (text := dict(script.documents).get(name)) is not None:
        return text
    if directory is None or not name.endswith(TEMPLATES):
        return None
    file = directory / name if name.startswith("/") else script_near(directory, name)  # $(dirname "$0")/x.yaml, say
    if file is None or not library.is_file(file):
        return None
    try:
        return read_text(file)
    except PlannerError:
        return None


def _filled(text: str, words: Sequence[str], variables: Variables) -> str:
    """A text as envsubst fills it in: all variables of the shell, or those that its word names."""
    named = set(re.findall(r"\$\{?(\w+)", " ".join(words)))
    return re.sub(
        r"\$\{(\w+)\}|\$([A-Za-z_]\w*)",
        lambda one: document(one[0], variables) if not named or (one[1] or one[2]) in named else one[0], text,
    )  # fmt: skip


def _said(name: str, words: list[str]) -> str:
    """What echo or printf writes."""
    if name == "echo" or not words:
        return " ".join(words)
    form, left = words[0].replace("\\n", "\n"), words[1:]
    count = len(re.findall(r"%[sd]", form))
    rounds = -(-len(left) // count) if count and left else 1  # the format again for the words that are left
    given = iter(left)
    return re.sub(r"%[sd]", lambda _: next(given, ""), form * rounds).rstrip("\n")


def _edited(text: str, words: Sequence[str]) -> str | None:
    """A text as sed edits it by plain substitutions; None for another way to edit it."""
    for one in (part for word in words for part in word.split(";") if part.strip()):
        found = _SUBSTITUTION.fullmatch(one.strip())
        if found is None or _PLAIN.fullmatch(found[2]) is None or re.search(r"&|\\", found[3]):
            return None
        pattern, new = re.sub(r"\$(?!$)|[{}]", lambda mark: f"\\{mark[0]}", found[2]), found[3]
        lines = text.split("\n")
        text = "\n".join(re.sub(pattern, new, line, count=0 if found[4] else 1) for line in lines)  # without \\ and & as it stands
    return text
