"""torchtune: the YAML of its recipes, and commands (tune run) with overrides of published ones."""

import dataclasses
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.trainer import load_trainer
from planner.trainer_options import spell
from planner.trainers.reading.commands import launched
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import adapter_targets, adapters_on_tables, layers_beside, optimizer
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.guides import steps_of
from planner.trainers.reading.interpolation import override, resolved
from planner.trainers.reading.kernels import softcapped
from planner.trainers.reading.settings import Settings, beside, file_settings, parsed, rooted
from planner.trainers.reading.shell.text import roots, shown_text
from planner.trainers.reading.values import quotient, read_text
from planner.trainers.torchtune import own_settings as own
from planner.trainers.torchtune import published_configs as releases
from planner.trainers.torchtune.builders import model_of

DTYPES = {"bf16": "bf16_true", "fp32": "fp32", "float32": "fp32", "bfloat16": "bf16_true"}
SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
"""fsdp_sharding_strategy of 0.2 and 0.3."""
FP8_STATES = ("AdamWFp8", "_AdamWFp8")
OTHER_RECIPES = re.compile(r"(^|/)(qat_|knowledge_distillation|ppo_|\w*grpo|eleuther|generat|quantize|early_exit)")
"""Recipes of another step than fine-tuning or DPO."""
RECIPES = re.compile(r"(dev/)?(gemma_)?(full|lora)_(finetune|dpo)(_distributed|_single_device|_fsdp2|_multi_dataset)*")
RECIPE_FILE = r"(?:\S*/)?(?:full|lora|qat|ppo|knowledge)\w*_(?:distributed|single_device)\.py"
"""Recipes that are started without tune."""
JOINED = re.compile(r"\btorch\.(cat|concat)\(\s*\w*logits\b")
"""Logits that a loss by chunks left apart, put together again."""
OF_BUILDERS = ("model.activation_checkpointing", "model.gradient_checkpointing")
"""Arguments of builders of a project's own, whose layers repeat their activations by themselves."""
ABOVE, ABOVE_ALL, MOST_BESIDE = 3, 5, 40
"""Folders of a configuration in which its recipe may lie, recipes/configs/model/a.yaml and recipes/a.py; folders and files of each
that are looked into for one of any name."""
RUNS = re.compile(r"@(?:torchtune\.)?config\.parse\b|\bFTRecipeInterface\b")
"""How a recipe takes its configuration."""

CONFIG = "config"
"""What a user says the configuration of a command with."""
MADE = ("dataset", "dataset_val", "tokenizer", "checkpointer", "lr_scheduler", "metric_logger", "loss", "profiler")
"""Sections with a _component_ that the published configurations here leave out."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml"):
        data = file_settings(path, "a recipe of torchtune")
        reading = parse(Settings(path, resolved(said.filled(data)), said=said), path.name, None, said.num_gpus)
        return dataclasses.replace(reading, notes=(*reading.notes, *_of_a_recipe_beside(path, reading)))
    by_tune = re.search(r"(?m)^(?![ \t]*#).*(?:\btune +run\b|torchtune\._cli\.tune)", read_text(path)) is not None
    found = launched(path, said, r"(?:\S*/)?tune|torchtune\._cli\.tune", "run") if by_tune else launched(path, said, RECIPE_FILE)
    words = {name: value if isinstance(value, list) else [value] for name, value in found.settings.items()}
    loose = [one for one in _loose(words, found.words) if one != "run" and "=" not in one]
    named, recipe = str(words.get("config", [""])[0]), (loose[0] if loose else "") if by_tune else found.program
    over = {key.lstrip("+~"): parsed(value) for key, mark, value in (one.partition("=") for one in found.words) if mark}
    own_text = found.written.get(named) if CONFIG not in said.settings else None
    named = said.setting(CONFIG) or named
    base, as_released = (library.parse_yaml(own_text, f"{path}: {named}"), ()) if own_text is not None else _configuration(
        path, named, said, {*over, *(f"{one}._component_" for one in over)}, recipe
    )
    said = said.with_settings({key: value for key, value in said.settings.items() if key != releases.SETTING})
    data = override(base, {_component(base, key): value for key, value in over.items()})
    counts = (words.get("nproc_per_node"), words.get("nnodes", [1]))
    each, nodes = (one[0] if one and isinstance(one[0], int) else None for one in counts)
    gpus = said.num_gpus or (each * nodes if each and nodes else None if by_tune else found.num_gpus)
    reading = parse(Settings(path, resolved(said.filled(data)), said=said), f"{recipe} {named}", recipe, gpus)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes, *as_released))


def _component(data: Mapping[str, Any], key: str) -> str:
    """The key that an override means: of a section with a _component_ that one.  [config/_utils.py, _merge_yaml_and_cli_args]"""
    part = data.get(key)
    made = "_component_" in part if isinstance(part, Mapping) else part is None and key in MADE
    return f"{key}._component_" if made else key


def _loose(words: Mapping[str, list[Any]], before: list[str]) -> list[str]:
    """Words that are no values of the launcher's options: the recipe."""
    return [*before, *(str(one) for name, values in words.items() if name != "config" for one in values[1:])]


def _configuration(path: Path, name: str, said: Given, over: Container[str], recipe: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(A file that a command names, or a published one, notes about it); which is meant is asked where it is neither."""
    said.setting(releases.SETTING)  # which decides nothing where it is a file
    own = f"recipes/configs/{name.removesuffix('.yaml')}.yaml"  # of a checkout, which may differ from the published one
    if (file := beside(path, rooted(name)) or beside(path, own)) is not None:
        return file_settings(file, "a recipe of torchtune"), ()
    called = name.removesuffix(".yaml")
    if called not in releases.known():
        near = releases.alike(called, recipe)
        about = f"{shown(shown_text(name))} is neither a file here nor a published configuration: that file, or one of them like it"
        variable = next(iter(roots(name)), CONFIG)
        choices = tuple(said.choices.get(variable, ())) or ("FILE", *near[:3])
        said.questions.append(Question(name=variable, about=about, choices=choices))
        if beside(path, f"recipes/configs/{near[0]}.yaml") is None:
            releases.ask_for_one(path, said)
        like = releases.known()[near[0]]  # for what else is open: one sentence asks for all
        return {one: like[one] for one in ("model", "optimizer", "batch_size") if one in like}, ()
    return releases.as_released(path, called, said, over)


def parse(given: Settings, called: str, recipe: str | None, num_gpus: int | None = None) -> Reading:
    """The job that settings describe; ``called``: its file, or the recipe and the configuration of a command; ``recipe``: that of
    the command, None = there is none. Raises PlannerError."""
    _require_fine_tuning(given, recipe)
    part, single = given.section("model"), "single_device" in called
    kind, model, model_name, notes = model_of(given)
    if single and num_gpus not in (None, 1):
        raise PlannerError(f"{given.path}: a recipe of a single device, but --gpus says {num_gpus}")
    own.require_allowed(given, single, bool(kind))
    own.require_builder(given, recipe, bool(kind))
    if kind and part.get("lora_attn_modules") == []:
        why = "--set model.lora_attn_modules=[q_proj,v_proj] imports the job with adapters there"
        raise PlannerError(f"{part.where('lora_attn_modules')} is empty, which torchtune refuses; {why}")
    micro, steps = given.size("batch_size"), given.size("gradient_accumulation_steps", 1)
    tp, cp, replicas = (given.size(name) for name in ("tensor_parallel_dim", "context_parallel_dim", "data_parallel_replicate_dim"))
    forked, told = own.degrees_of_a_fork(given, model)
    cp, shards = forked.get("cp", cp), given.number("data_parallel_shard_dim", -1, -1)
    host = given.flag("fsdp_cpu_offload") or (isinstance(given.data.get("fsdp"), dict) and given.flag("fsdp.cpu_offload"))
    if single:  # its recipes read none of them
        tp, cp, replicas, host, num_gpus = 1, 1, 1, False, 1
    if tp > 1:  # of full fine-tuning; recipes of adapters refuse it themselves
        why = "tensor parallelism of torchtune is not modelled; --set tensor_parallel_dim=1 imports the job without"
        raise PlannerError(f"{given.where('tensor_parallel_dim')} is {tp}: {why}")
    gpus = num_gpus if single else _of_shards(given, shards, tp * cp * replicas, num_gpus)
    fields = {
        "tp": tp, "cp": cp, "micro_batch_size": micro, "num_microbatches": steps, "zero": _zero(given), "sequence_parallel": 0,
        "recompute": _recompute(given, modes=not (kind or single)),
        "offload_activations": int(given.flag("enable_activation_offloading")), "offload_parameters": int(host),
        **({"cp_method": int(_rotated(given))} if cp > 1 else {}), **forked,
    }  # fmt: skip
    batch = micro * steps  # of one replica: to_plan asks for the GPUs first
    if gpus is not None:
        fields["dp"] = quotient(gpus, tp * cp, f"{given.path}: GPUs by tensor_parallel_dim x context_parallel_dim")
        batch = micro * steps * fields["dp"]
        if fields["dp"] * cp == 1:
            fields["zero"] = 0
        if replicas > 1:
            fields["dp_shard"] = quotient(fields["dp"], replicas, f"{given.path}: dp by data_parallel_replicate_dim")
    precision, targets = given.choice("dtype", DTYPES, "bf16"), _targets(part) if kind else "all"
    if kind and precision == "fp32":
        about = "adapters over weights in fp32 are not priced; bf16 imports the job so"
        given.ask(Question(name="dtype", about=about, choices=("bf16",)))
    pairs = str(given.get("loss._component_", "")).rpartition(".")[2] in own.PREFERENCES or "dpo" in called
    length, said = _length(given), given.said or Given()
    known, cut = model or said.spec(), said.sequence_length or length
    tokens = micro * (cut or 0) // cp
    capped, kept = softcapped(known, micro, cut, bool(fields["recompute"]))
    trainer = _trainer(given, part, bool(kind), pairs, {**capped, **({"degrees": "fork"} if forked else {})})
    return Reading(
        trainer=trainer, fields=fields, model=model, model_name=model_name, num_gpus=gpus,
        global_batch_size=batch, sequence_length=length, precision=precision,
        optimizer=_optimizer(given), lora_rank=part.size("lora_rank", 8) if kind else 0, lora_targets=targets,
        frozen_weights=("nf4_dq" if kind == "qlora_" or part.flag("quantize_base") else "bf16") if kind else None,
        objective="dpo" if pairs else "lm", questions=own.of_a_fork(given),
        unread=tuple(one for one in given.left() if not own.QUIET.fullmatch(one.split(" = ")[0])),
        notes=(*notes, *told, *_notes(given, part, kind, targets, (gpus or 2) > 1),
               *kept, *own.of_own_loss(given), *own.held_by_the_loss(given, trainer, 0 if pairs else tokens, known),
               *own.repeated_heads(trainer, 0 if fields["recompute"] else tokens, known),
               *_of_a_recipe(recipe), *own.of_a_checkout(given.path, recipe, bool(kind))),
    )  # fmt: skip


def _require_fine_tuning(given: Settings, recipe: str | None) -> None:
    """Raises PlannerError for recipes of another step."""
    for name, what in (("quantizer", "quantisation-aware training or quantisation"), ("teacher_model", "distillation"),
                       ("kd_loss", "distillation"), ("kd_ratio", "distillation"), ("policy_model", "PPO"), ("ppo_epochs", "PPO"),
                       ("ppo_batch_size", "PPO"), ("grpo_samples", "GRPO"), ("reward_functions", "GRPO"),
                       ("fake_quant_after_n_steps", "quantisation-aware training")):  # fmt: skip
        if given.get(name) is not None:
            raise PlannerError(f"{given.where(name)}: {what} is not modelled; fine-tuning and DPO are")
    if recipe is not None and OTHER_RECIPES.search(recipe.rpartition("/")[2]) is not None:
        raise PlannerError(f"{given.path}: recipe {shown(recipe)} is not modelled; those of fine-tuning and DPO are")
    if given.get("batch_size") is None or given.get("optimizer") is None:
        raise PlannerError(f"{given.path}: batch_size or optimizer is missing: this recipe trains nothing")
    if given.flag("model.use_dora"):
        raise PlannerError(f"{given.where('model.use_dora')}: DoRA is not modelled; LoRA is")


def _notes(given: Settings, part: Settings, kind: str, targets: str, several: bool) -> tuple[str, ...]:
    """What was taken for what."""
    notes: list[str] = []
    if kind:
        mlp = ["gate_proj", "up_proj", "down_proj"] if part.flag("apply_lora_to_mlp") else []
        notes += layers_beside([*(part.get("lora_attn_modules") or []), *mlp], targets)
        if part.flag("apply_lora_to_output"):
            notes.append(adapters_on_tables(["output"]))
    if re.fullmatch(r"bitsandbytes\.optim\.AdamW?", str(given.section("optimizer").get("_component_"))):
        notes.append("states of bitsandbytes lie in fp32, whatever the weights: 4 bytes a trained weight on top of the plan")
    apart = str(given.get("custom_sharded_layers") or "")
    # of releases until 0.2, which wrap the tables by themselves
    wrapped = given.flag("memory_efficient_fsdp_wrap") and not kind
    if several and "tok_embeddings" not in apart and not wrapped:
        notes.append("custom_sharded_layers does not name tok_embeddings: the tables are priced as gathered on their own")
    if given.flag("resize_token_embeddings"):
        notes.append("resize_token_embeddings: the rows of the tables are those of the tokenizer, and priced as those of the model")
    return tuple(notes)


def _of_a_recipe(recipe: str | None) -> tuple[str, ...]:
    """Note about a recipe of the project's own."""
    if not recipe or RECIPES.fullmatch(Path(recipe).stem.rpartition(".")[2] or recipe) is not None:
        return ()
    return (f"recipe {shown(recipe)} is the project's own: read as a recipe of torchtune reads the file",)


def _of_a_recipe_beside(path: Path, found: Reading) -> tuple[str, ...]:
    """Note about a program above a configuration that runs such files, where torchtune has no such recipe: the one of its name,
    else the only one whose name says no other step, where no comment names another."""
    places = (folder / f"{path.stem}.py" for folder in path.absolute().parents[:ABOVE])
    file = next((one for one in places if library.is_file(one) and "torchtune" in read_text(one)), None)
    if file is None and own.STARTED.search(read_text(path)) is None:
        file = _only_recipe(path, found)
    if file is None or RECIPES.fullmatch(file.stem):
        return ()
    text, pairs = read_text(file), found.objective == "dpo"
    more = "; it joins the logits of all chunks, which are not in the plan beside the loss by chunks" if JOINED.search(text) else ""
    if pairs and own.TO_THE_HOST.search(text):
        more = own.TAKEN.format(load_trainer(found.trainer).legal.fine_tuning.pair_logits - 2)
    return (f"recipe {file.name} is the project's own: read as a recipe of torchtune reads the file{more}",)


def _only_recipe(path: Path, found: Reading) -> Path | None:
    """The program of the nearest folder above a configuration that has recipes, where one alone may run it."""
    step = {"dpo"} if found.objective == "dpo" else {"sft", "cpt"}
    for folder in path.absolute().parents[:ABOVE_ALL]:
        files = [one for one in sorted(folder.glob("*.py"))[:MOST_BESIDE] if library.is_file(one)]
        recipes = [one for one in files if RUNS.search(text := read_text(one)) and "torchtune" in text]
        own_ones = [one for one in recipes if not (said := steps_of(one)) or said & step]
        if recipes or (folder / ".git").exists():
            return own_ones[0] if len(own_ones) == 1 else None
    return None


def _zero(given: Settings) -> int:
    word = given.get("fsdp_sharding_strategy")
    if word is not None:
        return int(given.choice("fsdp_sharding_strategy", SHARDING, "FULL_SHARD"))
    inner = not isinstance(given.data.get("fsdp"), dict) or given.flag("fsdp.reshard_after_forward", True)
    return 3 if given.flag("fsdp_reshard_after_forward", True) and inner else 2


def _rotated(given: Settings) -> CpMethod:
    """How keys and values of other ranks come: gathered, unless it is asked about."""
    method = str(given.get("context_parallel_rotate_method", "allgather"))
    if method != "allgather":
        about = f"{shown(method)} passes keys and values on from rank to rank, which is not modelled for torchtune; allgather"
        given.ask(Question(name="context_parallel_rotate_method", about=about, choices=("allgather",)))
    return CpMethod.ALLGATHER


def _of_shards(given: Settings, shards: int | None, others: int, gpus: int | None) -> int | None:
    """GPUs, where the ranks that share a copy of the weights are counted; -1 is all there are. Raises PlannerError for others."""
    if shards is None or shards < 1:
        return gpus
    if gpus not in (None, shards * others):
        where = given.where("data_parallel_shard_dim")
        raise PlannerError(f"{where} is {shards}: with the other degrees {shards * others} GPUs, but it runs on {gpus}")
    return shards * others


def _recompute(given: Settings, modes: bool) -> int:
    """``modes``: its recipe has ac_mode, which excludes enable_activation_checkpointing: with both nothing is recomputed.
    [recipes/full_finetune_distributed.py]"""
    mode, every, old = given.get("ac_mode"), given.get("ac_option"), given.flag("enable_activation_checkpointing")
    repeats = [given.flag(one) for one in OF_BUILDERS]
    if any(repeats):
        return int(Recompute.FULL)
    if mode in (None, "none") or old or not modes:
        return int(Recompute.FULL if old and (mode is None or not modes) else Recompute.NONE)
    if mode == "full" or str(every) == "1":
        return int(Recompute.FULL)
    about = f"{shown(mode)} with ac_option {shown(every)} recomputes some layers, which is not modelled; all of them or none"
    given.ask(Question(name="ac_mode", about=about, choices=("full", "none")))
    return int(Recompute.NONE)


def _length(given: Settings) -> int | None:
    """Where texts are cut, or packs are as long; None = as long as the longest of a batch. Several data sets are a list."""
    found = [given.number("tokenizer.max_seq_len")]
    if isinstance(given.data.get("dataset"), list):
        given.get("dataset")
    else:
        found.append(given.number("dataset.max_seq_len"))
    return min((one for one in found if one is not None), default=None)


def _optimizer(given: Settings) -> str:
    part = given.section("optimizer")
    named = str(part.get("_component_"))
    name = named.rpartition(".")[2]
    if named.startswith("torchao") and name.lstrip("_") == "AdamW4bit":
        raise PlannerError(f"{part.where('_component_')} is {shown(name)}, which is not modelled")
    if name == "CPUOffloadOptimizer":
        raise PlannerError(f"{part.where('_component_')} is {shown(name)}: states in host memory are not modelled for torchtune")
    return "adam_8bit" if name in FP8_STATES else optimizer(part, name.lstrip("_"), "_component_")


def _targets(part: Settings) -> str:
    named = list(part.get("lora_attn_modules") or [])
    return "all" if part.flag("apply_lora_to_mlp") else adapter_targets(named)


def _trainer(given: Settings, part: Settings, adapters: bool, pairs: bool, capped: Mapping[str, str]) -> str:
    options = {**capped, **own.compile_option(given, adapters), **own.loss_option(given)}
    if pairs:  # log probabilities of whole logits, whatever loss is named
        options["loss"] = "full"
    if adapters and part.above_zero("lora_dropout"):
        options["adapter_dropout"] = "on"
    # Its recipes of adapters have no such word.
    options["optimizer_in_backward"] = "on" if given.flag("optimizer_in_bwd") and not adapters else "off"
    return spell("torchtune", options)
