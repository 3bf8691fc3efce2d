"""Gemma 1 to 3 in Megatron-Bridge: a provider each, with norms after attention and MLP, scaled embeddings, softcaps and windows.

Read in megatron-bridge 0.6.2, models/gemma/gemma_provider.py, gemma2_provider.py and gemma3_provider.py, and their bridges.
"""

import math

from planner.layout import CpMethod
from planner.model import ModelSpec
from planner.trainers.bundle.quoting import Expression
from planner.trainers.bundle.target import ExportJob
from planner.trainers.megatron.core_settings import Fields

PROVIDERS = {
    1: ("GemmaModelProvider", "gemma.gemma_provider"), 2: ("Gemma2ModelProvider", "gemma.gemma2_provider"),
    3: ("Gemma3ModelProvider", "gemma.gemma3_provider"),
}  # fmt: skip
"""Generation -> class and module below megatron.bridge.models."""


def generation(m: ModelSpec) -> int:
    """1 to 3; 0 for a model that is no Gemma."""
    if not (m.constants and m.constants.scaled_embedding and m.gated and m.activation == "gelu") or m.is_moe or m.is_mla:
        return 0
    if m.norms_per_layer == 2:
        return 0 if m.qk_norm or m.window else 1
    return (3 if m.qk_norm else 2) if m.norms_per_layer == 4 and m.window else 0


def refusals(job: ExportJob) -> list[str]:
    """What its providers cannot run of a Gemma."""
    m, cp, which, found = job.model, job.layout.cp, generation(job.model), []
    if which == 2 and cp > 1:
        found.append(f"cp {cp}: Gemma2DotProductAttention, which has the softcap, raises with context parallelism; use cp 1")
    if which == 3 and cp > 1 and job.layout.cp_method == CpMethod.RING:
        found.append(f"cp {cp} as a ring: Transformer Engine has windows with --cp-method a2a or allgather alone")
    windowed = {2: (m.num_layers + 1) // 2, 3: m.num_layers - m.num_layers // 6}.get(which, m.num_windowed_layers)
    if m.num_windowed_layers != windowed:
        found.append(
            f"{m.name} has {m.num_windowed_layers} layers with a window, and Gemma{which}ModelProvider gives {windowed} of its"
            f" {m.num_layers} one; use that many"
        )
    return found


def fields(m: ModelSpec) -> Fields:
    """Fields of the provider that differ from those of a GPT model; None: not written."""
    known, which = m.constants, generation(m)
    assert known is not None
    found: Fields = {
        "activation_func": Expression("fast_gelu"), "bias_activation_fusion": False, "layernorm_zero_centered_gamma": True,
        "window_attn_skip_freq": None,
    }  # fmt: skip
    scale = known.query_scale or m.head_dim
    if which == 2:
        found |= {
            "query_pre_attn_scalar": int(scale), "attn_logit_softcapping": known.attention_softcap,
            "final_logit_softcapping": known.logit_softcap,
        }  # fmt: skip
    if which == 3:
        found |= {
            # Its attention takes one off the window itself and turns layers by their number.
            "window_size": m.window, "interleaved_attn_pattern": (5, 1), "softmax_scale": 1.0 / math.sqrt(scale),
            "rotary_base": (int(known.local_rope_theta or known.rope_theta), int(known.rope_theta)),
            "seq_len_interpolation_factor": None,
            "rope_scaling_factor": known.rope_scaling.factor if known.rope_scaling else 1.0,
        }  # fmt: skip
    return found
