"""Scripts and notebooks in Python that build a trainer of transformers, TRL or unsloth: their calls as arguments of the trainer."""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading import lengths, own_passes, own_weights, script_parts, several_trainers, unsloth_parts
from planner.trainers.reading.derived import classes_of, kinds_of, lineage
from planner.trainers.reading.given import CONFIG_FILE, Given, Question, value_of
from planner.trainers.reading.loading import BY_PEFT, loading
from planner.trainers.reading.modules import takes_settings
from planner.trainers.reading.own_classes import OTHER_MODELS, UNSLOTH, known_loads, model_loads, owner
from planner.trainers.reading.own_flow import passed_over
from planner.trainers.reading.own_parts import SIZES, default_dtype, of_all_branches, other_sizes, parts_of
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running, WithModules
from planner.trainers.reading.script_parts import (
    BATCH,
    CHECKPOINTS,
    OF_ANOTHER,
    builds_a_model,
    derived_from,
    held,
    helped,
    in_a_mapping,
    lists_all_linear,
    loaded_or_made,
    made_elsewhere,
    on_cpus,
    on_one_gpu,
    several_trainings,
    switched_on,
    turned,
    without_config,
)
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.shell.text import gap, is_open
from planner.trainers.reading.values import not_priced

CONFIGS = ("SFTConfig", "DPOConfig", "TrainingArguments", "Seq2SeqTrainingArguments", "UnslothTrainingArguments")
TRAINERS = ("SFTTrainer", "DPOTrainer", "Trainer", "Seq2SeqTrainer", "UnslothTrainer")
FOREIGN = {f"{name}Trainer": name for name in (
    "GRPO", "ORPO", "KTO", "PPO", "PPOv2", "RLOO", "CPO", "GKD", "BCO", "XPO", "NashMD", "OnlineDPO", "Reward", "PRM",
    "Distillation", "SentenceTransformer")}  # fmt: skip
"""Trainers whose step is not one of a language model or of DPO."""
FOREIGN_ADAPTERS = (
    *(f"{name}Config" for name in ("AdaLora", "LoHa", "LoKr", "IA3", "PrefixTuning", "PromptTuning", "PromptEncoder", "OFT", "BOFT",
                                   "Vera", "FourierFT", "LNTuning", "RandLora", "Dora", "Bone", "VBLoRA", "XLora", "Reft",
                                   "Bottleneck")),
    "get_reft_model",
)  # fmt: skip
"""What trains something else than all weights or LoRA, by what builds it."""
OPEN = (BATCH, "gradient_accumulation_steps", "gradient_checkpointing", "bf16")
"""What decides time or memory in such a configuration."""
DECIDING = ("rank_pattern", "target_parameters", "exclude_modules", "trainable_token_indices", "layer_replication", "use_qalora",
            "use_bdlora", "velora_config", "monteclora_config", "arrow_config")  # fmt: skip
"""Keywords of LoraConfig that change what is trained or stored.  [peft, tuners/lora/config.py]"""
WHOLE = ("embed_tokens", "lm_head")
"""Modules that unsloth trains as a whole where an adapter names them."""
SOME_LAYERS = ("layers_to_transform", "finetune_last_n_layers")  # the second of unsloth's get_peft_model


class OfItsCommandError(PlannerError):
    """A program whose arguments are those of its command, which stands elsewhere."""


def settings_of(
    path: Path, said: Given, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Settings, str, tuple[str, ...]]:  # fmt: skip
    """(Arguments as the command lines of TRL's scripts name them, 'unsloth', 'trl', 'old trl' or 'transformers', notes);
    ``options`` of the command that starts it. Raises PlannerError."""
    taken: set[str] = set()
    under = replace(said, settings={**{name: str(value) for name, value in options.items()}, **said.settings}, used=taken)
    script = Running(path, under)
    builds = script.calls(*TRAINERS, *CONFIGS, *FOREIGN)
    if not builds or _takes_from_its_project(script) or not (script.calls("from_pretrained") or _named(script)):
        script = WithModules(path, under)
    _require_training(script)
    notes = several_trainers.only_one(script, CONFIGS, TRAINERS)
    loads = script_parts.trained(script, model_loads(script))
    loads = loads or of_all_branches(script, TRAINERS)
    unsloth = any(owner(one) in UNSLOTH for one in loads)
    if not loads and script.calls("UnslothTrainer", "UnslothTrainingArguments"):
        what = "its trainer is unsloth's, and the model is loaded in another module"
        raise PlannerError(f"{path}: {what}; import the program that calls {'|'.join(UNSLOTH)}.from_pretrained")
    data = model_arguments(script, loads, unsloth, notes)
    trainers = script.calls(*TRAINERS, *derived_from(script, TRAINERS))
    made = script_parts.that_counts(script, script.calls(*CONFIGS, *derived_from(script, CONFIGS)), trainers)
    configs = sorted(made, key=lambda one: all(word.arg != BATCH for word in one.keywords))
    notes += several_trainings(script, configs, trainers)
    for call in (*configs[:1], *trainers[:1]):
        data |= _said_by(script, call, unsloth)  # the trainer's own come last
    spread = [name for name in data if name.startswith("**")]
    elsewhere = not configs and any(one.arg == "args" for call in trainers[:1] for one in call.keywords)  # made in another module
    if (spread or elsewhere or CONFIG_FILE in said.settings) and BATCH not in data:  # what they hold is not followed to here
        data = {name: value for name, value in data.items() if name not in spread}
        data = {**{name: gap([name]) for name in (*OPEN, *(("max_length",) if elsewhere else ()))}, **data}
    elif any(re.search("precision|dtype|amp|bf16|fp16", one) for one in spread) and not {"bf16", "fp16"} & data.keys():
        data["bf16"] = gap(["bf16"])
    for call in configs[:1]:
        data |= in_a_mapping(script, call, data)
    data |= {} if loads else loaded_by_trainer(script) | _named_by_trainer(script, trainers)
    data |= parts_of(script, trainers, loads) | adapters(script, unsloth) | on_cpus(script)
    called = [last_name(one.func) for one in (*configs[:1], *trainers[:1])]
    kinds = kinds_of(script.tree, called)
    if any(one.startswith("DPO") for one in kinds):
        data.setdefault("beta", 0.1)
    if not any(isinstance(data.get(one), int) for one in ("max_length", "max_seq_length")):
        data |= lengths.said(script, notes)
    put_checkpointing(script, said, data, unsloth)
    if script.defaults:
        notes.append(f"options of the script at their defaults: {', '.join(dict.fromkeys(script.defaults))}")
    _require_adapters(path, said, data)
    if unsloth:
        data = {**unsloth_parts.replaced(script, kinds, not (configs or elsewhere) and "Trainer" not in kinds), **data}
        data |= unsloth_parts.without_experts(script, data, notes)
        data |= unsloth_parts.unsloth_length(script, data, model_arguments(script, loads, unsloth, [])["max_length"], notes)
    kind = "unsloth" if unsloth else _kind(kinds, data)
    settings = Settings(path, said.filled(data), said=said)
    settings.built = "dpo" if any(one.startswith("DPO") for one in kinds) else "lm"
    settings.one_gpu = on_one_gpu(loads) and not {"deepspeed", "fsdp"} & data.keys()
    settings.asked |= {one for one in taken if data.get(one) is None}  # keywords that have another name here
    said.used.update(taken)
    waits = settings.data.get("torch_dtype") == gap(["torch_dtype"])
    settings.late += [*own_steps(script, said), *other_sizes(script, said), *([OF_ANOTHER] if waits else [])]
    return settings, kind, (*notes, *lengths.by_itself(data, kind, said.sequence_length), *passed_over(script, trainers, SIZES))


def _kind(kinds: set[str], data: Mapping[str, Any]) -> str:
    """Of whose trainer a program is, unsloth's aside, by the classes that it calls and their arguments."""
    if not any(one.startswith(("SFT", "DPO")) for one in kinds):
        return "transformers"
    return "old trl" if "max_seq_length" in data or "TrainingArguments" in kinds else "trl"


def _said_by(script: Running, call: ast.Call, unsloth: bool) -> dict[str, Any]:
    """What the call of a configuration or of a trainer says: fields of its class, keywords, and what is set on it later."""
    words = {**derived_from(script, CONFIGS).get(last_name(call.func), {}), **script.keywords(call)}
    words |= script.set_on(call) | script.set_on(call, "args.")
    if split := script.calls("ParallelismConfig"):
        words["parallelism_config"] = script.keywords(split[0])
    whole = () if unsloth else ("max_length",)  # null says that nothing is cut
    return {name: value for name, value in words.items() if name not in _OBJECTS and (value is not None or name in whole)}


def put_checkpointing(script: Running, said: Given, data: dict[str, Any], unsloth: bool) -> None:
    """Checkpointing that a call on the model switches on, which nothing switches off again, and what the user says of it."""
    own = "activation_offloading" in data or script.calls("TrainingArguments")  # else PEFT's, or loaded ones
    if unsloth and ("use_peft" not in data or not own):  # its trainer goes by its own arguments, whose default differs by version
        data.setdefault("gradient_checkpointing", gap(["gradient_checkpointing"]))
    text = said.setting("gradient_checkpointing")
    if data.get("gradient_checkpointing") in (None, False) and switched_on(script):
        sure = any(script.runs(one) for one in script.calls(*CHECKPOINTS))
        data["gradient_checkpointing"] = True if sure else gap(["gradient_checkpointing"]) if text is None else text
    if text is not None and is_open(str(data.get("gradient_checkpointing"))):
        data["gradient_checkpointing"] = value_of(text)


def _require_adapters(path: Path, said: Given, data: Mapping[str, Any]) -> None:
    """Raises PlannerError for a quantised model without adapters."""
    bits = "use_peft" not in data and any(data.get(one) is True for one in ("load_in_4bit", "load_in_8bit"))
    if bits and value_of(said.setting("use_peft") or "false") is not True:
        raise PlannerError(
            f"{path}: it loads its model quantised and makes no adapters here, which transformers does not train; "
            "--set use_peft=true imports it with adapters"
        )


def builds_in_modules(path: Path) -> bool:
    """Whether a program builds a trainer in modules of its project that it takes from there."""
    try:
        script = WithModules(path, Given())
    except PlannerError:
        return False
    return bool(script.calls(*TRAINERS)) and _elsewhere(script, script.calls(*TRAINERS)) is None


def own_steps(script: Running, said: Given) -> list[Question]:
    """What is asked of a program about passes and weights of its own."""
    passes = (own_passes.question(script, said, TRAINERS), own_passes.of_a_fork(script, said, OURS, (*TRAINERS, *FOREIGN)))
    return [one for one in (*passes, own_weights.question(script, said), own_weights.reference(script, said)) if one is not None]


_OBJECTS = (
    "model", "args", "tokenizer", "processing_class", "train_dataset", "eval_dataset", "data_collator", "peft_config", "callbacks",
    "compute_metrics", "formatting_func", "dataset_text_field", "optimizers", "ref_model", "dataset_kwargs",
    "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics", "dataset_num_proc", "output_dir", "report_to", "run_name",
    "logging_dir", "model_init_kwargs", "quantization_config", "optimizer", "compute_loss",
)  # fmt: skip
"""Keywords that are objects of the script, or that decide nothing."""


def require_known_adapters(script: Script) -> None:
    """Raises PlannerError where something else than all weights or LoRA is trained."""
    for call in script.calls(*FOREIGN_ADAPTERS):
        raise PlannerError(f"{script.path}: {last_name(call.func)} is not modelled; all weights, LoRA and QLoRA are")


def require_language_model(script: Script) -> None:
    """Raises PlannerError where no model that is loaded is a language model: classifiers and sequence-to-sequence models."""
    loads = script.calls("from_pretrained")
    others = [owner(one) for one in loads if OTHER_MODELS.search(owner(one))]
    if others and not known_loads(script, loads):
        raise PlannerError(f"{script.path}: {others[0]} is no language model, which is what is modelled")


_OWN_TRAINER = r"[A-Z]\w*Trainer(For\w+)?"
"""Names of classes that train."""


def _require_training(script: Script) -> None:
    """Raises PlannerError for scripts that train nothing, nothing that is modelled, or whatever their command line says."""
    ours, others = script.calls(*TRAINERS, *derived_from(script, TRAINERS)), script.calls(*FOREIGN)
    if not ours and others:
        name = FOREIGN[last_name(others[0].func)]
        raise PlannerError(f"{script.path}: {name} is not modelled; supervised fine-tuning and DPO are")
    require_known_adapters(script)
    require_language_model(script)
    own = {one.name for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef)}
    named = (one for one in script.names_used() if re.fullmatch(_OWN_TRAINER, one) and one not in own)
    other = next((one for one in named if script.calls(one) and one not in TRAINERS), None)
    if not ours and other is not None:
        raise PlannerError(f"{script.path}: {other} is not a trainer of TRL or transformers")
    if (kept := _keeps_more(script, ours)) is not None:
        raise PlannerError(f"{script.path}: the loss of {kept} is over attentions or another model, which is not modelled")
    for node in (one for one in ast.walk(script.tree) if isinstance(one, ast.ImportFrom)):
        root = (node.module or "").partition(".")[0]
        taken = [one.name for one in node.names if one.name in TRAINERS]
        if taken and not node.level and root not in OURS:
            raise PlannerError(f"{script.path}: {taken[0]} of {root} is not the one of TRL or transformers")
    require_ours(script, ours)
    if not script.calls(*CONFIGS, *derived_from(script, CONFIGS)):
        if script.calls("HfArgumentParser", "TrlParser"):
            raise OfItsCommandError(f"{script.path}: it takes its arguments from its command line; import what starts it")
        if not ours:
            raise PlannerError(f"{script.path}: no trainer is built here ({', '.join(TRAINERS)})")
    called = {last_name(one.func) for one in ast.walk(script.tree) if isinstance(one, ast.Call)} - {*CONFIGS}
    if not ours and not any(re.search(r"(?<!pre)train(?!ed)", one.lower()) for one in called):
        raise PlannerError(f"{script.path}: it builds arguments of a trainer and starts no training")


def _named(script: Script) -> bool:
    """Whether a trainer is given the name of its model."""
    return any(isinstance(one, str) and not is_open(one) for one in _named_by_trainer(script, script.calls(*TRAINERS)).values())


def _takes_from_its_project(script: Script) -> bool:
    """Whether a class with the name of a trainer, or of its configuration, is a relative import, adapters are made elsewhere, or a
    class of settings is taken from a module beside it."""
    if helped(script) or takes_settings(script.tree, script.path):
        return True
    taken = [node for node in ast.walk(script.tree) if isinstance(node, ast.ImportFrom)]
    if any(re.fullmatch(_OWN_TRAINER, one.name) and one.name not in (*TRAINERS, *FOREIGN) for node in taken for one in node.names):
        return True
    return any(one.name in (*TRAINERS, *CONFIGS) for node in taken if node.level for one in node.names)


def _keeps_more(script: Script, trainers: list[ast.Call]) -> str | None:
    """The class of the script that one of its trainers is, where its own loss keeps attentions or asks another model."""
    made = {one.id for one in ast.walk(script.tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    for one in (node for node in ast.walk(script.tree) if isinstance(node, ast.ClassDef) and node.name in made):
        losses = [part for part in one.body if isinstance(part, ast.FunctionDef) and part.name == "compute_loss"]
        derived = any(last_name(base) in TRAINERS for base in one.bases)
        words = r"output_attentions=True|\.attentions\b|teacher|distill"
        if derived and any(re.search(words, ast.unparse(part)) for part in losses):
            return one.name
    return None


OURS = ("trl", "transformers", "unsloth", "unsloth_zoo")
"""Libraries whose trainers are read."""


def require_ours(script: Script, trainers: list[ast.Call]) -> None:
    """Raises PlannerError where one of some trainers is of another library, or a class of the project made from none of theirs."""
    if (other := _elsewhere(script, trainers)) is not None:
        raise PlannerError(f"{script.path}: {other} is not the one of TRL or transformers")


def _elsewhere(script: Script, trainers: list[ast.Call]) -> str | None:
    """The first of some trainers that is of another library, by the module it is called from, or a class of the script that is
    made from none of theirs."""
    modules = {
        one.asname or one.name.partition(".")[0]: one.name.partition(".")[0]
        for node in ast.walk(script.tree) if isinstance(node, ast.Import) for one in node.names
    }  # fmt: skip
    for call in trainers:
        owner = getattr(call.func, "value", None)
        if isinstance(owner, ast.Name) and modules.get(owner.id, OURS[0]) not in OURS:
            return ast.unparse(call.func)
    called = {last_name(one.func) for one in (*trainers, *script.calls(*CONFIGS))}
    made = classes_of(script.tree)
    ends = re.compile(r"(Trainer|Config|Arguments)$")
    above = {one: {*lineage(one, made)[1], *map(last_name, made[one].bases)} for one in made if one in called}
    return next((one for one, names in above.items() if not any(map(ends.search, names))), None)


def model_arguments(script: Running, loads: list[ast.Call], unsloth: bool, notes: list[str]) -> dict[str, Any]:
    """Arguments of the model that is loaded first."""
    if not loads:
        return {}
    call = loads[0]
    words = script.keywords(call)
    name = words.get("model_name", words.get("pretrained_model_name_or_path"))
    if name is None and call.args:
        name = script.value(call.args[0])
    found: dict[str, Any] = {"model_name_or_path": name, **(unsloth_parts.unsloth_kernel(words, name) if unsloth else {})}
    if unsloth:
        return found | unsloth_parts.loading_of(script, words, name, notes)
    if words.get("device_map") not in (None, "cpu") and not isinstance(words["device_map"], dict):
        notes.append("device_map spreads the layers over the GPUs of one process; priced with one process per GPU")
    found |= loading(script, words, call) | turned(script, call)
    found |= default_dtype(script, {**words, **found})
    others = [one for one in loads[1:] if not script.settled(call, one)]
    if others and (bits := [name for name in ("load_in_4bit", "load_in_8bit") if found.get(name) is True]):  # or that one
        found = {**loading(script, script.keywords(others[0]), others[0]), **found, **{name: gap([name]) for name in bits}}
    return found


def loaded_by_trainer(script: Script) -> dict[str, Any]:
    """Arguments of a model that a trainer of TRL loads by its name: model_init_kwargs, of the trainer, of its configuration, or
    put into that.  [trl/trainer/sft_trainer.py]"""
    keywords = [one for call in script.calls(*CONFIGS, *TRAINERS) for one in call.keywords]
    given = [one.value for one in keywords if one.arg == INITIAL]
    put = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Attribute)]
    given += [one.value for one in put if last_name(one.targets[0]) == INITIAL]
    words = script.value(given[-1]) if given else {}
    bits = {one.arg: script.value(one.value) for one in keywords if one.arg == "quantization_config"}  # of TRL 1.8
    return loading(script, {**words, **bits}) if isinstance(words, dict) and (words or bits) else {}


INITIAL = "model_init_kwargs"


def _named_by_trainer(script: Script, trainers: list[ast.Call]) -> dict[str, Any]:
    """The model that a trainer is given by its name."""
    named = [one.value for call in trainers for one in call.keywords if one.arg == "model"]
    node = next(iter([*named, *(call.args[0] for call in trainers if call.args)]), None)
    if node is None and any(one.arg is None for call in trainers for one in call.keywords) and not script.calls("from_pretrained"):
        return made_elsewhere(script.said)  # in keywords that are not known here
    value = script.value(node) if node is not None else None
    if not isinstance(value, str):
        return {}
    # A model that something else has loaded.
    unknown = is_open(value) and node is not None and not builds_a_model(script)
    elsewhere = unknown and node is not None and re.fullmatch(r"\w+|.*[.]model", ast.unparse(node))
    return {"model_name_or_path": value, **(made_elsewhere(script.said) if elsewhere else {})}


def adapters(script: Script, unsloth: bool, calls: list[ast.Call] | None = None) -> dict[str, Any]:
    """Arguments of LoRA; ``calls`` that make it, where they are known."""
    calls = made = script.calls("LoraConfig") if calls is None else calls
    own = [one for one in script.calls("get_peft_model") if owner(one) in UNSLOTH]
    unsloth = unsloth and bool(own or not calls)  # else the branch that makes them with PEFT is the one that runs
    if unsloth:
        calls = own
        if any(script.keywords(one).get("full_finetuning") is True for one in script.calls("from_pretrained")):
            return {}  # get_peft_model then gives the model back as it is  [unsloth, models/llama.py]
    if not calls:
        return without_config(script, script.calls(*TRAINERS), unsloth)
    words = {**script.keywords(calls[0]), **(script.set_on(calls[0]) if isinstance(script, Running) else {})}
    if words.get("use_dora"):
        raise PlannerError(f"{script.path}: use_dora: DoRA is not modelled; LoRA is")
    some = [one for one in SOME_LAYERS if words.get(one) is not None and script.said.setting(one) is None]
    if words.get("finetune_language_layers") is False:
        raise PlannerError(f"{script.path}: finetune_language_layers=False adapts the image encoder alone, which is not priced")
    if some:
        raise not_priced(str(script.path), some, some)
    apart = held(script, calls[0])
    rank = words.get("r", gap(["lora_r"]) if apart else 16 if unsloth else 8)
    found: dict[str, Any] = {"use_peft": True, "lora_r": rank, "lora_dropout": words.get("lora_dropout", 0.0)}
    targets = words.get("target_modules", gap(["lora_target_modules"]) if apart else None)
    if any(one.arg == "target_modules" and lists_all_linear(script, one.value) for one in calls[0].keywords):
        targets = "all-linear"
    if unsloth:
        targets = unsloth_parts.unsloth_targets(targets, words)
        found |= unsloth_parts.beside_layers(script, words)
    found["lora_target_modules"] = targets or ("all-linear" if unsloth else BY_PEFT)
    whole = [one for one in targets if str(one) in WHOLE] if unsloth and isinstance(targets, list) else []
    whole = list(WHOLE) if unsloth and unsloth_parts.adds_tokens(script, calls[0]) else whole
    if whole or words.get("modules_to_save"):
        found["modules_to_save"] = whole or words["modules_to_save"]  # listed: trained as a whole, which adapters are not
    elif isinstance(script, Running) and (tables := own_weights.beside_adapters(script)):
        found["modules_to_save"] = tables
    found |= {name: words[name] for name in DECIDING if words.get(name) not in (None, False, [], {}, "")}
    if unsloth:
        checkpointing = words.get("use_gradient_checkpointing", "unsloth")
        if made and isinstance(script, Running) and not script.settled(calls[0], made[0]):  # or the branch of PEFT runs
            checkpointing = gap(["gradient_checkpointing"])
        lean = [one for one in script.calls("from_pretrained") if owner(one) in UNSLOTH]
        found |= unsloth_parts.unsloth_checkpointing(script.said, unsloth_parts.stays_patched(script, lean, checkpointing))
    return found | loaded_or_made(script, calls[0])
