"""torchtitan's configurations as Python: a module with functions that return them, which is read and not run."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.shell.arithmetic import arithmetic
from planner.trainers.torchtitan.export import CONVERTERS
from planner.trainers.torchtitan.flavors import flavor_of, model_named

Sections = dict[str, dict[str, Any]]
"""parallelism and training as they are; under 'other' what the rest says: recompute, precision, compile, model, notes."""
_CALLS = {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}


def mode_of(path: Path, mode: object) -> Recompute:
    """Recompute by the name that configurations give it. Raises PlannerError."""
    modes = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
    if str(mode) not in modes:
        raise PlannerError(f"{path}: activation checkpointing '{mode}' is not one of {', '.join(modes)}")
    return modes[str(mode)]


def _public(names: Iterable[str]) -> tuple[str, ...]:
    """Names that others may call, where there are any."""
    return tuple(one for one in names if not one.startswith("_")) or tuple(names)


def of_module(path: Path, text: str, given: Given) -> Sections:
    """A module of configurations is read, not run: one function with its ParallelismConfig and TrainingConfig, what it changes
    of another one, constants of the module."""
    tree = library.parse_python(text, str(path))
    module = _Module(path, tree)
    functions = {name: node for name, node in module.functions.items() if module.makes_configuration(node)}
    asked = given.setting("config") or (
        "plan" if {"plan", "smoke"} == functions.keys() else None
    )  # as the export writes them
    if asked is not None and asked not in functions:
        raise PlannerError(
            f"{path}: no function {asked} that returns a configuration; it has {', '.join(functions) or 'none'}"
        )
    if asked is None and len(functions) > 1:
        ask(str(path), [Question(name="config", about="which of its functions is trained", choices=_public(functions))])
    chosen = asked or next(iter(functions), None)
    found: Sections = {"other": {"notes": []}}
    if chosen is not None:
        module.read(functions[chosen], found, 0)
        found["other"].setdefault("model", model_named([], *_family(path, chosen)))
    else:
        module.calls(tree, found)
    found["other"].setdefault("compile", False)
    if "parallelism" not in found and "training" not in found:
        raise PlannerError(
            f"{path}: no ParallelismConfig(...) in this module; give the file with the configuration function"
        )
    return {
        "parallelism": {},
        "training": {},
        **{name: given.filled({name: value})[name] for name, value in found.items()},
    }


def _family(path: Path, function: str) -> tuple[str, str]:
    family, _, flavor = function.rpartition("_")
    return (path.parent.name, flavor) if path.parent.name in function or not family else (family, flavor)


class _Module:
    """Constants and functions of a module."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self._called: dict[ast.FunctionDef, list[str]] = {}
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }

    def makes_configuration(self, node: ast.FunctionDef, depth: int = 0) -> bool:
        """Whether a function returns a configuration of a training."""
        calls = self.called(node)
        if any(one.split(".")[-1] in _CALLS or one.endswith("Trainer.Config") for one in calls):
            return True
        others = [self.functions[one] for one in calls if one in self.functions and self.functions[one] is not node]
        return depth < 8 and any(self.makes_configuration(one, depth + 1) for one in others)

    def called(self, node: ast.FunctionDef) -> list[str]:
        """What a function calls, as it is written: looked for once, as every function is asked about every other."""
        if node not in self._called:
            calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
            self._called[node] = [one.id if isinstance(one, ast.Name) else ast.unparse(one) for one in calls]
        return self._called[node]

    def read(self, node: ast.FunctionDef, found: Sections, depth: int) -> None:
        """A function: the configuration that it starts from, its calls, then what it assigns."""
        for other in (self.functions[one] for one in self.called(node) if one in self.functions and depth < 8):
            if other is not node and self.makes_configuration(other):
                self.read(other, found, depth + 1)
        self.calls(node, found)
        for one in ast.walk(node):
            if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Attribute):
                self.assign(ast.unparse(one.targets[0]), one.value, found)

    def calls(self, node: ast.AST, found: Sections) -> None:
        """Keywords of the calls that make sections."""
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            function = ast.unparse(call.func)
            given = {one.arg: one.value for one in call.keywords if one.arg}
            section = _CALLS.get(function.split(".")[-1])
            if section:
                found[section] = {key: self.constant(value, key) for key, value in given.items()}
            if "activation_checkpoint" in given:
                found["other"]["recompute"] = self.policy(given["activation_checkpoint"])
            if "compile" in given:
                found["other"]["compile"] = self.compiles(given["compile"], node)
            assets = given.get("hf_assets_path")
            flavor = flavor_of(given.get("model_spec"))
            known = isinstance(assets, ast.Constant) and flavor is not None  # else its tokenizer alone is another model's
            if known and isinstance(assets, ast.Constant) and (model := model_named([str(assets.value)], "", flavor or "")):
                found["other"]["model"] = model
            for precision, converter in CONVERTERS.items():
                if function.startswith(f"{converter}."):
                    rowwise = "recipe_name" in given and "rowwise" in ast.unparse(given["recipe_name"])
                    found["other"]["precision"] = "fp8_row" if rowwise and precision == "fp8" else precision
            if function.startswith("NVFP4"):
                raise PlannerError(f"{self.path}: line {call.lineno}: {function} is not priced in torchtitan; choose another")

    def assign(self, target: str, value: ast.expr, found: Sections) -> None:
        """``config.training.steps = 10``."""
        match = re.fullmatch(r"\w+\.(parallelism|training)\.(\w+)", target)
        if match:
            found.setdefault(match[1], {})[match[2]] = self.constant(value, match[2])
        elif re.fullmatch(r"\w+\.activation_checkpoint", target):
            found["other"]["recompute"] = self.policy(value)
        elif re.fullmatch(r"\w+\.compile(\.enable)?", target):
            found["other"]["compile"] = ast.unparse(value) == "True" or self.compiles(value, value)

    def compiles(self, value: ast.expr, within: ast.AST) -> bool:
        """Whether CompileConfig(...), or the variable that holds it, compiles the model; it does not by itself."""
        if isinstance(value, ast.Name):
            made = (one for one in ast.walk(within) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == value.id)
            value = next((one.value for one in made), self.constants.get(value.id, value))
        text = ast.unparse(value)
        return "enable=True" in text and ("components" not in text or "'model'" in text)

    def policy(self, node: ast.expr) -> Recompute:
        """The class of a checkpointing policy."""
        text = ast.unparse(node)
        for name, mode in (("FullAC", Recompute.FULL), ("SelectiveAC", Recompute.SELECTIVE), ("None", Recompute.NONE)):
            if text.startswith(name):
                return mode
        old = re.search(r"mode=['\"](\w+)['\"]", text)
        if old:
            return mode_of(self.path, old[1])
        raise PlannerError(
            f"{self.path}: line {node.lineno}: activation_checkpoint={text}; the planner knows FullAC, SelectiveAC, None"
        )

    def constant(self, node: ast.expr, key: str) -> Any:
        """A literal, a constant of the module, or a product of whole numbers such as 8 * 2048."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        try:
            return ast.literal_eval(node)
        except (ValueError, RecursionError):
            pass
        text = ast.unparse(node)
        result = arithmetic(text.replace("//", "/"), self.whole)
        if result is None:
            raise PlannerError(
                f"{self.path}: line {node.lineno}: {key} is {text[:60]}, which is computed; write its value to read it back"
            )
        return result

    def whole(self, name: str) -> str:
        """A constant of the module as text, for arithmetic."""
        node = self.constants.get(name)
        return str(node.value) if isinstance(node, ast.Constant) else "?"
