"""What a row trained with: the trainer as it was set up, precision, optimizer and adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from planner.runs.names import notes_of, recipe_of
from planner.runs.schema import Row
from planner.trainer import Trainer, load_trainer, merge_changes
from planner.trainer_records import OVERLAPS, PASSES


@cache
def shipped_trainer(name: str) -> Trainer:
    """A trainer of the library, read once."""
    return load_trainer(name)


@cache
def _variant(name: str, changes: str, on: frozenset[str], off: frozenset[str], adam_bytes: float | None) -> Trainer:
    """A trainer with some facts replaced (as JSON), some overlaps switched on or off, and its own Adam."""
    trainer = shipped_trainer(name).replace(**json.loads(changes))
    if adam_bytes is not None:
        trainer = trainer.replace(optimizer_bytes={**trainer.stored.optimizer_bytes, "adam": adam_bytes})
    return trainer.replace(overlap=(trainer.traffic.overlap | on) - off)


def trainer_of(row: Row, entry: Mapping[str, Any]) -> Trainer:
    """The trainer with what the row says about kernels, overlap, graphs and compilation."""
    notes, on, off = notes_of(row), set[str](), set[str]()
    compiled = {False: "eager", True: "compiled"}.get(row.get("compile"), "")
    changes = merge_changes(entry.get("changes", {}), recipe_of(row).get("changes", {}), entry.get(compiled, {}))
    base = shipped_trainer(entry["trainer"])
    unfused = set(changes.get("unfused", base.kernels.unfused))
    passes = changes["passes"] = dict(changes.get("passes", {}))
    if row.get("flash_attention") is not None:
        changes["attention"] = "flash" if row.get("flash_attention") else "unfused"
    if "RMS kernel" in notes:
        passes["norm"] = 1.0
        unfused.discard("norm")
    if "flash_attentionv1" in notes:
        changes["attention_kernel"] = "fa1"
    if re.search(r"kernel: torch\b", notes):
        unfused.add("softmax")
    if "Liger kernels" in notes:  # head and loss run together in chunks of tokens: no logits of the whole batch
        changes["logit_bytes"] = 0.0
        passes |= dict.fromkeys(PASSES, 1.0)
    if re.search(r"\bdropout 0\.[1-9]", notes):
        changes["dropout"] = True
    graphs = re.search(r"cuda graphs (\w+)/(\[[^\]]*\]|\w+)", notes)
    if graphs:  # an implementation of 'none' captures nothing, whatever the scope says
        captured = graphs.group(1) != "none" and bool(re.search(r"'attn'|full", graphs.group(0)))
        static = captured and "full" in graphs.group(0)
        changes["cuda_graphs"] = "layers_and_experts" if static else "layers" if captured else "none"
    elif re.search(r"(?<!no )CUDA graphs(?! router)", notes):
        changes["cuda_graphs"] = "layers"
    if re.search(r"hybrid-?ep", notes, re.IGNORECASE):
        changes["expert_dispatch"] = "deduplicated"
    elif re.search(r"deep-?ep", notes, re.IGNORECASE):
        changes["expert_dispatch"] = "deepep"
    switches = {"tp_overlap": entry.get("tp_overlap", ["tp"]), "grad_overlap": ["gradients", "parameters"]}
    for switch, names in switches.items():
        if row.get(switch) is not None:
            (on if row.get(switch) else off).update(names)
    if re.search(r"a2a overlap on|EP overlap( on|,|$)", notes):
        on.add("ep")
    if "fused grouped MLP" in notes:
        unfused -= {"grouped_gemm", "expert_padding", "expert_bias", "clamp"}
        changes["fused_experts"] = True
    if "fp8 attention" in notes:
        changes["fp8"] = sorted({*base.kernels.fp8, "attention"})
    if re.search(r"token-? ?drop", notes):
        graphs_now = changes.get("cuda_graphs", base.host.cuda_graphs)
        changes["cuda_graphs"] = "layers_and_experts" if graphs_now.startswith("layers") else "static_experts"
    if "CUDA_LAUNCH_BLOCKING=1" in notes:
        off.update(OVERLAPS)
    changes["unfused"] = sorted(unfused)
    adam_bytes = recipe_of(row).get("optimizer_bytes")
    return _variant(entry["trainer"], json.dumps(changes, sort_keys=True), frozenset(on), frozenset(off), adam_bytes)


def precision_of(row: Row, entry: Mapping[str, Any]) -> str:
    """Precision of the row; of fp8 the recipe in the notes, per-tensor scaling when they name none."""
    precision = row.get("precision") or entry.get("precision", "bf16")
    if precision == "fp8":
        notes = notes_of(row)
        if re.search(r"mxfp8", notes, re.IGNORECASE):
            return "mxfp8"
        if re.search(r"row-?wise", notes, re.IGNORECASE):
            return "fp8_row"
        return "fp8_block" if re.search(r"block-?wise|subchannel", notes, re.IGNORECASE) else "fp8"
    return str(precision)


def optimizer_of(row: Row, assumptions: list[str]) -> str:
    """The optimizer by what it stores: Adam, Adam in 8 bit, Muon or SGD."""
    text = str(row.get("optimizer") or "adam").lower()
    if "8-bit" in text or "8bit" in text:
        return "adam_8bit"
    if "muon" in text or "sgd" in text:
        return "muon" if "muon" in text else "sgd"
    if "adam" not in text:
        assumptions.append(f"optimizer {text} stores what Adam stores")
    return "adam"


def lora_rank_of(row: Row, entry: Mapping[str, Any]) -> int:
    """Rank of the adapters; 0 = every weight is trained."""
    if not re.search(r"\bLoRA\b", row.notes):
        return 0
    rank = re.search(r"rank (\d+)", row.notes)
    return int(rank.group(1)) if rank else int(recipe_of(row).get("lora_rank", entry.get("lora_rank", 16)))
