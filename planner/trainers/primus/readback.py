"""Primus: what an experiment's YAML says over the defaults of its pre-trainer, for Megatron-LM and torchtitan.

Defaults are those of AMD-AGI/Primus, primus/configs/modules/megatron (pre_trainer.yaml, trainer_base.yaml) and
primus/configs/models/megatron (language_model.yaml and the bases of families).
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.model import load_model
from planner.model_names import preset_of
from planner.trainers.megatron.arguments import ask_for_gaps, decides, of_mapping
from planner.trainers.megatron.readback import reading_of as megatron_reading
from planner.trainers.megatron.sizes import NOTHING, OTHER_MODELS
from planner.trainers.primus.experiment_scripts import PLACE, started
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, Question, ask, value_of
from planner.trainers.reading.interpolation import merged
from planner.trainers.reading.values import read_text, stage_ends
from planner.trainers.torchtitan.forms import tables
from planner.trainers.torchtitan.readback import reading_of as torchtitan_reading

DEFAULTS: dict[str, Any] = {
    "use_distributed_optimizer": True, "sequence_parallel": True, "bf16": True, "seq_length": 1024, "global_batch_size": 16,
    "cp_comm_type": "p2p", "micro_batch_size": 2,
}  # fmt: skip
"""Of a pre-trainer on Megatron-LM, in addition to Megatron's own."""
OF_SFT: dict[str, Any] = {"seq_length": 2048, "global_batch_size": 128, "micro_batch_size": 1}
"""Of sft_trainer.yaml, where they differ."""
EXPERT_RANKS = re.compile(r"deepseek_v2(_lite)?|deepseek_v3|glm5|gpt_oss_(20|120)B|llama4_\w+|minimax_m2\.5")
"""Models whose files say expert_model_parallel_size 8."""
NO_DROPOUT = re.compile(r"(llama|qwen2\.5|qwen3_235B|glm|minimax|lfm)")
"""Families whose files switch dropout off; others inherit 0.1."""
QUIET = re.compile(r"(.*sink_level|log_avg_.*|disable_(wandb|tensorboard|last_saving)|wandb_.*|enable_primus_turbo|use_turbo_.*|"
                   r"auto_continue_train|gradient_accumulation_fusion|turbo_.*|moe_use_.*|patch_.*|pp_warmup|mlflow.*|dump_.*|"
                   r"use_rocm_.*|trainable|micro_?batch_.*warmup.*|.*rmsnorm.*|add_position_embedding|conv_(L_cache|bias)|model_type|"
                   r"stage|sft_\w+|enable_packed_sequences|use_packed_attention|hf_path|use_sink_attention|sink_\w+|\w+_softcapping|"
                   r"generate_\w+|disable_(mlflow|compile_dependencies|primus_topk_router|profiler_activity_cpu)|weight_deosc\w*|"
                   r"wall_clock_step_timer|disable_delayed_scaling_patches)")  # fmt: skip
ADAPTER = {"enabled", "dim", "alpha", "dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method", "target_modules"}
"""Settings of its LoRA."""
MOST_BASES = 8
_VARIABLE = re.compile(r"\$\{(\w+)(?::([^${}]*))?\}")


def read(path: Path, given: Given) -> Reading:
    """The training of an experiment, or of a script that starts one. Raises PlannerError, OpenQuestionsError for variables without
    a default."""
    if path.suffix in (".yaml", ".yml"):
        return _experiment(path, given, {})
    file, said, over, notes = started(path, given)
    reading = _experiment(file, said, over)
    return dataclasses.replace(reading, notes=(*notes, *reading.notes))


def _experiment(path: Path, given: Given, over: Mapping[str, Any]) -> Reading:
    """``over``: what goes over its overrides."""
    data, open_ = _filled(library.parse_yaml(read_text(path), str(path)), given)
    modules = data.get("modules")
    trainer = next((one for one in modules.values() if isinstance(one, dict) and "framework" in one), None) if isinstance(
        modules, dict) else None  # fmt: skip
    if trainer is None:
        raise PlannerError(f"{path}: no module with a framework, as experiments of Primus have below 'modules'")
    overrides = trainer.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise PlannerError(f"{path}: overrides is {shown(overrides)}; it must be a mapping")
    overrides = merged(overrides, over)
    if open_:
        ask(str(path), [Question(name=name, about="a variable without a default") for name in dict.fromkeys(open_)])
    called, framework = str(trainer.get("model", "")).removesuffix(".yaml"), str(trainer.get("framework"))
    known = _model_file(path, framework, called)
    preset = preset_of(re.sub(r"^(llama)(?=\d)", r"\1-", re.sub(r"[-_](fp8|bf16)$", "", called, flags=re.IGNORECASE)))
    said = given if given.model or preset is None else _with_model(given, preset)
    adapters = {} if given.setting("lora") == "false" else _adapters(path, framework, overrides)
    if framework == "torchtitan":
        model = load_model(preset) if preset and not given.model else None
        overrides = given.filled(overrides)
        own = overrides.setdefault("model", {})
        if preset is None and isinstance(own, dict) and isinstance(known.get("model"), dict):
            overrides["model"] = own = {**known["model"], **own}
        if called.lower().endswith("fp8") and isinstance(own, dict):  # what the model's file says
            own.setdefault("converters", ["quantize.linear.float8"])
        overrides.setdefault("activation_checkpoint", {"mode": "none"})  # pre_trainer.yaml of torchtitan
        overrides.setdefault("compile", {"enable": True})
        found = tables(path, overrides)
        found["other"].update({"optimizer": "AdamW"} | ({"model": model.name} if model else {}))
        return torchtitan_reading(path, found, given)
    if framework != "megatron":
        raise PlannerError(f"{path}: framework {framework} of Primus is not read; megatron and torchtitan are")
    if said.model is None:
        sizes = {"num_layers", "hidden_size", "num_attention_heads"}
        if not sizes <= known.keys() | overrides.keys():
            missing = [] if given.num_gpus else [NEEDED["num_gpus"]]
            ask(str(path), [Question(name="--model NAME", about=f"{called or 'its model'} is no preset"), *missing])
    usual = OF_SFT if str(trainer.get("config")) == "sft_trainer.yaml" else {}
    return _megatron(path, overrides | adapters, usual | known, said, called)


def _adapters(path: Path, framework: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """LoRA of its trainer on Megatron in the words of Megatron's reader. Raises PlannerError for other adapters.
    [primus/backends/megatron, sft_trainer.yaml, 2026-08]"""
    said = overrides.get("lora") or overrides.get("peft")
    if not said or (isinstance(said, dict) and said.get("enabled") is False):
        return {}
    known = isinstance(said, dict) and said.keys() <= ADAPTER and said.get("enabled") is True and "peft" not in overrides
    if framework != "megatron" or not known:
        raise PlannerError(f"{path}: these adapters of Primus are not read: --set lora=false imports the training of all weights")
    return {"lora_r": str(said.get("dim", 32)), "lora_target_modules": said.get("target_modules") or ["all"]}


def _model_file(path: Path, framework: str, called: str) -> dict[str, Any]:
    """What the model's file in the checkout around an experiment says, with the files that it extends; {} = it is not there."""
    if framework not in ("megatron", "torchtitan") or not re.fullmatch(r"[\w.-]{1,100}", called):
        return {}
    places = (one / "primus/configs/models" / framework / f"{called}.yaml" for one in list(path.resolve().parents)[:8])
    file = next((one for one in places if one.is_file()), None)
    found = {} if file is None else _extended(file, MOST_BASES)
    if framework == "torchtitan":
        return found
    return {name: value for name, value in found.items() if decides(name) or (name in OTHER_MODELS and value not in NOTHING)}


def _extended(file: Path, most: int) -> dict[str, Any]:
    data = library.parse_yaml(read_text(file), str(file))
    bases = data.pop("extends", None) or data.pop("bases", None) or []
    if not most or not isinstance(bases, list):
        raise PlannerError(f"{file}: extends {shown(bases)}; a list of at most {MOST_BASES} files after each other is understood")
    found: dict[str, Any] = {}
    for one in bases:
        if re.fullmatch(r"[\w.-]{1,100}", str(one)) and (file.parent / str(one)).is_file():
            found |= _extended(file.parent / str(one), most - 1)
    return found | data


def _megatron(path: Path, overrides: Mapping[str, Any], usual: Mapping[str, Any], said: Given, called: str) -> Reading:
    """``usual``: what its trainer's and its model's files say."""
    said = _of_layers(said, overrides)
    drop = 0.0 if NO_DROPOUT.match(called) else 0.1
    overrides = {name: value for name, value in overrides.items() if name not in ("lora", "peft")}
    ranks = {"expert_model_parallel_size": 8} if EXPERT_RANKS.fullmatch(called) else {}
    data = {**DEFAULTS, **ranks, "hidden_dropout": drop, "attention_dropout": drop, **usual, **overrides}
    stage = data.get("turbo_sync_free_moe_stage", 0)
    if (data.pop("use_turbo_deepep", False) or stage in (2, 3)) and data.get("enable_primus_turbo"):
        data |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    questions = _of_pipelines(data, said)
    quiet = [name for name in data if QUIET.fullmatch(name)]
    found = of_mapping({name: value for name, value in data.items() if name not in quiet}, str(path), said)
    ask_for_gaps(found, None)
    found.questions += questions
    reading = megatron_reading(found, said)
    spec, sizes = said.spec(), ("hidden_size", "num_experts", "num_layers")
    changed = [name for name in sizes if spec and str(overrides.get(name, "")) not in ("", str(getattr(spec, name)))]
    note = f"model: {spec.name}, by the name {called}; {', '.join(changed)} of the file is not taken" if spec and changed else ""
    return _noted(reading, note, quiet)


ZERO_BUBBLE = re.compile(r"patch_(zero_bubble|primus_pipeline)|pp_algorithm|(enable_)?zero_bubble_?.*|enable_(zb_runtime|1f1b_v)")


def _of_pipelines(data: dict[str, Any], said: Given) -> list[Question]:
    """Says its lists of layers in Megatron's words; what is asked about its own schedules, which no plan of Megatron has.
    [zero_bubble.yaml, primus_pipeline.yaml, trainer_base.yaml]"""
    stages, split, ids = (data.get(one) for one in ("pipeline_model_parallel_size", *LISTS))
    stages = stages if isinstance(stages, int) else 1
    if isinstance(split, list) and stages > 1 and len(split) % stages == 0 and all(isinstance(one, int) for one in split):
        del data[LISTS[0]]
        ends = stage_ends([sum(split[rank::stages]) for rank in range(stages)], f"{LISTS[0]} {split}")
        data |= {f"decoder_{one}_pipeline_num_layers": ends[f"{one}_stage_layers"] for one in ("first", "last")}
    ids = ids.split(",") if isinstance(ids, str) else ids
    if isinstance(ids, list) and stages == 1 and not data.get("recompute_method"):
        del data[LISTS[1]]
        data |= {"recompute_method": "block", "recompute_num_layers": len(ids)}
    own = [one for one in data if ZERO_BUBBLE.fullmatch(one)]
    bubble = data.get("patch_zero_bubble") and data.get("enable_zero_bubble", True)
    name = "patch_zero_bubble" if bubble else "pp_algorithm" if data.get("patch_primus_pipeline") else ""
    kind = "zero bubble" if bubble else str(said.setting(name) or data.get(name, PLAIN[0])) if name else PLAIN[0]
    for one in own:
        del data[one]
    if stages == 1 or kind in PLAIN or (bubble and said.setting(name) is not None):
        return []
    about = f"{shown(kind)} is a schedule that is not priced; the nearest"
    return [Question(name=name, about=about, choices=("false",) if bubble else PLAIN)]


LISTS = ("decoder_pipeline_manual_split_list", "recompute_layer_ids")
PLAIN = ("1f1b-interleaved", "1f1b")
"""Schedules that Megatron has, as Primus names them."""


def _of_layers(said: Given, overrides: Mapping[str, Any]) -> Given:
    """The model with the layers that the overrides say, where all its layers are alike: a proxy of it."""
    spec, layers = said.spec(), overrides.get("num_layers")
    mixed = spec is not None and (spec.linear or spec.num_windowed_layers or spec.num_dense_layers or spec.moe_layer_interval != 1)
    mixed = mixed or not re.fullmatch(r"1|\(?\[1\]\*\d+\)?", str(overrides.get("moe_layer_freq", 1)))
    if spec is None or mixed or not isinstance(layers, int) or layers in (0, spec.num_layers):
        return said
    return dataclasses.replace(said, model=dataclasses.replace(spec, num_layers=layers, name=f"{spec.name} of {layers} layers"))


def _noted(reading: Reading, note: str, quiet: list[str]) -> Reading:
    return dataclasses.replace(
        reading, noise=(*reading.noise, *quiet), notes=(*reading.notes, *([note] if note else []))
    )


def _with_model(given: Given, preset: str) -> Given:
    return dataclasses.replace(given, model=preset)


def _filled(data: Any, given: Given, key: str = "") -> tuple[Any, list[str]]:
    """Data with its variables ${NAME:default} as Primus fills them in; those without a default where something is decided."""
    if isinstance(data, dict):
        parts = {name: _filled(value, given, str(name)) for name, value in data.items()}
        return {name: value for name, (value, _) in parts.items()}, [one for _, found in parts.values() for one in found]
    if isinstance(data, list):
        items = [_filled(value, given, key) for value in data]
        return [value for value, _ in items], [one for _, found in items for one in found]
    if not isinstance(data, str) or not _VARIABLE.search(data):
        return data, []
    open_: list[str] = []

    def value(match: re.Match[str]) -> str:
        said = given.setting(match[1])
        if said is None and match[2] is None and not PLACE.fullmatch(key):
            open_.append(match[1])
        return str(value_of(said)) if said is not None else match[2] or ""

    return value_of(_VARIABLE.sub(value, data)), open_
