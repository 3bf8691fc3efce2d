"""Levels rank and truncated of plan validate: the commands."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_validate import plan_file

from planner import library
from planner.cost.estimate import PARTS
from planner.errors import PlannerError
from planner.lab.run import truncated
from planner.lab.run.assembled_step import predicted_of
from planner.lab.run.record import time_row
from planner.lab.run.show import validation_tables
from planner.plan_file import plan_from_dict
from planner.rules import Job
from planner.timeline.priced_plan import price
from planner.units import GIB

ROOT = Path(__file__).resolve().parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)

# ------------------------------------------------------------------------------------------------ the command


def on_this_cpu(folder: Path, *flags: str) -> Path:
    """A plan of a tiny model for a profile that says it is of a CPU: times are compared, however far off they are."""
    profile = library.read_yaml(library.find("hardware", "h100-sxm"))
    (folder / "cpu.yaml").write_text(yaml.safe_dump(profile | {"arch": "CPU", "name": "cpu"}))
    sizes = {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "ffn_size": 352}
    more = ("--hardware", str(folder / "cpu.yaml"), "--precision", "fp32", "--sequence-length", "128", *flags)
    return plan_file(folder, *more, **sizes, vocab_size=512)


def validated(plan: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "cli.py", "validate", str(plan), "--device", "cpu", "--warmup", "0", *flags, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["outcome"] == "completed"
    return found


@pytest.mark.proof
@needs_torch
def test_the_rung_prints_what_it_measured_and_what_it_priced(tmp_path: Path) -> None:
    """The last stage of a pipeline of two: parts sum to the step, what is priced is not called measured."""
    plan = on_this_cpu(tmp_path, "--gpus", "4", "--pp", "2", "--dp", "2", "--global-batch-size", "16")
    found = validated(plan, "--rung", "rank", "--rank", "3", "--steps", "2")
    assert found["rung"] == "rank" and [one["rank"] for one in found["ranks"]] == [3]
    rows = {one["what"]: one for one in found["times"]}
    step, parts = rows.pop("step"), [one for one in rows.values() if "assembled_seconds" in one]
    for total in ("assembled_seconds", "predicted_seconds"):
        assert sum(one[total] for one in parts) == pytest.approx(step[total], rel=1e-12)
    assert step["interval"] is not None and step["error"] == pytest.approx(
        step["predicted_seconds"] / step["assembled_seconds"] - 1
    )
    for one in parts:
        measured = one["what"] in ("compute", "once_per_step", "optimizer")
        assert (one["measured_seconds"] is not None) == measured, one
        assert (one["error"] is not None) == (one["what"] in ("compute", "optimizer")) == (not one["note"]), one
    passes = {one["kind"]: one for one in found["stages"]}
    assert set(passes) == {"F", "B"} and passes["B"]["measured_seconds"] > passes["F"]["measured_seconds"] > 0
    said = " | ".join(found["changes"])
    assert "3 microbatches of 8 were run" in said and "first stage not measured" in said and "local copies" in said
    memory = {row["what"]: row for row in found["ranks"][0]["memory"]}
    assert memory["weights"]["inside"] and memory["optimizer_states"]["inside"]
    stands = {row["operation"] for row in found["ranks"][0]["stand_ins"]}
    assert stands >= {"all_gather", "reduce_scatter", "send", "receive"}
    tables = "\n".join(str(one) for one in validation_tables(found) if isinstance(one, str))
    assert "level rank: asked for" in tables and "priced, not measured" in tables


@pytest.mark.proof
@needs_torch
def test_a_truncated_plan_runs_on_two_ranks_and_is_scaled_up(tmp_path: Path) -> None:
    """tp 2 x pp 4 on two gloo ranks: one stage of one layer; the whole step is the sum of its scaled parts."""
    plan = on_this_cpu(tmp_path, "--gpus", "8", "--tp", "2", "--pp", "4", "--dp", "1", "--global-batch-size", "8")
    found = validated(plan, "--rung", "truncated", "--no-parity", "--steps", "1")
    [small] = found["truncated"]  # one layer has no half
    assert small["num_gpus"] == 2 and small["layout"]["tp"] == 2 and small["layout"]["pp"] == 1
    assert small["model"]["num_layers"] == 1 and found["num_gpus"] == 8 and found["layout"]["pp"] == 4
    assert any("pp 1 instead of 4" in one for one in found["changes"])
    rows = {one["what"]: one for one in found["times"]}
    parts = {one["what"]: one for one in found["scaled"]["parts"]}
    ratio = rows["forward_backward"]["measured_seconds"] / rows["forward_backward"]["predicted_seconds"]
    assert parts["compute"]["scaled_seconds"] == pytest.approx(parts["compute"]["predicted_seconds"] * ratio)
    step = found["scaled"]["step"]
    assert sum(one["scaled_seconds"] for one in parts.values()) == pytest.approx(step["scaled_seconds"])
    assert step["depth_error"] is None and parts["tensor_communication"]["ratio"] is None
    from planner.lab.run.assembled_step import parts_as_run
    from planner.lab.run.eager_pricing import host_of
    from planner.lab.run.levels import question
    from planner.plan_file import load_plan

    host, asked = host_of(found["as_run"]), question(load_plan(plan))
    assert host is not None and min(host[kind][0] for kind in "FB") > 100e-6 and set(host) == {"F", "B", "update"}
    whole = parts_as_run(asked, host)
    assert {name: one["predicted_seconds"] for name, one in parts.items()} == pytest.approx(
        {name: seconds for name, seconds in whole.items() if seconds}
    )
    assert whole["compute"] > 2 * load_plan(plan).prediction.time_s["compute"], "an empty layer takes milliseconds"
    assert small["as_run"]["sentences"] == found["as_run"]["sentences"]


def test_scaling_up_multiplies_what_was_seen() -> None:
    """By hand: passes 1.2 and 1.1 at two depths, update 0.5; on a GPU communication inside of passes with them."""
    told = dict.fromkeys(PARTS, 0.0) | {
        "compute": 10.0,
        "tensor_communication": 2.0,
        "bubble": 1.0,
        "optimizer": 0.4,
        "overhead": 0.1,
    }

    def rows(passes: float, currency: str) -> list[dict[str, Any]]:
        return [
            time_row("forward_backward", 2.0, 2.0 * passes, currency=currency),
            time_row("optimizer", 0.1, 0.05, currency=currency), time_row("step", 1.0, 9.0, note="not compared"),
        ]  # fmt: skip

    parts = truncated.scaled(told, rows(1.2, "device"), rows(1.1, "device"))
    whole = truncated.summary(parts, (10.0, 16.0), True)
    assert whole["scaled_seconds"] == pytest.approx(13.0 * 1.2 + 0.2 + 0.1) and whole[
        "predicted_seconds"
    ] == pytest.approx(13.5)
    assert whole["depth_error"] == pytest.approx(13.0 * 0.1 / 15.9) and whole["priced_share"] == pytest.approx(
        0.1 / 15.9
    )
    assert whole["inside"] and whole["error"] == pytest.approx(13.5 / 15.9 - 1)
    on_cpu = truncated.summary(truncated.scaled(told, rows(1.2, "processor"), None), (1.0, 2.0), False)
    assert on_cpu["scaled_seconds"] == pytest.approx(11.0 * 1.2 + 2.0 + 0.2 + 0.1) and on_cpu["depth_error"] is None
    assert not on_cpu["inside"]
    assert truncated.scaled(told, [time_row("forward_backward", None, 2.0, note="elsewhere")], None) == []


@needs_torch
def test_what_cannot_be_emulated_is_a_sentence(tmp_path: Path) -> None:
    from planner.lab.run import one_rank
    from planner.lab.run.learn import not_compared
    from planner.lab.run.levels import Machine, Task, question
    from planner.plan_file import load_plan

    plan = load_plan(plan_file(tmp_path, "--gpus", "2", "--dp", "2", "--zero", "3"))
    place = Machine(device="cpu", gpus=0, name="processor", memory=0.5 * GIB, cores=2, place=None)
    task = Task(plan=plan, asked=question(plan), machine=place)
    assert "GiB and 0.5 GiB of main memory are free; use a GPU" in one_rank.obstacle(task)
    roomy = dataclasses.replace(task, machine=dataclasses.replace(place, memory=100 * GIB))
    assert one_rank.obstacle(roomy) == ""
    with pytest.raises(PlannerError, match="--rank 2: the plan has ranks 0 to 1"):
        one_rank.run(dataclasses.replace(roomy, ranks=(0, 2)))
    assert "it ran on CPUs" in not_compared(task.asked.cluster.hardware, place)
    card = dataclasses.replace(place, device="cuda", name="NVIDIA H100 80GB HBM3")
    assert not_compared(task.asked.cluster.hardware, card) == ""
    other = dataclasses.replace(card, name="NVIDIA A100-SXM4-80GB")
    assert "it ran on NVIDIA A100-SXM4-80GB (Ampere), and the plan is for" in not_compared(task.asked.cluster.hardware, other)


def test_the_highest_rung_that_the_gpus_allow_is_taken(tmp_path: Path) -> None:
    """A plan of 16 GPUs: eight GPUs run it truncated, one GPU a rank of it; a CPU says nothing about its times."""
    from planner.lab.run.levels import Machine, Task, choose, question
    from planner.plan_file import load_plan

    plan = load_plan(plan_file(tmp_path, "--gpus", "16", "--tp", "2", "--dp", "8", "--zero", "3", num_kv_heads=4))
    machine = Machine(device="cuda", gpus=8, name="NVIDIA H100 80GB HBM3", memory=100 * GIB, cores=8, place=None)
    task = Task(plan=plan, asked=question(plan), machine=machine)
    level, why = choose(task, "auto")
    assert level.name == "truncated" and "not full: the plan has 16 ranks and this machine 8 GPUs" in why
    level, why = choose(dataclasses.replace(task, machine=dataclasses.replace(machine, gpus=1)), "auto")
    assert level.name == "rank" and "not truncated: level truncated needs at least 2 devices" in why
    level, why = choose(dataclasses.replace(task, machine=dataclasses.replace(machine, gpus=0, device="cpu")), "auto")
    assert level.name == "meta" and "whose times a CPU says nothing about" in why
    small = truncated.plan_of(task, truncated._small(task))
    assert small.num_gpus == 8 and small.layout.tp == 2 and small.layout.dp == 4 and small.trainer == "torchtitan"
    assert plan_from_dict(small.to_dict()) == small  # torchrun's ranks read it again


HOST = {"F": (3e-3, 1e-3), "B": (6e-3, 2e-3), "update": (1e-3, 2e-3)}
"""Seconds of an empty layer and of the ends."""


def lone_rank(plan: Path, device: str = "cpu", **more: Any) -> tuple[Any, dict[str, Any]]:
    """The second of two ranks of a pipeline, 3 of its 8 microbatches, and what the level makes of it."""
    from planner.lab.run import one_rank
    from planner.lab.run.emulate import Emulation
    from planner.lab.run.levels import Machine, Task, question
    from planner.plan_file import load_plan

    loaded = load_plan(plan)
    asked = question(loaded)
    machine = Machine(device=device, gpus=int(device == "cuda"), name="x", memory=1e9, cores=2, place=None)
    ran = dataclasses.replace(
        Emulation.of(1, asked.split), totals=[0.35], updates=[0.01],
        samples={("F", 1): [0.03, 0.03, 0.04], ("B", 1): [0.07, 0.08, 0.07]}, **more,
    )  # fmt: skip
    return asked, one_rank.result(Task(plan=loaded, asked=asked, machine=machine), [ran])


@needs_torch
def test_a_rank_on_a_processor_is_compared_with_what_runs_there(tmp_path: Path) -> None:
    """Passes as chains with 3 and 6 ms of the host per layer less what its launches are priced at, the update with the norm and
    the host around 2 layers and an end; on a GPU the same rank is compared with the plan's trainer."""
    from planner.lab.run.eager_pricing import as_run, priced_host, processor_seconds, update_seconds

    plan = on_this_cpu(tmp_path, "--gpus", "2", "--pp", "2", "--global-batch-size", "8")
    asked, found = lone_rank(plan, host=HOST, slowed=[1.5], update_slowed=[1.1])
    trainer = as_run(asked.trainer, asked.split, on_cpu=True)
    ran = price(Job(workload=asked.workload, cluster=asked.cluster, trainer=trainer), asked.layout)
    bare, launches = processor_seconds(ran, asked.split, None), priced_host(ran.job, asked.layout, asked.split)
    told = {row["kind"]: row["predicted_seconds"] for row in found["stages"]}
    for kind in "FB":
        (each, ends), (priced, priced_ends) = HOST[kind], launches[kind]
        more = 2 * (each - priced) + (ends - priced_ends) / 2
        assert told[kind] == pytest.approx(float(bare[kind][1]) + more) and more > 0
    times = {row["what"]: row for row in found["times"]}
    update = times["optimizer of rank 1"]["predicted_seconds"]
    assert (
        update
        == pytest.approx(update_seconds(ran, asked.split, HOST)[2])
        == pytest.approx(update_seconds(ran, asked.split, None)[2] + 2e-3 + 1e-3)
    )
    assert times["optimizer"]["predicted_seconds"] == update and times["once_per_step"]["note"]
    parts = [row for row in times.values() if "assembled_seconds" in row and row["what"] != "step"]
    assert sum(row["predicted_seconds"] for row in parts) == pytest.approx(times["step"]["predicted_seconds"])
    passes = 8 * sum(told.values())
    assert times["compute"]["predicted_seconds"] == pytest.approx(passes)  # the stage with the head is the slowest
    said = found["as_run"]["sentences"]
    assert said[0].startswith("priced as it ran: nothing is compiled on a CPU") and "3 ms forward" in said[1]
    assert "no yardstick" in said[2] and "only the yardstick" in said[3] and "off by" in said[4]
    from planner.lab.run.record import complete

    tables = [
        one for one in validation_tables(complete({**found, "why": "asked", "plan": "p"})) if isinstance(one, str)
    ]
    assert set(said) <= set(tables)

    plan = plan_file(tmp_path, "--gpus", "2", "--pp", "2", "--global-batch-size", "8")
    asked, found = lone_rank(plan, "cuda")
    planned = price(Job(workload=asked.workload, cluster=asked.cluster, trainer=asked.trainer), asked.layout)
    told = {row["kind"]: row["predicted_seconds"] for row in found["stages"]}
    assert told == {kind: float(predicted_of(planned).computed[kind][1]) for kind in ("F", "B")}
    times = {row["what"]: row for row in found["times"]}
    assert times["step"]["predicted_seconds"] == pytest.approx(planned.step_time) and found["as_run"] is None
    assert times["optimizer of rank 1"]["predicted_seconds"] == float(planned.shared.optimizer[2, 0])


def test_halves_of_a_backward_pass_are_those_of_torch(tmp_path: Path) -> None:
    """Tokens have no gradient: the first stage does its whole backward pass as gradients of weights; the parts of the step are
    those of the cost model where the trainer runs nothing else."""
    from planner.lab.run.assembled_step import parts_as_run, predicted_as_run, priced_as_run
    from planner.lab.run.levels import question
    from planner.plan_file import load_plan

    flags = ("--gpus", "2", "--pp", "2", "--global-batch-size", "8", "--schedule", "zbv", "--vpp", "2")
    asked = question(load_plan(on_this_cpu(tmp_path, *flags)))
    priced = priced_as_run(asked)
    told = predicted_as_run(priced, asked.split, None)
    computed, model = told.computed, predicted_of(priced).computed
    assert computed["W"][0] == computed["B"][0] and 0 < computed["W"][1] < computed["B"][1]
    for name in ("F", "B"):
        assert computed[name] == pytest.approx(model[name])
    parts, whole = parts_as_run(asked, None), priced.estimate.time
    more = told.update - priced.shared.optimizer[:, 0]
    assert set(parts) == set(PARTS) and more[0] > 0
    assert parts["compute"] == pytest.approx(float(whole["compute"][0] + whole["recompute"][0]))
    assert parts["optimizer"] == pytest.approx(float(whole["optimizer"][0]) + max(more[0], more[2]))
    slower = parts_as_run(asked, HOST)
    assert slower["compute"] > parts["compute"] + 8 * 2 * 4e-3 and slower["optimizer"] > parts["optimizer"]


@needs_torch
def test_a_rank_that_does_not_get_through_is_a_result(tmp_path: Path) -> None:
    """One rank out of memory, one whose process was lost, one that ran: the last one's times are kept."""
    from planner.lab.run import one_rank
    from planner.lab.run.emulate import Emulation
    from planner.lab.run.levels import Machine, Task, question
    from planner.plan_file import load_plan

    plan = load_plan(on_this_cpu(tmp_path, "--gpus", "4", "--pp", "2", "--dp", "2", "--global-batch-size", "16"))
    asked = question(plan)
    task = Task(
        plan=plan, asked=asked, machine=Machine(device="cpu", gpus=0, name="x", memory=1e9, cores=2, place=None)
    )
    ran = dataclasses.replace(
        Emulation.of(2, asked.split), totals=[0.35], updates=[0.01],
        samples={("F", 1): [0.03, 0.03, 0.04], ("B", 1): [0.07, 0.08, 0.07]},
    )  # fmt: skip
    full = {"phase": "step 1", "sentence": "CUDA out of memory", "allocated_gib": 70.5, "outcome": "out_of_memory"}
    ended = {"phase": "its step", "allocated_gib": None, "outcome": "failed"}
    ended |= {"sentence": "rank 0: its process ended with code -9 before it was done"}
    lost = dataclasses.replace(Emulation.of(0, asked.split), failure=ended)
    found = one_rank.result(task, [dataclasses.replace(lost, failure=full), ran])
    assert found["outcome"] == "out_of_memory" and found["failure"]["allocated_gib"] == 70.5
    assert "rank 0 alone on one device, step 1: CUDA out of memory" in found["failure"]["sentence"]
    rows = {one["what"]: one for one in found["times"]}
    assert rows["compute"]["measured_seconds"] == pytest.approx(8 * 0.10) and rows["once_per_step"][
        "measured_seconds"
    ] == (pytest.approx(0.35 - 3 * 0.10))
    found = one_rank.result(task, [lost])
    assert found["outcome"] == "failed" and "ended with code -9" in found["failure"]["sentence"]
    from planner.lab.run.record import complete

    whole = complete({**found, "why": "asked for", "plan": "plan.yaml"})
    assert any("The run failed" in one for one in validation_tables(whole) if isinstance(one, str))
