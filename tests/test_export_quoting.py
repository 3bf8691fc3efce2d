"""A name that holds the signs of every language that exports are written in stays a name in all of them."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from trainers.plans import Wanted, found

from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.launchers import LAUNCHERS
from planner.trainers.bundle.quoting import Expression, hydra_value, python_fields, shell_command
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import TARGETS, load_target

NAME = 'a"b\'c $(touch hacked) `touch hacked` \\ """ {x} @WIDTH@ # : \n touch hacked\n'


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_strange_name_stays_a_name(name: str, launcher: str, tmp_path: Path) -> None:
    """Scripts run no word of it, and every file can be parsed."""
    target = load_target(name)
    plan = found(Wanted(model="llama-3.1-8b", gpus=16, trainer=target.trainers[0], top=1, pins=(("cp", 1), ("tp", 1))))[
        0
    ]
    model = dataclasses.replace(plan.workload.model, name=NAME)
    job = ExportJob.of(dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, model=model)))
    assert not target.refusals(job)
    write_bundle(make_bundle(target, job, launcher), tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        text = path.read_text() if path.is_file() else ""
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(path)], check=True)
            assert "touch hacked" not in "\n".join(line for line in text.splitlines() if not line.startswith("#")), path
        elif path.suffix == ".py":
            ast.parse(text)
        elif path.suffix == ".json":
            json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            assert list(yaml.safe_load_all(text))
    if name == "megatron":
        subprocess.run(["bash", "-c", "source ./arguments.sh"], cwd=tmp_path / "run", check=True)
    assert not list(tmp_path.rglob("hacked"))


def test_one_function_per_language() -> None:
    words = ("run.py", "--name", 'a "b" `c` \\', "$SET", "${MANY[@]}")
    script = f'SET="x y"; MANY=(1 2); printf "%s\\n" {shell_command(words)}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["run.py", "--name", 'a "b" `c` \\', "x y", "1", "2"]
    assert (
        ast.literal_eval(
            f"dict({python_fields({'a': NAME}, 0)})".removeprefix("dict(").split("=", 1)[1].rsplit(",", 1)[0]
        )
        == NAME
    )
    assert python_fields({"a": Expression("F.silu")}, 2) == "  a=F.silu,\n"
    assert [hydra_value(one) for one in (None, ["a", "b"], True, 3)] == ["null", "[a,b]", "True", "3"]
