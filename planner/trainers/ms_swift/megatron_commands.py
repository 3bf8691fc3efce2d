"""megatron sft of ms-swift: Megatron Core's arguments in swift's spelling, and with its defaults."""

import re

from planner.errors import PlannerError, shown
from planner.layout import Recompute, Schedule
from planner.model import ModelSpec
from planner.trainers.megatron.readback import written_stages
from planner.trainers.megatron.recompute_words import of_dense_layers, recompute
from planner.trainers.megatron.trainer_words import of_units
from planner.trainers.ms_swift import megatron_words as words
from planner.trainers.ms_swift.earlier_adapters import goes_on
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.configuration import Reading, built_as
from planner.trainers.reading.fine_tuning import adapter_targets, layers_beside
from planner.trainers.reading.megatron_degrees import degrees, padded_experts, states_on_the_host
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.trained_whole import trained_whole
from planner.trainers.reading.values import quotient
from planner.trainers.reading.versions import newer

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|lr\w*|min_lr|num_train_epochs|train_iters|max_epochs|finetune|no_save_\w+|no_load_\w+|packing\w*"
    r"|padding_free|moe_(grouped_gemm|permute_fusion|aux_loss_coeff|router_\w+|expert_capacity\w*|shared_expert_overlap|pad_\w+)|async_save"
    r"|masked_softmax_fusion|gradient_accumulation_fusion|bias_\w+_fusion|apply_rope_fusion|attention_backend|mcore_\w+|load|to_\w+"
    r"|overlap_\w+|use_hf|model_type|torch_dtype|bf16|beta|rpo_alpha|loss_scale|agent_template|freeze_vit|freeze_aligner|vit_\w+|aligner_lr"
    r"|cross_entropy_fusion_impl|merge_lora|clip_grad|adapters|loss_type|rlhf_type|tensorboard_\w+|calculate_per_token_loss|manual_gc\w*"
    r"|ref_\w+|distributed_timeout_minutes|group_by_length|max_pixels|recompute_num_layers|moe_token_dispatcher_type|moe_enable_deepep"
    r"|tokens?\w*|mtp_loss_scaling_factor|decoder_\w+|linear_decoupled_in_proj|position_embedding_type|rope_\w+|sft_alpha|optimizer|lora_\w+"
    r"|enable_dft_loss|recompute_method|cross_entropy_loss_fusion|exp_avg_sq_dtype|fp8_param_gather|external_plugins|use_chat_template|add_non_thinking_prefix|enable_thinking|cached_\w+|ddp_\w+|exit_on_\w+|muon_\w+"
    r"|profile(_\w+)?|use_pytorch_profiler|(pytorch_profiler|nvtx)_\w+|record_memory_history|memory_snapshot_path"
)


CAPACITY = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")


def parse_megatron(given: Settings, mode: str, num_gpus: int | None) -> Reading:
    """The job that arguments of megatron sft, pt or rlhf describe. Raises PlannerError."""
    given = words.with_extra(given)
    tuner = _tuner(given)
    _require_known_step(given, mode)
    words.require_whole(given)
    name = given.label("model", "load")
    model, notes = named_model(name, given.path) if name else (None, ())
    ahead = {"mtp_layers": given.size("mtp_num_layers", 0, 0)}  # built by this word alone, whatever the published model has
    if model is not None and model.mtp_layers and not ahead["mtp_layers"]:
        notes = (*notes, f"{model.name} without layers that predict further tokens: mtp_num_layers is not said")
    ahead |= words.built_sizes(given, model)
    if model is not None:
        changed = [one for one, value in ahead.items() if one != "mtp_layers" and getattr(model, one) != value]
        notes = (*notes, f"{model.name} with {', '.join(changed)} of the arguments") if changed else notes
    model = built_as(model, ahead) if model is not None else None
    fields, of_layout = _layout(given, model)
    batch = given.size("global_batch_size", 16)
    if num_gpus is not None:
        split = fields["tp"] * fields["cp"] * fields["pp"]
        dp = quotient(num_gpus, split, f"{given.path}: GPUs by the degrees")
        steps = quotient(batch, fields["micro_batch_size"] * dp, f"{given.path}: global_batch_size by all micro batches")
        fields |= {"dp": dp, "num_microbatches": steps}
    optimizer, of_states = words.optimizer(given)
    if optimizer == "muon":  # [megatron_args.py, _check_muon]
        fields["zero"] = 0
    adapters, named = tuner == "lora", given.get("target_modules", "all-linear")
    targets = adapter_targets(named) if adapters else "all"
    packs = given.number("packing_length") if given.flag("packing") else None
    evenly, of_experts = _evenly(given, fields, model is None or model.is_moe)
    several = named if isinstance(named, list) else str(named).replace(",", " ").split()
    beside = layers_beside(several, targets) if adapters and "all-linear" not in several else ()
    return Reading(
        trainer=words.trainer(given, model), fields=fields, model=model, model_name=name, architecture=ahead,
        sequence_length=packs or given.number("max_length") or given.number("seq_length"),
        global_batch_size=batch, precision=words.precision(given), optimizer=optimizer, num_gpus=num_gpus,
        lora_rank=given.size("lora_rank", 8) if adapters else 0, lora_targets=targets,
        lora_whole=trained_whole(given) if adapters else "none",
        frozen_weights="bf16" if adapters else None, objective="dpo" if mode == "rlhf" else "lm",
        expert_imbalance=evenly, questions=words.of_a_fork(given, QUIET),
        unread=tuple(one for one in given.left() if not QUIET.fullmatch(one.split(" = ")[0])),
        notes=(*notes, *of_layout, *of_states, *of_experts, *beside, *words.cross_entropy(given)[1]),
    )  # fmt: skip


def _tuner(given: Settings) -> str:
    """lora or full; adapters that are gone on with make it lora."""
    tuner = str(given.first("tuner_type", "train_type", default="full"))
    if tuner not in ("lora", "full"):
        raise PlannerError(f"{given.where('tuner_type')} is {shown(tuner)}, which is not modelled; lora and full are")
    return "lora" if goes_on(given, "adapters", "mcore_adapter", "adapter_load") else tuner


def _require_known_step(given: Settings, mode: str) -> None:
    """Raises PlannerError for another step than that of a language model or DPO."""
    if given.flag("use_megatron_fsdp"):
        raise PlannerError(f"{given.where('use_megatron_fsdp')}: Megatron-FSDP is not modelled for megatron sft")
    if given.get("task_type") in ("seq_cls", "embedding", "reranker", "generative_reranker") or given.flag("freeze_llm"):
        raise PlannerError(f"{given.path}: task_type or freeze_llm: a step without a loss over the vocabulary is not modelled")
    kind = str(given.get("rlhf_type", "dpo"))
    if mode == "rlhf" and kind != "dpo":
        raise PlannerError(f"{given.where('rlhf_type')} is {shown(kind)}, which is not modelled; dpo is")


def _evenly(given: Settings, fields: dict[str, int], moe: bool) -> tuple[float | None, tuple[str, ...]]:
    """(tokens of the busiest expert over the mean where experts are padded to a capacity, what was taken for what)."""
    factor, padded = (given.get(one) for one in CAPACITY)
    if factor is None or float(factor) < 0 or not moe:
        return None, ()
    found = padded_experts(factor, padded, fields.get("ep", 1))
    note = f"{CAPACITY[0]} {factor}: tokens above the capacity are dropped, and priced as kept"
    return found, (note,) * (found is None)


def _layout(given: Settings, model: ModelSpec | None) -> tuple[dict[str, int], tuple[str, ...]]:
    """(fields of Layout, what was taken for what)."""
    notes: tuple[str, ...] = ()
    held, model = degrees(given), model or (given.said.spec() if given.said is not None else None)
    if held["tp"] > 1 and given.get("expert_tensor_parallel_size") is None and (model is None or model.is_moe):
        older = newer(given.path, "ms-swift", (3, 9)) is False  # then Megatron's own default, that of the others
        held["etp"] = held["tp"] if older else 1
    stages = _stages(given, model, held["pp"])
    held |= {"vpp": stages.pop("vpp", 0) or held["vpp"]}
    held["schedule"] = int(Schedule.INTERLEAVED if held["vpp"] > 1 else Schedule.ONE_F_ONE_B)
    again = recompute(given, usual="selective")
    if again["recompute"] == Recompute.FULL:
        again, notes = _whole_layers(given, model, held["pp"] * held["vpp"], held["vpp"])
    elif given.flag("moe_layer_recompute"):
        again = recompute(Settings(given.path, {"recompute_modules": ["core_attn", "moe"]}, said=given.said), usual="selective")
    notes = (*notes, *of_dense_layers(given, again, model))
    return {
        **held, "micro_batch_size": given.size("micro_batch_size"),
        "sequence_parallel": int(given.flag("sequence_parallel") and held["tp"] > 1),
        "zero": int(given.flag("use_distributed_optimizer", True)), **stages,
        **({"cp_method": int(words.ring(given))} if held["cp"] > 1 else {}), **again, **states_on_the_host(given),
    }, notes  # fmt: skip


def _stages(given: Settings, model: ModelSpec | None, pp: int) -> dict[str, int]:
    """vpp where another word than its own says it, and the layers of the first and the last stage."""
    ends = ("first", "last")
    said = {end: given.size(f"decoder_{end}_pipeline_num_layers", 0, 0) for end in ends}
    parts = zip(ends, ("embedding", "loss"), strict=True)
    accounted = {end: given.flag(f"account_for_{part}_in_pipeline_split") for end, part in parts}
    chunks, each = given.number("num_virtual_stages_per_pipeline_rank"), given.number("num_layers_per_virtual_pipeline_stage")
    written = given.get("pipeline_model_parallel_layout")
    if pp == 1:
        return {f"{end}_stage_layers": 0 for end in ends}
    if (written or each or any(accounted.values())) and model is None:
        return {f"{end}_stage_layers": said[end] for end in ends}  # --model is asked for, and read with then
    if written and model is not None:
        return written_stages(str(written), model, pp, f"{given.where('pipeline_model_parallel_layout')} {shown(str(written))}")
    layers = model.num_layers if model is not None else 0
    share = (layers + sum(accounted.values())) // pp
    vpp = chunks or (share // each if each else 0)
    return {"vpp": vpp, **{f"{end}_stage_layers": share - 1 if accounted[end] else said[end] for end in ends}}


def _whole_layers(given: Settings, model: ModelSpec | None, stages: int, vpp: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Full recompute: of all layers, or of some in each stage."""
    method, some = given.get("recompute_method"), given.number("recompute_num_layers")
    if method == "uniform" and (some or 1) > 1:
        return {"recompute": int(Recompute.FULL)}, (of_units(some or 1),)
    most = -(-model.num_layers // stages) if model is not None else 0
    part = method == "block" and some is not None and (not most or some < most)
    return {"recompute": int(Recompute.FULL), **({"recompute_layers": (some or 0) * vpp} if part else {})}, ()
