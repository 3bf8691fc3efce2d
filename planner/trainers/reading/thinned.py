"""Mappings that a program thins on their way: {k: v for k, v in mapping.items() if ...}."""

import ast
from collections.abc import Callable
from typing import Any

from planner.trainers.reading import python_text
from planner.trainers.reading.python_text import UNNAMED, Function, last_name
from planner.trainers.reading.shell.text import gap, is_open


def thinned(node: ast.DictComp) -> ast.expr | None:
    """The mapping that {k: v for k, v in mapping.items() if ...} leaves some keys of; None = it makes something else."""
    one, parts = node.generators[0], ast.unparse(node.generators[0].target).strip("()").split(", ")
    plain = len(node.generators) == 1 and parts == [ast.unparse(node.key), ast.unparse(node.value)]
    pairs = plain and isinstance(one.iter, ast.Call) and last_name(one.iter.func) == "items"
    return getattr(one.iter.func, "value", None) if pairs and isinstance(one.iter, ast.Call) else None


def filtered(function: Function, call: ast.Call) -> tuple[ast.DictComp, ast.expr] | None:
    """(What thins, the mapping that it is given) of a call of a function which gives a mapping back less some of its keys; None =
    it gives something else."""
    returns = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
    made = returns[0] if len(returns) == 1 else None
    held = thinned(made) if isinstance(made, ast.DictComp) else None
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if not isinstance(made, ast.DictComp) or not isinstance(held, ast.Name) or held.id not in names:
        return None
    given = python_text.given_for(held.id, names.index(held.id), call)
    return None if given is None else (made, given)


def kept(node: ast.DictComp, held: Any, value_of: Callable[[ast.expr], Any]) -> Any:
    """A mapping less the keys that the conditions leave out; a gap where one of them is not known."""
    if not isinstance(held, dict):
        return gap([UNNAMED])
    found = dict(held)
    for test in node.generators[0].ifs:
        for one in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            meets = _condition(node, one, value_of)
            if meets is None:
                return gap([UNNAMED])
            found = {key: value for key, value in found.items() if meets(key, value)}
    return found


def _condition(node: ast.DictComp, test: ast.expr, value_of: Callable[[ast.expr], Any]) -> Callable[[Any, Any], bool] | None:
    """Which pairs meet a condition; None = not known. A key is in names that are not known: those are what a class takes."""
    key, value = ast.unparse(node.key), ast.unparse(node.value)
    if isinstance(test, ast.Name) and test.id == value:
        return lambda _, held: bool(held)
    if isinstance(test, ast.Call) and last_name(test.func) == "hasattr" and [ast.unparse(one) for one in test.args[1:]] == [key]:
        return lambda *_: True
    if not isinstance(test, ast.Compare) or len(test.ops) > 1 or not isinstance(test.left, ast.Name):
        return None
    name, other, asked = test.left.id, test.comparators[0], test.ops[0]
    if name == value and isinstance(asked, ast.IsNot) and ast.unparse(other) == "None":
        return lambda _, held: held is not None
    if name != key or not isinstance(asked, ast.In | ast.NotIn):
        return None
    names, inside = value_of(other), isinstance(asked, ast.In)
    if isinstance(names, list | tuple | set | dict) and not any(isinstance(one, str) and is_open(one) for one in names):
        return lambda named, _: (named in names) is inside
    return (lambda *_: True) if inside and isinstance(other, ast.Name | ast.Attribute | ast.Call) else None
