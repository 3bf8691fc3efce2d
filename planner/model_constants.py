"""Numbers of a model that decide what it computes and neither time nor memory: norms, rotary positions, the rule of its router.

Exporters write them. Presets have theirs in profiles/model_constants.yaml, a config.json says its own.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from planner import library
from planner.model_names import named
from planner.record import record
from planner.schema import Positive, one_of, value_of, within

Count = Annotated[int, within(1, 10**9)]


@record
class RopeScaling:
    """How rotary positions are stretched beyond the length that the model was first trained with."""

    kind: Annotated[str, one_of("llama3", "yarn", "linear")]
    """llama3 and yarn stretch slow rotations alone, linear stretches all."""
    factor: Positive
    """By how much."""
    original_length: Count = 8192
    """Tokens of the longest sequence before; not of linear."""
    low_freq_factor: float = 1.0
    """llama3: rotations with fewer turns over the original length are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: those with more turns are left alone."""
    beta_fast: float = 32.0
    """yarn: the same as high_freq_factor."""
    beta_slow: float = 1.0
    """yarn: the same as low_freq_factor."""
    mscale: float = 0.0
    """yarn: weight of the logarithm of the factor in cosines and sines; 0: the usual 1."""
    mscale_all_dim: float = 0.0
    """yarn: that in the scale of the softmax."""
    truncate: bool = True
    """yarn: the border between both is a whole dimension."""


@record
class Router:
    """How experts are chosen and weighted."""

    score: Annotated[str, one_of("softmax", "sigmoid")] = "softmax"
    """Function of the logits."""
    normalised: bool = True
    """The weights of the chosen experts sum to one; with softmax the same as one over their logits alone."""
    expert_bias: bool = False
    """A bias per expert, moved by its load, joins the choice: balance without an auxiliary loss."""
    groups: Count = 1
    """Experts are in that many groups,"""
    top_groups: Count = 1
    """and a token visits those of so many."""
    scale: Positive = 1.0
    """Factor on the weights of routed experts."""


@record
class Constants:
    """All of them; a model whose constants nobody knows has none."""

    norm_eps: Positive
    """Added to the variance in every norm."""
    rope_theta: float = 0.0
    """Base of the rotary positions; 0 without them."""
    rotary_fraction: Annotated[float, within(0.0, 1.0)] = 1.0
    """Part of a head that is rotated."""
    local_rope_theta: float = 0.0
    """Base in layers with a window; 0: the same (Gemma 3 has another)."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the hidden size, and norms by one plus their weight (Gemma)."""
    query_scale: Annotated[float, within(0.0, 1e6)] = 0.0
    """Scores are divided by its root; 0: the width of a head."""
    attention_softcap: Annotated[float, within(0.0, 1e6)] = 0.0
    """Scores x become c tanh(x / c); 0: they stay (Gemma 2)."""
    logit_softcap: Annotated[float, within(0.0, 1e6)] = 0.0
    """The same of the logits."""
    rope_scaling: RopeScaling | None = None
    """None: positions are not stretched."""
    router: Router | None = None
    """None in a dense model."""


def constants_of_preset(name: str) -> Mapping[str, Any] | None:
    """What the table says of a preset, None where it says nothing. The first pattern that fits counts."""
    return next((one for patterns, one in _table().items() if named(name, patterns.split())), None)


@cache
def _table() -> dict[str, Any]:
    return library.read_yaml(library.profiles_directory() / "model_constants.yaml")


_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
_NUMBER = float | None


def constants_of_config(data: Mapping[str, Any], where: str, *, rotary: bool, router: Mapping[str, bool] | None) -> dict[str, Any]:
    """Fields of Constants that a config.json says, {} where it does not say them all or stretches positions in another way.

    ``router``: what the family's routers are where the file is silent, None without experts.
    """

    def number(keys: tuple[str, ...], source: Mapping[str, Any] = data) -> float | None:
        found = (value_of(_NUMBER, source.get(key), where, key) for key in keys)
        return next((float(one) for one in found if one is not None), None)

    eps = number(_EPS)
    said = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if eps is None or not isinstance(said, Mapping):
        return {}
    local = said.get("sliding_attention")
    said = said["full_attention"] if isinstance(said.get("full_attention"), Mapping) else said
    found: dict[str, Any] = {"norm_eps": eps, **_scales(data, number)}
    if rotary:
        scaling = _scaling(said, number)
        if scaling is None:
            return {}
        fraction = number(("partial_rotary_factor", "rotary_pct")) or number(("partial_rotary_factor",), said) or _rotated(number)
        inner = number(("rope_theta",), local) if isinstance(local, Mapping) else None
        found |= {
            "rope_theta": number(("rope_theta",), said) or number(("rope_theta", "rotary_emb_base")) or 10000.0,
            "rotary_fraction": fraction or 1.0, "local_rope_theta": inner or number(("rope_local_base_freq",)) or 0.0,
            "rope_scaling": scaling or None,
        }  # fmt: skip
    if router is not None:
        found["router"] = _router(data, router, number)
    return {name: value for name, value in found.items() if value is not None}


def _rotated(number: Any) -> float | None:
    """The fraction where a file gives both widths (MiniMax-M2)."""
    rotated, head = number(("rotary_dim",)), number(("head_dim",))
    return rotated / head if rotated and head else None


def _scales(data: Mapping[str, Any], number: Any) -> dict[str, Any]:
    """What scales embeddings, scores and logits in Gemma; {} in other families."""
    if not str(data.get("model_type", "")).startswith("gemma"):
        return {}
    query, head = number(("query_pre_attn_scalar",)), number(("head_dim",)) or 256.0
    return {
        "scaled_embedding": True, "query_scale": query if query and query != head else None,
        "attention_softcap": number(("attn_logit_softcapping",)), "logit_softcap": number(("final_logit_softcapping",)),
    }  # fmt: skip


def _scaling(said: Mapping[str, Any], number: Any) -> dict[str, Any] | None:
    """Fields of RopeScaling; {} where positions are as they are, None where another kind stretches them."""
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind in ("default", "mrope"):  # mrope: three coordinates of images, one of text
        return {}
    if kind not in ("llama3", "yarn", "linear") or number(("factor",), said) is None:
        return None
    names = {"original_length": "original_max_position_embeddings"}
    fields = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    values = {name: number((names.get(name, name),), said) for name in ("factor", "original_length", *fields)}
    found = {"kind": kind, **{name: value for name, value in values.items() if value is not None}}
    if "original_length" in found:
        found["original_length"] = int(found["original_length"])
    return found | ({"truncate": False} if said.get("truncate") is False else {})


def _router(data: Mapping[str, Any], family: Mapping[str, bool], number: Any) -> dict[str, Any]:
    """Fields of Router."""
    sigmoid = data.get("scoring_func") == "sigmoid" if "scoring_func" in data else family.get("sigmoid", False)
    method = data.get("topk_method")
    bias = method == "noaux_tc" if method else family.get("expert_bias", False)
    normalised = data.get("norm_topk_prob")
    return {
        "score": "sigmoid" if sigmoid else "softmax", "expert_bias": bias,
        "normalised": bool(family.get("normalised", False) if normalised is None else normalised),
        "groups": int(number(("n_group",)) or 1), "top_groups": int(number(("topk_group",)) or 1),
        "scale": number(("routed_scaling_factor",)) or 1.0,
    }  # fmt: skip
