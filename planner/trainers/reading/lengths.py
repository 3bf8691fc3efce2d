"""Where the length of a program's sequences is from: its tokenizer, a variable, a module of its project, or its trainer."""

import ast
from collections.abc import Mapping
from typing import Any

from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running, WithModules
from planner.trainers.reading.script_parts import LENGTHS, cut_length, length_options, length_variables

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
