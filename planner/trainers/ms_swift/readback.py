"""ms-swift: commands (swift sft, megatron sft, ...) in scripts, and their YAML."""

import dataclasses
import re
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.trainers.ms_swift.megatron_commands import parse_megatron
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import KERNELS, FineTuning, adapter_targets, optimizer, quantised
from planner.trainers.reading.given import Given
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.sharding import Sharding, accelerate_named, from_arguments
from planner.trainers.reading.values import read_text

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|max_length|packing\w*|padding_free|gradient_checkpointing_kwargs.*|vit_\w+|aligner_lr|freeze_vit"
    r"|freeze_aligner|torch_dtype|model_type|use_hf|add_version|create_checkpoint_symlink|bnb_4bit_\w+|quant_method|lora_dtype|agent_template|loss_scale"
    r"|attn_impl|lazy_tokenize|label_smoothing|beta|rpo_alpha|sft_alpha|loss_type|max_pixels|loss_weights|new_special_tokens|check_model"
    r"|deepspeed_autotp_size|use_chat_template|response_prefix|enable_thinking|add_non_thinking_prefix|router_aux_loss_coef|max_epochs"
    r"|external_plugins|callbacks|use_logits_to_keep|modules_to_save.*|enable_dft_loss|rope_scaling|norm_bbox|ignore_data_skip|task_type"
    r"|train_dataloader_shuffle|cached_\w+|write_batch_size|model_kwargs|init_weights|metric|acc_strategy|optim_args|merge_lora"
    r"|ddp_backend"
)
PROGRAM = (
    r"(?:\S*/)?(?:swift|megatron)|\S*swift/cli/(?:_megatron/)?(?:sft|rlhf|pt)(?:\.py)?"
    r"|swift\.cli\.(?:_megatron\.)?(?:sft|rlhf|pt)"
)
OBJECTIVES = {"dpo": "dpo"}
MODES = ("sft", "pt", "rlhf")


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        given = Settings(path, said.filled(file_settings(path, "arguments of ms-swift")), said=said)
        return parse(given, "rlhf" if given.get("rlhf_type") else "sft", said.num_gpus)
    own = re.search(r"swift[./]cli", read_text(path)) is not None
    found = launched(path, said, PROGRAM, "" if own else "|".join(MODES))
    by_name = re.sub(r"\.py$", "", found.program).rpartition("/")[2].rpartition(".")[2]
    mode = next((word for word in found.words if word in MODES), by_name)
    given = with_files(path, found, said)
    gpus = said.num_gpus or found.num_gpus
    if "megatron" in found.program:
        return parse_megatron(given, mode, gpus)
    stated = said.num_gpus or (found.sharding or Sharding()).num_gpus
    if (found.visible or 1) > (found.num_gpus or 1) and stated is None:
        raise PlannerError(
            f"{path}: {found.num_gpus or 1} processes see {found.visible} GPUs: layers spread over GPUs by device_map are not "
            "modelled; set NPROC_PER_NODE, or say --gpus N where every GPU has a process"
        )
    reading = parse(given, mode, gpus, found.sharding)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def parse(given: Settings, mode: str, num_gpus: int | None = None, sharding: Sharding | None = None) -> Reading:
    """The job that arguments over transformers describe. Raises PlannerError."""
    tuner = str(given.first("tuner_type", "train_type", "sft_type", default="lora"))
    if tuner not in ("lora", "full"):
        raise PlannerError(f"{given.where('tuner_type')} is {shown(tuner)}, which is not modelled; lora and full are")
    for name in ("use_galore", "use_dora", "freeze_llm", "freeze_parameters_ratio", "lisa_activated_layers"):
        if given.get(name) not in (None, False, 0, 0.0):
            raise PlannerError(f"{given.where(name)} is not modelled; a plan trains all weights or adapters on all layers")
    if given.get("task_type") in ("seq_cls", "embedding", "reranker", "generative_reranker"):
        raise PlannerError(f"{given.where('task_type')}: a step without a loss over the vocabulary is not modelled")
    objective = given.choice("rlhf_type", OBJECTIVES, "dpo") if mode == "rlhf" else "lm"
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "AUTO": "bfloat16"}.get(
        asked := str(given.first("torch_dtype", "dtype", default="bfloat16")), asked
    )  # the second until swift 2
    half, single = dtype == "float16" or given.flag("fp16"), dtype == "float32" and not given.flag("bf16")
    precision = "fp16" if half else "fp32" if single else "bf16"
    bits = given.number("quant_bits", least=2, most=8) or given.number("quantization_bit", 0, 0, 8)
    found, double = _sharding(given, sharding), given.flag("bnb_4bit_use_double_quant", True)
    optim = "muon" if given.get("optimizer") == "muon" else optimizer(given, given.get("optim", "adamw_torch_fused"), "optim")
    return fine_tuning.reading(FineTuning(
        given=given, trainer="ms-swift", model=given.label("model", "model_id_or_path"),
        micro_batch_size=given.number("per_device_train_batch_size") or given.size("batch_size"),
        accumulation=given.number("gradient_accumulation_steps"), batch=16,
        sequence_length=given.number("max_length"),
        precision=precision, half_weights=dtype != "float32",
        optimizer=optim,
        recompute=given.flag("gradient_checkpointing", True), lora_rank=given.size("lora_rank", 8) if tuner == "lora" else 0,
        lora_targets=adapter_targets(given.first("target_modules", "lora_target_modules", default="all-linear")),
        frozen_weights=quantised(bits, double) if bits else "fp32" if dtype == "float32" else "bf16",
        objective=objective, num_gpus=num_gpus, sharding=found, options=_options(given), quiet=QUIET,
    ))  # fmt: skip


def _sharding(given: Settings, sharding: Sharding | None) -> Sharding:
    """DeepSpeed by swift's words, FSDP, tensor and sequence parallelism."""
    if given.get("fsdp") == "fsdp2":
        found = Sharding(kind="fsdp", fields={"zero": 3, "recompute": 2})  # swift/config/fsdp2.json
    else:
        found = sharding or accelerate_named(given) or from_arguments(given) or Sharding()
    fields = dict(found.fields)
    if (tp := given.size("deepspeed_autotp_size")) > 1:
        fields["tp"] = tp
    if (sp := given.size("sequence_parallel_size")) > 1:
        fields |= {"cp": sp, "cp_method": int(CpMethod.A2A)}
    return dataclasses.replace(found, fields=fields)


def _options(given: Settings) -> dict[str, str]:
    """Options of the trainer that the arguments set."""
    options = {"adapter_dropout": "on"} if given.above_zero("lora_dropout", 0.05) else {}
    kernel = str(given.get("attn_impl", "")).lower().replace("flash_attention_2", "flash_attn")
    if kernel in KERNELS:
        options["attention_kernel"] = KERNELS[kernel]
    if given.flag("use_liger_kernel"):
        options["loss"] = "fused_linear"
    return options
