"""Writes planner/trainers/nemo/recipes.yaml from a checkout of NeMo 2: python tools/nemo_recipes.py FOLDER.

The recipes of the checkout run over stand-ins for nemo_run, Lightning and all of NeMo that is not a recipe: what they build is a tree
of names and numbers. The planner itself never runs a recipe.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.trainers.megatron_bridge.recipes import DECISIVE  # noqa: E402
from planner.trainers.nemo.places import preset_of_recipe, taken, with_precision  # noqa: E402

OUTPUT = ROOT / "planner" / "trainers" / "nemo" / "recipes.yaml"
RECIPES = "nemo.collections.llm.recipes"
OTHER = re.compile(r"bert|e5_|t5_|embedding|reranker|hyena|mamba|automodel|hf_auto|nemotronh|finetune_default|__init__")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretrain": ("pretrain_recipe", {}), "pretrain_fast": ("pretrain_recipe", {"performance_mode": True}),
    "lora": ("finetune_recipe", {"peft_scheme": "lora"}), "full": ("finetune_recipe", {"peft_scheme": None}),
    "lora_fast": ("finetune_recipe", {"peft_scheme": "lora", "performance_mode": True}),
    "full_fast": ("finetune_recipe", {"peft_scheme": None, "performance_mode": True}),
}  # fmt: skip


KEPT = (*DECISIVE, "peft.dropout", "nodes", "devices")
USUAL = {
    **{f"model.{one}_parallel_size": 1 for one in (
        "tensor_model", "pipeline_model", "context", "expert_model", "virtual_pipeline_model")},
    "model.sequence_parallel": False, "ddp.grad_reduce_in_fp32": True, "mixed_precision": "bf16", "optimizer.optimizer": "adam",
    "ddp.use_distributed_optimizer": True, "ddp.data_parallel_sharding_strategy": "optim_grads_params", "devices": 8, "nodes": 1,
    "optimizer.use_precision_aware_optimizer": False, "comm_overlap.tp_comm_overlap": False,
    **dict.fromkeys((f"model.account_for_{one}_in_pipeline_split" for one in ("embedding", "loss")), False), "model.moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
"""What the reader takes where nothing is said."""


class Config:
    """What run.Config and run.Partial build: a class by its name, and its arguments as attributes."""

    def __init__(self, built: Any = None, *positional: Any, **named: Any) -> None:
        self.built = getattr(built, "__name__", str(built))
        self.positional = positional
        self.__dict__.update(named)

    def __class_getitem__(cls, _: Any) -> type:
        return cls


class Name(type):
    """A class of which only the name counts; its attributes are names again."""

    def __new__(mcs, name: str) -> "Name":
        return super().__new__(mcs, name, (), {})

    def __init__(cls, name: str) -> None:
        super().__init__(name, (), {})

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        return Config(cls, *positional, **named)

    def __getitem__(cls, _: Any) -> "Name":
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name)


class Module(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return Name(name)


def decorator(*given: Any, **_: Any) -> Any:
    """A decorator with or without arguments that changes nothing."""
    return given[0] if given and callable(given[0]) and not isinstance(given[0], Name) else lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Recipes from the checkout, stand-ins for everything else of these packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The recipe's file, or this loader."""
        if name.startswith(f"{RECIPES}."):
            file = self.folder / (name.replace(".", "/") + ".py")
            if file.is_file():
                return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in ("nemo", "nemo_run", "lightning", "megatron", "pytorch_lightning", "transformers"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """A module that has every name; nemo_run with what builds."""
        module = Module(spec.name)
        module.__path__ = [str(self.folder / spec.name.replace(".", "/"))]
        if spec.name == "nemo_run":
            factory = types.SimpleNamespace(factory=decorator, entrypoint=decorator)
            module.__dict__.update(Config=Config, Partial=Config, cli=factory, autoconvert=decorator)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def flat(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(dotted place, value) of everything that a recipe holds."""
    for name, one in vars(value).items():
        for inner in one if isinstance(one, list) else ():
            if isinstance(inner, Config) and inner.built == "MegatronCommOverlapCallback":
                yield from flat(inner, "comm_overlap.", depth + 1)
        if isinstance(one, Config) and depth < 8:
            yield from flat(one, f"{place}{name}.", depth + 1)
        elif isinstance(one, bool | int | float | str) or (isinstance(one, list) and all(isinstance(word, str) for word in one)):
            yield f"{place}{name}", one


def settings(function: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """What a recipe sets, by dotted places; None where it cannot be built like this."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    if any(name not in names for name in given):
        return None
    try:
        places = dict(flat(function(**given)))
    except (TypeError, AttributeError, KeyError, ValueError, NotImplementedError, AssertionError) as error:
        print(function.__module__, given, error)
        return None
    found = with_precision(taken(places))
    if "peft.dim" in found or given.get("peft_scheme"):
        found["peft"] = given.get("peft_scheme")
    return {name: found[name] for name in KEPT if found.get(name) not in (None, USUAL.get(name))}


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=OUTPUT)
def main(folder: Path, output: Path) -> None:
    """Every recipe of a language model."""
    sys.meta_path.insert(0, Finder(folder))
    sys.modules.pop("transformers", None)
    lines = ["# Settings of NeMo 2's recipes that decide a plan, written by tools/nemo_recipes.py.",
             "# source: NVIDIA/NeMo, main, 2025-09, nemo/collections/llm/recipes"]  # fmt: skip
    for path in sorted((folder / RECIPES.replace(".", "/")).glob("*.py")):
        if OTHER.search(path.name):
            continue
        module = importlib.import_module(f"{RECIPES}.{path.stem}")
        found: dict[str, Any] = {}
        for kind, (name, given) in KINDS.items():
            function = getattr(module, name, None)
            if isinstance(function, types.FunctionType) and (one := settings(function, given)) is not None:
                one["model.hf"] = preset_of_recipe(path.stem) or ""
                base = found.get(kind.removesuffix("_fast"))
                if one != base:
                    found[kind] = one
        if found:
            text = yaml.safe_dump(found, default_flow_style=True, width=10**6, sort_keys=False).strip()
            lines.append(f"{path.stem}: {text}")
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(len(lines) - 2, "recipes")


if __name__ == "__main__":
    main()
