"""``plan --cluster`` and its companions as a user types them."""

import json
import re
from pathlib import Path

import pytest
import yaml

import planner
from planner.errors import PlannerError

CLUSTER = """
nodes:
- {kind: a100, hardware: a100-sxm-80gb, count: 1, gpus: 2, price: 3 USD/h}
- {kind: l40s, hardware: l40s, count: 1, gpus: 2, price: 2 USD/h}
"""
JOB = ("--model", "gpt3-125m", "--global-batch-size", "16", "--sequence-length", "2048")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.mark.proof
def test_plan_estimate_and_what_if(run, cluster) -> None:
    found = run(*JOB, "--cluster", "cluster.yaml", "--output", "mixed.yaml")
    assert found.exit_code == 0, found.output
    for text in ("Who holds what", "Each kind alone", "lost to the difference of kinds", "runs with:", "USD per step"):
        assert text in found.output
    again = run("estimate", "mixed.yaml", "--json")
    assert again.exit_code == 0
    data = json.loads(again.output)
    assert data["planner_mixed_plan"] == 1
    estimate = data["estimate"]
    assert sum(estimate["time_s"].values()) == pytest.approx(estimate["step_time_s"])
    stage = estimate["stages"][0]
    assert sum(stage["memory_gib"].values()) == pytest.approx(stage["memory_peak_gib"])
    plan = planner.load_mixed("mixed.yaml")
    assert plan.to_dict() == data
    changed = run("what-if", "mixed.yaml", "--without", "l40s", "--slowdown", "node-0=1.4", "--link", "a100,l40s=1Gb/s", "--json")
    assert changed.exit_code == 0, changed.output
    rows = json.loads(changed.output)["changes"]
    assert [one["change"] for one in rows] == ["without l40s", "node-0 slower by 1.4", "a100,l40s at 1Gb/s"]
    whole = estimate["step_time_s"]
    assert all(one["best"]["estimate"]["step_time_s"] >= whole * 0.999 for one in rows)
    for one in rows:
        kept = one["kept_step_time_s"]
        assert kept is None or kept >= one["best"]["estimate"]["step_time_s"] * 0.98


@pytest.mark.proof
def test_what_was_fixed_stays_fixed(run, cluster) -> None:
    """The plan file keeps it; what-if searches within it, on one kind too."""
    fixed = ("--tp", "2", "--micro-batch-size", "2", "--recompute", "full", "--runnable")
    assert run(*JOB, "--cluster", "cluster.yaml", *fixed, "--output", "mixed.yaml").exit_code == 0
    pins = planner.load_mixed("mixed.yaml").file.pins
    assert (pins.tp, pins.micro_batch_size, pins.recompute, pins.runnable) == (2, 2, "full", True)
    rows = json.loads(run("what-if", "mixed.yaml", "--slowdown", "node-0=1.4", "--without", "l40s", "--json").output)["changes"]
    for one in rows:
        stages = [stage for some in one["best"]["layout"]["pipelines"] for stage in some["stages"]]
        assert {(stage["tp"], stage["recompute"]) for stage in stages} == {(2, "full")}
        assert {some["micro_batch_size"] for some in one["best"]["layout"]["pipelines"]} == {2}
        assert one["best"]["pins"] == pins.to_dict()
    data = yaml.safe_load(Path("mixed.yaml").read_text())
    Path("mixed.yaml").write_text(yaml.safe_dump({**data, "pins": {"tp": -2}}))
    found = run("estimate", "mixed.yaml")
    assert found.exit_code == 2 and "pins: tp is -2; it must be a whole number from 1" in found.output
    del data["pins"]  # a file of before
    Path("mixed.yaml").write_text(yaml.safe_dump(data))
    assert run("estimate", "mixed.yaml").exit_code == 0


def test_json_is_what_the_tables_show(run, cluster) -> None:
    found = run(*JOB, "--cluster", "cluster.yaml", "--tp", "2", "--micro-batch-size", "2", "--runnable", "--json")
    data = json.loads(found.output)
    assert all("no trainer" not in " ".join(one) for one in data["runs_on"])
    assert data["fits"] and data["verdict"] and len(data["runs_on"]) == len(data["plans"])
    assert {one["kind"] for one in data["alone"]} == {"a100", "l40s"}
    steps = [one["estimate"]["step_time_s"] for one in data["plans"]]
    assert steps[0] == min(steps) and 0.0 <= data["search"]["could_be_faster_by"] < 0.05
    used = [{stage["kind"] for stage in one["estimate"]["stages"]} for one in data["plans"]]
    assert {"a100", "l40s"} in used


def test_one_kind_is_the_ordinary_question(run, cluster) -> None:
    cluster.write_text("nodes: [{kind: a100, hardware: a100-sxm-80gb, count: 1}]\n")
    plain = run(*JOB, "--hardware", "a100-sxm-80gb", "--gpus", "8", "--json").output
    same = run(*JOB, "--cluster", "cluster.yaml", "--json").output
    without_wall_time = [re.sub(r'"seconds": [0-9.e-]+', "", one) for one in (plain, same)]
    assert without_wall_time[0] == without_wall_time[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "8"), "--cluster says the nodes, and so does --gpus"),
        (("--hardware", "t4"), "--cluster says the nodes, and so does --hardware"),
        (("--pp", "2"), "--pp is not fixed on mixed clusters"),
        (("--tokens", "1T"), "--tokens is of one kind of GPU"),
    ],
)
def test_flags_that_say_the_cluster_too(run, cluster, arguments, sentence) -> None:
    found = run(*JOB, "--cluster", "cluster.yaml", *arguments)
    assert found.exit_code == 2 and sentence in found.output


def test_a_model_that_fits_nowhere_exits_1(run, cluster) -> None:
    found = run("--model", "llama-405b", "--cluster", "cluster.yaml", "--global-batch-size", "8", "--micro-batch-size", "1")
    assert found.exit_code == 1 and "Nothing fits" in found.output


def test_wrong_changes_and_damaged_files_are_sentences(run, cluster) -> None:
    run(*JOB, "--cluster", "cluster.yaml", "--micro-batch-size", "2", "--tp", "1", "--output", "mixed.yaml")
    for arguments, sentence in (
        (("--without", "h100"), "the cluster has no kind 'h100'"),
        (("--slowdown", "node-9=2"), "--slowdown names 'node-9'"),
        (("--slowdown", "node-0=fast"), "the factor must be a number"),
        (("--link", "a100=1Gb/s"), "write it like us-east,us-west=2Gb/s"),
        ((), "what should change?"),
        (("--gpus", "16"), "not --gpus"),
    ):
        found = run("what-if", "mixed.yaml", *arguments)
        assert found.exit_code == 2 and sentence in found.output, (arguments, found.output)
    found = run("what-if", "--model", "llama-8b", "--gpus", "8", "--without", "t4")
    assert found.exit_code == 2 and "changes a mixed plan" in found.output
    found = run("estimate", "mixed.yaml", "--tp", "2")
    assert found.exit_code == 2 and "a mixed plan is shown as it is" in found.output
    data = yaml.safe_load(Path("mixed.yaml").read_text())
    del data["layout"]["pipelines"]
    Path("mixed.yaml").write_text(yaml.safe_dump(data))
    found = run("estimate", "mixed.yaml")
    assert found.exit_code == 2 and "layout: missing key 'pipelines'" in found.output
    Path("mixed.yaml").write_text("planner_mixed_plan: 9\n")
    with pytest.raises(PlannerError, match="this planner reads 1"):
        planner.load_mixed("mixed.yaml")
