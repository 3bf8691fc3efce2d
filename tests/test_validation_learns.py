"""plan validate teaches: rows of plans read back, files checked, and what a measured step says about a plan."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import yaml
from samples import MODELS
from trainer_samples import measured_step, of_megatron, of_torchtitan, plan_of

from planner.errors import PlannerError
from planner.lab.run.learn import learned, no_run, other_device
from planner.layout import Layout
from planner.library import read_yaml
from planner.runs import Measured, read_runs, rows_from_dict, to_run
from planner.runs.mapping import document_of_plan
from planner.runs.rows import validations_from_dict
from planner.units import GIB

LAYOUTS = (
    ("gqa", "megatron", {"tp": 4, "pp": 4, "dp": 2, "vpp": 2, "schedule": 2, "num_microbatches": 8, "sequence_parallel": 1,
                         "first_stage_layers": 2, "recompute": 1, "recompute_modules": 3, "zero": 1}),
    ("gqa", "torchtitan", {"pp": 4, "vpp": 2, "schedule": 4, "dp": 4, "dp_shard": 2, "zero": 2, "num_microbatches": 8}),
    ("gqa", "deepspeed", {"cp": 4, "cp_method": 1, "dp": 2, "zero": 3, "recompute": 2, "offload_optimizer": 100}),
    ("gpt", "megatron", {"pp": 2, "dp": 2, "num_microbatches": 4, "recompute": 2, "recompute_layers": 1, "order": 1}),
    ("mla", "megatron", {"dp": 8, "ep": 8, "zero": 1, "micro_batch_size": 2}),
    ("moe", "torchtitan", {"dp": 8, "ep": 4, "zero": 2}),
    ("window", "megatron", {"tp": 2, "dp": 2, "sequence_parallel": 1}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "trainer", "fields"), LAYOUTS)
def test_the_run_of_a_plan_reads_back_exactly(name: str, trainer: str, fields: dict[str, int]) -> None:
    plan = plan_of(trainer, Layout(**fields), model=MODELS[name], sequence_length=2048)  # type: ignore[arg-type]
    plan = dataclasses.replace(plan, network_bandwidth=12.5e9)
    measured = Measured(step_time=1.25, memory=31.5 * GIB, memory_kind="reserved", fits=True)
    document = yaml.safe_load(yaml.safe_dump(document_of_plan(plan, measured, name="a", framework="plan validate")))
    [row] = rows_from_dict(document)
    run = to_run(row)
    assert not run.unsupported and run.stated
    assert (run.workload, run.layout, run.trainer) == (plan.workload, plan.layout, plan.load_trainer())
    assert run.measured == measured and run.cluster is not None
    assert (run.cluster.hardware.name, run.cluster.hardware.network_bandwidth) == ("h100-sxm", 12.5e9)
    changed = dataclasses.replace(row, data={**row.data, "parallel": {**row.data["parallel"], "dp": 64}})
    assert f"it says dp 64, its plan {plan.layout.dp}" in to_run(changed).unsupported


@pytest.mark.proof
def test_a_validation_is_a_file_of_runs_and_a_damaged_one_a_sentence(tmp_path: Path) -> None:
    """Every kind of damage is one sentence, whatever is changed in the text."""
    plan, path = of_megatron(), tmp_path / "validation.yaml"
    head = {"planner_validation": 1, "plan": "plan.yaml"}
    many = [learned(plan, measured_step(plan, seconds), name=f"plan-{seconds}") for seconds in (13.0, 14.0)]
    several = {"planner_validation": 1, "validations": [{"plan": "plan.yaml", **one} for one in many]}
    one = {**head, **learned(plan, measured_step(plan, 13.0, 50.0))}
    path.write_text(yaml.safe_dump(one, sort_keys=False))
    [run] = read_runs([path])
    assert (run.source, run.measured.step_time, run.measured.memory) == ("validation", 13.0, 50.0 * GIB)
    assert validations_from_dict(read_yaml(path))[0]["rung"] == "full"
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(several))
    assert [one.measured.step_time for one in read_runs([tmp_path / "several.yaml"])] == [13.0, 14.0]
    text = path.read_text()
    cut = text[: text.index("\nrun:") + 1]
    nothing = yaml.safe_dump({**one, "run": None, "rung": "meta", "no_run": "it is memory alone"})
    cases = [
        (text.replace("planner_validation: 1", "planner_validation: 2"), "has version 2, this planner reads up to 1"),
        (cut, "missing key 'run'; the file is damaged or cut off"),
        (text[:-200] + "\n  - [", "validation.yaml line "),
        (nothing, "no run in it to learn from (level meta): it is memory alone"),
        (text.replace("rung: full", "rung: moon"), "rung is 'moon'; it must be one of meta, rank"),
        (yaml.safe_dump({"planner_validation": 1, "validations": []}), "it must be a list of at least one"),
    ]
    for damaged, says in cases:
        path.write_text(damaged)
        with pytest.raises(PlannerError, match=r"validation\.yaml") as error:
            read_runs([path])
        assert says in str(error.value) and "\n" not in str(error.value)
    choices = random.Random(5)
    for _ in range(40):
        start = choices.randrange(len(text))
        junk = choices.choice(["", "[", "null", "-1", "1e999", "'", "\t", ": ", "!!x ", "{a: b}", "\x00"])
        path.write_text(text[:start] + junk + text[start + choices.randrange(1, 30) :])
        try:
            read_runs([path])
        except PlannerError as error:
            assert str(error).startswith(str(path)) or "validation" in str(error)


@pytest.mark.proof
def test_a_step_outside_of_its_interval_has_a_likeliest_mechanism() -> None:
    plan = of_megatron()
    inside = learned(plan, measured_step(plan, plan.prediction.step_time_s * 1.01))
    assert inside["likeliest"] is None and inside["no_run"] is None and inside["run"]["rows"][0]["measured"]["step_s"]
    slow = learned(plan, measured_step(plan, plan.prediction.step_time_s * 2.0))["likeliest"]
    assert slow["quantity"] == "step_time" and slow["gap"] == pytest.approx(1.0)
    assert slow["check"] and slow["mechanism"] and "the step is 2 times the prediction" in slow["sentence"]
    high = 1.6 * plan.prediction.memory_peak_gib
    only_memory = learned(plan, measured_step(plan, plan.prediction.step_time_s, high))["likeliest"]
    assert only_memory["quantity"] == "memory" and "the peak of memory is" in only_memory["sentence"]


def test_a_stage_that_holds_less_than_the_largest_is_no_miss() -> None:
    """`--rank 63` on the last stage of a plan whose peak is on the first."""
    plan = of_torchtitan()
    assert plan.prediction.memory_stage == "first"
    for where, missed in (("first", True), ("last", False)):
        found = measured_step(plan, 1.0, 0.5 * plan.prediction.memory_peak_gib, rung="meta", times=[])
        found["ranks"][0] |= {"priced_as": where, "stage": 0}
        explained = learned(plan, found)["likeliest"]
        assert (explained is not None) == missed and (explained is None or explained["quantity"] == "memory")


def test_what_says_nothing_about_a_plan_is_no_run_of_it() -> None:
    plan = of_megatron()
    step = plan.prediction.step_time_s
    cases = [
        ({"device": {"name": "CPU", "kind": "cpu", "pressure": None}}, "it ran on CPUs, and the plan is for"),
        ({"device": {"name": "NVIDIA A100-SXM4-80GB", "kind": "cuda"}}, "it ran on NVIDIA A100-SXM4-80GB (Ampere"),
        ({"rung": "rank"}, "level rank runs ranks alone"),
        ({"rung": "meta"}, "nothing was measured on hardware"),
        ({"outcome": "hung"}, "the run ended as hung"),
        ({"times": []}, "neither a step time nor a peak"),
    ]
    for change, says in cases:
        found = learned(plan, measured_step(plan, step, **change))
        assert says in found["no_run"] and found["run"] is None and found["likeliest"] is None, found["no_run"]
    ran_out = learned(plan, measured_step(plan, step, outcome="out_of_memory", times=[]))
    assert to_run(rows_from_dict(ran_out["run"])[0]).measured.fits is False
    noted = measured_step(plan, step)
    noted["times"][0]["note"] = "4 ranks share 2 cores: wall time is not compared"
    assert learned(plan, {**noted, "ranks": measured_step(plan, step, 50.0)["ranks"]})["no_run"].startswith(
        "4 ranks share"
    )
    cpu = dataclasses.replace(plan.cluster().hardware, arch="CPU")
    assert not other_device(cpu, {"name": "CPU", "kind": "cpu"})
    assert "it ran on NVIDIA H100, and the plan is for" in other_device(cpu, {"name": "NVIDIA H100", "kind": "cuda"})
    assert not no_run(plan, measured_step(plan, step))
