"""Logs of torchtitan.

Format of torchtitan main of 2025-08 to 2026-05 (components/metrics.py, train.py, distributed/parallel_dims.py); 'wps' instead of
'tps' and 'Building 2-D device mesh' instead of the list of degrees are of 2024. Colours are codes within the line.

    [rank0]:[titan] 2025-08-22 07:52:50,415 - root - INFO - Building device mesh with parallelism: pp=1, dp_replicate=1,
      dp_shard=8, cp=1, tp=1, ep=1                                                                                (one line)
    ... Building llama3 8B with TransformerModelArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256,
      multiple_of=1024, ffn_dim_multiplier=1.3, ..., max_seq_len=8192, ...)
    ... CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory
    ... Applied selective activation checkpointing to the model
    ... Trainer is initialized with local batch size 8, global batch size 64, gradient accumulation steps 1, sequence length 8192,
    ... step: 10  loss:  8.0119  grad_norm:  2.2  memory: 42.15GiB(53.29%)  tps: 6,012  tflops: 348.2  mfu: 35.20%

tps counts the tokens of one GPU; memory is the peak of what the allocator reserved.
"""

import math
import re
from typing import Any

from planner.trainers.reading.log_facts import Log, Settings, scan

WRITER, MARK = "torchtitan", "memory:"
_STEP = re.compile(
    r"step:\s*(?P<number>\d+)\s+loss:\s*(?P<loss>[\d.]*).*?memory:\s*(?P<reserved>[\d.]+)GiB.*?"
    r"\b[tw]ps:\s*(?P<tokens_per_second_per_gpu>[\d,]+)"
)
_MESH = re.compile(r"Building device mesh with parallelism: (.*)")
_OLD_MESH = re.compile(r"Building \d-D device mesh with \[(.*?)\], \[(.*?)\]")
_MODEL = re.compile(r"Building (\S+) (\S+) with \w*ModelArgs\((.*)\)")
_BATCH = re.compile(r"local batch size (\d+), global batch size (\d+).*?sequence length (\d+)")
_DEVICE = re.compile(r"CUDA capacity: (.+?) with [\d.]+GiB")
_RECOMPUTE = re.compile(r"Applied (\w+?)(?:AC)? activation checkpointing")
_FP8 = re.compile(r"Float8 (?:\w+ )?training active|Swapped to Float8")
_SIZES = {
    "model.hidden": "dim", "model.layers": "n_layers", "model.heads": "n_heads", "model.vocab": "vocab_size",
    "model.head_dim": "head_dim",
}  # fmt: skip


def read(text: str) -> Log:
    """Steps, memory, mesh, model and batch."""
    log, mesh, batch = Log(framework="torchtitan", steps=[]), dict[str, int](), []
    compiled = False
    for line in scan(log, text, {"step:": (_STEP,)}):
        if match := _MESH.search(line):
            mesh = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match.group(1))}
        elif match := _OLD_MESH.search(line):
            names, sizes = re.findall(r"\w+", match.group(1)), re.findall(r"\d+", match.group(2))
            mesh = {"dp_shard" if name == "dp" else name: int(size) for name, size in zip(names, sizes, strict=False)}
        elif match := _MODEL.search(line):
            log.facts |= _model(match.group(1), match.group(2), match.group(3))
        elif match := _BATCH.search(line):
            batch = [int(found) for found in match.groups()]
        elif match := _DEVICE.search(line):
            log.gpu = match.group(1)
        elif match := _RECOMPUTE.search(line):
            kind = match.group(1).lower()
            log.facts["recompute"] = "per-op selective" if kind == "selective" else kind
        elif "with torch.compile" in line:
            compiled = True
        elif _FP8.search(line):
            log.facts["precision"] = "fp8"
    if mesh:
        log.facts |= _degrees(mesh)
    if batch:  # the local batch: sequences per data parallel rank and accumulation step
        local, whole, length = batch
        log.facts |= {
            "batch.global": whole,
            "batch.micro": local if mesh.get("pp", 1) == 1 else 1,
            "model.seq": length,
        }
    if mesh or batch:
        log.facts["compile"] = compiled
        log.facts.setdefault("recompute", "none")
    return log


def _model(name: str, flavor: str, text: str) -> dict[str, Any]:
    """Sizes of a Llama-type model; the width of its MLP by its own rule (models/llama3/model.py).

    Of a mixture of experts the width is left out, as a row needs more of it than the line holds: --model says the rest.
    """
    sizes = Settings(re.findall(r"(\w+)=([\w.]+)", text))
    facts: dict[str, Any] = sizes.facts(_SIZES) | {
        "model.name": f"{name}-{flavor}".lower(), "model.kv_heads": sizes.value("n_kv_heads") or sizes.value("n_heads"),
        "model.gated": True, "model.tied_embeddings": sizes.get("enable_weight_tying") == "True",
    }  # fmt: skip
    hidden, multiple = sizes.value("dim"), sizes.value("multiple_of")
    if "moe_args=" in text and sizes.get("moe_enabled") != "False":
        return facts
    if sizes.value("hidden_dim"):
        facts["model.ffn"] = sizes.value("hidden_dim")
    elif hidden and multiple:
        width = int(8 * hidden / 3)
        more = sizes.get("ffn_dim_multiplier", "None")
        width = width if more == "None" else int(float(more) * width)
        facts["model.ffn"] = multiple * math.ceil(width / multiple)
    return facts


def _degrees(mesh: dict[str, int]) -> dict[str, Any]:
    """Degrees and sharding."""
    tp, pp, cp, ep, replicate, shard = (
        mesh.get(name, 1) for name in ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard")
    )
    dp = replicate * shard
    return {
        "parallel.tp": tp, "parallel.pp": pp, "parallel.cp": cp, "parallel.dp": dp, "parallel.gpus": tp * pp * cp * dp,
        "parallel.vpp": 1, "parallel.ep": ep, "parallel.zero": 3 if shard > 1 else 0,
        "parallel.shard": shard if replicate > 1 and shard > 1 else None,
    }  # fmt: skip
