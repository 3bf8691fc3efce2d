"""plan validate: proofs on this CPU. Pipelines that sleep, processor time, two nodes on one machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)


def python(code: str, *arguments: str, limit: int = 300) -> list[Any]:
    """The JSON lines that a fresh process prints: ranks are forked, which a process that has computed must not do."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


# ------------------------------------------------------------------------------------------------ schedules

SLEEPING = """
import json
from planner.validator.sleeping import confirmed, subset
for row in confirmed(subset()):
    print(json.dumps(row))
"""


def test_walked_schedules_take_as_long_as_torchs() -> None:
    """Stages that sleep, every schedule; ``python -m planner.validator.sleeping`` runs them on 2, 4 and 8 processes."""
    from planner.layout import Schedule
    from planner.validator.sleeping import BOUND, HEAVY, Case
    from planner.validator.split import SCHEDULES

    rows = python(SLEEPING)
    assert {row["schedule"] for row in rows} == set(SCHEDULES) and {row["pp"] for row in rows} == {2, 4, 8}
    for row in rows:
        assert -BOUND < row["error"] < 0.01, row  # never faster than its sleep
    # that it can fail: held against the walk of another schedule, or of equal stages
    measured = {(row["schedule"], row["heavy"]): row["measured_seconds"] for row in rows if row["pp"] == 4}
    other = Case(schedule=Schedule.ONE_F_ONE_B, pp=4)
    assert other.predicted() / measured[Schedule.ZB_H1, 1.0] - 1 > 0.01
    assert other.predicted() / measured[Schedule.ONE_F_ONE_B, HEAVY] - 1 < -BOUND
