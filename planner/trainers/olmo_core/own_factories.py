"""Functions of a project that call a factory of OLMo-core's models, written out where a script calls them."""

import ast
import copy
from collections.abc import Mapping
from pathlib import Path

from planner.trainers.reading.python_text import last_name, tree_or_none
from planner.trainers.reading.settings import beside

OWNER = "TransformerConfig"


def written_out(tree: ast.Module, path: Path) -> ast.Module:
    """The tree with the factory in place of the calls of such functions, its own and those of modules of the project."""
    calls = {one.func.id for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    called = {id(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
    handed_on = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and id(one) not in called}  # as builders
    functions = {name: one for name, one in _functions(tree).items() if name not in handed_on}
    if calls & functions.keys():
        tree.body = [one for one in tree.body if not (isinstance(one, ast.FunctionDef) and one.name in functions)]
    for node in [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module]:
        asked = {one.name: one.asname or one.name for one in node.names}
        if not (node.module or "").startswith("olmo_core") and (there := _module(path, node)):
            functions |= {asked[name]: one for name, one in there.items() if name in asked}
    return _Written(functions).visit(tree) if functions else tree


def _module(path: Path, node: ast.ImportFrom) -> dict[str, ast.FunctionDef]:
    file = beside(path, f"{str(node.module).replace('.', '/')}.py", (".py",))
    tree = tree_or_none(file) if file != path else None
    return _functions(tree) if tree is not None else {}


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions of names that return what one factory makes."""
    found = {}
    for one in tree.body:
        if not isinstance(one, ast.FunctionDef) or one.args.vararg or one.args.posonlyargs:
            continue
        lines = [line for line in one.body if not isinstance(line, ast.Expr)]
        plain = all(isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) for line in lines[:-1])
        made = lines[-1].value if lines and isinstance(lines[-1], ast.Return) else None
        if plain and isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and last_name(made.func.value) == OWNER:
            found[one.name] = one
    return found


class _Written(ast.NodeTransformer):
    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self._functions = functions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The factory with the arguments of the call."""
        self.generic_visit(node)
        made = self._functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if made is None or any(one.arg is None for one in node.keywords) or any(isinstance(one, ast.Starred) for one in node.args):
            return node
        names = [one.arg for one in (*made.args.args, *made.args.kwonlyargs)]
        usual = [*zip(reversed(made.args.args), reversed(made.args.defaults), strict=False),
                 *zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)]  # fmt: skip
        said = dict(zip(names, node.args, strict=False)) | {str(one.arg): one.value for one in node.keywords}
        known = {one.arg: value for one, value in usual if value is not None} | {one: said[one] for one in said if one in names}
        filled = _Filled(known, {one: value for one, value in said.items() if one not in names})
        *before, last = [line for line in made.body if not isinstance(line, ast.Expr)]
        for line in before:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                known[line.targets[0].id] = filled.visit(copy.deepcopy(line.value))
        found = filled.visit(copy.deepcopy(last.value)) if isinstance(last, ast.Return) and last.value else node
        return ast.fix_missing_locations(ast.copy_location(found, node))


class _Filled(ast.NodeTransformer):
    """Parameters as the call says them; kwargs.pop("name", 8) as it says it, else 8."""

    def __init__(self, known: dict[str, ast.expr], rest: dict[str, ast.expr]) -> None:
        self._known, self._rest = known, rest

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self._known.get(node.id, node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        taken = isinstance(node.func, ast.Attribute) and node.func.attr in ("pop", "get") and isinstance(node.func.value, ast.Name)
        if taken and len(node.args) == 2 and isinstance(node.args[0], ast.Constant):
            return self._rest.pop(str(node.args[0].value), None) or self.visit(node.args[1])
        node.func = copy.deepcopy(node.func)
        node.args = [self.visit(one) for one in node.args]
        kept = [ast.keyword(one.arg, self.visit(one.value)) for one in node.keywords if one.arg is not None]
        spread = len(kept) < len(node.keywords)
        node.keywords = [*kept, *(ast.keyword(name, value) for name, value in self._rest.items() if spread)]
        return node
