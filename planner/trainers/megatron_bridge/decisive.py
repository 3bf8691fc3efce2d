"""Settings of Megatron-Bridge that make another model of a recipe's, that no plan has, or that stand in a list."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.trainers.megatron_bridge.recipes import SIZES
from planner.trainers.reading.given import Question
from planner.trainers.reading.values import not_priced

MATTERS = re.compile(
    r"model\.(?!hf|moe_router|moe_aux|moe_permute|moe_grouped|attention_backend|cross_entropy|calculate|apply_rope|bias_|gradient_acc|freeze"
    r"|seq_length|masked_softmax|persist|rotary|max_position|init_model|deallocate|cuda_graph_(scope|warmup)|make_vocab).*"
    r"|optimizer\.(main_\w+|exp_avg_sq_dtype|overlap_\w+)|ddp\.(fsdp\w*|outer\w*)|comm_overlap\.\w+"
    r"|mixed_precision\.(first_last|num_layers)\w+|train\.rampup\w*"
)
"""Settings that may change time or memory and are not read."""
LAYERS = re.compile(
    r"model\.(normalization|qk_layernorm|qk_l2_norm|add_bias_linear|add_qkv_bias|gated_linear_unit|activation_func|softmax_type"
    r"|multi_latent_attention|(q|kv)_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim|moe_layer_freq|moe_latent_size|linear_\w+"
    r"|experimental_attention_variant|dsa_indexer_(n_heads|head_dim|topk)|enable_mhc_connections|position_embedding_type"
    r"|heterogeneous_block_specs|is_hybrid_model|attention_output_gate|moe_shared_expert_gate|mtp_use_repeated_layer"
    r"|mtp_hybrid_override_pattern|transformer_layer_spec|window_attn_skip_freq)"
)
"""Settings of its layers."""
SAME = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "ffn_size", "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads", "kv_channels": "head_dim", "num_moe_experts": "num_experts", "qk_layernorm": "qk_norm",
    "moe_ffn_hidden_size": "expert_ffn_size", "moe_router_topk": "top_k", "vocab_size": "vocab_size", "q_lora_rank": "q_lora_rank",
    "moe_shared_expert_intermediate_size": "shared_expert_ffn_size", "kv_lora_rank": "kv_lora_rank", "v_head_dim": "v_head_dim",
    "qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim", "multi_latent_attention": "is_mla",
    "add_bias_linear": "linear_bias", "add_qkv_bias": "qkv_bias", "gated_linear_unit": "gated",
    "position_embedding_type": "position", "attention_output_gate": "attention_gate",
}  # fmt: skip
"""Fields of a model provider that a model has under another name."""
BUILT = ("num_layers", "ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk")
"""Those with which the model of a recipe is built otherwise, all else as it is."""
NOT_PRICED = {
    "ddp.num_distributed_optimizer_instances": (1,), "model.fine_grained_activation_offloading": (), "model.moe_paged_stash": (),
    "model.fp32_residual_connection": (), "model.distribute_saved_activations": (), "model.mtp_standalone": (),
    "model.num_microbatches_with_partial_activation_checkpoints": (), "model.hybrid_context_parallel": (),
    "model.cpu_offloading_weights": (), "model.tensor_parallel_num_weight_shards": (1,), "model.gtp_weight_remat_size": (1,),
    "model.expert_tensor_parallel_num_weight_shards": (1,), "model.expert_gtp_weight_remat_size": (1,),
    "model.hierarchical_context_parallel_sizes": (), "model.moe_expert_rank_capacity_factor": (), "model.use_kitchen": (),
    "optimizer.use_layer_wise_distributed_optimizer": (), "model.moe_layer_recompute": (), "mixed_precision.fp32": (),
}  # fmt: skip
"""Settings that decide memory or degrees and that no plan has, with the values at which they do nothing beside false and null."""
NONE = (None, False, "", 0, "none", "None", "false", "null")


Built = tuple[dict[str, Any], ModelSpec | None, list[Question], tuple[str, ...]]


def without_layers(settings: Mapping[str, Any], model: ModelSpec | None, said: bool) -> Built:
    """(Settings without those of the layers, the model with them, what is asked, notes); what the model has by itself is no size of
    its own. ``said``: the user names the model."""
    named = [one for one in settings if SIZES.fullmatch(one) or (LAYERS.fullmatch(one) and _says(settings[one]))]
    rest = {name: value for name, value in settings.items() if name not in named}
    own = [one for one in named if settings[one] is not None and not (model is not None and _has(model, one, settings[one]))]
    if said or not own:
        return rest, model, [], ()
    fields = {one.removeprefix("model."): settings[one] for one in own}
    plain = model is not None and model.linear is None and not model.window and not model.mtp_layers
    if plain and all(name in BUILT and isinstance(value, int) and value > 0 for name, value in fields.items()):
        assert model is not None
        if fields.get("num_layers", model.num_layers) > model.num_dense_layers and model.moe_layer_interval == 1:
            note = f"{', '.join(f'{name} {value}' for name, value in fields.items())}: all else as {model.name} has it"
            return rest, built(model, {SAME[name]: value for name, value in fields.items()}), [], (note,)
    about = f"{', '.join(list(fields)[:3])} make it a model of its own: a preset or a config.json like it"
    return rest, model, [Question(name="--model NAME", about=about)], ()


def built(model: ModelSpec, fields: Mapping[str, Any]) -> ModelSpec:
    """The model with these fields."""
    return dataclasses.replace(model, **fields, published_parameters=0.0, published_active_parameters=0.0)


def _says(value: Any) -> bool:
    return value not in (None, "", {}, [])


def _has(model: ModelSpec, name: str, value: Any) -> bool:
    """Whether a model has the value of a field by itself."""
    field = name.removeprefix("model.")
    if field == "normalization":
        return str(value).lower() == model.norm
    if field == "moe_layer_freq":
        return value == 1 and model.num_dense_layers == 0 and model.moe_layer_interval == 1
    if field == "softmax_type":
        return (str(value) == "vanilla") is not model.attention_sinks
    if field == "activation_func":
        return str(value).rpartition(".")[2].replace("swish", "silu") == model.activation
    if field == "window_attn_skip_freq":
        return bool(model.window)
    return field in SAME and getattr(model, SAME[field]) == value


def require_priced(path: Any, settings: Mapping[str, Any]) -> None:
    """Raises PlannerError for settings that no plan has."""
    found = [one for one, usual in NOT_PRICED.items() if settings.get(one) not in NONE and settings.get(one) not in usual]
    if found:
        raise not_priced(str(path), found, found)
    kind = str(settings.get("model.params_dtype", "")).rpartition(".")[2]
    if kind in ("float32", "fp32") and settings.get("mixed_precision", "") is None:
        raise PlannerError(f"{path}: weights in {shown(kind)} without mixed precision, which no plan of Megatron-Bridge has")
