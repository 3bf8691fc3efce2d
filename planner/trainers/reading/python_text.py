"""Scripts and notebooks as syntax trees, and what single nodes of them say."""

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.shell.text import cleaned, gap, is_open, roots
from planner.trainers.reading.values import read_text

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Bound:
    """A value that a name is given."""

    value: ast.expr | None
    """None = something that is no expression: a loop, an import, +=."""
    line: int
    sure: bool
    """It stands under no condition and in no loop."""
    home: Function | None


UNNAMED = "?"
"""What a gap waits for that no variable holds: it is asked for by the keyword that it is given to."""
DTYPES = ("bfloat16", "float16", "float32", "half", "float")
CONVERSIONS = {"int": int, "float": float, "str": str, "bool": bool}
LARGEST = 10**15
YES = ("is_bfloat16_supported", "is_bf16_supported", "is_bfloat16_available")
"""Questions about the GPU that every one of the library answers with yes, Volta and Turing apart."""
ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod,
}  # fmt: skip
COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.eq, ast.IsNot: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a script, or of the cells of a notebook. Raises PlannerError."""
    text = cleaned(read_text(path))
    if path.suffix.lower() != ".ipynb":
        if re.search(r"^(![A-Za-z]|%[a-z])", text, re.MULTILINE):  # cells of a notebook, saved as they are
            text = re.sub(r"^([ \t]*)(?:![A-Za-z]|%[a-z]).*$", r"\1pass", text, flags=re.MULTILINE)
        return by_their_names(library.parse_python(text, str(path)))
    found, line, error = ast.Module([], []), 0, None
    for source in _cells(text, path):
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
    return by_their_names(found)


OF_LIBRARIES = ("transformers", "trl", "peft", "unsloth")


def by_their_names(tree: ast.Module) -> ast.Module:
    """A script whose classes of libraries are called as these call them: from transformers import Trainer as HFTrainer."""
    nodes = list(ast.walk(tree))
    taken = [(one, not node.level and (node.module or "").partition(".")[0] in OF_LIBRARIES)
             for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names]  # fmt: skip
    others = {one.asname or one.name for one, ours in taken if not ours} | {
        one.name for one in nodes if isinstance(one, ast.FunctionDef)}  # fmt: skip
    names = {one.asname: one for one, ours in taken if ours and one.asname and one.name[:1].isupper() and one.name not in others}
    for node in nodes if names else ():
        if isinstance(node, ast.Name) and node.id in names:
            node.id = names[node.id].name
    for one in names.values():
        one.asname = None
    return tree


def tree_or_none(path: Path | None) -> ast.Module | None:
    """The same of a file that may be missing or no Python."""
    try:
        return tree_of(path) if path is not None else None
    except PlannerError:
        return None


def _cells(text: str, path: Path) -> Iterator[str]:
    """What stands in the code cells of a notebook. Raises PlannerError."""
    notebook = library.parse_json(text, str(path))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    for cell in cells if isinstance(cells, list) else []:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            yield "".join(map(str, source)) if isinstance(source, list) else str(source)


def shell_of_cells(path: Path) -> str:
    """The commands of a notebook's cells: lines behind ! or %, cells that a shell runs whole, and files that cells write. Raises
    PlannerError."""
    found: list[str] = []
    for source in _cells(cleaned(read_text(path)), path):
        head, _, rest = source.partition("\n")
        lines = (one.group() for one in re.finditer(r"^[ \t]*(! *[A-Za-z]|%[a-z])(.*\\\n)*.*$", source, re.MULTILINE))
        file = re.fullmatch(r"%%(?:writefile|file) +(-a +)?(\S+) *", head)
        if file is not None:
            found.append(f"cat >{'>' if file[1] else ''} {file[2]} <<'END_OF_CELL'\n{rest}\nEND_OF_CELL")
        else:
            found += [rest] if re.match(r"%%(ba|z)?sh\b", head) else lines
    return "\n".join(found)


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


_FIELDS = re.compile(r"(?i)\w*field|option|argument|(hf)?arg|flag|attrib|ib")
"""Functions that say a field of a class or an option, whose first word is its default: of dataclasses, pydantic, attrs, typer."""


def default_of(node: ast.expr) -> ast.expr:
    """The default in a field(...) of a dataclass, or in a call of its kin: HfArg(default=...) of transformers."""
    if not isinstance(node, ast.Call) or of_environment(node, ast.unparse(node.func)):
        return node
    words = {one.arg: one.value for one in node.keywords}
    if "default" in words:
        return words["default"]
    if isinstance(factory := words.get("default_factory"), ast.Lambda):
        return factory.body
    first = node.args[0] if node.args and _FIELDS.fullmatch(last_name(node.func)) else node
    return node if isinstance(first, ast.Constant) and (first.value is ... or str(first.value).startswith("--")) else first


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a class assigns in its body, with what it assigns; of one that is None there, what __post_init__ gives it."""
    after = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__post_init__"]
    own = [pair for part in after for one in ast.walk(part) for pair in targets(one)]
    later = {last_name(name): value for name, value in reversed(own) if ast.unparse(name).startswith("self.")}
    for one in node.body:
        target = one.target if isinstance(one, ast.AnnAssign) else one.targets[0] if isinstance(one, ast.Assign) else None
        if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
            nothing = isinstance(one.value, ast.Constant) and one.value.value is None
            yield target.id, later.get(target.id, one.value) if nothing else one.value


def names_of(tree: ast.AST) -> list[str]:
    """Last names of all names and attributes, in the order of the text."""
    nodes = [one for one in ast.walk(tree) if isinstance(one, ast.Name | ast.Attribute)]
    return [last_name(one) for one in sorted(nodes, key=lambda one: (one.lineno, one.col_offset))]


def computed(operation: ast.operator, left: Any, right: Any) -> Any:
    """A number of two numbers that are not too large; None = not known."""
    if not all(isinstance(one, int | float) and abs(one) < LARGEST for one in (left, right)):
        return None
    if isinstance(operation, ast.Pow):
        whole = isinstance(right, int)
        return left**right if whole and abs(left) <= 1000 and 0 <= right <= (49 if abs(left) <= 2 else 15) else None
    divides = isinstance(operation, ast.Div | ast.FloorDiv | ast.Mod)
    return ARITHMETIC[type(operation)](left, right) if type(operation) in ARITHMETIC and not (divides and right == 0) else None


def compared(operation: ast.cmpop, left: Any, right: Any) -> bool | None:
    """What a comparison of two values says; None = not known."""
    try:
        if isinstance(operation, ast.In | ast.NotIn):
            return (left in right) is isinstance(operation, ast.In) if isinstance(right, str | list | dict) else None
        return COMPARISONS[type(operation)](left, right)
    except (KeyError, TypeError):
        return None


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


ENVIRONMENT = ("os.getenv", "os.environ.get", "environ.get", "getenv")
OWN_READS = re.compile(r"(get_?|read_?)?env(_?(var|int|float|str|bool))?|env\.(int|float|str|bool)|(int|float|str|bool)_env")
"""Functions of projects that take a variable of the environment, else the default that they are given."""


def of_environment(node: ast.Call, name: str) -> bool:
    """Whether a call of that dotted name reads a variable of the environment."""
    if name in ENVIRONMENT:
        return bool(node.args)
    variable = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    said = len(node.args) > 1 or keyword(node, "default")
    upper = isinstance(variable, str) and re.fullmatch(r"[A-Z][A-Z0-9_]{1,60}", variable) is not None
    return upper and bool(said) and OWN_READS.fullmatch(name.lower()) is not None


def read_of_environment(function: Function) -> str | None:
    """'int' for a function of a project that only gives int(os.environ.get(NAME, usual)) of its first two parameters, '' where it
    converts nothing; None = another function."""
    body = [one for one in function.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
    kind = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    inner = value.args[0] if isinstance(value, ast.Call) and kind in CONVERSIONS and len(value.args) == 1 else value
    if not isinstance(inner, ast.Call) or ast.unparse(inner.func) not in ENVIRONMENT or not inner.args:
        return None
    names = [one.arg for one in function.args.args[:2]]
    texts = (isinstance(one, ast.Call) and ast.unparse(one.func) == "str" and one.args for one in inner.args)
    given = [getattr(one, "args", [one])[0] if text else one for one, text in zip(inner.args, texts, strict=True)]
    return (kind if inner is not value else "") if names == [getattr(one, "id", None) for one in given] else None


def keyword(node: ast.Call, name: str) -> list[ast.expr]:
    """What a call is given under a name."""
    return [one.value for one in node.keywords if one.arg == name]


def entry(table: ast.expr, key: Any) -> ast.expr | None:
    """What a dict that is written out has under a key; None for what is no such dict, too."""
    pairs = zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ()
    return next((value for one, value in pairs if isinstance(one, ast.Constant) and one.value == key), None)


def called(value: Any, name: str) -> Any:
    """A value whose gap, where it has no name of its own, is called by its keyword."""
    return gap([name]) if isinstance(value, str) and is_open(value) and UNNAMED in roots(value) else value


OF_TEXTS = ("split", "lower", "upper", "strip", "lstrip", "rstrip", "replace", "startswith", "endswith")
"""Methods of texts whose value is known where the text is."""


def of_text(method: str, text: str, given: list[Any]) -> Any:
    """What a method of a text gives."""
    if any(isinstance(one, str) and is_open(one) for one in given):
        return gap([UNNAMED])
    try:
        return getattr(text[:10000], method)(*(tuple(one) if isinstance(one, list) else one for one in given))
    except (TypeError, ValueError):
        return gap([UNNAMED])


def asked_as(test: ast.expr, value: Any) -> Any:
    """The value of a test; a gap without a name is called by the name that is tested: its answer decides all that hangs on it."""
    name = _tested(test)
    return gap([name]) if name and isinstance(value, str) and value == gap([UNNAMED]) else value


def switch(test: ast.expr, value: str, results: tuple[Any, ...], choices: dict[str, list[str]]) -> str:
    """The open value of a test; a name that is tested as it stands is true or false, unless it is also a result of its test."""
    name = _tested(test)
    if name and value == gap([name]) and not any(isinstance(one, str) and name in roots(one) for one in results):
        choices.setdefault(name, ["true", "false"])
    return value


def _tested(test: ast.expr) -> str:
    """The name in NAME or not NAME; empty for another test."""
    inner = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    return last_name(inner) if isinstance(inner, ast.Name | ast.Attribute) else ""


def put_compared(names: list[str], values: tuple[Any, Any], choices: dict[str, list[str]]) -> list[str]:
    """The open names of a comparison; one that is compared with texts has these for answers, or none of them."""
    texts = [one for one in values if isinstance(one, str) and one and not is_open(one)]
    if len(names) == len(texts) == 1 and gap(names) in values and re.fullmatch(r"(?!config_file$)\w+", names[0]):
        known = choices.setdefault(names[0], [])
        known[:] = list(dict.fromkeys([*(one for one in known if one != "none"), *texts, "none"]))
    return names


def given_for(name: str, place: int, call: ast.Call) -> ast.expr | None:
    """What a call gives a parameter, by its name or in its place; None = nothing."""
    named = next((one.value for one in call.keywords if one.arg == name), None)
    return call.args[place] if named is None and 0 <= place < len(call.args) else named


def called_as(function: Function, owners: Mapping[int, str]) -> str:
    """The name under which a function is called: that of its class where it makes the objects of one; ``owners``: methods' classes
    by ids."""
    return owners.get(id(function), function.name) if function.name == "__init__" else function.name


def reached(calls: list[ast.Call], homes: Mapping[int, Function | None], called: Collection[str]) -> list[ast.Call]:
    """Calls without those in functions that nothing calls, where others are there; ``homes`` of calls by ids."""
    names = {id(one): getattr(homes.get(id(one)), "name", "main") for one in calls}
    return [one for one in calls if names[id(one)] in ("main", "__init__") or names[id(one)] in called] or calls


FAR = 1_000_000
"""Lines between a program and each module, so that what stands in the program comes first."""


def above(some: list[Bound], line: int) -> list[Bound]:
    """What of a name is bound above a line; what a module says is, and the program's own goes before it."""
    return [one for one in some if one.line <= line] or [one for one in some if line < FAR <= one.line]
