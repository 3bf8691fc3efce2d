"""plan profile from end to end: torchrun on this machine, two agents, Ctrl-C, a killed rank, and the file in use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from profiler_ranks import free_port

from planner.hardware import load_hardware

pytestmark = pytest.mark.proof
CLI = Path(__file__).resolve().parent.parent / "cli.py"
LINKS = ("--device", "cpu", "--only", "collectives", "--hardware", "h100-sxm", "--max-size", "64 KiB")


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CLI), "profile", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def measured(journal: Path) -> list[Any]:
    try:
        return list(json.loads(journal.read_text())["measured"])
    except (OSError, ValueError):
        return []


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 150.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    try:
        below = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return below + [one for child in below for one in descendants(child)]


def rank_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((word[5:].decode() for word in words if word.startswith(b"RANK=")), "")


def test_profile_of_this_cpu_is_used_at_once(tmp_path: Path, run: Any) -> None:
    output = tmp_path / "mine.yaml"
    process = start(
        "--output", str(output), "--device", "cpu", "--ranks", "2", "--budget", "8s", "--max-size", "64 KiB", "--json"
    )
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    assert error == "", "progress is for terminals"
    said = json.loads(out)
    profile = load_hardware(str(output))
    assert profile.arch == "CPU" and profile.gpus_per_node == 2 and profile.measured["scale_up"] == "measured"
    assert profile.measured["gemm"].startswith("measured") and profile.measured["scale_out"].startswith("assumed")
    assert {row["op"] for row in said["curves"]} == set(profile.scale_up) and said["points"] > 20
    origin = profile.provenance
    assert origin is not None and "--budget 8s" in origin.command and origin.versions["gloo"]
    assert any("the other ranks computed" in note for note in origin.notes)
    done = run(
        "--model", "gpt3-125m", "--gpus", "2", "--hardware", str(output), "--sequence-length", "512",
        "--global-batch-size", "8", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cluster"]["hardware"] == str(output)


def test_interrupted_then_resumed_then_a_rank_is_killed(tmp_path: Path) -> None:
    output, journal = tmp_path / "mine.yaml", tmp_path / "mine.journal.json"
    long = ("--output", str(output), *LINKS, "--ranks", "2", "--budget", "30m", "--timeout", "20s")
    process = start(*long)
    wait_for(lambda: len(measured(journal)) >= 5, process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=150)
    kept = measured(journal)
    assert process.returncode == 130 and f"stopped; what was measured is kept in {journal}" in error
    assert len(kept) >= 5 and not output.exists() and descendants(process.pid) == []

    process = start(*long, "--resume")
    wait_for(lambda: len(measured(journal)) >= len(kept) + 3, process)
    assert measured(journal)[: len(kept)] == kept, "what was measured is not measured again"
    victim = next(pid for pid in descendants(process.pid) if rank_of(pid) == "1")
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, error = process.communicate(timeout=150)
    assert time.monotonic() - begun < 20, "a death is seen at once, not after the timeout"
    assert process.returncode == 2
    assert f"rank 1 ({os.uname().nodename}) died during" in error and "KiB" in error and "groups of 2 ranks" in error
    assert f"what was measured is kept in {journal}; --resume goes on" in error and error.count("\n") == 1
    assert len(measured(journal)) >= len(kept) + 3


def two_agents(output: Path, *more: str) -> list[subprocess.Popen[str]]:
    """torchrun on two nodes, both of them this machine."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0",
        "--rdzv-backend=c10d", "--rdzv-id=profile", f"--rdzv-endpoint=127.0.0.1:{free_port()}", str(CLI), "profile",
        "--output", str(output), *LINKS, *more,
    ]  # fmt: skip
    return [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]


def end(agents: list[subprocess.Popen[str]]) -> None:
    for one in agents:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)


def test_two_agents_are_two_nodes(tmp_path: Path) -> None:
    output = tmp_path / "duo.yaml"
    agents = two_agents(output, "--budget", "5s")
    try:
        said = [one.communicate(timeout=250) for one in agents]
    finally:
        end(agents)
    assert [one.returncode for one in agents] == [0, 0], said
    assert sum(f"wrote {output}" in out for out, _ in said) == 1, "one rank writes"
    profile = load_hardware(str(output))
    assert profile.measured["scale_out"] == "measured" and profile.gpus_per_node == 1
    origin = profile.provenance
    assert origin is not None and "2 ranks on 2 nodes" in origin.machine
    assert 0 < profile.scale_out_time("all_reduce", 65536, 2, 1) < 1
    assert all(row["nodes"] == 2 for row in profile.measurements["collective"])


def test_a_rank_that_hangs_on_another_node_is_named_in_time(tmp_path: Path) -> None:
    """Timeout 4 s and two more until it is named; its agent then waits for a stopped process as long as torchrun does, the
    first node's does not. What was measured stays."""
    output, journal = tmp_path / "duo.yaml", tmp_path / "duo.journal.json"
    agents = two_agents(output, "--budget", "30m", "--timeout", "4s")
    ranks: list[int] = []
    try:
        wait_for(lambda: len(measured(journal)) >= 4, agents[0])
        ranks = [pid for one in agents for pid in descendants(one.pid) if rank_of(pid)]
        victim = next(pid for pid in ranks if rank_of(pid) == "1")
        first = next(one for one in agents if victim not in descendants(one.pid))
        begun = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        _, error = first.communicate(timeout=150)
        lasted = time.monotonic() - begun
        assert first.returncode != 0 and lasted < 20, lasted
        said = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and "rank 1 (" in said[0] and "stopped answering for 4 s during" in said[0], error
        assert "node 1" in said[0] and "KiB fp32 in groups of 2 ranks" in said[0]
        assert len(measured(journal)) >= 4 and not output.exists()
    finally:
        end(agents)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
