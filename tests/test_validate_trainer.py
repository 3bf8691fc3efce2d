"""plan validate --trainer: an exported plan is started and its log read; what cannot start, every end of one that does."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer_samples import LOGS, ROOT, of_megatron, of_torchtitan, plan_of, stand_in

from planner.errors import PlannerError
from planner.lab.launch.torchrun import run_watched
from planner.lab.run.learn import learned
from planner.lab.run.trainer_run import TrainerRun, require_runnable, run_trainer
from planner.layout import Layout
from planner.library import read_yaml
from planner.runs.rows import validations_from_dict
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import load_target


@pytest.mark.parametrize("name", ["megatron", "torchtitan"])
def test_an_exported_plan_is_started_and_its_log_compared(name: str, tmp_path: Path) -> None:
    plan = {"megatron": of_megatron, "torchtitan": of_torchtitan}[name]()
    said: list[str] = []
    asked = TrainerRun(
        trainer=name, warm_up=2, command=stand_in(tmp_path, name, "run"), keep_log=tmp_path / "train.log", steps=10
    )
    found = run_trainer(plan, tmp_path / "plan.yaml", asked, said.append)
    assert found["outcome"] == "completed" and found["failure"] is None and said
    [step], [rank] = found["times"], found["ranks"]
    peak, *others = rank["memory"]
    assert [one["what"] for one in others] == (["reserved"] if name == "megatron" else [])
    assert all(one["measured_gib"] == pytest.approx(66120 / 1024) for one in others)
    expected = {"megatron": (13.3, "allocated"), "torchtitan": (8192 / 7043, "reserved")}[name]
    assert step["measured_seconds"] == pytest.approx(expected[0], rel=0.01) and peak["what"] == expected[1]
    assert step["predicted_seconds"] == plan.prediction.step_time_s and step["interval"][0] < step["interval"][1]
    rates = found["rates"]
    assert rates["tokens_per_second"]["measured"] == pytest.approx(plan.workload.tokens / step["measured_seconds"])
    assert rates["mfu"]["measured"] == pytest.approx(
        rates["mfu"]["predicted"] * step["predicted_seconds"] / step["measured_seconds"]
    )
    assert len(rates["loss"]) == 2 and rates["loss"][0] > rates["loss"][1] > 5
    assert rates["loss_of_chance"] == pytest.approx(11.762, abs=1e-3)  # ln 128256
    again = run_trainer(plan, tmp_path / "plan.yaml", TrainerRun(trainer=name, warm_up=2, log=tmp_path / "train.log"))
    assert again["times"] == found["times"] and again["trainer_command"] is None
    whole = learned(plan, found)
    if name == "torchtitan":
        assert whole["device"]["name"].startswith("NVIDIA H100") and whole["run"]["rows"][0]["measured"]["mem_gb"]
    other = dataclasses.replace(plan, layout=plan.layout.replace(tp=4, dp=2))
    with pytest.raises(PlannerError, match=r"the log is not of this plan: it has tp [12], the plan 4"):
        run_trainer(other, tmp_path / "plan.yaml", TrainerRun(trainer=name, log=tmp_path / "train.log"))


@pytest.mark.parametrize(
    ("mode", "outcome", "says", "rank"),
    [
        ("oom", "out_of_memory", r"rank 3 ran out of GPU memory after step \d+ with 77.88 GiB in use", 3),
        ("killed", "lost_rank", r"rank 5 was ended by signal 9 after step \d+", 5),
        ("error", "failed", r"after step \d+: ValueError: heads must divide", None),
        ("hang", "hung", r"nothing was printed in time after step \d+; it was ended", None),
    ],
)
def test_every_end_of_a_trainer_is_a_result(
    mode: str, outcome: str, says: str, rank: int | None, tmp_path: Path
) -> None:
    import re

    plan, begun = of_torchtitan(), time.monotonic()
    fast = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, step_time_s=0.05))
    asked = TrainerRun(
        trainer="torchtitan",
        timeout=1.0,
        command=stand_in(tmp_path, "torchtitan", mode),
        keep_log=tmp_path / "train.log",
    )
    found = run_trainer(fast if mode == "hang" else plan, tmp_path / "plan.yaml", asked)
    assert found["outcome"] == outcome and re.search(says, found["failure"]["sentence"]), found["failure"]
    assert found["failure"]["rank"] == rank and time.monotonic() - begun < 20
    if mode == "hang":
        child = int(re.findall(r"child (\d+)", (tmp_path / "train.log").read_text())[-1])
        time.sleep(0.2)
        state = Path(f"/proc/{child}/stat")
        assert not state.exists() or ") Z " in state.read_text()  # a session of its own, and ended all the same
    assert learned(plan, found)["run"] is None or outcome == "out_of_memory"


def test_what_cannot_be_started_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ExportJob.of(of_megatron())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    with pytest.raises(PlannerError, match="MEGATRON_LM is not set: fetch Megatron-LM with git clone"):
        require_runnable(load_target("megatron"), job)
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    (tmp_path / "pretrain_gpt.py").write_text("")
    monkeypatch.setattr("planner.lab.run.trainer_run._probe", lambda: (0, True, "2.13"))
    with pytest.raises(PlannerError, match="trains on GPUs only and torch sees none here; the plan needs 8"):
        require_runnable(load_target("megatron"), job)
    many = ExportJob.of(plan_of("megatron", Layout(tp=2, dp=8, zero=1, sequence_parallel=1)))
    with pytest.raises(PlannerError, match="has 2 nodes and this would start one of them"):
        require_runnable(load_target("megatron"), many)
    monkeypatch.setattr("planner.lab.run.trainer_run._probe", lambda: (8, False, "2.13"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    titan = ExportJob.of(of_torchtitan())
    with pytest.raises(PlannerError, match=r"not installed here; install it with: pip install 'torchtitan>=0.3,<0.4'"):
        require_runnable(load_target("torchtitan"), titan)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(PlannerError, match="calls torch.distributed.set_timeout after its first step, and torch 2.13"):
        require_runnable(load_target("torchtitan"), titan)
    with pytest.raises(PlannerError, match="nanotron: plans are validated with torchtitan or megatron"):
        run_trainer(of_megatron(), tmp_path / "plan.yaml", TrainerRun(trainer="nanotron"))
    with pytest.raises(
        PlannerError, match=r"torchtitan cannot run this plan: the plan was priced for trainer megatron"
    ):
        run_trainer(of_megatron(), tmp_path / "plan.yaml", TrainerRun(trainer="torchtitan"))


def test_the_exported_script_starts_the_trainer_with_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """smoke.sh as users run it: a stand-in torchrun on the PATH is given the trainer's words and prints Megatron's log."""
    stand, words = tmp_path / "torchrun", tmp_path / "words"
    stand.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {words}\nprintenv >> {words}\ncat {LOGS / 'megatron.log'}\n")
    stand.chmod(0o755)
    (tmp_path / "pretrain_gpt.py").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    monkeypatch.setattr("planner.lab.run.trainer_run._probe", lambda: (8, True, "2.13"))
    asked = TrainerRun(trainer="megatron", steps=8, warm_up=4)
    found = run_trainer(of_megatron(), tmp_path / "plan.yaml", asked)
    assert found["outcome"] == "completed" and found["steps"] == {"warm": 4, "measured": 8} and found["log"] is None
    given = words.read_text().splitlines()
    last = {flag: given[at + 1] for at, flag in enumerate(given) if flag.startswith("--")}  # of two, the last counts
    assert str(tmp_path / "pretrain_gpt.py") in given and last["--nproc-per-node"] == "8"
    assert (last["--train-iters"], last["--global-batch-size"]) == ("12", "128") and "--mock-data" in given
    assert (last["--tensor-model-parallel-size"], last["--micro-batch-size"]) == ("2", "1")
    said = capsys.readouterr().err
    assert said == f"{found['limits']}\n" and "12 steps, about" in said and "CUDA_DEVICE_MAX_CONNECTIONS=1" in given


def test_a_stopped_trainer_is_written_down_and_ended(tmp_path: Path) -> None:
    of_torchtitan().save(tmp_path / "plan.yaml")
    command = f"sh -c 'cat {LOGS / 'torchtitan.log'}; touch {tmp_path / 'begun'}; sleep 31.25'"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), "validate", "plan.yaml", "--trainer", "torchtitan", "--trainer-command", command,
         "--output", "v.yaml"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "stopped after step 100" in said and "Traceback" not in said, said
    [found] = validations_from_dict(read_yaml(tmp_path / "v.yaml"))
    assert found["outcome"] == "interrupted" and found["times"][0]["measured_seconds"] and found["run"] is None
    running = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not any(b"31.25" in words for words in running)


def test_a_command_that_outlives_its_deadline_is_ended(tmp_path: Path) -> None:
    words = ["sh", "-c", "trap '' TERM; echo on; sleep 30"]
    ended = run_watched(words, lambda _: 0.0, folder=tmp_path)
    assert ended.hung and ended.code != 0
