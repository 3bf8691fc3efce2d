"""plan run with real ranks on gloo: fewer and more of them, killed, their storage full or damaged; against a run without all that.

In float64. The ranks are forked from a process that has imported torch; torchrun itself starts them in the last tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.proofs.gated_ranks import GATE  # noqa: E402

NO_TORCH = importlib.util.find_spec("torch") is None
pytestmark = [pytest.mark.proof, pytest.mark.skipif(NO_TORCH, reason="NOT RUN: torch, of the extra 'test', is not installed")]
SAME = 1e-12
STEPS = 24
GATED = str(ROOT / "tests/proofs/gated_ranks.py")
ANSWERS = 4
"""Seconds within which the node that keeps the rendezvous must answer."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Any]:
    """The process that forks ranks."""
    from tests.proofs.elastic_ranks import Forks

    with Forks() as found:
        yield found


@pytest.fixture(scope="module")
def sound(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that nobody disturbs: FSDP on 4 ranks."""
    from tests.proofs.elastic_faults import plan_of, run_job

    trial = run_job(forks, tmp_path_factory.mktemp("sound"), [plan_of("fsdp 4")], steps=STEPS, every=0)
    assert trial.code == 0, trial.said
    return trial


def held_against(sound: Any, trial: Any) -> None:
    """Loss of every step, every weight and optimizer state, every sample; and what each failure cost."""
    from planner.lab.elastic.same_tensors import compare

    assert trial.code == 0, (trial.code, trial.said[-5:])
    assert trial.losses().keys() == sound.losses().keys()
    assert max(abs(value - sound.losses()[step]) for step, value in trial.losses().items()) <= SAME
    same = compare(sound.final(), trial.final(), SAME)
    assert same.differences == () and same.tensors == 120 and same.values > 100_000
    trial.check_data()
    assert all(lost <= most for lost, most in trial.lost()), trial.lost()


PAIRS = (("fsdp 4", "fsdp 3"), ("tp 2 x fsdp 2", "pp 3"), ("pp 2 x tp 2", "fsdp 3"))


@pytest.mark.parametrize("splits", PAIRS, ids=" and ".join)
def test_four_three_four_ranks_train_as_if_nothing_had_happened(
    splits: tuple[str, str], forks: Any, sound: Any, tmp_path: Path
) -> None:
    """The number of GPUs changes while it trains: the ranks save, the other plan goes on, and back."""
    from tests.proofs.elastic_faults import plan_of, run_job

    state: dict[str, Any] = {"gpus": 4}

    def gpus() -> int:
        steps = [int(one) for log in tmp_path.glob("attempt-*.log") for one in re.findall(r"^step (\d+)", log.read_text(), re.M)]
        state["gpus"] = 4 if max(steps, default=0) < 6 or max(steps) >= 14 else 3
        return int(state["gpus"])

    trial = run_job(forks, tmp_path, [plan_of(one) for one in splits], steps=STEPS, gpus=gpus, watched=True, sleep=0.15)
    held_against(sound, trial)
    assert [len(group.ranks) for group in trial.groups] == [4, 3, 4], trial.said
    assert not any(lost for lost, _ in trial.lost())  # saved in time: no step is done twice


def test_ranks_killed_at_any_moment_cost_no_more_than_the_interval(forks: Any, sound: Any, tmp_path: Path) -> None:
    """Ten times SIGKILL, on 4 and 3 ranks in turn. benchmarks/elastic_faults.py does it two hundred times."""
    from tests.proofs.elastic_faults import kill_in_save, kill_one, plan_of, run_job

    chance, launched = random.Random(7), [0]

    def strike(group: Any, log: Path) -> None:
        (kill_in_save(chance) if launched[0] % 3 == 0 else kill_one(chance, 1.5))(group, log)

    def gpus() -> int:
        launched[0] += 1
        return 4 if launched[0] % 2 else 3

    trial = run_job(forks, tmp_path, [plan_of("fsdp 4"), plan_of("pp 3")], steps=STEPS, strike=strike, strikes=10, gpus=gpus)
    held_against(sound, trial)
    assert sum(group.struck for group in trial.groups) >= 6
    assert any("is torn, skipped: it was not written to its end" in line for line in trial.said)


@pytest.mark.alone
def test_a_rank_that_hangs_is_ended_in_its_stated_time_and_two_killed_at_once(forks: Any, sound: Any, tmp_path: Path) -> None:
    """First a rank is stopped, not killed: the others wait for it in a collective, and nothing says so but the missing steps. Then
    two are killed at once, as with a node of two."""
    from tests.proofs.elastic_faults import kill, plan_of, run_job

    silence, times = 6.0, []

    def strike(group: Any, log: Path) -> None:
        while group.code is None and len(re.findall("^step", log.read_text(), re.M)) < 7:
            time.sleep(0.01)
        times.append(time.monotonic())
        if len(times) > 1:
            kill(group, 2, 3)
            return
        os.kill(group.ranks[2], signal.SIGSTOP)
        while group.code is None:
            time.sleep(0.01)
        assert silence - 1 < time.monotonic() - times.pop() < silence + 10
        times.append(0.0)

    trial = run_job(forks, tmp_path, [plan_of("tp 2 x fsdp 2")], steps=STEPS, strike=strike, strikes=2, silence=silence)
    held_against(sound, trial)
    assert any(re.search("attempt 1 hung: no step for [67] s, it was ended", line) for line in trial.said), trial.said
    assert len(trial.groups) == 3 and trial.groups[1].struck == 1 and times[:1] == [0.0]


def test_a_damaged_shard_is_not_loaded(forks: Any, sound: Any, tmp_path: Path) -> None:
    """A byte of the newest checkpoint changes: the one before is loaded, and said."""
    from tests.proofs.elastic_faults import kill, plan_of, run_job

    def strike(group: Any, log: Path) -> None:
        while group.code is None and "checkpoint step-00000008 whole" not in log.read_text():
            time.sleep(0.01)
        kill(group, 1)
        while group.code is None:
            time.sleep(0.01)
        newest = max(one for one in (tmp_path / "checkpoints").glob("step-*") if (one / "complete.json").exists())
        shard = newest / "__2_0.distcp"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)

    trial = run_job(forks, tmp_path, [plan_of("fsdp 4")], steps=STEPS, strike=strike, strikes=1)
    from planner.lab.elastic.same_tensors import compare

    assert trial.code == 0, trial.said[-5:]
    assert any(re.search("is torn, skipped: the bytes of __2_0.distcp are not those that were written", one) for one in trial.said)
    assert compare(sound.final(), trial.final(), SAME).differences == ()
    trial.check_data()


def test_a_full_disk_ends_the_run_with_a_sentence_and_nothing_torn_is_loaded(forks: Any, sound: Any, tmp_path: Path) -> None:
    """No file may grow beyond a few KB: two saves fail, the run ends at once and says what it has; with room again it goes on."""
    from tests.proofs.elastic_faults import plan_of, run_job

    first = run_job(forks, tmp_path, [plan_of("fsdp 4")], steps=10)
    assert first.code == 0
    full = run_job(forks, tmp_path, [plan_of("fsdp 4")], steps=STEPS, limit=100_000, strikes=9)
    assert str(full.code).startswith(f"checkpoints cannot be written to {tmp_path / 'checkpoints'}"), full.code
    assert "the last whole one is of step 10; free space, start again" in full.code and "File too large" in full.code
    again = run_job(forks, tmp_path, [plan_of("fsdp 4")], steps=STEPS)
    held_against(sound, again)
    assert any("resumed at step 10" in line for line in again.said)


@pytest.mark.alone
def test_lost_time_is_as_predicted(forks: Any, tmp_path: Path) -> None:
    """Steps that sleep, kills at moments that stand for an exponential distribution; ``plan resilience``'s formula within 20 %."""
    import numpy as np

    from planner.elastic.checkpoints import SaveTimes, lost_by_failure
    from planner.lab.elastic import loop
    from tests.proofs.elastic_faults import kill, plan_of, run_job

    every, sleep, kills, steps_all = 6, 0.25, 5, 60
    moments = [every * (one + 0.5) / kills for one in range(kills)]  # steps after a save has begun, evenly: a failure knows none
    random.Random(3).shuffle(moments)
    left = list(moments)

    def strike(group: Any, log: Path) -> None:
        steps, rest = divmod(left.pop(), 1.0)

        def done() -> float:  # steps since the first save began
            text = log.read_text()
            first = re.search(r"^saving step-(\d+)", text, re.M)
            return max(int(one) for one in re.findall(r"^step (\d+)", text, re.M)) - int(first[1]) if first else -1

        while group.code is None and done() < steps:
            time.sleep(0.01)
        time.sleep(rest * sleep)
        kill(group, 3)

    trial = run_job(
        forks, tmp_path, [plan_of("fsdp 4")], steps=steps_all, every=every, sleep=sleep, strike=strike, strikes=kills, restarts=20
    )
    assert trial.code == 0, trial.said[-3:]
    history = json.loads((tmp_path / "history.json").read_text())
    step = float(np.mean([one["step_s"] for one in history if one["step_s"]]))
    pairs = [pair for log in trial.logs for pair in re.findall(r"stalled (\S+) s, saved in (\S+) s", log)]
    stall, saved = (float(np.mean([float(pair[i]) for pair in pairs])) for i in (0, 1))
    # From a kill to the first step after it: noticing, ending the others, starting, loading.
    ends = [before["started"] + before["seconds"] - group.struck_at
            for before, group in zip(history, trial.groups[:kills], strict=False)]  # fmt: skip
    starts = [one["first_step_s"] - step for one in history[1:]]
    restart = float(np.mean(ends) + np.mean(starts)) + loop.AGAIN
    last = history[-1]
    tail = last["seconds"] - last["first_step_s"] - (last["last_step"] - last["first_step"]) * step
    predicted = kills * lost_by_failure(
        every * step, SaveTimes(stall=stall, behind=saved - stall, load=0.0), mtbf=1e9, restart=restart
    )
    measured = trial.seconds - steps_all * step - (history[0]["first_step_s"] - step) - tail
    print(f"lost {measured:.1f} s, predicted {predicted:.1f} s: step {step:.3f} s, saved in {saved:.2f} s, restart {restart:.2f} s")
    assert measured == pytest.approx(predicted, rel=0.2), (measured, predicted, step, stall, saved, restart, trial.lost())


# ------------------------------------------------------------------------------------------------ torchrun


def plan_file(folder: Path) -> Path:
    """The plan of FSDP on 4 ranks as a file."""
    from tests.proofs.elastic_faults import plan_of

    plan_of("fsdp 4").save(folder / "plan.yaml")
    return folder / "plan.yaml"


def started(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    """plan run as a process, its output in a file; steps wait for the number in the file "upto"."""
    command = [sys.executable, str(ROOT / "cli.py"), "run", str(folder / "plan.yaml"), "--to", str(folder / name), "--every", "4",
               "--target", "pytorch", *words, "--", GATED, "--device", "cpu", "--double", "--steps", str(STEPS)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", GATE: str(folder / "upto")}
    with (folder / f"{name}.out").open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def leave_nothing(folder: Path, *processes: subprocess.Popen[bytes]) -> None:
    """Ends plan runs and everything that they have started."""
    from planner.lab.launch.torchrun import end_marked

    for process in processes:
        process.kill()
        process.wait()
    for file in folder.rglob("running-*"):
        end_marked(file.read_text())


def until(file: Path, words: str, process: subprocess.Popen[bytes], seconds: float = 240.0, *, other: Path | None = None) -> None:
    """Waits until something is printed, there or in another file."""
    limit, text = time.monotonic() + seconds, ""
    while words not in text:
        assert time.monotonic() < limit and process.poll() is None, text[-3000:]
        time.sleep(0.05)
        text = "".join(one.read_text() for one in (file, other or file) if one.exists())


@pytest.mark.alone
def test_the_agent_is_killed_then_a_signal_comes(tmp_path: Path) -> None:
    """torchrun is killed and the loop goes on; SIGTERM saves and ends with 143, within the grace time."""
    from planner.lab.elastic.attempt import _children
    from planner.trainers.pytorch.good_checkpoints import last_good

    plan_file(tmp_path)
    out = tmp_path / "job.out"
    (tmp_path / "upto").write_text("6")
    process = started(tmp_path, "job", "--gpus", "4")
    try:
        until(out, "checkpoint step-00000004 whole", process)
        [agent] = _children(process.pid)
        ranks = _children(agent)
        os.kill(agent, signal.SIGKILL)
        until(out, "attempt 1 failed: torchrun was ended by SIGKILL", process)
        until(out, "resumed at step 4 after 48 samples", process)
        assert len(ranks) == 4 and not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        until(out, "step 6 loss", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=70) == 143  # --grace 60s
    finally:
        leave_nothing(tmp_path, process)
    [step] = re.findall(r"^SIGTERM: stopped after step (\d); start the same command again to go on$", out.read_text(), re.M)
    assert last_good(tmp_path / "job" / "checkpoints", sums=True) == tmp_path / "job" / "checkpoints" / f"step-0000000{step}"


@pytest.mark.alone
def test_two_nodes_one_is_lost_and_comes_back_then_the_one_that_keeps_the_rendezvous(sound: Any, tmp_path: Path) -> None:
    """Two plan runs of two ranks, --nnodes 1:2. All processes of the second are killed: the first goes on alone, and with it
    again when it has come back. Those of the first are killed, which keeps the rendezvous: the second ends in its stated time with
    a sentence. The first, started again, trains to the end; all is as if nothing had happened."""
    from planner.lab.elastic.same_tensors import compare
    from tests.proofs.forked_ranks import free_port

    plan_file(tmp_path)
    gate, outs, port = tmp_path / "upto", [tmp_path / f"node{number}.out" for number in range(2)], free_port()
    gate.write_text("10")
    nodes: dict[int, subprocess.Popen[bytes]] = {}

    def start(number: int) -> None:
        conf = f"is_host={int(number == 0)},last_call_timeout=5,read_timeout={ANSWERS}"
        words = ["--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", conf,
                 "--restarts", "1", "--checkpoints", str(tmp_path / "checkpoints")]  # fmt: skip
        nodes[number] = started(tmp_path, f"node{number}", *words)

    try:
        start(0)
        start(1)
        until(outs[0], "checkpoint step-00000008 whole", nodes[0], other=outs[1])  # rank 0 may be on either
        leave_nothing(tmp_path / "node1", nodes[1])
        gate.write_text("14")  # a rank notices in its next step
        until(outs[0], "resumed at step 8 after 96 samples, from step-00000008 of 4 ranks", nodes[0])
        until(outs[0], "checkpoint step-00000012 whole", nodes[0])
        assert "attempt 1 failed: a rank has lost another one" in outs[0].read_text()
        start(1)
        until(outs[0], "of 2 ranks", nodes[0], other=outs[1])  # saved by the two, read by four
        gate.write_text("22")
        until(outs[0], "checkpoint step-00000020 whole", nodes[0], other=outs[1])
        assert "attempt 3" not in outs[0].read_text()  # torchrun took the second in
        leave_nothing(tmp_path / "node0", nodes[0])
        gate.write_text(str(STEPS))
        assert nodes[1].wait(timeout=61) == 2 and f"nodes 51 s for localhost:{port}" in outs[1].read_text()  # 10 s to say so
        assert "the node that keeps the rendezvous does not answer; its log" in outs[1].read_text()
        start(0)
        assert nodes[0].wait(timeout=90) == 0, outs[0].read_text()[-2000:]
    finally:
        leave_nothing(tmp_path, *nodes.values())
    assert compare(sound.final(), max((tmp_path / "checkpoints").glob("step-*")), SAME).differences == ()


AT_THE_END = """
import atexit, os, pathlib
if "RANK" in os.environ:
    atexit.register(pathlib.Path(os.environ["ENDED"] + "-" + os.environ["RANK"]).touch)
"""
"""Says which ranks ended as Python ends."""


def test_a_checkpoint_is_rewritten_and_every_tensor_checked(sound: Any, tmp_path: Path) -> None:
    """plan reshape --run: FSDP on 4 ranks to 3 ranks, by torch.distributed.checkpoint under torchrun."""
    words = [sys.executable, str(ROOT / "cli.py"), "reshape", str(plan_file(tmp_path)), "--gpus", "3", "--checkpoint",
             str(sound.folder / "checkpoints"), "--run", str(tmp_path / "new")]  # fmt: skip
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "ENDED": str(tmp_path / "ended")}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.glob("ended-*"))  # ranks that end as Python ends abort now and then
    assert "120 tensors" in done.stderr and "names, shapes, values and sums are those of" in done.stderr
