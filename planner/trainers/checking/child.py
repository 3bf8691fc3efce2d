"""Runs a trainer's code in a process of its own: requests as JSON lines in, answers as JSON lines out, one import for all."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked

IMPORT_LIMIT, CASE_LIMIT = 240.0, 2.0
"""Seconds that a process may take to import a trainer and for each request, far above what they need; a process that takes
longer is ended, and nothing is checked."""
Request = dict[str, Any]


def limit(cases: int) -> float:
    """Seconds for one process with this many requests."""
    return IMPORT_LIMIT + CASE_LIMIT * cases


def request(job: ExportJob, folder: Path, **more: Any) -> Request:
    """What a child has to know of one exported folder."""
    blackwell = job.cluster.hardware.peak_flops.get("fp4") is not None
    return {
        "folder": str(folder.resolve()),
        "world": job.cluster.num_gpus,
        "capability": [10, 0] if blackwell else [9, 0],
        "layout": {name: int(value) for name, value in job.layout.columns().items()},
        "shard": int(job.layout.shard),
        "precision": job.workload.precision,
        **more,
    }


def ask(
    target: str,
    module: str,
    needed: Sequence[str],
    requests: Sequence[Request],
    environment: Mapping[str, str] | None = None,
) -> list[Checked]:
    """The answers of ``python -m module`` to all requests. Packages that are missing mean 'not checked'."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        why = f"{', '.join(missing)} is not installed here"
        return [Checked(target=target, level="", missing=why) for _ in requests]
    root = str(Path(__file__).resolve().parents[3])
    paths = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input="\n".join(json.dumps(one) for one in requests),
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
            capture_output=True, text=True, timeout=limit(len(requests)), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        why = f"its process was ended after {limit(len(requests)):g} s with {len(requests)} cases"
        return [Checked(target=target, level="", missing=why) for _ in requests]
    answers = [json.loads(line.removeprefix(_MARK)) for line in done.stdout.split("\n") if line.startswith(_MARK)]
    if len(answers) != len(requests):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        why = f"its process ended with {done.returncode}: {last}"
        return [Checked(target=target, level="", missing=why) for _ in requests]
    return [_checked(target, one) for one in answers]


_MARK = "answer: "


def _checked(target: str, answer: Mapping[str, Any]) -> Checked:
    return Checked(
        target=target, level=answer["level"], details=tuple(answer["details"]), missing=answer["missing"],
        problem=answer["problem"],
    )  # fmt: skip


class Answer:
    """What a child finds out about one request, filled step by step."""

    def __init__(self) -> None:
        self.level, self.problem, self.missing = "", "", ""
        self.details: list[str] = []

    def reached(self, level: str, *details: str) -> None:
        """The trainer's code has gone this far."""
        self.level = level
        self.details += details

    def same(self, what: str, found: object, expected: object) -> None:
        """The trainer's own answer is the planner's. Raises ValueError."""
        if found != expected:
            raise ValueError(f"{what}: the trainer says {found}, the plan {expected}")
        self.details.append(f"{what} as planned")


def serve(one: Callable[[Request, Answer], None]) -> None:
    """Answer every request on standard input; what the trainer prints goes to standard error."""
    for line in sys.stdin.read().splitlines():
        answer = Answer()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                one(json.loads(line), answer)
            except (Exception, SystemExit) as error:
                text = " ".join(str(error).split()) or type(error).__name__
                answer.problem = f"{type(error).__name__}: {text}"[:1000]
        print(_MARK + json.dumps(vars(answer)), flush=True)
