"""The forms of a configuration of torchtitan: Python, TOML, saved JSON, a command line; all become sections."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.trainers.reading.commands import processes, which_training
from planner.trainers.reading.given import CONFIG_FILE, WHICH_TRAINING, Given, Question, ask, note_of_several
from planner.trainers.reading.interpolation import merged
from planner.trainers.reading.settings import beside, parsed
from planner.trainers.reading.shell import evaluate, is_open, options, roots, words_of
from planner.trainers.reading.shell.built_in import Script
from planner.trainers.reading.shell.text import CLOSE
from planner.trainers.reading.shell.tree import Command
from planner.trainers.reading.values import json_mapping, not_priced, read_text
from planner.trainers.torchtitan.flavors import USUAL_FLAVOR, builds_by_flavor, model_named
from planner.trainers.torchtitan.own_registry import of_upstream, own_loss, own_model, products_of
from planner.trainers.torchtitan.own_words import (
    ADAPTERS,
    is_off,
    of_components,
    of_foreign_tables,
    of_own_keys,
    of_replicas,
    own_layers,
    require_converters,
    require_states,
)
from planner.trainers.torchtitan.python_modules import BETWEEN, Sections, between, mode_of, of_module
from planner.trainers.torchtitan.python_tables import holds_tables, tables_of

TRAINS = r"torchtitan\S*train\b"
"""torchtitan's program, as a module or a file."""
SECTIONS = (
    "parallelism", "training", "activation_checkpoint", "model", "optimizer", "compile", "float8", "quantize", "experimental",
    "debug",
)  # fmt: skip
"""Sections that decide a plan."""
PATHS = ("dataset", "steps", "hf_assets", "tokenizer", "seed", "shuffle_seed", "eval_", "val_")
"""Keys of them that do not, where a script leaves them open."""
STATE_TYPE = r"(optim(izer)?_)?states?_dtype"
"""The type of optimizer states, by its name in forks."""
OLD_FLOAT8 = (
    " is no word of the version that has [parallelism] or model.converters: no layer is in float8 without a converter"
)
_OLD_PARALLEL = (
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree", "context_parallel_degree",
    "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatches", "enable_async_tensor_parallel",
    "expert_parallel_degree", "fsdp_reshard_after_forward", "pipeline_parallel_split_points", "pipeline_parallel_schedule_csv",
    "pipeline_parallel_layers_per_stage", "pipeline_parallel_microbatch_size", "context_parallel_rotate_method",
    "disable_loss_parallel", "enable_loss_parallel",
)  # fmt: skip
"""Keys of [training] and [experimental] that belong to parallelism since 2025."""


def sections(path: Path, text: str, given: Given) -> Sections:
    """The sections of a file of any form. Raises PlannerError."""
    if path.suffix == ".py":
        tree = library.parse_python(text, str(path))
        if not holds_tables(tree):
            return of_module(path, text, given)
        found = tables(path, tables_of(path, tree, given, PATHS))
        return {**found, "other": {**found["other"], "toml": True}}
    if path.suffix == ".toml":
        data = library.parse_toml(text, str(path))
        for name in given.settings:  # sections that the file leaves out
            if name.partition(".")[0] in SECTIONS:
                data.setdefault(name.partition(".")[0], {})
        found = tables(path, given.filled(data))
        return {**found, "other": {**found["other"], "toml": True}}
    if path.suffix == ".json":
        data = json_mapping(path, text, "a configuration saved by torchtitan")
        if "parallelism" not in data:
            raise PlannerError(f"{path}: not a configuration saved by torchtitan: the section 'parallelism' is missing")
        if "mode" in _table(data, "activation_checkpoint"):  # of 0.2, whose tables are those of TOML
            found = tables(path, given.filled(data))
            return {**found, "other": {**found["other"], "toml": True}}
        found = _plain(given.filled(data))
        even = _table(data, "debug").get("moe_force_load_balance")
        return {**found, "other": {"notes": ["recompute: the file does not name its policy; selective is taken"], "balanced": even,
                                   "compile": _table(data, "compile").get("enable") is True}}  # fmt: skip
    return _flags(path, text, given)


def _plain(data: Mapping[str, Any]) -> Sections:
    found = {name: data.get(name) or {} for name in ("parallelism", "training")}
    return {name: dict(value) if isinstance(value, Mapping) else {} for name, value in found.items()}


# ---------------------------------------------------------------------------------------------------------------- TOML


EAGER_LOSS = "0.0.2"
"""torchtitan before [parallelism], whose loss was compiled for two months alone.  [e10cb9494, e8977b007]"""
COMPILED_LOSS = "the loss is priced uncompiled: from 2024-10-22 to 2024-12-18 it was compiled, with 10 bytes less for each logit"
TABLES = (
    "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism", "checkpoint", "validation",
    "comm", "activation_checkpoint", "compile", "float8", "mx", "quantize", "experimental", "fault_tolerance", "memory_estimation",
    "debug", "dataloader", "tokenizer", "loss", "model_spec", "model_converters",
)
"""Tables of a configuration of torchtitan, of all its versions."""


def _renamed(found: Sections, experimental: dict[str, Any]) -> None:
    """Sections with today's names in place of those of other versions and forks."""
    for section in (found["training"], experimental):
        if "data_parallel_degree" in section:  # before there were replicas
            section["data_parallel_shard_degree"] = section.pop("data_parallel_degree")
        for name in _OLD_PARALLEL:
            if name in section:
                found["parallelism"].setdefault(name, section[name])
                found["training"].pop(name, None)
    found["training"].pop("fp8_linear", None)  # read with the converters
    if (joint := found["parallelism"].pop("enable_loss_parallel", None)) is not None:
        found["parallelism"].setdefault("disable_loss_parallel", not joint)
    if (parts := found["parallelism"].pop("module_names_per_model_chunk", None)) is not None:
        found["parallelism"].setdefault("module_fqns_per_model_part", parts)
    if found["training"].get("data_parallel_type") == "ddp":  # of 2024
        whole = found["parallelism"].pop("data_parallel_shard_degree", -1)
        found["parallelism"] |= {"data_parallel_replicate_degree": whole, "data_parallel_shard_degree": 1}
    if "grad_accumulation_steps" in found["training"]:  # of forks
        found["training"].setdefault("gradient_accumulation_steps", found["training"].pop("grad_accumulation_steps"))
    if "batch_size" in found["training"]:
        found["training"].setdefault("local_batch_size", found["training"].pop("batch_size"))


def _microbatches(found: Sections, experimental: dict[str, Any]) -> list[Question]:
    """Until 2025-04 there were as many microbatches as stages where nothing said their number, since then each has one sequence:
    what is asked where a table with ``batch_size``, of both times, says neither.  [5e2033c75, pipelining_utils.py]"""
    own, place = found["parallelism"], "pipeline_parallel_degree"
    before = next((one[place] for one in (experimental, found["training"]) if place in one), None)
    if before is not None and "pipeline_parallel_microbatches" not in experimental:
        own.setdefault("pipeline_parallel_microbatches", before)
    said = {f"pipeline_parallel_{one}" for one in ("microbatches", "microbatch_size", "layers_per_stage")} & own.keys()
    stages, batch = own.get(place, 1), found["training"].get("batch_size")
    differ = all(isinstance(one, int) and one > 0 for one in (stages, batch)) and batch > stages > 1 and batch % stages == 0
    if said or not differ:
        return []
    about = "sequences of a microbatch: 1 since 2025-04, before then batch_size over the number of stages"
    return [Question(name="parallelism.pipeline_parallel_microbatch_size", about=about, choices=("1",))]


def tables(path: Path, data: dict[str, Any]) -> Sections:
    """Tables of TOML, until 0.2, and with the names of 2024; ``data`` as the file nests them. Raises PlannerError."""
    found = _plain(data)
    experimental = data.get("experimental") if isinstance(data.get("experimental"), Mapping) else {}
    old = bool({"batch_size", "data_parallel_degree", *_OLD_PARALLEL} & found["training"].keys())
    dated = {"data_parallel_degree", *_OLD_PARALLEL} & {*found["training"], *(experimental or {})}  # until 2025-02
    asked_parts = _microbatches(found, dict(experimental or {}))
    _renamed(found, dict(experimental or {}))
    foreign = [name for name, value in data.items() if isinstance(value, Mapping) and name not in TABLES]
    inner = {name: value for name, value in _table(data, "model").items() if isinstance(value, Mapping) and not is_off(name, value)}
    own = [f"model.{name}" for name in inner]
    wrong = [one for one in own if re.search("attn|attention|shar(e|ing)|expert|moe|rank|mixer", one)]  # other layers
    wrong += [one for one in foreign if ADAPTERS.search(one) and not is_off(one, data[one])]
    if wrong:
        raise not_priced(str(path), wrong, wrong)
    asked, notes = of_foreign_tables(data, foreign)
    notes += [f"sections of [model] that torchtitan does not have, not read: {', '.join(own[:8])}"] * bool(own)
    checkpoint = _table(data, "activation_checkpoint")
    products = products_of(path, checkpoint)
    more, noted = of_own_keys(data, products)
    notes += noted
    other: dict[str, Any] = {"notes": notes, "own_settings": (experimental or {}).get("custom_args_module"), "products": products}
    mode = checkpoint.get("mode", "selective")
    other["questions"] = [*asked, *more, *asked_parts, *([between(mode)] if mode in BETWEEN else [])]
    other["recompute"] = mode_of(path, "selective" if mode in BETWEEN else mode)
    named = "per_op_sac_force_recompute_mm_shapes_by_fqns"
    if [one for one in checkpoint.get(named) or () if "router" not in str(one)]:
        notes.append(f"activation_checkpoint.{named}: products that it names are priced as others")
    option = str(checkpoint.get("selective_ac_option", "2"))
    if other["recompute"] == Recompute.SELECTIVE and mode not in BETWEEN and option != "op":
        other["layers"], other["version"] = option, "0.1" if old else "0.2"
    model = _table(data, "model")
    names = [data.get("model", {}).get(one) if isinstance(data.get("model"), Mapping) else None for one in
             ("hf_assets_path", "tokenizer_path")]  # fmt: skip
    family, flavor = (str(model.get(one) or "") for one in ("name", "flavor"))
    usual = not flavor and builds_by_flavor(family)  # whatever its tokenizer is of
    other["model"] = "" if usual else model_named([str(one) for one in names if one], family, flavor)
    other["called"] = f"{family} {USUAL_FLAVOR}".strip() if usual else f"{family} {flavor}".strip()
    other["spec"], taken = own_model(path, family, flavor, other["model"], names)
    other["model"] = "" if other["spec"] else other["model"]
    notes += [taken] * bool(taken)
    if re.search("simple_fsdp|compiler_toolkit|graph_trainer", str(model.get("name", ""))):
        notes.append("weights are sharded by the compiler's passes; priced as FSDP2")
    other["old"] = old
    other["balanced"] = _table(data, "debug").get("moe_force_load_balance")
    other["untied"] = "llama3" in str(model.get("name", ""))
    other["optimizer"] = str(_table(data, "optimizer").get("name", "AdamW"))
    other["questions"] += require_states(path, _of_states(data))
    notes += [*own_loss(path, family), *own_layers(model), *of_replicas(data)]
    if _table(data, "optimizer").get("implementation") == "for-loop":
        notes.append("optimizer.implementation for-loop updates weights one by one; priced as one kernel")
    if _table(data, "compile").get("enable_async_tensor_parallel") is True:  # where it stands since 0.3
        found["parallelism"].setdefault("enable_async_tensor_parallel", True)
    other.update(_compiled(found, _table(data, "compile"), bool(dated), notes))
    other.update(_low_precision(path, data, model, notes))
    return {**found, "other": other}


def _compiled(found: Sections, table: Mapping[str, Any], dated: bool, notes: list[str]) -> dict[str, Any]:
    """Whether the model is compiled, with notes on the loss; ``dated``: of the time before [parallelism]."""
    compiled = table.get("enable", found["training"].pop("compile", False))
    parts = table.get("components", ["model", "loss"])
    parts = parts.split(",") if isinstance(parts, str) else parts
    model = bool(compiled) and (not isinstance(parts, list) or "model" in parts)
    if dated:
        notes += [COMPILED_LOSS] * model
        return {"compile": model, "version": EAGER_LOSS}
    notes += of_components(parts) if compiled else []
    return {"compile": model}


def _of_states(data: Mapping[str, Any]) -> dict[str, Any]:
    """[optimizer] without the type of the states where that is the weights', which states have by themselves."""
    weights, kinds = str(_table(data, "training").get("dtype", "float32")), {"bf16": "bfloat16"}
    table = _table(data, "optimizer")
    types = {one: str(value).removeprefix("torch.") for one, value in table.items() if re.fullmatch(STATE_TYPE, one)}
    same = [one for one, kind in types.items() if kinds.get(kind, kind) == weights]
    return {one: value for one, value in table.items() if one not in same}


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def _low_precision(path: Path, data: Mapping[str, Any], model: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    converters = [str(one).lower() for one in model.get("converters") or () if isinstance(model.get("converters"), list)]
    old = "enable_float8_linear" * any(_table(data, one).get("enable_float8_linear") is True for one in ("float8", "training"))
    if str(_table(data, "training").get("fp8_linear", "")).lower() not in ("", "false"):  # until 2024-07
        old = "fp8_linear"
    if old and ("parallelism" in data or "converters" in model):  # a month after converters took its place, in 2025-02
        if not converters:
            notes.append(f"{old}{OLD_FLOAT8}")
        old = ""
    low = require_converters(path, converters, {one: _table(data, one) for one in ("float8", "mx", "quantize")})
    notes += [one for one in low if one not in notes]
    quantised = {**_table(_table(data, "quantize"), "dense"), **_table(_table(data, "quantize"), "linear")}
    grouped = {"grouped": any("grouped_mm" in one or "moe" in one for one in converters)}
    grouped["grouped"] |= any(_table(data, one).get("moe_fqns_prototype") for one in ("float8", "mx"))
    recipe = str(
        _table(quantised, "float8").get("recipe_name") or _table(data, "float8").get("recipe_name") or "tensorwise"
    )
    if old or any("float8" in one for one in converters):
        return {"precision": "fp8_row" if recipe.startswith("rowwise") else "fp8", **grouped}
    return {"precision": "mxfp8", **grouped} if any("mx" in one for one in converters) else {}


# -------------------------------------------------------------------------------------------------------- command line


def _flags(path: Path, text: str, given: Given) -> Sections:
    """--parallelism.tensor_parallel_degree 4 (or =4, or with dashes) in a script or a log, over the TOML that it names."""
    script = evaluate(text, str(path), given.settings, path.parent)
    given.used.update(given.settings.keys() & script.variables.mentioned)
    data: dict[str, Any] = {}
    questions: dict[str, str] = {}
    commands = _one_training(path, script, given)
    words = [word for command in commands for word in command.words]
    registered: Sections = {}
    lists: dict[str, list[str]] = {}
    started: dict[str, Any] = {}
    toml = False
    for command in commands:
        registered = registered or _registered(path, command.words, given)
        if _trains(command):
            started["gpus"] = processes(script, command)
        for name, values, under in options(words_of(command.words)):
            section, _, key = name.replace("-", "_").partition(".")
            if section == "nproc_per_node" and values:
                started["each"] = values[0]
            if section == "job" and key == "config_file" and values and not under:
                data, toml = merged(_file(path, values[0], given), data), True
            if section not in SECTIONS or not key or key.startswith(PATHS):
                continue
            value = values[0] if values else "true"
            if key.startswith("no_"):  # of tyro: --training.no-enable-cpu-offload
                key, value = key[3:], "false"
            if key in ("components", "converters"):  # lists, whose words follow each other or stand in several flags
                lists.setdefault(key, []).extend(values)
                value = ",".join(lists[key])
            if is_open(value) or under:
                asked = () if "." in key else roots(value) or [one for one in under if one] or [key]
                questions |= {one: name for one in asked if one not in questions}
                continue
            inner: Any = parsed(value)
            for part in reversed(key.split(".")):
                inner = {part: inner}
            data = merged(data, {section: inner})
    for name in given.settings:  # as answers to what a function that is not there would say
        if registered and name.partition(".")[0] in SECTIONS:
            data.setdefault(name.partition(".")[0], {})
    if questions:
        choices = {name: tuple(script.choices.get(name, ())) for name in questions}
        ask(str(path), [Question(name=name, about=f"--{key}", choices=choices[name]) for name, key in questions.items()])
    union = _of_union(path, words, given)
    if registered:
        over = {**_over(path, data, given), "started": started}
        over["other"] |= union
        over["other"]["notes"] = [*registered["other"].get("notes", ()), *note_of_several(given)]
        return {name: {**registered.get(name, {}), **part} for name, part in over.items()}
    if not data.get("parallelism") and not any(one in _table(data, "training") for one in _OLD_PARALLEL):
        raise PlannerError(f"{path}: no --parallelism flag, no TOML, JSON or Python: not a torchtitan configuration")
    converters = _table(data, "model").get("converters")
    if isinstance(converters, str):
        data["model"] = {**data["model"], "converters": converters.split(",")}
    known = data.keys() & {"job", "model", "optimizer", "activation_checkpoint", "debug"}
    found = tables(path, given.filled(data)) if known else {**_plain(given.filled(data)), "other": {"notes": []}}
    found["other"] |= {"toml": toml, **union, "notes": [*found["other"]["notes"], *note_of_several(given)]}
    return {**found, "started": started}


def _trains(command: Command) -> bool:
    return any(re.search(TRAINS, one) or one.startswith("--job.config_file") for one in command.words)


def _one_training(path: Path, script: Script, given: Given) -> list[Command]:
    """All commands of a script; where several train, the one that is meant. Asks for what decides which of them runs."""
    every = list({tuple(one.words): one for one in script.commands if _trains(one)}.values())
    if len(every) < 2:
        return script.commands
    given.trainings[:] = [" ".join(one.words) for one in every]
    waiting = next((name for one in every for name in one.under if name), None)
    if waiting and given.setting(WHICH_TRAINING) is None:
        about = f"which of the {len(every)} trainings of the script it starts"
        ask(str(path), [Question(name=waiting, about=about, choices=tuple(script.choices.get(waiting, ())))])
    return [every[which_training(path, given) - 1]]


def _of_union(path: Path, words: list[str], given: Given) -> dict[str, Any]:
    """The policy of recompute that a word of a union of classes chooses, since 0.3: activation-checkpoint:full."""
    chosen = [one[1].lower() for word in words if (one := re.fullmatch(r"activation[-_]checkpoint:(\S+)", word))]
    if not chosen:
        return {}
    said = given.setting("activation_checkpoint.mode")
    mode = next((name for name in ("full", "selective", "none") if chosen[-1].startswith(name)), None)
    if mode is None and said is None:
        return {"questions": [between(chosen[-1])]}
    return {"recompute": mode_of(path, said or mode)}


OWN_MODULES = ("llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss")
"""Modules of torchtitan, whose configurations repeat activations as its defaults do; those of a project may do otherwise."""


def _registered(path: Path, words: list[str], given: Given) -> Sections:
    """What the function says that --module llama3 --config llama3_8b name, in a module of the same repository; {} where a
    command names none. Raises PlannerError where it is not there and no flag says a degree."""
    named = {name: values[0] for name, values, _ in options(words_of(words)) if values and name in ("module", "config")}
    if not any(re.search(TRAINS, one) for one in words) or len(named) < 2:
        return {}
    module, config = (given.setting(one) or named[one] for one in ("module", "config"))
    if is_open(module + config):
        ask(str(path), [Question(name=one, about="--module and --config") for one in roots(module + config)])
    folder = module.replace(".", "/")
    places = [f"{one}{folder}/config_registry.py" for one in ("", "torchtitan/models/", "torchtitan/experiments/")]
    file = next((found for one in places if (found := beside(path, one, (".py",))) is not None), None)
    told = module.rpartition(".")[2] in OWN_MODULES or any(re.match(r"--activation[-_]checkpoint\.", one) for one in words)
    if file is None and told and any(one.startswith("--parallelism.") for one in words):
        return {"other": of_upstream(words, module, config, given)}  # its flags say the layout
    if file is None:
        raise PlannerError(f"{path}: it trains {config} of {module}, whose config_registry.py is not there; import that file")
    settings = {**given.settings, "config": config}
    return of_module(file, read_text(file), replace(given, settings=settings))


def _over(path: Path, data: dict[str, Any], given: Given) -> Sections:
    """Sections that flags say over those of a function."""
    found = tables(path, given.filled(data))
    said = data.keys() | ({"precision"} if "precision" in found["other"] else set())
    names = {"activation_checkpoint": ("recompute", "layers", "version"), "optimizer": ("optimizer",), "compile": ("compile",),
             "precision": ("precision", "grouped"), "debug": ("balanced",)}  # fmt: skip
    if "selective_ac_option" not in _table(data, "activation_checkpoint"):  # the function's own word stays
        found["other"].pop("layers", None)
    kept = {name: found["other"][name] for one in said & names.keys() for name in names[one] if name in found["other"]}
    return {**{name: found[name] for name in ("parallelism", "training")}, "other": kept}


def _file(path: Path, name: str, given: Given) -> dict[str, Any]:
    """The TOML or module of dictionaries that a command names; folders in front of it may be unknown. Asks where there is none."""
    called, name = name, given.setting(CONFIG_FILE) or name
    name = name.rpartition(CLOSE)[2].lstrip("/") if is_open(name) else name
    file = beside(path, name, (".toml", ".py"))
    if file is None:
        ask(str(path), [Question(name=CONFIG_FILE, about=f"it names {shown(called)}, which is not there", choices=("FILE",))])
    if file.suffix != ".py":
        return library.parse_toml(read_text(file), str(file))
    tree = library.parse_python(read_text(file), str(file))
    if not holds_tables(tree):
        raise PlannerError(f"{path}: it names {shown(called)}, which has no sections of torchtitan as dictionaries")
    return tables_of(file, tree, given, PATHS)

