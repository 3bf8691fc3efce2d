"""Launch files against torchrun's parser, shellcheck, the strict TrainJob schema and SkyPilot's task."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from shutil import which  # by its own name: tests put another one into shutil, which finds no GPU

import pytest

from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.launchers import LAUNCHERS, gpus_of_last_node
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import load_target
from tests.trainers.launch_files import check_sky_task, check_train_job, started_words, torchrun_place
from tests.trainers.plans import Wanted, found

CASES = {
    "deepspeed": Wanted(model="llama-3.1-8b", gpus=8, trainer="deepspeed", top=1),
    "llama-factory": Wanted(model="llama-3.1-8b", gpus=16, trainer="deepspeed", top=1, pins=(("cp", 1), ("tp", 1))),
    "megatron": Wanted(model="llama-3.1-70b", gpus=64, pins=(("pp", 4), ("tp", 4)), top=1),
    "accelerate": Wanted(model="llama-3.1-8b", gpus=12, batch=384, trainer="fsdp", top=1),
    "torchtitan": Wanted(model="llama-3.1-8b", gpus=16, trainer="torchtitan", top=1),
    "verl": Wanted(model="qwen3-30b-a3b", gpus=72, hardware="gb200-nvl72", batch=288, top=1),
    "vllm": Wanted(model="deepseek-v2-lite", gpus=16, top=1),
    "maxtext": Wanted(model="llama-3.1-8b", gpus=16, trainer="maxtext", top=1),
}


def needs(package: str) -> None:
    """Skip, loudly, without a package."""
    try:
        there = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        there = False
    if not there:
        pytest.skip(f"NOT CHECKED: {package} is not installed here")


def written(tmp_path: Path, target: str, launcher: str) -> tuple[ExportJob, Path, dict[str, str]]:
    """A job, its folder, and values for what the user has to say."""
    job = ExportJob.of(found(CASES[target])[0])
    bundle = make_bundle(load_target(target), job, launcher)
    write_bundle(bundle, tmp_path / "run")
    asked = {name: "x" for name, one in bundle.rendered.variables.items() if one.value is None}
    return job, tmp_path / "run", asked


@pytest.mark.parametrize("target", ("deepspeed", "megatron", "torchtitan", "llama-factory"))
def test_torchrun_takes_its_words(target: str, tmp_path: Path) -> None:
    needs("torch")
    job, folder, user = written(tmp_path, target, "torchrun")
    for node in range(job.num_nodes):
        data = dict.fromkeys(("DATA_PATH", "TOKENIZER_MODEL", "DATASET", "TOKENIZER"), "x")
        place = {**data, **user, "NODE_RANK": str(node), "MASTER_ADDR": "host0", "MASTER_PORT": "1234"}
        words = started_words(folder, "run.sh", "torchrun", place)
        read = torchrun_place(words)
        own = words[words.index("--") + 1 :]
        assert read["script"][-len(own) + 1 :] == own[1:]  # not one word is taken for torchrun's own
        last = node == job.num_nodes - 1
        assert read["nodes"] == (job.num_nodes, job.num_nodes) and read["restarts"] == 0
        assert read["processes"] == (gpus_of_last_node(job) if last else job.gpus_per_node)
        if job.num_nodes > 1:
            assert (read["backend"], read["endpoint"], read["rank"]) == ("static", "host0:1234", node)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("target", CASES)
def test_shellcheck_finds_nothing(target: str, launcher: str, tmp_path: Path) -> None:
    if which("shellcheck") is None:
        pytest.skip("NOT CHECKED: shellcheck is not installed here")
    _, folder, _ = written(tmp_path, target, launcher)
    scripts = [str(path) for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert not done.stdout


@pytest.mark.parametrize("target", CASES)
def test_train_job_is_what_the_api_takes(target: str, tmp_path: Path) -> None:
    needs("kubeflow_trainer_api")
    needs("jsonschema")
    _, folder, _ = written(tmp_path, target, "kubernetes")
    for name in ("run.trainjob.yaml", "smoke.trainjob.yaml"):
        text = (folder / name).read_text()
        check_train_job(text)
        with pytest.raises(Exception, match="numNode"):
            check_train_job(text.replace("numNodes:", "numNode:"))


@pytest.mark.parametrize("target", CASES)
def test_sky_task_is_read(target: str, tmp_path: Path) -> None:
    needs("sky")
    job, folder, user = written(tmp_path, target, "skypilot")
    for name in ("run.skypilot.yaml", "smoke.skypilot.yaml"):
        text = (folder / name).read_text()
        task = check_sky_task(text, user)
        assert task.num_nodes == job.num_nodes
        with pytest.raises(Exception, match="num_node"):
            check_sky_task(text.replace("num_nodes:", "num_node:"), user)
        if user:
            with pytest.raises(Exception, match=next(iter(user))):
                check_sky_task(text, {})


ON_RAY = """
import ray, runpy
ray.init(address="local", num_cpus=4, num_gpus=16, include_dashboard=False, logging_level="ERROR")
runpy.run_path("smoke.ray.py", run_name="__main__")
"""


def test_ray_gives_every_node_its_place(tmp_path: Path) -> None:
    """Ray Train itself with two workers of 8 pretended GPUs, here on one node: each runs the script once, with one address and
    port for both."""
    needs("ray.train")
    plan = found(Wanted(model="llama-3.1-8b", gpus=16, top=1))[0]
    write_bundle(make_bundle(load_target("megatron"), ExportJob.of(plan), "ray"), tmp_path / "run")
    folder = tmp_path / "run"
    script = folder / "smoke.ray.py"
    script.write_text(script.read_text().replace("STRICT_SPREAD", "PACK"))
    (folder / "smoke.sh").write_text(
        'echo "$MASTER_ADDR:$MASTER_PORT $MEGATRON_LM ${WORLD_SIZE:-none}" > "node$NODE_RANK"\nsleep 1\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "MEGATRON_LM": "/there", "DATA_PATH": "d", "TOKENIZER_MODEL": "t"},
    )  # fmt: skip
    if "No module named" in done.stderr:
        pytest.skip(f"NOT CHECKED: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    one, two = ((folder / f"node{number}").read_text().split() for number in (0, 1))
    assert one == two and one[1:] == ["/there", "none"]
