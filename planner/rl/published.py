"""Published steps, updates and weight syncs of RL, predicted: what ``plan accuracy`` asks of topic rl.

A row says model, hardware, placement (mode, gpus, train_gpus, generate_gpus, staleness_steps), train and generate (degrees),
batch (prompts, samples_per_prompt, generated_sequences, train_batch, max_length, mean_length), what was measured. Rows with a
``method`` are weight syncs, rows with a ``phase`` updates of a trainer alone. What a row does not say is as the framework has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.published_rows import DOES_NOT_FIT, NOT_RUN, PREDICTED, REFUSED, AnsweredRow, Quantity, rows_of, source_of
from planner.rl.published_parts import SyncRow, UpdateRow, number, sync_row, update_row
from planner.rl.published_steps import StepRow, step_row
from planner.rl.rl_ranges import spread_of
from planner.schema import mapping

QUANTITIES = ("step_s", "generate_s", "logprob_s", "train_s", "sync_s", "tokens_per_s_per_gpu", "memory_gb")
"""What is compared, as files name it."""


GROUPS = ("measured", "placement", "train", "generate", "batch")
"""Groups of a row's keys."""


def answers(document: Mapping[str, Any], where: str) -> list[AnsweredRow]:
    """The rows of a published file, each with its prediction or why there is none. Raises PlannerError."""
    source = source_of(document, where)
    return [_answer(row, document, source, f"{where}: {row['id']}") for row in rows_of(document, where)]


def _answer(row: Mapping[str, Any], document: Mapping[str, Any], source: str, where: str) -> AnsweredRow:
    base: dict[str, Any] = {"source": source, "id": str(row["id"]), "topic": "rl", "counts": not row.get("suspect")}
    try:
        row = {**row, **{name: mapping(row.get(name) or {}, f"{where}: {name}") for name in GROUPS}}
    except PlannerError as error:
        return AnsweredRow(**base, status=REFUSED, reason=str(error))
    measured = _measured(row)
    if row.get("ran") is False or not measured:
        return AnsweredRow(**base, status=NOT_RUN, reason="the source measured nothing of this row that is compared here")
    try:
        found = _predicted(row, document, where)
    except PlannerError as error:
        return AnsweredRow(**base, status=REFUSED, reason=str(error))
    quantities = {
        name: Quantity(measured=value, predicted=found.values[name], range=_range(name, found))
        for name, value in measured.items()
        if math.isfinite(found.values.get(name, math.nan)) and found.values[name] > 0
    }
    status = PREDICTED if found.fits else DOES_NOT_FIT
    return AnsweredRow(**base, status=status, reason=found.assumed, sweep=_sweep(row, source), quantities=quantities)


def _predicted(row: Mapping[str, Any], document: Mapping[str, Any], where: str) -> StepRow | SyncRow | UpdateRow:
    if "method" in row:
        return sync_row(row, where)
    framework = str(row.get("framework") or document.get("framework") or "")
    if "phase" in row:
        return update_row(row, framework, where, int(number(document, "adapter_sets", 1)))
    return step_row(row, framework, where)


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    """What of QUANTITIES a row measured; a range is its middle."""
    found: dict[str, float] = {}
    for name, value in row["measured"].items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if numbers and all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in numbers):
            found[str(name)] = float(np.mean(numbers))
    known = {name: value for name, value in found.items() if name in QUANTITIES}
    if "phase" in row and found.get("tokens_per_s") and "train_s" not in known:
        known["train_s"] = number(row["batch"], "global", 0) * number(row["batch"], "length", 0) / found["tokens_per_s"]
    if "mem_gib" in found:
        known["memory_gb"] = found["mem_gib"]
    if "full_broadcast_s" in found and "sync_s" not in known:
        known["sync_s"] = found["full_broadcast_s"]
    if "broadcast_s" in found:
        known["sync_s"] = found["broadcast_s"] + found.get("gather_metas_s", 0.0)
    return {name: value for name, value in known.items() if value > 0}


def _range(name: str, found: SyncRow) -> tuple[float, float]:
    """Nine of ten measured values lie within."""
    value, spread = found.values[name], spread_of(name, found.doubt)
    return value / spread, value * spread


def _sweep(row: Mapping[str, Any], source: str) -> str:
    """Placements of one job on one kind of GPU compare: model, hardware, precision, and the batch."""
    batch, train = row["batch"], row["train"]
    if "step_s" not in row["measured"] or not row.get("model"):
        return ""
    parts = (source, row["model"], row.get("hardware"), train.get("precision"), batch.get("prompts"), batch.get("max_length"))
    return re.sub(r"\s+", " ", " ".join(str(one) for one in parts if one))
