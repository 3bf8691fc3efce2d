"""Reads the architecture in a Hugging Face config.json by the table profiles/model_families.yaml; refuses all other families."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError
from planner.schema import value_of, within

_SIZE, _SIZE_OR_NONE = Annotated[int, within(1, 10**9)] | None, Annotated[int, within(0, 10**9)] | None
_FLAG, _LIST = bool | None, list[Any] | None
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Parts of field names that announce layers other than attention and MLP; a count of parameters would be wrong.
_FOREIGN = (
    *("ssm", "mamba", "linear_attn", "linear_attention", "linear_conv", "linear_num", "recurrent", "rwkv", "lru_width"),
    *("full_attention_interval", "attn_layer_period", "hybrid", "index_topk", "altup", "per_layer_input"),
)
_NOT_TEXT = ("vision", "audio", "image", "video", "projector", "quantization")

Fields = dict[str, Any]


@cache
def table() -> dict[str, Any]:
    """The table: ``families`` by model_type, and the ``parts`` that they share."""
    return library.read_yaml(library.profiles_directory() / "model_families.yaml")


class Config:
    """The config.json with the checks that every family needs; errors name the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def error(self, text: str) -> PlannerError:
        """A sentence that starts with the file."""
        return PlannerError(f"{self.where}: {text}")

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first of the keys that has a value, an integer from 1 (from 0 where that is the default)."""
        kind = _SIZE_OR_NONE if default == 0 else _SIZE
        found = (value_of(kind, self.data.get(key), self.where, key) for key in keys)
        value: int | None = next((one for one in found if one is not None), default)
        if value is None:
            raise self.error(f"missing {' or '.join(keys)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A yes-or-no field."""
        value = value_of(_FLAG, self.data.get(key), self.where, key)
        return default if value is None else bool(value)

    def items(self, key: str) -> list[Any]:
        """A list, empty when absent."""
        return value_of(_LIST, self.data.get(key), self.where, key) or []

    def activation(self, keys: list[str], default: str) -> str:
        """The non-linearity, without the variants of its approximation."""
        name = next((self.data[key] for key in keys if self.data.get(key) is not None), default)
        if isinstance(name, str):
            if name in ("silu", "swish", "relu", "relu2"):
                return {"swish": "silu"}.get(name, name)
            if name.startswith("gelu"):
                return "gelu"
        raise self.error(f"the activation {str(name)[:40]!r} in {keys[0]} is not understood")

    def fields(self, rules: Mapping[str, str], found: Fields) -> Fields:
        """Adds fields of ModelSpec by the rules under ``keys`` of the table, in their order."""
        for field, rule in rules.items():
            text, _, default = (part.strip() for part in rule.partition("?"))
            keys = text.split()
            if field == "activation":
                found[field] = self.activation(keys, default)
            elif default in ("true", "false"):
                found[field] = self.flag(keys[0], default == "true")
            else:
                factors = [found[one] if one in found else int(one) for one in default.split(" * ") if one]
                found[field] = self.size(*keys, default=math.prod(factors) if factors else None)
        return found


def translate(config: Mapping[str, Any], *, where: str) -> Fields:
    """Fields of ModelSpec, without name and source. Raises PlannerError naming what is not understood."""
    if not isinstance(config, Mapping):
        raise PlannerError(f"{where}: expected a mapping of keys to values, found {type(config).__name__}")
    inner, kind = _text_part(config, where)
    reader, families = Config(inner, where), table()["families"]
    if kind not in families:
        if kind is None:
            raise reader.error("missing model_type")
        raise reader.error(f"model_type {kind[:60]!r} is not understood; understood are {', '.join(sorted(families))}")
    for key, value in inner.items():
        foreign = isinstance(key, str) and any(part in key for part in _FOREIGN)
        if foreign and value not in (None, False, 0) and not any(part in key for part in _NOT_TEXT):
            raise reader.error(f"{key[:60]} is not understood: it describes layers other than attention and MLP")
    fields: Fields = reader.fields(families[kind]["keys"], {}) | families[kind].get("values", {})
    for step in families[kind].get("steps", ()):
        fields |= STEPS[step](reader, fields)
    heads, hidden = fields["num_heads"], fields["hidden_size"]
    if "head_dim" not in fields:
        if reader.data.get("head_dim") is None and reader.data.get("kv_channels") is None and hidden % heads:
            raise reader.error(f"hidden_size {hidden} is not a multiple of the {heads} heads, and head_dim is missing")
        fields["head_dim"] = reader.size("head_dim", "kv_channels", default=max(hidden // heads, 1))
    return fields


def _text_part(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str | None]:
    """The language model's own section of a multimodal configuration, and its kind."""
    kind, inner = config.get("model_type"), config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        inner = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
        kind = text.get("model_type", kind)
    if kind is not None and not isinstance(kind, str):
        raise PlannerError(f"{where}: model_type must be text")
    return inner, kind


# --------------------------------------------------------------------- steps: what is worked out from several keys


def biases(c: Config, _: Fields) -> Fields:
    """Llama's two switches. The output bias of attention alone, h per layer, is left out."""
    attention, mlp = c.flag("attention_bias"), c.flag("mlp_bias")
    if mlp and not attention:
        raise c.error("mlp_bias without attention_bias is not understood")
    return {"linear_bias": attention and mlp, "qkv_bias": attention and not mlp}


def _window(c: Config, layers: int, size: int) -> Fields:
    """The window; ``layer_types`` decides how many layers use it, else ``layers``."""
    kinds = c.items("layer_types")
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            raise c.error(f"layer_types contains {str(kind)[:40]!r}, which is not understood")
    if kinds:
        layers = sum(kind != "full_attention" for kind in kinds)
    return {"window": size, "num_windowed_layers": layers} if size and layers else {"window": 0}


def window_everywhere(c: Config, fields: Fields) -> Fields:
    """In all layers."""
    return _window(c, fields["num_layers"], c.size("sliding_window", default=0))


def window_every_second(c: Config, fields: Fields) -> Fields:
    """In every second layer, the first one included."""
    return _window(c, (fields["num_layers"] + 1) // 2, c.size("sliding_window", default=0))


def gemma3_window(c: Config, fields: Fields) -> Fields:
    """In all layers but each sixth."""
    pattern = c.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _window(c, fields["num_layers"] - fields["num_layers"] // pattern, fields["window"])


def qwen_window(c: Config, fields: Fields) -> Fields:
    """From a first layer on, and only with a switch."""
    first = c.size("max_window_layers", default=0)
    if not c.flag("use_sliding_window"):
        return {}
    return _window(c, max(fields["num_layers"] - first, 0), c.size("sliding_window", default=0))


def qwen_experts(c: Config, fields: Fields) -> Fields:
    """Dense layers must be the leading ones; the shared experts count as one."""
    dense = c.items("mlp_only_layers")
    if dense != list(range(len(dense))):
        raise c.error("mlp_only_layers other than the leading ones are not understood")
    return {"num_dense_layers": len(dense), "num_shared_experts": int(fields["shared_expert_ffn_size"] > 0)}


def latent_attention(c: Config, fields: Fields) -> Fields:
    """MLA; ``head_dim`` in such files is the rotary part only and is not used."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: c.size(name) for name in names}
    head = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    return {**sizes, "head_dim": head, "num_kv_heads": fields["num_heads"]}


def deepseek_experts(c: Config, fields: Fields) -> Fields:
    """Experts in every layer after the leading dense ones, if there are any."""
    if c.size("moe_layer_freq", default=1) != 1:
        raise c.error("moe_layer_freq other than 1 is not understood")
    experts = c.size("n_routed_experts", default=0)
    return c.fields(table()["parts"]["deepseek_experts"], fields) if experts else {}


def llama4(c: Config, fields: Fields) -> Fields:
    """Chunks count as windows; experts stand in every n-th layer."""
    layers, step = fields["num_layers"], fields["moe_layer_interval"]
    listed = c.items("moe_layers")
    if listed and listed != list(range(step - 1, layers, step)):
        raise c.error("moe_layers other than every interleave_moe_layer_step-th layer are not understood")
    rotary = c.items("no_rope_layers")
    chunked = sum(bool(x) for x in rotary) if rotary else layers - layers // c.size("no_rope_layer_interval", default=4)
    return _window(c, min(chunked, layers), c.size("attention_chunk_size", default=0))


def opt_positions(c: Config, fields: Fields) -> Fields:
    """The table of positions has two rows more than there are positions."""
    if c.size("word_embed_proj_dim", default=fields["hidden_size"]) != fields["hidden_size"]:
        raise c.error("word_embed_proj_dim other than hidden_size is not understood")
    return {"num_position_embeddings": fields["max_sequence_length"] + 2}


def falcon(c: Config, fields: Fields) -> Fields:
    """Grouped or single keys and values, norms and positions by switches."""
    heads, new, parallel = fields["num_heads"], c.flag("new_decoder_architecture"), fields["parallel_attention"]
    kv = c.size("num_kv_heads", "n_head_kv", default=heads) if new else 1 if c.flag("multi_query", True) else heads
    norms = c.size("num_ln_in_parallel_attn", default=2 if new or not parallel else 1)
    return {"num_kv_heads": kv, "norms_per_layer": norms, "position": "alibi" if c.flag("alibi") else "rope"}


STEPS = {
    one.__name__: one
    for one in (
        biases, window_everywhere, window_every_second, gemma3_window, qwen_window, qwen_experts, latent_attention,
        deepseek_experts, llama4, opt_positions, falcon,
    )
}  # fmt: skip
