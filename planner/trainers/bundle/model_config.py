"""A model's architecture as the config.json of Hugging Face transformers: what front ends and servers read sizes from.

Every file written here is read back with planner.hugging_face before it is given out: the family whose file means exactly
the plan's model is taken, and no file is written when there is none.
"""

import json
from collections.abc import Callable
from typing import Any

from planner.errors import PlannerError
from planner.model import ModelSpec, from_hugging_face, to_dict

Config = dict[str, Any]
_NOT_ARCHITECTURE = ("name", "source", "published_parameters", "published_active_parameters")


def model_config(model: ModelSpec) -> Config | None:
    """The config.json that describes exactly this model; None when no family of transformers known here does."""
    wanted = _architecture(model)
    for kind, (class_name, table, more) in _FAMILIES.items():
        if kind == "deepseek_v3" and not model.mtp_layers:  # the version with prediction modules
            continue
        head = {"architectures": [class_name], "model_type": kind, "dtype": "bfloat16"}
        config = {**head, **_fields(model, table), **more(model)}
        try:
            if _architecture(from_hugging_face(config, name=model.name)) == wanted:
                return config
        except PlannerError:
            continue
    return None


def config_text(model: ModelSpec) -> str | None:
    """The file's text; None as for model_config."""
    config = model_config(model)
    return None if config is None else json.dumps(config, indent=2) + "\n"


def family(model: ModelSpec) -> str | None:
    """Name of the family (model_type); None as for model_config."""
    config = model_config(model)
    return None if config is None else str(config["model_type"])


def _architecture(model: ModelSpec) -> dict[str, Any]:
    """Without the width of dense layers where there are none."""
    skipped = _NOT_ARCHITECTURE if model.num_plain_layers else (*_NOT_ARCHITECTURE, "ffn_size")
    return {key: value for key, value in to_dict(model).items() if key not in skipped}


_SIZES = {
    "hidden_size": "hidden_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "intermediate_size": "ffn_size",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_sequence_length", "hidden_act": "activation",
    "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": "top_k", "moe_intermediate_size": "expert_ffn_size"}
_LLAMA = {**_SIZES, "attention_bias": "linear_bias", "mlp_bias": "linear_bias"}
"""Its attention_bias also puts a bias on the output projection, so biases of queries, keys and values alone are Qwen's."""
_MISTRAL = {**_SIZES, "sliding_window": "window"}
_ROUTED = {**_EXPERTS, "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
           "first_k_dense_replace": "num_dense_layers"}  # fmt: skip
_DEEPSEEK = {
    **_SIZES, "mlp_bias": "linear_bias", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim", "q_lora_rank": "q_lora_rank",
    "num_nextn_predict_layers": "mtp_layers",
}  # fmt: skip
_UNSET = ("sliding_window", "q_lora_rank", "n_shared_experts")
"""Keys that are null where the model has nothing of the kind."""


def _fields(model: ModelSpec, table: dict[str, str]) -> Config:
    """Values of a table of key in config.json -> field of the model."""
    found = {key: getattr(model, field) for key, field in table.items()}
    return {key: None if key in _UNSET and not value else value for key, value in found.items()}


def _qwen(m: ModelSpec) -> Config:
    """Windows start at layer max_window_layers."""
    return {"use_sliding_window": m.window > 0, "max_window_layers": m.num_layers - m.num_windowed_layers}


def _qwen_experts(m: ModelSpec) -> Config:
    return {**_qwen(m), "mlp_only_layers": list(range(m.num_dense_layers)), "norm_topk_prob": True}


def _deepseek(m: ModelSpec) -> Config:
    return {
        "attention_bias": m.linear_bias or m.qkv_bias,
        **({**_fields(m, _ROUTED), "moe_layer_freq": 1} if m.is_moe else {}),
    }


def _gemma(m: ModelSpec) -> Config:
    """The pattern of windowed and full layers that the counts allow; Gemma 3 repeats five windowed and one full."""
    full = m.num_layers - m.num_windowed_layers
    step = 2 if m.qk_norm is False else max(m.num_layers // full, 1) if full else m.num_layers + 1
    kinds = ["full_attention" if i % step == step - 1 else "sliding_attention" for i in range(m.num_layers)]
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "layer_types": kinds}


def _nothing(_: ModelSpec) -> Config:
    return {}


_QWEN3 = {**_MISTRAL, "attention_bias": "qkv_bias"}
_GEMMA = {**_MISTRAL, "query_pre_attn_scalar": "head_dim"}
_FAMILIES: dict[str, tuple[str, dict[str, str], Callable[[ModelSpec], Config]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA, _nothing),
    "mistral": ("MistralForCausalLM", _MISTRAL, _nothing),
    "qwen2": ("Qwen2ForCausalLM", _MISTRAL, _qwen),
    "qwen3": ("Qwen3ForCausalLM", _QWEN3, _qwen),
    "mixtral": (
        "MixtralForCausalLM",
        _MISTRAL
        | {"num_local_experts": "num_experts", "num_experts_per_tok": "top_k", "intermediate_size": "expert_ffn_size"},
        _nothing,
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_QWEN3, **_EXPERTS, "num_experts": "num_experts", "decoder_sparse_step": "moe_layer_interval"},
        _qwen_experts,
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _DEEPSEEK, _deepseek),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _DEEPSEEK, _deepseek),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        _SIZES
        | _ROUTED
        | {"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm", "num_nextn_predict_layers": "mtp_layers"},
        _nothing,
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        _MISTRAL
        | {"num_local_experts": "num_experts", "num_experts_per_tok": "top_k", "attention_bias": "linear_bias"},
        _nothing,
    ),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA, _gemma),
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA, _gemma),
    "nemotron": ("NemotronForCausalLM", _LLAMA, _nothing),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": "hidden_size", "n_positions": "max_sequence_length", "n_inner": "ffn_size", "n_head": "num_heads",
         "n_layer": "num_layers", "vocab_size": "vocab_size", "tie_word_embeddings": "tied_embeddings"},
        lambda m: {"activation_function": "gelu_new"},
    ),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": "hidden_size", "word_embed_proj_dim": "hidden_size", "ffn_dim": "ffn_size",
         "max_position_embeddings": "max_sequence_length", "num_attention_heads": "num_heads",
         "num_hidden_layers": "num_layers", "vocab_size": "vocab_size", "activation_function": "activation",
         "tie_word_embeddings": "tied_embeddings", "enable_bias": "linear_bias"},
        _nothing,
    ),
}  # fmt: skip
"""model_type -> class of transformers, its fields, and those that are computed; the first whose file means the model is taken."""
