"""axolotl: its YAML."""

import re
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import KERNELS, FineTuning, adapter_targets, optimizer, quantised
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.sharding import Sharding, accelerate_named, from_arguments
from planner.trainers.reading.values import read_text

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|datasets.*|test_datasets.*|chat_template.*|num_epochs|model_type|processor_type|sample_packing\w*"
    r"|pad_to_sequence_len|train_on_inputs|\w*_steps|\w+_per_epoch|loss_watchdog_\w+|eot_tokens.*|adapter|is_\w+_derived_model|xformers_attention"
    r"|flash_optimum|local_rank|debug|tokens.*|skip_prepare_dataset|lora_fan_in_fan_out|lora_(mlp|qkv|o)_kernel|lora_modules_to_save.*"
    r"|liger_\w+|plugins|cosine_\w+|torchdistx_path|gptq\w*|use_tensorboard|rl_beta|trl.*|dpo_\w+|auto_resume_from_checkpoints"
    r"|curriculum_sampling|save_first_step|total_num_tokens|fsdp|fsdp_version|gradient_checkpointing_kwargs.*|hf_use_auth_token|float16"
    r"|experimental_skip_move_to_device|scaling_softmax|flash_attn_\w+|accelerator_config.*|use_wandb|eta_min|revision_of_model"
    r"|flash_attention|bfloat16|fp16|image_\w+|rl|ddp_\w+|batch_flattening|device_map|type_of_model|bnb_config_kwargs.*"
    r"|quantize_moe_experts|bnb_4bit_\w+|freeze_mm_modules|expert_parallel_(num_nvl_bytes|token_capacity)"
)
OBJECTIVES = {"dpo": "dpo", "ipo": "dpo"}
FOREIGN = (
    *("relora", "lisa_step_interval", "diffusion", "reward_model", "process_reward_model", "qat", "unfrozen_parameters"),
)


USUAL_LENGTH = 512
"""[axolotl, utils/schemas/config.py, sequence_len]"""
OTHER_FORMS = ("max_length", "max_seq_length", "grad_accum", "target_modules", "lora_rank", "per_device_train_batch_size")
"""Settings that axolotl has under other names: with none of its data, a file with these is of a project's own program."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        data = file_settings(path, "a configuration of axolotl")
        other = [one for one in OTHER_FORMS if one in data and not ("datasets" in data or "pretraining_dataset" in data)]
        if other:
            why = "no setting of axolotl; import the script that starts the program that reads it"
            raise PlannerError(f"{path}: {', '.join(other)}: {why}")
        command = rf"^#[^\n]*\baxolotl[^\n]*{re.escape(path.name)}[^\n]*--deepspeed[= ]+(\S+)"
        launch = re.search(command, read_text(path), re.MULTILINE)
        if launch is not None and data.get("deepspeed") is None:  # what launches it, in a comment
            data["deepspeed"] = launch[1]
        return parse(Settings(path, said.filled(data), said=said), said.num_gpus)
    found = launched(path, said, r"axolotl|axolotl\.cli\.train|scripts/finetune\.py")
    return parse(with_files(path, found, said), said.num_gpus or found.num_gpus, found.sharding)


def parse(given: Settings, num_gpus: int | None = None, sharding: Sharding | None = None) -> Reading:
    """The job that settings describe; ``sharding`` of the launcher. Raises PlannerError."""
    for name in FOREIGN:
        if given.get(name) not in (None, False, [], {}):
            raise PlannerError(f"{given.where(name)}: this is not modelled; a plan trains all weights or adapters on all layers")
    if given.flag("model_quantization_config_kwargs.dequantize"):  # weights of the hub in fewer bits, trained in 16
        given.get("model_quantization_config")
    adapter = given.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise PlannerError(f"{given.where('adapter')} is {shown(adapter)}, which is not modelled; lora and qlora are")
    objective = given.choice("rl", OBJECTIVES, "ipo") if given.get("rl") else "lm"
    half = given.get("bf16", "auto") not in (False, "false") or given.flag("bfloat16")
    precision = "bf16" if half else "fp16" if given.get("fp16") or given.flag("float16") else "fp32"
    if given.flag("fp8"):
        precision = "fp8"
    found = sharding or accelerate_named(given) or from_arguments(given) or Sharding()
    bits = 4 if given.flag("load_in_4bit") else 8 if given.flag("load_in_8bit") else 0
    micro, steps = given.number("micro_batch_size"), given.number("gradient_accumulation_steps")
    if micro is None and given.get("batch_size") is None:
        given.ask(Question(name="micro_batch_size", about="sequences per GPU and forward pass", choices=("N",)))
    offload = given.get("activation_offloading", False) not in (False, "false")
    checkpoints = given.get("gradient_checkpointing", False)
    length = given.number("sequence_len")
    answered = given.said is not None and given.said.sequence_length is not None
    if length is None and given.get("max_packed_sequence_len") is not None and not answered:
        why = "max_packed_sequence_len is none of axolotl's settings any more"
        given.ask(Question(name="sequence_len", about=why, choices=("N",)))
    return fine_tuning.reading(FineTuning(
        given=given, trainer="axolotl", model=given.label("base_model"),
        micro_batch_size=micro or 1, accumulation=steps or (None if given.get("batch_size") else 1),
        batch=given.number("batch_size"),
        sequence_length=length or USUAL_LENGTH, precision=precision, half_weights=precision in ("bf16", "fp8"),
        optimizer=optimizer(given, given.get("optimizer", "adamw_torch_fused"), "optimizer"),
        recompute=checkpoints not in (False, "false", None),
        offload_activations=offload or str(checkpoints).startswith("offload") or checkpoints == "unsloth",
        lora_rank=given.size("lora_r", 8) if adapter else 0, lora_targets=_targets(given),
        frozen_weights=quantised(bits, given.flag("bnb_config_kwargs.bnb_4bit_use_double_quant", True)) if bits else "bf16",
        objective=objective,
        # Its own preparation of FSDP2 shards weights as they were loaded.  [monkeypatch/accelerate/fsdp2.py]
        upcasts=(given.number("fsdp_version") or given.number("fsdp_config.fsdp_version", 1)) != 2,
        sharding=_parallel(given, found), num_gpus=num_gpus, options=_options(given), quiet=QUIET,
        notes=(f"sequences of {USUAL_LENGTH} tokens, axolotl's default",) * (length is None and not answered),
    ))  # fmt: skip


def _targets(given: Settings) -> str:
    named, everything = given.first("lora_target_modules", "lora_target_parameters"), given.flag("lora_target_linear")
    return "all" if everything or named is None else adapter_targets(named)


def _parallel(given: Settings, found: Sharding) -> Sharding:
    """Degrees of axolotl's own keys, in addition to what FSDP or DeepSpeed say. Raises PlannerError."""
    tp, ep, replicas = (given.size(f"{name}_size") for name in ("tensor_parallel", "expert_parallel", "dp_replicate"))
    shards = given.number("dp_shard_size")
    cp = max(given.size("context_parallel_size"), given.size("sequence_parallel_degree"))
    fields: dict[str, int] = dict(found.fields)
    if tp > 1:
        fields["tp"] = tp
    if ep > 1:
        fields["ep"] = ep
    if cp > 1:
        # ring_attn_func: the gathering kernel of Llama 3 with packed samples, a ring without.  [axolotl, utils/schemas/enums.py]
        method = CpMethod.ALLGATHER if given.flag("sample_packing") else CpMethod.RING
        fields |= {"cp": cp, "cp_method": int(CpMethod.A2A if found.kind == "deepspeed" else method)}
    if replicas > 1:
        fields["dp_shard"] = (shards or 1)
    gpus = tp * replicas * shards * (cp if cp > 1 else 1) if shards else None
    return Sharding(**{**vars(found), "fields": fields, "num_gpus": found.num_gpus or gpus})


def _options(given: Settings) -> dict[str, str]:
    """Options of the trainer that the file sets."""
    plugins: Any = given.get("plugins") or []
    named = " ".join(map(str, plugins if isinstance(plugins, list) else [plugins])).lower()
    options = {"adapter_dropout": "on"} if given.above_zero("lora_dropout", 0.0) else {}
    if given.flag("liger_fused_linear_cross_entropy") or "cut_cross_entropy" in named:
        options["loss"] = "fused_linear"
    kernel = str(given.get("attn_implementation", "flash_attention_2" if given.flag("flash_attention") else "")).lower()
    if kernel in KERNELS:
        options["attention_kernel"] = KERNELS[kernel]
    if given.get("torch_compile") in (True, "true", "auto"):
        options["compile"] = "on"
    return options
