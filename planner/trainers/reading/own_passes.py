"""Trainers that a project derives from those of TRL and transformers, whose steps run the model more often than once."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from planner.trainers.reading.derived import classes_of, lineage, methods_of, own_functions
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import Function, last_name
from planner.trainers.reading.shell.text import is_open

STEPS = ("compute_loss", "training_step", "get_batch_loss_metrics")
"""What a trainer does with one batch."""
RUNS = re.compile(r"(\w+_)?(model|teacher|student)")
"""Names under which a model is called."""
DEEPEST = 3
"""Functions that call functions."""
LEAVES = (ast.Return, ast.Raise)
OF_PAIRS = {"super": 2, "concatenated_forward": 1, "compute_ref_log_probs": 1, "compute_reference_log_probs": 1}
"""Passes of what a DPOTrainer has: its step runs the policy and the reference.  [trl/trainer/dpo_trainer.py]"""
WITH_REFERENCE = re.compile(rf"no_grad|compute_ref|super\([^()]*\)\.({'|'.join(STEPS)})\(")


def question(script: Script, said: Given, trainers: Sequence[str]) -> Question | None:
    """What is asked of a script whose own trainer, derived from some, runs the model several times in a step; None = it does
    not, or the user says that it is imported without."""
    name, method, count = next(_several(script, trainers), ("", "", 0))
    if not count or said.setting(method) is not None:
        return None
    about = f"of {name} runs the model {count} times or more in a step, which is not priced; false imports it as the library's"
    return Question(name=method, about=about, choices=("false",))


def of_a_fork(script: Script, said: Given, libraries: Sequence[str], known: Sequence[str]) -> Question | None:
    """What is asked of a script that makes a trainer of a library that none of its releases has: a fork of it does."""
    taken = [one for one in ast.walk(script.tree) if isinstance(one, ast.ImportFrom) and not one.level]
    names = [one.name for node in taken if (node.module or "").partition(".")[0] in libraries for one in node.names]
    own = (one for one in names if re.search(r"^(?!Patch).*Trainer$", one) and one not in known and script.calls(one))
    if (name := next(own, None)) is None or said.setting(name) is not None:
        return None
    about = "a trainer of its fork, whose step is not known here; false imports it as that of the library by its configuration"
    return Question(name=name, about=about, choices=("false",))


def _several(script: Script, trainers: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """(Class, method, least number of passes) of the trainers that a script makes and that run the model several times."""
    classes = classes_of(script.tree)
    made = {one for variable, names in held(script).items() if script.calls(variable) for one in names}
    for name in (one for one in classes if script.calls(one) or one in made):
        above, others = lineage(name, classes)
        derived = not (others | {one.name for one in above[1:]}).isdisjoint(trainers)
        steps = [one for _, one in methods_of(above, STEPS)] if derived else []
        paired = any(one.startswith("DPO") for one in (*others, *(one.name for one in above)))
        inner = of_helpers({**script.functions, **own_functions(above)}, OF_PAIRS if paired else {}) if steps else {}
        referred = any(WITH_REFERENCE.search(ast.unparse(one)) for each in above for one in each.body)
        usual = 2 if paired and referred else 1  # the reference's
        for part in steps:
            if (count := passes(part.body, inner)) > usual:
                yield name, part.name, count


def held(script: Script) -> dict[str, list[str]]:
    """Variables of a script -> names of what they may mean, where that is said by names: Made = A if c else B; Made = TABLE[key],
    TABLE.get(key, A)."""
    puts = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign)]
    tables: dict[str, dict[Any, str]] = {}
    for one in puts:
        place, made = one.targets[0], one.value
        if isinstance(made, ast.Dict):
            keys = (getattr(key, "value", None) for key in made.keys)
            tables[ast.unparse(place)] = dict(zip(keys, map(last_name, made.values), strict=True))
        elif isinstance(place, ast.Subscript) and (table := tables.get(ast.unparse(place.value))) is not None:
            table[getattr(place.slice, "value", None)] = last_name(made)
    found: dict[str, list[str]] = {}
    for one in puts:
        if isinstance(one.targets[0], ast.Name):
            found.setdefault(one.targets[0].id, []).extend(_meant(script, one.value, tables))
    return found


def _meant(script: Script, value: ast.expr, tables: Mapping[str, Mapping[Any, str]]) -> list[str]:
    """Names of what a value may be; of a table the class of the key where that is known, else all that it holds."""
    if isinstance(value, ast.IfExp | ast.Name):
        return [one.id for one in ast.walk(value) if isinstance(one, ast.Name)]
    owner, keys = getattr(value, "value", None), [value.slice] if isinstance(value, ast.Subscript) else []
    if isinstance(value, ast.Call) and last_name(value.func) == "get":
        owner, keys = getattr(value.func, "value", None), value.args
    table = tables.get(ast.unparse(owner)) if isinstance(owner, ast.AST) and keys else None
    if table is None:
        return []
    word = str(script.value(keys[0]))
    return [*table.values()] if is_open(word) else [table[word]] if word in table else [last_name(one) for one in keys[1:]]


def classes_made(variables: Mapping[str, list[str]], call: ast.Call) -> list[str]:
    """The classes of which a call may make an object: the one that it names, or those that one of ``variables`` (held) may mean."""
    name = last_name(call.func)
    return variables.get(name) or [name]


def of_helpers(named: Mapping[str, Function], known: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """Forward passes of functions that are given the model, by name, with those of functions that these call; ``known``: those of
    the class above."""
    found: dict[str, int] = {**known}
    for _ in range(DEEPEST):
        own = {one: passes(node.body, found) for one, node in named.items() if one not in STEPS}
        before, found = found, {**known, **own}
        if before == found:
            break
    return found


def passes(statements: Sequence[ast.stmt], inner: Mapping[str, int] = MappingProxyType({})) -> int:
    """Forward passes of some statements: of branches that exclude each other the most, of a loop with one at least two; ``inner``:
    those of functions that are given the model."""
    count = 0
    for one in reversed(statements):  # of those behind it, which a branch that leaves does not reach
        if isinstance(one, ast.If):
            put = [ast.unparse(each.targets[0]) for each in one.body if isinstance(each, ast.Assign)]
            once = any(each.startswith("self.") and f"not {each}" in ast.unparse(one.test) for each in put)
            ways = ([] if once else one.body, one.orelse)  # what is done in the first step alone does not count
            left = [0 if way and isinstance(way[-1], LEAVES) else count for way in ways]
            count = _of(one.test, inner) + max(passes(way, inner) + more for way, more in zip(ways, left, strict=True))
        elif isinstance(one, ast.For | ast.While):
            count += 2 * passes(one.body, inner)
        elif isinstance(one, ast.With):
            count += passes(one.body, inner)
        elif isinstance(one, ast.Try):
            ways_on = [one.body, *(way.body for way in one.handlers)]
            count += max(passes(way, inner) for way in ways_on) + passes(one.finalbody, inner)
        elif not isinstance(one, ast.FunctionDef | ast.ClassDef):
            count += _of(one, inner)
    return count


def _of(node: ast.AST, inner: Mapping[str, int]) -> int:
    """Forward passes of one statement without statements in it: calls of a model, of the step that it replaces, and of functions
    that are given the model."""
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    above = inner.get("super", 1)
    return sum(above if _above(one) else 1 if RUNS.fullmatch(last_name(one.func)) else _given_on(one, inner) for one in calls)


def _given_on(call: ast.Call, inner: Mapping[str, int]) -> int:
    """Passes of a function that is given the model which is trained, or is the reference's."""
    given = any(last_name(one) == "model" for one in (*call.args, *(word.value for word in call.keywords)))
    return inner.get(last_name(call.func), 0) if given or last_name(call.func).startswith("compute_ref") else 0


def _above(call: ast.Call) -> bool:
    """Whether this is super().compute_loss(...)."""
    owner = getattr(call.func, "value", None)
    return last_name(call.func) in STEPS and isinstance(owner, ast.Call) and last_name(owner.func) == "super"
