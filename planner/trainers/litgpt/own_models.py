"""Models as LitGPT builds them: its fields with their defaults, of a model_config or of a name that no preset has."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.model import ModelSpec
from planner.trainers.reading.configuration import known_model
from planner.trainers.reading.python_text import tree_or_none
from planner.trainers.reading.settings import beside

USUAL: dict[str, Any] = {
    "block_size": 4096, "n_layer": 16, "n_embd": 4096, "vocab_size": 50254, "padding_multiple": 512, "padded_vocab_size": None,
    "norm_class_name": "LayerNorm", "norm_qk": False, "norm_qk_type": "default", "post_attention_norm": False,
    "post_mlp_norm": False, "parallel_residual": True, "shared_attention_norm": False, "n_head": 32, "head_size": None,
    "n_query_groups": None,
    "attn_bias": False, "sliding_window_size": None, "sliding_window_indices": None, "intermediate_size": None,
    "moe_intermediate_size": None, "bias": True, "mlp_class_name": "GptNeoxMLP", "n_expert": 0, "n_shared_expert": None,
    "n_expert_per_token": 0, "first_k_dense_replace": None, "norm_1": True, "norm_2": True,
}  # fmt: skip
"""What decides sizes, and its defaults.  [litgpt/config.py, Config]"""
QUIET = {
    "name", "hf_config", "org", "norm_eps", "attention_scores_scalar", "rope_base", "rotary_percentage", "rope_condense_ratio",
    "rope_adjustments", "rope_interleave", "rope_local_base_freq", "rope_indices", "rope_n_elem", "gelu_approximate",
    "scale_embeddings", "lm_head_bias", "norm_topk_prob", "routed_scaling_factor", "n_expert_groups", "n_topk_groups",
    "n_topk_scores_per_group", "final_logit_softcapping",
}  # fmt: skip
"""What decides none."""


def built(said: Mapping[str, Any], name: str) -> ModelSpec | None:
    """The model of such fields; None where one is of a fork, or sizes are missing or no numbers."""
    if strange(said):
        return None
    of = {**USUAL, **{one: value for one, value in said.items() if value is not None}}
    try:
        found = _spec(of, name)
    except (PlannerError, TypeError, KeyError, ZeroDivisionError):
        return None
    return known_model(found, name)


def strange(said: Mapping[str, Any]) -> list[str]:
    """Fields that LitGPT does not have."""
    return [str(one) for one, value in said.items() if one not in USUAL and one not in QUIET and value not in (None, False)]


def _spec(of: Mapping[str, Any], name: str) -> ModelSpec:
    kind, heads, multiple = of["mlp_class_name"], of["n_head"], of["padding_multiple"]
    ffn = of["intermediate_size"] or 4 * of["n_embd"]
    experts: dict[str, Any] = {}
    if kind == "LLaMAMoE":
        each, shared = of["moe_intermediate_size"] or ffn, of["n_shared_expert"] or 0
        experts = {"num_experts": of["n_expert"], "top_k": of["n_expert_per_token"], "expert_ffn_size": each,
                   "num_shared_experts": shared, "shared_expert_ffn_size": shared * each,
                   "num_dense_layers": of["first_k_dense_replace"] or 0}  # fmt: skip
    norms = (of["norm_1"], of["norm_2"], of["post_attention_norm"], of["post_mlp_norm"])
    layers, window = of["n_layer"], of["sliding_window_size"] or 0
    windowed = sum((of["sliding_window_indices"] or [1] * layers)[:layers]) if window else 0
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=of["n_embd"], num_heads=heads, num_kv_heads=of["n_query_groups"] or heads,
        head_dim=of["head_size"] or of["n_embd"] // heads, ffn_size=ffn, max_sequence_length=of["block_size"],
        vocab_size=of["padded_vocab_size"] or -(-of["vocab_size"] // multiple) * multiple,
        gated={"GptNeoxMLP": False, "LLaMAMLP": True, "GemmaMLP": True, "LLaMAMoE": True}[kind],
        activation="gelu" if kind in ("GptNeoxMLP", "GemmaMLP") else "silu",
        norm={"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}[of["norm_class_name"]],
        norms_per_layer=max(1, sum(map(bool, norms)) - bool(of["shared_attention_norm"])),
        linear_bias=bool(of["bias"]), qkv_bias=bool(of["attn_bias"]), qk_norm=bool(of["norm_qk"]),
        qk_norm_spans="heads" if of["norm_qk"] and of["norm_qk_type"] == "olmo2" else "head",
        parallel_attention=bool(of["parallel_residual"]), window=window, num_windowed_layers=windowed, **experts,
    )  # fmt: skip


def called(name: str) -> ModelSpec | None:
    """The model that LitGPT's own list has under the last part of a name, and no preset; None = none."""
    known = library.read_yaml(Path(__file__).with_name("models.yaml"))
    last = name.rstrip("/").rpartition("/")[2]
    return built(known[last], last) if last in known else None


def of_a_checkout(name: str, path: Path) -> ModelSpec | None:
    """The model that the list of a checkout around a file has under a name, like that of a fork; None = none."""
    last = name.rstrip("/").rpartition("/")[2]
    file = beside(path, "litgpt/config.py", (".py",)) if last else None
    tree = tree_or_none(file)
    for one in (one for one in ast.walk(tree) if isinstance(one, ast.Call)) if tree is not None else ():
        said = {str(word.arg): word.value.value for word in one.keywords if isinstance(word.value, ast.Constant)}
        if getattr(one.func, "id", "") == "dict" and str(said.get("name", "")).removesuffix("{}") == last:
            loose = [word.arg for word in one.keywords if word.arg not in said and word.arg in USUAL]
            return None if loose else built(said, last)
    return None
