"""Factories of TransformerConfig in the olmo_core around a script: forks change their sizes, and add others."""

import ast
import math
from pathlib import Path
from typing import Any

from planner.trainers.reading.python_text import computed, last_name, tree_or_none
from planner.trainers.reading.settings import beside

PLACES = ("src/olmo_core/nn/transformer/config.py", "olmo_core/nn/transformer/config.py")
NUMBERS = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_size_multiplier", "hidden_size_multiple_of")
"""Keywords of llama_like that are compared."""
ENDS = {"llama_like": {}, "llama_like_moe": {"moe": True}}
DEEPEST = 6
"""Factories that call one another."""


def own_factory(path: Path, name: str) -> dict[str, Any] | None:
    """What a factory around a script calls llama_like with, by itself; {} = it is not there; None = it is no plain call."""
    tree = next(filter(None, (tree_or_none(beside(path, one, (".py",))) for one in PLACES)), ast.Module([], []))
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "TransformerConfig"]
    functions = {one.name: one for part in classes for one in part.body if isinstance(one, ast.FunctionDef)}
    return _words(functions, name, 0) if name in functions and name not in ENDS else {}


def differs(own: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether sizes are others than those of OLMo-core's own factory."""
    usual = {"hidden_size_multiple_of": 256, "n_kv_heads": known.get("n_heads")}
    pairs = ((own[one], known.get(one, usual.get(one))) for one in NUMBERS if isinstance(own.get(one), int | float))
    return any(not isinstance(right, int | float) or not math.isclose(left, right) for left, right in pairs)


def _words(functions: dict[str, ast.FunctionDef], name: str, depth: int) -> dict[str, Any] | None:
    function = functions.get(name)
    nodes = list(ast.walk(function)) if function is not None and depth < DEEPEST else []
    put = [one for one in nodes if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)]
    local = {ast.unparse(one.targets[0]): one.value for one in put}
    made = [one.value for one in nodes if isinstance(one, ast.Return)]
    call = local.get(made[0].id) if len(made) == 1 and isinstance(made[0], ast.Name) else made[0] if len(made) == 1 else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "cls"):
        return None
    below = ENDS[call.func.attr] if call.func.attr in ENDS else _words(functions, call.func.attr, depth + 1)
    own = {one.arg: _value(one.value, local) for one in call.keywords if one.arg not in (None, "vocab_size")}
    return None if below is None else {**below, **{str(key): value for key, value in own.items()}}


def _value(node: ast.expr, local: dict[str, ast.expr], depth: int = 0) -> Any:
    """A literal, the default of kwargs.pop(name, default), the member of an enumeration; else the expression itself."""
    if isinstance(node, ast.Name) and node.id in local and depth < DEEPEST:
        return _value(local[node.id], local, depth + 1)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.BinOp):
        sides = [_value(one, local, depth + 1) for one in (node.left, node.right)]
        return computed(node.op, *sides) if all(isinstance(one, int | float) for one in sides) else node
    taken = isinstance(node, ast.Call) and last_name(node.func) in ("pop", "get") and len(node.args) == 2
    return _value(node.args[1], local, depth) if isinstance(node, ast.Call) and taken else node
