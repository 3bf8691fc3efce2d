"""Names, types and choices of a framework's settings, read from its source without importing it; an export is held against them.

``flags/NAME.json`` holds those of the version that planner was written for; tools/snapshot_rl.py says how they are made. A type
is written as an annotation: ``int``, ``str | None``, ``Literal[nccl, disk]``; ``flag`` takes no value, ``value`` anything.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from planner.errors import nearest_first
from planner.trainers.checking import setting_names as names

Names = dict[str, str]
FREE = ("free mapping", "Any", "dict")
"""Types of settings that take any key."""


def nested(files: list[Path], root: str, prefix: str = "", depth: int = 8) -> Iterator[tuple[str, str]]:
    """Dotted fields of a class and of the classes that its annotations name, in these files."""
    known: dict[str, ast.ClassDef] = {}
    aliases: dict[str, str] = {}
    for path in files:
        known |= {name: node for name, node in names.classes(path).items() if name not in known}
        for node in names.tree(path).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                aliases[target.id] = ast.unparse(node.value)
    yield from _fields(known, aliases, root, prefix, depth)


def _fields(
    known: Mapping[str, ast.ClassDef], aliases: Mapping[str, str], name: str, prefix: str, depth: int
) -> Iterator[tuple[str, str]]:
    if depth == 0:
        return
    for base in known[name].bases:
        if isinstance(base, ast.Name) and base.id in known:
            yield from _fields(known, aliases, base.id, prefix, depth)
    for node in known[name].body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        kind, place = ast.unparse(node.annotation).replace("'", ""), f"{prefix}{node.target.id}"
        plain = names.kind(node.annotation).replace("'", "")
        alias = aliases.get(plain, "")
        plain = _chosen(node.value) or (alias.replace("'", "") if alias.startswith("Literal[") else plain)
        yield place, "dict" if kind.startswith(("dict", "Any", "SerializeAsAny")) else plain
        for inner in _classes(kind, known, aliases):
            if inner != name:
                yield from _fields(known, aliases, inner, f"{place}.", depth - 1)


def _chosen(value: ast.expr | None) -> str:
    """The choices in the metadata of a field of a dataclass, as a type; '' where it has none."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Dict):
            for key, one in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(one, ast.List):
                    return _literal(one)
    return ""


def _literal(choices: ast.List | ast.Tuple) -> str:
    values = [one.value for one in choices.elts if isinstance(one, ast.Constant)]
    found = f"Literal[{', '.join(str(one) for one in values if one is not None)}]"
    return f"{found} | None" if None in values else found


def _merged(pairs: Iterable[tuple[str, str]]) -> Names:
    """Pairs as a mapping; a name of several classes of a union has all of their types."""
    found: dict[str, list[str]] = {}
    for name, kind in pairs:
        kinds = found.setdefault(name, [])
        kinds += [kind] if kind not in kinds else []
    return {name: " | ".join(kinds) for name, kinds in found.items()}


def typed_flags(path: Path) -> Names:
    """Option strings given to add_argument calls, with the type or the choices of their value."""
    found = names.flags(path)
    for node in ast.walk(names.tree(path)):
        if not isinstance(node, ast.Call):
            continue
        words = [one.value for one in node.args if isinstance(one, ast.Constant) and str(one.value) in found]
        if words:
            said = {one.arg: one.value for one in node.keywords}
            choices, kind = said.get("choices"), ast.unparse(said["type"]) if "type" in said else "str"
            kind = _literal(choices) if isinstance(choices, ast.List | ast.Tuple) else kind
            if "action" not in said and kind.startswith(("int", "float", "str", "Literal")) and "nargs" not in said:
                found |= dict.fromkeys(map(str, words), kind)
    return found


def _classes(kind: str, known: Mapping[str, ast.ClassDef], aliases: Mapping[str, str]) -> list[str]:
    """Classes that an annotation names, through aliases."""
    words = [node.id for node in ast.walk(ast.parse(kind.strip('"'), mode="eval")) if isinstance(node, ast.Name)]
    found = [one for one in words if one in known]
    for one in words:
        if one in aliases and one not in known:
            found += _classes(aliases[one], known, {name: text for name, text in aliases.items() if name != one})
    return found


def _yaml(*files: Path) -> Names:
    return {name: kind for path in files for name, kind in names.keys(_defaults(names.load(path)))}


def _defaults(data: Any) -> Any:
    """Defaults for their types: any number for a number, nothing for a reference to another setting."""
    if isinstance(data, dict):
        return {name: _defaults(value) for name, value in data.items()}
    if isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    return None if isinstance(data, str) and "${" in data else data


def _verl(root: Path) -> Names:
    own = root / "verl" / "experimental"
    config = root / "verl" / "trainer" / "config"
    files = [config / f"_generated_ppo_{one}trainer.yaml" for one in ("", "megatron_")]
    more = [own / folder / "config" / f"{name}.yaml" for folder, name in (
        ("one_step_off_policy", "one_step_off_ppo_trainer"), ("fully_async_policy", "fully_async_ppo_trainer"))]  # fmt: skip
    return _yaml(*files, *more)


def _trl(root: Path) -> Names:
    found = names.fields(root / "trl" / "trainer" / "grpo_config.py", "GRPOConfig")
    found |= names.fields(root / "trl" / "experimental" / "async_grpo" / "async_grpo_config.py", "AsyncGRPOConfig")
    base = root / "transformers" / "training_args.py"
    return found | (names.fields(base, "TrainingArguments") if base.is_file() else {})


def _areal(root: Path) -> Names:
    return _merged(nested([root / "areal" / "api" / "cli_args.py"], "GRPOConfig"))


def _prime(root: Path) -> Names:
    folder = root / "packages" / "prime-rl-configs" / "src" / "prime_rl" / "configs"
    parts = ("rl", "shared", "trainer", "orchestrator", "inference", "monitors")
    return _merged(nested([folder / f"{one}.py" for one in parts], "RLConfig"))


def _slime(root: Path) -> Names:
    folder = root / "slime"
    return typed_flags(folder / "utils" / "arguments.py") | typed_flags(folder / "backends" / "sglang_utils" / "arguments.py")


READERS: Mapping[str, tuple[str, Callable[[Path], Names]]] = {
    "verl": ("verl", _verl),
    "nemo-rl": ("nemo_rl", lambda root: _yaml(*(
        root / "examples" / "configs" / f"{one}_math_1B.yaml" for one in ("ppo", "grpo")))),
    "openrlhf": ("openrlhf", lambda root: typed_flags(root / "openrlhf" / "cli" / "train_ppo_ray.py")),
    "trl": ("trl", _trl),
    "slime": ("slime", _slime),
    "areal": ("areal", _areal),
    "prime-rl": ("prime_rl", _prime),
}
"""Package that is looked for, and how names are read in the folder that holds it (or in a checkout)."""


def recorded(name: str) -> dict[str, Any]:
    """flags/NAME.json: ``package``, ``version`` with where it was read, ``settings``."""
    folder = resources.files(__package__).joinpath("flags")
    data: dict[str, Any] = json.loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return data


def known(name: str) -> tuple[Names, str]:
    """Names of the framework that is installed here, or as recorded; and which of both in words."""
    package, reader = READERS[name]
    data = recorded(name)
    said = f"{data['package']} {data['version']} as recorded"
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or []) if found and found.origin else []
    if places:
        try:
            return {**data["settings"], **reader(Path(places[0]).parent)}, f"the installed {data['package']}"
        except (OSError, SyntaxError, KeyError, IndexError, ValueError):
            said += ": the installed package has another form than expected"
    return data["settings"], said


def used(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names of settings, dotted where they are nested, with their values."""
    for name, value in settings.items():
        place = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from used(value, f"{place}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for one in value:
                yield from used(one, f"{place}.")
        else:
            yield place, value


def wrong(name: str, settings: Mapping[str, Any], names_: Names | None = None) -> list[str]:
    """Sentences on settings that the framework does not have, or not with such a value."""
    have = known(name)[0] if names_ is None else names_
    found = []
    for one, value in used(settings):
        if one.startswith("--sglang-"):
            continue
        if not _holds(have, one):
            found.append(f"{name} has no setting {one}; nearest: {nearest_first(one, have)[0]}")
        elif not one.startswith("+") and not takes(have.get(one, "value"), value):
            found.append(f"{name} takes {have[one]} for {one}, not {value!r}")
    return found


def takes(kind: str, value: Any) -> bool:
    """Whether a value is of a type. References to other settings and to the environment are of any."""
    if isinstance(value, str) and value.startswith("$"):
        return True
    if value is None or value == "None":
        return "None" in kind or "Optional" in kind or kind in ("value", "flag", "", "list", "mapping", "free mapping")
    return any(_is_a(one.strip(), value) for one in re.split(r"\|(?![^\[]*\])", kind))


def _is_a(kind: str, value: Any) -> bool:
    """Of one type, without alternatives; what is no plain type takes anything."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind.startswith("Literal["):
        return str(value) in [one.strip() for one in kind[8:].rstrip("]").split(",")]
    if kind.startswith(("list", "tuple")):
        return isinstance(value, list | tuple)
    plain = {"bool": bool, "flag": bool, "str": str, "mapping": Mapping, "free mapping": Mapping}
    if kind in ("int", "float"):
        return number and (kind == "float" or value == int(value))
    return isinstance(value, plain[kind]) if kind in plain else kind != "None"


def _holds(have: Mapping[str, str], name: str) -> bool:
    """A name is known, or goes into a mapping that takes any key; a leading + adds one there, ++ also where it is."""
    plain = name.lstrip("+")
    if plain in have:
        return not name.startswith("+") or name.startswith("++") or have[plain] in FREE
    parent = plain.rpartition(".")[0]
    while parent and parent not in have:
        parent = parent.rpartition(".")[0]
    return bool(parent) and (have[parent] in FREE or (name.startswith("+") and have[parent] in ("mapping", "NoneType")))
