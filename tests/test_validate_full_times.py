"""From ranks that ran to a result of plan validate: times, memory and notes by hand, on processes and on a GPU."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from validate_samples import entry, needs_torch, plan_file, task

from planner.lab.run.comparison import predicted_memory
from planner.lab.run.full import LIBRARIES, needed_memory
from planner.lab.run.full_result import result
from planner.lab.run.levels import Task, question
from planner.lab.run.record import complete, time_row
from planner.plan_file import load_plan
from planner.units import GIB


def test_times_by_hand(tmp_path: Path) -> None:
    """1F1B of two stages and four microbatches: (m + p - 1)(F + B) of the thread's time; wall where the machine is quiet."""
    asked = task(plan_file(tmp_path))
    found = result(asked, [entry(0, 0.30), entry(1, 0.20)], None)
    times = {row["what"]: row for row in found["times"]}
    assert (
        times["step"]["measured_seconds"] == 0.30 and times["step"]["note"] == "" and times["step"]["inside"] is False
    )
    low, high = times["step"]["interval"]
    assert times["step"]["error"] == pytest.approx(times["step"]["predicted_seconds"] / 0.30 - 1) and low < high < 0.30
    assert times["forward_backward"]["measured_seconds"] == pytest.approx(4 * 0.030)
    assert times["optimizer"]["measured_seconds"] == pytest.approx(0.003)
    assert times["replayed_step"]["measured_seconds"] == pytest.approx(5 * 0.030 + 0.003)
    assert times["exposed in passes"]["measured_seconds"] == pytest.approx(2 * 0.030)
    assert times["pipeline_bubble"]["measured_seconds"] == pytest.approx(0.27 - 6 * 0.030)
    assert found["rates"]["tokens_per_second"]["measured"] == pytest.approx(4 * 128 / 0.30)
    loud = [entry(0, 0.30, pressure=[2.0, 40.0]), entry(1, 0.20)]
    found = result(asked, loud, None)
    rows, rates = {row["what"]: row for row in found["times"]}, found["rates"]
    assert rates["tokens_per_second"]["predicted"] is rates["mfu"]["predicted"] is rates["mfu"]["measured"] is None
    assert (
        "not quiet (for 40 %" in rows["step"]["note"]
        and rows["step"]["error"] is None
        and "pipeline_bubble" not in rows
    )
    other = task(plan_file(tmp_path, cpu=False, name="gpus.yaml"))
    rows = {row["what"]: row for row in result(other, [entry(0, 0.30), entry(1, 0.20)], None)["times"]}
    assert rows["step"]["predicted_seconds"] is None and "it ran on CPUs, and the plan is for" in rows["step"]["note"]


def test_a_row_with_a_note_is_not_compared() -> None:
    assert time_row("step", 1.1, 1.0, interval=(0.9, 1.2))["inside"] is True
    assert time_row("step", 1.1, 1.0)["error"] == pytest.approx(0.1)
    noted = time_row("step", 1.1, 1.0, interval=(0.9, 1.2), note="not quiet")
    assert noted["error"] is noted["inside"] is None and noted["predicted_seconds"] == 1.1


def test_rows_of_a_gpu_by_hand(tmp_path: Path) -> None:
    """By the stream: passes with what they wait, the bubble between them; memory of the allocator and of the device."""
    memory = {"states": {"weights": 2**28, "gradients": 2**28, "optimizer_states": 2**29}, "allocated": 3 * 2**29,
              "reserved": 2**31, "device": 6 * 2**30}  # fmt: skip
    left = [entry(rank, 0.30, name="NVIDIA H100 80GB HBM3", pressure=[None], memory=memory,
                  exposed={"pipeline": 0.004, "other": 0.1, "all": 0.1}) for rank in (0, 1)]  # fmt: skip
    plan = plan_file(tmp_path, cpu=False)
    on_gpu = task(plan, device="cuda", gpus=2, name="NVIDIA H100 80GB HBM3")
    found = result(on_gpu, left, None)
    times = {row["what"]: row for row in found["times"]}
    assert {row["currency"] for row in found["times"]} == {"device"}
    assert (
        times["step"]["measured_seconds"] == 0.30 and times["step"]["interval"] and times["step"]["inside"] is not None
    )
    assert times["forward_backward"]["measured_seconds"] == pytest.approx(4 * 0.030)
    assert times["pipeline_bubble"]["measured_seconds"] == pytest.approx(0.27 - 6 * 0.030)
    assert times["optimizer"]["measured_seconds"] == pytest.approx(0.003)
    assert times["exposed pipeline"]["measured_seconds"] == 0.004 and "exposed all" not in times
    rows = {row["what"]: row for row in found["ranks"][0]["memory"]}
    assert (
        rows["peak"]["predicted_gib"]
        == predicted_memory(on_gpu.asked, 0)["peak"] / GIB
        < rows["device"]["predicted_gib"]
    )
    ranks = sum(predicted_memory(on_gpu.asked, stage)["peak"] for stage in (0, 1))
    assert needed_memory(on_gpu) == pytest.approx(ranks + 2 * LIBRARIES)  # the peak of each, not the sum of its parts
    told = load_plan(plan).prediction
    assert rows["device"]["predicted_gib"] == pytest.approx(told.memory_peak_gib)  # both stages of this model are alike
    assert rows["device"]["interval"] == pytest.approx(list(told.memory_peak_range_gib), rel=0.05)
    assert (
        rows["peak"]["measured_gib"] == 1.5
        and rows["reserved"]["measured_gib"] == 2
        and rows["device"]["inside"] is False
    )
    text = "".join(map(str, validation_lines(found)))
    assert "device" in text and "missed" in text and "exposed pipeline" in text and "MFU" in text
    assert found["as_run"] is None, "the plan's own prediction"
    plain = result(on_gpu, [one | {"not_compiled": {"swiglu": "Cannot find a working triton"}} for one in left], None)
    assert (
        plain["as_run"]["not_compiled"] == {"swiglu": "Cannot find a working triton"}
        and plain["as_run"]["host"] is None
    )
    assert "no compiler made one of them (swiglu: Cannot find a working triton)" in "".join(validation_lines(plain))
    assert all(
        slow["predicted_seconds"] > quick["predicted_seconds"] * 1.02
        for slow, quick in zip(plain["stages"], found["stages"], strict=True)
    )
    other = result(task(plan, device="cuda", gpus=2, name="NVIDIA A100-SXM4-80GB"), left, None)
    assert "it ran on NVIDIA A100-SXM4-80GB (Ampere), and the plan is for" in other["times"][0]["note"]


def validation_lines(found: dict[str, Any]) -> list[str]:
    """The tables as the command prints them at 120 columns."""
    from rich.console import Console

    from planner.lab.run.show import validation_tables

    out = Console(width=120, no_color=True, record=True, file=io.StringIO())
    for part in validation_tables({"plan": "plan.yaml", **complete({"rung": "full", "why": "asked", **found})}):
        out.print(part)
    return out.export_text().splitlines()


@needs_torch
def test_a_clock_on_a_gpu_reads_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a stream that runs 1 ms from each to the next: passes and the loss behind the last stage's are one action."""
    import torch

    from planner.lab.run.clock import Clock

    class Event:
        now = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.now += 1.0
            self.at = Event.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(torch.device("cuda"))
    with clock.span("step"):
        pass
    assert clock.cut() == [], "nothing is taken while it is off"
    clock.on = True
    for _ in range(2):
        with clock.span("step"):
            with clock.span("F", 1, 0):
                pass
            with clock.span("F", 1, 0):  # the loss
                pass
            with clock.span("B", 1, 0):
                pass
        taken = {(one.kind, one.stage): one for one in clock.resolve(clock.cut())}
        assert taken["step", -1].seconds == pytest.approx(7e-3)
        assert taken["F", 1].seconds == pytest.approx(2e-3) and taken["B", 1].thread == pytest.approx(1e-3)


@needs_torch
def test_exposed_communication_is_what_no_kernel_hides() -> None:
    """Kernels from 0 to 10 and 20 to 30 us; tensor 5 to 15, data 8 to 12 and 25 to 40: exposed 5, 2 + 10, together 15."""
    from planner.lab.run.kernel_trace import exposed

    def event(name: str, start: float, length: float, group: str = "") -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "ts": start,
            "dur": length,
            "args": {"Process Group Description": group},
        }

    events = [
        event("gemm", 0, 10), event("gemm", 20, 10), event("ncclDevKernel_AllGather", 5, 10, "mesh_tp"),
        event("ncclDevKernel_ReduceScatter", 8, 4, "mesh_shard"), event("ncclDevKernel_AllGather", 25, 15, "mesh_flat_shard"),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100}, {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    found = exposed(events)
    assert found == pytest.approx({"tensor": 5e-6, "data": 12e-6, "all": 15e-6})


def made_trace(gap: float) -> list[dict[str, Any]]:
    """Two forward passes of one stage, a backward pass in two halves; kernels of 40 us, launched ahead and running with such gaps
    between them; and kernels of the update, which are of no pass."""
    events: list[dict[str, Any]] = []
    at, correlation = 0.0, 0
    for number, (kind, microbatch) in enumerate((("F", 0), ("F", 1), ("I", 0), ("W", 0), ("", 0))):
        if kind:
            name = {"ph": "X", "cat": "user_annotation", "name": f"pass {kind} 0 {microbatch}", "ts": 100.0 * number, "dur": 90.0}
            events += [name, {**name, "cat": "gpu_user_annotation", "ts": 0.0, "dur": 1e6}]
        for launch in range(3):
            correlation += 1
            also = {"args": {"correlation": correlation}, "ph": "X"}
            asked = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 100.0 * number + 10 * launch, "dur": 5.0}
            events.append(asked | also)
            events.append({"cat": "kernel", "name": "gemm", "ts": 1000.0 + at, "dur": 40.0, **also})
            at += 40.0 + gap
    return events


@pytest.mark.proof
@pytest.mark.parametrize(("gap", "bound"), [(0.5, False), (20.0, True)])
def test_passes_whose_kernels_wait_for_the_host_are_no_truth(tmp_path: Path, gap: float, bound: bool) -> None:
    """Kernels of 120 us per pass, timed at 3 (40 + gap): below 95 % the pass is named, and nothing of it reaches calibration."""
    from planner.lab.run.kernel_trace import busy_passes, host_bound
    from planner.lab.run.learn import learned

    busy = busy_passes(made_trace(gap))
    assert {(one["stage"], one["kind"]): one["seconds"] for one in busy} == pytest.approx(
        {(0, "F"): 120e-6, (0, "B"): 240e-6, (0, "W"): 120e-6}
    )
    pass_seconds = {"F": 3 * (40 + gap) * 1e-6, "B": 6 * (40 + gap) * 1e-6}
    left = []
    for rank in (0, 1):
        one = entry(rank, 0.30, name="NVIDIA H100 80GB HBM3", pressure=[None])
        for step in one["steps"]:
            for action in step["actions"]:
                action["median"] = [pass_seconds[action["kind"]]] * 2
        left.append(one | ({"busy": busy} if rank == 0 else {}))
    assert set(host_bound(left)) == ({(0, "F"), (0, "B")} if bound else set())
    plan = plan_file(tmp_path, cpu=False)
    on_gpu = task(plan, device="cuda", gpus=2, name="NVIDIA H100 80GB HBM3")
    found = complete({"rung": "full", "why": "", **result(on_gpu, left, None)})
    step = next(row for row in found["times"] if row["what"] == "step")
    compared = {(row["stage"], row["kind"]): row["error"] is not None for row in found["stages"]}
    assert compared == {(0, "F"): not bound, (0, "B"): not bound, (1, "F"): True, (1, "B"): True}
    assert (step["error"] is None) == bound and (found["rates"]["tokens_per_second"]["predicted"] is None) == bound
    taught = learned(load_plan(plan), found)
    assert (taught["run"] is None) == bound
    if bound:
        assert found["stages"][0]["busy"] == pytest.approx(40 / 60) and "host-bound: kernels run in 67% of a pass" in step["note"]
        assert taught["no_run"] == step["note"]


@needs_torch
@pytest.mark.parametrize(("gap", "bound"), [(0.5, False), (20.0, True)])
def test_passes_of_a_rank_alone_that_wait_for_the_host_are_no_truth(tmp_path: Path, gap: float, bound: bool) -> None:
    """The same trace in level rank, with kernels of a stand-in for a collective, which do not make the GPU any busier."""
    from planner.lab.run import one_rank
    from planner.lab.run.emulate import Emulation
    from planner.lab.run.kernel_trace import STAND_IN, busy_passes

    copy = {"ph": "X", "cat": "user_annotation", "name": STAND_IN, "ts": 81.0, "dur": 4.0}
    launched = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 82.0, "dur": 1.0, "args": {"correlation": 99}}
    kernel = {"ph": "X", "cat": "kernel", "name": "copy", "ts": 5000.0, "dur": 70.0, "args": {"correlation": 99}}
    busy = busy_passes([*made_trace(gap), copy, launched, kernel])
    assert busy == busy_passes(made_trace(gap)) != busy_passes([*made_trace(gap), launched, kernel])
    asked = task(plan_file(tmp_path, cpu=False), device="cuda", gpus=1, name="NVIDIA H100 80GB HBM3")
    each = 3 * (40 + gap) * 1e-6
    one = Emulation.of(0, asked.asked.split)
    one.samples |= {("F", 0): [each] * 8, ("B", 0): [2 * each] * 8}
    one.totals, one.updates, one.busy = [12 * each] * 2, [1e-4] * 2, busy
    found = complete({"why": "", **one_rank.result(asked, [one])})
    compared = {row["kind"]: row["error"] is not None for row in found["stages"]}
    assert compared == {"F": not bound, "B": not bound}
    times = {row["what"]: row for row in found["times"]}
    assert (times["step"]["error"] is None) == (times["compute"]["error"] is None) == bound
    assert times["optimizer of rank 0"]["error"] is not None
    assert (found["rates"]["tokens_per_second"]["predicted"] is None) == bound
    if bound:
        assert "host-bound: kernels run in 67% of a pass" in times["step"]["note"] == found["stages"][0]["note"]


def test_a_truncated_run_is_a_run_of_its_own_job(tmp_path: Path) -> None:
    """Four GPUs made small for two: what is learned is of the job of two processes, and reads back as that."""
    from planner.lab.run import truncated
    from planner.lab.run.learn import learned
    from planner.runs import rows_from_dict, to_run
    from planner.runs.rows import documents

    flags = ("--gpus", "4", "--dp", "4", "--zero", "3", "--global-batch-size", "4", "--trainer", "fsdp")
    plan = plan_file(tmp_path, *flags)
    asked = task(plan)
    deep = truncated._small(asked)
    small = truncated.plan_of(asked, deep)
    mine = Task(plan=small, asked=question(small), machine=asked.machine)
    left = [entry(rank, 0.30, stage=0) for rank in (0, 1)]
    for one in left:
        one["steps"] = [
            {**step, "actions": [{**each, "stage": 0} for each in step["actions"]]} for step in one["steps"]
        ]
    first = result(mine, left, None) | {"as_run": None}  # priced as planned, as a compiled run is
    found = learned(
        asked.plan, complete({"why": "asked", **first, **truncated.result(asked, deep, first, None, None)}), name="v"
    )
    assert found["no_run"] is None and found["run"]["rows"][0]["id"] == "v-truncated"
    assert "rung truncated" in found["run"]["framework"]
    [document] = documents({"planner_validation": 1, "plan": "p", **found}, where="v")
    run = to_run(rows_from_dict(document, where="v")[0], hardware=str(tmp_path / "cpu.yaml"))
    assert not run.unsupported and run.workload is not None and run.layout is not None
    assert (int(run.layout.dp), int(asked.plan.layout.dp), run.measured.step_time) == (2, 4, 0.30)
    assert run.workload.global_batch_size == 2 and run.workload.model == small.workload.model
    assert found["likeliest"] is None or "GPU" not in found["likeliest"]["sentence"]
    loud = result(mine, [{**one, "pressure": [80.0]} for one in left], None)
    found = learned(asked.plan, complete({"why": "asked", **loud, **truncated.result(asked, deep, loud, None, None)}))
    assert found["run"] is None and found["no_run"]
