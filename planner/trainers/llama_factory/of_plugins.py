"""LLaMA-Factory's second form (USE_V1=1): settings in sections of plugins; weights that are trained are cast to fp32, a base under
adapters lies as it was published.
[LLaMA-Factory of 2026-08, v1/config/*_args.py, v1/core/base_trainer.py, v1/plugins]"""

import dataclasses
import re
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.trainers.llama_factory.own_arguments import GOES_ON, other_kernel
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import (
    FineTuning,
    adapter_targets,
    layers_beside,
    quantised,
)
from planner.trainers.reading.given import Question, setting_of_a_fork
from planner.trainers.reading.kernels import KERNELS
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.sharding import Sharding, deepspeed
from planner.trainers.reading.trained_whole import trained_whole
from planner.trainers.reading.values import quotient

SECTIONS = {f"{one}_config" for one in ("dist", "peft", "quant", "kernel", "optim", "init", "lr_scheduler")}
OWN = {"model_class", "train_dataset", "micro_batch_size", "batching_strategy", "enable_activation_checkpointing"}
"""Settings of which this form has one, beside ``model``."""
COMMANDS = {"train": "lm", "sft": "lm", "dpo": "dpo"}
"""What follows llamafactory-cli -> objective."""
PREFERENCES = re.compile(r"pref_\w+|simpo_\w+|dpo_\w+|ld_alpha")
OPTIMIZERS = {"None": "adam", "muon": "muon"}
QUIET = re.compile(
    r"(train|eval)_dataset|output_dir|learning_rate|num_train_epochs|max_(steps|grad_norm|new_tokens)|batching_\w+|dist_timeout|seed"
    r"|full_determinism|resume_from_checkpoint|(save|logging)_\w+|sample_backend|trust_remote_code|custom_chat_template|model_class"
    r"|(kernel|lr_scheduler|init)_config(\.\w+)*|optim_config\.\w+|dist_config\.(dcp_path|pin_memory|reshard_after_forward)|pref_\w+"
    r"|simpo_\w+|dpo_\w+|ld_alpha|peft_config\.(lora_alpha|use_rslora|export_\w+|infer_dtype|adapter_name_or_path)"
    r"|quant_config\.(compute_dtype|quantization_type)"
)


def in_sections(data: dict[str, Any]) -> bool:
    """Whether settings have this form."""
    return isinstance(data.get("model"), str) and "model_name_or_path" not in data and bool(data.keys() & (SECTIONS | OWN))


def parse(given: Settings, num_gpus: int | None, command: str = "") -> Reading:
    """The job that settings describe; ``command``: the word that starts it, '' = the file alone is there. Raises PlannerError."""
    peft, quant = given.section("peft_config"), given.section("quant_config")
    kind = str(peft.get("name", "full"))
    if peft.get("export_dir") is not None and given.get("train_dataset") is None:
        raise PlannerError(f"{peft.where('export_dir')}: it merges adapters, and nothing is trained")
    if str(given.get("model_class")) == "cls":
        raise PlannerError(f"{given.where('model_class')} is cls: a classifier is no language model")
    if kind not in ("lora", "full"):
        raise PlannerError(f"{peft.where('name')} is {shown(kind)}, which is not modelled; lora and none are")
    if peft.flag("use_dora"):
        raise PlannerError(f"{peft.where('use_dora')}: DoRA is not modelled; LoRA is")
    bits = quant.number("quantization_bit", 4 if quant.get("name") == "bnb" else None)
    if quant.data and (str(quant.get("name")) not in ("bnb", "auto") or bits not in (None, 4, 8)):
        raise PlannerError(f"{quant.where('name')}: of quantised weights those of bitsandbytes in 4 and 8 bits are modelled")
    if bits and kind != "lora":
        raise PlannerError(f"{quant.where('quantization_bit')}: weights in {bits} bits are not trained; peft_config.name is {kind}")
    split, precision = _sharding(given, num_gpus, kind == "full")
    optimizer = str(given.section("optim_config").get("name", "None"))
    if optimizer not in OPTIMIZERS:
        raise PlannerError(f"{given.where('optim_config.name')} is {shown(optimizer)}; muon and none (AdamW) are known")
    objective, asked = _objective(given, command)
    micro, batch = given.size("micro_batch_size", 1), given.number("global_batch_size")
    steps: int | None = 1
    if batch is not None and num_gpus is not None:
        cp = split.fields.get("cp", 1)
        steps = quotient(batch * cp, num_gpus * micro, f"{given.where('global_batch_size')} by micro batches")
    elif batch is not None:
        steps = None
    options = {"adapter_dropout": "on"} if kind == "lora" and peft.above_zero("lora_dropout", 0.05) else {}
    kernel = str(given.get("flash_attn", "sdpa"))
    job = FineTuning(
        given=given, trainer="llama-factory", model=given.label("model") or "Qwen/Qwen3-4B-Instruct-2507", micro_batch_size=micro,
        accumulation=steps, batch=batch, sequence_length=given.size("cutoff_len", 2048), precision=precision,
        half_weights=kind == "lora", upcasts=kind == "full", optimizer=OPTIMIZERS[optimizer],
        recompute=given.flag("enable_activation_checkpointing", True),
        lora_rank=peft.size("r", 8) if kind == "lora" else 0, lora_targets=adapter_targets(peft.get("target_modules", "all")),
        lora_whole=trained_whole(peft), frozen_weights=quantised(bits, quant.flag("double_quantization", True)) if bits else "bf16",
        objective=objective, options=options | ({"attention_kernel": KERNELS[kernel]} if kernel in KERNELS else {}), sharding=split,
        num_gpus=num_gpus, quiet=QUIET, questions=asked, notes=(*_notes(given, kernel), *_beside(peft, kind)),
    )  # fmt: skip
    reading = fine_tuning.reading(job)
    unknown = (setting_of_a_fork(one.partition(" = ")[0], "LLaMA-Factory in sections") for one in reading.unread)
    return dataclasses.replace(reading, questions=(*reading.questions, *unknown))


def _objective(given: Settings, command: str) -> tuple[str, tuple[Question, ...]]:
    """What is trained, by the word behind llamafactory-cli; asked where the file is there alone and speaks of preferences."""
    said = str(given.get("stage", command or "sft"))
    if said not in COMMANDS:
        raise PlannerError(f"{given.path}: llamafactory-cli {said} is not modelled; a plan knows sft, dpo")
    if COMMANDS[said] == "dpo" and str(given.get("pref_loss", "sigmoid")) != "sigmoid":
        raise PlannerError(f"{given.where('pref_loss')} has no reference model, which is not modelled; sigmoid is")
    called = f"{given.get('train_dataset')} {given.path.name}".lower()
    speaks = "dpo" in called or any(PREFERENCES.fullmatch(one) for one in given.data)
    if command or "stage" in given.data or not speaks:
        return COMMANDS[said], ()
    about = "the word behind llamafactory-cli, which no setting says"
    return "dpo", (Question(name="stage", about=about, choices=("sft", "dpo")),)


def _sharding(given: Settings, num_gpus: int | None, full: bool) -> tuple[Sharding, str]:
    """How the job is split, and its precision: weights that are trained lie in fp32, and only FSDP2 and DeepSpeed compute in 16
    bits then.  [v1/core/model_engine.py; v1/plugins/trainer_plugins/distributed/fsdp2.py]"""
    part, cp = given.section("dist_config"), given.size("cp_size", 1)
    name, half = str(part.get("name", "None")), given.flag("bf16", True)
    cut = {"cp": cp, "cp_method": int(CpMethod.A2A)} if cp > 1 else {}
    if cp > 1 and str(given.get("cp_mode", "ulysses")) != "ulysses":
        raise PlannerError(f"{given.where('cp_mode')} is {shown(given.get('cp_mode'))}; a plan knows ulysses")
    for one in ("dp_size", "mp_shard_size"):
        given.get(one)  # what is left of the GPUs
    if name == "deepspeed":
        found = deepspeed(part.get("config_file"), given.path, "dist_config.config_file", given)
        return found, "bf16" if found.precision in (None, "no") else str(found.precision)
    if name == "fsdp2":
        if not (half or full):
            raise PlannerError(f"{given.where('bf16')}: false computes in fp32 with weights in 16 bits, which is not modelled")
        level = 3 if part.flag("reshard_after_forward", True) else 2
        fields = {"zero": level, **cut, **({"offload_parameters": 1} if part.flag("offload_params") else {})}
        replicas = given.size("mp_replicate_size", 1)
        if replicas > 1 and num_gpus is not None:
            groups = quotient(num_gpus, replicas * cp, f"{given.where('mp_replicate_size')}: GPUs by replicas")
            fields |= {"dp_shard": groups}
        return Sharding(kind="fsdp", fields=fields), "bf16" if half else "fp32"
    if name == "None":
        return Sharding(fields={"zero": 0, **cut}), "fp32" if full else "bf16"
    raise PlannerError(f"{part.where('name')} is {shown(name)}, which is not modelled; fsdp2, deepspeed and none are")


def _notes(given: Settings, kernel: str) -> tuple[str, ...]:
    strategy, peft = str(given.get("batching_strategy", "normal")), given.section("peft_config")
    notes = [f"batching_strategy {strategy}: micro batches of as many tokens as full sequences have"] * (strategy != "normal")
    notes += [other_kernel(kernel)] * (kernel not in KERNELS and kernel != "auto")
    if peft.data.get("adapter_name_or_path") and peft.get("name") == "lora":
        notes.append(GOES_ON)
    return tuple(notes)


def _beside(peft: Settings, kind: str) -> tuple[str, ...]:
    named = peft.get("target_modules", "all")
    return layers_beside(named, adapter_targets(named)) if kind == "lora" else ()
