"""Reads the architecture in a Hugging Face config.json by the table profiles/model_families.yaml; refuses all other families."""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError, nearest_first, shown
from planner.gpt_configs import GPTS
from planner.hybrid_configs import HYBRIDS
from planner.model_constants import constants_of_config
from planner.model_names import READ_AS
from planner.schema import value_of, within
from planner.vision import vision_tower

_SIZE, _SIZE_OR_NONE = Annotated[int, within(1, 10**9)] | None, Annotated[int, within(0, 10**9)] | None
_FLAG, _LIST = bool | None, list[Any] | None
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
# Parts of field names that announce layers other than attention and MLP; a count of parameters would be wrong.
_FOREIGN = (
    *("ssm", "mamba", "linear_attn", "linear_attention", "linear_conv", "linear_num", "recurrent", "rwkv", "lru_width"),
    *("full_attention_interval", "attn_layer_period", "hybrid", "altup", "per_layer_input", "hc_mult", "use_cla"),
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

    def inner(self, data: Mapping[str, Any], name: str = "") -> "Config":
        """A section of the file, or the file with other values."""
        return Config(data, f"{self.where}: {name}" if name else self.where)

    def part(self, name: str) -> Mapping[str, str]:
        """Keys that families share."""
        found: Mapping[str, str] = table()["parts"][name]
        return found

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first of the keys that has a value, an integer from 1 (from 0 where that is the default)."""
        kind = _SIZE_OR_NONE if default == 0 else _SIZE
        found = (value_of(kind, self._uniform(key), self.where, key) for key in keys)
        value: int | None = next((one for one in found if one is not None), default)
        if value is None:
            raise self.error(f"missing {' or '.join(keys)}")
        return value

    def _uniform(self, key: str) -> Any:
        """A value; of a list with one value per layer the one that all layers have."""
        value = self.data.get(key)
        if not isinstance(value, list) or not value:
            return value
        if any(one != value[0] for one in value):
            raise self.error(f"{key} differs between layers, which is not modelled; expected one value for all layers")
        return value[0]

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
    nested = inner is not config
    inner, kind, read_as = _as_llama(inner, kind)
    reader, families = Config(inner, where), table()["families"]
    _refuse(reader, kind)
    known = families[kind].get("knows", ())
    for key, value in inner.items():
        foreign = isinstance(key, str) and any(part in key for part in _FOREIGN) and not any(part in key for part in known)
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
    if "index_top_k" not in fields and reader.data.get("index_topk"):
        raise reader.error(f"index_topk is not understood in model_type {kind!r}: its sparse attention is not modelled")
    format_ = quantised(config, where) or quantised(inner, where)
    tower = vision_tower(config, fields["hidden_size"], where) if nested or "vision_config" in config else None
    fields |= {"quantised": format_} if format_ else {}
    fields |= {"source": read_as} if read_as else {}
    return fields | ({"vision": tower} if tower else {}) | _constants(reader, kind, fields)


def _as_llama(inner: Mapping[str, Any], kind: str | None) -> tuple[Mapping[str, Any], str | None, str]:
    """(The file, its family, what was taken for what): a family that is not known, whose keys are those of a llama and no others,
    is read as one."""
    known = kind is None or kind in table()["families"] or any(kind in names.split() for names in table()["refused"])
    if known or not _has_llamas(inner) or _beside_llama(inner):
        return inner, kind, ""
    bias = inner.get("attention_bias", inner.get("bias", inner.get("qkv_bias", False)))
    said = {"mlp_bias": False, **inner, "attention_bias": bias, "model_type": "llama"}
    return said, "llama", f"model_type {str(kind)[:60]}{READ_AS}"


def _has_llamas(inner: Mapping[str, Any]) -> bool:
    """Whether all that a llama needs is said."""
    needed = table()["as_llama"]["needed"].split()
    return all(inner.get(one) is not None for one in needed) and inner["hidden_act"] in ("silu", "swish")


def _beside_llama(inner: Mapping[str, Any]) -> list[str]:
    """Keys that say something and are none of a llama's."""
    as_llama = table()["as_llama"]
    known = {*as_llama["needed"].split(), *as_llama["also"].split()}
    said = [one for one, value in inner.items() if value not in (None, False, 0, 0.0, [], {})]
    quiet = re.compile(r"_token_id$|^_|dropout|initializer|^auto_map$")
    return [str(one) for one in said if one not in known and not quiet.search(str(one))]


def _constants(reader: Config, kind: str | None, fields: Fields) -> Fields:
    """Constants of the model, where the file says them all and a family computes no other scores or rotations."""
    if table()["families"].get(kind, {}).get("constants") == "none":
        return {}
    router = {name: kind in kinds.split() for name, kinds in table()["routers"].items()} if fields.get("num_experts") else None
    rotary = fields.get("position", "rope") == "rope"
    data = {"layer_norm_eps": 1e-5, **reader.data} if kind == "opt" else reader.data  # no key: torch.nn.LayerNorm's default
    found = constants_of_config(data, reader.where, rotary=rotary, router=router)
    return {"constants": found} if found else {}


def quantised(config: Mapping[str, Any], where: str) -> str:
    """How the published weights are quantised, in words; empty where they are not."""
    found = config.get("quantization_config")
    if not found:
        return ""
    if not isinstance(found, Mapping):
        raise PlannerError(f"{where}: quantization_config must be a mapping")
    method = found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found or "load_in_8bit" in found else "")
    bits = found.get("bits") or (4 if found.get("load_in_4bit") else 8 if found.get("load_in_8bit") else None)
    return str(method or "an unknown method")[:40] + (f" of {bits} bits" if isinstance(bits, int) else "")


def _refuse(c: Config, kind: str | None) -> None:
    """Families that are not modelled, by name."""
    if kind is None:
        raise c.error("missing model_type")
    for names, what in table()["refused"].items():
        if kind in names.split():
            raise c.error(f"model_type {kind!r} is not modelled: it has {what}; plans are for causal decoders")
    if kind not in (families := table()["families"]):
        nearest = ", ".join(nearest_first(kind[:60], families)[:6])
        more = _beside_llama(c.data)
        why = f"; its keys are a llama's but for {shown(', '.join(more))}" if _has_llamas(c.data) and 0 < len(more) < 4 else ""
        raise c.error(f"model_type {kind[:60]!r} is not understood; of {len(families)} families nearest are {nearest}{why}")
    if c.flag("is_encoder_decoder"):
        raise c.error(f"model_type {kind!r} with is_encoder_decoder is not modelled; plans are for causal decoders")


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
    """The window; ``layer_types`` decides how many layers use it, else ``layers``. One as long as the longest sequence is none."""
    kinds = c.items("layer_types")
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            raise c.error(f"{str(kind)[:40]} layers are not modelled (layer_types)")
    if kinds:
        layers = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    longest = c.size("max_position_embeddings", default=0)
    return {"window": size, "num_windowed_layers": layers} if layers and 0 < size < (longest or math.inf) else {"window": 0}


def window_everywhere(c: Config, fields: Fields) -> Fields:
    """In all layers."""
    return _window(c, fields["num_layers"], c.size("sliding_window", default=0))


def window_every_second(c: Config, fields: Fields) -> Fields:
    """In every second layer, the first one included."""
    return _window(c, (fields["num_layers"] + 1) // 2, c.size("sliding_window", default=0))


def _window_but_every(c: Config, fields: Fields, default: int, window: int) -> Fields:
    """In all layers but each n-th; EXAONE 4 writes the pattern out, "LLLG"."""
    names = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
    written = next((c.data[one] for one in names if isinstance(c.data.get(one), str)), None)
    pattern = len(written) if written else c.size(*names, default=default)
    if written is not None and written != "L" * (pattern - 1) + "G":
        raise c.error(f"sliding_window_pattern {written[:40]!r} is not understood; expected local layers and one global, LLLG")
    return _window(c, fields["num_layers"] - fields["num_layers"] // pattern, window)


def gemma3_window(c: Config, fields: Fields) -> Fields:
    """In all layers but each sixth."""
    return _window_but_every(c, fields, 6, fields["window"])


def window_but_every_fourth(c: Config, fields: Fields) -> Fields:
    """In all layers but each fourth."""
    return _window_but_every(c, fields, 4, c.size("sliding_window", default=0))


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


def ernie_layers(c: Config, fields: Fields) -> Fields:
    """Experts up to the last layer."""
    if c.data.get("moe_layer_end_index") not in (None, -1, fields["num_layers"], fields["num_layers"] - 1):
        raise c.error("moe_layer_end_index before the last layer is not understood")
    return {} if fields["num_shared_experts"] else {"shared_expert_ffn_size": 0}


def baichuan_positions(c: Config, _: Fields) -> Fields:
    """ALiBi where the file says no number of positions: 13B."""
    return {} if c.data.get("max_position_embeddings") is not None else {"position": "alibi"}


def chatglm_groups(c: Config, fields: Fields) -> Fields:
    """Groups of keys and values by a switch."""
    return {} if c.flag("multi_query_attention") else {"num_kv_heads": fields["num_heads"]}


def halved_mlp(_: Config, fields: Fields) -> Fields:
    """The file says the width of gate and up together."""
    return {"ffn_size": fields["ffn_size"] // 2}


def mlp_layers(c: Config, fields: Fields) -> Fields:
    """Dense layers before those with experts, as ``mlp_layer_types`` lists them."""
    kinds = c.items("mlp_layer_types")
    dense = next((number for number, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if any(kind != "sparse" for kind in kinds[dense:]):
        raise c.error("mlp_layer_types other than leading dense layers and sparse ones are not understood")
    return {"num_dense_layers": dense} if kinds else {}


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
    if not c.size("n_routed_experts", default=0):
        return {}
    return c.fields(table()["parts"]["deepseek_experts"], fields) | mlp_layers(c, fields)


def sparse_attention(c: Config, fields: Fields) -> Fields:
    """DeepSeek sparse attention. GLM 5.2 shares the choice of one indexer between layers.

    [transformers, configuration_glm_moe_dsa.py, __post_init__]
    """
    layers, kinds = fields["num_layers"], c.items("indexer_types")
    pattern = c.data.get("index_topk_pattern")
    every, offset = c.size("index_topk_freq", default=1), c.size("index_skip_topk_offset", default=2)
    own = layers if layers < offset else offset + (layers - offset) // every  # those before the offset, it, every n-th after it
    if isinstance(pattern, (str, list)) and pattern:
        own = sum(one in ("F", "full") for one in pattern)
    own = sum(kind == "full" for kind in kinds) if kinds else own
    sizes = {"index_top_k": "index_topk", "index_heads": "index_n_heads", "index_head_dim": "index_head_dim"}
    return {**{field: c.size(key) for field, key in sizes.items()}, "index_layers": own}


def llama4(c: Config, fields: Fields) -> Fields:
    """Chunks in all layers with rotary positions; experts stand in every n-th layer."""
    layers, step = fields["num_layers"], fields["moe_layer_interval"]
    listed = c.items("moe_layers")
    if listed and listed != list(range(step - 1, layers, step)):
        raise c.error("moe_layers other than every interleave_moe_layer_step-th layer are not understood")
    rotary = c.items("no_rope_layers")
    chunked = sum(bool(x) for x in rotary) if rotary else layers - layers // c.size("no_rope_layer_interval", default=4)
    found = _window(c, min(chunked, layers), c.size("attention_chunk_size", default=0))
    return found if found.get("num_windowed_layers") else {**found, "chunked_attention": False}


STEPS = {
    one.__name__: one
    for one in (
        biases, window_everywhere, window_every_second, gemma3_window, window_but_every_fourth, qwen_window, qwen_experts,
        ernie_layers, latent_attention, deepseek_experts, sparse_attention, llama4, baichuan_positions, chatglm_groups, halved_mlp,
        *GPTS, *HYBRIDS,
    )
}  # fmt: skip
