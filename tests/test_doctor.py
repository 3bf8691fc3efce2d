"""plan doctor: a mechanism that was put in is found with its size; inside the interval nothing is proven."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from made_traces import ADAM, GEMM, Made, training
from quick_cases import proofs_but

from planner.errors import PlannerError
from planner.explicit import explicit_plan
from planner.kineto.job_traces import read_traces
from planner.layout import Recompute
from planner.plan_file import Plan
from planner.questions.doctor.mechanisms import faster, memory_mechanisms, slower
from planner.questions.doctor.numbers import Finding, _odds, diagnose
from planner.questions.doctor.traced import plan_comparison
from planner.rules import Job
from planner.timeline.priced_plan import estimate_of, job_of, price_plan
from planner.units import GIB

JOBS: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama-70b", "num_gpus": 256, "global_batch_size": 256, "tp": 8, "recompute": 2},
    "pipeline": {"model": "llama-70b", "num_gpus": 512, "global_batch_size": 512, "tp": 4, "pp": 4, "vpp": 5},
    "node": {"model": "llama-8b", "num_gpus": 8, "tp": 2, "global_batch_size": 64},
    "data": {"model": "llama-8b", "num_gpus": 8, "trainer": "fsdp", "sequence_length": 2048, "global_batch_size": 8,
             "zero": 3},
    "small": {"model": "llama-8b", "num_gpus": 8, "tp": 8, "sequence_length": 2048, "global_batch_size": 256},
    "experts": {"model": "mixtral-8x7b", "num_gpus": 64, "global_batch_size": 512, "tp": 2, "etp": 2, "ep": 8},
    "many experts": {"model": "qwen3-235b-a22b", "num_gpus": 256, "pp": 2, "ep": 32},
    "experts on gb300": {"model": "qwen3-235b-a22b", "num_gpus": 256, "pp": 2, "ep": 32, "hardware": "gb300-nvl72"},
    "large node": {"model": "llama-8b", "num_gpus": 8, "global_batch_size": 64, "hardware": "b200-sxm"},
    "experts on b300": {
        "model": "qwen3-30b-a3b",
        "num_gpus": 64,
        "ep": 8,
        "global_batch_size": 64,
        "hardware": "b300-sxm",
    },
}
LAYOUT = ("tp", "pp", "vpp", "ep", "etp", "recompute", "zero")


@cache
def plan(name: str) -> Plan:
    said = {"hardware": "h100-sxm", "trainer": "megatron", **JOBS[name]}
    layout = {key: said.pop(key) for key in LAYOUT if key in said}
    return explicit_plan(None, layout, said)


def with_network(job: Job, share: float) -> Job:
    hardware = job.cluster.hardware
    slow = dataclasses.replace(hardware, network_bandwidth=hardware.network_bandwidth * share)
    return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, hardware=slow))


def with_host(job: Job, factor: float) -> Job:
    return dataclasses.replace(job, trainer=job.trainer.replace(host_time=job.trainer.host.host_time * factor))


def measured(name: str, job: Job, **layout: int) -> float:
    return float(estimate_of(job, plan(name).layout.replace(**layout)).step_time[0])


def step_finding(name: str, seconds: float) -> Finding:
    [found] = diagnose(plan(name), seconds).findings
    assert found.quantity == "step_time" and found.measured == seconds
    assert sum(one.share for one in found.explanations) + found.model_share + found.rest == pytest.approx(1.0)
    assert [one.share for one in found.explanations] == sorted((one.share for one in found.explanations), reverse=True)
    return found


@pytest.mark.proof
@pytest.mark.parametrize(("name", "times"), [("dense", 4), ("many experts", 10)])
def test_a_slow_network_is_found_with_its_size(name: str, times: int) -> None:
    """With experts predictions are rougher, so that less is beyond the model's own error."""
    found = step_finding(name, measured(name, with_network(job_of(plan(name)), 1 / times)))
    first = found.explanations[0]
    assert first.key == "network"
    assert first.value == pytest.approx(times, rel=0.01)
    assert first.explains == pytest.approx(1.0, abs=1e-3)
    assert first.size == f"{times} times slower, {400 // times} instead of 400 Gb/s per GPU"


@pytest.mark.proof
def test_what_costs_as_much_stands_beside_a_slow_network() -> None:
    """With experts the model's own error is larger: recompute would explain as much, and the network is listed with its size."""
    found = step_finding("experts", measured("experts", with_network(job_of(plan("experts")), 1 / 4)))
    network = next(one for one in found.explanations if one.key == "network")
    assert network.value == pytest.approx(4.0, rel=0.01) and network.verdict in ("likely", "possible")


@pytest.mark.parametrize("name", proofs_but(["node"], ["pipeline", "node", "experts on gb300"]))
def test_recompute_is_found(name: str) -> None:
    found = step_finding(name, measured(name, job_of(plan(name)), recompute=int(Recompute.FULL)))
    assert found.explanations[0].key == "recompute"
    assert found.explanations[0].explains == pytest.approx(1.0)
    assert found.explanations[0].verdict == "likely"


@pytest.mark.parametrize(("name", "times"), [("small", 6.0), ("experts on b300", 9.0)])
def test_a_slow_host_is_found_with_its_size(name: str, times: float) -> None:
    found = step_finding(name, measured(name, with_host(job_of(plan(name)), times)))
    first = found.explanations[0]
    assert first.key == "host_time"
    assert first.value == pytest.approx(times, rel=0.01)
    assert first.size == f"{40 * times:.0f} us instead of 40 us per kernel"


@pytest.mark.proof
def test_inside_the_interval_nothing_is_proven(run: Any, tmp_path: Path) -> None:
    one = plan("node")
    found = step_finding("node", 1.02 * one.prediction.step_time_s)
    assert found.inside and all(e.share < 0.3 for e in found.explanations), "none is called likely"
    file = tmp_path / "plan.yaml"
    one.save(file)
    said = run("doctor", str(file), "--measured", f"{1.02 * one.prediction.step_time_s}s").output
    assert "Inside the interval" in said and "none of it proven" in " ".join(said.split())


@pytest.mark.proof
def test_faster_than_predicted(run: Any) -> None:
    one = plan("dense")
    found = step_finding("dense", measured("dense", job_of(one), recompute=int(Recompute.NONE)))
    assert found.gap < -0.1
    assert found.explanations[0].key == "recompute"
    assert found.explanations[0].name == "less recompute than planned"
    assert all(e.would_be < found.predicted for e in found.explanations)
    half = step_finding("dense", measured("dense", job_of(one), num_microbatches=int(one.layout.num_microbatches) // 2))
    assert half.explanations[0].key == "batch" and half.explanations[0].value == 0.5


@pytest.mark.proof
def test_memory_tells_recompute_from_a_slow_gpu() -> None:
    """The same step time with the memory of recompute, and with that of the plan."""
    one = plan("node")
    again = estimate_of(job_of(one), one.layout.replace(recompute=int(Recompute.FULL)))
    seconds, low = float(again.step_time[0]), float(again.memory_peak[0])
    shares = {}
    for name, memory in (("low", low), ("planned", one.prediction.memory_peak_gib * GIB)):
        found = diagnose(one, seconds, memory)
        shares[name] = {e.key: e.share for e in found.findings[0].explanations}
    assert shares["low"]["recompute"] > shares["planned"]["recompute"]
    assert shares["low"]["recompute"] > 0.9


@pytest.mark.parametrize("kind", ["device", "reserved", "allocated"])
def test_memory_of_unsharded_states(kind: str) -> None:
    """On a card that holds them: what a card cannot hold was not measured, and is likelier something else."""
    one = plan("large node")
    states = estimate_of(job_of(one), one.layout.replace(zero=0))
    peak = {"device": states.memory_peak, "reserved": states.memory_reserved, "allocated": states.memory_allocated}[
        kind
    ]
    [found] = diagnose(one, None, float(peak[0]), kind).findings
    assert found.quantity == "memory" and not found.inside
    mine = next(e for e in found.explanations if e.key == "zero")
    assert mine.explains == pytest.approx(1.0)
    assert mine.share == max(e.share for e in found.explanations)
    assert ("fragmentation" in {e.key for e in found.explanations}) == (kind != "allocated")


@pytest.mark.proof
def test_a_batch_that_no_layout_allows_is_not_tried() -> None:
    """Interleaved stages of 4 ranks need a multiple of 4 microbatches: half of 12 is none, twice 12 is."""
    one = explicit_plan(
        None, {"tp": 2, "pp": 4, "vpp": 4, "num_microbatches": 12},
        {"model": "llama-8b", "num_gpus": 16, "hardware": "h100-sxm", "trainer": "megatron", "global_batch_size": 24},
    )  # fmt: skip
    base = price_plan(one)
    assert "batch" not in {mechanism.key for mechanism in faster(base)}
    assert next(m for m in slower(base) if m.key == "batch").sizes == (2.0, 4.0)
    assert diagnose(one, 0.5 * one.prediction.step_time_s).findings[0].explanations


@pytest.mark.parametrize("name", proofs_but(["dense"], ["dense", "pipeline", "experts"]))
def test_mechanisms_are_priced_and_go_their_way(name: str) -> None:
    """Every one has another price or none of its own; what is called slower is, at every size; each says what tells."""
    base = price_plan(plan(name))
    for mechanisms, sign, quantity in (
        (slower(base), 1, "step_time"), (faster(base), -1, "step_time"),
        (memory_mechanisms(base, True), 1, "memory_peak"), (memory_mechanisms(base, False), -1, "memory_peak"),
    ):  # fmt: skip
        assert len({one.key for one in mechanisms}) == len(mechanisms) >= 2
        for one in mechanisms:
            before = float(getattr(base.estimate, quantity)[0])
            size = one.sizes[-1]
            after = float(getattr(estimate_of(*one.change(base, size)), quantity)[0])
            assert math.isfinite(after) and sign * (after - before) >= -1e-3 * before, one.key
            assert one.size_text(size) and one.source and one.check
            if one.width:
                neutral = float(getattr(estimate_of(*one.change(base, 1.0)), quantity)[0])
                assert neutral == pytest.approx(before), f"{one.key} of size 1 is the plan"


def test_a_mechanism_with_which_the_job_would_not_fit_weighs_less() -> None:
    """Scores of a matrix in memory do not fit at this length: the job ran, so flash attention was on."""
    base = price_plan(plan("node"))
    slow = estimate_of(*next(one for one in slower(base) if one.key == "attention").change(base, 1.0))
    assert float(slow.out_of_memory_probability[0]) > 0.9
    asked = (None, (0.9, 1.1), 0.06)
    ran, ran_out = (1.0, 1.0, 1.0), (2.0, 2.0, 1.0 - float(slow.out_of_memory_probability[0]))
    assert _odds(ran_out, ran, asked, 1) < 0.1
    assert _odds(ran, ran_out, asked, 1) == 1.0, "where the plan itself does not fit, fitting counts for nothing"
    time = (2.0, (0.9, 1.1), 0.06)
    assert _odds((2.0, 1.0, 1.0), ran, time, 0) == 1e3, "it meets a step time that the plan misses by far"
    met = (1.0, (0.9, 1.1), 0.06)
    assert _odds((0.8, 1.0, 1.0), ran, met, 0) < 0.1, "it misses one that the plan meets"


# ------------------------------------------------------------------------------------------------ command


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "plan.yaml"
    plan("node").save(path)
    return str(path)


def test_json_holds_what_the_tables_show(run: Any, file: str) -> None:
    seconds = 1.5 * plan("node").prediction.step_time_s
    done = run("doctor", file, "--measured", f"{seconds}s", "--memory", "60GiB")
    assert done.exit_code == 0, done.output
    document = json.loads(run("doctor", file, "--measured", f"{seconds}s", "--memory", "60GiB", "--json").stdout)
    time, memory = document["findings"]
    assert time["measured_s"] == pytest.approx(seconds) and memory["measured_gib"] == pytest.approx(60)
    words = " ".join(done.output.split())
    assert "50.0 % more than predicted" in words and "Outside the interval" in words
    for one in time["explanations"][:3]:
        assert one["check"] in words and one["source"] in words
    assert f"{100 * time['explanations'][0]['share']:.1f} %" in words


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "what was measured? give --measured 14.2s, --memory 71GiB, or both"),
        (["--measured", "14.2x"], "'14.2x' has the unit 'x', which does not measure seconds; write it like 14.2s or 850ms"),
        (["--measured", "71GiB"], "which does not measure seconds"),
        (["--measured", "0s"], "--measured must be above zero"),
        (["--measured", "1e9"], "times more than the predicted"),
        (["--measured", "1us"], "which no cause explains; give the time of one optimizer step, with its unit"),
        (["--memory", "1KiB"], "which no cause explains; give the peak of one GPU, with its unit"),
        (["--memory", "71"], "has no unit; write it like 79.6 GiB"),
        (["--memory", "7.1TiB"], "is more than four times the 79.2 GiB of the card; give the peak of one GPU"),
    ],
)
def test_bad_input_is_one_sentence(run: Any, file: str, arguments: list[str], sentence: str) -> None:
    done = run("doctor", file, *arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_unknown_kind_of_memory_is_refused() -> None:
    with pytest.raises(PlannerError, match="memory is measured as one of device, reserved, allocated, not 'rss'"):
        diagnose(plan("node"), None, 50 * GIB, "rss")


# ------------------------------------------------------------------------------------------------ traces


def traced_dense(tmp_path: Path, change: Any = None) -> tuple[str, Path]:
    """A plan of 8 GPUs whose data parallel traffic is hidden, and the trace of a step with other parts, as ``change`` says."""
    one, times = plan("data"), dict(plan("data").prediction.time_s)
    times |= change(one) if change else {}
    made, at = Made(0, 8), 0.0
    for number in range(4):
        made.step(number, at - 6, 10)
        for name, part in ((GEMM, "compute"), (ADAM, "optimizer")):
            made.kernel(name, at, 1e6 * times[part], launched=0.0)
            at += 1e6 * times[part]
        made.collective("_allgather_base", list(range(8)), at, 1e6 * times["data_communication"], launched=0.0)
        at += 1e6 * (times["data_communication"] + times["overhead"] + times["host"])
    one.save(tmp_path / "plan.yaml")
    return str(tmp_path / "plan.yaml"), made.write(tmp_path / "rank0.json.gz")


def test_a_trace_gives_the_step_and_weighs_mechanisms(run: Any, tmp_path: Path) -> None:
    """All traffic of states exposed: with the trace only what moves that part explains the step."""
    hidden = plan("data").prediction.hidden_s["data"]
    assert hidden > 0.1 * plan("data").prediction.step_time_s
    file, trace = traced_dense(tmp_path, lambda one: {"data_communication": one.prediction.time_s["data_communication"] + hidden})
    done = run("doctor", file, "--trace", str(trace), "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    [found], seen = document["findings"], document["trace"]
    assert found["measured_s"] == pytest.approx(seen["step_time_s"]) and seen["compared"] == "rank 0"
    shares = {one["key"]: one["share"] for one in found["explanations"]}
    said = run("doctor", file, "--measured", f"{found['measured_s']}s", "--json").stdout
    alone = {one["key"]: one["share"] for one in json.loads(said)["findings"][0]["explanations"]}
    assert shares["overlap_data"] > 1.3 * alone["overlap_data"] and shares.get("recompute", 0) < alone.get("recompute", 0)
    assert shares["overlap_data"] == max(shares.values())
    assert seen["sentence"].startswith("Off most: gradient and weight traffic,") and "overlap" in seen["sentence"]
    parts = {one["part"]: one for one in seen["parts"]}
    assert sum(one["predicted_s"] for one in parts.values()) == pytest.approx(plan("data").prediction.step_time_s)
    assert sum(one["measured_s"] or 0 for one in parts.values()) == pytest.approx(seen["step_time_s"], rel=1e-3)


def test_tables_of_a_trace_say_what_json_says(run: Any, tmp_path: Path) -> None:
    file, trace = traced_dense(tmp_path, lambda one: {"overhead": 0.3 * one.prediction.step_time_s})
    words = " ".join(run("doctor", file, "--trace", str(trace), "--measured", "100s").output.split())
    assert "Traced step, rank 0" in words and "mean of 3 by ProfilerStep" in words and "measured 100 s" in words
    assert "Off most: idle: host, launches, fixed overhead" in words and "who is late: data loader" in words
    assert "data all-gather 8 1" in words and "matrix products and attention together" in words


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.write_text("{"), "ends in the middle, after 0 events"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x00garbage"), "cannot be read"),
        (lambda path: training(world=16).write(path), "is of a job of 16 ranks, and the plan is for 8 GPUs"),
        (lambda path: path.mkdir(), "no trace there"),
        (lambda path: path.write_text('[{"ph":"X","cat":"kernel","name":"k","ts":0,"dur":9}]'), "the step time with --measured"),
    ],
    ids=range(5),
)  # fmt: skip
def test_a_bad_trace_is_one_sentence(run: Any, tmp_path: Path, make: Any, sentence: str) -> None:
    plan("node").save(tmp_path / "plan.yaml")
    make(tmp_path / "t.json")
    done = run("doctor", str(tmp_path / "plan.yaml"), "--trace", str(tmp_path / "t.json"))
    assert done.exit_code == 2 and sentence in " ".join(done.stderr.split()) and "Traceback" not in done.output


def test_a_predicted_trace_is_not_taken_for_a_measured_one(run: Any, tmp_path: Path) -> None:
    plan("node").save(tmp_path / "plan.yaml")
    trace = tmp_path / "trace.json"
    assert run("report", str(tmp_path / "plan.yaml"), "--format", "trace", "--output", str(trace)).exit_code == 0
    done = run("doctor", str(tmp_path / "plan.yaml"), "--trace", str(trace))
    assert done.exit_code == 2
    assert "this is the predicted step that 'plan report --format trace' wrote" in " ".join(done.stderr.split())


def test_host_bound_and_another_device_are_said(tmp_path: Path) -> None:
    one = plan("data")
    trace = training(gap=200.0, device="NVIDIA A100-SXM4-80GB").write(tmp_path / "a.json")
    found = plan_comparison(one, read_traces([trace], one.layout))
    notes = " ".join(found.notes)
    assert "rank 0 is host-bound: for 20% of the step" in notes and "it ran on NVIDIA A100-SXM4-80GB, and the plan is for" in notes


@pytest.mark.proof
def test_a_rank_that_all_wait_for_speaks_for_a_slow_gpu(run: Any, tmp_path: Path) -> None:
    """The same steps with and without waits: the weight of one slow GPU rises with them, and falls where all ranks keep pace."""
    one = plan("data")
    one.save(tmp_path / "plan.yaml")
    shares = {}
    for name, late in (("waits", 300.0), ("even", 0.0)):
        folder = tmp_path / name
        folder.mkdir()
        for rank in range(8):
            training(rank, hidden=False, wait=0.0 if rank == 3 else late).write(folder / f"rank{rank}.json.gz")
        measured = f"{1.4 * one.prediction.step_time_s}s"
        done = run("doctor", str(tmp_path / "plan.yaml"), "--trace", str(folder), "--measured", measured, "--json")
        document = json.loads(done.stdout)
        shares[name] = {each["key"]: each["share"] for each in document["findings"][0]["explanations"]}
        assert (document["trace"]["waits_s"]["3"] == pytest.approx(0.0, abs=1e-8)) and len(document["trace"]["waits_s"]) == 8
        assert ("Others wait for rank 3" in document["trace"]["sentence"]) == (name == "waits")
    assert shares["waits"]["slow_gpu"] > 0.5 and shares["even"].get("slow_gpu", 0.0) < 0.05
