"""Reads hybrids with linear attention in a Hugging Face config.json: steps of the table profiles/model_families.yaml."""

from collections.abc import Mapping
from typing import Any, Protocol

Fields = dict[str, Any]


class Reader(Protocol):
    """What hugging_face.Config offers."""

    data: Mapping[str, Any]
    where: str

    def error(self, text: str) -> Exception:
        """A sentence that starts with the file."""

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first of the keys that has a value."""

    def flag(self, key: str, default: bool = False) -> bool:
        """A yes-or-no field."""

    def items(self, key: str) -> list[Any]:
        """A list, empty when absent."""

    def fields(self, rules: Mapping[str, str], found: Fields) -> Fields:
        """Fields of the model by the rules of the table."""

    def inner(self, data: Mapping[str, Any], name: str = "") -> "Reader":
        """A section of the file, or the file with other values."""

    def part(self, name: str) -> Mapping[str, str]:
        """Keys that families share."""


def _linear(c: Reader, fields: Fields, linear: Fields) -> Fields:
    """The field; none of it where no layer is of that kind."""
    if not linear["num_layers"]:
        raise c.error("no layer has linear attention, which this family is made of")
    return {"linear": linear}


def _counted(c: Reader, key: str, names: Mapping[str, str], layers: int) -> dict[str, int]:
    """Layers of each kind in a list of them; unknown kinds are refused by name."""
    kinds = c.items(key)
    for kind in kinds:
        if not isinstance(kind, str) or kind not in names:
            raise c.error(f"{str(kind)[:40]} layers are not modelled ({key})")
    if kinds and len(kinds) != layers:
        raise c.error(f"{key} has {len(kinds)} entries for {layers} layers")
    return {name: sum(names[kind] == name for kind in kinds) for name in set(names.values())}


def one_shared_expert(c: Reader, fields: Fields) -> Fields:
    """Experts in every layer, with one shared expert."""
    return {"num_shared_experts": int(fields["shared_expert_ffn_size"] > 0), "moe_layer_interval": 1}


def gated_delta_net(c: Reader, fields: Fields) -> Fields:
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


def kimi_delta_attention(c: Reader, fields: Fields) -> Fields:
    """Sizes and layers in a section of their own; what the next generation adds is refused."""
    for key in ("attn_res_block_size", "mla_use_output_gate", "routed_expert_hidden_size"):
        if c.data.get(key):
            raise c.error(f"{key} is not understood: it belongs to layers that are not modelled")
    section = c.data.get("linear_attn_config")
    if not isinstance(section, Mapping):
        raise c.error("missing linear_attn_config")
    own = c.inner(section, "linear_attn_config")
    if own.flag("use_full_rank_gate"):
        raise own.error("use_full_rank_gate is not understood: gates of full rank are not modelled")
    heads, width = own.size("num_heads"), own.size("head_dim")
    sizes = {"key_heads": heads, "value_heads": heads, "key_head_dim": width, "value_head_dim": width}
    taps = own.size("short_conv_kernel_size", default=4)
    linear = {"kind": "kimi_delta_attention", "num_layers": len(own.items("kda_layers")), "conv_kernel": taps, **sizes}
    return _linear(c, fields, linear) | {"position": "none" if c.flag("mla_use_nope") else "rope"}


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron_h(c: Reader, fields: Fields) -> Fields:
    """Layers that are a mixer, an MLP or experts alone, by a pattern of letters or a list of kinds."""
    pattern = c.data.get("hybrid_override_pattern") or c.data.get("hybrid_layer_pattern")
    if isinstance(pattern, str):
        c = c.inner({**c.data, "layers_block_type": [_BLOCKS.get(one, one) for one in pattern]})
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


def _mamba2(c: Reader, fields: Fields, number: int) -> Fields:
    """Mamba-2 layers of Granite and Bamba."""
    linear = c.fields(c.part("mamba_sizes"), {})
    inner = c.size("mamba_expand", default=2) * fields["hidden_size"]
    linear |= {"kind": "mamba2", "num_layers": number, "value_head_dim": inner // linear["value_heads"]}
    return _linear(c, fields, linear)


def granite_hybrid(c: Reader, fields: Fields) -> Fields:
    """Every layer with a shared MLP, and with routed experts where there are any."""
    found = _counted(c, "layer_types", {"mamba": "linear", "attention": "full"}, fields["num_layers"])
    experts, shared = c.size("num_local_experts", default=0), c.size("shared_intermediate_size", default=0)
    more: Fields = {"ffn_size": shared}
    if experts:
        more = {"num_experts": experts, "top_k": c.size("num_experts_per_tok"), "expert_ffn_size": fields["ffn_size"],
                "num_shared_experts": int(shared > 0), "shared_expert_ffn_size": shared}  # fmt: skip
    rotary = c.data.get("position_embedding_type") == "rope"
    return _mamba2(c, fields, found["linear"]) | more | {"position": "rope" if rotary else "none"}


def bamba(c: Reader, fields: Fields) -> Fields:
    """Attention in the layers that are listed."""
    return _mamba2(c, fields, fields["num_layers"] - len(c.items("attn_layer_indices")))


HYBRIDS = (one_shared_expert, gated_delta_net, kimi_delta_attention, nemotron_h, granite_hybrid, bamba)
