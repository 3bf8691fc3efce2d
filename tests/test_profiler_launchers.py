"""Where the ranks of a profile run, the commands that start them, and how they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner import library
from planner.errors import PlannerError
from planner.lab.launch import torchrun as launch
from planner.lab.launch.gpus import Gpus
from planner.lab.launch.place import commands, first_host, place_from
from planner.lab.launch.state import State

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a",
    "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}  # fmt: skip


def test_places() -> None:
    found = place_from(TORCHRUN)
    assert found is not None and (found.rank, found.world, found.local_rank, found.node) == (5, 8, 1, 1)
    assert found.agent_store and (found.address, found.port) == ("a", 29400)
    found = place_from(SRUN)
    assert found is not None and (found.rank, found.world, found.local_rank, found.node) == (5, 8, 1, 1)
    assert (found.address, found.agent_store) == ("gpu003", False)
    assert place_from({}) is None
    assert place_from({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None, "the shell of an allocation is no rank"
    assert place_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None
    for broken, words in (
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x'"), ({**TORCHRUN, "RANK": "9"}, "rank 9 of 8"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not"), ({**SRUN, "SLURM_LOCALID": ""}, "SLURM_LOCALID"),
    ):  # fmt: skip
        with pytest.raises(PlannerError, match=words):
            place_from(broken)
    assert [first_host(text) for text in ("n1", "n1,n2", "gpu[03-07,9]-ib,b", "x[2,5]")] == [
        "n1",
        "n1",
        "gpu03-ib",
        "x2",
    ]


def test_printed_commands_are_shell(run: Any) -> None:
    done = run("profile", "--output", "my cluster.yaml", "--print-commands", "--nodes", "4", "--ranks", "8")
    assert done.exit_code == 0, done.output
    assert "torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=0 --rdzv-backend=c10d" in done.output
    assert "#SBATCH --job-name=profile --nodes=4 --ntasks-per-node=1 --gpus-per-node=8" in done.output
    on_cpu = run("profile", "--output", "x.yaml", "--print-commands", "--device", "cpu", "--ranks", "8").output
    assert "--nodes=2 --ntasks-per-node=8 --distribution=block" in on_cpu and "gpus" not in on_cpu
    login = run("profile", "--output", "x.yaml", "--print-commands", "--nodes", "4")
    assert "--nproc-per-node=8" in login.output and "no GPU here: 8 per machine assumed; --ranks N says" in login.output
    login = run("profile", "--output", "x.yaml", "--print-commands", "--nodes", "4", "--hardware", "gb300-nvl72").output
    assert "--nproc-per-node=4" in login and "no GPU here: 4 per machine as gb300-nvl72 has" in login
    text = commands("profile", 4, 8, ["--no-python", "plan", "profile", "--output", "my cluster.yaml"])
    assert "--no-python plan profile --output 'my cluster.yaml'" in text and "--rdzv-endpoint=$head:29400" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "--standalone" in commands("profile", 1, 8, ["--no-python", "plan"])
    with pytest.raises(PlannerError, match="at least 1"):
        commands("profile", 0, 8, [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "where to? Give --output FILE.yaml"),
        (("--output", "x.txt"), "a profile is a YAML file"),
        (("--output", "x.yaml", "--budget", "10"), "--budget: '10' has no unit; write it like 90s or 10m"),
        (("--output", "x.yaml", "--budget", "0m"), "--budget is 0 s; it must be above zero"),
        (("--output", "x.yaml", "--only", "colectives"), "unknown part 'colectives' of a profile; known: collectives"),
        (("--output", "x.yaml", "--model", "llama-7"), "unknown model 'llama-7'"),
        (("--output", "/nowhere/x.yaml"), "there is no directory /nowhere"),
        (("--output", "x.yaml", "--device", "cuda"), "neither the driver nor torch reports a GPU here"),
        (
            ("--output", "x.yaml", "--device", "cpu", "--ranks", "0"),
            "--ranks 0: the number of processes on this machine, from 1 to 64; it has",
        ),
        (("--output", "x.yaml", "--hardware", "none-such-9"), "unknown hardware 'none-such-9'"),
    ],
)
def test_bad_flags_are_sentences(run: Any, flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.lab.profile.command.need_torch", lambda: None)
    none = {"torch": "2.13.0+cpu", "cuda": None, "hip": None, "gpus": [], "error": ""}
    monkeypatch.setattr("planner.lab.launch.gpus.ask_torch", lambda *_: [none])
    done = run("profile", *flags)
    assert done.exit_code == 2 and words in done.output, done.output


def test_an_unknown_gpu_needs_a_relative(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.lab.profile.command.gpus_here", lambda _: Gpus(("NVIDIA Z1",), (80e9,)))
    done = run("profile", "--output", "x.yaml")
    assert done.exit_code == 2 and "no profile of 'NVIDIA Z1'; give --hardware with the nearest relative" in done.output


def test_ranks_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun waits long for a stopped rank, which has a session of its own; what it was started by is not ended."""
    monkeypatch.setattr(launch, "AFTER_LAST_WORDS", 0.2)
    agent = "import subprocess, sys; print('stopping'); subprocess.run(['setsid', 'sh', '-c', 'kill -STOP $$', sys.argv[-1]])"
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "agent"))
    (tmp_path / "agent").write_text(f"#!/bin/sh\nexec {sys.executable} -c \"{agent}\" {tmp_path}/rank\n")
    (tmp_path / "agent").chmod(0o755)
    (tmp_path / "failure.txt").write_text("rank 1 (a) stopped answering")
    shown: list[Any] = []
    with pytest.raises(PlannerError, match="^rank 1 .a. stopped answering(; all that .*)?$"):
        launch.run_here("module", "{}", 2, tmp_path, shown.append)
    words = f"{tmp_path}/rank".encode()
    running = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert shown and not any(words in one for one in running)


def test_what_a_failed_run_says_of_its_journal(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a journal that this run has written is said to hold what it measured."""
    output = tmp_path / "mine.yaml"
    journal = tmp_path / "mine.journal.json"

    def fails(*_: Any) -> float:
        raise PlannerError("rank 1 (a) died")

    def writes(*more: Any) -> float:
        library.write_whole(journal, "{}")
        return fails(*more)

    words = ("profile", "--device", "cpu", "--output", str(output))
    for how, kept in ((fails, False), (writes, True), (fails, False)):
        monkeypatch.setattr("planner.lab.profile.command.profile_here", how)
        done = run(*words)
        assert done.exit_code == 2 and "error: rank 1 (a) died" in done.output
        assert (f"what was measured is kept in {journal}; --resume goes on" in done.output) == kept, done.output


def test_the_bar_says_at_most_only_of_a_limit() -> None:
    assert State(spent=3.0, budget=10.0).left == "at most 7 s left"
    assert State(expected=7.0).left == "about 7 s left"
    assert State(spent=30.0, budget=10.0).left == "over the budget" and State(spent=3.0).left == ""
