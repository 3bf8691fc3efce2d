"""Texts of plans, profiles and trainers that hold the signs of every language that exports are written in: refused, or texts."""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import COMMAND, HOSTILE, MARK, put, texts
from trainers.plans import Wanted, found

from planner import library
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.plan_file import Plan, load_plan, plan_from_dict
from planner.trainer import load_trainer
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.launchers import LAUNCHERS
from planner.trainers.bundle.quoting import Expression, hydra_value, python_fields, shell_command
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import TARGETS, load_target

ALL = "\n".join(one for one in HOSTILE if len(one) < 1000 and one.isprintable())
"""Several lines of all tricks that prose may hold."""
LINE = " ".join(ALL.split("\n"))


def accepted(read: Any, data: dict[str, Any], values: tuple[str, ...]) -> dict[str, Any]:
    """The data with each of its texts replaced by the first of the values that the reader takes there."""
    for path, _ in [one for one in texts(data) if one[0][-1] not in ("hardware", "trainer")]:  # these are files
        for value in values:
            try:
                read(put(data, path, value))
            except UnicodeEncodeError:  # no file can hold it
                continue
            except PlannerError as error:
                assert "\n" not in str(error)[:200], error
            else:
                data = put(data, path, value)
                break
    return data


@cache
def plan_of(trainer: str) -> Plan:
    """A plan that each target of the trainer runs."""
    precision = load_trainer(trainer).legal.precisions[0]
    pins = (("cp", 1), ("tp", 1))
    return found(Wanted(model="llama-3.1-8b", gpus=16, trainer=trainer, precision=precision, top=1, pins=pins))[0]


def trainer_file(path: Path, data: dict[str, Any]) -> None:
    library.write_whole(path, library.dump_yaml(data))
    load_trainer(str(path))


def hostile_job(target: Any, folder: Path, values: tuple[str, ...]) -> ExportJob:
    """A plan with a hardware and a trainer file of its own; every text in the three that may be so is hostile, and so are the names
    of the folder and, past the readers, of model and device."""
    plan = plan_of(target.trainers[0])
    place = folder / f'it\'s "{COMMAND}" $({COMMAND}) `{COMMAND}`; {COMMAND} #'.replace("/", "")
    place.mkdir(parents=True)
    for kind, name, load in (("hardware", plan.hardware, load_hardware), ("trainers", plan.trainer, load_trainer)):
        path = place / f"{kind}.yaml"
        path.write_text(library.dump_yaml({"extends": name}))
        load(str(path))
    trainer = {"extends": plan.trainer, "title": "x", "source": "x"}
    path.write_text(library.dump_yaml(accepted(lambda one: trainer_file(path, one), trainer, values)))
    data = plan.to_dict() | {
        "trainer": str(path),
        "assumptions": [dict.fromkeys(("what", "value", "why", "flag"), "x")],
    }
    data["cluster"] |= {"hardware": str(place / "hardware.yaml")}
    data["workload"]["model"]["source"] = "x"
    data = accepted(plan_from_dict, data, values)
    assert data["why"] in values and data["why"] == data["workload"]["model"]["source"]
    (place / "plan.yaml").write_text(library.dump_yaml(data))
    job = ExportJob.of(load_plan(place / "plan.yaml"))
    for one, fields in ((job.model, ("name",)), (job.cluster.hardware, ("name", "device")), (job.trainer, ("name",))):
        for field in fields:
            object.__setattr__(one, field, values[0].replace("\ud800", "").replace("\0", ""))  # no file can be of these
    return job


def masked(value: Any) -> Any:
    """Data or a syntax tree without what its texts say."""
    if isinstance(value, ast.AST):
        for node in ast.walk(value):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        return ast.dump(value)
    if isinstance(value, dict):
        return {key: masked(one) for key, one in value.items()}
    return [masked(one) for one in value] if isinstance(value, list) else "" if isinstance(value, str) else value


def structure(path: Path, text: str) -> Any:
    """What of a file a text must not change."""
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", str(path)], check=True)
        return [line for line in text.split("\n") if not line.startswith("#") and MARK not in line]
    if path.suffix == ".py":
        return masked(ast.parse(text))
    if path.suffix in (".json", ".toml"):
        return masked((json if path.suffix == ".json" else tomllib).loads(text))
    if path.suffix in (".yaml", ".yml"):
        return masked(list(yaml.safe_load_all(text)))
    return len(text.splitlines())


def written(target: Any, job: ExportJob, launcher: str, folder: Path) -> dict[str, Any]:
    """The structure of every file of a bundle, its scripts run with no program at hand."""
    bundle = make_bundle(target, job, launcher)
    write_bundle(bundle, folder)
    scripts = [name for name in bundle.files if name.endswith((".sh", ".sbatch"))]
    lines = "".join(f"(source ./{name}) < /dev/null; " for name in scripts)
    missing = "command_not_found_handle() { :; }; export -f command_not_found_handle; "
    known = dict.fromkeys(
        (*bundle.rendered.needed, "NODE_RANK", "MASTER_ADDR", "SLURM_JOB_ID", "SLURM_SUBMIT_DIR"), "1"
    )
    subprocess.run(
        ["/bin/bash", "-c", missing + lines], cwd=folder, env={**known, "PATH": str(folder)}, capture_output=True
    )
    assert not list(folder.parent.rglob(MARK)), f"{target.name}: a text ran"
    return {
        name: structure(folder / name, (folder / name).read_bytes().decode())
        for name in bundle.files
        if name != "plan.yaml"
    }


def compare(name: str, launcher: str, folder: Path, values: tuple[str, ...]) -> None:
    target = load_target(name)
    plain = written(target, hostile_job(target, folder / "a", ("x",)), launcher, folder / "a" / "run")
    found = written(target, hostile_job(target, folder / "b", values), launcher, folder / "b" / "run")
    assert found.keys() == plain.keys()
    for file, one in plain.items():
        assert found[file] == one, f"{name}: {file}"
    readme = (folder / "b" / "run" / "README.md").read_text()
    assert "<script" not in readme.replace("\\<script", "")


@pytest.mark.parametrize("name", TARGETS)
def test_a_strange_text_stays_a_text(name: str, tmp_path: Path) -> None:
    """Scripts run no word of it, and every file has the structure that it has with a plain text."""
    compare(name, LAUNCHERS[TARGETS.index(name) % len(LAUNCHERS)], tmp_path, (ALL, LINE, "a"))


@pytest.mark.proof
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_each_text_alone_stays_a_text(number: int, tmp_path: Path) -> None:
    target, launcher = TARGETS[number % len(TARGETS)], LAUNCHERS[number // 4 % len(LAUNCHERS)]
    compare(target, launcher, tmp_path, (HOSTILE[number], "a"))


def test_one_function_per_language() -> None:
    words = ("run.py", "--name", 'a "b" `c` \\', "$SET", "${MANY[@]}")
    script = f'SET="x y"; MANY=(1 2); printf "%s\\n" {shell_command(words)}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["run.py", "--name", 'a "b" `c` \\', "x y", "1", "2"]
    assert (
        ast.literal_eval(
            f"dict({python_fields({'a': ALL}, 0)})".removeprefix("dict(").split("=", 1)[1].rsplit(",", 1)[0]
        )
        == ALL
    )
    assert python_fields({"a": Expression("F.silu")}, 2) == "  a=F.silu,\n"
    assert [hydra_value(one) for one in (None, ["a", "b"], True, 3)] == ["null", "[a,b]", "True", "3"]
