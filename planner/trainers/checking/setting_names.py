"""Names of a trainer's settings, read from the source of its package without importing it, and those that an export uses.

check.py of a trainer says where they stand: ``known_names(root)`` of the folder that holds its package, by section, and
``used_names(folder)`` of an exported folder.
Neither a GPU nor the trainer's dependencies are needed: names and types stand in the syntax tree or in YAML files. The same code
records the snapshots of the tests (tools/snapshot_trainers.py) and checks an export against an installed package.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from planner.trainers import having
from planner.trainers import load as load_part
from planner.trainers.checking import Checked

Names = dict[str, str]
"""Name of a setting -> its type."""
Uses = Iterator[tuple[str, str]]
"""Section and name of settings."""


def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """Classes of a file by name."""
    return {node.name: node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}


def fields(path: Path, *names: str) -> Names:
    """Annotated fields of some classes of a file, those of their bases in the same file first."""
    found, known = {}, classes(path)

    def add(name: str) -> None:
        for base in known[name].bases:
            if isinstance(base, ast.Name) and base.id in known:
                add(base.id)
        for node in known[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = kind(node.annotation)

    for name in names or known:
        add(name)
    return found


def kind(annotation: ast.expr | None) -> str:
    """The type without what is attached to it: the first part of A[...] and Annotated[...]."""
    if annotation is None:
        return ""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        inner = annotation.slice
        return kind(inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
    return ast.unparse(annotation).replace('"', "'")[:120]


def parameters(path: Path, name: str) -> Names:
    """Parameters of the constructor of a class."""
    for node in classes(path)[name].body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return {
                one.arg: kind(one.annotation) for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "self"
            }
    return {}


def flags(path: Path) -> Names:
    """Option strings given to add_argument calls."""
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    actions = [ast.unparse(one.value) for one in node.keywords if one.arg == "action"]
                    found[str(word.value)] = "flag" if actions and "store_true" in actions[0] else "value"
    return found


def keys(data: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of nested mappings with the type of their value; an empty mapping takes any key."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield path, "mapping"
            yield from keys(value, f"{path}.")
        else:
            yield path, "free mapping" if value == {} else type(value).__name__


def load(path: Path) -> Any:
    """The content of a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check_names(name: str, folder: Path) -> Checked:
    """Every name that an exported folder uses, against the installed package, of which nothing is run; without one against the
    names of the version that planner recorded."""
    package = having("check")[name].PACKAGE
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or []) if found else []
    try:
        if places:
            known, source = load_part(name, "check").known_names(Path(places[0]).parent), f"the installed {package}"
        else:
            data = recorded(name)
            known, source = data["settings"], f"{package} {data['version']} as recorded: it is not installed here"
    except (OSError, KeyError, SyntaxError) as error:
        return Checked(target=name, missing=f"the installed package has another form than expected ({error})")
    wrong = unknown(name, known, folder)
    if wrong:
        return Checked(target=name, problem=f"unknown names: {', '.join(wrong)}")
    details = [f"names of {source}"]
    return Checked(target=name, level="name known", details=details, missing="planner runs no parser of this trainer")


def recorded(name: str) -> dict[str, Any]:
    """names.json in the trainer's folder: package, version, and its settings as tools/snapshot_trainers.py recorded them."""
    folder = resources.files(having("check")[name].__name__)
    data: dict[str, Any] = json.loads(folder.joinpath("names.json").read_text(encoding="utf-8"))
    return data


def unknown(name: str, known: Mapping[str, Mapping[str, str]], folder: Path) -> list[str]:
    """Names in an exported folder that the trainer does not have."""
    return [
        f"{section}: {one}"
        for section, one in load_part(name, "check").used_names(folder)
        if not _holds(known[section], one)
    ]


def _holds(known: Mapping[str, str], name: str) -> bool:
    """A name is known; one with a leading + goes into a mapping that is empty or takes any key."""
    if not name.startswith("+"):
        return name in known
    parent = name[1:].rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    return name[1:] not in known and known.get(parent) in ("free mapping", "mapping", "NoneType")


def script_words(folder: Path) -> list[str]:
    """Words of the last command of both scripts."""
    texts = [(folder / file).read_text(encoding="utf-8").rpartition("\nexec ")[2] for file in ("run.sh", "smoke.sh")]
    return [word.strip('"') for text in texts for word in text.split()]


def script_settings(folder: Path) -> list[str]:
    """Names before the = of words."""
    return [word.split("=")[0] for word in script_words(folder) if re.match(r"[a-z_.]+=", word)]
