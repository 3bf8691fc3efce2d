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
from planner.trainers.megatron.arguments import ask_for_gaps, of_mapping
from planner.trainers.megatron.readback import reading_of as megatron_reading
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, Question, ask, value_of
from planner.trainers.reading.values import read_text
from planner.trainers.torchtitan.forms import tables
from planner.trainers.torchtitan.readback import reading_of as torchtitan_reading

DEFAULTS: dict[str, Any] = {
    "use_distributed_optimizer": True, "sequence_parallel": True, "bf16": True, "seq_length": 1024, "global_batch_size": 16,
    "cp_comm_type": "p2p",
}  # fmt: skip
"""Of a pre-trainer on Megatron-LM, in addition to Megatron's own."""
NO_DROPOUT = re.compile(r"(llama|qwen2\.5|qwen3_235B|glm|minimax|lfm)")
"""Families whose files switch dropout off; others inherit 0.1."""
QUIET = re.compile(r"(.*sink_level|log_avg_.*|disable_(wandb|tensorboard|last_saving)|wandb_.*|enable_primus_turbo|use_turbo_.*|"
                   r"auto_continue_train|gradient_accumulation_fusion|turbo_.*|moe_use_.*|patch_.*|pp_warmup|mlflow.*|dump_.*|"
                   r"use_rocm_.*|trainable|micro_?batch_.*warmup.*|.*rmsnorm.*|add_position_embedding)")  # fmt: skip
PLACE = re.compile(r".*(path|dir|folder)|tokenizer_model|save|load|workspace|exp_name|user_name|work_group")
"""Keys that decide neither time nor memory: a variable there needs no value."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::([^${}]*))?\}")


def read(path: Path, given: Given) -> Reading:
    """The training of an experiment. Raises PlannerError, OpenQuestionsError for variables without a default."""
    data, open_ = _filled(library.parse_yaml(read_text(path), str(path)), given)
    modules = data.get("modules")
    trainer = next((one for one in modules.values() if isinstance(one, dict) and "framework" in one), None) if isinstance(
        modules, dict) else None  # fmt: skip
    if trainer is None:
        raise PlannerError(f"{path}: no module with a framework, as experiments of Primus have below 'modules'")
    overrides = trainer.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise PlannerError(f"{path}: overrides is {shown(overrides)}; it must be a mapping")
    if open_:
        ask(str(path), [Question(name=name, about="a variable without a default") for name in dict.fromkeys(open_)])
    called, framework = str(trainer.get("model", "")).removesuffix(".yaml"), str(trainer.get("framework"))
    preset = preset_of(re.sub(r"^(llama)(?=\d)", r"\1-", re.sub(r"[-_](fp8|bf16)$", "", called, flags=re.IGNORECASE)))
    said = given if given.model or preset is None else _with_model(given, preset)
    adapters = overrides.get("lora") or overrides.get("peft")
    if adapters and not (isinstance(adapters, dict) and adapters.get("enabled") is False):
        raise PlannerError(
            f"{path}: adapters of Primus are not read: --set lora=false imports the training of all weights"
        )
    if framework == "torchtitan":
        model = load_model(preset) if preset and not given.model else None
        overrides = given.filled(overrides)
        own = overrides.setdefault("model", {})
        if called.lower().endswith("fp8") and isinstance(own, dict):  # what the model's file says
            own.setdefault("converters", ["quantize.linear.float8"])
        overrides.setdefault("activation_checkpoint", {"mode": "none"})  # pre_trainer.yaml of torchtitan
        overrides.setdefault("compile", {"enable": True})
        found = tables(path, overrides)
        found["other"].update({"model": model.name if model else "", "optimizer": "AdamW"})
        return torchtitan_reading(path, found, given)
    if framework != "megatron":
        raise PlannerError(f"{path}: framework {framework} of Primus is not read; megatron and torchtitan are")
    if said.model is None:
        sizes = {"num_layers", "hidden_size", "num_attention_heads"}
        if not sizes <= overrides.keys():
            missing = [] if given.num_gpus else [NEEDED["num_gpus"]]
            ask(str(path), [Question(name="--model NAME", about=f"{called or 'its model'} is no preset"), *missing])
    return _megatron(path, overrides, said, called)


def _megatron(path: Path, overrides: Mapping[str, Any], said: Given, called: str) -> Reading:
    drop = 0.0 if NO_DROPOUT.match(called) else 0.1
    overrides = {name: value for name, value in overrides.items() if name not in ("lora", "peft")}
    data = {**DEFAULTS, "hidden_dropout": drop, "attention_dropout": drop, **overrides}
    if data.pop("use_turbo_deepep", False) and data.get("enable_primus_turbo"):
        data |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    quiet = [name for name in data if QUIET.fullmatch(name)]
    if data.get("use_torch_fsdp2"):
        raise PlannerError(
            f"{path}: use_torch_fsdp2: Megatron-LM with torch's FSDP2 is not priced; --set use_torch_fsdp2=false"
        )
    found = of_mapping({name: value for name, value in data.items() if name not in quiet}, str(path), said)
    ask_for_gaps(found, None)
    reading = megatron_reading(found, said)
    changed = [name for name in ("hidden_size", "num_experts", "num_layers") if name in overrides and said.model]
    note = f"model: {said.model}, by the name {called}; {', '.join(changed)} of the file is not taken" if changed else ""
    return _noted(reading, note, quiet)


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
