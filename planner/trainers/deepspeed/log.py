"""Logs of DeepSpeed's engine.

Format of deepspeed/utils/timer.py and runtime/config.py, 0.9 (2023) to 0.16; older ones print 'epoch/step, ' before the speeds:

    [2024-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step=199/global_step=199, RunningAvgSamplesPerSec=58.73,
      CurrSamplesPerSec=61.35, MemAllocated=6.01GB, MaxMemAllocated=19.52GB                                       (one line)
    [2024-07-10 14:14:51,805] [INFO] [config.py:1000:print]   train_batch_size ............. 128
    [2024-07-10 14:14:51,806] [INFO] [config.py:1000:print]   train_micro_batch_size_per_gpu  32

Samples count the whole job; GB are 2^30 bytes. The model is not in the log.
"""

import re

from planner.trainers.reading.log_facts import Log, Settings, scan

WRITER, MARK = "DeepSpeed", "CurrSamplesPerSec="
_LINES = {
    "CurrSamplesPerSec=": (
        re.compile(r"(?:global_step=|\b\d+/)(?P<number>\d+), (?:RunningAvg)?SamplesPerSec=[^,]*, "
                   r"CurrSamplesPerSec=(?P<samples_per_second>[\d.eE+-]+)"),
        re.compile(r"MaxMemAllocated=(?P<allocated>[\d.]+)\s*GB"),
    )
}  # fmt: skip
_CONFIG = re.compile(r"\] {3}(\w+) (?:\.{2,} | )\s*(.+)$")
_FACTS = {
    "batch.global": "train_batch_size", "batch.micro": "train_micro_batch_size_per_gpu", "parallel.gpus": "world_size",
    "parallel.zero": "zero_optimization_stage",
}  # fmt: skip
_PRECISIONS = {"bfloat16_enabled": "bf16", "fp16_enabled": "fp16", "float16_enabled": "fp16"}


def read(text: str) -> Log:
    """Steps, memory and the printed config."""
    log, config = Log(framework="deepspeed", steps=[]), Settings()
    for line in scan(log, text, _LINES):
        if match := _CONFIG.search(line):
            config.setdefault(match.group(1), match.group(2))
    log.facts = config.facts(_FACTS)
    log.facts["precision"] = next((one for name, one in _PRECISIONS.items() if config.get(name, "").startswith("True")), None)
    batch, micro, steps = log.facts["batch.global"], log.facts["batch.micro"], config.value("gradient_accumulation_steps")
    if batch and micro and steps and batch % (micro * steps) == 0:
        log.facts["parallel.dp"] = batch // (micro * steps)
    return log
