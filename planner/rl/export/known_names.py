"""Names of a framework's settings, read from its source without importing it; what an export uses is held against them.

``flags/NAME.json`` holds those of the version that planner was written for; tools/snapshot_trainers.py says how they are made.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
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
        yield place, "dict" if kind.startswith(("dict", "Any", "SerializeAsAny")) else kind[:80]
        for inner in _classes(kind, known, aliases):
            if inner != name:
                yield from _fields(known, aliases, inner, f"{place}.", depth - 1)


def _classes(kind: str, known: Mapping[str, ast.ClassDef], aliases: Mapping[str, str]) -> list[str]:
    """Classes that an annotation names, through aliases."""
    words = [node.id for node in ast.walk(ast.parse(kind.strip('"'), mode="eval")) if isinstance(node, ast.Name)]
    found = [one for one in words if one in known]
    for one in words:
        if one in aliases and one not in known:
            found += _classes(aliases[one], known, {name: text for name, text in aliases.items() if name != one})
    return found


def _yaml(*files: Path) -> Names:
    return {name: kind for path in files for name, kind in names.keys(names.load(path))}


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
    return dict(nested([root / "areal" / "api" / "cli_args.py"], "GRPOConfig"))


def _prime(root: Path) -> Names:
    folder = root / "packages" / "prime-rl-configs" / "src" / "prime_rl" / "configs"
    parts = ("rl", "shared", "trainer", "orchestrator", "inference", "monitors")
    return dict(nested([folder / f"{one}.py" for one in parts], "RLConfig"))


def _slime(root: Path) -> Names:
    folder = root / "slime"
    return names.flags(folder / "utils" / "arguments.py") | names.flags(folder / "backends" / "sglang_utils" / "arguments.py")


READERS: Mapping[str, tuple[str, Callable[[Path], Names]]] = {
    "verl": ("verl", _verl),
    "nemo-rl": ("nemo_rl", lambda root: _yaml(root / "examples" / "configs" / "grpo_math_1B.yaml")),
    "openrlhf": ("openrlhf", lambda root: names.flags(root / "openrlhf" / "cli" / "train_ppo_ray.py")),
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


def used(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of settings, dotted where they are nested."""
    for name, value in settings.items():
        place = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from used(value, f"{place}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for one in value:
                yield from used(one, f"{place}.")
        else:
            yield place


def wrong(name: str, settings: Mapping[str, Any], names_: Names | None = None) -> list[str]:
    """Sentences on settings that the framework does not have."""
    have = known(name)[0] if names_ is None else names_
    found = []
    for one in used(settings):
        if one.startswith("--sglang-") or _holds(have, one):
            continue
        found.append(f"{name} has no setting {one}; nearest: {nearest_first(one, have)[0]}")
    return found


def _holds(have: Mapping[str, str], name: str) -> bool:
    """A name is known, or goes into a mapping that takes any key; a leading + adds one there."""
    plain = name.lstrip("+")
    if plain in have:
        return not name.startswith("+") or have[plain] in FREE
    parent = plain.rpartition(".")[0]
    while parent and parent not in have:
        parent = parent.rpartition(".")[0]
    return bool(parent) and (have[parent] in FREE or (name.startswith("+") and have[parent] in ("mapping", "NoneType")))
