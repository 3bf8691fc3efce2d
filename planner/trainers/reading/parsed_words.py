"""Arguments that a program hands to its parser as literals: read as calls of the classes that the parser makes of them."""

import ast
import re
from collections.abc import Iterator

from planner.trainers.reading.given import value_of
from planner.trainers.reading.python_text import fields_of, given_for, last_name

PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
OF_TRAINERS = re.compile(r"\b(SFT|DPO)Config\b|TrainingArguments\b")
"""Classes whose fields stand in their library."""


def with_parsed(tree: ast.Module) -> ast.Module:
    """The tree with calls of the classes in the place of parser.parse_args_into_dataclasses(args=["--name", value]) and of
    parser.parse_dict({"name": value}).  [transformers, hf_argparser.py]"""
    return ast.fix_missing_locations(_Made(tree).visit(tree)) if any(True for _ in _calls(tree, *PARSERS)) else tree


def _calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    return (one for one in ast.walk(tree) if isinstance(one, ast.Call) and last_name(one.func) in names)


class _Made(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        made = [one for one in ast.walk(tree) if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)]
        self.held = {ast.unparse(one.targets[0]): one.value for one in made}
        classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
        self.fields = {one.name: {name for name, _ in fields_of(one)} for one in classes}
        self.bases = {one.name: " ".join(map(last_name, one.bases)) for one in classes}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name, parser = last_name(node.func), self._of(getattr(node.func, "value", None))
        if name not in ("parse_args_into_dataclasses", "parse_args_and_config", "parse_dict") or not isinstance(parser, ast.Call):
            return node
        given = self._of(given_for("args", 0, node))
        kinds = getattr(parser.args[0], "elts", [parser.args[0]]) if parser.args else []
        if last_name(parser.func) not in PARSERS or not kinds or not isinstance(given, ast.List | ast.Dict):
            return node
        words = _words(given)
        each = {last_name(one): self.fields.get(last_name(one), set()) for one in kinds}
        calls: list[ast.expr] = []
        named = [f"{self.bases.get(last_name(one), '')} {last_name(one)}" for one in kinds]
        main = next((one for one, name in zip(kinds, named, strict=True) if OF_TRAINERS.search(name)), kinds[-1])
        for kind in kinds:
            own, others = each[last_name(kind)], set().union(*(each[one] for one in each if one != last_name(kind)))
            some = [one for one in words if one in own or (kind is main and one not in others)]
            made = [ast.keyword(name, words[name]) for name in some]
            calls.append(ast.copy_location(ast.Call(kind, [], made), node))
        return ast.copy_location(ast.Tuple(calls, ast.Load()), node)

    def _of(self, node: ast.expr | None) -> ast.expr | None:
        """What a name holds, or the expression itself."""
        return self.held.get(node.id) if isinstance(node, ast.Name) else node


def _words(given: ast.List | ast.Dict) -> dict[str, ast.expr]:
    """Names of arguments and what they are given; a name alone is a switch that is on."""
    if isinstance(given, ast.Dict):
        pairs = zip(given.keys, given.values, strict=True)
        return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    found: dict[str, ast.expr] = {}
    name = ""
    for one in given.elts:
        text = one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else None
        if text is not None and text.startswith("--"):
            name, _, value = text.lstrip("-").replace("-", "_").partition("=")
            found[name] = ast.Constant(value_of(value) if value else True)
        elif name:
            found[name] = ast.Constant(value_of(text)) if text is not None else one
    return found
