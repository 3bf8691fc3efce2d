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
    return _Taken(options, said, defaults, _names_of_options(tree, options)).visit(tree) if options else tree


def _names_of_options(tree: ast.Module, options: dict[str, ast.Call]) -> dict[str, ast.Attribute]:
    """Names that stand for an option throughout: what assigns one anywhere is the same ``args.option``, and it is no parameter."""
    given: dict[str, list[ast.expr | None]] = {}
    whole = {one.targets[0] for one in ast.walk(tree) if isinstance(one, ast.Assign) and len(one.targets) == 1}
    values = {one.targets[0]: one.value for one in ast.walk(tree) if isinstance(one, ast.Assign) and one.targets[0] in whole}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            given.setdefault(node.id, []).append(values.get(node))
        elif isinstance(node, ast.arg):
            given.setdefault(node.arg, []).append(None)
    found: dict[str, ast.Attribute] = {}
    for name, all_values in given.items():
        first = all_values[0]
        if isinstance(first, ast.Attribute) and isinstance(first.value, ast.Name) and first.attr in options:
            alike = {ast.dump(one) for one in all_values if one is not None}
            if None not in all_values and len(alike) == 1:
                found[name] = first
    return found


class _Taken(ast.NodeTransformer):
    def __init__(
        self, options: dict[str, ast.Call], said: Given, defaults: list[str], names: dict[str, ast.Attribute]
    ) -> None:
        self.options, self.said, self.defaults, self.names = options, said, defaults, names

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
        if isinstance(test, ast.BoolOp):
            decides = isinstance(test.op, ast.Or)  # one that is true decides an or, one that is false an and
            each = [self._truth(one) for one in test.values]
            return decides if decides in each else UNKNOWN if UNKNOWN in each else not decides
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.In | ast.NotIn):
            left, among = self._value(test.left), self._constants(test.comparators[0])
            return UNKNOWN if left is UNKNOWN or among is None else (left in among) == isinstance(test.ops[0], ast.In)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = self._value(test.left), self._value(test.comparators[0])
            if UNKNOWN in (left, right) or not isinstance(test.ops[0], ast.Eq | ast.NotEq):
                return UNKNOWN
            return (left == right) == isinstance(test.ops[0], ast.Eq)
        value = self._value(test) if isinstance(test, ast.Attribute | ast.Name) else UNKNOWN
        return value if value is UNKNOWN else bool(value)

    def _constants(self, node: ast.expr) -> list[Any] | None:
        listed = isinstance(node, ast.List | ast.Tuple | ast.Set) and all(isinstance(one, ast.Constant) for one in node.elts)
        return list(ast.literal_eval(node)) if listed else None

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            node = self.names.get(node.id, node)
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
