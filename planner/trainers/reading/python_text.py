"""Scripts and notebooks as syntax trees, and what single nodes of them say."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.shell.text import cleaned
from planner.trainers.reading.values import read_text


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a script, or of the cells of a notebook. Raises PlannerError."""
    text = cleaned(read_text(path))
    if path.suffix.lower() != ".ipynb":
        return library.parse_python(text, str(path))
    notebook = library.parse_json(text, str(path))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    found, line, error = ast.Module([], []), 0, None
    for cell in cells if isinstance(cells, list) else []:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        source = "".join(map(str, source)) if isinstance(source, list) else str(source)
        source = re.sub(r"^([ \t]*)[!%?](.*\\\n)*.*$", r"\1pass", source, flags=re.MULTILINE)
        try:
            tree = library.parse_python(source, str(path))
        except PlannerError as broken:  # a cell in another language
            error = broken
            continue
        found.body += ast.increment_lineno(tree, line).body
        line += source.count("\n") + 1
    if not found.body:
        raise error or PlannerError(f"{path}: a notebook without code")
    return found


def is_main(node: ast.AST) -> bool:
    """Whether this is the block that runs only in a script."""
    return isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")


def targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement assigns to what; a value of None is not known."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else []
                each = values if len(values) == len(target.elts) else [None] * len(target.elts)
                yield from zip(target.elts, each, strict=True)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign | ast.For):
        yield node.target, None
    elif isinstance(node, ast.With):
        yield from ((one.optional_vars, one.context_expr) for one in node.items if one.optional_vars is not None)


def option_names(call: ast.Call) -> Iterator[str]:
    """Names of an option of argparse as attributes."""
    for one in call.args:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value.lstrip("-").replace("-", "_")
    for word in call.keywords:
        if word.arg == "dest" and isinstance(word.value, ast.Constant):
            yield str(word.value.value)


def default_of(node: ast.expr) -> ast.expr:
    """The default in a field(...) of a dataclass."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("field", "Field")):
        words = {one.arg: one.value for one in node.keywords}
        if "default" in words:
            return words["default"]
        factory = words.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return factory.body
    return node
