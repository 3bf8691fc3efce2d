"""Commands that plan run writes for Megatron-LM and torchtitan, before their own code: Megatron's parser and validator;
torchtitan's whole trainer on the CPU, killed and resumed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.commands.main import main
from planner.lab.elastic.attempt import _children
from planner.lab.launch.torchrun import end_marked
from planner.layout import Layout
from planner.plan_file import Plan
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking.child import check_many
from tests.trainers.plans import ONE, Wanted, found

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = (
    Wanted(model="llama-3.1-8b", gpus=8, top=1), Wanted(model="llama-3.1-8b", gpus=8, trainer="megatron-fsdp", top=1),
    Wanted(model="qwen3-30b-a3b", gpus=32, top=1, pins=ONE),
)  # fmt: skip
STEPS = 40


def saved(plan: Plan, folder: Path) -> Path:
    """The plan as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.yaml")
    return folder / "plan.yaml"


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="NOT CHECKED: megatron-core is not on the path")
def test_megatron_takes_the_flags_of_plan_run(tmp_path: Path) -> None:
    """The words that a rank is started with, put behind those of the plan: Megatron's parser, validator and groups."""
    pairs = []
    for number, wanted in enumerate(MEGATRON):
        plan, folder = found(wanted)[0], tmp_path / str(number)
        script = folder / "pretrain_gpt.py"
        path = saved(plan, folder)
        script.touch()
        words = ["run", str(path), "--to", str(folder / "job"), "--gpus", str(plan.num_gpus), "--print-commands", "--", str(script)]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0 and "megatron keeps all of them" in done.output, done.output
        world = folder / "job" / "worlds" / f"gpus-{plan.num_gpus}"
        started = (world / "rank.sh").read_text().partition('"${ARGUMENTS[@]}"')[2].replace('"$@"', "")
        assert {"--save", "--load", "--async-save", "--exit-signal-handler"} <= set(shlex.split(started))
        text = (world / "arguments.sh").read_text()
        (world / "arguments.sh").write_text(re.sub(r"^\)", f"    {started.strip()}\n)", text, count=1, flags=re.M))
        (world / "run.sh").unlink()  # the words alone
        pairs.append((ExportJob.of(plan), world))
    for one in check_many("megatron", pairs):
        assert one.level == "groups built" and not one.problem, one.text()


def tiny() -> Plan:
    """A Llama of two layers on two ranks, FSDP."""
    plan = found(Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", top=1))[0]
    small = dataclasses.replace(
        plan.workload.model, name="tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128,
        vocab_size=256, max_sequence_length=128, published_parameters=0.0,
    )  # fmt: skip
    work = plan.workload.replace(model=small, sequence_length=64, global_batch_size=4, precision="fp32")
    return dataclasses.replace(plan, workload=work, layout=Layout(dp=2, num_microbatches=2, zero=3), num_gpus=2)


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="NOT CHECKED: torchtitan is not installed")
def test_torchtitan_killed_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Its own trainer with gloo (torchtitan_on_cpu.py says what is replaced): a rank is killed, plan run starts it again from its
    newest checkpoint; a torn one, newer, is set aside. The last checkpoint is that of a run that nobody disturbed."""
    from planner.lab.elastic.checkpoint_folder import DCP, recognise
    from planner.lab.elastic.same_tensors import compare

    path = saved(tiny(), tmp_path)

    def started(name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, str(ROOT / "cli.py"), "run", str(path), "--to", str(tmp_path / name), "--gpus", "2",
                 "--every", "10", "--target", "torchtitan",
                 "--", str(ROOT / "tests/trainers/torchtitan_on_cpu.py"), "--config", "smoke",
                 "--training.steps", str(STEPS), "--compile.no-enable", "--parallelism.spmd_backend", "partial_dtensor",
                 "--hf_assets_path", ".", "--checkpoint.no-last_save_model_only"]  # fmt: skip
        own = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        with (tmp_path / f"{name}.out").open("wb") as file:
            return subprocess.Popen(words, stdout=file, stderr=file, env={**own, "GLOO_SOCKET_IFNAME": "lo"})

    sound, killed = started("sound"), None
    try:
        assert sound.wait(timeout=300) == 0, (tmp_path / "sound.out").read_text()[-3000:]
        killed = started("killed")
        newest, limit = tmp_path / "killed" / "checkpoints" / "step-20", time.monotonic() + 300
        while not (newest / ".metadata").exists():
            assert time.monotonic() < limit and killed.poll() is None, (tmp_path / "killed.out").read_text()[-3000:]
            time.sleep(0.02)
        [agent] = _children(killed.pid)
        os.kill(_children(agent)[1], signal.SIGKILL)
        with max(newest.glob("*.distcp")).open("r+b") as file:
            file.truncate(100)
        assert killed.wait(timeout=300) == 0, (tmp_path / "killed.out").read_text()[-3000:]
    finally:
        for process in filter(None, (sound, killed)):
            process.kill()
        for file in tmp_path.glob("*/running-*"):
            end_marked(file.read_text())
    said = (tmp_path / "killed.out").read_text()
    assert "rank 1 was ended by SIGKILL" in said and "checkpoint step-20 is torn, set aside" in said and f"at step {STEPS}" in said
    assert "/step-10" in (tmp_path / "killed" / "attempt-2.log").read_text()
    read = recognise(tmp_path / "killed" / "checkpoints")
    assert (read.kind, read.step, read.problem) == (DCP, STEPS, "") and len(read.tensors) > 60  # weights and both moments
    same = compare(tmp_path / "sound" / "checkpoints" / f"step-{STEPS}", read.path, 1e-12)
    assert same.differences == () and same.tensors == len(read.tensors)
