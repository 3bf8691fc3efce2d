"""Where the length of a program's sequences is from: its tokenizer, a variable, a module of its project, or its trainer."""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from planner.trainers.reading.parsed_words import PARSERS
from planner.trainers.reading.programs import TRAINING
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import LENGTHS as SINCE
from planner.trainers.reading.running import Running, WithModules
from planner.trainers.reading.script_parts import LENGTHS, cut_length, length_options, length_variables
from planner.trainers.reading.versions import newer

IN_MODULES = "sequences are cut at {} tokens by the tokenizer in a module that the script takes from its project"
OF_VARIABLE = "sequences are taken to be cut at {} tokens, as its variable {} says; --set max_length=N says otherwise"
BY_ITSELF = "no length is said: sequences are cut at 1024 tokens, as TRL does by itself; --set max_length=N says otherwise"


def said(script: Running, notes: list[str]) -> dict[str, Any]:
    """The length at which sequences are cut before the trainer has them, empty = nothing says it; adds where it is from to some
    notes, where the text of a tokenizer's call does not show it."""
    found = cut_length(script)
    if found and not cuts(script):
        names = [last_name(one.targets[0]) for one in length_variables(script) if script.value(one.value) == found["max_length"]]
        names += [last_name(one) for one in length_options(script) if not names]
        notes += [OF_VARIABLE.format(found["max_length"], one) for one in names[:1]]
    if found or isinstance(script, WithModules) or not any(isinstance(one, ast.ImportFrom) for one in script.tree.body):
        return found
    whole = WithModules(script.path, script.said)
    found = cut_length(whole) if cuts(whole) else {}
    notes += [IN_MODULES.format(found["max_length"])] if found else []
    return found


def cuts(script: Running) -> bool:
    """Whether a call of a tokenizer cuts."""
    return any(script.keywords(one).get("truncation") for one in script.calls("tokenizer", "tokenize", "encode_plus", "processor"))


def by_itself(data: Mapping[str, Any], kind: str, answered: int | None) -> tuple[str, ...]:
    """Note that the length is the default of TRL, where the user has not ``answered`` it; that of DPO differs by version."""
    unsaid = answered is None and "beta" not in data and not any(one in data for one in LENGTHS)
    return (BY_ITSELF,) if unsaid and kind in ("trl", "old trl") else ()


IDLE = "{} does nothing: {} uses it nowhere, and it is no word of its trainer's arguments"


def is_gone(path: Path, word: str) -> bool:
    """Whether arguments of TRL's trainers have no such word for the length, in the version that the project pins."""
    return word in SINCE and word != "max_length" and newer(path, "trl", SINCE[word]) is True


WHOLE = re.compile(r"\b(vars|asdict)\(\w+\)|\b\w+\.__dict__|\bgetattr\((?!torch)\w+, \w+[,)]")
"""Where a program uses arguments without their names."""


def unused(script: Running, words: Iterable[str]) -> set[str]:
    """Those of some lengths that classes of arguments of a program of TRL have, TRL's own have not, and it uses nowhere; none where
    it hands all of its arguments on to what is not there."""
    words = {one for one in words if one not in SINCE or is_gone(script.path, one)}
    text = ast.unparse(script.tree) if words and script.calls(*PARSERS) else ""
    if not re.search(r"\b(SFT|DPO)Config\b", text) or WHOLE.search(text):
        return set()
    nodes = list(ast.walk(script.tree))
    made = [one for one in nodes if isinstance(one, ast.Assign) and last_name(getattr(one.value, "func", one)).startswith("parse_")]
    held = {last_name(each) for one in made for each in getattr(one.targets[0], "elts", one.targets)}
    theirs = {one.asname or one.name: node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}
    theirs |= {one.asname or one.name: one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    away = {name for name, home in theirs.items() if home.partition(".")[0] not in TRAINING}
    away -= {one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    functions = {one.name: one.args.args for one in nodes if isinstance(one, ast.FunctionDef)}
    every = [one for one in nodes if isinstance(one, ast.Call)]
    for one in every:  # def main(cfg), main(script_args)
        pairs = zip(functions.get(last_name(one.func), []), one.args, strict=False)
        held |= {name.arg for name, each in pairs if isinstance(each, ast.Name) and each.id in held}
    calls = [one for one in every if last_name(one.func) in away or ast.unparse(one.func).partition(".")[0] in away]
    given = [part for one in calls for part in (*one.args, *(word.value for word in one.keywords))]
    if any(isinstance(one, ast.Name) and one.id in held for one in given):
        return set()
    used = {getattr(one, "attr", getattr(one, "arg", None)) for one in nodes if isinstance(one, ast.Attribute | ast.keyword)}
    return words - used - {one.value for one in nodes if isinstance(one, ast.Constant)}
