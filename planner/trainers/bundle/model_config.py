"""A model's architecture as the config.json of Hugging Face transformers: what front ends and servers read sizes from.

Every file written here is read back with planner.hugging_face before it is given out: the family whose file means exactly
the plan's model is taken, and no file is written when there is none.
"""

from __future__ import annotations

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
    for kind, (class_name, write) in _WRITERS.items():
        config = {"architectures": [class_name], "model_type": kind, "dtype": "bfloat16", **write(model)}
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


def _base(m: ModelSpec) -> Config:
    return {
        "hidden_size": m.hidden_size, "num_hidden_layers": m.num_layers, "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_kv_heads, "head_dim": m.head_dim, "intermediate_size": m.ffn_size,
        "vocab_size": m.vocab_size, "max_position_embeddings": m.max_sequence_length, "hidden_act": m.activation,
        "tie_word_embeddings": m.tied_embeddings,
    }  # fmt: skip


def _llama(m: ModelSpec) -> Config:
    """Its attention_bias also puts a bias on the output projection, so biases of queries, keys and values alone are Qwen's."""
    return {**_base(m), "attention_bias": m.linear_bias, "mlp_bias": m.linear_bias}


def _mistral(m: ModelSpec) -> Config:
    return {**_base(m), "sliding_window": m.window or None}


def _qwen2(m: ModelSpec) -> Config:
    """Windows start at layer max_window_layers."""
    given = {"use_sliding_window": m.window > 0, "max_window_layers": m.num_layers - m.num_windowed_layers}
    return {**_base(m), **given, "sliding_window": m.window or None}


def _qwen3(m: ModelSpec) -> Config:
    return {**_qwen2(m), "attention_bias": m.qkv_bias}


def _mixtral(m: ModelSpec) -> Config:
    sizes = {"num_local_experts": m.num_experts, "num_experts_per_tok": m.top_k, "intermediate_size": m.expert_ffn_size}
    return {**_mistral(m), **sizes}


def _qwen3_moe(m: ModelSpec) -> Config:
    return {
        **_qwen3(m), "num_experts": m.num_experts, "num_experts_per_tok": m.top_k,
        "moe_intermediate_size": m.expert_ffn_size, "mlp_only_layers": list(range(m.num_dense_layers)),
        "decoder_sparse_step": m.moe_layer_interval, "norm_topk_prob": True,
    }  # fmt: skip


def _deepseek(m: ModelSpec) -> Config:
    shared = m.num_shared_experts
    mla = {name: getattr(m, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    bias = m.linear_bias or m.qkv_bias
    config = {
        **_base(m),
        "attention_bias": bias,
        "mlp_bias": m.linear_bias,
        **mla,
        "q_lora_rank": m.q_lora_rank or None,
        "num_nextn_predict_layers": m.mtp_layers,
    }
    if not m.is_moe:
        return config
    return {
        **config, "n_routed_experts": m.num_experts, "num_experts_per_tok": m.top_k,
        "moe_intermediate_size": m.expert_ffn_size, "n_shared_experts": shared or None,
        "first_k_dense_replace": m.num_dense_layers, "moe_layer_freq": 1,
    }  # fmt: skip


def _deepseek_v3(m: ModelSpec) -> Config:
    """The version with prediction modules."""
    return _deepseek(m) if m.mtp_layers else {}


def _glm4_moe(m: ModelSpec) -> Config:
    more = {"attention_bias": m.qkv_bias, "use_qk_norm": m.qk_norm, "num_nextn_predict_layers": m.mtp_layers}
    experts = {
        "n_routed_experts": m.num_experts, "num_experts_per_tok": m.top_k, "moe_intermediate_size": m.expert_ffn_size,
        "n_shared_experts": m.num_shared_experts, "first_k_dense_replace": m.num_dense_layers,
    }  # fmt: skip
    return {**_base(m), **more, **experts}


def _gpt_oss(m: ModelSpec) -> Config:
    experts = {"num_local_experts": m.num_experts, "num_experts_per_tok": m.top_k}
    return {**_base(m), **experts, "attention_bias": m.linear_bias, "sliding_window": m.window or None}


def _gemma(m: ModelSpec) -> Config:
    """The pattern of windowed and full layers that the counts allow; Gemma 3 repeats five windowed and one full."""
    full = m.num_layers - m.num_windowed_layers
    step = 2 if m.qk_norm is False else max(m.num_layers // full, 1) if full else m.num_layers + 1
    kinds = ["full_attention" if i % step == step - 1 else "sliding_attention" for i in range(m.num_layers)]
    act = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
    return {
        **_base(m),
        **act,
        "sliding_window": m.window or None,
        "layer_types": kinds,
        "query_pre_attn_scalar": m.head_dim,
    }


def _gpt2(m: ModelSpec) -> Config:
    return {
        "n_embd": m.hidden_size, "n_positions": m.max_sequence_length, "n_inner": m.ffn_size, "n_head": m.num_heads,
        "n_layer": m.num_layers, "vocab_size": m.vocab_size, "activation_function": "gelu_new",
        "tie_word_embeddings": m.tied_embeddings,
    }  # fmt: skip


def _opt(m: ModelSpec) -> Config:
    return {
        "hidden_size": m.hidden_size, "word_embed_proj_dim": m.hidden_size, "ffn_dim": m.ffn_size,
        "max_position_embeddings": m.max_sequence_length, "num_attention_heads": m.num_heads,
        "num_hidden_layers": m.num_layers, "vocab_size": m.vocab_size, "activation_function": m.activation,
        "tie_word_embeddings": m.tied_embeddings, "enable_bias": m.linear_bias,
    }  # fmt: skip


_WRITERS: dict[str, tuple[str, Callable[[ModelSpec], Config]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek),
    "glm4_moe": ("Glm4MoeForCausalLM", _glm4_moe),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
    "gemma2": ("Gemma2ForCausalLM", _gemma),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma),
    "nemotron": ("NemotronForCausalLM", _llama),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "opt": ("OPTForCausalLM", _opt),
}
"""model_type -> class of transformers and the writer of its fields; the first whose file means the model is taken."""
