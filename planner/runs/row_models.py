"""The model that a row trained, from its fields, its notes and the preset of its name."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from planner import library, units
from planner import model as models
from planner.cost.parameters import total_parameters
from planner.model import ModelSpec
from planner.model_names import aliases
from planner.runs.rows import Row, UnsupportedError
from planner.runs.software import default_of


@functools.cache
def _presets() -> list[tuple[str, str]]:
    """(letters and digits of a name or alias, preset), longest first: the first prefix is the most specific."""
    known = {name: name for name in library.names("models")} | aliases()
    return sorted(((re.sub(r"\W", "", n.lower()), p) for n, p in known.items()), key=lambda pair: (-len(pair[0]), pair))


@functools.cache
def _preset(name: str) -> ModelSpec | None:
    """The preset whose name begins the row's model name ('deepseek-v3-4layers'), if there is one."""
    plain = re.sub(r"\W", "", name.lower())
    found = next((preset for known, preset in _presets() if plain.startswith(known)), None)
    return models.load_model(found) if found else None


def model_columns(model: ModelSpec) -> dict[str, Any]:
    """A model in the fields of a row."""
    found: dict[str, Any] = {
        "name": model.name, "hidden": model.hidden_size, "layers": model.num_layers, "heads": model.num_heads,
        "kv_heads": model.num_kv_heads, "head_dim": model.head_dim, "ffn": model.ffn_size, "gated": model.gated,
        "vocab": model.vocab_size, "tied_embeddings": model.tied_embeddings,
    }  # fmt: skip
    if model.is_moe:
        found |= {"experts": model.num_experts, "topk": model.top_k, "moe_ffn": model.expert_ffn_size,
                  "shared_experts": model.num_shared_experts, "dense_layers": model.num_dense_layers}  # fmt: skip
    return found


def completed(row: Row) -> Row:
    """The row with the sizes of the preset of its name where it leaves heads open; nothing that it states is changed."""
    model = row.data["model"]
    preset = None if model.get("heads") else _preset(model.get("name") or "")
    known = model_columns(preset) if preset else {}
    if any(model.get(key) not in (None, known.get(key)) for key in ("hidden", "layers", "experts")):
        return row
    stated = {key: value for key, value in model.items() if value is not None}
    return dataclasses.replace(row, data={**row.data, "model": {**known, **stated}}) if preset else row


def model_of(row: Row) -> ModelSpec:
    """The row's model; details that the schema has no field for come from the preset of that name, when sizes agree."""
    heads = row.get("model.heads")
    padded = row.note(r"padded to (\d+) \(TP 8\) or (\d+) \(TP 16\)")
    if padded:
        heads = int(padded.group(1 if row.get("parallel.tp") == 8 else 2))
    elif heads % (row.get("parallel.tp") or 1):
        raise UnsupportedError(f"{heads} heads do not divide by tp {row.get('parallel.tp')}; padding is not stated")
    mtp = bool(default_of(row, "mtp", False)) and not row.note("w/o MTP")
    return _build_model(
        tuple(sorted((*row.data["model"].items(), ("heads_run", heads)))), mtp, row.get("model.position")
    )


@functools.cache
def _build_model(items: tuple[tuple[str, Any], ...], mtp: bool, position: str | None) -> ModelSpec:
    m = dict(items)
    heads, kv_heads = m["heads_run"], m.get("kv_heads") or m["heads"]
    if heads != m["heads"]:
        kv_heads = heads if kv_heads == m["heads"] else kv_heads
    preset = _preset(m.get("name") or "")
    if preset and (preset.hidden_size, preset.num_heads) != (m["hidden"], heads):
        preset = None
    mla = m.get("attention") == "mla"
    if mla and (preset is None or not preset.is_mla):
        raise UnsupportedError(f"model not stated: the MLA sizes of '{m.get('name')}'")
    if preset and preset.linear and preset.num_layers != m["layers"]:
        raise UnsupportedError(f"model not stated: which of the {m['layers']} layers of '{m.get('name')}' have linear attention")
    fields = dataclasses.fields(ModelSpec)
    base: dict[str, Any] = {one.name: getattr(preset, one.name) for one in fields} if preset else _generic(m, position)
    base |= {
        "name": m.get("name") or "model", "num_layers": m["layers"], "hidden_size": m["hidden"], "num_heads": heads,
        "num_kv_heads": heads if mla else kv_heads, "ffn_size": m.get("ffn") or m.get("moe_ffn"), "gated": m["gated"],
        "max_sequence_length": m["seq"], "mtp_layers": base.get("mtp_layers", 0) if mtp else 0,
        "published_parameters": 0.0, "published_active_parameters": 0.0, "source": "",
    }  # fmt: skip
    if preset and preset.is_sparse:
        base["index_layers"] = round(preset.index_layers / preset.num_layers * m["layers"])
    if not mla:
        base["head_dim"] = m.get("head_dim") or (preset.head_dim if preset else m["hidden"] // heads)
    if m.get("tied_embeddings") is not None:
        base["tied_embeddings"] = m["tied_embeddings"]
    if base.get("position") == "learned":
        base["num_position_embeddings"] = m["seq"]
    base |= _experts(m, preset) | _window(m, preset)
    same = preset is not None and preset.num_layers == m["layers"]
    base["vocab_size"] = m.get("vocab") or (preset.vocab_size if preset and same else _vocabulary(base, m))
    return ModelSpec(**base)


def _generic(m: Mapping[str, Any], position: str | None) -> dict[str, Any]:
    """Details of a model without a preset: GPT-type (plain MLP, one key head per query head), else Llama-type."""
    gpt = not m["gated"] and m.get("attention") in (None, "mha")
    return {
        "position": (position or "learned") if gpt else "rope", "norm": "rmsnorm" if m["gated"] else "layernorm",
        "activation": "silu" if m["gated"] else "gelu", "linear_bias": gpt, "tied_embeddings": gpt,
        "embedding_norm": position == "alibi" and gpt,
    }  # fmt: skip


def _experts(m: Mapping[str, Any], preset: ModelSpec | None) -> dict[str, Any]:
    if not m.get("experts"):
        plain = dict.fromkeys(("num_experts", "top_k", "expert_ffn_size", "num_shared_experts", "num_dense_layers"), 0)
        return {**plain, "shared_expert_ffn_size": 0, "expert_hidden_size": 0, "moe_layer_interval": 1}
    shared = m.get("shared_experts") or 0
    width = m.get("moe_ffn") or m.get("ffn")
    same = preset is not None and preset.num_shared_experts == shared
    return {
        "num_experts": m["experts"], "top_k": m.get("topk"), "expert_ffn_size": width, "num_shared_experts": shared,
        "shared_expert_ffn_size": preset.shared_expert_ffn_size if preset and same else shared * (width or 0),
        "num_dense_layers": m.get("dense_layers") or 0,
    }  # fmt: skip


def _window(m: Mapping[str, Any], preset: ModelSpec | None) -> dict[str, Any]:
    """Windowed layers: the preset's share of the layers; all of them when only a window is given."""
    window = m.get("window") or (preset.window if preset else 0)
    if not window:
        return {"window": 0, "num_windowed_layers": 0, "chunked_attention": False}
    share = preset.num_windowed_layers / preset.num_layers if preset and preset.window else 1.0
    return {"window": window, "num_windowed_layers": round(share * m["layers"])}


def _vocabulary(base: Mapping[str, Any], m: Mapping[str, Any]) -> int:
    """Vocabulary that is not stated, from the published parameters: V = (P - layers) / (h, or 2 h untied)."""
    if not m.get("params_b"):
        raise UnsupportedError("model not stated: vocab")
    without = total_parameters(ModelSpec(**{**base, "vocab_size": 1}))
    tables = 1 if base.get("tied_embeddings") else 2
    vocabulary = round((m["params_b"] * units.GIGA - without) / (tables * m["hidden"]))
    if not 1000 <= vocabulary <= 300000:
        raise UnsupportedError("model not stated: vocab, and the published parameters do not tell it")
    return int(vocabulary)
