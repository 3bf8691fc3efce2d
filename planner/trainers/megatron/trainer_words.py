"""Which trainer of the library arguments of Megatron-LM ask for, and with which options, optimizer and precision."""

from collections.abc import Mapping
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.trainer import load_trainer
from planner.trainer_options import spell
from planner.trainers.megatron import core_settings
from planner.trainers.megatron.arguments import Arguments
from planner.trainers.reading.fine_tuning import OPTIMIZERS
from planner.units import GIB
from planner.workload import FP8_WEIGHTS

FLASH = tuple(f"use_flash_attn{one}" for one in ("", "_v1", "_v2", "_v3", "_triton", "_builder"))
"""Megatron-DeepSpeed's words for flash attention."""
SINCE_2023 = ("swiglu", "num_key_value_heads", "sequence_parallel", *(f"use_flash_attn_{one}" for one in ("v1", "v2", "triton")))
"""Words that Megatron-DeepSpeed has since 2023, for layers that changed with them; BigScience's of 2022 has others."""
BIGCODE = ("attention_head_type", "structured_logs", "fragment_fim_rate")
"""Arguments of BigCode's fork alone, whose attention keeps its scores unless --use-flash-attn stands there."""
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""What --data-parallel-sharding-strategy of Megatron-FSDP shards, as zero."""
NOT_PRICED = {
    "outer_dp_sharding_strategy": "no_shard",
    "num_distributed_optimizer_instances": "1", "msamp": "False", "fp8_param_gather": "False",
    "fp4_param_gather": "False", "fine_grained_activation_offloading": "False",
}  # fmt: skip
"""Arguments that decide memory and that no trainer of the library has, with the value at which they do nothing."""
STATE_TYPES = {"bfloat16": "bf16", "uint8": "fp8", "float32": "fp32", "float16": "fp16", "half": "fp16"}
"""Types of optimizer states as a dump prints them -> as flags say them."""
TORCH_SOFTMAX = "no_masked_softmax_fusion"
"""Of attention with scores in memory alone: kernels of flash attention have a softmax of their own."""
OLD = ("checkpoint_activations", "DDP_impl", "activations_checkpoint_method", "distribute_checkpointed_activations")
"""Arguments that Megatron-LM had until 2022."""


def trainer_of(found: Arguments, model: ModelSpec) -> str:
    """Trainer whose facts the arguments ask for, with its options."""
    if found.get("deepspeed") or found.get("zero_stage") is not None:
        name = "megatron-deepspeed"
        if zero_of(found) > 1 or found.number("ds_sequence_parallel_size", 1) > 1:  # no pipeline engine: ZeRO's own, and Ulysses
            name = "deepspeed"
            found.notes.append("trainer deepspeed: ZeRO above 1 and Ulysses sequence parallelism run without its pipeline engine")
    elif any(found.get(one) for one in OLD) and found.get("transformer_impl") != "transformer_engine" and not model.is_moe:
        name = "megatron-2021"
        found.notes.append("trainer megatron-2021: its arguments are those of Megatron-LM until 2022")
    else:
        name = "megatron-fsdp" if zero_of(found) > 1 else "nemo" if found.get("tp_comm_overlap") else "megatron"
    known, said = load_trainer(name), _options(found, model)
    if name == "deepspeed" and not said["attention_kernel"] and found.get("transformer_impl") != "transformer_engine":
        said["attention_kernel"] = "unfused"  # that of Megatron-DeepSpeed by itself, with scores in memory
    wanted = {key: value for key, value in said.items() if value in known.choices.options.get(key, {})}
    spelled = spell(name, {key: value for key, value in wanted.items() if changes(name, key, value)})
    if found.get(TORCH_SOFTMAX) and load_trainer(spelled).kernels.attention == "unfused":
        found.notes.append(
            f"{found.spelled(TORCH_SOFTMAX)}: attention is unfused and priced with the fused softmax; torch's own is slower and "
            "may keep scores in fp32 too, 4 bytes each"
        )
    if found.get("no_bias_swiglu_fusion") and model.gated and found.get("recompute_granularity") != "full":
        found.notes.append("--no-bias-swiglu-fusion: priced with the fused one; torch's keeps 2 bytes more per value of the MLP")
    if name == "deepspeed" and model.num_kv_heads < model.num_heads:
        more = 4 * (model.num_heads - model.num_kv_heads) * model.head_dim // int(found.number("tensor_model_parallel_size", 1))
        found.notes.append(
            "keys and values: Megatron-DeepSpeed repeats them for all query heads and keeps them so, which the plan does not have: "
            f"memory comes out too low by {more} bytes a token and layer"
        )
    if found.get("DDP_impl") == "torch" and not found.get("deepspeed"):
        found.notes.append(
            f"{found.spelled('DDP_impl')}: torch's DistributedDataParallel keeps buckets, a second copy of the gradients in their "
            "type, which the plan does not have: memory comes out too low by up to 2 bytes a parameter of 16 bits"
        )
    if has_fsdp(found) and found.get("fp8_param_gather") and precision_of(found) in FP8_WEIGHTS:
        found.notes.append(FSDP_IN_8_BITS)
    if found.get("use_torch_fsdp2"):
        found.notes.append("use_torch_fsdp2: torch's FSDP2 shards weights, gradients and states, priced as Megatron-FSDP does so")
    wide = load_trainer(spelled).traffic.gradient_reduce_bytes > 2
    if found.get("fp16") and wide and zero_of(found) < 2 and not found.get("accumulate_allreduce_grads_in_fp32"):
        found.notes.append("gradients are in fp16, and so they are in memory; their reduction is priced in fp32, twice as long")
    _note_masks(found)
    return spelled


def _note_gathered(found: Arguments, model: ModelSpec) -> None:
    """Says what the dispatcher that Megatron has by default gathers.  [moe/token_dispatcher.py, MoEAllGatherTokenDispatcher]"""
    ranks = found.number("expert_model_parallel_size", 1)
    other = found.get("moe_token_dispatcher_type", "allgather") != "allgather" or found.get("moe_enable_deepep")
    if ranks > 1 and not (other or found.dense_masks):
        tokens = found.number("micro_batch_size", 1) * found.number("seq_length") // found.number("context_parallel_size", 1)
        size = 4 * tokens * ranks * model.hidden_size / GIB
        found.notes.append(
            f"experts by allgather, the default: it gathers tokens of all {ranks} ranks; priced as alltoall, without {size:.1f} GiB"
        )


def _note_masks(found: Arguments) -> None:
    """Says how much the masks take that Megatron's data loader makes of long sequences: a byte for each pair of tokens."""
    without = any(found.get(one) for one in ("no_create_attention_mask_in_dataloader", "dataloader_inter_document_masking"))
    without = without or found.get("create_attention_mask_in_dataloader") is False
    size = found.number("micro_batch_size", 1) * found.number("seq_length") ** 2 / GIB
    if size >= 1.0 and not without and not found.get("deepspeed"):
        off = "--no-create-attention-mask-in-dataloader leaves them out"
        found.notes.append(f"masks of the data loader, {size:.0f} GiB on each GPU, are not priced; {off}")


GRADIENT_OF_LOGITS = (
    "loss of Transformer Engine: 6 bytes a logit, as from 2.18 on; before 2.18 it keeps 2 (loss_fusion=in_place), and the last "
    "stage comes out too large"
)
"""The note on Transformer Engine's loss, whose release decides what is kept for the backward pass."""


FSDP_IN_8_BITS = "weights lie in 8 bits between steps, in the plan in 16: too high by 1 byte for each that a rank holds"
"""The note on Megatron-FSDP with fp8_param_gather."""
REMAINDERS = (
    "master weights in fp32: Transformer Engine keeps 16 bits of each beside its weight from 2.1 on, and memory comes out too high "
    "by 2 bytes for each parameter whose states a rank holds"
)
"""The note on the optimizer that knows of precisions.  [core/optimizer/optimizer_config.py, store_param_remainders]"""


def loss_fusion(fused: Any, impl: Any) -> str:
    """The option of a loss from cross_entropy_loss_fusion and cross_entropy_fusion_impl, which is native where nothing is said."""
    return "off" if not fused else "on" if impl == "te" else "native"


def changes(name: str, key: str, value: str) -> bool:
    """Whether an option says another thing than the trainer by itself."""
    return load_trainer(name) != load_trainer(spell(name, {key: value}))


def _options(found: Arguments, model: ModelSpec) -> dict[str, str]:
    flex = found.get("moe_token_dispatcher_type") == "flex"
    backend = found.get("moe_flex_dispatcher_backend") or "deepep"
    graphs = (
        found.get("cuda_graph_impl") not in (None, "none")
        or found.get("enable_cuda_graph")
        or found.get("external_cuda_graph")
    )
    loss = loss_fusion(found.get("cross_entropy_loss_fusion"), found.get("cross_entropy_fusion_impl"))
    if loss == "on":
        found.notes.append(GRADIENT_OF_LOGITS)
    if found.get("cross_entropy_loss_fusion") and found.get("cross_entropy_fusion_impl") == "linear":
        found.notes.append("loss: priced with its logits in memory, which --cross-entropy-fusion-impl linear does not keep")
    plain = found.get("attention_backend") in ("unfused", "local", "AttnBackend.unfused", "AttnBackend.local")
    local = found.get("transformer_impl") == "local"
    if precision_of(found) == "fp32":
        plain = True
        found.notes.append("fp32, as neither --bf16 nor --fp16 is given: attention unfused, which alone computes in it")
    if _keeps_scores(found):
        plain = True
        found.notes.append("attention unfused: in this fork of BigCode scores stay in memory without --use-flash-attn")
    if found.get("fp16") and found.get("accumulate_allreduce_grads_in_fp32") and not found.dumped:
        found.notes.append(
            "gradients priced in fp16 with an fp32 copy of each shard; --accumulate-allreduce-grads-in-fp32 keeps all in fp32"
        )
    flash = _old_flash(found) and precision_of(found) != "fp32"
    said = {
        "attention_kernel": "fa2" if flash else "unfused" if plain and not local else "",
        "transformer_impl": "local" if local else "",
        "dropout": "on" if drops(found) else "off",
        "gradient_overlap": "on" if found.get("overlap_grad_reduce") else "off",
        "gradient_dtype": gradient_type(found),
        "loss_fusion": loss,
        "cuda_graphs": "layers" if graphs else "none",
        "deepspeed_layers": "2023" if any(found.get(one) for one in SINCE_2023) else "2022",
        "fp8_attention": "on" if _fp8_attention(found) else "off",
        "fp8_param_gather": "on" if gathers_fp8(found) else "off",
    }
    if model.is_moe:
        _note_gathered(found, model)
        said |= {
            "expert_dispatch": str(backend) if flex or found.get("moe_enable_deepep") else "alltoall",
            "expert_overlap": "on" if found.get("overlap_moe_expert_parallel_comm") else "off",
            "fused_experts": "on" if found.get("use_transformer_engine_op_fuser") else "off",
            "router_dtype": "fp32" if found.get("moe_router_dtype") in ("fp32", "fp64") else "bf16",
            "expert_masks": found.dense_masks,
        }  # fmt: skip
    return said


def _fp8_attention(found: Arguments) -> bool:
    """Whether attention computes in fp8 too."""
    asked = found.get("fp8_dot_product_attention") or found.get("fp8_multi_head_attention")
    return bool(asked) and precision_of(found).startswith(("fp8", "mxfp8"))


def _old_flash(found: Arguments) -> bool:
    return any(found.get(one) for one in FLASH) and found.get("transformer_impl") != "transformer_engine"


def _keeps_scores(found: Arguments) -> bool:
    """Whether it is BigCode's fork without its switch of flash attention.  [bigcode-project/Megatron-LM, model/transformer.py]"""
    file = str(found.get("tokenizer_type", "")).startswith("TokenizerFromFile")
    fork = file or any(one in found for one in BIGCODE) or ("fim_rate" in found and "fim_data" not in found)
    other = found.get("transformer_impl") == "transformer_engine" or any(found.get(one) for one in FLASH)
    return fork and not (other or found.dumped or found.get("attention_backend"))


def drops(found: Arguments) -> bool:
    """Whether dropout is on: 0.1 where it is not given."""
    return any(str(found.get(name, "0.1")).strip("0.") != "" for name in ("hidden_dropout", "attention_dropout"))


def has_fsdp(found: Arguments) -> bool:
    """Whether Megatron-FSDP shards it, by today's name or the older one."""
    return bool(found.get("use_megatron_fsdp") or found.get("use_custom_fsdp"))


def zero_of(found: Arguments) -> int:
    """State sharding: the distributed optimizer's, what Megatron-FSDP shards, by default all, or DeepSpeed's stage."""
    for name, usual in NOT_PRICED.items():
        still = name.endswith("_param_gather") and (found.dumped or precision_of(found) in ("bf16", "fp16", "fp32"))
        still = still or (name == "fp8_param_gather" and (gathers_fp8(found) or has_fsdp(found)))
        if not still and str(found.get(name, usual)).lower() != usual.lower():
            said = f"{found.spelled(name)} changes what states take on a GPU, which is not priced"
            raise PlannerError(f"{found.where}: {said}; --set {name}={usual} imports the job without it")
    if found.get("use_torch_fsdp2"):
        return 2 if found.get("torch_fsdp2_no_reshard_after_forward") else 3
    if has_fsdp(found):
        strategy = str(found.get("data_parallel_sharding_strategy", "no_shard" if found.dumped else "optim_grads_params"))
        if strategy not in SHARDED:
            known = ", ".join(SHARDED)
            raise PlannerError(
                f"{found.where}: data_parallel_sharding_strategy is {shown(strategy)}; a plan knows {known}"
            )
        return SHARDED[strategy]
    if found.get("deepspeed") or found.get("zero_stage") is not None:
        return _deepspeed_stage(found)
    sharded = any(found.get(one) for one in ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer"))
    return int(sharded or str(found.get("optimizer")).startswith("dist_"))


def gathers_fp8(found: Arguments) -> bool:
    """Whether weights lie in fp8 between the steps of the distributed optimizer."""
    sharded = found.get("use_distributed_optimizer") and not has_fsdp(found)
    return bool(sharded and found.get("fp8_param_gather") and precision_of(found) in FP8_WEIGHTS and not found.number("lora_r"))


def _deepspeed_stage(found: Arguments) -> int:
    """The stage, as its configuration or its flag says it; in bf16 DeepSpeed's own optimizer shards states at stage 0 too."""
    stage = found.number("zero_stage")
    if stage == 0 and found.get("bf16"):
        found.notes.append("zero 1: in bf16 DeepSpeed's BF16_Optimizer shards optimizer states at stage 0 too")
        return 1
    return stage


def gradient_type(found: Arguments) -> str:
    """Type that gradients are added up in.  [arguments.py, validate_args]"""
    if has_fsdp(found):
        said = str(found.get("megatron_fsdp_main_grads_dtype", "auto"))
        if said == "auto" and not found.get("grad_reduce_in_bf16"):
            found.notes.append(
                "Megatron-FSDP adds gradients up in fp32 (from 0.19 on only with --megatron-fsdp-main-grads-dtype)"
            )
        return "bf16" if STATE_TYPES.get(said, said) == "bf16" or found.get("grad_reduce_in_bf16") else "fp32"
    if found.get("use_torch_fsdp2"):  # those of the weights  [torch_fully_sharded_data_parallel.py]
        return "bf16"
    main = str(found.get("main_grads_dtype", "fp32"))
    low = STATE_TYPES.get(main, main) == "bf16" and not found.get("accumulate_allreduce_grads_in_fp32")
    return "bf16" if found.get("grad_reduce_in_bf16") or low else "fp32"


def optimizer_of(found: Arguments) -> str:
    """Optimizer with the type of its states. Raises PlannerError for types that a plan does not know."""
    name = str(found.get("optimizer", "adam")).removeprefix("dist_")
    name = "adam" if name in ("adamw", "cpu_adam", "fusedadam", "fusedadamw") else name
    if found.get("use_bnb_optimizer") or OPTIMIZERS.get(name.replace("-", "_")) == "adam_8bit":
        return "adam_8bit"
    kinds = ["fp32", "fp32", "fp32"]
    if found.get("use_precision_aware_optimizer"):
        given = [str(found.get(one, "fp32")) for one in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")]
        kinds = [STATE_TYPES.get(one, one) for one in given]
        wide = found.get("fp8") and found.get("fp8_recipe") not in (None, "delayed")
        if found.get("bf16") and not (wide or found.get("fp4") or found.get("optimizer_cpu_offload")):
            found.notes.append(REMAINDERS)
    moments = {"bf16" if one == "fp16" else one for one in kinds[:2]}
    if len(moments) > 1 or kinds[2] != "fp32":
        raise PlannerError(
            f"{found.where}: moments in {kinds[0]} and {kinds[1]}, master weights in {kinds[2]}; a plan knows master weights in "
            "fp32 and one type for both moments"
        )
    return core_settings.BY_MOMENTS.get((name, moments.pop()), name)


def precision_of(found: Arguments) -> str:
    """Precision of linear layers."""
    if found.get("fp4"):
        return "nvfp4"
    if found.get("fp8"):
        recipe = str(found.get("fp8_recipe", "delayed"))
        known = {"delayed": "fp8", **{name: one for one, (_, name) in core_settings.RECIPES.items() if one != "nvfp4"}}
        if recipe not in known:
            raise PlannerError(f"{found.where}: fp8_recipe is {shown(recipe)}; a plan knows {', '.join(known)}")
        return known[recipe]
    return "fp16" if found.get("fp16") else "bf16" if found.get("bf16") else "fp32"


def of_units(layers: int, each: float = 0.0, kept: float = 0.0) -> str:
    """Note about uniform recompute of several ``layers`` at once, whose activations of ``each`` in bytes are there together, and
    between which ``kept`` bytes of inputs are not.  [megatron/core/transformer/transformer_block.py: _checkpointed_forward]"""
    by = f" by up to {(layers - 1) * each / GIB:.1f} GiB" if each else ""
    high = f" by up to {kept / GIB:.1f} GiB" if kept else ""
    what = f"full recompute in units of {layers} layers is taken as unit by unit: the backward pass has the activations of all"
    return f"{what} {layers} at once, memory comes out too low{by}, and only one input of each {layers} is kept: too high{high}"


def units_at_once(found: Arguments, model: ModelSpec, layout: Mapping[str, int]) -> list[str]:
    """That note with its sizes on the first stage.  [Korthikanti 2022, equations 1, 2 and 4]"""
    pp, vpp, tp = layout["pp"], layout["vpp"], layout["tp"]
    layers = -(-model.num_layers // pp // vpp)
    unit = min(found.number("recompute_num_layers"), layers)
    whole = 1.0 / tp if found.get("sequence_parallel") else 1.0  # what tensor parallelism alone does not split
    one = found.number("seq_length") * found.number("micro_batch_size", 1) / layout["cp"] * model.hidden_size
    chunks = pp if vpp == 1 else pp * vpp + pp - 1  # in flight
    kept = (layers + -layers // unit) * chunks * 2.0 * one * whole if unit else 0.0
    return [of_units(unit, (10.0 * whole + 24.0 / tp) * one, kept)] * (unit > 1)
