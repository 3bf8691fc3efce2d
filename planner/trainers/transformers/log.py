"""What the Trainer of transformers leaves: trainer_state.json, or the dictionary that it prints at the end of the training.

Format of transformers 4.30 to 4.57 (trainer.py: log, speed_metrics; trainer_callback.py: TrainerState):

    {'train_runtime': 437.8544, 'train_samples_per_second': 25.132, 'train_steps_per_second': 3.145, ...}

    trainer_state.json: {"global_step": 500, "train_batch_size": 4, "log_history": [..., {"step": 500, "train_runtime": ...}], ...}

These are averages over the whole training, warm-up, evaluation and checkpoints included: rougher than logs with a time per
step. Neither holds the model, the GPUs or the sequence length.
"""

import re
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.log_facts import Log, Step, lines

WRITER, MARK = "the transformers Trainer", "train_runtime"
_DICTIONARY = re.compile(r"\{[^{}]*'train_runtime'[^{}]*\}")
_PAIR = re.compile(r"'(\w+)': '?([\d.eE+-]+)'?")


def read(text: str) -> Log:
    """The average step, and the batch that follows from samples and steps per second."""
    log = Log(framework="transformers trainer", steps=[], average=True)
    state = _state(text)
    if state is not None:
        history = state.get("log_history")
        entries = [one for one in history if isinstance(one, dict)] if isinstance(history, list) else []
        found = next((one for one in reversed(entries) if "train_runtime" in one), {})
        _add(log, {key: value for key, value in found.items() if isinstance(value, (int, float))}, state)
        return log
    for line in lines(text):
        if match := _DICTIONARY.search(line):
            _add(log, {key: float(value) for key, value in _PAIR.findall(match.group(0))}, {})
    return log


def _state(text: str) -> dict[str, Any] | None:
    try:
        state = library.parse_json(text, "log")
    except PlannerError:
        return None
    return state if isinstance(state, dict) else None


def _add(log: Log, summary: dict[str, float], state: dict[str, Any]) -> None:
    """One step of average length. Steps over the running time are finer than the printed rate of three decimals."""
    runtime, rate = summary.get("train_runtime", 0.0), summary.get("train_steps_per_second", 0.0)
    samples = summary.get("train_samples_per_second", 0.0)
    done = summary.get("step") or state.get("global_step")
    if isinstance(done, (int, float)) and not isinstance(done, bool) and done > 0 and runtime > 0:
        rate = done / runtime
    if rate <= 0:
        return
    batch = round(samples / rate) if samples > 0 else 0
    log.steps.append(Step(number=len(log.steps) + 1, seconds=1.0 / rate, batch=batch or None))
    if batch:
        log.facts["batch.global"] = batch
    micro = state.get("train_batch_size")
    if isinstance(micro, int) and not isinstance(micro, bool) and micro > 0:
        log.facts["batch.micro"] = micro
