"""Traces of torch.profiler: steps, parts that sum to the step, several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_traces import ADAM, FLASH, GEMM, NORM, Made, training

from planner.errors import PlannerError
from planner.explicit import explicit_plan
from planner.kineto.groups import kinds_of
from planner.kineto.job_traces import JobTraces, read_traces, trace_files
from planner.kineto.plan_traces import no_truth
from planner.kineto.rank_trace import read_rank
from planner.kineto.step_marks import find_steps
from planner.kineto.step_parts import StepParts, parts_of
from planner.layout import Layout

ROOT = Path(__file__).resolve().parent.parent
US = 1e-6
EIGHT = Layout(dp=8, zero=3)


def parts(made: Made, tmp_path: Path, layout: Layout = EIGHT) -> StepParts:
    found = parts_of(read_rank(made.write(tmp_path / "rank.json.gz")), kinds_of(layout))
    whole = (
        sum(found.compute.values()) + sum(found.exposed.values()) + found.copies + found.idle_host + found.idle_other
    )
    assert whole == pytest.approx(found.step_time, rel=1e-4), "the parts are the step"
    assert found.busy + found.idle_host + found.idle_other == pytest.approx(found.step_time, rel=1e-4)
    return found


def job(tmp_path: Path, *ranks: Made, layout: Layout = EIGHT) -> JobTraces:
    return read_traces([one.write(tmp_path / f"t{n}.json") for n, one in enumerate(ranks)], layout)


# ------------------------------------------------------------------------------------------------ steps and parts


def test_a_step_with_hidden_communication(tmp_path: Path) -> None:
    found = parts(training(), tmp_path)
    assert (
        found.steps.how == "ProfilerStep"
        and found.steps.numbers == (0, 1, 2)
        and found.step_time == pytest.approx(820 * US, rel=1e-4)
    )
    assert found.busy_share == pytest.approx(1.0) and not found.host_bound
    assert found.compute == pytest.approx(
        {
            "matrix products": 600 * US,
            "attention": 100 * US,
            "norms and elementwise": 50 * US,
            "optimizer": 50 * US,
            "other kernels": 0,
        },
        abs=1e-8,
    )
    assert found.exposed["data"] == pytest.approx(0, abs=1e-9) and found.hidden["data"] == pytest.approx(
        200 * US, rel=1e-4
    )
    assert found.copies == pytest.approx(20 * US, rel=1e-3)
    [one] = found.traffic
    assert (one.kind, one.op, one.size, one.calls) == ("data", "all_gather", 8, 1)
    assert found.top[0][:2] == (GEMM, "matrix products") and found.top[0][2] == pytest.approx(600 * US)


def test_exposed_communication_and_a_late_host(tmp_path: Path) -> None:
    found = parts(training(hidden=False, gap=100.0), tmp_path)
    assert found.step_time == pytest.approx(1120 * US, rel=1e-4) and found.exposed["data"] == pytest.approx(
        200 * US, rel=1e-4
    )
    assert found.idle_host == pytest.approx(100 * US, rel=1e-3) and found.longest_gap == pytest.approx(
        100 * US, rel=1e-3
    )
    assert found.host_bound and found.host_share == pytest.approx(100 / 1120, rel=1e-3)
    assert found.busy_share == pytest.approx(1020 / 1120, rel=1e-3)


def test_a_gap_whose_kernel_was_launched_before_is_not_the_hosts(tmp_path: Path) -> None:
    made = Made()
    for number in range(3):
        made.step(number, 100.0 * number - 6, 100)
        made.kernel(GEMM, 100.0 * number, 50)
        made.kernel(NORM, 100.0 * number + 80, 20, launched=100.0 * number - 2, stream=9)
    found = parts(made, tmp_path)
    assert found.idle_other == pytest.approx(30 * US, rel=1e-3) and found.idle_host == pytest.approx(0, abs=1e-9)


def test_kernels_on_several_streams_count_once(tmp_path: Path) -> None:
    made = Made()
    for number in range(3):
        at = 100.0 * number
        made.step(number, at - 6, 100)
        made.kernel(GEMM, at, 60)
        made.kernel(FLASH, at + 40, 60, stream=8)
        made.collective("allreduce", [0, 1], at + 20, 80)
        made.collective("allreduce", [0, 2], at + 20, 60)
    found = parts(made, tmp_path, Layout(tp=2, cp=2, dp=2))
    assert found.busy_share == pytest.approx(1.0)
    assert found.compute["matrix products"] == pytest.approx(50 * US, rel=1e-3) == found.compute["attention"]
    assert {key: value for key, value in found.hidden.items() if value} == pytest.approx(
        {"tensor": 80 * US, "context": 60 * US}, rel=1e-3
    )


def test_steps_by_the_optimizer(tmp_path: Path) -> None:
    """Where the profiler steps for each microbatch, and where nobody calls prof.step(): annotations, then kernels."""
    made, plain = training(steps=12), training(steps=4)
    for number in range(0, 12, 4):  # an optimizer step, of two parts of a model, each fourth step of the profiler
        for part in (0, 20):
            made._event("user_annotation", "Optimizer.step#AdamW.step", 820.0 * number + 700 + part, 10, pid=1, tid=1)
    found = find_steps(read_rank(made.write(tmp_path / "a.json")))
    assert (
        found.how == "Optimizer.step"
        and found.seconds == pytest.approx(4 * 820 * US, rel=1e-4)
        and len(found.spans) == 2
    )
    plain.events = [one for one in plain.events if one["cat"] != "user_annotation"]
    found = find_steps(read_rank(plain.write(tmp_path / "b.json")))
    assert (
        found.how == "kernels of the optimizer"
        and found.seconds == pytest.approx(820 * US, rel=1e-4)
        and len(found.spans) == 3
    )


def test_steps_that_are_not_steady_are_left_out(tmp_path: Path) -> None:
    made = training(steps=6)
    late = made.base + 5 * 820 - 7
    for one in made.events:
        if one["ts"] >= late:
            one["ts"] += 2000
    found = find_steps(read_rank(made.write(tmp_path / "a.json")))
    assert found.left_out == 1 and found.numbers == (0, 1, 2, 3) and found.seconds == pytest.approx(820 * US, rel=1e-4)


def test_steps_without_kernels_of_their_own_are_the_hosts(tmp_path: Path) -> None:
    made = Made()
    for number in range(3):
        made.step(number, 100.0 * number, 90)
    made.kernel(GEMM, 250, 20)
    found = find_steps(read_rank(made.write(tmp_path / "a.json")))
    assert found.how == "ProfilerStep" and found.seconds == pytest.approx(100 * US) and len(found.spans) == 2


def test_without_steps_it_says_so(tmp_path: Path) -> None:
    made = training(steps=3)
    made.events = [one for one in made.events if one["cat"] != "user_annotation" and one["name"] != ADAM]
    found = job(tmp_path, made)
    assert found.step_time is None and "no steps were found" in found.notes[0]
    single = job(tmp_path, training(steps=1))
    assert "a single step was recorded" in single.notes[0]


def test_old_traces_and_rocm(tmp_path: Path) -> None:
    """No groups on kernels, integers of microseconds since 1970, HIP's names, launches of HIP, arguments missing."""
    made = Made(base=1.66e15)
    for number in range(3):
        at = 1000.0 * number
        made.step(number, at - 6, 10)
        made.kernel("Cijk_Alik_Bljk_BBS_BH", at, 500)
        made.kernel("ncclDevKernel_Generic(ncclDevComm*, unsigned long)", at + 500, 100)
        made.kernel("void ck_tile::kentry<FmhaFwdKernel>()", at + 600, 400)
    for one in made.events:
        one["ts"] = int(one["ts"])
        if one["cat"] == "cuda_runtime":
            one["name"] = "hipLaunchKernel"
    made.events.append({"ph": "X", "cat": "kernel", "name": "late", "ts": made.base + 2990})
    made.device = "AMD Instinct MI300X"
    found = parts(made, tmp_path, Layout(dp=8, zero=0))
    assert found.compute["matrix products"] == pytest.approx(500 * US, rel=1e-3) and found.compute[
        "attention"
    ] == pytest.approx(400 * US, rel=1e-3)
    assert found.exposed["other"] == pytest.approx(100 * US, rel=1e-2), "a generic kernel does not say what it is"


def test_metadata_of_an_operator_counts_for_its_kernel(tmp_path: Path) -> None:
    """torch 2.2 and 2.3: record_param_comms alone has the arguments."""
    made = training()
    for one in made.events:
        if "Collective name" in one.get("args", {}):
            known = {key: one["args"].pop(key) for key in list(one["args"]) if key[0] in "CIOGP" or key == "dtype"}
            one["args"]["External id"] = 77
            op = {
                "ph": "X",
                "cat": "cpu_op",
                "name": "record_param_comms",
                "ts": one["ts"] - 9,
                "dur": 1,
                "args": {**known, "External id": 77},
            }
    made.events.append(op)
    trace = read_rank(made.write(tmp_path / "a.json"))
    [one] = trace.collectives
    assert (one.op, one.size, one.bytes, one.ranks) == ("all_gather", 8, 8 * 2 * (1 << 22), tuple(range(8)))


def test_rate_of_products_whose_shapes_are_recorded(tmp_path: Path) -> None:
    made = Made()
    for number in range(3):
        made.step(number, 100.0 * number - 6, 10)
        for part in (0, 40):  # two kernels of one operator
            made.kernel(GEMM, 100.0 * number + part, 40, **{"External id": 500 + number})
        args = {"External id": 500 + number, "Input Dims": [[1024], [1024, 2048], [2048, 512], [], []]}
        made.events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": "aten::addmm",
                "ts": made.base + 100.0 * number - 5,
                "dur": 1,
                "args": args,
            }
        )
    rate = parts(made, tmp_path).product_rate
    assert rate == pytest.approx(2 * 1024 * 2048 * 512 / (80 * US), rel=1e-3)
    for one in made.events:
        if one["cat"] == "cpu_op":
            one["args"]["Input Dims"] = "[[1, 2], [3]]"
    assert parts(made, tmp_path).product_rate is None


# ------------------------------------------------------------------------------------------------ several ranks


def test_who_waits_for_whom(tmp_path: Path) -> None:
    """Rank 1 comes last and is 200 us in the collective; the others wait 30 and 50 us for it, whatever their clocks say."""
    ranks = [
        training(0, hidden=False, wait=30.0),
        training(1, hidden=False, base=9.9e12),
        training(2, hidden=False, wait=50.0),
    ]
    found = job(tmp_path, *ranks)
    assert found.waits == pytest.approx({0: 30 * US, 1: 0.0, 2: 50 * US}, abs=2e-8)
    assert job(tmp_path, ranks[0]).waits == {}


def test_bandwidth_of_collectives_with_nothing_beside_them(tmp_path: Path) -> None:
    [one] = job(tmp_path, training(hidden=False, steps=6)).bandwidths
    assert (one.op, one.size, one.bytes, one.ranks) == ("all_gather", 8, 8 * 2 * (1 << 22), tuple(range(8)))
    assert one.seconds == pytest.approx(200 * US, rel=1e-4) and one.calls >= 4
    assert job(tmp_path, training(hidden=True, steps=6)).bandwidths == (), "under a matrix product it says nothing"


def test_folders_patterns_and_wrong_sets(tmp_path: Path) -> None:
    for rank in (0, 1):
        training(rank).write(tmp_path / f"rank{rank}.json.gz")
    (tmp_path / "notes.txt").write_text("no trace")
    assert (
        trace_files([tmp_path])
        == trace_files([str(tmp_path / "*.gz")])
        == [tmp_path / "rank0.json.gz", tmp_path / "rank1.json.gz"]
    )
    for named, sentence in (
        (tmp_path / "none*.gz", "no trace there"),
        (tmp_path / "gone.json", "cannot be read (No such file"),
    ):
        with pytest.raises(PlannerError, match="--trace|cannot") as error:
            read_traces(trace_files([str(named)]), EIGHT)
        assert sentence in str(error.value)
    with pytest.raises(PlannerError, match="a job of 8 ranks, and the plan is for 16 GPUs"):
        read_traces(trace_files([tmp_path]), Layout(dp=16))
    training(1).write(tmp_path / "again.json")
    with pytest.raises(PlannerError, match="are both of rank 1"):
        read_traces(trace_files([tmp_path]), EIGHT)


# ------------------------------------------------------------------------------------------------ torch itself


@pytest.mark.proof
def test_traces_that_torch_writes_on_a_cpu(tmp_path: Path) -> None:
    """Two ranks of gloo: steps, ranks and collectives are read; without kernels nothing is said of a GPU."""
    script = [sys.executable, "-m", "tests.proofs.profiled_ranks"]
    ranks = [subprocess.Popen([*script, str(rank), str(tmp_path), str(tmp_path / "store")], cwd=ROOT) for rank in (0, 1)]
    assert [one.wait(timeout=90) for one in ranks] == [0, 0]
    (tmp_path / "store").unlink(missing_ok=True)
    found = read_traces(trace_files([tmp_path]), Layout(dp=2))
    assert [one.trace.rank for one in found.parts] == [0, 1] and not found.has_gpu and found.notes[-1].startswith("no kernels")
    for one in found.parts:
        starts = [start for _, start, _ in one.trace.steps]
        lengths = np.diff(starts)
        assert one.trace.world == 2 and one.steps.how == "ProfilerStep" and len(starts) == 4
        assert lengths.min() <= one.steps.seconds <= lengths.max() and len(one.trace.optimizer) == 4
        assert len(one.trace.on_host["all_reduce"]) == 4
        assert one.busy == 0 and not one.traffic and not one.host_bound
    job = {"model": "llama-8b", "num_gpus": 2, "hardware": "h200-sxm", "trainer": "fsdp", "global_batch_size": 2}
    plan = explicit_plan(None, {}, job)
    assert "no kernels were recorded, and the plan is for" in no_truth(plan, found)
