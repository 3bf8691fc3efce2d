"""Readers of what people run today: a trainer's configuration becomes a plan."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from planner.errors import PlannerError, UnknownNameError
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.values import read_text

FORMS: dict[str, tuple[str, str]] = {
    "megatron": ("any", r"tensor[-_]model[-_]parallel[-_]size|--num-layers"),
    "torchtitan": ("py toml json any", r"ParallelismConfig|\[parallelism\]|--parallelism\.|data_parallel_shard_degree"),
    "deepspeed": ("json", r"\"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)\""),
    "nanotron": ("yaml yml", r"(?s)(?=.*^parallelism:)(?=.*^tokens:)"),
}
"""Name after --from, folder of planner.trainers -> endings of such files and what stands in them, tried in this order."""


def read(path: Path, name: str | None = None, num_gpus: int | None = None) -> Reading:
    """The configuration in a file, by the named reader or by the first that knows its form. Raises PlannerError."""
    if name is not None and name not in FORMS:
        raise UnknownNameError("reader", name, FORMS)
    text = read_text(path)
    for one in [name] if name else FORMS:
        if name or _looks_like(one, path, text):
            module = importlib.import_module(f"planner.trainers.{one}.readback")
            found: Reading = module.read(path, num_gpus)
            return found
    raise PlannerError(f"{path}: looks like no configuration of {', '.join(FORMS)}; say which with --from")


def _looks_like(name: str, path: Path, text: str) -> bool:
    endings, expression = FORMS[name]
    fits = "any" in endings.split() or path.suffix.removeprefix(".").lower() in endings.split()
    return fits and re.search(expression, text, re.MULTILINE) is not None
