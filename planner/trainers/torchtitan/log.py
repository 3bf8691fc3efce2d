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

from planner.trainers.reading.log_facts import Log, Step, lines, number

WRITER = "torchtitan"
_STEP = re.compile(r"step:\s*(\d+)\s+loss:\s*([\d.]*).*?memory:\s*([\d.]+)GiB.*?\b[tw]ps:\s*([\d,]+)")
_MESH = re.compile(r"Building device mesh with parallelism: (.*)")
_OLD_MESH = re.compile(r"Building \d-D device mesh with \[(.*?)\], \[(.*?)\]")
_MODEL = re.compile(r"Building (\S+) (\S+) with \w*ModelArgs\((.*)\)")
_BATCH = re.compile(
    r"local batch size (\d+), global batch size (\d+)(?:, gradient accumulation steps (\d+))?.*?sequence length (\d+)"
)
_DEVICE = re.compile(r"CUDA capacity: (.+?) with [\d.]+GiB")
_OLD_NAMES = {
    "pp": "pp",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "dp": "dp_shard",
    "cp": "cp",
    "tp": "tp",
}


def matches(text: str) -> bool:
    """The text has step lines of torchtitan."""
    return any(_STEP.search(line) for line in lines(text) if "ps:" in line and "memory:" in line)


def read(text: str) -> Log:
    """Steps, memory, mesh, model and batch."""
    log = Log(framework="torchtitan", steps=[])
    mesh, compiled, batch = dict[str, int](), None, None
    for line in lines(text):
        if match := _STEP.search(line):
            log.steps.append(
                Step(
                    number=int(match.group(1)),
                    loss=float(match.group(2)) if match.group(2) else None,
                    tokens_per_second_per_gpu=number(match.group(4)),
                )
            )
            log.memory_gib = max(log.memory_gib or 0.0, float(match.group(3)))
        elif match := _MESH.search(line):
            mesh = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match.group(1))}
        elif match := _OLD_MESH.search(line):
            names, sizes = re.findall(r"\w+", match.group(1)), re.findall(r"\d+", match.group(2))
            pairs = zip(names, sizes, strict=False)
            mesh = {_OLD_NAMES[name]: int(size) for name, size in pairs if name in _OLD_NAMES}
        elif match := _MODEL.search(line):
            log.facts |= _model(match.group(1), match.group(2), match.group(3))
        elif match := _BATCH.search(line):
            batch = tuple(int(found or 1) for found in match.groups())
        elif match := _DEVICE.search(line):
            log.gpu = match.group(1)
        elif match := re.search(r"Applied (\w+?)(?:AC)? activation checkpointing", line):
            kind = match.group(1).lower()
            log.facts["recompute"] = {"selective": "per-op selective", "none": "none"}.get(kind, kind)
        elif "with torch.compile" in line:
            compiled = True
        elif re.search(r"Float8 (?:\w+ )?training active|Swapped to Float8", line):
            log.facts["precision"] = "fp8"
    if log.memory_gib:
        log.memory_kind = "reserved"
        log.notes.append("reserved GiB")
    _parallel(log, mesh, batch)
    if mesh or batch:
        log.facts["compile"] = bool(compiled)
        log.facts.setdefault("recompute", "none")
    return log


def _model(name: str, flavor: str, text: str) -> dict[str, Any]:
    """Sizes of a Llama-type model; the width of its MLP by its own rule (models/llama3/model.py).

    Of a mixture of experts the width is left out, as a row needs more of it than the line holds: --model says the rest.
    """
    sizes = dict(re.findall(r"(\w+)=([\w.]+)", text))

    def value(key: str) -> int | None:
        found = sizes.get(key, "")
        return int(found) if found.isdigit() else None

    heads = value("n_heads")
    facts: dict[str, Any] = {
        "model.name": f"{name}-{flavor}".lower(), "model.hidden": value("dim"), "model.layers": value("n_layers"),
        "model.heads": heads, "model.kv_heads": value("n_kv_heads") or heads, "model.vocab": value("vocab_size"),
        "model.head_dim": value("head_dim"), "model.gated": True,
        "model.tied_embeddings": sizes.get("enable_weight_tying") == "True",
    }  # fmt: skip
    hidden, multiple = value("dim"), value("multiple_of")
    if "moe_args=" in text and sizes.get("moe_enabled") != "False":
        return facts
    if value("hidden_dim"):
        facts["model.ffn"] = value("hidden_dim")
    elif hidden and multiple:
        width = int(8 * hidden / 3)
        more = sizes.get("ffn_dim_multiplier", "None")
        width = width if more == "None" else int(float(more) * width)
        facts["model.ffn"] = multiple * math.ceil(width / multiple)
    return facts


def _parallel(log: Log, mesh: dict[str, int], batch: tuple[int, ...] | None) -> None:
    """Degrees, sharding and batch. Local batch: sequences per data parallel rank and accumulation step."""
    tp, pp, cp = (mesh.get(name, 1) for name in ("tp", "pp", "cp"))
    replicate, shard = mesh.get("dp_replicate", 1), mesh.get("dp_shard", 1)
    if mesh:
        dp = replicate * shard
        log.facts |= {
            "parallel.tp": tp, "parallel.pp": pp, "parallel.cp": cp, "parallel.dp": dp, "parallel.gpus": tp * pp * cp * dp,
            "parallel.vpp": 1, "parallel.ep": mesh.get("ep", 1), "parallel.zero": 3 if shard > 1 else 0,
            "parallel.shard": shard if replicate > 1 and shard > 1 else None,
        }  # fmt: skip
    if batch:
        local, whole_batch, _, length = batch
        log.facts |= {"batch.global": whole_batch, "model.seq": length}
        log.facts["batch.micro"] = local if pp == 1 else 1
