"""megatron sft of ms-swift: Megatron Core's arguments in swift's spelling, and with its defaults."""

import re

from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.trainer_options import spell
from planner.trainers.megatron.core_settings import OPTIMIZERS, RECIPES
from planner.trainers.megatron.recompute_words import recompute
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.configuration import Reading, built_as
from planner.trainers.reading.fine_tuning import adapter_targets
from planner.trainers.reading.megatron_degrees import degrees, states_on_the_host
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import quotient

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|lr\w*|min_lr|num_train_epochs|train_iters|max_epochs|finetune|no_save_\w+|no_load_\w+|packing\w*"
    r"|padding_free|moe_(grouped_gemm|permute_fusion|aux_loss_coeff|router_\w+|expert_capacity\w*|shared_expert_overlap|pad_\w+)|async_save"
    r"|masked_softmax_fusion|gradient_accumulation_fusion|bias_\w+_fusion|apply_rope_fusion|attention_backend|mcore_\w+|load|to_\w+"
    r"|overlap_\w+|use_hf|model_type|torch_dtype|bf16|beta|rpo_alpha|loss_scale|agent_template|freeze_vit|freeze_aligner|vit_\w+|aligner_lr"
    r"|cross_entropy_fusion_impl|merge_lora|clip_grad|adapters|loss_type|rlhf_type|tensorboard_\w+|calculate_per_token_loss|manual_gc\w*"
    r"|ref_\w+|distributed_timeout_minutes|group_by_length|max_pixels|recompute_num_layers|moe_token_dispatcher_type|moe_enable_deepep"
    r"|tokens?\w*|mtp_loss_scaling_factor|decoder_\w+|linear_decoupled_in_proj|position_embedding_type|rope_\w+|sft_alpha|optimizer|lora_\w+"
    r"|enable_dft_loss|recompute_method|cross_entropy_loss_fusion|exp_avg_sq_dtype|fp8_param_gather|external_plugins|use_chat_template|add_non_thinking_prefix|enable_thinking|cached_\w+|ddp_\w+|exit_on_\w+|muon_\w+"
)


def parse_megatron(given: Settings, mode: str, num_gpus: int | None) -> Reading:
    """The job that arguments of megatron sft, pt or rlhf describe. Raises PlannerError."""
    tuner = str(given.first("tuner_type", "train_type", default="full"))
    if tuner not in ("lora", "full"):
        raise PlannerError(f"{given.where('tuner_type')} is {shown(tuner)}, which is not modelled; lora and full are")
    if given.flag("use_megatron_fsdp"):
        raise PlannerError(f"{given.where('use_megatron_fsdp')}: Megatron-FSDP is not modelled for megatron sft")
    if given.get("task_type") in ("seq_cls", "embedding", "reranker", "generative_reranker") or given.flag("freeze_llm"):
        raise PlannerError(f"{given.path}: task_type or freeze_llm: a step without a loss over the vocabulary is not modelled")
    kind = str(given.get("rlhf_type", "dpo"))
    if mode == "rlhf" and kind != "dpo":
        raise PlannerError(f"{given.where('rlhf_type')} is {shown(kind)}, which is not modelled; dpo is")
    name = given.label("model", "load")
    model, notes = named_model(name, given.path) if name else (None, ())
    ahead = {"mtp_layers": given.size("mtp_num_layers", 0, 0)}  # built by this word alone, whatever the published model has
    if model is not None and model.mtp_layers and not ahead["mtp_layers"]:
        notes = (*notes, f"{model.name} without layers that predict further tokens: mtp_num_layers is not said")
    model = built_as(model, ahead) if model is not None else None
    fields = _layout(given)
    batch = given.size("global_batch_size", 16)
    if num_gpus is not None:
        split = fields["tp"] * fields["cp"] * fields["pp"]
        dp = quotient(num_gpus, split, f"{given.path}: GPUs by the degrees")
        steps = quotient(batch, fields["micro_batch_size"] * dp, f"{given.path}: global_batch_size by all micro batches")
        fields |= {"dp": dp, "num_microbatches": steps}
    adapters = tuner == "lora"
    return Reading(
        trainer=_trainer(given), fields=fields, model=model, model_name=name, architecture=ahead,
        sequence_length=given.number("max_length"),
        global_batch_size=batch, precision=_precision(given), optimizer=_optimizer(given), num_gpus=num_gpus,
        lora_rank=given.size("lora_rank", 8) if adapters else 0,
        lora_targets=adapter_targets(given.get("target_modules", "all-linear")) if adapters else "all",
        frozen_weights="bf16" if adapters else None, objective="dpo" if mode == "rlhf" else "lm",
        unread=tuple(one for one in given.left() if not QUIET.fullmatch(one.split(" = ")[0])), notes=notes,
    )  # fmt: skip


def _layout(given: Settings) -> dict[str, int]:
    held = degrees(given)
    if given.get("pipeline_model_parallel_layout") is not None:
        raise PlannerError(f"{given.where('pipeline_model_parallel_layout')}: import it as arguments of Megatron")
    return {
        **held, "micro_batch_size": given.size("micro_batch_size"),
        "sequence_parallel": int(given.flag("sequence_parallel") and held["tp"] > 1),
        "zero": int(given.flag("use_distributed_optimizer", True)),
        "first_stage_layers": given.size("decoder_first_pipeline_num_layers", 0, 0) if held["pp"] > 1 else 0,
        "last_stage_layers": given.size("decoder_last_pipeline_num_layers", 0, 0) if held["pp"] > 1 else 0,
        **({"cp_method": int(CpMethod.RING)} if held["cp"] > 1 else {}), **recompute(given, usual="selective"),
        **states_on_the_host(given),
    }  # fmt: skip


def _trainer(given: Settings) -> str:
    options = {"gradient_dtype": "bf16"} if str(given.get("main_grads_dtype", "fp32")) == "bf16" else {}
    if given.flag("moe_enable_deepep") or given.get("moe_token_dispatcher_type") == "flex":
        options["expert_dispatch"] = "deepep"
    if given.flag("overlap_moe_expert_parallel_comm"):
        options["expert_overlap"] = "on"
    return spell("ms-swift-megatron", options)


def _precision(given: Settings) -> str:
    if given.get("fp8_format") is None and given.get("fp8") is None:
        return "fp16" if given.flag("fp16") else "bf16"
    recipe = str(given.get("fp8_recipe", "delayed"))
    known = {"delayed": "fp8", **{name: one for one, (_, name) in RECIPES.items() if one != "nvfp4"}}
    if recipe not in known:
        raise PlannerError(f"{given.where('fp8_recipe')} is {shown(recipe)}; a plan knows {', '.join(known)}")
    return known[recipe]


def _optimizer(given: Settings) -> str:
    name = str(given.get("optimizer", "adam")).removeprefix("dist_")
    states = str(given.get("exp_avg_dtype", "fp32")) if given.flag("use_precision_aware_optimizer") else "fp32"
    known = {pair: optimizer for optimizer, pair in OPTIMIZERS.items()}
    return known.get((name, states), name)
