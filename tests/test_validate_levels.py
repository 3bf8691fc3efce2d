"""plan validate, one quick case of every level: what each measures of a little plan on this CPU. The rest are proofs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fresh import fresh
from validate_samples import needs_torch, plan_file

COMMAND = "import sys; from planner.commands.main import main; main(['validate', *sys.argv[1:]])"
SHORT = ("--steps", "1", "--warmup", "0", "--json")


def validated(plan: Path, rung: str, *flags: str) -> dict[str, Any]:
    """What the command prints with --json, in a process that has imported torch."""
    found: dict[str, Any] = json.loads(fresh(COMMAND, str(plan), "--device", "cpu", "--rung", rung, *SHORT, *flags))
    assert (found["rung"], found["outcome"], found["failure"]) == (rung, "completed", None)
    return found


def states(found: dict[str, Any]) -> list[bool]:
    """Whether weights, gradients and optimizer states of each rank are inside of their bounds."""
    return [row["inside"] for one in found["ranks"] for row in one["memory"][:3]]


@needs_torch
def test_meta(tmp_path: Path) -> None:
    """The last stage of a pipeline: states to the byte, and its sends and receives as they are priced."""
    found = validated(plan_file(tmp_path), "meta", "--rank", "1")
    assert states(found) == [True] * 3 and [one["rank"] for one in found["ranks"]] == [1]
    traffic = {row["operation"]: row["error"] for row in found["ranks"][0]["traffic"]}
    assert traffic == {"receive": pytest.approx(0.0), "send": pytest.approx(0.0)}


@needs_torch
def test_rank(tmp_path: Path) -> None:
    """A rank alone: the parts of the step sum to it, and the other stage borrows from the one that was measured."""
    found = validated(plan_file(tmp_path), "rank", "--rank", "1")
    step, *rows = (row for row in found["times"] if "assembled_seconds" in row)
    assert sum(row["assembled_seconds"] for row in rows) == pytest.approx(step["assembled_seconds"])
    assert states(found) == [True] * 3 and {row["kind"] for row in found["stages"]} == {"F", "B"}
    assert "first stage not measured" in found["borrowed"][0]


@needs_torch
@pytest.mark.proof
def test_full_with_parity(tmp_path: Path) -> None:
    """Two ranks by torchrun: a tiny model trains like one process, then one step is timed and followed."""
    found = validated(plan_file(tmp_path), "full")
    assert found["parity"]["equal"] and found["parity"]["largest_error"] < 1e-12
    assert states(found) == [True] * 6 and len(found["steps"]["seconds"]) == 1
    assert {"step", "forward_backward", "optimizer", "replayed_step"} <= {row["what"] for row in found["times"]}


@needs_torch
@pytest.mark.proof
def test_truncated(tmp_path: Path) -> None:
    """Four stages made one layer on two ranks; the scaled parts sum to the scaled step."""
    flags = ("--gpus", "8", "--tp", "2", "--pp", "4", "--dp", "1", "--global-batch-size", "8")
    found = validated(plan_file(tmp_path, *flags), "truncated", "--no-parity")
    [small] = found["truncated"]
    assert (small["num_gpus"], small["model"]["num_layers"], found["num_gpus"]) == (2, 1, 8)
    parts, step = found["scaled"]["parts"], found["scaled"]["step"]
    assert sum(one["scaled_seconds"] for one in parts) == pytest.approx(step["scaled_seconds"])
