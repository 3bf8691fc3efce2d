"""What a row trained with: the trainer as it was set up, precision, optimizer and adapters."""

import json
import re
from functools import cache
from typing import Any

from planner.runs.names import Reading
from planner.trainer import Trainer, load_trainer, merge_changes
from planner.trainer_records import OVERLAPS, PASSES


@cache
def shipped_trainer(name: str) -> Trainer:
    """A trainer of the library, read once."""
    return load_trainer(name)


_NOTES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"RMS kernel", {"passes": {"norm": 1.0}, "-unfused": ["norm"]}),
    (r"flash_attentionv1", {"attention_kernel": "fa1"}),
    (r"kernel: torch\b", {"+unfused": ["softmax"]}),
    # Liger: head and loss run together in chunks of tokens; no logits of the whole batch.
    (r"Liger kernels", {"logit_bytes": 0.0, "passes": dict.fromkeys(PASSES, 1.0)}),
    (r"\bdropout 0\.[1-9]", {"dropout": True}),
    (r"(?<!no )CUDA graphs(?! router)", {"cuda_graphs": "layers"}),
    (r"cuda graphs \w+/", {"cuda_graphs": "none"}),
    # An implementation of 'none' captures nothing, whatever the scope says.
    (r"cuda graphs (?!none)\w+/\[[^\]]*'attn'", {"cuda_graphs": "layers"}),
    (r"cuda graphs (?!none)(\w*full\w*/|\w+/\w*full|\w+/\[[^\]]*full)", {"cuda_graphs": "layers_and_experts"}),
    (r"(?i)deep-?ep", {"expert_dispatch": "deepep"}),
    (r"(?i)hybrid-?ep", {"expert_dispatch": "deduplicated"}),
    (r"a2a overlap on|EP overlap( on|,|$)", {"+overlap": ["ep"]}),
    (
        r"fused grouped MLP",
        {"fused_experts": True, "-unfused": ["grouped_gemm", "expert_padding", "expert_bias", "clamp"]},
    ),
    (r"fp8 attention", {"+fp8": ["attention"]}),
    (r"CUDA_LAUNCH_BLOCKING=1", {"-overlap": [*OVERLAPS]}),
)
"""What notes say about a trainer: facts, and members of its sets that are added (+) or taken away (-). Later ones count."""


@cache
def _variant(name: str, changes: str) -> Trainer:
    """A trainer with some facts replaced, as JSON: equal changes give one object."""
    return shipped_trainer(name).replace(**json.loads(changes))


def trainer_of(reading: Reading) -> Trainer:
    """The trainer with what the row says about kernels, overlap, graphs and compilation."""
    entry, base = reading.entry, shipped_trainer(reading.entry["trainer"])
    compiled = {False: "eager", True: "compiled"}.get(reading.get("compile"), "")
    said = [facts for pattern, facts in _NOTES if reading.note(pattern)]
    for flag, names in (("tp_overlap", entry.get("tp_overlap", ["tp"])), ("grad_overlap", ["gradients", "parameters"])):
        if reading.get(flag) is not None:
            said.append({f"{'+' if reading.get(flag) else '-'}overlap": names})
    if reading.get("flash_attention") is not None:
        said.insert(0, {"attention": "flash" if reading.get("flash_attention") else "unfused"})
    facts = [{key: value for key, value in one.items() if key[0] not in "+-"} for one in said]
    changes = merge_changes(
        entry.get("changes", {}), reading.recipe.get("changes", {}), entry.get(compiled, {}), *facts
    )
    for name in ("unfused", "overlap", "fp8"):
        more, less = ({item for one in said for item in one.get(f"{sign}{name}", ())} for sign in "+-")
        changes[name] = sorted(({*changes.get(name, base.fact(name))} | more) - less)
    if reading.note(r"token-? ?drop"):
        graphs = changes.get("cuda_graphs", base.host.cuda_graphs)
        changes["cuda_graphs"] = "layers_and_experts" if graphs.startswith("layers") else "static_experts"
    if "optimizer_bytes" in reading.recipe:
        changes["optimizer_bytes"] = {**base.stored.optimizer_bytes, "adam": reading.recipe["optimizer_bytes"]}
    return _variant(entry["trainer"], json.dumps(changes, sort_keys=True))


def precision_of(reading: Reading) -> str:
    """Precision of the row; of fp8 the recipe in the notes, per-tensor scaling when they name none."""
    precision = reading.get("precision") or reading.entry.get("precision", "bf16")
    schemes = {"mxfp8": "mxfp8", "row-?wise": "fp8_row", "block-?wise|subchannel": "fp8_block", "": "fp8"}
    if precision == "fp8":
        return next(name for pattern, name in schemes.items() if reading.note(f"(?i){pattern}"))
    return str(precision)


def optimizer_of(reading: Reading, assumptions: list[str]) -> str:
    """The optimizer by what it stores: Adam, Adam in 8 bit, Muon or SGD."""
    text = str(reading.get("optimizer") or "adam").lower()
    for pattern, name in (("8-?bit", "adam_8bit"), ("muon", "muon"), ("sgd", "sgd"), ("adam", "adam")):
        if re.search(pattern, text):
            return name
    assumptions.append(f"optimizer {text} stores what Adam stores")
    return "adam"


def lora_rank_of(reading: Reading) -> int:
    """Rank of the adapters; 0 = every weight is trained."""
    if not reading.note(r"\bLoRA\b"):
        return 0
    rank = reading.note(r"rank (\d+)")
    return int(rank.group(1) if rank else reading.fact("lora_rank", 16))
