"""Logs of nanotron.

Format of nanotron 0.4 and 0.5 (trainer.py, logging): numbers are shortened (4.71K, 12.3M), the config is printed as nested
constructors, memory after every step.

    08/31/2024 14:37:22 [INFO|DP=0|PP=0|TP=0]:        parallelism=ParallelismArgs(dp=4,
    08/31/2024 14:37:22 [INFO|DP=0|PP=0|TP=0]:                                    pp=1,
    08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]:  Memory usage: 64.26MiB. Peak allocated 66.25MiB. Peak reserved: 496.00MiB
    08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]: iteration: 2 / 15 | consumed_tokens: 1.02K | elapsed_time_per_iteration_ms: 11.8
      | tokens_per_sec: 43.2K | tokens_per_sec_per_gpu: 43.2K | global_batch_size: 2 | lm_loss: 5.29 | ...        (one line)
"""

import re
from typing import Any

from planner import units
from planner.trainers.reading.log_facts import Log, Step, lines, number, whole

WRITER = "nanotron"
_STEP = re.compile(r"iteration: (\d+) / \d+ \|.*?elapsed_time_per_iteration_ms: ([\d.]+[KM]?)")
_SPEED = re.compile(r"tokens_per_sec_per_gpu: ([\d.]+[KM]?)")
_BATCH = re.compile(r"global_batch_size: ([\d.]+[KM]?)")
_MEMORY = re.compile(r"Peak reserved:? ([\d.]+)([KMG])iB")
_FIELD = re.compile(r"\b(\w+)=('[^']*'|<[^>]*>|[\w.\-]+)")
_MEMORY_UNIT = {"K": units.KIB, "M": units.MIB, "G": units.GIB}


def matches(text: str) -> bool:
    """The text has step lines of nanotron."""
    return "elapsed_time_per_iteration_ms" in text and "iteration: " in text


def read(text: str) -> Log:
    """Steps, memory and the printed config."""
    log = Log(framework="nanotron", steps=[])
    fields: dict[str, str] = {}
    peak = 0.0
    for line in lines(text):
        if match := _STEP.search(line):
            log.steps.append(_step(line, match))
        elif match := _MEMORY.search(line):
            peak = max(peak, float(match.group(1)) * _MEMORY_UNIT[match.group(2)])
        elif "=" in line and "|" in line:
            _, _, rest = line.partition("]: ")
            for key, value in _FIELD.findall(rest):
                fields.setdefault(key, value.strip("'"))
    if peak:
        log.memory_gib, log.memory_kind = peak / units.GIB, "reserved"
        log.notes.append("reserved GiB")
    if fields:
        log.facts |= _facts(fields)
    return log


def _step(line: str, match: re.Match[str]) -> Step:
    """Time as printed with three digits; the speed has as many, but tells the time of a known batch no better."""
    batch = _BATCH.search(line)
    return Step(
        number=int(match.group(1)),
        seconds=number(match.group(2)) * units.parse("1 ms", "seconds"),
        batch=round(number(batch.group(1))) if batch and batch.group(1).isdigit() else None,
    )


def _facts(fields: dict[str, str]) -> dict[str, Any]:
    def value(name: str) -> int | None:
        return whole(fields.get(name, ""))

    def flag(name: str) -> bool | None:
        return {"True": True, "False": False}.get(fields.get(name, ""))

    micro, steps, dp = value("micro_batch_size"), value("batch_accumulation_per_replica"), value("dp")
    mode, recompute = fields.get("tp_mode", ""), flag("recompute_layer")
    dtype = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}.get(fields.get("dtype", ""))
    facts: dict[str, Any] = {
        "model.hidden": value("hidden_size"), "model.layers": value("num_hidden_layers"),
        "model.heads": value("num_attention_heads"), "model.kv_heads": value("num_key_value_heads"),
        "model.ffn": value("intermediate_size"), "model.vocab": value("vocab_size"), "model.seq": value("sequence_length"),
        "model.gated": fields.get("hidden_act") in (None, "silu"), "model.tied_embeddings": flag("tie_word_embeddings"),
        "parallel.tp": value("tp"), "parallel.pp": value("pp"), "parallel.dp": dp, "parallel.vpp": 1,
        "parallel.zero": value("zero_stage"), "batch.micro": micro, "precision": dtype,
        "parallel.sp": None if not mode else "REDUCE_SCATTER" in mode,
        "recompute": None if recompute is None else "full" if recompute else "none",
        "tp_overlap": flag("tp_linear_async_communication"),
    }  # fmt: skip
    if micro and steps and dp:
        facts["batch.global"] = micro * steps * dp
    return facts
