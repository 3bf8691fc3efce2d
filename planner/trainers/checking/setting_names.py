"""Names of a trainer's settings, read from the source of its package without importing it, and those that an export uses.

Neither a GPU nor the trainer's dependencies are needed: names and types stand in the syntax tree or in YAML files. The same code
records the snapshots of the tests (tools/snapshot_trainers.py) and checks an export against an installed package.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from planner.trainers.checking import Checked

Names = dict[str, str]


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


def colossalai(root: Path) -> dict[str, Names]:
    """Parameters of both plugins."""
    plugins = root / "colossalai" / "booster" / "plugin"
    return {
        "HybridParallelPlugin": parameters(plugins / "hybrid_parallel_plugin.py", "HybridParallelPlugin"),
        "MoeHybridParallelPlugin": parameters(plugins / "moe_hybrid_parallel_plugin.py", "MoeHybridParallelPlugin"),
    }


def llama_factory(root: Path) -> dict[str, Names]:
    """Its own arguments, and those of transformers, whose package must be unpacked into the same folder."""
    found: Names = {}
    for file in ("training_args.py", "training_args_seq2seq.py"):
        found |= fields(root / "transformers" / file)
    for name in ("model_args", "data_args", "training_args", "finetuning_args", "generating_args"):
        found |= fields(root / "llamafactory" / "hparams" / f"{name}.py")
    return {"arguments": found}


def axolotl(root: Path) -> dict[str, Names]:
    """Keys of its YAML file, of fsdp_config and of an entry of datasets."""
    schemas = root / "axolotl" / "utils" / "schemas"
    found: Names = {}
    for path in sorted(schemas.glob("*.py")):
        if path.stem not in ("fsdp", "datasets"):
            found |= fields(path)
    data = fields(schemas / "datasets.py")
    return {"config": found, "fsdp_config": fields(schemas / "fsdp.py", "FSDPConfig"), "datasets": data}


def verl(root: Path) -> dict[str, Names]:
    """Keys of its composed Hydra configurations."""
    folder = root / "verl" / "trainer" / "config"
    return {
        name: dict(keys(load(folder / f"_generated_{name}.yaml"))) for name in ("ppo_trainer", "ppo_megatron_trainer")
    }


def maxtext(root: Path) -> dict[str, Names]:
    """Keys of base.yml."""
    data = load(root / "maxtext" / "configs" / "base.yml")
    return {"base.yml": {name: type(value).__name__ for name, value in data.items()}}


def vllm(root: Path) -> dict[str, Names]:
    """Flags of vllm serve."""
    package = root / "vllm"
    return {
        "serve": {
            **flags(package / "engine" / "arg_utils.py"),
            **flags(package / "entrypoints" / "common" / "cli_args.py"),
        }
    }


def sglang(root: Path) -> dict[str, Names]:
    """Its flags are the fields of its argument groups; aliases stand in their metadata."""
    found: Names = {}
    for path in sorted((root / "sglang" / "srt" / "arg_groups" / "fields").glob("*.py")):
        for name, text in fields(path).items():
            if not name.startswith("_"):
                found[f"--{name.replace('_', '-')}"] = "flag" if text == "bool" else text
        for word in re.findall(r"aliases=\[([^\]]*)\]", path.read_text(encoding="utf-8")):
            found |= {alias: "alias" for alias in re.findall(r"--[\w-]+", word)}
    return {"launch_server": found}


READERS: dict[str, Callable[[Path], dict[str, Names]]] = {
    "colossalai": colossalai, "llama-factory": llama_factory, "axolotl": axolotl, "verl": verl, "maxtext": maxtext,
    "vllm": vllm, "sglang": sglang,
}  # fmt: skip
"""Target -> reader of a folder of unpacked packages."""
PACKAGES = {"llama-factory": "llamafactory"}
"""Target -> package, where they differ."""


def root_of(name: str) -> Path | None:
    """Folder that holds the installed package; None when it is not installed. Nothing of it is run."""
    found = importlib.util.find_spec(PACKAGES.get(name, name))
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0]).parent if places else None


def check_names(name: str, folder: Path) -> Checked:
    """Every name that an exported folder uses, against the installed package."""
    root = root_of(name)
    if root is None:
        return Checked(target=name, level="", missing=f"{PACKAGES.get(name, name)} is not installed here")
    try:
        known = READERS[name](root)
    except (OSError, KeyError, SyntaxError) as error:
        return Checked(target=name, level="", missing=f"the installed package has another form than expected ({error})")
    wrong = unknown(name, known, folder)
    if wrong:
        return Checked(target=name, level="", problem=f"unknown names: {', '.join(wrong)}")
    return Checked(target=name, level="name known", missing="planner runs no parser of this trainer")


def unknown(name: str, known: Mapping[str, Mapping[str, str]], folder: Path) -> list[str]:
    """Names in an exported folder that the trainer does not have."""
    return [f"{section}: {one}" for section, one in USES[name](folder) if not _holds(known[section], one)]


def _holds(known: Mapping[str, str], name: str) -> bool:
    """A name is known; one with a leading + goes into a mapping that is empty or takes any key."""
    if not name.startswith("+"):
        return name in known
    parent = name[1:].rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    return name[1:] not in known and known.get(parent) in ("free mapping", "mapping", "NoneType")


Uses = Iterator[tuple[str, str]]


def _plugin(folder: Path) -> Uses:
    data = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    section = "MoeHybridParallelPlugin" if data["moe"] else "HybridParallelPlugin"
    return ((section, name) for name in data["plugin"])


def _words(folder: Path) -> list[str]:
    """Words of the last command of both scripts."""
    texts = [(folder / file).read_text(encoding="utf-8").rpartition("\nexec ")[2] for file in ("run.sh", "smoke.sh")]
    return [word.strip('"') for text in texts for word in text.split()]


def _settings(folder: Path) -> Uses:
    """Names before the = of words."""
    return (("", word.split("=")[0]) for word in _words(folder) if re.match(r"[a-z_.]+=", word))


def _llama_factory_uses(folder: Path) -> Uses:
    yield from (("arguments", name) for name in load(folder / "llama_factory.yaml"))
    yield from (("arguments", name) for _, name in _settings(folder))


def _axolotl_uses(folder: Path) -> Uses:
    for file in ("axolotl.yaml", "axolotl-smoke.yaml"):
        data = load(folder / file)
        yield from (("config", name) for name in data)
        yield from (("fsdp_config", name) for name in data.get("fsdp_config", {}))
        yield from (("datasets", name) for one in data["datasets"] for name in one)


def _verl_uses(folder: Path) -> Uses:
    lines = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    section = "ppo_megatron_trainer" if "--config-name=ppo_megatron_trainer" in _words(folder) else "ppo_trainer"
    yield from ((section, line.split("=")[0]) for line in lines)
    yield from ((section, name) for _, name in _settings(folder))


def _maxtext_uses(folder: Path) -> Uses:
    yield from (("base.yml", name) for name in load(folder / "maxtext.yml") if name != "base_config")
    yield from (("base.yml", name) for _, name in _settings(folder))


def _flags_of(section: str) -> Callable[[Path], Uses]:
    return lambda folder: ((section, word) for word in _words(folder) if word.startswith("--"))


USES: dict[str, Callable[[Path], Uses]] = {
    "colossalai": _plugin, "llama-factory": _llama_factory_uses, "axolotl": _axolotl_uses, "verl": _verl_uses,
    "maxtext": _maxtext_uses, "vllm": _flags_of("serve"), "sglang": _flags_of("launch_server"),
}  # fmt: skip
"""Target -> (section, name) of everything that its exported folder sets."""
