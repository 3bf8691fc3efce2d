"""A model's architecture as the config.json of Hugging Face transformers: what front ends and servers read sizes from.

Every file written here is read back with planner.hugging_face before it is given out: the family whose file means exactly
the plan's model is taken, and no file is written when there is none.
"""

from functools import lru_cache
from typing import Any

from planner.errors import PlannerError
from planner.model import ModelSpec, from_hugging_face, to_dict
from planner.trainers.bundle.quoting import json_text, yaml_from
from planner.trainers.bundle.target import ExportJob

_NOT_ARCHITECTURE = ("name", "source", "published_parameters", "published_active_parameters", "quantised", "constants")
_EPS = {"nemotron": "norm_eps", "gpt2": "layer_norm_epsilon", "opt": ""}
"""Key of the norms' epsilon where it is not Llama's; OPT has none."""
_SCALING = {"original_length": "original_max_position_embeddings", "kind": "rope_type"}
_OF_KIND = {
    "linear": ("kind", "factor"), "llama3": ("kind", "factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("kind", "factor", "original_length", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}  # fmt: skip


def model_config(model: ModelSpec) -> dict[str, Any] | None:
    """The config.json that describes exactly this model; None when no family of transformers known here does."""
    sizes = _sizes(model, _scaled(model))
    return sizes and sizes | constant_keys(model, sizes["model_type"])


def _scaled(model: ModelSpec) -> bool | None:
    """Whether it is of Gemma's families, which alone scale embeddings; None where its constants are not known."""
    return model.constants.scaled_embedding if model.constants else None


@lru_cache(maxsize=64)
def _sizes(model: ModelSpec, scaled: bool | None) -> dict[str, Any] | None:
    """Without its constants, of which equal models may have different ones. ``scaled``: of ``_scaled``."""
    wanted = _architecture(model)
    for kind, keys in yaml_from("bundle", "families.yaml.j2", {"m": model}).items():
        if scaled is not None and scaled != kind.startswith("gemma"):
            continue
        config = {"architectures": [keys.pop("class")], "model_type": kind, "dtype": "bfloat16", **keys}
        try:
            if _architecture(from_hugging_face(config)) == wanted:
                return config
        except PlannerError:
            continue
    return None


def config_file(job: ExportJob) -> str:
    """Text of the config.json, whose longest sequence is at least the job's; a job whose model has no family has none."""
    longest = max(job.model.max_sequence_length, job.workload.sequence_length)
    return json_text({**(model_config(job.model) or {}), "max_position_embeddings": longest})


def family(model: ModelSpec) -> str | None:
    """Name of the family (model_type); None as for model_config."""
    config = _sizes(model, _scaled(model))
    return None if config is None else str(config["model_type"])


def constant_keys(model: ModelSpec, kind: str) -> dict[str, Any]:
    """Keys of config.json for the constants of a model, {} where they are not known."""
    known = model.constants
    if known is None:
        return {}
    found: dict[str, Any] = {_EPS.get(kind, "rms_norm_eps"): known.norm_eps}
    if model.position == "rope":
        found |= {"rope_theta": known.rope_theta, "rope_scaling": None}
        if known.rope_scaling:
            said = {name: getattr(known.rope_scaling, name) for name in _OF_KIND[known.rope_scaling.kind]}
            found["rope_scaling"] = {_SCALING.get(name, name): value for name, value in said.items() if value is False or value}
        found |= {"partial_rotary_factor": known.rotary_fraction} if known.rotary_fraction < 1 else {}
        found |= {"rope_local_base_freq": known.local_rope_theta} if known.local_rope_theta else {}
    if kind.startswith("gemma"):
        scales = {"query_pre_attn_scalar": known.query_scale, "attn_logit_softcapping": known.attention_softcap,
                  "final_logit_softcapping": known.logit_softcap}  # fmt: skip
        found |= {name: value for name, value in scales.items() if value}
    if known.router and kind in ("qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"):
        found["norm_topk_prob"] = known.router.normalised
    if known.router and kind in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        grouped = "group_limited_greedy" if known.router.groups > 1 else "greedy"
        found |= {
            "routed_scaling_factor": known.router.scale, "n_group": known.router.groups, "topk_group": known.router.top_groups,
            "scoring_func": known.router.score, "topk_method": "noaux_tc" if known.router.expert_bias else grouped,
        }  # fmt: skip
    return {key: value for key, value in found.items() if key}


def _architecture(model: ModelSpec) -> dict[str, Any]:
    """Without the width of dense layers where there are none."""
    skipped = _NOT_ARCHITECTURE if model.num_plain_layers else (*_NOT_ARCHITECTURE, "ffn_size")
    return {key: value for key, value in to_dict(model).items() if key not in skipped}
