"""Two checkpoints of torch.distributed.checkpoint held against each other, tensor by tensor: names, shapes, values, sums."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as saved

from planner.errors import PlannerError
from planner.lab.elastic.checkpoint_folder import StoredTensor, stored_tensors
from planner.record import record

AT_ONCE = 2**30
"""Bytes of tensors that are read at once."""
OWN = "rng."
"""Beginning of names that belong to the ranks that wrote, not to the job."""


@record
class Compared:
    """What two checkpoints have in common."""

    tensors: int
    """Names in both."""
    values: int
    """Numbers that were compared."""
    largest: float
    """Largest difference of a value."""
    sums: tuple[float, float]
    """Sum of all values of either, in float64."""
    differences: tuple[str, ...]
    """What is not the same, in words: names, shapes, dtypes, values that differ by more than was allowed."""


def compare(one: Path, other: Path, most: float = 0.0) -> Compared:
    """Every tensor of a checkpoint with that of the same name in another; values may differ by ``most``. Raises PlannerError."""
    first, second = ({name: each for name, each in stored_tensors(path / ".metadata")[0].items() if not name.startswith(OWN)}
                     for path in (one, other))  # fmt: skip
    said = [f"{name} is only in {one}" for name in sorted(set(first) - set(second))]
    said += [f"{name} is only in {other}" for name in sorted(set(second) - set(first))]
    both = sorted(set(first) & set(second))
    for name in both:
        a, b = first[name], second[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            said.append(f"{name}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    same = [name for name in both if (first[name].shape, first[name].dtype) == (second[name].shape, second[name].dtype)]
    largest, values, sums = 0.0, 0, [0.0, 0.0]
    for names in _batches(same, first):
        mine, theirs = (_read(path, {name: first[name] for name in names}) for path in (one, other))
        for name in names:
            a, b = (part[name].double() for part in (mine, theirs))
            difference = float((a - b).abs().max()) if a.numel() else 0.0
            if not difference <= most:  # also where it is no number
                said.append(f"{name}: values differ by {difference:.3g}")
            largest, values = max(largest, difference), values + a.numel()
            sums = [sums[0] + float(a.sum()), sums[1] + float(b.sum())]
    return Compared(tensors=len(both), values=values, largest=largest, sums=(sums[0], sums[1]), differences=tuple(said))


def _batches(names: list[str], tensors: dict[str, StoredTensor]) -> list[list[str]]:
    found: list[list[str]] = []
    size = AT_ONCE
    for name in names:
        size += tensors[name].size
        if size > AT_ONCE:
            found, size = [*found, []], tensors[name].size
        found[-1].append(name)
    return found


def _read(path: Path, tensors: dict[str, StoredTensor]) -> dict[str, torch.Tensor]:
    try:
        state = {name: torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for name, one in tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that there is one process
            saved.load(state, storage_reader=saved.FileSystemReader(path), no_dist=True)
    except Exception as error:  # whatever a damaged file makes torch raise
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise PlannerError(f"{path}: cannot be read by torch.distributed.checkpoint ({words[-1][:200]})") from error
    return state
