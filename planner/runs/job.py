"""How a row was trained, from its fields and notes: optimizer, adapters; degrees, schedule, recompute."""

import functools
import math
import operator
import re
from typing import Any

from planner.layout import CpMethod, Layout, Module, Recompute, Schedule, module_names
from planner.model import ModelSpec
from planner.runs.host_memory import offload_of
from planner.runs.rows import Row, UnsupportedError
from planner.runs.software import default_of, is_lora, shipped_trainer

MICROBATCHES = 8
"""Microbatches per pipeline stage where the global batch is not stated, but a rate is: nearly the rate of any larger batch."""
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


def objective_of(row: Row) -> str:
    """'dpo' where the row says so; its batch counts pairs then."""
    return "dpo" if row.note(r"\bdpo\b|direct preference") else "lm"


def expert_imbalance_of(row: Row, model: ModelSpec) -> float:
    """1 where the framework's benchmarks or the row route by force, else 0: as a trained router does."""
    forced = row.note(r"forced? ?-?(load )?balanc") and not row.note(r"not balanced by force")
    return float(not model.is_moe or bool(row.entry.get("balanced") or forced))


# -------------------------------------------------------------------------------------------------------------- layout


def layout_of(row: Row, model: ModelSpec, assumptions: list[str]) -> Layout:
    """The layout the row ran with; what had to be guessed is added to ``assumptions``. Raises UnsupportedError."""
    tp, pp, cp = row.get("parallel.tp"), row.get("parallel.pp"), row.get("parallel.cp") or 1
    ep, vpp = row.get("parallel.ep") or 1, row.get("parallel.vpp") or 1
    dp = row.get("parallel.dp") or max((row.get("parallel.gpus") or 0) // (tp * pp * cp), 1)
    gpus = row.get("parallel.gpus") or tp * pp * cp * dp
    if tp * pp * cp * dp != gpus:
        raise UnsupportedError(f"tp {tp} times pp {pp} times cp {cp} times dp {dp} are not the {gpus} GPUs stated")
    micro = row.get("batch.micro") or _micro(row, dp, pp, assumptions)
    batch = row.get("batch.global") or MICROBATCHES * pp * micro * dp
    if not row.get("batch.global"):
        assumptions.append(f"{MICROBATCHES} microbatches per pipeline stage")
    if pp > 1 and row.get("parallel.vpp") is None:
        assumptions.append("virtual stages: what is fastest and fits")
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
        split = shipped_trainer(row.entry["trainer"]).legal.sequence_parallel in ("always", "usual")
    return Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep if model.is_moe else 1, etp=etp, vpp=vpp, dp_shard=_shard(row, dp),
        micro_batch_size=micro, num_microbatches=math.ceil(steps), zero=_zero(row),
        sequence_parallel=int(tp > 1 and bool(split)), cp_method=_cp_method(row),
        schedule=_schedule(row, pp, vpp), **offload_of(row),
        **_recompute(row, pp), **_stage_layers(row, model, pp, vpp),
    )  # fmt: skip


def _micro(row: Row, dp: int, pp: int, assumptions: list[str]) -> int:
    """A micro batch that is not stated: 1, unless a larger one fits (``left_open``).

    Where the framework splits the batch of a replica into as many microbatches as there are stages: what that gives.
    """
    if row.get("batch.global") == dp:
        return 1
    if default_of(row, "microbatches", "") == "pp" and (row.get("batch.global") or 0) % (dp * pp) == 0:
        return int(row.get("batch.global") // (dp * pp))
    assumptions.append("micro batch: what is fastest and fits")
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
    """Mode, modules and layers of a text such as 'full', '10 layers full', 'every second layer full', 'selective: mlp'."""
    stated = row.get("recompute")
    text = str(default_of(row, "recompute", "none") if stated is None else stated).strip().lower()
    if text == "full except attention output" and row.options.get("attention_output", "kept") == "kept":
        text = "full"
    if text == "selective" and "torchtitan" in row.framework:
        text = "per-op selective"
    layers = re.fullmatch(r"(\d+) layers full", text)
    if layers:
        return {"recompute": Recompute.FULL, "recompute_layers": int(layers.group(1))}
    if text == "every second layer full":
        return {"recompute": Recompute.FULL, "recompute_layers": max(row.get("model.layers") // pp // 2, 1)}
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
