"""Little plans of plan validate, the command on them, and what a rank of one leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from samples import model

from planner.commands.main import main
from planner.lab.run.levels import Machine, Task, question
from planner.plan_file import load_plan

ROOT = Path(__file__).resolve().parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
LITTLE = {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 256,
          "vocab_size": 512, "max_sequence_length": 256}  # fmt: skip


def plan_file(
    folder: Path, *flags: str, cpu: bool = True, name: str = "plan.yaml", hardware: Path | None = None, **sizes: Any
) -> Path:
    """A plan of a little model for two processes of a CPU; without a profile its times are those of another device and mean
    nothing."""
    spec = {k: v for k, v in vars(model("little", **{**LITTLE, **sizes})).items() if v not in ("", 0, False, 0.0)}
    (folder / "little.yaml").write_text(yaml.safe_dump(spec))
    (folder / "cpu.yaml").write_text(yaml.safe_dump({"extends": "a10g", "arch": "CPU"}))
    flags = flags or ("--gpus", "2", "--pp", "2", "--num-microbatches", "4", "--global-batch-size", "4")
    arguments = ["estimate", "--model", str(folder / "little.yaml"), "--trainer", "torchtitan", "--precision", "fp32",
                 "--sequence-length", "128", "--hardware", str(hardware or folder / "cpu.yaml") if cpu else "h100-sxm", *flags,
                 "--output", str(folder / name)]  # fmt: skip
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return folder / name


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command, with a directory of its own for what ranks leave while they run."""
    command = [sys.executable, str(ROOT / "cli.py"), "validate", *arguments]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_written(file: Path) -> int:
    """Steps in the file that a rank writes while it runs."""
    try:
        return len(json.loads(file.read_text())["steps"])
    except (OSError, ValueError):
        return 0


def alive(pid: int) -> bool:
    """Whether a process is neither gone nor a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def task(plan: Path, **machine: Any) -> Task:
    """A task on a machine of two cores and 16 GiB."""
    here = {"device": "cpu", "gpus": 0, "name": "CPU", "memory": 16 * 2.0**30, "cores": 2, "place": None}
    loaded = load_plan(plan)
    return Task(plan=loaded, asked=question(loaded), machine=Machine(**{**here, **machine}))


def entry(rank: int, seconds: float, **more: Any) -> dict[str, Any]:
    """What a rank of the pipeline of two leaves after two steps: passes of 10 ms forward and 20 ms backward of its thread."""
    actions = [
        {
            "stage": rank,
            "kind": kind,
            "total": [6 * each, 4 * each],
            "median": [each * 1.5, each],
        }
        for kind, each in (("F", 0.010), ("B", 0.020))
    ]
    step = {"step": [seconds, 0.1], "passes": [seconds * 0.9, 0.1], "clip": [0.002, 0.001], "optimizer": [0.002, 0.002],
            "actions": actions, "waited": 0.06}  # fmt: skip
    return {"rank": rank, "stage": rank, "host": "a", "name": "CPU", "steps": [step, step], "pressure": [2.0, 3.0],
            "parity": None, "loss": [6.0, 5.0], "memory": {}, **more}  # fmt: skip
