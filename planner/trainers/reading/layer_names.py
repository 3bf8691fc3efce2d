"""Linear layers of a decoder by the names that models give them, in the words of the planner's own: q, k, v, o, gate, up, down."""

import re
from typing import Any

ALL = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers of a dense model."""
WHOLE_QKV = ("qkv_proj", "linear_qkv", "query_key_value", "c_attn", "attention_qkv", "wqkv", "w_pack", "qkv")
WHOLE_MLP = ("gate_up_proj", "c_fc", "fc1", "fc_in", "linear_fc1", "mlp_fc1", "dense_h_to_4h", "gate_up")
"""Layers that are several in one; the first of an MLP without a gate stands for both, as no gate is beside it."""
PARTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(WHOLE_QKV, ("q", "k", "v")), **dict.fromkeys(WHOLE_MLP, ("gate", "up")),
    **dict.fromkeys(("linear_proj", "output_proj", "out_proj", "attention_dense", "dense", "wo"), ("o",)),
    **dict.fromkeys(("fc2", "fc_out", "linear_fc2", "mlp_fc2", "dense_4h_to_h"), ("down",)),
    **dict.fromkeys(("attention", "attention_all"), ("q", "k", "v", "o")),
    **dict.fromkeys(("mlp", "mlp_all"), ("gate", "up", "down")),
    "wq": ("q",), "wk": ("k",), "wv": ("v",), "w1": ("gate",), "w2": ("down",), "w3": ("up",), "c_proj": ("o", "down"),
}  # fmt: skip
"""Other names -> parts: of GPT-2, Falcon, BLOOM, GPT-NeoX, GPT-J, Phi, OPT, MPT, ChatGLM, InternLM, Mixtral, Megatron, NeMo. c_proj
of GPT-2 is two layers.  [transformers, models/*/modeling_*.py; peft, utils/constants.py]"""
MLA = {"kv_a_proj_with_mqa", "kv_b_proj"}
"""Layers of keys and values in latent attention, which has those of the query beside them."""
MIXERS = re.compile(r"in_proj_(qkvz?|[zab]|ba)")
"""Layers of linear attention that are projections apart, which "all" has too.  [transformers, qwen3_next, qwen3_5]"""
TABLES = re.compile(r"lm_head|output_layer|embed_(tokens|in|out)|(word|tok)_embeddings|wte|all-embedding|^output$")
"""Names of tables of the vocabulary."""
EVERY = re.compile(r"all([-_]\w+)?|linear|auto|default|none|\.?\*|", re.IGNORECASE)
"""Words that stand for all linear layers."""


def listed(named: Any) -> list[Any]:
    """The words of a list, or of a text with commas."""
    return list(named) if isinstance(named, list | tuple) else re.split(r"[,\s]+", str(named))


def linear_layers(words: list[Any]) -> set[str]:
    """Parts that some names stand for; a name that is not known is a part of its own."""
    names = [(word, word.strip().rpartition(".")[2].lower()) for text in words for word in _alternatives(str(text))]
    parts: set[str] = set()
    for word, tail in names:
        if TABLES.search(tail) and len(words) > 1:  # a note says that tables are not priced
            continue
        if tail == "c_proj" and (place := re.search(r"(mlp)|attn", word)) is not None:
            parts.add("down" if place[1] else "o")
        else:
            parts |= set(PARTS.get(tail, ())) or {tail.removesuffix("_proj")}
    tails = {tail for _, tail in names}
    if tails >= MLA and (tails >= {"q_a_proj", "q_b_proj"} or "q_proj" in tails):
        parts = parts - {"q_a", "q_b", *(one.removesuffix("_proj") for one in MLA)} | {"q", "k", "v"}
    return parts | ({"up"} if {"c_attn", "w1", "w2"} <= tails else set())  # of Qwen 1, whose w1 and w2 are gate and up


def unknown_layers(words: list[Any]) -> list[str]:
    """Names among some that stand for no linear layer known here, nor for all of them."""
    named = [str(one).strip() for one in words]
    if linear_layers(words) <= set(ALL):
        return []
    named = [one for one in named if not MIXERS.fullmatch(one.rpartition(".")[2])] if linear_layers(words) >= set(ALL) else named
    return [one for one in named if not (EVERY.fullmatch(one) or TABLES.search(one) or linear_layers([one]) <= set(ALL))]


def joint_layers(words: list[Any]) -> list[str]:
    """Names among some of layers that are several in one, wherever those would be layers of their own."""
    named = [str(one).strip() for one in words]
    return [one for one in named if one.rpartition(".")[2].lower() in (*WHOLE_QKV, "gate_up_proj", "gate_up")]


def _alternatives(text: str) -> list[str]:
    """The names that an expression ends with: of .*self_attn.(q|v)_proj q_proj and v_proj."""
    last = re.search(r"\((?:\?:)?([\w|]{1,200})\)(\w{0,20})[^\w|]{0,4}$", text)
    return [f"{one}{last[2]}" for one in last[1].split("|")] if last else [text]
