"""Arguments of transformers' Trainer and of the trainers of TRL, as their scripts take them: in YAML or as options."""

import re
from dataclasses import dataclass

from planner.errors import PlannerError
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import KERNELS, FineTuning, adapter_targets, optimizer, quantised
from planner.trainers.reading.given import Question
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.sharding import Sharding, said_or_asked

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|assistant_only_loss|completion_only_loss|packing\w*|padding_free|beta|loss_type|max_prompt_length"
    r"|max_completion_length|precompute_ref\w*|loss_weights.*|label_smoothing|gradient_checkpointing_kwargs.*|bnb_4bit_\w+|use_cpu"
    r"|pad_\w+|text_column|eos_token|attn_implementation|pack_\w+|rpo_alpha|lora_task_type|lora_modules_to_save.*|ref_\w+|sync_ref_model"
    r"|decontaminate|use_logits_to_keep|bos_token|is_decoder|config|token|auto_insert_empty_system_msg|preprocessing_num_workers"
    r"|fsdp_transformer_layer_cls_to_wrap|aux_loss_enabled|router_aux_loss_coef|use_auth_token|project|dataset_mixer.*|instruct_\w+"
)
NOT_LM = {
    **{name: name.upper() for name in ("orpo", "kto", "grpo", "ppo", "rloo", "cpo", "gkd")}, "reward": "reward training",
}  # fmt: skip
"""Trainers of TRL whose step is not one of a language model or of DPO, as words of a path."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a script does where its arguments say nothing."""

    trainer: str
    bf16: bool
    recompute: bool
    length: int | None
    """None = asked for."""


TRL = Habits(trainer="trl", bf16=True, recompute=True, length=1024)
"""[trl/trainer/base_config.py, sft_config.py]"""
FROZEN = ("tune_mm_mlp_adapter", "freeze_backbone", "freeze_llm", "freeze_language_model", "freeze_model")
"""Switches of programs that keep the language model as it is."""
OLD_TRL = Habits(trainer="trl", bf16=False, recompute=False, length=1024)
"""With TrainingArguments, or before 0.20: SFTTrainer takes the defaults of transformers, and cuts at max_seq_length."""
UNSLOTH = Habits(trainer="unsloth", bf16=True, recompute=False, length=2048)
TRANSFORMERS = Habits(trainer="fsdp", bf16=False, recompute=False, length=None)
"""[transformers/training_args.py]"""


def parse(
    given: Settings, habits: Habits, num_gpus: int | None = None, sharding: Sharding | None = None, script: str = "",
    notes: tuple[str, ...] = (),
) -> Reading:
    """The job that arguments describe; ``sharding`` and ``script`` of the launcher. Raises PlannerError."""
    objective = _objective(given, script)
    for name in FROZEN:
        if given.flag(name):
            raise PlannerError(
                f"{given.path}: {name} trains a part of the model, which is not priced; --set {name}=false imports the job with "
                "all of it"
            )
    half = _dtype(given) in ("bfloat16", "bf16", "float16", "fp16", "auto")
    mixed = given.flag("bf16", habits.bf16 and not given.flag("fp16"))
    precision = "fp16" if given.flag("fp16") else "bf16" if mixed or half else "fp32"
    named = given.get("lora_r") is not None and given.get("use_peft") is None and given.flag("lora_enable", True)
    adapters = given.flag("use_peft") or given.flag("use_lora") or given.flag("lora_enable") or named
    bits = _bits(given)
    found, asked = said_or_asked(given, sharding, launched=bool(script) or num_gpus == 1)
    return fine_tuning.reading(FineTuning(
        given=given, trainer=habits.trainer, model=given.label("model_name_or_path", "model_name"),
        micro_batch_size=given.size("per_device_train_batch_size", 8), accumulation=given.size("gradient_accumulation_steps", 1),
        sequence_length=_length(given) or habits.length, precision=precision,
        half_weights=half, optimizer=optimizer(given, given.get("optim", "adamw_torch_fused"), "optim"),
        recompute=given.flag("gradient_checkpointing", habits.recompute), offload_activations=given.flag("activation_offloading"),
        lora_rank=(given.number("lora_r") or given.size("lora_rank", 16)) if adapters else 0,
        # Without names PEFT takes query and value for most architectures.  [peft, utils/constants.py]
        lora_targets=adapter_targets(given.get("lora_target_modules", ["q_proj", "v_proj"])),
        frozen_weights=quantised(bits, given.flag("use_bnb_nested_quant")) if bits else "bf16" if half else "fp32",
        objective=objective, sharding=found, num_gpus=num_gpus, options=_options(given), quiet=QUIET,
        questions=(*asked, *(_own_adapters(given, script) if adapters and habits is TRANSFORMERS else ())),
        notes=notes,
    ))  # fmt: skip


def _own_adapters(given: Settings, script: str) -> tuple[Question, ...]:
    """What a program of its own decides about adapters, where its arguments do not say it."""
    if not script:
        return ()
    program = script.rpartition("/")[2]
    about = f"which linear layers {program} adapts"
    targets = Question(name="lora_target_modules", about=about, choices=("all-linear", "q_proj,v_proj"))
    dtype = Question(name="torch_dtype", about=f"the dtype {program} loads frozen weights in", choices=("bfloat16", "float32"))
    rank = Question(name="lora_r", about=f"rank of the adapters of {program}")
    ranks = () if given.first("lora_r", "lora_rank") is not None else (rank,)
    said = _dtype(given) != "float32" or given.first("dtype", "torch_dtype") is not None
    asked = (() if given.get("lora_target_modules") is not None else (targets,), () if said or _bits(given) else (dtype,))
    return (*ranks, *asked[0], *asked[1])


def _bits(given: Settings) -> int:
    """Bits of frozen weights that bitsandbytes holds; 0 = it does not."""
    if given.flag("load_in_4bit") or given.flag("q_lora") or str(given.get("bits")) == "4":
        return 4
    return 8 if given.flag("load_in_8bit") or str(given.get("bits")) == "8" else 0


def _length(given: Settings) -> int | None:
    names = ("max_length", "max_seq_length", "model_max_length", "block_size", "max_seq_len", "seq_length")
    found = [given.number(name) for name in names]
    return next((one for one in found if one is not None), None)


def _dtype(given: Settings) -> str:
    """Dtype that weights are loaded in; float32 where nothing is said.  [TRL, model_config.py]"""
    inner = given.get("model_init_kwargs")
    own = given.section("model_init_kwargs").first("dtype", "torch_dtype") if isinstance(inner, dict) else None
    named = given.first("dtype", "torch_dtype")
    return str(named or own or "float32").lower().removeprefix("torch.")


def _objective(given: Settings, script: str) -> str:
    """lm or dpo. Raises PlannerError for the other trainers of TRL."""
    words = re.split(r"[^a-z0-9]+", f"{given.path.resolve().parent.name}/{given.path.stem}/{script}".lower())
    foreign = next((NOT_LM[one] for one in words if one in NOT_LM), None)
    if foreign or given.get("num_generations") is not None or given.get("reward_funcs") is not None:
        raise PlannerError(f"{given.path}: {foreign or 'GRPO'} is not modelled; supervised fine-tuning and DPO are")
    preference = any(given.data.get(one) is not None for one in ("beta", "max_prompt_length", "precompute_ref_log_probs"))
    return "dpo" if preference or "dpo" in words else "lm"


def _options(given: Settings) -> dict[str, str]:
    """Options of the trainer that the file sets."""
    options = {"adapter_dropout": "on"} if given.above_zero("lora_dropout", 0.05) else {}
    kernel = str(given.get("attn_implementation", "")).lower()
    if kernel in KERNELS:
        options["attention_kernel"] = KERNELS[kernel]
    if given.flag("use_liger_kernel") or given.flag("use_liger"):
        options["loss"] = "fused_linear"
    if given.flag("torch_compile"):
        options["compile"] = "on"
    return options
