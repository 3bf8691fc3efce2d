"""torchtitan's configurations as Python: a module with functions that return them, which is read and not run."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading.built_parts import Parts
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.python_text import UNNAMED
from planner.trainers.reading.shell.arithmetic import arithmetic
from planner.trainers.reading.shell.text import gap, is_open, roots
from planner.trainers.torchtitan.flavors import flavor_of, model_named
from planner.trainers.torchtitan.own_words import of_components, of_foreign_tables
from planner.trainers.torchtitan.python_parts import ADAPTERS, finish, part_of, parts_of

Sections = dict[str, dict[str, Any]]
"""parallelism and training as they are; under 'other' what the rest says: recompute, precision, compile, model, notes."""
PARTS = (
    "model_spec", "hf_assets_path", "dump_folder", "profiler", "profiling", "metrics", "tokenizer", "dataloader", "optimizer",
    "lr_scheduler", "training", "parallelism", "checkpoint", "activation_checkpoint", "compile", "comm", "validator", "validation",
    "debug", "override", "loss", "fault_tolerance", "model_converters", "job", "seed", "model",
)  # fmt: skip
"""Parts of the configuration of a training, of all versions.  [torchtitan/trainer.py: Trainer.Config]"""
_CALLS = {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}


def mode_of(path: Path, mode: object) -> Recompute:
    """Recompute by the name that configurations give it. Raises PlannerError."""
    modes = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
    if str(mode) not in modes:
        raise PlannerError(f"{path}: activation checkpointing '{mode}' is not one of {', '.join(modes)}")
    return modes[str(mode)]


BETWEEN = ("memory_budget",)
"""Modes that choose by themselves what is stored."""


def between(mode: object) -> Question:
    """What is asked about a mode between the others."""
    about = f"{mode} has no plan that is the same; which is nearer"
    return Question(name="activation_checkpoint.mode", about=about, choices=("none", "selective", "full"))


def _public(names: Iterable[str]) -> tuple[str, ...]:
    """Names that others may call, where there are any."""
    return tuple(one for one in names if not one.startswith("_")) or tuple(names)


def of_module(path: Path, text: str, given: Given) -> Sections:
    """A module of configurations is read, not run: one function with its ParallelismConfig and TrainingConfig, what it changes
    of another one, constants of the module."""
    tree = library.parse_python(text, str(path))
    module = _Module(path, tree, given)
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
    found: Sections = {"other": {"notes": [], "questions": module.open, "module": True}}
    if chosen is not None:
        module.read(functions[chosen], found, 0)
        family, flavor = _family(path, chosen)
        built = found["other"].get("flavor")
        known = model_named([], family, flavor) or (model_named([], path.parent.name, built) if built else "")
        found["other"].setdefault("model", known)
        found["other"]["called"] = f"{path.parent.name} {built}" if built else chosen
    else:
        module.calls(tree, found)
    there = "parallelism" in found or "training" in found
    finish(path, found)
    if module.taken:
        found["other"]["notes"].append(f"options of the script at their defaults: {', '.join(module.taken)}")
    if (mode := given.setting("activation_checkpoint.mode")) is not None:
        found["other"]["recompute"] = mode_of(path, mode)
    found["other"].setdefault("compile", False)
    if not there:
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

    def __init__(self, path: Path, tree: ast.Module, said: Given) -> None:
        self.path, self.said = path, said
        self.open: list[Question] = []
        self._script: Parts | None = None
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
        under = {id(one): ast.unparse(branch.test)[:60] for branch in ast.walk(node) if isinstance(branch, ast.If)
                 for one in ast.walk(branch)}  # fmt: skip
        for one in ast.walk(node):
            if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Attribute):
                place = ast.unparse(one.targets[0])
                if id(one) in under and (key := re.fullmatch(r"\w+\.((?:parallelism|training)\.\w+)", place)):
                    self.ask(key[1], f"line {one.lineno} sets it to {ast.unparse(one.value)[:60]} where {under[id(one)]}")
                else:
                    self.assign(place, one.value, found)

    def calls(self, node: ast.AST, found: Sections) -> None:
        """Keywords of the calls that make sections."""
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            function = ast.unparse(call.func)
            given = {one.arg: one.value for one in call.keywords if one.arg}
            section = _CALLS.get(function.split(".")[-1])
            changed = re.fullmatch(r".*\b(parallelism|training)", ast.unparse(call.args[0])) if call.args else None
            if section:
                found[section] = self.constants_of(section, given)
            elif changed and function.rpartition(".")[2] == "replace":
                found.setdefault(changed[1], {}).update(self.constants_of(changed[1], given))
            if "activation_checkpoint" in given:
                self.recompute(given["activation_checkpoint"], found)
            if re.search(r"Trainer(\.?Config)$", function):
                self.foreign(given, found)
            if "compile" in given:
                found["other"]["compile"] = self.compiles(given["compile"], node)
                words = {one.arg: ast.unparse(one.value) for one in getattr(given["compile"], "keywords", ())}
                parts = words.get("components", "") if words.get("enable") == "True" else ""
                found["other"]["notes"] += of_components(re.findall(r"\w+", parts)) if parts.startswith("[") else []
            self.async_tensor_parallel(function, given, found)
            if function.endswith(ADAPTERS):
                said = {name: node for name, node in given.items() if name in ("rank", "target_modules")}
                told = self.said.filled({"LoRAConverter": self.constants_of("LoRAConverter", said)})
                found["other"]["adapters"] = told["LoRAConverter"]
            part_of(self.path, call, function, given, found)
            assets = given.get("hf_assets_path")
            flavor = flavor_of(given.get("model_spec"))
            known = isinstance(assets, ast.Constant) and flavor is not None  # else its tokenizer alone is another model's
            if known and isinstance(assets, ast.Constant) and (model := model_named([str(assets.value)], "", flavor or "")):
                found["other"]["model"] = model

    def foreign(self, given: dict[str, ast.expr], found: Sections) -> None:
        """Parts of the configuration of a training that torchtitan does not have."""
        own = {name: node for name, node in given.items() if name not in PARTS}
        tables = {name: {one.arg: self.constant(one.value) for one in node.keywords if one.arg}
                  for name, node in own.items() if isinstance(node, ast.Call)
                  and not any(one.arg in PARTS for one in node.keywords)}  # fmt: skip
        asked, notes = of_foreign_tables(tables, [name for name in tables if tables[name]], self.said)
        self.open += [one for one in asked if one.name not in [other.name for other in self.open]]
        found["other"]["notes"] += notes

    def assign(self, target: str, value: ast.expr, found: Sections) -> None:
        """``config.training.steps = 10``."""
        match = re.fullmatch(r"\w+\.(parallelism|training)\.(\w+)", target)
        if match:
            found.setdefault(match[1], {}).update(self.constants_of(match[1], {match[2]: value}))
        elif re.fullmatch(r"\w+\.activation_checkpoint", target):
            self.recompute(value, found)
        elif re.fullmatch(r"\w+\.activation_checkpoint\.mode", target):
            found["other"]["recompute"] = mode_of(self.path, ast.literal_eval(value) if isinstance(value, ast.Constant) else "?")
        elif re.fullmatch(r"\w+\.(compile|parallelism)\.enable_async_tensor_parallel", target):
            found.setdefault("parallelism", {})["enable_async_tensor_parallel"] = ast.unparse(value) == "True"
        elif re.fullmatch(r"\w+\.(loss|optimizer)", target):
            parts_of(self.path, {target.rpartition(".")[2]: value}, found)
        elif re.fullmatch(r"\w+\.debug\.moe_force_load_balance", target):
            found["other"]["balanced"] = ast.unparse(value)
        elif re.fullmatch(r"\w+\.optimizer\.name", target) and isinstance(value, ast.Constant):
            found["other"]["optimizer"] = str(value.value)
        elif re.fullmatch(r"\w+\.compile(\.enable)?", target):
            found["other"]["compile"] = ast.unparse(value) == "True" or self.compiles(value, value)

    def compiles(self, value: ast.expr, within: ast.AST) -> bool:
        """Whether CompileConfig(...), or the variable that holds it, compiles the model; it does not by itself."""
        if isinstance(value, ast.Name):
            made = (one for one in ast.walk(within) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == value.id)
            value = next((one.value for one in made), self.constants.get(value.id, value))
        text = ast.unparse(value)
        return "enable=True" in text and ("components" not in text or "'model'" in text)

    def async_tensor_parallel(self, function: str, given: dict[str, ast.expr], found: Sections) -> None:
        """CompileConfig(enable_async_tensor_parallel=True), as of 2026-08."""
        if function.rpartition(".")[2] == "CompileConfig" and "enable_async_tensor_parallel" in given:
            value = ast.unparse(given["enable_async_tensor_parallel"]) == "True"
            found.setdefault("parallelism", {})["enable_async_tensor_parallel"] = value

    def recompute(self, node: ast.expr, found: Sections) -> None:
        """The class of a checkpointing policy, or the mode that a configuration names; asked for where it is another one."""
        text, other = ast.unparse(node), found["other"]
        other.pop("layers", None)
        known = (("FullAC", Recompute.FULL), ("SelectiveAC", Recompute.SELECTIVE), ("None", Recompute.NONE))
        mode = next((mode for name, mode in known if text.startswith(name)), None)
        old = re.search(r"mode=['\"](\w+)['\"]", text)
        if mode is None and old and old[1] not in BETWEEN:
            mode = mode_of(self.path, old[1])
            option = re.search(r"selective_ac_option=['\"](\w+)['\"]", text)
            if mode == Recompute.SELECTIVE and option and option[1] != "op":
                other["layers"], other["version"] = option[1], "0.2"
        if mode is None and self.said.setting("activation_checkpoint.mode") is None:
            self.open.append(between(text.partition("(")[0][:60]))
        other["recompute"] = Recompute.SELECTIVE if mode is None else mode

    @property
    def taken(self) -> list[str]:
        """Options and variables that were taken at their defaults."""
        return list(dict.fromkeys(self._script.defaults)) if self._script else []

    def ask(self, name: str, about: str) -> None:
        """Leaves a question, unless it is answered."""
        if name not in self.said.settings and name not in [one.name for one in self.open]:
            self.open.append(Question(name=name, about=about))

    def constants_of(self, section: str, given: dict[str, ast.expr]) -> dict[str, Any]:
        """Values of a section; what is computed of what nobody here knows is asked for and left out."""
        found = {}
        for key, node in given.items():
            value = self.constant(node)
            if isinstance(value, str) and is_open(value):
                named = [one for one in roots(value) if one != UNNAMED and one.isidentifier()]
                about = f"{section}.{key} is {ast.unparse(node)[:60]}, which is computed"
                self.ask(named[0] if len(named) == 1 else f"{section}.{key}", about)
            else:
                found[key] = value
        return found

    def constant(self, node: ast.expr) -> Any:
        """A literal, a constant of the module, a product such as 8 * 2048; a text with a gap for what is not known."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        try:
            return ast.literal_eval(node)
        except (ValueError, RecursionError):
            pass
        result = arithmetic(ast.unparse(node).replace("//", "/"), self.whole)
        if result is not None:
            return result
        self._script = self._script or Parts(self.path, self.said)
        same = (one for one in ast.walk(self._script.tree) if type(one) is type(node) and hasattr(one, "lineno"))
        there = next((one for one in same if (one.lineno, one.col_offset) == (node.lineno, node.col_offset)), None)
        return self._script.value(there) if isinstance(there, ast.expr) else gap([UNNAMED])

    def whole(self, name: str) -> str:
        """A constant of the module as text, for arithmetic."""
        node = self.constants.get(name)
        return str(node.value) if isinstance(node, ast.Constant) else "?"
