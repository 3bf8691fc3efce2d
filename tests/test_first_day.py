"""`plan first-day`: whatever ends a step keeps the others; Ctrl-C, limits, resuming; the dry form and a made machine for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fresh import fresh
from made_machine import H100, MadeGpus, row
from validate_samples import ROOT, alive, needs_torch

from planner.errors import PlannerError
from planner.lab.first_day.all_steps import MOST_SECONDS, PROFILE, Step, dry_steps, steps_of
from planner.lab.first_day.findings import gathered, text_of
from planner.lab.first_day.runner import Day, of_samples

CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '100'], start_new_session=True).pid, flush=True); "


def stand_in(name: str, code: str, *, limit: float = 60.0, more: tuple[str, ...] = (), **fields: Any) -> Step:
    """A step of Python code, or of several of which the first that succeeds counts."""
    commands = tuple(("python", "-c", one) for one in (code, *more))
    return Step(name=name, what=name, limit=limit, makes=f"{name}.yaml", commands=commands, **fields)


def gone(pid: int) -> bool:
    """Whether a process that was killed has ended within some seconds."""
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def numbers(log: Path) -> list[int]:
    """Lines of a log that are the number of a process."""
    return [int(line) for line in log.read_text().splitlines() if line.isdecimal()]


def written(name: str) -> str:
    """Code that writes the file of a step."""
    return f"open('{name}.yaml', 'a').write('a: 1\\n')"


def test_what_ends_a_step_keeps_the_others(tmp_path: Path) -> None:
    """A segmentation fault, a kill as by a lack of memory, an error, a hang with a child in a session of its own: each is recorded
    with its reason and log, nothing is left running, and the last step is done."""
    steps = [
        stand_in("first", written("first")),
        stand_in("crashes", "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"),
        stand_in("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        stand_in("refused", "import sys; sys.exit('error: 3 GPUs are too few')"),
        stand_in("hangs", f"{CHILD}import time; time.sleep(100)", limit=1.0),
        stand_in("second-try", "raise ValueError('a first try')", more=(written("second-try"),)),
        stand_in("lacks", written("lacks"), needs=("crashes.yaml",)),
        stand_in("elsewhere", written("elsewhere"), obstacle=lambda _: "there is 1 GPU here"),
        stand_in("last", written("last")),
    ]
    told: list[list[str]] = []
    day = Day(folder=tmp_path, budget=600.0, gpus=False, report=lambda found: told.append([one["name"] for one in found]))
    records = {one["name"]: one for one in day.run(steps)}
    assert {name: one["outcome"] for name, one in records.items()} == {
        "first": "done", "crashes": "crashed", "killed": "crashed", "refused": "failed", "hangs": "over_time", "second-try": "done",
        "lacks": "left_out", "elsewhere": "not_possible", "last": "done",
    }  # fmt: skip
    assert "SIGSEGV" in records["crashes"]["sentence"] and "before" in (tmp_path / records["crashes"]["log"]).read_text()
    assert "main memory" in records["killed"]["sentence"]
    assert records["refused"]["sentence"] == "3 GPUs are too few"
    assert "had not ended after 1 s" in records["hangs"]["sentence"]
    assert records["lacks"]["sentence"] == "there is no crashes.yaml, which a step before makes"
    assert "a first try" in (tmp_path / records["second-try"]["log"]).read_text()
    children = numbers(tmp_path / records["hangs"]["log"])
    assert len(children) == 1 and gone(children[0])
    assert told == [list(records)[:number] for number in range(len(records) + 1)]  # also before the first


def test_a_command_inside_of_a_command_leaves_nothing(tmp_path: Path) -> None:
    """What a step starts as ranks has a mark of its own; it ends with the step, also when the step itself is killed."""
    inner = (
        "import os, signal, threading; from planner.lab.launch.torchrun import run_watched; "
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start(); "
        "run_watched(['sh', '-c', 'sleep 100 & echo $! > pid; wait'], lambda _: float('inf'))"
    )
    records = Day(folder=tmp_path, budget=600.0, gpus=False).run([stand_in("ranks", inner)])
    assert records[0]["outcome"] == "crashed"
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.proof
def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    steps = [stand_in("slow", "import time; time.sleep(100)", limit=2.0), stand_in("next", written("next"), limit=3.0)]
    slow, left = Day(folder=tmp_path, budget=2.5, gpus=False).run(steps)
    assert (slow["outcome"], left["outcome"]) == ("over_time", "left_out")
    assert "of --budget are left and it may need 3 s" in left["sentence"] and not (tmp_path / "next.yaml").exists()


@pytest.mark.proof
def test_resuming_does_again_what_is_not_done_and_what_hangs_on_it(tmp_path: Path) -> None:
    def steps(code: str) -> list[Step]:
        return [
            stand_in("one", written("one")), stand_in("two", code), stand_in("three", written("three"), instead={"two.yaml": "x"}),
            stand_in("four", written("four"), needs=("one.yaml",)),
        ]  # fmt: skip

    def run(code: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return Day(folder=tmp_path, budget=600.0, gpus=False, before={one["name"]: one for one in before}).run(steps(code))

    first = run("raise ValueError('not yet')", [])
    assert [one["outcome"] for one in first] == ["done", "failed", "done", "done"]
    second = run(written("two"), first)
    assert [one["outcome"] for one in second] == ["kept", "done", "done", "kept"]  # three is made of two
    assert (tmp_path / "one.yaml").read_text() == "a: 1\n"
    assert [one["outcome"] for one in run(written("two"), second)] == ["kept"] * 4
    (tmp_path / "one.yaml").unlink()
    assert [one["outcome"] for one in run(written("two"), second)] == ["done", "kept", "kept", "done"]


STOPPED = """
import sys
from planner.commands import main
from planner.lab.first_day import command
sys.path.insert(0, 'tests')
from test_first_day import CHILD, stand_in, written
command.dry_steps = lambda: [stand_in('one', written('one')), stand_in('two', CHILD + 'import time; time.sleep(100)')]
command.need_torch = lambda *_: None
main.main_entry()
"""


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    """The first step stays, the second is named, its processes end, and the exit code is 130."""
    folder = tmp_path / "day"
    words = [sys.executable, "-c", STOPPED, "first-day", "--device", "cpu", "--output", str(folder)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("2/2") or time.monotonic() > until:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error
    summary = yaml.safe_load((folder / "summary.yaml").read_text())
    assert [(one["name"], one["outcome"]) for one in summary["steps"]] == [("one", "done"), ("two", "interrupted")]
    assert "plan first-day --output . --resume" in (folder / "summary.md").read_text()
    started = numbers(folder / "logs" / "two.log")
    assert len(started) == 1 and gone(started[0])


def test_samples_of_the_driver() -> None:
    rows = ["0, 1000, 1980, 600.5, 60\n", "1, 400, 1965, [N/A], 61\n", "0, 70000, 1410, 699, 75\n", "1, 69000, 1400, 650, 70\n"]
    rows.append("0, 1")  # cut off
    assert of_samples(rows) == {
        "samples": 4, "memory_mib_before": 1000.0, "memory_mib_most": 70000.0, "clock_mhz_least": 1400.0, "clock_mhz_most": 1980.0,
        "power_w_most": 699.0, "temperature_c_most": 75.0,
    }  # fmt: skip
    assert of_samples(["no devices were found\n"]) is None


def test_all_limits_fit_half_an_hour() -> None:
    for steps in (steps_of(1, "h100-sxm"), steps_of(8, "h100-sxm"), dry_steps()):
        assert sum(step.limit for step in steps) <= 1800.0 and all(step.limit <= MOST_SECONDS for step in steps)
        made = [step.makes for step in steps]
        assert len(set(made)) == len(made)
        for number, step in enumerate(steps):
            assert {*step.needs, *step.instead} <= set(made[:number]), step.name


def validation(predicted: float, measured: float, device: float) -> dict[str, Any]:
    """What plan validate writes, as far as it is read here; seconds of the step, and GiB in use on the device."""
    time_row = {"what": "step", "predicted_seconds": predicted, "measured_seconds": measured, "error": predicted / measured - 1.0,
                "inside": True, "note": ""}  # fmt: skip
    memory = [
        {"what": "device", "predicted_gib": 60.0, "measured_gib": device, "error": 60.0 / device - 1.0},
        {"what": "weights", "predicted_gib": 9.0, "measured_gib": 9.0, "error": 0.0},
    ]  # fmt: skip
    return {
        "planner_validation": 1, "plan": "small.yaml", "rung": "full", "outcome": "completed", "run": {"rows": []},
        "times": [time_row], "stages": [], "ranks": [{"rank": 0, "memory": memory}],
    }  # fmt: skip


def test_what_was_measured_stands_beside_what_was_predicted(tmp_path: Path) -> None:
    """Steps, memory by torch and by nvidia-smi, and the command that corrects the profile once there are three runs."""
    gpus = {"memory_mib_most": 65.0 * 1024, "memory_mib_before": 1.0, "samples": 1, "clock_mhz_least": None, "clock_mhz_most": None,
            "power_w_most": None, "temperature_c_most": None}  # fmt: skip
    base = {"what": "", "seconds": 1.0, "outcome": "done", "sentence": "", "log": None, "gpus": None}
    crashed = {"outcome": "crashed", "sentence": "SIGSEGV | ended it", "log": "logs/machine.log"}
    records = [
        {**base, "name": "profile", "file": PROFILE},
        {**base, "name": "small-full", "file": "small-full.yaml", "gpus": gpus},
        {**base, "name": "fp8", "file": "fp8.yaml"},
        {**base, "name": "machine", "file": "machine.yaml", **crashed},
    ]  # fmt: skip
    (tmp_path / PROFILE).write_text("extends: h100-sxm\n")
    three = [validation(1.1, 1.0, 50.0), validation(2.0, 2.5, 64.0), validation(1.0, 1.0, 48.0)]
    (tmp_path / "small-full.yaml").write_text(yaml.safe_dump({"planner_validation": 1, "validations": three}))
    (tmp_path / "fp8.yaml").write_text("low_precision: [{recipe: 3")  # cut off
    found = gathered(tmp_path, records, "h100-sxm", 8)
    assert [(one["step"], one["error"]) for one in found["times"]] == [
        ("small-full 1", pytest.approx(0.1)), ("small-full 2", pytest.approx(-0.2)), ("small-full 3", 0.0),
    ]  # fmt: skip
    assert [(one["step"][-1], one["what"], one["measured_gib"], round(one["error"], 4)) for one in found["memory"]] == [
        ("1", "device", 50.0, 0.2), ("2", "device", 64.0, -0.0625), ("3", "device", 48.0, 0.25), ("2", "nvidia-smi", 65.0, -0.0769),
    ]  # fmt: skip
    assert found["runs"] == 3 and found["hardware"][0]["error"] == pytest.approx(0.0)
    assert "fp8.yaml cannot be read" in records[2]["sentence"]
    commands = [one["command"] for one in found["next"]]
    assert commands == [
        "plan first-day --output . --resume", "plan --model llama-3.1-8b --gpus 8 --hardware profile.yaml",
        "plan calibrate small-full.yaml --hardware profile.yaml --output calibrated.yaml",
    ]  # fmt: skip
    text = text_of({"device": "8 x H100", "date": "today", "planned_steps": 4, "steps": records, **found})
    assert "SIGSEGV \\| ended it logs/machine.log" in text and "| small-full 2 | step | 2 s | 2.5 s | -20.0% | yes |" in text


BAD: list[tuple[list[str], str]] = [
    (["--output", "file"], "is a file"),
    (["--output", "none/day"], "there is no directory"),
    (["--output", "full"], "is not empty; --resume goes on"),
    (["--output", "new", "--resume"], "nothing in"),
    (["--output", "full", "--resume"], "there is no summary.yaml"),
    (["--output", "odd", "--resume"], "steps must be a list"),
    (["--output", "other", "--resume"], "is a plan, as --output writes it"),
    (["--output", "new", "--budget", "0s"], "must be above zero"),
    (["--output", "new", "--hardware", "h1000"], "unknown hardware"),
]


@pytest.mark.parametrize(("flags", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_input_is_one_sentence(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for name, text in (("full", None), ("odd", "planner_first_day: 1\nsteps: [{name: 3}]\n"), ("other", "planner_plan: 1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("summary.yaml" if text else "mine")).write_text(text or "")
    done = run("first-day", "--device", "cpu", *flags)
    assert done.exit_code == 2 and sentence in done.output and not (tmp_path / "new").exists(), done.output


def test_a_machine_without_gpus_is_sent_to_the_dry_form(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MadeGpus(tmp_path, monkeypatch)
    done = run("first-day", "--output", str(tmp_path / "day"))
    assert done.exit_code == 2 and "--device cpu walks the same road" in done.output


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two H100 whose torch sees them and can do nothing else."""
    machine = MadeGpus(tmp_path, monkeypatch)
    machine.answers(
        ("*name,memory.total*", "\n".join([row(*H100)] * 2)),
        ("*index,memory.used*", "0, 1000, 1980, 600.5, 60\n1, 900, 1965, [N/A], 61"),
    )
    machine.files("nvidia0", "nvidia1")
    machine.torch([H100] * 2)


def test_the_steps_are_said_before_they_begin(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, monkeypatch)
    done = run("first-day", "--output", str(tmp_path / "day"), "--print-commands")
    assert done.exit_code == 0 and not (tmp_path / "day").exists()
    assert done.output.startswith("# 2 x NVIDIA H100 80GB HBM3; at most 1800 s in all")
    for step in steps_of(2, "h100-sxm"):
        assert f"# {step.name}, at most" in done.output
    assert "plan validate small.yaml --rung full --output small-full.yaml --top 3" in done.output


@pytest.mark.proof
def test_a_torch_that_can_do_nothing_keeps_the_rest(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the made machine what needs torch fails with its reason; the plans are searched with the library's profile."""
    made(tmp_path, monkeypatch)
    done = run("first-day", "--output", str(tmp_path / "day"), "--json")
    assert done.exit_code == 1, done.output
    summary = yaml.safe_load((tmp_path / "day" / "summary.yaml").read_text())
    assert json.loads(next(line for line in done.output.splitlines() if line.startswith("{"))) == summary
    outcomes = {one["name"]: one["outcome"] for one in summary["steps"]}
    assert outcomes == {
        "machine": "done", "profile": "failed", "small-plan": "done", "small-rank": "failed", "fp8": "failed",
        "small-full": "failed", "medium-plan": "done", "medium-rank": "failed", "medium-full": "failed", "health": "failed",
    }  # fmt: skip
    steps = {one["name"]: one for one in summary["steps"]}
    assert "torch.distributed.run" in steps["profile"]["sentence"] and "logs/profile-ranks.log" in steps["profile"]["sentence"]
    assert (tmp_path / "day" / "logs" / "profile-ranks.log").is_file()
    assert "--hardware h100-sxm" in (tmp_path / "day" / "logs" / "small-plan.log").read_text()
    assert steps["machine"]["gpus"]["memory_mib_most"] == 1000.0
    assert summary["machine"]["driver"] == "580.65.06"
    assert [one["memory_gib"] for one in summary["machine"]["torch"]["gpus"]] == [79.65] * 2


@pytest.mark.proof
@needs_torch
def test_products_of_quantised_operands_beside_bf16() -> None:
    code = (
        "import json; from planner.hardware import load_hardware; from planner.lab.first_day.low_precision import rows\n"
        "print(json.dumps(list(rows('cpu', load_hardware('h100-sxm')))))"
    )
    found = json.loads(fresh(code))
    by = {(one["recipe"], one["pass"]): one for one in found}
    assert len(by) == len(found) == 6 * 3
    for pass_ in ("forward", "dgrad", "wgrad"):
        half, scaled = by["bf16", pass_], by["fp8", pass_]
        assert half["times_bf16"] == 1.0 and scaled["times_bf16"] == half["seconds"] / scaled["seconds"]
        assert scaled["error"] == scaled["predicted_seconds"] / scaled["seconds"] - 1.0
        assert "GPU" in by["mxfp8", pass_]["refused"] or "multiples" in by["mxfp8", pass_]["refused"]


@needs_torch
@pytest.mark.proof
def test_the_dry_form_runs(tmp_path: Path) -> None:
    """Every step for real on the CPU, then nothing of it again."""
    folder = tmp_path / "day"
    words = [sys.executable, "-m", "planner", "first-day", "--output", str(folder), "--device", "cpu"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run([*words, *more], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run()
    summary = yaml.safe_load((folder / "summary.yaml").read_text())
    assert done.returncode == 0, (done.stderr, summary["steps"])
    assert [one["outcome"] for one in summary["steps"]] == ["done"] * 7
    assert {one["step"] for one in summary["times"]} == {"small-rank", "small-full"}
    assert all(abs(one["error"]) < 0.05 for one in summary["memory"] if one["what"] == "peak")
    assert {one["recipe"] for one in summary["low_precision"] if "seconds" in one} == {"bf16", "fp8"}
    assert summary["health"]["bisection"]["rounds"] and summary["machine"]["system"]["cores"] >= 1
    assert (folder / "summary.md").read_text().count("\n## ") >= 6
    again = run("--resume")
    assert again.returncode == 0 and again.stderr.count(": kept") == 7, again.stderr


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.lab.first_day import command

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    asked = command.Asked(folder=tmp_path / "x", device="cpu", name="", gpus=0, hardware="", budget=1.0)
    with pytest.raises(PlannerError, match="cannot be made"):
        command._ready(asked)
