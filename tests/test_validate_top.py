"""plan validate --top: finalists run and ranked anew; plan calibrate learns from the files, and planning again changes."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from trainer_samples import LOGS, measured_step, of_megatron, plan_of, stand_in

from planner.commands.main import main
from planner.errors import PlannerError
from planner.lab.run.learn import learned
from planner.lab.run.request import Finalist, finalists, ranked, validate_all
from planner.layout import Layout
from planner.library import read_yaml
from planner.runs.rows import validations_from_dict
from planner.timeline.priced_plan import estimate_of, job_of


def cli(*words: str) -> Any:
    """``plan`` with these words."""
    return CliRunner().invoke(main, list(words))


@pytest.mark.proof
def test_finalists_are_run_one_after_the_other_and_ranked_anew(tmp_path: Path) -> None:
    """Five finalists of which one runs out of memory and one is refused: results, kept after each."""
    from planner.plan_file import load_plan

    file = tmp_path / "plan.yaml"
    plan_of("megatron", Layout(tp=2, dp=4, num_microbatches=32, zero=1, sequence_parallel=1)).save(file)
    plan = load_plan(file)
    chosen = finalists(plan, 5)
    predicted = [one.plan.prediction.step_time_s for one in chosen]
    assert len(chosen) == 5 and predicted == sorted(predicted) and [one.own for one in chosen].count(True) == 1
    assert len({one.plan.layout for one in chosen}) == 5
    own = next(one for one in chosen if one.own)
    kept: list[dict[str, Any]] = []

    def run(one: Finalist) -> dict[str, Any]:
        if one.predicted_rank == 2:
            raise PlannerError("the trainer has no such schedule")
        if one.predicted_rank == 4:
            failure = {
                "rank": 3,
                "phase": "step 1",
                "sentence": "rank 3 ran out of memory in step 1",
                "allocated_gib": 79.0,
            }
            return measured_step(one.plan, 1.0, outcome="out_of_memory", failure=failure, times=[])
        return measured_step(one.plan, {1: 12.0, 3: 11.0, 5: 10.0}[one.predicted_rank])  # the other way round

    found = validate_all(chosen, lambda one: learned(one.plan, run(one)), kept.append, file=file, rung="full")
    assert [len(one["validations"]) for one in kept] == [1, 2, 3, 4, 5]
    assert [row["predicted_rank"] for row in found["finalists"]] == [5, 3, 1, 2, 4]
    assert [row["measured_rank"] for row in found["finalists"]] == [1, 2, 3, None, None]
    assert found["kendall_tau"] == pytest.approx(-1.0) and kept[0]["kendall_tau"] is None
    assert [row["outcome"] for row in found["finalists"]][3:] == ["failed", "out_of_memory"]
    assert found["finalists"][3]["sentence"] == "the trainer has no such schedule"
    cpu = {"name": "CPU", "kind": "cpu"}
    elsewhere = [{**one, "device": cpu} for one in found["validations"]]
    on_cpu = ranked(chosen, elsewhere, file=file)
    assert (
        on_cpu["choose"] is None
        and "it ran on CPUs, and the plan is for H100" in on_cpu["caveat"]
        and not found["caveat"]
    )
    if own.predicted_rank != 5:
        assert found["choose"].startswith(f"plan estimate {file} --")
    path = tmp_path / "finalists.yaml"
    path.write_text(yaml.safe_dump({"planner_validation": 1, "plan": str(file), **found}))
    assert len(validations_from_dict(read_yaml(path))) == 5


def test_top_runs_the_trainer_for_each_finalist_into_one_file(tmp_path: Path) -> None:
    """The command: a stand-in whose log is of the plan itself, so that the other finalists fail on it, and are kept."""
    file, output = tmp_path / "plan.yaml", tmp_path / "all.yaml"
    of_megatron().save(file)
    flags = (
        "--trainer",
        "megatron",
        "--trainer-command",
        stand_in(tmp_path, "megatron", "run"),
        "--output",
        str(output),
    )
    done = cli("validate", str(file), "--top", "3", "--steps", "3", *flags)
    assert done.exit_code == 0, done.output
    entries = validations_from_dict(read_yaml(output))
    assert [one["outcome"] for one in entries].count("completed") == 1 and len(entries) == 3
    other = next(one for one in entries if one["outcome"] == "failed")
    assert "the log is not of this plan" in other["failure"]["sentence"]
    assert "Finalists, fastest measured first" in done.output and "Traceback" not in done.output
    assert (
        "of the explanations' weight" in done.output
        or "nothing for plan calibrate" in done.output
        or "corrects" in done.output
    )
    assert (tmp_path / "all-1.log").is_file()
    one = cli("validate", str(file), "--trainer", "megatron", "--trainer-log", str(LOGS / "megatron.log"), "--json")
    found = json.loads(one.output)
    assert one.exit_code == 0 and found["rung"] == "trainer" and found["times"][0]["inside"] is not None
    other_job = tmp_path / "other.yaml"
    plan_of("megatron", Layout(tp=2, dp=8, num_microbatches=16, zero=1, sequence_parallel=1)).save(other_job)
    for words, says in (
        (("--trainer-log", "x.log"), "need --trainer torchtitan or --trainer megatron"),
        (("--trainer", "megatron", "--steps", "2"), "--steps 2: a median of a trainer's steps needs at least 3"),
        (("--trainer", "megatron", "--top", "2", "--trainer-log", "x.log"), "and every finalist is run"),
        (("--top", "2", "--finalist", str(file)), "--finalist says which plans are run, --top lets a search say it"),
        (("--finalist", str(other_job)), "its number of GPUs is not that of the plan"),
        (("--trainer", "nemo"), "--trainer nemo: plans are validated with torchtitan or megatron"),
        (("--trainer", "megatron", "--trainer-command", "/no/such"), "/no/such: cannot be started"),
        (("--top", "2", "--trainer-command", "x"), "need --trainer"),
    ):
        done = cli("validate", str(file), *words)
        assert done.exit_code == 2 and says in done.output, done.output
    plan = of_megatron()
    dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, step_time_s=3.0)).save(file)
    for words in (("--top", "2", "--trainer-command", "/no/such"), ("--trainer-log", str(LOGS / "megatron.log"))):
        done = cli("validate", str(file), *words, "--trainer", "megatron")  # said before anything runs
        assert done.output.startswith(f"warning: {file} says 3 s per step, but this planner prices its layout at"), (
            done.output
        )


@pytest.mark.proof
def test_validations_calibrate_the_profile_and_planning_again_shows_what_changed(tmp_path: Path) -> None:
    """Steps that take 1 / 0.9 of the matrix time: the clock is found, one file per validation and one with several."""
    from planner.questions.calibrate.factors import achieved

    layouts = [
        Layout(tp=tp, dp=8 // tp, num_microbatches=16, micro_batch_size=b, zero=1, sequence_parallel=int(tp > 1))
        for tp, b in ((1, 2), (2, 2), (4, 1), (8, 1))
    ]
    entries = []
    for number, layout in enumerate(layouts):
        plan = plan_of("megatron", layout)
        job = job_of(plan)
        slow, trainer = achieved(job.cluster.hardware, job.trainer, {"sustained_clock": 0.9})
        step = estimate_of(
            dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, hardware=slow), trainer=trainer), layout
        )
        entries.append(
            {"plan": "p", **learned(plan, measured_step(plan, float(step.step_time[0])), name=f"plan-{number}")}
        )
    for number in (0, 1):
        (tmp_path / f"v{number}.yaml").write_text(yaml.safe_dump({"planner_validation": 1, **entries[number]}))
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"planner_validation": 1, "validations": entries[2:]}))
    files = [str(tmp_path / name) for name in ("v0.yaml", "v1.yaml", "more.yaml")]
    output = str(tmp_path / "mine.yaml")
    done = cli("calibrate", *files, "--hardware", "h100-sxm", "--output", output, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["factors"]["sustained_clock"]["times"] == pytest.approx(0.9, rel=0.03)
    assert "scale_out" in found["kept_at_1"] and len(found["plans"]) == 4
    for row in found["plans"]:
        assert row["predicted_before_seconds"] < row["measured_seconds"]
        assert row["predicted_after_seconds"] == pytest.approx(row["measured_seconds"], rel=0.03)
        assert row["best_before"] and row["best_changed"] is (row["best_before"] != row["best_after"])
        assert f"--hardware {output}" in row["command"] and "--model llama-3.1-8b --gpus 8" in row["command"]
    again = cli(*shlex.split(found["plans"][0]["command"])[1:], "--top", "1")
    assert again.exit_code == 0, again.output
    refused = cli("calibrate", files[0], "--hardware", "h100-sxm", "--output", output)
    assert refused.exit_code == 2 and "at least 3 runs" in refused.output
    wrong = cli("calibrate", *files, "--hardware", "a100-sxm-80gb", "--output", output)
    assert wrong.exit_code == 2 and "calibrate each device with its own runs" in wrong.output


def test_both_columns_of_replayed_finalists_are_the_same_thing(tmp_path: Path) -> None:
    """On a machine that is not quiet steps are replayed without communication: the prediction next to one is replayed too."""
    from planner.lab.run.record import time_row
    from planner.lab.run.request import ranked
    from planner.lab.run.show import finalist_tables

    plan = plan_of("megatron", Layout(tp=2, dp=4, num_microbatches=32, zero=1, sequence_parallel=1))
    chosen = finalists(plan, 2)
    found = []
    for one in chosen:
        whole = one.plan.prediction.step_time_s
        times = [time_row("step", whole, 3 * whole, note="not quiet"), time_row("replayed_step", whole / 2, whole / 1.6)]
        found.append({"outcome": "completed", "times": times, "predicted_rank": one.predicted_rank})
    rows = ranked(chosen, found, file=tmp_path / "plan.yaml")
    for row in rows["finalists"]:
        assert row["compared"] and row["predicted_replay_seconds"] == row["predicted_seconds"] / 2
    shown = finalist_tables({**rows, "validations": []}, None)
    text = "".join(str(part) for part in shown if isinstance(part, str))
    assert "without communication, predicted and measured alike" in text
