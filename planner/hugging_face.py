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
        if kind in table()["refused"]:
            raise reader.error(f"{table()['refused'][kind]} layers are not modelled (model_type {kind!r})")
        raise reader.error(f"model_type {kind[:60]!r} is not understood; understood are {', '.join(sorted(families))}")
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
            raise c.error(f"{str(kind)[:40]} layers are not modelled (layer_types)")
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


# ------------------------------------------------------------------------------------------ hybrids with linear attention


def _linear(c: Config, fields: Fields, linear: Fields) -> Fields:
    """The field; none of it where no layer is of that kind."""
    if not linear["num_layers"]:
        raise c.error("no layer has linear attention, which this family is made of")
    return {"linear": linear}


def _counted(c: Config, key: str, names: Mapping[str, str], layers: int) -> dict[str, int]:
    """Layers of each kind in a list of them; unknown kinds are refused by name."""
    kinds = c.items(key)
    for kind in kinds:
        if kind not in names:
            raise c.error(f"{str(kind)[:40]} layers are not modelled ({key})")
    if kinds and len(kinds) != layers:
        raise c.error(f"{key} has {len(kinds)} entries for {layers} layers")
    return {name: sum(names[kind] == name for kind in kinds) for name in set(names.values())}


def one_shared_expert(c: Config, fields: Fields) -> Fields:
    """Experts in every layer, with one shared expert."""
    return {"num_shared_experts": int(fields["shared_expert_ffn_size"] > 0), "moe_layer_interval": 1}


def gated_delta_net(c: Config, fields: Fields) -> Fields:
    """Linear attention in all layers but each fourth, or as ``layer_types`` says."""
    layers = fields["num_layers"]
    found = _counted(c, "layer_types", {"linear_attention": "linear", "full_attention": "full"}, layers)
    every = c.size("full_attention_interval", default=4)
    number = found["linear"] if c.items("layer_types") else layers - layers // every
    return _linear(c, fields, {
        "kind": "gated_delta_net", "num_layers": number, "key_heads": c.size("linear_num_key_heads"),
        "value_heads": c.size("linear_num_value_heads"), "key_head_dim": c.size("linear_key_head_dim"),
        "value_head_dim": c.size("linear_value_head_dim"), "conv_kernel": c.size("linear_conv_kernel_dim", default=4),
    })  # fmt: skip


def kimi_delta_attention(c: Config, fields: Fields) -> Fields:
    """Sizes and layers in a section of their own; what the next generation adds is refused."""
    for key in ("attn_res_block_size", "mla_use_output_gate", "routed_expert_hidden_size"):
        if c.data.get(key):
            raise c.error(f"{key} is not understood: it belongs to layers that are not modelled")
    section = c.data.get("linear_attn_config")
    if not isinstance(section, Mapping):
        raise c.error("missing linear_attn_config")
    own = Config(section, f"{c.where}: linear_attn_config")
    if own.flag("use_full_rank_gate"):
        raise own.error("use_full_rank_gate is not understood: gates of full rank are not modelled")
    heads, width = own.size("num_heads"), own.size("head_dim")
    sizes = {"key_heads": heads, "value_heads": heads, "key_head_dim": width, "value_head_dim": width}
    taps = own.size("short_conv_kernel_size", default=4)
    linear = {"kind": "kimi_delta_attention", "num_layers": len(own.items("kda_layers")), "conv_kernel": taps, **sizes}
    return _linear(c, fields, linear) | {"position": "none" if c.flag("mla_use_nope") else "rope"}


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron_h(c: Config, fields: Fields) -> Fields:
    """Layers that are a mixer, an MLP or experts alone, by a pattern of letters or a list of kinds."""
    pattern = c.data.get("hybrid_override_pattern") or c.data.get("hybrid_layer_pattern")
    if isinstance(pattern, str):
        c = Config({**c.data, "layers_block_type": [_BLOCKS.get(one, one) for one in pattern]}, c.where)
    key = "layers_block_type" if c.items("layers_block_type") else "layer_types"
    old = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = {one: one for one in _BLOCKS.values()} | old
    found = _counted(c, key, kinds, len(c.items(key)))
    if found["mlp"] and found["moe"]:
        raise c.error("layers of MLPs and layers of experts in one model are not modelled")
    linear = {
        "kind": "mamba2", "num_layers": found["linear_attention"], "num_mlp_layers": found["mlp"] + found["moe"],
        "key_heads": c.size("n_groups", "mamba_n_groups", default=8), "value_heads": c.size("mamba_num_heads"),
        "key_head_dim": c.size("ssm_state_size"), "value_head_dim": c.size("mamba_head_dim"),
        "conv_kernel": c.size("conv_kernel", "mamba_d_conv", default=4),
        "chunk_size": c.size("chunk_size", "mamba_chunk_size", default=128),
    }  # fmt: skip
    experts: Fields = {}
    if found["moe"]:
        experts = {
            "num_experts": c.size("n_routed_experts"), "top_k": c.size("num_experts_per_tok"),
            "expert_ffn_size": c.size("moe_intermediate_size"), "expert_hidden_size": c.size("moe_latent_size", default=0),
            "num_shared_experts": c.size("n_shared_experts", default=0),
        }  # fmt: skip
        shared = c.size("moe_shared_expert_intermediate_size", default=0)
        experts["shared_expert_ffn_size"] = shared * (experts["num_shared_experts"] > 0)
    return _linear(c, fields, linear) | experts | {"num_layers": len(c.items(key))}


def _mamba2(c: Config, fields: Fields, number: int) -> Fields:
    """Mamba-2 layers of Granite and Bamba."""
    linear = c.fields(table()["parts"]["mamba_sizes"], {})
    inner = c.size("mamba_expand", default=2) * fields["hidden_size"]
    linear |= {"kind": "mamba2", "num_layers": number, "value_head_dim": inner // linear["value_heads"]}
    return _linear(c, fields, linear)


def granite_hybrid(c: Config, fields: Fields) -> Fields:
    """Every layer with a shared MLP, and with routed experts where there are any."""
    found = _counted(c, "layer_types", {"mamba": "linear", "attention": "full"}, fields["num_layers"])
    experts, shared = c.size("num_local_experts", default=0), c.size("shared_intermediate_size", default=0)
    more: Fields = {"ffn_size": shared}
    if experts:
        more = {"num_experts": experts, "top_k": c.size("num_experts_per_tok"), "expert_ffn_size": fields["ffn_size"],
                "num_shared_experts": int(shared > 0), "shared_expert_ffn_size": shared}  # fmt: skip
    rotary = c.data.get("position_embedding_type") == "rope"
    return _mamba2(c, fields, found["linear"]) | more | {"position": "rope" if rotary else "none"}


def bamba(c: Config, fields: Fields) -> Fields:
    """Attention in the layers that are listed."""
    return _mamba2(c, fields, fields["num_layers"] - len(c.items("attn_layer_indices")))


STEPS = {
    one.__name__: one
    for one in (
        biases, window_everywhere, window_every_second, gemma3_window, qwen_window, qwen_experts, latent_attention,
        deepseek_experts, llama4, opt_positions, falcon, one_shared_expert, gated_delta_net, kimi_delta_attention, nemotron_h,
        granite_hybrid, bamba,
    )
}  # fmt: skip
