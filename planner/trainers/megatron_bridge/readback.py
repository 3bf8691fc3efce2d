"""Megatron-Bridge: scripts that start a recipe with overrides, and the recipes themselves in Python."""


import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, nearest_first, shown
from planner.model_names import preset_of
from planner.trainers.megatron_bridge import performance, recipe_releases, saved
from planner.trainers.megatron_bridge.of_settings import EXPERTS_CUT, parse
from planner.trainers.megatron_bridge.recipe_programs import Program
from planner.trainers.megatron_bridge.recipes import (
    BLOCKS,
    DECISIVE,
    SECTIONS,
    functions,
    imported,
    known_to,
    published,
    settings_of,
    with_modules_beside,
)
from planner.trainers.reading.commands import launched
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.interpolation import extended, resolved
from planner.trainers.reading.programs import own_programs, program_file
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.settings import Settings, parsed
from planner.trainers.reading.shell import is_open, shown_text
from planner.trainers.reading.values import read_text

OVERRIDES = ("model", "train", "dataset", "ddp", "dist", "optimizer", "comm_overlap", "peft")
"""Sections of a YAML that go over a recipe and decide a plan."""
OTHERS = ("mixed_precision", "scheduler", "checkpoint", "logger", "tokenizer", "rng", "profiling", "validation")
"""Its other sections."""
PROGRAM = r"\S*(?:run_recipe|run_script|finetune_\w+|pretrain_\w+)\.py"
BY_NAME = r"\S*run_recipe\.py"
"""The program of Megatron-Bridge that starts a recipe by its name."""
TRAINS = ("pretrain", "finetune", "train", "ConfigContainer", "TrainingConfig")
"""What a program uses that trains."""
STARTS = ("pretrain", "finetune")
"""Functions of Megatron-Bridge that train."""
PUBLISHED = ("the recipe is as Megatron-Bridge of 2026-11 publishes it",)

def read(path: Path, said: Given) -> Reading:
    """The job of a script or of a recipe. Raises PlannerError."""
    known = published()
    if path.suffix in (".py", ".yaml", ".yml") and re.search("distill|prune", path.stem):
        raise PlannerError(f"{path}: distillation and pruning are not modelled")
    if path.suffix == ".py":
        tree = library.parse_python(read_text(path), str(path))
        settings, notes = _of_module(path, tree, said, known)
        return parse(path, said, settings, said.num_gpus, notes=notes)
    if path.suffix in (".yaml", ".yml"):
        return _of_yaml(path, said, known)
    return _of_command(path, said, known)


def _of_command(path: Path, said: Given, known: Mapping[str, Mapping[str, Any]]) -> Reading:
    """A recipe that a command starts: by its name, by the performance launcher, or by a program of the project."""
    own = own_programs(path, said, "Megatron-Bridge")
    found = launched(path, said, "|".join([*map(re.escape, own), PROGRAM, performance.PROGRAM]))
    words = {key.lstrip("+~"): parsed(value) for key, _, value in (one.partition("=") for one in found.words if "=" in one)}
    gpus = said.num_gpus or found.num_gpus or (found.node_gpus * found.nodes if found.node_gpus and found.nodes else None)
    if found.program in own and not re.fullmatch(BY_NAME, found.program) and (file := program_file(path, found.program)):
        tree = library.parse_python(read_text(file), str(file))
        known, older = recipe_releases.chosen(said, (path, file), lambda one, recipes: Program(
            file, one, known_to(tree, _with_one_like_it(path, tree, one, with_modules_beside(file, tree, recipes))), _merged
        ).started(found.settings, _of_one_length(words)))  # fmt: skip
        known = with_modules_beside(file, tree, known)
        program = Program(file, said, known_to(tree, _with_one_like_it(path, tree, said, known)), _merged)
        settings = _unset(program, known) | program.started(found.settings, _of_one_length(words))
        notes = (*found.notes, f"{file.name} is followed under the options of its command", *program.notes(), *(older or PUBLISHED))
        return parse(path, said, settings, gpus, notes=notes)
    if performance.is_launcher(found):
        settings, gpus, hardware, notes = performance.settings(path, said, found)
        reading = parse(path, said, {**settings, **words}, gpus, notes=notes)
        return dataclasses.replace(reading, hardware=hardware)
    named = Settings(path, said.filled({"recipe": found.settings.get("recipe"), **_flags(found.settings)}), said=said)
    called = named.get("recipe")
    name = str(called[0] if isinstance(called, list) and called else called or "")
    if not name and said.questions:  # its variable is asked for
        name = next(iter(known))
    if name not in known:
        about = f"the recipe that {shown(found.program)} starts, which is not here"
        if name:
            about = f"{shown(name)} is not among the published ones that are known: one like it; or import its Python file"
        near = tuple(nearest_first(name or found.program, known)[:3])
        said.questions.append(Question(name="recipe", about=about, choices=near))
        name = near[0]
    over = {**_flags(found.settings), **_of_one_length(words)}
    known, older = recipe_releases.chosen(said, (path,), lambda _, recipes: {**recipes[name], **over})
    base, notes = known[name], (*found.notes, *(older or PUBLISHED))
    if base.get("model.hf") and is_open(str(over.get("model.hf", ""))):  # where its files lie
        notes = (*notes, f"--hf_path {shown_text(over.pop('model.hf'))[:80]}: read as a place of the recipe's own model")
    return parse(path, said, {**base, **over}, gpus, notes=notes)


def _over(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the sections of a YAML say over a recipe."""
    sections = {name: data[name] for name in OVERRIDES if isinstance(data.get(name), Mapping)}
    over = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return _of_one_length(over | saved.whole(data))


def _merged(path: Path) -> dict[str, Any]:
    """What a YAML says that a program merges over its recipe; nothing where its sections are the program's own."""
    data = resolved(extended(path, "overrides of a recipe of Megatron-Bridge"))
    return _over(data) if data.keys() & {*OVERRIDES, *OTHERS} else {}


def _of_one_length(words: dict[str, Any]) -> dict[str, Any]:
    """Overrides in which the length of the data, once called sequence_length, is that of the model, as Megatron-Bridge insists."""
    found = {name.replace("dataset.sequence_length", "dataset.seq_length"): value for name, value in words.items()}
    length = found.get("dataset.seq_length")
    return {"model.seq_length": length, **found} if length is not None else found


def _of_its_own(path: Path, data: Mapping[str, Any]) -> None:
    """Raises PlannerError for a section that Megatron-Bridge does not have and that holds what decides a plan: the program of a
    project makes of it what it likes."""
    names = {one.rpartition(".")[2] for one in DECISIVE} - {"hf", "dim"} | {"tp", "pp", "cp", "ep", "vp", "gbs", "mbs"}

    def held(value: Any, depth: int = 0) -> bool:
        inner = value.items() if isinstance(value, Mapping) and depth < 8 else ()
        return any(str(key) in names or held(one, depth + 1) for key, one in inner)

    own = next((str(one) for one in data if one not in (*OVERRIDES, "recipe", "run", "mixed_precision") and held(data[one])), None)
    if own is not None:
        raise PlannerError(
            f"{path}: its section {shown(own)} is none of Megatron-Bridge's, and a program of the project reads it in a way of its "
            "own; import the recipe that it starts from"
        )


def _of_yaml(path: Path, said: Given, known: Mapping[str, Mapping[str, Any]]) -> Reading:
    """A recipe by its _target_, with its arguments and the sections that go over it."""
    data = resolved(said.filled(extended(path, "overrides of a recipe of Megatron-Bridge")))
    if saved.is_saved(data):
        return parse(path, said, saved.settings(path, data), said.num_gpus)
    _of_its_own(path, data)
    over = _over(data)
    call = data.get("recipe")
    if call is None:
        hub = str((data.get("model") or {}).get("hf_model_id") or "") if isinstance(data.get("model"), Mapping) else ""
        like = tuple(name for name, one in known.items() if hub and one.get("model.hf") == hub and "gpu_" not in name)
        like = _of_programs(path, known) or like or tuple(one for one in known if one.removesuffix("_config") in path.stem)
        said.questions.append(Question(name="recipe", about="the recipe that these settings go over", choices=like))
    call = call if isinstance(call, Mapping) else {"_target_": call or next(iter(known))}
    target = str(call.get("_target_", "")).rpartition(".")[2]
    if not target:
        raise PlannerError(f"{path}: its section recipe has no _target_, the recipe of Megatron-Bridge that it starts from")
    if target not in known:
        about = f"{shown(target)} is not among the published ones that are known: one like it"
        said.questions.append(Question(name="recipe._target_", about=about, choices=tuple(nearest_first(target, known)[:3])))
    words = {f"{SECTIONS.get(key, 'model')}.{key}": value for key, value in call.items()}
    named = data.get("hf_model_path") or call.get("hf_path") or _by_checkpoint(data, known.get(target, {}))
    words = {key: value for key, value in words.items() if key in DECISIVE}
    known, notes = recipe_releases.chosen(said, (path,), lambda _, recipes: {**recipes.get(target, {}), **words, **over})
    settings = {"model.hf": "", **known.get(target, {}), **words, **over}
    run = Settings(path, data, said=said).section("run")
    nodes, each = (run.number(one) or run.section("env").number(one) for one in ("nodes", "gpus_per_node"))
    return parse(path, said, {**settings, **({"model.hf": str(named)} if named else {})},
                 said.num_gpus or (nodes * each if nodes and each else None), notes=notes)  # fmt: skip


def _by_checkpoint(data: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The path of the weights that a job begins with, where its recipe names no model and the path names one."""
    section = data.get("checkpoint")
    path = str(section.get("pretrained_checkpoint") or "") if isinstance(section, Mapping) and not recipe.get("model.hf") else ""
    return path if preset_of(path) else ""


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """Options of run_recipe.py that change the recipe."""
    names = {"seq_length": "model.seq_length", "hf_path": "model.hf", "peft_scheme": "peft"}
    return {place: given[name] for name, place in names.items() if given.get(name) is not None}


def _of_programs(path: Path, known: Mapping[str, Any]) -> tuple[str, ...]:
    """Recipes that programs in its folder, or in those above, take which name a file of settings."""
    found: list[str] = []
    for folder in path.resolve().parents[:MOST_ABOVE]:
        texts = [text for one in sorted(folder.glob("*.py"))[:MOST_PROGRAMS] if path.name in (text := read_text(one))]
        found += re.findall(r"\b\w{1,100}_config\b", " ".join(texts))
    return tuple(dict.fromkeys(name for name in found if name in known))


MOST_ABOVE, MOST_PROGRAMS = 3, 40


def _of_module(path: Path, tree: ast.Module, said: Given, known: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(Settings of the one recipe of a module, of the one that is named, or of a program; notes)."""
    recipes = [
        name for name, one in functions(tree).items() if name.endswith("_config") and not name.startswith("_")
        and any(isinstance(node, ast.Return) and node.value for node in ast.walk(one))  # not one that checks it
    ]  # fmt: skip
    if "pretrain_config" in recipes:  # the first recipes, whose parts are functions of their own
        recipes = [name for name in recipes if name in ("pretrain_config", "finetune_config")]
    asked = said.setting("recipe")
    if asked is not None and recipes and asked not in recipes:
        raise PlannerError(f"{path}: it has no recipe {shown(asked)}; it has {', '.join(recipes[:8])}")
    if len(recipes) > 1 and asked is None:
        needed = [] if said.num_gpus else [NEEDED["num_gpus"]]
        ask(str(path), [Question(name="recipe", about=f"it has {len(recipes)}", choices=tuple(recipes)), *needed])
    if not recipes:
        known, older = recipe_releases.chosen(said, (path,), lambda one, recipes: Program(
            path, one, known_to(tree, _with_one_like_it(path, tree, one, with_modules_beside(path, tree, recipes))), _merged
        ).started({}, {}))  # fmt: skip
        known = _with_one_like_it(path, tree, said, with_modules_beside(path, tree, known))
        program = Program(path, said, known_to(tree, known), _merged)
        names = {*program.names_used()}
        if not names & {*TRAINS} and not any(one in known for one in names):
            raise PlannerError(f"{path}: it starts no training (pretrain, finetune) and takes none of the recipes")
        settings = _unset(program, known) | program.started({}, {})
        return settings, (*program.notes(), *(older or PUBLISHED * bool(imported(tree))))
    function = functions(tree)[asked or recipes[0]]
    called = {last_name(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
    starts = len(recipes) == 1 and function.name in called and bool(called & {*STARTS})
    if starts or any(isinstance(one, BLOCKS) for one in ast.walk(function)):
        return _of_function(path, tree, "" if starts else function.name, said, known)
    known, older = recipe_releases.chosen(said, (path,), lambda _, started: settings_of(
        tree, asked or recipes[0], with_modules_beside(path, tree, started)))  # fmt: skip
    return settings_of(tree, asked or recipes[0], with_modules_beside(path, tree, known)), older


def _of_function(path: Path, tree: ast.Module, name: str, said: Given, known: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A recipe with conditions or loops, or '' for one that its file trains with: followed like a program."""

    def program(one: Given, recipes: Any) -> Program:
        beside = with_modules_beside(path, tree, recipes)
        return Program(path, one, known_to(tree, _with_one_like_it(path, tree, one, beside)), _merged)

    def settled(followed: Program) -> dict[str, Any]:
        return followed.of_function(name) if name else followed.started({}, {})

    known, older = recipe_releases.chosen(said, (path,), lambda one, recipes: settled(program(one, recipes)))
    followed = program(said, known)
    settings = settled(followed)
    return _unset(followed, known) | settings, (*followed.notes(), *(older or PUBLISHED * bool(imported(tree))))


def _unset(program: Program, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a program leaves to its provider where it takes no recipe, which would say it."""
    return {} if any(one in known for one in program.names_used()) else {EXPERTS_CUT: None}


def _with_one_like_it(path: Path, tree: ast.Module, said: Given, known: Any) -> Any:
    """The recipes that are known, and under the name of one that a script imports and that is not, the one that is said."""
    names = list(dict.fromkeys(imported(tree).values()))
    if not names or any(one in known for one in names):
        return known
    asked = said.setting("recipe")
    of_batch = _batch_of_older(tree, said) if names[0].endswith("_finetune_config") else []
    if asked not in known:
        about = f"{shown(names[0])} is not among the published ones that are known: one like it"
        needed = [*of_batch, *([] if said.num_gpus else [NEEDED["num_gpus"]])]
        ask(str(path), [Question(name="recipe", about=about, choices=tuple(nearest_first(names[0], known)[:3])), *needed])
    return {**known, **dict.fromkeys(names, known[asked])}


def _batch_of_older(tree: ast.Module, said: Given) -> list[Question]:
    """What is asked beside the recipe of today that is like one of releases up to 0.3: these pack samples, or not, to lengths and
    batches of their own.  [0.3, recipes/*: _finetune_common]"""
    text, about = ast.unparse(tree), "of recipes for both kinds of fine-tuning, up to 0.3, it is another one"
    asked = ((said.sequence_length, r"seq(uence)?_length", "--sequence-length S"),
             (said.global_batch_size, "global_batch_size", "--global-batch-size B"))  # fmt: skip
    wanted = [name for known, word, name in asked if known is None and not re.search(rf"\b{word} ?=", text)]
    return [Question(name=name, about=about) for name in wanted]
