"""What a row trained, and how, from its fields and notes: optimizer, adapters; model; degrees, schedule, recompute."""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

from planner import library, units
from planner import model as models
from planner.cost.parameters import total_parameters
from planner.layout import CpMethod, Layout, Module, Recompute, Schedule, module_names
from planner.model import ModelSpec
from planner.runs.host_memory import offload_of
from planner.runs.rows import Row, UnsupportedError
from planner.runs.software import default_of, is_lora, shipped_trainer

_OPTIMIZERS = (
    ("paged.*8.?bit|8.?bit.*paged", "paged_adam_8bit"), ("8.?bit", "adam_8bit"), ("paged", "paged_adam"),
    ("adafactor", "adafactor"), ("lion", "lion"), ("muon", "muon"), ("sgd", "sgd"), ("adam", "adam"),
)  # fmt: skip
"""What texts of optimizers say, the most specific first."""
_TARGETS = (
    (r"\bon (q(uery)?) (and|&) v(alue)?\b|q_proj, ?v_proj\b", "qv"), (r"on (q, ?k,? (and )?v|qkv)\b", "qkv"),
    (r"on attention|attention (only|alone)", "attention"), (r"on all linear|all[ -]linear", "all"),
)  # fmt: skip
_FROZEN = (
    (r"nf4-?dq|double.?quant", "nf4_dq"), (r"qlora|nf4|\b4.?bit", "nf4"), (r"(8.?bit|int8) base|llm\.int8", "int8"),
    (r"fp8 base", "fp8"),
)  # fmt: skip


def optimizer_of(row: Row, assumptions: list[str]) -> str:
    """The optimizer by what it stores."""
    text = str(row.get("optimizer") or "adam").lower()
    for pattern, name in _OPTIMIZERS:
        if re.search(pattern, text):
            return name
    assumptions.append(f"optimizer {text} stores what Adam stores")
    return "adam"


def adapters_of(row: Row) -> dict[str, Any]:
    """Rank and targets of the adapters, and dtype of what they lie on, as fields of a workload; nothing where all is trained."""
    if not is_lora(row):
        return {"lora_rank": 0}
    rank = row.note(r"rank (\d+)")
    frozen = next((name for pattern, name in _FROZEN if re.search(pattern, row.notes, re.IGNORECASE)), "bf16")
    said = next((name for pattern, name in _TARGETS if row.note(pattern)), None)
    return {
        "lora_rank": int(row.get("lora_rank") or (rank.group(1) if rank else default_of(row, "lora_rank", 16))),
        "lora_targets": row.get("lora_targets") or said or default_of(row, "lora_targets", "all"),
        "frozen_weights": row.get("frozen_weights") or frozen,
    }


def expert_imbalance_of(row: Row, model: ModelSpec) -> float:
    """1 where the framework's benchmarks or the row route by force, else 0: as a trained router does."""
    forced = row.note(r"(?i)forced? ?-?(load )?balanc") and not row.note(r"(?i)not balanced by force")
    return float(not model.is_moe or bool(row.entry.get("balanced") or forced))


# --------------------------------------------------------------------------------------------------------------- model


@functools.cache
def _presets() -> list[tuple[str, str]]:
    """(letters and digits of a name or alias, preset), longest first: the first prefix is the most specific."""
    known = {name: name for name in library.names("models")} | models.aliases()
    return sorted(((re.sub(r"\W", "", n.lower()), p) for n, p in known.items()), key=lambda pair: (-len(pair[0]), pair))


@functools.cache
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


# -------------------------------------------------------------------------------------------------------------- layout


def layout_of(row: Row, model: ModelSpec, assumptions: list[str]) -> Layout:
    """The layout the row ran with; what had to be guessed is added to ``assumptions``. Raises UnsupportedError."""
    tp, pp, cp = row.get("parallel.tp"), row.get("parallel.pp"), row.get("parallel.cp") or 1
    ep, vpp = row.get("parallel.ep") or 1, row.get("parallel.vpp") or 1
    dp = row.get("parallel.dp") or max((row.get("parallel.gpus") or 0) // (tp * pp * cp), 1)
    gpus = row.get("parallel.gpus") or tp * pp * cp * dp
    if tp * pp * cp * dp != gpus:
        raise UnsupportedError(f"tp {tp} times pp {pp} times cp {cp} times dp {dp} are not the {gpus} GPUs stated")
    micro, batch = row.get("batch.micro") or _micro(row, dp, pp, assumptions), row.get("batch.global")
    steps = batch / (micro * dp)
    if steps < 1:
        raise UnsupportedError(f"global batch {batch} is smaller than micro batch {micro} times dp {dp}")
    if steps != int(steps):
        assumptions.append(f"{steps:.4g} microbatches per replica, rounded up: the last one is smaller")
    etp = _expert_tp(row, model, tp * cp * dp, ep) if model.is_moe else 1
    if model.is_moe and model.num_experts % ep:
        raise UnsupportedError(f"{model.num_experts} experts do not divide by ep {ep}")
    if pp * vpp > model.num_layers + 2:
        raise UnsupportedError(f"{pp} stages times vpp {vpp} are more than {model.num_layers} layers")
    split = row.get("parallel.sp")
    if split is None:
        split = shipped_trainer(row.entry["trainer"]).legal.sequence_parallel == "always"
    return Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep if model.is_moe else 1, etp=etp, vpp=vpp, dp_shard=_shard(row, dp),
        micro_batch_size=micro, num_microbatches=math.ceil(steps), zero=_zero(row),
        sequence_parallel=int(tp > 1 and bool(split)), cp_method=_cp_method(row),
        schedule=_schedule(row, pp, vpp), **offload_of(row),
        **_recompute(row, pp), **_stage_layers(row, model, pp, vpp),
    )  # fmt: skip


def _micro(row: Row, dp: int, pp: int, assumptions: list[str]) -> int:
    """A micro batch that is not stated: 1 where nothing else is possible, and in a pipeline, where it is the custom.

    Where the framework splits the batch of a replica into as many microbatches as there are stages: what that gives.
    """
    if row.get("batch.global") == dp:
        return 1
    if pp == 1:
        raise UnsupportedError("layout not stated: micro")
    if default_of(row, "microbatches", "") == "pp" and (row.get("batch.global") or 0) % (dp * pp) == 0:
        return int(row.get("batch.global") // (dp * pp))
    assumptions.append("micro batch 1")
    return 1


def _expert_tp(row: Row, model: ModelSpec, ranks: int, ep: int) -> int:
    """Expert tensor parallel degree: stated, else the framework's default where it divides the ranks of a stage; 1 for experts
    narrower than the hidden size, which nobody splits further.  [Megatron Core, moe/README.md: prefer ep over tp for experts]"""
    stated, fine = row.get("parallel.etp"), model.expert_ffn_size < model.hidden_size
    etp = stated or (row.get("parallel.tp") if default_of(row, "etp", 1) == "tp" and not fine else 1)
    if ranks % (etp * ep) and not stated:
        etp = 1
    if ranks % (etp * ep):
        raise UnsupportedError(f"ep {ep} times etp {etp} does not divide the {ranks} ranks of a pipeline stage")
    return int(etp)


def _shard(row: Row, dp: int) -> int:
    """Ranks that share the states when fewer than dp; 0 = all."""
    shard = row.get("parallel.shard") or 0
    if shard and shard < dp and dp % shard:
        raise UnsupportedError(f"a shard group of {shard} does not divide dp {dp}")
    return int(shard) if shard < dp else 0


def _zero(row: Row) -> int:
    zero = row.get("parallel.zero")
    zero = default_of(row, "zero", 0) if zero is None else zero
    if zero > 3:
        raise UnsupportedError(f"zero {zero} does not exist; it is 0 to 3")
    return int(min(zero, default_of(row, "pipelined_zero", 3)) if (row.get("parallel.pp") or 1) > 1 else zero)


def _cp_method(row: Row) -> int:
    """Ulysses where the notes say so, a ring where they say so, else the trainer's first method."""
    if row.note("Ulysses"):
        return int(CpMethod.A2A)
    methods = shipped_trainer(row.entry["trainer"]).legal.cp_methods
    if row.note("ring attention") or not methods:
        return int(CpMethod.RING)
    return int({"ring": CpMethod.RING, "a2a": CpMethod.A2A, "allgather": CpMethod.ALLGATHER}[methods[0]])


def _schedule(row: Row, pp: int, vpp: int) -> int:
    match = row.note(r"schedule:? ([\w-]+)")
    named = {"zb-v": Schedule.ZBV, "zb-1p": Schedule.ZB_H1, "zb-2p": Schedule.ZB_2P}
    usual = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
    return int(named.get(match.group(1).lower() if match else "", usual) if pp > 1 else Schedule.ONE_F_ONE_B)


_MODULES = {
    **{module_names(int(module))[0]: module for module in Module}, "layernorm": Module.NORM, "core_attn": Module.CORE_ATTENTION,
    "moe_act": Module.MLP_ACTIVATION, "mlp_act": Module.MLP_ACTIVATION, "mla_up_proj": Module.MLA_UP_PROJECTION,
}  # fmt: skip


_SELECTIVE = {
    "selective": Module.CORE_ATTENTION, "per-op selective": Module.EVERY_SECOND_MATMUL,
    "per-op selective, core_attn": Module.EVERY_SECOND_MATMUL | Module.CORE_ATTENTION,
}  # fmt: skip


def _recompute(row: Row, pp: int) -> dict[str, int]:
    """Mode, modules and layers of a text such as 'full', '10 layers full', 'selective: moe_act,layernorm'."""
    stated = row.get("recompute")
    text = str(default_of(row, "recompute", "none") if stated is None else stated).strip().lower()
    if text == "full except attention output" and row.options.get("attention_output", "kept") == "kept":
        text = "full"
    if text == "selective" and "torchtitan" in row.framework:
        text = "per-op selective"
    layers = re.fullmatch(r"(\d+) layers full", text)
    if layers:
        return {"recompute": Recompute.FULL, "recompute_layers": int(layers.group(1))}
    if text in ("none", "full"):
        return {"recompute": Recompute.FULL if text == "full" else Recompute.NONE}
    match = re.fullmatch(r"selective:\s*(.*)", re.sub(r"\([^)]*\)", "", text).strip())
    names = [name.strip() for name in match.group(1).split(",")] if match else []
    if text not in _SELECTIVE and (not names or not set(names) <= _MODULES.keys()):
        raise UnsupportedError(f"recompute '{stated}' is not understood")
    mask = _SELECTIVE.get(text) or functools.reduce(operator.or_, (_MODULES[name] for name in names))
    return {"recompute": Recompute.SELECTIVE, "recompute_modules": int(mask)}


def _stage_layers(row: Row, model: ModelSpec, pp: int, vpp: int) -> dict[str, int]:
    """Layers of the first and last stage: from the notes, from the framework's own table of layouts for this model, else
    one fewer where embedding and head count as a layer.

    A framework that assigns all its modules evenly, more to the first stages, says how many are before and after the layers.
    """
    if pp == 1:
        return {}
    modules = default_of(row, "modules", None)
    if modules:
        before, after = modules
        each, more = divmod(model.num_layers + before + after, pp)
        return {"first_stage_layers": each + (more > 0) - before, "last_stage_layers": each - after}
    last = row.note(r"last stage has (\d+) layer")
    if last:
        return {"last_stage_layers": int(last.group(1))}
    printed = row.note(r"pp layout (\S+)")
    known = default_of(row, "stages", {})
    known = known.get(pp * vpp, "") if known and re.search(known["model"], model.name, re.IGNORECASE) else ""
    chunks = chunk_layers(printed.group(1) if printed else known)
    if len(chunks) == pp * vpp and sum(chunks) == model.num_layers:
        stages = [sum(chunks[rank::pp]) for rank in range(pp)]
        return {"first_stage_layers": stages[0], "last_stage_layers": stages[-1]}
    total = model.num_layers
    if total % pp and (total + 2) % (pp * vpp) == 0 and (total + 2) // pp > 1:
        return {"first_stage_layers": (total + 2) // pp - 1, "last_stage_layers": (total + 2) // pp - 1}
    return {}


def chunk_layers(text: str) -> list[int]:
    """Transformer layers (t) of each chunk of Megatron's layout text: 'Et*2|(t*4|)*14tmL' -> [2, 4, ..., 4, 1]."""

    def repeat(match: re.Match[str]) -> str:
        return match.group(1) * min(int(match.group(2)), 1024)

    flat = re.sub(r"(\w)\*(\d+)", repeat, text.replace(",", ""))
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", repeat, flat)
    return [chunk.count("t") for chunk in flat.split("|")]
