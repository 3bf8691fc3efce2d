"""Branches of a Python program that its options decide: those that are not taken are left out. Nothing is executed."""

import ast
from typing import Any

from planner.trainers.reading.given import Given, value_of
from planner.trainers.reading.shell.text import is_open

UNKNOWN = object()
"""A value that the text does not say."""
SWITCHES = {"store_true": False, "store_false": True}


def taken_branches(tree: ast.Module, said: Given, defaults: list[str]) -> ast.Module:
    """A program without the branches of ``if args.name == ...`` that options of argparse do not take, by what is said or by their
    defaults, whose names go into ``defaults``."""
    options: dict[str, ast.Call] = {}
    for call in (one for one in ast.walk(tree) if isinstance(one, ast.Call) and getattr(one.func, "attr", "") == "add_argument"):
        named = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
        name = next((one for one in named if one.startswith("--")), next(iter(named), ""))
        options[name.lstrip("-").replace("-", "_")] = call
    return _Taken(options, said, defaults).visit(tree) if options else tree


class _Taken(ast.NodeTransformer):
    def __init__(self, options: dict[str, ast.Call], said: Given, defaults: list[str]) -> None:
        self.options, self.said, self.defaults = options, said, defaults

    def visit_If(self, node: ast.If) -> Any:
        """The branch that is taken in the place of both, where it is known."""
        truth = self._truth(node.test)
        if truth is UNKNOWN:
            return self.generic_visit(node)
        found = [self.visit(one) for one in (node.body if truth else node.orelse)]
        return [inner for one in found for inner in (one if isinstance(one, list) else [one])]

    def _truth(self, test: ast.expr) -> Any:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand)
            return inner if inner is UNKNOWN else not inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = self._value(test.left), self._value(test.comparators[0])
            if UNKNOWN in (left, right) or not isinstance(test.ops[0], ast.Eq | ast.NotEq):
                return UNKNOWN
            return (left == right) == isinstance(test.ops[0], ast.Eq)
        value = self._value(test) if isinstance(test, ast.Attribute) else UNKNOWN
        return value if value is UNKNOWN else bool(value)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        call = self.options.get(node.attr) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else None
        if call is None or not isinstance(node, ast.Attribute):
            return UNKNOWN
        if (given := self.said.setting(node.attr)) is not None:
            return UNKNOWN if is_open(given) else value_of(given)
        words = {one.arg: one.value for one in call.keywords}
        action, usual = words.get("action"), words.get("default")
        if isinstance(action, ast.Constant) and action.value in SWITCHES:
            self.defaults.append(node.attr)
            return SWITCHES[action.value]
        if not isinstance(usual, ast.Constant):
            return UNKNOWN
        self.defaults.append(node.attr)
        return usual.value
