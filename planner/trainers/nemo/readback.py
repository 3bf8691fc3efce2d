"""NeMo 2: scripts and notebooks that start a recipe and change it, or build strategy, trainer and data themselves, recipes, and the
commands of its CLI. NeMo 1, NeMo-Aligner and the launcher: their YAML."""

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.megatron_bridge import recipe_releases
from planner.trainers.megatron_bridge.of_settings import EXPERTS_CUT, parse
from planner.trainers.megatron_bridge.recipe_releases import Known
from planner.trainers.megatron_bridge.recipes import SIZES
from planner.trainers.nemo import hydra
from planner.trainers.nemo.places import preset_of_class, preset_of_recipe, setting_of, with_precision
from planner.trainers.nemo.releases import NEMO
from planner.trainers.reading.branches import taken_branches
from planner.trainers.reading.commands import launched
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.modules import with_modules
from planner.trainers.reading.programs import own_programs, program_file
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import is_main, last_name, shell_of_cells
from planner.trainers.reading.settings import parsed
from planner.trainers.reading.shell.text import gap, is_open, roots
from planner.trainers.reading.values import read_text

STARTS = ("pretrain_recipe", "finetune_recipe")
ARGUMENTS = {
    "num_nodes": "nodes", "num_gpus_per_node": "devices", "tensor_parallelism": "model.tensor_model_parallel_size",
    "pipeline_parallelism": "model.pipeline_model_parallel_size", "context_parallelism": "model.context_parallel_size",
    "virtual_pipeline_parallelism": "model.virtual_pipeline_model_parallel_size", "seq_length": "dataset.seq_length",
    "sequence_parallelism": "model.sequence_parallel", "expert_parallelism": "model.expert_model_parallel_size",
    "global_batch_size": "train.global_batch_size", "micro_batch_size": "train.micro_batch_size",
}  # fmt: skip
"""Arguments of recipes."""
CLASSES = {
    "MegatronStrategy": "trainer.strategy", "Trainer": "trainer", "MegatronMixedPrecision": "plugins",
    "OptimizerConfig": "optim.config", "DistributedDataParallelConfig": "strategy.ddp", "LoRA": "peft",
    "MegatronCommOverlapCallback": "comm_overlap", "PackedSequenceSpecs": "data",
}  # fmt: skip
"""Classes, and the places of a recipe where their arguments stand."""
Found = tuple[dict[str, Any], tuple[str, ...]]
PUBLISHED = "as NeMo 2.5 publishes it"
WORDS = {"pretrain": "pretrain", "finetune": "lora"}


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return hydra.read(path, said)
    text = shell_of_cells(path) if suffix == ".ipynb" else "" if suffix == ".py" else read_text(path)
    if re.search(hydra.PROGRAM, text):
        return hydra.of_command(path, said)
    if suffix in (".py", ".ipynb"):
        settings, notes = _of_release(said, (path,), lambda one, known: _of_script(path, one, known))
    elif re.search(hydra.LAUNCHER, text):
        return hydra.of_launcher(path, said)
    else:
        settings, notes = _started(path, said) or _of_release(said, (path,), lambda one, known: (_of_command(path, one, known), ()))
    return _reading(path, said, settings, notes)


def _of_release(said: Given, files: tuple[Path, ...], made: Callable[[Given, Known], Found]) -> Found:
    """Settings with the recipes of the release that files are for, and notes."""
    known, older = recipe_releases.chosen(said, files, lambda one, recipes: made(one, recipes)[0], NEMO)
    settings, notes = made(said, known)
    other = any(one.startswith("recipes as") for one in older)
    return settings, (*(one for one in notes if not (other and one.endswith(PUBLISHED))), *older)


def _reading(path: Path, said: Given, settings: dict[str, Any], notes: tuple[str, ...]) -> Reading:
    said_so = settings.get("ddp.grad_reduce_in_fp32")
    settings = with_precision({name: value for name, value in settings.items() if value is not None})
    if said_so in (True, False) and settings["ddp.grad_reduce_in_fp32"] != said_so:
        notes = (*notes, f"ddp.grad_reduce_in_fp32={str(said_so).lower()} is overwritten by the plugin of mixed precision")
    settings["optimizer.use_distributed_optimizer"] = settings.get("ddp.use_distributed_optimizer", True)
    nodes, devices = settings.pop("nodes", 1), settings.pop("devices", None)
    known = [one for one in (nodes, devices) if isinstance(one, int) and one > 0]
    gpus = said.num_gpus or (known[0] * known[1] if len(known) == 2 else None)
    kernel = roots(str(settings.get("model.attention_backend") or ""))  # AttnBackend.unfused, a member of Megatron Core's
    if kernel and kernel[0] in ("flash", "fused", "unfused", "local", "auto"):
        settings["model.attention_backend"] = kernel[0]
    settings.setdefault("model.hf", "")
    settings.setdefault(EXPERTS_CUT, None)
    if settings.get("dataset.seq_length") is not None:  # what a sample holds, whatever the model could take
        settings.pop("model.seq_length", None)
    return parse(path, said, settings, gpus, "nemo", notes)


def _published(path: Path, said: Given, name: str, start: str, given: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Settings of a recipe as it is called. Raises PlannerError for one that is not known."""
    if name not in known:
        raise PlannerError(f"{path}: recipe {shown(name)} is not among NeMo's recipes of language models that are known")
    peft = given.get("peft_scheme", "lora")
    if isinstance(peft, str) and is_open(peft):
        said.questions.append(Question(name=roots(peft)[0], about="of peft_scheme", choices=("lora", "none")))
        peft = "lora"
    if start == "finetune" and peft not in ("lora", None, "none", "None"):
        raise PlannerError(f"{path}: peft_scheme is {shown(peft)}, which is not modelled; lora and none are")
    kind = "pretrain" if start == "pretrain" else "lora" if peft == "lora" else "full"
    if kind not in known[name]:
        has = ", ".join(known[name])
        raise PlannerError(f"{path}: {start}_recipe of {name} has no {kind} training that is known; it has {has}")
    fast = given.get("performance_mode") is True
    found = dict(known[name].get(f"{kind}_fast", known[name][kind]) if fast else known[name][kind])
    if "ddp.grad_reduce_in_fp32" in found:  # its plugin says so
        found["plugin.grad_reduce_in_fp32"] = found.pop("ddp.grad_reduce_in_fp32")
    if start == "finetune" and given.get("packed_sequence") in (True, False):
        found |= _packed(name, known[name], kind, given["packed_sequence"])
    called = {place: given[word] for word, place in ARGUMENTS.items() if given.get(word) is not None}
    return {"nodes": 1, "devices": 8, "mixed_precision": "bf16_mixed", **found, **called}


def _packed(name: str, kinds: Mapping[str, Any], kind: str, packed: bool) -> dict[str, Any]:
    """Batch and length of a recipe that is told whether to pack samples, which performance_mode decides otherwise.
    [recipes/finetune_default.py]"""
    length, batch = (kinds[kind][one] for one in ("dataset.seq_length", "train.global_batch_size"))
    if packed:
        length = 4096 if name in LONGER else max(length, kinds.get(f"{kind}_fast", {}).get("dataset.seq_length", 0))
        batch = 8 if batch == 128 else batch
    return {"dataset.seq_length": length, "train.global_batch_size": batch}


LONGER = ("gemma3_1b", "llama32_1b", "llama32_3b")
"""Recipes without a performance mode that pack samples to 4096 tokens."""


# ------------------------------------------------------------------------------------------------------------- Python


class _Script(Script):
    """A script without the branches that its options do not take, and without the functions that it then never calls."""

    def whole(self, tree: ast.Module) -> ast.Module:
        return _reached(taken_branches(tree, self.said, self.defaults))


def _reached(tree: ast.Module) -> ast.Module:
    """A program without the functions that neither its main part nor what that calls names; a module that something else calls
    stays as it is, and so do functions with a decorator, which may hand them on."""
    by_name = {"globals", "Fire"} & {getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(tree)}
    if by_name or not any(is_main(one) for one in tree.body):
        return tree
    loose = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef) and not one.decorator_list}
    waiting: list[ast.AST] = [one for one in tree.body if loose.get(getattr(one, "name", "")) is not one]
    named: set[str] = set()
    while waiting:
        for one in ast.walk(waiting.pop()):
            name = getattr(one, "id", getattr(one, "attr", ""))
            if name in loose and name not in named:
                named.add(name)
                waiting.append(loose[name])
    body = [one for one in tree.body if loose.get(getattr(one, "name", "")) is not one or one.name in named]
    return ast.Module(body, tree.type_ignores)


class _WithModules(_Script):
    """The same with what it imports from files in its folder."""

    def whole(self, tree: ast.Module) -> ast.Module:
        return super().whole(with_modules(tree, self.path))


def _of_script(path: Path, said: Given, known: Known, modules: bool = False) -> Found:
    script = _WithModules(path, said) if modules else _Script(path, said)
    auto = next((one for one in script.names_used() if one.startswith("HFAutoModelFor") and script.built(one)), None)
    if auto is not None:
        raise PlannerError(
            f"{path}: {auto} is a model of transformers under a strategy of Lightning (ddp, FSDP), not of Megatron Core: its "
            "batches and its sharding are not read; a YAML of NeMo AutoModel with the same settings is"
        )
    own = [name for name in STARTS if name in script.functions]
    starts = [one for one in script.calls(*STARTS) if _module_of(script, one) and not own]
    asked = said.setting("recipe")
    if asked is not None:
        starts = [one for one in starts if _module_of(script, one) == asked]
    names = list(dict.fromkeys(_module_of(script, one) for one in starts))
    if len(names) > 1:
        ask(str(path), [Question(name="recipe", about=f"it starts {len(names)}", choices=tuple(names))])
    found, notes = {}, []
    if starts:
        call = starts[0]
        start = last_name(call.func).removesuffix("_recipe")
        words = script.keywords(call)
        found = _published(path, said, names[0], start, words, known)
        if "trainer.plugins" in script.places():  # another one in its place
            found = {name: value for name, value in found.items() if not name.startswith("plugin.")}
        notes += [f"what {one} gives the recipe is not read" for one in words if one.startswith("**")]
        notes.append(f"recipe {names[0]}, {start}, {PUBLISHED}")
        if len(starts) > 1:
            notes.append(f"of {len(starts)} calls of the recipe, the first is read (line {call.lineno})")
    elif own:
        script.only = ("pretrain_recipe", "trainer", "model", "")
        notes.append("pretrain_recipe is read, without what performance_mode changes")
    found |= _built(script, bool(starts))
    if not found and not modules:
        return _of_script(path, said, known, modules=True)
    if not found:
        raise PlannerError(f"{path}: no recipe of NeMo 2 is started here, and no MegatronStrategy or data module is built")
    model = next((preset for one in script.names_used() if (preset := preset_of_class(one)) is not None), None)
    model = model or (preset_of_recipe(path.stem) if own else None)
    if model is not None and (not starts or "model.hf" not in found):
        found["model.hf"] = model
    for place, value in script.places().items():
        name = setting_of(place)
        if name == "peft" and value is not None:  # a class, which is read where it is made
            continue
        if name in found and (value is not None or script.sets(place)):  # None takes back what the recipe says
            found[name] = gap([name]) if isinstance(value, str) and is_open(value) else value
        elif name is not None and value is not None:
            found[name] = value
    plain = [one for one in script.built("Trainer")[:1] if not {"plugins", "precision", None} & {word.arg for word in one.keywords}]
    if plain and not starts and "trainer.plugins" not in script.places():
        notes.append("nl.Trainer has no plugins: all is in fp32, and priced in bf16, whose activations take half of it")
    found |= _own_sizes(script) | _factories(script)
    if script.defaults:
        notes.append(f"options of the script at their defaults: {', '.join(dict.fromkeys(script.defaults))}")
    return found, tuple(notes)


def _module_of(script: Script, call: ast.Call) -> str:
    """The recipe that is started: llama3_8b of llm.llama3_8b.pretrain_recipe(), or of the import of the function."""
    owner = getattr(call.func, "value", None)
    if isinstance(owner, ast.Name):  # recipe = llm.llama3_8b
        made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == owner.id]
        found = dict.fromkeys(_named(script, one.value) for one in made)
        named = [one for one in found if one]
        asked = script.said.setting("recipe") if len(named) != 1 and made else None
        if len(named) != 1 and made and asked not in (named or (asked or "",)):
            ask(str(script.path), [Question(name="recipe", about="its program chooses one", choices=tuple(named))])
        return asked or (named[0] if named else owner.id)
    if isinstance(owner, ast.Call):
        return _named(script, owner)
    if owner is not None:
        return str(getattr(owner, "attr", getattr(owner, "id", "")))
    for node in (one for one in ast.walk(script.tree) if isinstance(one, ast.ImportFrom)):
        if any((one.asname or one.name) == getattr(call.func, "id", "") for one in node.names):
            return (node.module or "").rpartition(".")[2]
    return ""


def _named(script: Script, node: ast.expr) -> str:
    """The recipe that an expression names: llm.llama3_8b, or getattr(llm, args.model) with the value of the option."""
    if isinstance(node, ast.Call) and last_name(node.func) == "getattr" and len(node.args) > 1:
        value = script.value(node.args[1])
        if isinstance(value, str) and is_open(value) and roots(value):
            ask(str(script.path), [Question(name=roots(value)[0], about="the recipe that it takes", choices=("llama3_8b",))])
        return str(value)
    return node.attr if isinstance(node, ast.Attribute) else ""


OWN_ADAPTERS = re.compile(r"(?!LoRA$)\w*(LoRA|Lora|DoRA|Dora|Adapter)")
"""Classes of adapters, of NeMo or a project's own, that are other than LoRA, by their names."""


def _built(script: Script, started: bool) -> dict[str, Any]:
    """Settings of the classes that the script builds itself, under the defaults of these classes where no recipe says more."""
    found: dict[str, Any] = {}
    for name, place in CLASSES.items():
        for call in script.built(name)[:1]:
            found |= _taken(place, script.keywords(call))
            if name == "LoRA":
                found["peft"] = "lora"
            elif name == "OptimizerConfig" and not started:
                found.setdefault("ddp.use_distributed_optimizer", False)
    own = (one for one in script.names_used() if OWN_ADAPTERS.fullmatch(one) and script.built(one))
    found |= next(({"peft": name.lower()} for name in own), {})
    modules = [one for name in dict.fromkeys(script.names_used()) if name.endswith("DataModule") for one in script.built(name)]
    for call in modules[:1]:
        words = {"seq_length": 2048, "micro_batch_size": 4, "global_batch_size": 8} | script.keywords(call)
        found |= _taken("data", words)
    if found and not started and not modules:
        found |= {f"train.{one}": gap([f"train.{one}"]) for one in ("global_batch_size", "micro_batch_size")}
    return found


def _taken(place: str, words: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in words.items() if isinstance(value, bool | int | float | str | list)}
    return {setting: value for name, value in plain.items() if (setting := setting_of(f"{place}.{name}")) is not None}


def _own_sizes(script: Script) -> dict[str, Any]:
    """Sizes that a script gives a model's configuration, or a class of its own on top of one: the model is another one then."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(one for one in script.names_used() if preset_of_class(one) is not None):
        for call in script.built(name)[:1]:
            found |= script.keywords(call)
    for node in (one for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef)):
        if any(preset_of_class(last_name(base)) is not None for base in node.bases):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            found |= {last_name(one.target): script.value(one.value) for one in fields if one.value is not None}
    return {f"model.{name}": value for name, value in found.items() if SIZES.fullmatch(f"model.{name}")}


def _factories(script: Script) -> dict[str, Any]:
    """What the functions of nemo.collections.llm.recipes.precision say by their names."""
    names = [one for one in script.names_used() if re.fullmatch(r"\w*(bf16|fp16)(_with_\w+)?_mixed", one)]
    return {"mixed_precision": names[-1]} if names else {}


# ------------------------------------------------------------------------------------------------------------ commands


def _started(path: Path, said: Given) -> Found | None:
    """A program of the project under the options of the command that starts it; None = it starts none."""
    own = own_programs(path, said, "NeMo")
    if not own:
        return None
    found = launched(path, said, "|".join(map(re.escape, own)))
    file = program_file(path, found.program)
    assert file is not None
    words = dict(one.partition("=")[::2] for one in found.words if "=" in one)
    if (cli := re.search(CLI, read_text(file))) is None and any(setting_of(one) is not None for one in words):
        named = ", ".join(map(shown, words))
        raise PlannerError(f"{path}: how {file.name} reads {named} is not followed; import the configuration that it then runs")
    factory = str(found.settings.get("factory") or "") if cli else ""
    if cli and cli[1] in WORDS and factory and not re.search(rf"def {re.escape(factory.partition('(')[0])}\b", read_text(file)):
        settings, notes = _of_release(
            said, (path, file), lambda one, known: (_of_factory(path, one, cli[1], factory, known) | _laid_over(words), ())
        )
    elif factory:
        raise PlannerError(f"{path}: --factory {shown(factory)} of {file.name} is not followed; import that program")
    else:
        options = {name: str(value) for name, value in found.settings.items()}
        with_options = said.with_settings({**options, **said.settings})
        settings, notes = _of_release(
            with_options, (path, file), lambda one, known: _with(_of_script(file, one, known), words)
        )
    return settings, (*found.notes, f"{file.name} is followed under the options of its command", *notes)


CLI = r"\bcli\.main\(\s*(?:llm\.)?(\w+)"
"""A program whose words are laid over its recipe, as those of nemo llm are.  [nemo_run/cli/api.py]"""


def _with(found: Found, words: Mapping[str, str]) -> Found:
    return found[0] | _laid_over(words), found[1]


def _laid_over(words: Mapping[str, str]) -> dict[str, Any]:
    """Settings of words like trainer.num_nodes=2."""
    named = ((setting_of(place), value) for place, value in words.items())
    return {setting: parsed(value) for setting, value in named if setting is not None}


def _of_command(path: Path, said: Given, known: Known) -> dict[str, Any]:
    """nemo llm pretrain --factory llama3_8b trainer.num_nodes=2"""
    found = launched(path, said, r"(?:\S*/)?nemo", "llm")
    words = dict(one.partition("=")[::2] for one in found.words if "=" in one)
    start = next((one for one in found.words if one in WORDS), "")
    factory = str(found.settings.get("factory") or "")
    if not start or not re.match(r"\w+(\(|$)", factory):
        raise PlannerError(f"{path}: no 'nemo llm pretrain' or 'nemo llm finetune' with --factory RECIPE was found")
    return _of_factory(path, said, start, factory, known) | _laid_over(words)


def _of_factory(path: Path, said: Given, start: str, factory: str, known: Known) -> dict[str, Any]:
    """Settings of llama3_8b(num_nodes=2), as pretrain or finetune starts it."""
    name, _, arguments = factory.partition("(")
    given = {key.strip(): parsed(value.strip().strip("'\"")) for key, mark, value in
             (one.partition("=") for one in arguments.rstrip(")").split(",")) if mark}  # fmt: skip
    return _published(path, said, name, start, given, known)
