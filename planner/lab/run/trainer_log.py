"""A trainer's log compared with the plan: how the run ended, what it measured and what was predicted."""

import math
import re
from typing import Any

from planner.lab.launch.children import Ended
from planner.lab.run.record import time_row
from planner.plan_file import Plan
from planner.timeline.priced_plan import estimate_of, job_of
from planner.trainers.reading.log_facts import Log, Steady
from planner.units import GIB, parse

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory")
_RANK = re.compile(r"\[rank(\d+)\]|\[Rank (\d+)\]|GPU (\d+) has a total capacity")
_IN_USE = re.compile(r"this process has ([\d.]+ [GM]iB) memory in use")
_SIGNAL = re.compile(r"(?:exitcode\s*:\s*-(\d+)|Signal (\d+) \((SIG\w+)\) received)")
_ROOT_RANK = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)
_ERROR = re.compile(r"(?:^|[\s:])((?:\w+\.)*\w*(?:Error|Exception)): (.+)$", re.MULTILINE)
_STEP = re.compile(r"(?<!validate )\bstep:\s*(\d+)|iteration\s+(\d+)\s*/")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def last_step(text: str) -> int | None:
    """Number of the last step in a part of a log; None without one."""
    steps = [int(one or other) for one, other in _STEP.findall(_ANSI.sub("", text))]
    return max(steps, default=None)


def judge(ended: Ended) -> tuple[str, dict[str, Any] | None]:
    """(outcome, failure) of a run, by how it ended and what it printed."""
    text = _ANSI.sub("", ended.text)
    step = last_step(text)
    phase = "before the first step" if step is None else f"after step {step}"
    if _OUT_OF_MEMORY.search(text):
        return "out_of_memory", _out_of_memory(text, phase)
    if ended.interrupted:
        return "interrupted", _failure(None, phase, f"stopped {phase}; the trainer and its processes were ended")
    if ended.hung:
        return "hung", _failure(None, phase, f"nothing was printed in time {phase}; it was ended")
    if ended.code == 0:
        return "completed", None
    root = _ROOT_RANK.search(text)
    rank = int(root.group(1)) if root else None
    signal = _SIGNAL.search(text[root.start() :] if root else text)
    number = -ended.code if ended.code < 0 else int(signal.group(1) or signal.group(2)) if signal else 0
    error = _ERROR.findall(text)
    if number and number != 15:
        who = "the command" if rank is None else f"rank {rank}"
        return "lost_rank", _failure(rank, phase, f"{who} was ended by signal {number} {phase}")
    last = next((f"{kind}: {what}" for kind, what in error if "ChildFailedError" not in kind), "")
    words = last.strip()[:300] or f"it ended with exit code {ended.code}"
    return "failed", _failure(rank, phase, f"{'' if rank is None else f'rank {rank}, '}{phase}: {words}")


def _out_of_memory(text: str, phase: str) -> dict[str, Any]:
    """Rank and GiB of the first rank that ran out."""
    at = _OUT_OF_MEMORY.search(text)
    line = text[text.rfind("\n", 0, at.start()) + 1 : (text.find("\n", at.end()) + 1) or None] if at else ""
    who, used = _RANK.search(line), _IN_USE.search(line)
    rank = next((int(one) for one in who.groups() if one is not None), None) if who else None
    size = None if used is None else parse(used.group(1), "bytes", what="memory in use") / GIB
    held = "" if size is None else f" with {size:.2f} GiB in use"
    return _failure(
        rank, phase, f"{'a rank' if rank is None else f'rank {rank}'} ran out of GPU memory {phase}{held}", size
    )


def _failure(rank: int | None, phase: str, sentence: str, allocated: float | None = None) -> dict[str, Any]:
    return {"rank": rank, "phase": phase, "sentence": sentence, "allocated_gib": allocated}


def compared(plan: Plan, log: Log | None, speed: Steady | None) -> dict[str, Any]:
    """Times, memory and rates of a log, and what the plan predicts."""
    seconds = None if speed is None else seconds_of(plan, speed)
    predicted, rows = plan.prediction, []
    if speed is not None and seconds is not None:
        step, interval = predicted.step_time_s, predicted.step_time_range_s
        rows.append(time_row("step", step, seconds, interval=interval) | {"spread": speed.spread})
    return {
        "times": rows, "ranks": [] if log is None or not log.memory_gib else [_peak(plan, log)],
        "rates": None if log is None else _rates(plan, log, seconds),
    }  # fmt: skip


def seconds_of(plan: Plan, speed: Steady) -> float | None:
    """Seconds per optimizer step: printed, or from the printed rate."""
    if speed.seconds:
        return speed.seconds
    if speed.tokens_per_second_per_gpu:
        return plan.workload.tokens / plan.num_gpus / speed.tokens_per_second_per_gpu
    return plan.workload.global_batch_size / speed.samples_per_second if speed.samples_per_second else None


def _peak(plan: Plan, log: Log) -> dict[str, Any]:
    """The highest peaks that the log prints, each compared with the same kind on the stage with the highest prediction."""
    found = estimate_of(job_of(plan), plan.layout)
    predicted = {"allocated": found.memory_allocated, "reserved": found.memory_reserved, "device": found.memory_peak}
    sizes = {log.memory_kind or "allocated": log.memory_gib or 0.0, **log.other_memory_gib}
    rows = []
    for kind, measured in sizes.items():
        one = float(predicted[kind][0]) / GIB
        low, high = (one / plan.prediction.memory_peak_gib * bound for bound in plan.prediction.memory_peak_range_gib)
        rows.append({
            "what": kind, "predicted_gib": one, "measured_gib": measured, "error": one / measured - 1.0, "bound": None,
            "interval": [low, high], "inside": low <= measured <= high,
        })  # fmt: skip
    return {"rank": None, "stage": None, "memory": rows}


def _rates(plan: Plan, log: Log, seconds: float | None) -> dict[str, Any]:
    tokens, mfu, step = plan.workload.tokens, plan.prediction.mfu, plan.prediction.step_time_s
    losses = [one.loss for one in sorted(log.steps, key=lambda one: one.number) if one.loss]
    return {
        "tokens_per_second": {"predicted": tokens / step, "measured": None if seconds is None else tokens / seconds},
        "mfu": {"predicted": mfu, "measured": None if seconds is None else mfu * step / seconds},
        "loss": [losses[0], losses[-1]] if losses else None,
        "loss_of_chance": math.log(plan.workload.model.vocab_size),  # ln V: where random weights begin
    }  # fmt: skip
