"""Sections of torchtitan as dictionaries of a Python module, which forks load in the place of TOML."""

import ast
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.shell.arithmetic import arithmetic

DECIDING = ("parallelism", "training")
"""Sections of which such a module has one at least."""
CHANGED = {*DECIDING, "model", "optimizer", "activation_checkpoint", "compile"}
"""Sections of which no line may be passed over."""
UNKNOWN = object()
BASE = "_base_"
"""Files that mmengine lays under a module."""


def holds_tables(tree: ast.Module) -> bool:
    """Whether a module assigns a dictionary to the name of a section that decides a layout."""
    return bool(_assigned(tree).keys() & set(DECIDING))


def tables_of(path: Path, tree: ast.Module, given: Given, quiet: tuple[str, ...]) -> dict[str, Any]:
    """Sections by their names, as TOML would nest them, with what the user says; values that are no constants are asked, but for
    keys that begin with ``quiet``. Raises PlannerError for a module that changes its sections in other ways."""
    named = _assigned(tree)
    _require_plain(path, tree, set(named))
    constants = {one.targets[0].id: str(one.value.value) for one in tree.body if isinstance(one, ast.Assign)
                 and isinstance(one.targets[0], ast.Name) and isinstance(one.value, ast.Constant)}  # fmt: skip
    data: dict[str, Any] = {name: {} for name in named}
    left: dict[str, str] = {}
    for name, pairs in named.items():
        for key, node in pairs:
            left.pop(f"{name}.{key}", None)
            data[name].pop(key, None)
            if (known := _value(node, constants)) is UNKNOWN:
                left[f"{name}.{key}"] = ast.unparse(node)[:60]
            else:
                data[name][key] = known
    found = dict(given.filled(data))
    said = {name for name in left if name.partition(".")[2] in found[name.partition(".")[0]]}
    asked = [Question(name=name, about=f"the module computes it: {text}") for name, text in left.items()
             if name not in said and not name.partition(".")[2].startswith(quiet)]  # fmt: skip
    if asked:
        ask(str(path), asked)
    return found


def _value(node: ast.expr, constants: dict[str, str]) -> Any:
    """A constant, or what whole numbers and constants of the module make; UNKNOWN = it cannot be told."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        text = ast.unparse(node).replace("//", ":")
        found = None if "/" in text else arithmetic(text.replace(":", "/"), lambda name: constants.get(name, "?"))
        return UNKNOWN if found is None else found


def _assigned(tree: ast.Module) -> dict[str, list[tuple[str, ast.expr]]]:
    """Dictionaries that the module assigns to names, with what it puts into them one by one."""
    found: dict[str, list[tuple[str, ast.expr]]] = {}
    for one in tree.body:
        target = one.targets[0] if isinstance(one, ast.Assign) and len(one.targets) == 1 else None
        if not isinstance(one, ast.Assign) or target is None:
            continue
        if isinstance(target, ast.Name) and (pairs := _pairs(one.value)) is not None:
            found[target.id] = pairs
        elif (place := _place(target)) is not None and place[0] in found:
            found[place[0]].append((place[1], one.value))
    return found


def _place(target: ast.expr | None) -> tuple[str, str] | None:
    """Name and key of NAME["key"]."""
    if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and isinstance(target.slice, ast.Constant):
        return target.value.id, str(target.slice.value)
    return None


def _pairs(node: ast.expr) -> list[tuple[str, ast.expr]] | None:
    """Keys and values of {"key": ...} or dict(key=...); None = it is neither, or takes others in."""
    if isinstance(node, ast.Dict) and all(isinstance(one, ast.Constant) for one in node.keys):
        return [(str(ast.literal_eval(key)), value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return [(one.arg, one.value) for one in node.keywords if one.arg] if all(one.arg for one in node.keywords) else None
    return None


def _require_plain(path: Path, tree: ast.Module, named: set[str]) -> None:
    """Raises PlannerError for files under the module, and for sections that are changed elsewhere than in lines of their own."""
    lines = [one for one in tree.body if isinstance(one, ast.Assign)]
    if any(isinstance(one.targets[0], ast.Name) and one.targets[0].id == BASE for one in lines):
        raise PlannerError(f"{path}: it is laid over the files of {BASE}, which are not read; import what both make")
    plain = {id(one) for one in lines}
    for one in (one for one in ast.walk(tree) if id(one) not in plain):
        places = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AugAssign) else []
        places += [one.func] if isinstance(one, ast.Call) else []
        changed = next((name for place in places if (name := _root(place))), "")
        if changed in named & CHANGED:
            raise PlannerError(f"{path}: line {places[0].lineno} changes {changed} in a way that is not read; write its values out")


def _root(place: ast.expr) -> str:
    while isinstance(place, ast.Attribute | ast.Subscript):
        place = place.value
    return place.id if isinstance(place, ast.Name) else ""
