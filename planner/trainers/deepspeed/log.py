"""Logs of DeepSpeed's engine.

Format of deepspeed/utils/timer.py and runtime/config.py, 0.9 (2023) to 0.16; older ones print 'epoch/step, ' before the speeds:

    [2024-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step=199/global_step=199, RunningAvgSamplesPerSec=58.73,
      CurrSamplesPerSec=61.35, MemAllocated=6.01GB, MaxMemAllocated=19.52GB                                       (one line)
    [2024-07-10 14:14:51,805] [INFO] [config.py:1000:print]   train_batch_size ............. 128
    [2024-07-10 14:14:51,806] [INFO] [config.py:1000:print]   train_micro_batch_size_per_gpu  32

Samples count the whole job; GB are 2^30 bytes. The model is not in the log.
"""

import re

from planner.trainers.reading.log_facts import Log, Step, lines, whole

WRITER = "DeepSpeed"
_STEP = re.compile(r"(?:global_step=|\b\d+/)(\d+), (?:RunningAvg)?SamplesPerSec=[^,]*, CurrSamplesPerSec=([\d.eE+-]+)")
_MEMORY = re.compile(r"MaxMemAllocated=([\d.]+)\s*GB")
_CONFIG = re.compile(r"\] {3}(\w+) (?:\.{2,} | )\s*(.+)$")


def matches(text: str) -> bool:
    """The text has lines of DeepSpeed's throughput timer."""
    return "CurrSamplesPerSec=" in text


def read(text: str) -> Log:
    """Steps, memory and the printed config."""
    log = Log(framework="deepspeed", steps=[])
    config: dict[str, str] = {}
    for line in lines(text):
        if match := _STEP.search(line):
            log.steps.append(Step(number=int(match.group(1)), samples_per_second=float(match.group(2))))
            if memory := _MEMORY.search(line):
                log.memory_gib = max(log.memory_gib or 0.0, float(memory.group(1)))
        elif match := _CONFIG.search(line):
            config.setdefault(match.group(1), match.group(2).strip())
    if log.memory_gib:
        log.memory_kind = "allocated"
        log.notes.append("peak allocated GiB")
    batch, micro = whole(config.get("train_batch_size", "")), whole(config.get("train_micro_batch_size_per_gpu", ""))
    steps = whole(config.get("gradient_accumulation_steps", ""))
    world = whole(config.get("world_size", ""))
    log.facts |= {
        "batch.global": batch, "batch.micro": micro, "parallel.zero": whole(config.get("zero_optimization_stage", "")),
        "parallel.gpus": world, "precision": _precision(config),
    }  # fmt: skip
    if batch and micro and steps and batch % (micro * steps) == 0:
        log.facts["parallel.dp"] = batch // (micro * steps)
    return log


def _precision(config: dict[str, str]) -> str | None:
    for name, precision in (("bfloat16_enabled", "bf16"), ("fp16_enabled", "fp16"), ("float16_enabled", "fp16")):
        if config.get(name, "").startswith("True"):
            return precision
    return None
