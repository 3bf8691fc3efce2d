"""Reads decoders after GPT-2 in a Hugging Face config.json: steps of the table profiles/model_families.yaml."""

from collections.abc import Mapping

from planner.hybrid_configs import Fields, Reader


def multi_query(c: Reader, fields: Fields) -> Fields:
    """One key and value head for all queries."""
    return {"num_kv_heads": 1 if c.flag("multi_query", True) else fields["num_heads"]}


def opt_positions(c: Reader, fields: Fields) -> Fields:
    """The table of positions has two rows more than there are positions."""
    if c.size("word_embed_proj_dim", default=fields["hidden_size"]) != fields["hidden_size"]:
        raise c.error("word_embed_proj_dim other than hidden_size is not understood")
    return {"num_position_embeddings": fields["max_sequence_length"] + 2}


def falcon(c: Reader, fields: Fields) -> Fields:
    """Grouped or single keys and values, norms and positions by switches."""
    heads, new, parallel = fields["num_heads"], c.flag("new_decoder_architecture"), fields["parallel_attention"]
    kv = c.size("num_kv_heads", "n_head_kv", default=heads) if new else 1 if c.flag("multi_query", True) else heads
    norms = c.size("num_ln_in_parallel_attn", default=2 if new or not parallel else 1)
    return {"num_kv_heads": kv, "norms_per_layer": norms, "position": "alibi" if c.flag("alibi") else "rope"}


def mpt(c: Reader, fields: Fields) -> Fields:
    """Positions, keys and values and norms by switches, the MLP as a multiple of the hidden size."""
    parts = {one: c.data.get(one) for one in ("attn_config", "ffn_config")}
    inner, feed = (c.inner(part if isinstance(part, Mapping) else {}, name) for name, part in parts.items())
    if feed.data.get("ffn_type", "mptmlp") != "mptmlp" or inner.data.get("sliding_window_size") not in (None, -1):
        raise c.error("ffn_type other than mptmlp and a sliding_window_size are not understood")
    table_of = "learned" if c.flag("learned_pos_emb", True) else "none"
    position = "alibi" if inner.flag("alibi", True) else "rope" if inner.flag("rope") else table_of
    one_head = inner.data.get("attn_type") == "multiquery_attention"
    return {
        "num_kv_heads": 1 if one_head else inner.size("kv_n_heads", default=fields["num_heads"]), "position": position,
        "ffn_size": c.size("expansion_ratio", default=4) * fields["hidden_size"], "linear_bias": not c.flag("no_bias", True),
        "norm": "rmsnorm" if "rmsnorm" in str(c.data.get("norm_type")) else "layernorm", "qk_norm": inner.flag("qk_ln"),
        "num_position_embeddings": fields["max_sequence_length"] if position == "learned" else 0,
    }


GPTS = (multi_query, opt_positions, falcon, mpt)
