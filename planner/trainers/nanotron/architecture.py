"""The architecture that model.model_config says.  [nanotron, config/models_config.py]"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec, from_hugging_face
from planner.trainers.reading.configuration import known_model
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.values import whole_number

MODEL_WORDS = (
    r"is_\w+_config|head_dim|(bos|eos|pad)_token_id|hidden_(act|size)|initializer_range|intermediate_size|max_position_embeddings"
    r"|num_(attention_heads|hidden_layers|key_value_heads)|attention_bias|pretraining_tp|rms_norm_eps|rope_\w+|tie_word_embeddings"
    r"|use_cache|vocab_size|_\w+|z_loss_\w+|log_attn_probs|moe_\w+|num_experts_per_tok(en)?|no_rope_layer|sliding_window_size"
    r"|ring_attn_heads_k_stride|flex_attention_mask|attn_pdrop"
)
"""Words of its Llama and Qwen2, whose layers are those of transformers.  [config/models_config.py]"""
STARCODER_WORDS = (
    r"activation_function|attention_softmax_in_fp32|(attn|embd|resid)_pdrop|global_attn_layers|grouped_query|multi_query|num_kv_heads"
    r"|layer_norm_epsilon|scale_\w+|sliding_window_size|use_(position|rotary)_embeddings"
)
USUAL = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
"""Sizes of Llama and Qwen2 where the file says none."""
USUAL_STARCODER = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 49280}
"""Those of Starcoder2, whose intermediate_size is four times the hidden size."""
KIND = re.compile(r"is_\w+_config")
KINDS = {"is_llama_config", "is_qwen2_config", "is_llamoe_config", "is_mistral_config"}
"""Switches of its architectures, and those whose layers are read as Llama's, Qwen2's or Mixtral's."""
LOSS = re.compile(r"(use_)?loss(_(?!.*(mtp|teacher|distil))\w+)?|use_\w+_loss")
"""Words of forks that say which loss it is and how it is calculated: no layers."""
CROSS_ENTROPY = re.compile(r"(?i)(vocab\w*_|sharded_?|parallel_)*(cross_?entropy|ce)(_?loss)?|mean|sum")
"""The loss that is priced, or its reduction, as such words say it."""
KERNELS = ("flash_attention_2", "sdpa", "flex_attention")
"""Attention that never stores scores, on one context parallel rank."""


def own_layers(model: Mapping[str, Any], given: Given) -> tuple[Question, ...]:
    """What is asked about words of the model that nanotron's own do not have: its reader refuses such keys, so a fork has them."""
    sizes = model.get("model_config")
    said = {str(name): value for name, value in sizes.items()} if isinstance(sizes, Mapping) else {}
    known = f"{MODEL_WORDS}|{STARCODER_WORDS}" if said.get("is_starcoder2_config") else MODEL_WORDS
    words = [name for name, value in said.items() if value not in (None, False) and not re.fullmatch(known, name)]
    loss = [one for one in words if LOSS.fullmatch(one)]
    read = (*KINDS, "is_starcoder2_config", "is_mamba_config")
    odd = [one for one in words if one not in loss]
    odd += [name for name, value in said.items() if value and KIND.fullmatch(name) and name not in read]
    about = f"layers of this fork: model_config has {', '.join(shown(one) for one in odd[:3])}; a model that is like it"
    asked = (Question(name="--model NAME", about=about),) if odd and given.model is None else ()
    return (*asked, *_losses(said, loss))


def _losses(said: Mapping[str, Any], words: list[str]) -> tuple[Question, ...]:
    """Asks for the loss that is priced in place of a fork's: by the word that names one, by its switches, else by each number."""
    about = "a loss of this fork, whose buffers are not priced; {} prices cross entropy in its place"
    named = [one for one, value in said.items() if LOSS.fullmatch(one) and isinstance(value, str | bool)]
    words = [one for one in named if said[one] and not CROSS_ENTROPY.fullmatch(str(said[one]))] if named else words
    usual = {one: "cross_entropy" if isinstance(said[one], str) else "false" if named else "null" for one in words}
    return tuple(Question(name=one, about=about.format(value), choices=(value,)) for one, value in usual.items())


def replaced_losses(model: Any, given: Given) -> list[str]:
    """What a plan says of a fork's loss whose place cross entropy takes, as the user says; ``model``: the section of the file."""
    sizes = model.get("model_config") if isinstance(model, Mapping) else None
    own = {str(one): value for one, value in sizes.items() if LOSS.fullmatch(str(one))} if isinstance(sizes, Mapping) else {}
    said = {one: given.setting(one) or given.setting(f"model.model_config.{one}") for one in own}
    note = "the file's {} {} is priced as {}: buffers of its own are not in the memory"
    return [note.format(one, shown(own[one]), value) for one, value in said.items() if value is not None]


def model_of(model: Mapping[str, Any], path: Path) -> ModelSpec | None:
    """The architecture, from the sizes in the file as config.json of transformers; None where they are not read, and it is asked
    for. Raises PlannerError for one that is no transformer."""
    sizes = model.get("model_config")
    if not isinstance(sizes, Mapping):
        return None
    if sizes.get("is_mamba_config"):
        raise PlannerError(f"{path}: model.model_config has is_mamba_config: Mamba is not priced; transformers are")
    if sizes.get("is_starcoder2_config"):
        return _starcoder(sizes, path)
    kinds = [name for name, value in sizes.items() if value and KIND.fullmatch(str(name))]
    if not set(kinds) <= KINDS:
        return None
    if not kinds and not {"hidden_size", "num_hidden_layers"} <= sizes.keys():  # of transformers, or another class
        return None
    sizes = {**USUAL, **{name: value for name, value in sizes.items() if value is not None}}
    if experts := sizes.get("moe_num_experts"):
        sizes.setdefault("num_experts_per_tok", 1)
        return known_model(from_hugging_face({**sizes, "model_type": "mixtral", "num_local_experts": experts}, source=str(path)))
    bias = bool(sizes.get("is_qwen2_config") and sizes.get("attention_bias"))
    sizes.pop("attention_bias", None)  # which its Llama does not read  [models/llama.py: bias=False]
    window = {"sliding_window": sizes["sliding_window_size"], "use_sliding_window": True} if "sliding_window_size" in sizes else {}
    if not sizes.get("moe_config"):
        kind = "qwen3" if sizes.get("_use_qk_norm") else "qwen2" if bias or window else "llama"
        heads = whole_number(sizes["num_attention_heads"], f"{path}: model_config.num_attention_heads")
        head = {"head_dim": whole_number(sizes["hidden_size"], f"{path}: model_config.hidden_size") // heads}
        found = from_hugging_face({**head, **sizes, **window, "model_type": kind}, source=str(path))
        return known_model(dataclasses.replace(found, qkv_bias=bias) if kind == "qwen2" else found)
    mixed = from_hugging_face({**sizes, "model_type": "qwen2_moe", **_experts(sizes, path)}, source=str(path))
    return known_model(dataclasses.replace(mixed, qkv_bias=bias))


def _starcoder(sizes: Mapping[str, Any], path: Path) -> ModelSpec:
    """Layer norms and biases as in transformers; one head of keys and values without grouped_query, and no window on layers of
    global_attn_layers.  [models/starcoder2.py]"""
    said = {**USUAL_STARCODER, **{name: value for name, value in sizes.items() if value is not None}}
    grouped = bool(said.get("grouped_query"))
    kept = {"num_key_value_heads": said.get("num_kv_heads") if grouped else 1, "model_type": "starcoder2",
            "intermediate_size": said.get("intermediate_size", 4 * said["hidden_size"]), "tie_word_embeddings": True,
            "hidden_act": said.get("activation_function", "gelu_pytorch_tanh"), "sliding_window": said.get("sliding_window_size"),
            "norm_epsilon": said.get("layer_norm_epsilon", 1e-5)}  # fmt: skip
    found = from_hugging_face({**said, **kept}, source=str(path))
    if found.num_windowed_layers and (whole := said.get("global_attn_layers")):
        left = found.num_layers - len(set(whole) if isinstance(whole, list) else ())
        found = dataclasses.replace(found, num_windowed_layers=max(left, 0), window=found.window if left > 0 else 0)
    return known_model(found)


def rows_of(model: Mapping[str, Any], tp: int) -> dict[str, int]:
    """The vocabulary padded to a multiple of make_vocab_size_divisible_by x tp; {} where it is one.
    [nanotron, helpers.py, _vocab_size_with_padding]"""
    sizes, each = model.get("model_config"), model.get("make_vocab_size_divisible_by", 1)
    rows = sizes.get("vocab_size", USUAL["vocab_size"]) if isinstance(sizes, Mapping) else None
    if not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in (rows, each)) or rows is None:
        return {}
    padded = -(-rows // (each * tp)) * each * tp
    return {"vocab_size": padded} if padded != rows else {}


def notes_of(model: Mapping[str, Any], tp: int) -> list[str]:
    """What of the attention, the loss and the experts was taken for what."""
    sizes = model.get("model_config")
    if not isinstance(sizes, Mapping):
        return []
    kernel = str(sizes.get("_attn_implementation") or KERNELS[0])
    found = [] if kernel in KERNELS else [f"model_config._attn_implementation {shown(kernel)} is priced as {KERNELS[0]}"]
    if sizes.get("_use_doc_masking") or "document" in str(sizes.get("flex_attention_mask")):
        found.append("attention ends at documents; priced over whole sequences, so its time comes out too long")
    if tp > 1 and sizes.get("moe_config"):  # [nn/moe.py, GroupedMLP]
        found.append("experts are whole on every tensor-parallel rank of nanotron, and the plan splits them: "
                     f"{tp - 1}/{tp} of their weights, gradients and states is missing")  # fmt: skip
    if sizes.get("z_loss_enabled"):  # softmax and its gradient, that of the z loss, their sum  [_ShardedCrossEntropyWithZLoss]
        found.append("z_loss_enabled: the loss has four copies of its logits in float32: 6 bytes more of a token and entry of the "
                     "vocabulary over tp")  # fmt: skip
    if sizes.get("sliding_window_size") and sizes.get("no_rope_layer"):
        found.append("layers without rotary positions have no sliding window; priced with one on all")
    return found


def _experts(sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Experts of nn/moe.py in the words of Qwen's config.json.  [config/models_config.py, MoEConfig]"""
    given = sizes["moe_config"]
    if not isinstance(given, Mapping):
        raise PlannerError(f"{path}: model_config.moe_config is {shown(given)}; it must be a section of settings")
    every = [-1], list(range(whole_number(sizes["num_hidden_layers"], f"{path}: model_config.num_hidden_layers")))
    if given.get("layers", [-1]) not in every:
        raise PlannerError(f"{path}: moe_config.layers is {shown(given['layers'])}; only experts in all layers, [-1], are read")
    shared = given.get("shared_expert_intermediate_size", 5632) if given.get("enable_shared_expert") else 0
    return {
        "num_experts": given.get("num_experts", 8), "num_experts_per_tok": given.get("top_k", 2),
        "moe_intermediate_size": given.get("moe_intermediate_size", 1408), "shared_expert_intermediate_size": shared,
    }  # fmt: skip
