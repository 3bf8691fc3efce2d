"""Reads the architecture in a Hugging Face config.json: one small function per family, and a refusal for all others."""

from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import PlannerError

MAX_SIZE = 10**9
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Parts of field names that announce layers other than attention and MLP; a count of parameters would be wrong.
_FOREIGN = (
    *("ssm", "mamba", "linear_attn", "linear_attention", "linear_conv", "linear_num", "recurrent", "rwkv", "lru_width"),
    *("full_attention_interval", "attn_layer_period", "hybrid", "index_topk", "altup", "per_layer_input"),
)
_NOT_TEXT = ("vision", "audio", "image", "video", "projector", "quantization")

Fields = dict[str, Any]


class Config:
    """The config.json with the checks that every reader needs; errors name the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def error(self, text: str) -> PlannerError:
        """A sentence that starts with the file."""
        return PlannerError(f"{self.where}: {text}")

    def size(self, *keys: str, default: int | None = None, zero: bool = False) -> int:
        """The first of the keys that has a value, an integer from 1 (from 0 with ``zero``)."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not (0 if zero else 1) <= value <= MAX_SIZE:
                shown = str(value)[:40] if not isinstance(value, int) or value.bit_length() < 200 else "far too large"
                raise self.error(f"{key} is {shown}; it must be an integer from {0 if zero else 1} to 1e9")
            return value
        if default is None:
            raise self.error(f"missing {' or '.join(keys)}")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        """A yes-or-no field."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {str(value)[:40]}; it must be true or false")
        return value

    def items(self, key: str) -> list[Any]:
        """A list, empty when absent."""
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > 100_000:
            raise self.error(f"{key} must be a list")
        return value

    def activation(self, *keys: str, default: str) -> str:
        """The non-linearity, without the variants of its approximation."""
        name = next((self.data[key] for key in keys if self.data.get(key) is not None), default)
        if isinstance(name, str):
            if name in ("silu", "swish", "relu", "relu2"):
                return {"swish": "silu"}.get(name, name)
            if name.startswith("gelu"):
                return "gelu"
        raise self.error(f"the activation {str(name)[:40]!r} in {keys[0]} is not understood")

    def head_dim(self, heads: int, hidden: int) -> int:
        """Width of one head, given or hidden size over heads."""
        if self.data.get("head_dim") is None and self.data.get("kv_channels") is None and hidden % heads:
            raise self.error(f"hidden_size {hidden} is not a multiple of the {heads} heads, and head_dim is missing")
        return self.size("head_dim", "kv_channels", default=max(hidden // heads, 1))


def translate(config: Mapping[str, Any], *, where: str) -> Fields:
    """Fields of ModelSpec, without name and source. Raises PlannerError naming what is not understood."""
    if not isinstance(config, Mapping):
        raise PlannerError(f"{where}: expected a mapping of keys to values, found {type(config).__name__}")
    inner, kind = _text_part(config, where)
    reader = Config(inner, where)
    if kind not in _READERS:
        if kind is None:
            raise reader.error("missing model_type")
        known = ", ".join(sorted(_READERS))
        raise reader.error(f"model_type {kind[:60]!r} is not understood; understood are {known}")
    for key, value in inner.items():
        foreign = isinstance(key, str) and any(part in key for part in _FOREIGN)
        if foreign and value not in (None, False, 0) and not any(part in key for part in _NOT_TEXT):
            raise reader.error(f"{key[:60]} is not understood: it describes layers other than attention and MLP")
    return _READERS[kind](reader)


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


def _base(c: Config, *, tied: bool = False, act: str = "silu") -> Fields:
    """What families with Llama's field names share."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    return {
        "num_layers": c.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": c.size("num_key_value_heads", default=heads),
        "head_dim": c.head_dim(heads, hidden),
        "ffn_size": c.size("intermediate_size"),
        "vocab_size": c.size("vocab_size"),
        "max_sequence_length": c.size("max_position_embeddings", default=2048),
        "activation": c.activation("hidden_act", "hidden_activation", default=act),
        "tied_embeddings": c.flag("tie_word_embeddings", tied),
    }


def _window(c: Config, fields: Fields, layers: int, key: str = "sliding_window") -> Fields:
    """Adds the window; ``layer_types`` decides how many layers use it, else ``layers``."""
    kinds = c.items("layer_types")
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            raise c.error(f"layer_types contains {str(kind)[:40]!r}, which is not understood")
    if kinds:
        layers = sum(kind != "full_attention" for kind in kinds)
    size = c.size(key, default=0, zero=True)
    return {**fields, "window": size, "num_windowed_layers": layers} if size and layers else fields


def _biases(c: Config, fields: Fields) -> Fields:
    """Llama's two switches. The output bias of attention alone, h per layer, is left out."""
    attention, mlp = c.flag("attention_bias"), c.flag("mlp_bias")
    if mlp and not attention:
        raise c.error("mlp_bias without attention_bias is not understood")
    return {**fields, "linear_bias": attention and mlp, "qkv_bias": attention and not mlp}


def _llama(c: Config) -> Fields:
    return _biases(c, _base(c))


def _mistral(c: Config) -> Fields:
    return _window(c, _base(c), c.size("num_hidden_layers"))


def _mixtral(c: Config) -> Fields:
    fields = _mistral(c)
    experts = {"num_experts": c.size("num_local_experts"), "top_k": c.size("num_experts_per_tok")}
    return {**fields, **experts, "expert_ffn_size": fields["ffn_size"]}


def _qwen2(c: Config) -> Fields:
    fields = {**_base(c), "qkv_bias": True}
    first = c.size("max_window_layers", default=0, zero=True)
    return _window(c, fields, max(fields["num_layers"] - first, 0)) if c.flag("use_sliding_window") else fields


def _qwen3(c: Config) -> Fields:
    return {**_qwen2(c), "qkv_bias": c.flag("attention_bias"), "qk_norm": True}


def _qwen_experts(c: Config) -> Fields:
    """Experts of Qwen; dense layers must be the leading ones."""
    dense = c.items("mlp_only_layers")
    if dense != list(range(len(dense))):
        raise c.error("mlp_only_layers other than the leading ones are not understood")
    shared = c.size("shared_expert_intermediate_size", default=0, zero=True)
    return {
        "num_experts": c.size("num_experts", "num_local_experts"),
        "top_k": c.size("num_experts_per_tok"),
        "expert_ffn_size": c.size("moe_intermediate_size"),
        "num_shared_experts": int(shared > 0),
        "shared_expert_ffn_size": shared,
        "num_dense_layers": len(dense),
        "moe_layer_interval": c.size("decoder_sparse_step", default=1),
    }


def _qwen2_moe(c: Config) -> Fields:
    return {**_qwen2(c), **_qwen_experts(c)}


def _qwen3_moe(c: Config) -> Fields:
    return {**_qwen3(c), **_qwen_experts(c)}


def _gemma2(c: Config) -> Fields:
    fields = {**_base(c, tied=True, act="gelu"), "norms_per_layer": 4}
    return _window(c, fields, (fields["num_layers"] + 1) // 2)


def _gemma3(c: Config) -> Fields:
    # Published configurations leave out what equals the default of the class that reads them.
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    defaults |= {"max_position_embeddings": 131072, "sliding_window": 4096}
    given = {key: value for key, value in c.data.items() if value is not None}
    c = Config({**defaults, **given}, c.where)
    fields = {**_base(c, tied=True, act="gelu"), "norms_per_layer": 4, "qk_norm": True}
    pattern = c.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _window(c, fields, fields["num_layers"] - fields["num_layers"] // pattern)


def _phi3(c: Config) -> Fields:
    return _window(c, _base(c), c.size("num_hidden_layers"))


def _phi(c: Config) -> Fields:
    """The head's bias, V, is left out."""
    classic = {"gated": False, "norm": "layernorm", "norms_per_layer": 1, "parallel_attention": True}
    return {**_base(c, act="gelu"), **classic, "linear_bias": True, "qk_norm": c.flag("qk_layernorm")}


def _deepseek(c: Config) -> Fields:
    fields = _base_mla(c)
    experts = c.size("n_routed_experts", default=0, zero=True)
    fields["mtp_layers"] = c.size("num_nextn_predict_layers", default=0, zero=True)
    if c.size("moe_layer_freq", default=1) != 1:
        raise c.error("moe_layer_freq other than 1 is not understood")
    return {**fields, **_deepseek_experts(c)} if experts else fields


def _base_mla(c: Config) -> Fields:
    """Latent attention; ``head_dim`` in such files is the rotary part only and is not used."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: c.size(name) for name in names}
    head = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    plain = {**c.data, "head_dim": head, "num_key_value_heads": c.data.get("num_attention_heads")}
    rank = c.size("q_lora_rank", default=0, zero=True)
    return {**_biases(c, _base(Config(plain, c.where))), **sizes, "q_lora_rank": rank}


def _deepseek_experts(c: Config) -> Fields:
    """Experts with DeepSeek's field names, which GLM uses too."""
    width, shared = c.size("moe_intermediate_size"), c.size("n_shared_experts", default=0, zero=True)
    return {
        "num_experts": c.size("n_routed_experts"),
        "top_k": c.size("num_experts_per_tok"),
        "expert_ffn_size": width,
        "num_shared_experts": shared,
        "shared_expert_ffn_size": shared * width,
        "num_dense_layers": c.size("first_k_dense_replace", default=0, zero=True),
    }


def _glm4_moe(c: Config) -> Fields:
    more: Fields = {"qkv_bias": c.flag("attention_bias"), "qk_norm": c.flag("use_qk_norm")}
    more["mtp_layers"] = c.size("num_nextn_predict_layers", default=0, zero=True)
    return {**_base(c), **_deepseek_experts(c), **more}


def _gpt_oss(c: Config) -> Fields:
    fields = _window(c, _base(c), (c.size("num_hidden_layers") + 1) // 2)
    experts = {"num_experts": c.size("num_local_experts"), "top_k": c.size("num_experts_per_tok")}
    biases = {"linear_bias": c.flag("attention_bias", True), "expert_bias": True, "router_bias": True}
    extras = {"clamped_activation": True, "scaled_rope": True}
    return {**fields, **experts, **biases, **extras, "expert_ffn_size": fields["ffn_size"]}


def _llama4(c: Config) -> Fields:
    width = c.size("intermediate_size")
    fields = {**_base(c), "ffn_size": c.size("intermediate_size_mlp")}
    layers, step = fields["num_layers"], c.size("interleave_moe_layer_step", default=1)
    listed = c.items("moe_layers")
    if listed and listed != list(range(step - 1, layers, step)):
        raise c.error("moe_layers other than every interleave_moe_layer_step-th layer are not understood")
    rotary = c.items("no_rope_layers")
    chunked = sum(bool(x) for x in rotary) if rotary else layers - layers // c.size("no_rope_layer_interval", default=4)
    experts = {"num_experts": c.size("num_local_experts"), "top_k": c.size("num_experts_per_tok")}
    shared = {"expert_ffn_size": width, "num_shared_experts": 1, "shared_expert_ffn_size": width}
    fields = {**fields, **experts, **shared, "moe_layer_interval": step, "qkv_bias": c.flag("attention_bias")}
    return _window(c, fields, min(chunked, layers), "attention_chunk_size")


def _nemotron(c: Config) -> Fields:
    return _biases(c, {**_base(c, act="relu2"), "gated": False, "norm": "layernorm"})


def _classic(c: Config, *, act: str, length: int | None = None) -> Fields:
    """What the families after GPT-2 share: layer norms, biases, an MLP of two matrices, tied tables; ``length`` its default."""
    hidden, heads = c.size("hidden_size", "n_embd", "n_embed"), c.size("num_attention_heads", "n_head")
    if hidden % heads:
        raise c.error(f"hidden size {hidden} is not a multiple of the {heads} heads")
    return {
        "num_layers": c.size("num_hidden_layers", "n_layer"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": c.size("ffn_dim", "ffn_hidden_size", "n_inner", default=4 * hidden),
        "vocab_size": c.size("vocab_size"),
        "max_sequence_length": c.size("max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=length),
        "gated": False,
        "activation": c.activation("activation_function", "activation", default=act),
        "norm": "layernorm",
        "linear_bias": True,
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }


def _gpt2(c: Config) -> Fields:
    fields = _classic(c, act="gelu")
    return {**fields, "position": "learned", "num_position_embeddings": fields["max_sequence_length"]}


def _opt(c: Config) -> Fields:
    """The table of positions has two rows more than there are positions."""
    fields = _classic(c, act="relu")
    if c.size("word_embed_proj_dim", default=fields["hidden_size"]) != fields["hidden_size"]:
        raise c.error("word_embed_proj_dim other than hidden_size is not understood")
    rows = fields["max_sequence_length"] + 2
    return {
        **fields,
        "position": "learned",
        "num_position_embeddings": rows,
        "linear_bias": c.flag("enable_bias", True),
    }


def _bloom(c: Config) -> Fields:
    return {**_classic(c, act="gelu", length=2048), "position": "alibi", "embedding_norm": True}


def _falcon(c: Config) -> Fields:
    fields, new, parallel = (
        _classic(c, act="gelu", length=2048),
        c.flag("new_decoder_architecture"),
        c.flag("parallel_attn", True),
    )
    heads = fields["num_heads"]
    kv = c.size("num_kv_heads", "n_head_kv", default=heads) if new else 1 if c.flag("multi_query", True) else heads
    norms = c.size("num_ln_in_parallel_attn", default=2 if new or not parallel else 1)
    more = {"num_kv_heads": kv, "norms_per_layer": norms, "linear_bias": c.flag("bias"), "parallel_attention": parallel}
    return {**fields, **more, "position": "alibi" if c.flag("alibi") else "rope"}


def _gpt_neox(c: Config) -> Fields:
    more = {"gated": False, "norm": "layernorm", "parallel_attention": c.flag("use_parallel_residual", True)}
    return {**_base(c, act="gelu"), **more, "linear_bias": c.flag("attention_bias", True)}


_READERS: dict[str, Callable[[Config], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "phi": _phi,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "nemotron": _nemotron,
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "gpt_neox": _gpt_neox,
}
