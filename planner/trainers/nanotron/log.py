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

from planner.trainers.reading.log_facts import Log, Settings, scan

WRITER, MARK = "nanotron", "elapsed_time_per_iteration_ms"
_LINES = {
    "elapsed_time_per_iteration_ms": (
        # The speed has as many digits as the time, but says the time of a known batch no better.
        re.compile(r"iteration: (?P<number>\d+) / \d+ \|.*?elapsed_time_per_iteration_ms: (?P<milliseconds>[\d.]+[KM]?)"),
        re.compile(r"global_batch_size: (?P<batch>\d+)(?![\d.KM])"),
    ),
    "Peak reserved": (re.compile(r"Peak reserved:? (?P<reserved>[\d.]+)(?P<unit>[KMG])iB"),),
}
_FIELD = re.compile(r"\b(\w+)=('[^']*'|<[^>]*>|[\w.\-]+)")
_FACTS = {
    "model.hidden": "hidden_size", "model.layers": "num_hidden_layers", "model.heads": "num_attention_heads",
    "model.kv_heads": "num_key_value_heads", "model.ffn": "intermediate_size", "model.vocab": "vocab_size",
    "model.seq": "sequence_length", "model.tied_embeddings": "tie_word_embeddings", "parallel.tp": "tp",
    "parallel.pp": "pp", "parallel.dp": "dp", "parallel.zero": "zero_stage", "batch.micro": "micro_batch_size",
    "tp_overlap": "tp_linear_async_communication",
}  # fmt: skip
_PRECISIONS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def read(text: str) -> Log:
    """Steps, memory and the printed config."""
    log, fields = Log(framework="nanotron", steps=[]), Settings()
    for line in scan(log, text, _LINES):
        if "=" in line and "|" in line:
            for key, value in _FIELD.findall(line.partition("]: ")[2]):
                fields.setdefault(key, value.strip("'"))
    if not fields:
        return log
    mode = fields.get("tp_mode", "")
    log.facts = fields.facts(_FACTS) | {
        "model.gated": fields.get("hidden_act") in (None, "silu"), "parallel.vpp": 1,
        "precision": _PRECISIONS.get(fields.get("dtype", "")), "parallel.sp": "REDUCE_SCATTER" in mode if mode else None,
        "recompute": {True: "full", False: "none"}.get(fields.value("recompute_layer")),
    }  # fmt: skip
    micro, steps, dp = (fields.value(name) for name in ("micro_batch_size", "batch_accumulation_per_replica", "dp"))
    if micro and steps and dp:
        log.facts["batch.global"] = micro * steps * dp
    return log
