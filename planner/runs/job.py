"""What a row trained: the trainer as it was set up, precision, optimizer and adapters; the model, with its preset's details."""

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from planner import library, units
from planner import model as models
from planner.cost.parameters import total_parameters
from planner.model import ModelSpec
from planner.runs.rows import Row, UnsupportedError, frameworks
from planner.trainer import Trainer, load_trainer, merge_changes


@cache
def shipped_trainer(name: str) -> Trainer:
    """A trainer of the library, read once."""
    return load_trainer(name)


@cache
def _variant(name: str, changes: str) -> Trainer:
    """A trainer with some facts replaced, as JSON: equal changes give one object."""
    return shipped_trainer(name).replace(**json.loads(changes))


def trainer_of(row: Row) -> Trainer:
    """The trainer with what the row says about kernels, overlap, graphs and compilation."""
    entry, base = row.entry, shipped_trainer(row.entry["trainer"])
    compiled = {False: "eager", True: "compiled"}.get(row.get("compile"), "")
    said = [one["facts"] for one in frameworks()["notes"] if row.note(one["note"])]
    for flag, names in (("tp_overlap", entry.get("tp_overlap", ["tp"])), ("grad_overlap", ["gradients", "parameters"])):
        if row.get(flag) is not None:
            said.append({f"{'+' if row.get(flag) else '-'}overlap": names})
    if row.get("flash_attention") is not None:
        said.insert(0, {"attention": "flash" if row.get("flash_attention") else "unfused"})
    facts = [{key: value for key, value in one.items() if key[0] not in "+-"} for one in said]
    changes = merge_changes(
        entry.get("changes", {}), row.recipe.get("changes", {}), entry.get(compiled, {}), *facts
    )
    for name in ("unfused", "overlap", "fp8"):
        more, less = ({item for one in said for item in one.get(f"{sign}{name}", ())} for sign in "+-")
        changes[name] = sorted(({*changes.get(name, base.fact(name))} | more) - less)
    if row.note(r"token-? ?drop"):
        graphs = changes.get("cuda_graphs", base.host.cuda_graphs)
        changes["cuda_graphs"] = "layers_and_experts" if graphs.startswith("layers") else "static_experts"
    if "optimizer_bytes" in row.recipe:
        changes["optimizer_bytes"] = {**base.stored.optimizer_bytes, "adam": row.recipe["optimizer_bytes"]}
    return _variant(entry["trainer"], json.dumps(changes, sort_keys=True))


def precision_of(row: Row) -> str:
    """Precision of the row; of fp8 the recipe in the notes, per-tensor scaling when they name none."""
    precision = row.get("precision") or row.entry.get("precision", "bf16")
    schemes = {"mxfp8": "mxfp8", "row-?wise": "fp8_row", "block-?wise|subchannel": "fp8_block", "": "fp8"}
    if precision == "fp8":
        return next(name for pattern, name in schemes.items() if row.note(f"(?i){pattern}"))
    return str(precision)


def optimizer_of(row: Row, assumptions: list[str]) -> str:
    """The optimizer by what it stores: Adam, Adam in 8 bit, Muon or SGD."""
    text = str(row.get("optimizer") or "adam").lower()
    for pattern, name in (("8-?bit", "adam_8bit"), ("muon", "muon"), ("sgd", "sgd"), ("adam", "adam")):
        if re.search(pattern, text):
            return name
    assumptions.append(f"optimizer {text} stores what Adam stores")
    return "adam"


def lora_rank_of(row: Row) -> int:
    """Rank of the adapters; 0 = every weight is trained."""
    if not row.note(r"\bLoRA\b"):
        return 0
    rank = row.note(r"rank (\d+)")
    return int(rank.group(1) if rank else row.fact("lora_rank", 16))


# --------------------------------------------------------------------------------------------------------------- model


@cache
def _presets() -> list[tuple[str, str]]:
    """(letters and digits of a name or alias, preset), longest first: the first prefix is the most specific."""
    known = {name: name for name in library.names("models")} | models.aliases()
    return sorted(((re.sub(r"\W", "", n.lower()), p) for n, p in known.items()), key=lambda pair: (-len(pair[0]), pair))


@cache
def _preset(name: str) -> ModelSpec | None:
    """The preset whose name begins the row's model name ('deepseek-v3-4layers'), if there is one."""
    plain = re.sub(r"\W", "", name.lower())
    found = next((preset for known, preset in _presets() if plain.startswith(known)), None)
    return models.load_model(found) if found else None


def model_of(row: Row) -> ModelSpec:
    """The row's model; details that the schema has no field for come from the preset of that name, when sizes agree."""
    heads = row.get("model.heads")
    padded = row.note(r"padded to (\d+) \(TP 8\) or (\d+) \(TP 16\)")
    if padded:
        heads = int(padded.group(1 if row.get("parallel.tp") == 8 else 2))
    elif heads % (row.get("parallel.tp") or 1):
        raise UnsupportedError(f"{heads} heads do not divide by tp {row.get('parallel.tp')}; padding is not stated")
    mtp = bool(row.entry.get("mtp")) and "w/o MTP" not in row.remarks
    return _build_model(
        tuple(sorted((*row.data["model"].items(), ("heads_run", heads)))), mtp, row.entry.get("position")
    )


@cache
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
    base: dict[str, Any] = dataclasses.asdict(preset) if preset else _generic(m, position)
    base |= {
        "name": m.get("name") or "model", "num_layers": m["layers"], "hidden_size": m["hidden"], "num_heads": heads,
        "num_kv_heads": heads if mla else kv_heads, "ffn_size": m.get("ffn") or m.get("moe_ffn"), "gated": m["gated"],
        "max_sequence_length": m["seq"], "mtp_layers": base.get("mtp_layers", 0) if mtp else 0,
        "published_parameters": 0.0, "published_active_parameters": 0.0, "source": "",
    }  # fmt: skip
    if not mla:
        base["head_dim"] = m.get("head_dim") or (preset.head_dim if preset else m["hidden"] // heads)
    if m.get("tied_embeddings") is not None:
        base["tied_embeddings"] = m["tied_embeddings"]
    if base.get("position") == "learned":
        base["num_position_embeddings"] = m["seq"]
    base |= _experts(m, preset) | _window(m, preset)
    base["vocab_size"] = m.get("vocab") or _vocabulary(base, m)
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
        plain = {"num_experts": 0, "top_k": 0, "expert_ffn_size": 0, "num_shared_experts": 0, "num_dense_layers": 0}
        return {**plain, "shared_expert_ffn_size": 0, "moe_layer_interval": 1}
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
        return {"window": 0, "num_windowed_layers": 0}
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
