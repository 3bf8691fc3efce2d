"""Modules of a project that a program takes functions and classes from: they are read with it, as if they stood in it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.python_text import FAR, tree_of

MOST_FILES, MOST_NAMES = 60, 400
LARGEST = 400_000
"""Bytes of a module that is read."""
INSTALLED = ("trl", "transformers", "peft", "accelerate", "deepspeed")
"""Libraries that are read as their releases are, also where a project is a fork of one and holds its sources."""
ABOVE = 5
"""Folders above the program in which the packages of its project lie."""


@dataclass
class _Module:
    """What one file defines and imports, by name."""

    file: Path
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    imported: dict[str, ast.ImportFrom] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)


def with_modules(tree: ast.Module, file: Path) -> ast.Module:
    """A program with the definitions that it imports from files of its project, and with those that these use in turn; a name that
    it defines itself stays its own. Files that are no Python are left out."""
    program = _module(file, tree)
    files: dict[Path, _Module | None] = {file.resolve(): program}
    waiting = [(program, name) for name in _used(tree) if name not in program.defined]
    seen = set(program.defined)
    body = list(tree.body)
    while waiting and len(files) < MOST_FILES and len(seen) < MOST_NAMES:
        module, name = waiting.pop(0)
        home, node = _found(module, name, files)
        if node is None or home is None or name in seen:
            continue
        seen.add(name)
        body.append(ast.increment_lineno(node, FAR * list(files).index(home.file.resolve())) if home is not program else node)
        waiting += [(home, one) for one in _used(node) if one not in seen]
    return ast.Module(body, [])


def takes_settings(tree: ast.Module, file: Path) -> bool:
    """Whether a program takes a mapping or a number from a file of its project, or a class of fields alone of which it changes none
    where it makes it: Config(), CFG.name."""
    program = _module(file, tree)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    bare = {id(one.func) for one in calls if not (one.args or one.keywords)}
    bare |= {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
    for name in program.imported:
        uses = [id(one) for one in ast.walk(tree) if isinstance(one, ast.Name) and one.id == name]
        node = _found(program, name, {})[1] if uses else None
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.Constant):
            return True
        node = node if bare.issuperset(uses) else None
        parts = node.body if isinstance(node, ast.ClassDef) and not node.bases else []
        inner = [one for one in parts if isinstance(one, ast.FunctionDef)]
        fields = any(isinstance(one, ast.Assign | ast.AnnAssign) for one in parts)
        if fields and all(one.name == "__post_init__" for one in inner):
            return True
    return False


def _found(module: _Module, name: str, files: dict[Path, _Module | None], depth: int = 0) -> tuple[_Module | None, ast.stmt | None]:
    """Where a name that a module uses is defined; (None, None) outside of the project."""
    if name in module.defined:
        return module, module.defined[name]
    for node in [module.imported[name]] if name in module.imported else module.stars:
        place = _place(module.file, node)
        if place is None or depth > ABOVE or (place.resolve() not in files and len(files) >= MOST_FILES):
            continue
        if place.resolve() not in files:  # each file is read once
            files[place.resolve()] = _read(place)
        other = files[place.resolve()]
        found = _found(other, name, files, depth + 1) if other is not None else (None, None)
        if found[1] is not None:
            return found
    return None, None


def _place(file: Path, node: ast.ImportFrom) -> Path | None:
    """The file of a module that another one imports from."""
    if not node.level and (node.module or "").partition(".")[0] in INSTALLED:
        return None  # a program of a fork of the library
    path = (node.module or "").replace(".", "/")
    folder = file.resolve().parent
    roots = [[folder, *folder.parents][node.level - 1]] if 0 < node.level < ABOVE else [folder, *list(folder.parents)[:ABOVE]]
    for root in roots:
        for place in (f"{path}.py", f"{path}/__init__.py", f"src/{path}.py", f"src/{path}/__init__.py"):
            if path and library.is_file(root / place) and (root / place).stat().st_size <= LARGEST:
                return root / place
        if not path and library.is_file(root / "__init__.py"):
            return root / "__init__.py"
    return None


def own_model(file: Path) -> str | None:
    """The class of a language model that a program loads and a module of its project defines, with that module."""
    try:
        nodes = list(ast.walk(tree_of(file)))
    except PlannerError:
        return None
    loads = [one.func.value for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
             and one.func.attr == "from_pretrained"]  # fmt: skip
    named = {one.id for one in loads if isinstance(one, ast.Name)}
    imports = [(node, one) for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names]
    for node, one in imports:
        model = (one.asname or one.name) in named and one.name.endswith(("ForCausalLM", "LMHeadModel"))
        if model and (place := _place(file, node)) is not None:
            return f"{one.name} of {place.name}"
    return None


def _read(file: Path) -> _Module | None:
    try:
        return _module(file, tree_of(file))
    except PlannerError:
        return None


def _module(file: Path, tree: ast.Module) -> _Module:
    found = _Module(file)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.defined[node.targets[0].id] = node
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)):
        if any(one.name == "*" for one in node.names):
            found.stars.append(node)
        found.imported |= {one.name: node for one in node.names if one.asname in (None, one.name)}
    return found


def _used(node: ast.AST) -> Iterator[str]:
    """Names in the order of the text, each once."""
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    yield from dict.fromkeys(one.id for one in sorted(names, key=lambda one: (one.lineno, one.col_offset)))
