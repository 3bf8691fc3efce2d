"""plan calibrate: factors that runs determine are found, the others stay, what is written is what was fitted."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_traces import GEMM, Made

from planner import api, library
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.explicit import explicit_plan
from planner.hardware import SCALES, HardwareProfile, load_hardware
from planner.questions.accuracy.prediction import predict
from planner.questions.calibrate.factors import FACTORS, achieved, highest, log_errors, usable, with_factors
from planner.questions.calibrate.numbers import Calibration, calibrate
from planner.questions.calibrate.output import profile_text, write
from planner.questions.calibrate.sources import read_measured
from planner.questions.calibrate.traced_runs import read_traced
from planner.runs import Run, read_runs
from planner.timeline.priced_plan import estimate_of, job_of
from planner.trainer import Trainer, load_trainer
from tests.calibration_samples import HARDWARE, TRAINER, measured, run, sweep

BASE = HARDWARE
TRUTH = {"sustained_clock": 0.9, "scale_out": 0.6, "host_time": 3.0, "fragmentation": 2.5}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return measured(sweep(), TRUTH, kind="reserved")


@pytest.fixture(scope="module")
def found(runs: list[Run]) -> Calibration:
    return calibrate(runs, BASE, TRAINER)


# ------------------------------------------------------------------------------------------------ profiles that extend


def written(path: Path, **data: object) -> str:
    path.write_text(yaml.safe_dump({"extends": "h100-sxm", **data}))
    return str(path)


def test_a_profile_extends_another(tmp_path):
    mine = load_hardware(written(
        tmp_path / "mine.yaml", name="mine", network_bandwidth="200 Gb/s",
        scale={"sustained_clock": 0.9, "memory_fraction": 0.8, "scale_up": 0.5, "scale_out": 0.7, "network_latency": 2},
        calibration={"base": "h100-sxm"},
    ))  # fmt: skip
    assert (mine.name, mine.device, mine.peak_flops) == ("mine", BASE.device, BASE.peak_flops)
    assert mine.sustained_clock == pytest.approx(0.9 * BASE.sustained_clock)
    assert mine.memory_fraction["copy"] == pytest.approx(0.8 * BASE.memory_fraction["copy"])
    assert mine.network_bandwidth == BASE.network_bandwidth / 2 and mine.network_latency == 2 * BASE.network_latency
    assert mine.sources["calibration"] == {"base": "h100-sxm"}
    large = 2.0**33
    assert mine.scale_up_time("all_reduce", large, 8) == pytest.approx(
        2 * BASE.scale_up_time("all_reduce", large, 8), rel=0.01
    )
    assert mine.scale_out_time("all_gather", large, 64, 8) == pytest.approx(
        BASE.scaled(network_bandwidth=0.7 / 2).scale_out_time("all_gather", large, 64, 8), rel=0.01
    )
    assert mine.scale_out_time("all_reduce", 8, 64, 8) == pytest.approx(2 * BASE.scale_out_time("all_reduce", 8, 64, 8))
    again = load_hardware(
        written(tmp_path / "again.yaml", extends=str(tmp_path / "mine.yaml"), scale={"scale_out": 0.5})
    )
    assert again.scale_out["all_reduce"].bulk.efficiency == pytest.approx(
        0.35 * BASE.scale_out["all_reduce"].bulk.efficiency
    )
    assert HardwareProfile.from_dict(mine.to_dict()).sustained_clock == mine.sustained_clock


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"scale": {"sustained_clock": 1.3}}, "sustained_clock is 1.06, faster than a short burst; at most 1"),
        ({"scale": {"memory_fraction": 1.5}}, "faster than the memory"),
        ({"scale": {"scale_out": 1.5}}, "of the line rate of the NICs; at most 1"),
        ({"scale": {"scale_up": 4}}, "above the link of"),
        ({"scale": {"sustained_clocks": 1}}, "scale: unknown key 'sustained_clocks'; nearest: sustained_clock"),
        ({"scale": {"scale_out": 0}}, "scale scale_out is 0; it must be a number above 0"),
        ({"scale": {"scale_out": "fast"}}, "scale scale_out is 'fast'; it must be a number above 0"),
        ({"scale": 3}, "expected a mapping"),
        ({"extends": "h1000"}, "unknown hardware 'h1000'"),
        ({"extends": 7}, "must name one profile"),
        ({"netwrk": 1}, "unknown key 'netwrk'"),
    ],
)
def test_what_is_not_physical_gets_a_sentence(data, sentence, tmp_path):
    with pytest.raises(PlannerError, match=sentence):
        load_hardware(written(tmp_path / "mine.yaml", **data))


def test_a_circle_of_profiles_gets_a_sentence(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    written(one, extends=str(two))
    written(two, extends=str(one))
    with pytest.raises(PlannerError, match="at most four levels deep"):
        load_hardware(str(one))


@pytest.mark.parametrize("name", library.names("hardware"))
def test_the_highest_factors_are_physical(name, tmp_path):
    """What the fit may reach, a file may hold; a little more in the clock or the shares it may not."""
    hardware = load_hardware(name)
    for factor in FACTORS:
        if factor.of == "hardware":
            top = highest(factor, hardware, TRAINER)
            load_hardware(written(tmp_path / f"{factor.key}.yaml", extends=name, scale={factor.key: top * 0.9999}))
            assert factor.key in SCALES


# ------------------------------------------------------------------------------------------------ the fit


@pytest.mark.proof
def test_known_factors_are_found(found: Calibration):
    assert set(found.values) == set(TRUTH)
    for one in found.moved:
        truth = TRUTH[one.factor.key]
        assert one.value == pytest.approx(truth, rel=0.02), one.factor.name
        assert one.low < truth < one.high, one.factor.name
    assert found.values["sustained_clock"] * BASE.sustained_clock == pytest.approx(
        next(one.after for one in found.moved if one.factor.key == "sustained_clock")
    )


def test_all_other_factors_stay_with_a_reason(found: Calibration):
    assert set(found.kept) == {one.key for one in FACTORS} - set(TRUTH)
    for key, reason in found.kept.items():
        assert len(reason) > 20, key


def test_held_back_runs_are_predicted_better(found: Calibration):
    for fits in ("time", "memory"):
        errors = found.medians(fits)
        assert errors is not None
        assert errors["held_out"] < 0.02 < errors["before"] and errors["after"] <= errors["held_out"] * 1.01


@pytest.mark.proof
def test_noise_moves_nothing():
    found = calibrate(measured(sweep()[:9], {}, noise=0.03), BASE, TRAINER)
    assert found.values == {}
    errors = found.medians("time")
    assert errors is not None and errors["before"] == errors["after"] == errors["held_out"]


def test_what_runs_do_not_use_is_named():
    some = [run(f"{tp}", "llama-3.1-8b", 8, 8192, tp=tp, num_microbatches=16) for tp in (1, 2, 4)]
    found = calibrate(measured(some, {"sustained_clock": 0.85}), BASE, TRAINER)
    reasons = found.kept
    assert reasons["scale_out"] == reasons["network_latency"] == "none of your runs crosses a node"
    assert reasons["fragmentation"] == "none of your runs reports reserved or device memory"
    assert reasons["host_time"].startswith("none of your runs waits for the host: 10 % of it moves no predicted time")
    assert found.values["sustained_clock"] == pytest.approx(0.85, rel=0.05)


def test_what_two_factors_explain_alike_moves_neither():
    """One layout three times: host work and the overhead of a step would explain it alike."""
    alike = [run(f"again-{n}", "gpt3-350m", 8, 512, tp=8, num_microbatches=1) for n in range(3)]
    found = calibrate(measured(alike, {"host_time": 4.0}), BASE, TRAINER)
    reasons = found.kept
    assert "it and host time per kernel move together: their correlation is" in reasons["step_overhead"]
    assert reasons["host_time"].startswith("none of your runs waits for the host")
    assert found.values == {}


def test_factors_that_move_together_stay():
    """One layout three times: slower links and longer latencies would explain it alike."""
    alike = [
        run(f"again-{n}", "llama-3.1-8b", 16, 4096, tp=16, num_microbatches=64, micro_batch_size=8) for n in range(3)
    ]
    found = calibrate(measured(alike, {"network_latency": 2.5}), BASE, TRAINER)
    reasons = found.kept
    assert "latency across nodes move together: their correlation is 0." in reasons["scale_up"]
    assert "it would take runs with tensor parallelism" in reasons["scale_up"]


def test_trainers_are_not_mixed(runs: list[Run]):
    found = calibrate(runs[:4], BASE, None)
    reasons = found.kept
    assert "several trainers" in reasons["host_time"] and "several trainers" in reasons["fragmentation"]


def test_too_few_runs_get_a_sentence(runs: list[Run]):
    with pytest.raises(PlannerError, match="at least 3 runs with a step time.*2 of your 2 can be used"):
        calibrate(runs[:2], BASE, TRAINER)


def test_a_factor_changes_what_it_says():
    for factor in FACTORS:
        hardware, trainer = achieved(BASE, TRAINER, {factor.key: 0.5})
        assert (hardware is BASE) == (factor.of == "trainer") and (trainer is TRAINER) == (factor.of == "hardware")
        if factor.of == "trainer":
            assert trainer.fact(factor.key) == 0.5 * TRAINER.fact(factor.key)


# ------------------------------------------------------------------------------------------------ what is written


def on(runs: list[Run], hardware: HardwareProfile, trainer: Trainer) -> list[float]:
    import dataclasses

    moved = [
        dataclasses.replace(
            one,
            trainer=trainer,
            cluster=Cluster(hardware=hardware, num_gpus=one.cluster.num_gpus if one.cluster else 1),
        )
        for one in runs
    ]
    return [answer.step_time or math.nan for answer in predict(moved)]


def test_the_files_give_the_fitted_predictions(found: Calibration, runs: list[Run], tmp_path):
    paths = write(found, "h100-sxm", TRAINER, tmp_path / "mine.yaml")
    assert [path.name for path in paths] == ["mine.yaml", "mine.trainer.yaml"]
    hardware, trainer = load_hardware(str(paths[0])), load_trainer(str(paths[1]))
    fitted = [answer.step_time for answer in predict(with_factors(runs, found.values))]
    assert on(runs, hardware, trainer) == pytest.approx(fitted, rel=2e-3)
    assert trainer.stored.fragmentation == pytest.approx(
        TRAINER.stored.fragmentation * found.values["fragmentation"], rel=1e-3
    )
    source = hardware.sources["calibration"]
    assert source["base"] == "h100-sxm" and source["runs"] == {"sample": [one.id for one in runs]}
    assert source["factors"]["sustained_clock"]["was"] == BASE.sustained_clock
    low, high = source["factors"]["scale_out"]["interval_90"]
    assert low < source["factors"]["scale_out"]["times"] < high
    assert set(source["kept_at_1"]) == set(found.kept)
    assert source["median_error"]["time"]["held_out"] < source["median_error"]["time"]["before"]


def test_nothing_is_written_where_it_cannot_be(found: Calibration, tmp_path):
    with pytest.raises(PlannerError, match="a profile is a .yaml file"):
        write(found, "h100-sxm", TRAINER, tmp_path / "mine")
    with pytest.raises(PlannerError, match="cannot be written"):
        write(found, "h100-sxm", TRAINER, tmp_path / "nowhere" / "mine.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_users_own_base_is_named_by_its_whole_path(found: Calibration, tmp_path):
    base = written(tmp_path / "base.yaml", name="base", network_bandwidth="200 Gb/s")
    text = profile_text(found, base, tmp_path / "mine.yaml")
    assert yaml.safe_load(text)["extends"] == str((tmp_path / "base.yaml").resolve())


# ------------------------------------------------------------------------------------------------ the command

LLAMA = {
    "name": "llama3-8b", "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True,
    "vocab": 128256, "seq": 8192, "tied_embeddings": False, "attention": "gqa", "params_b": 8.03,
}  # fmt: skip


def table(path: Path, factors: dict[str, float], gpu: str = "H100-80GB-SXM") -> Path:
    """A file of runs whose times are the model's own under known factors."""
    rows = [
        {
            "id": f"g{gpus}-tp{tp}-m{steps}", "model": LLAMA,
            "parallel": {"gpus": gpus, "tp": tp, "pp": 1, "dp": gpus // tp, "cp": 1, "ep": 1, "vpp": 1, "zero": 1},
            "batch": {"micro": 1, "global": gpus // tp * steps}, "recompute": "none", "measured": {"step_s": 1.0},
        }
        for gpus, tp, steps in ((8, 1, 8), (8, 2, 8), (8, 4, 16), (8, 8, 16), (16, 1, 1), (64, 1, 1), (64, 2, 1))
    ]  # fmt: skip
    data = {
        "source": {"id": "mine"}, "hardware": {"gpu": gpu, "gpus_per_node": 8}, "framework": "megatron-lm core",
        "defaults": {"precision": "bf16"}, "rows": rows,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    for row, answer in zip(rows, predict(with_factors(read_runs([path]), factors)), strict=True):
        row["measured"] = {"step_s": answer.step_time}
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def test_the_command_writes_a_profile_that_plan_uses(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "mine.yaml", {"sustained_clock": 0.85})
    result = run("calibrate", "mine.yaml", "--hardware", "h100-sxm", "--output", "cluster.yaml")
    assert result.exit_code == 0, result.output
    assert "sustained clock" in result.output and "runs held back" in result.output
    assert "use it with --hardware cluster.yaml" in result.output
    hardware = load_hardware("./cluster.yaml")
    assert hardware.sustained_clock == pytest.approx(0.85 * BASE.sustained_clock, rel=0.02)
    job = ("--model", "llama-8b", "--gpus", "8", "--tp", "2", "--json")
    slow, fast = (
        json.loads(run("estimate", *job, "--hardware", name).output)["estimate"]["step_time_s"]
        for name in ("cluster.yaml", "h100-sxm")
    )
    assert 1.08 < slow / fast < 1.18
    again = run("calibrate", "mine.yaml", "--hardware", "cluster.yaml", "--output", "twice.yaml", "--json")
    assert again.exit_code == 0, again.output
    document = json.loads(again.stdout)
    assert document["factors"] == {} and document["base"] == "cluster.yaml" and document["files"] == ["twice.yaml"]
    assert {one["id"] for one in document["errors"]} == {one.id for one in read_runs(["mine.yaml"])}
    assert load_hardware("./twice.yaml").sustained_clock == hardware.sustained_clock


def test_the_command_says_what_is_wrong(run, tmp_path):
    other = table(tmp_path / "a100.yaml", {}, gpu="A100-SXM4-80GB")
    result = run("calibrate", str(other), "--hardware", "h100-sxm", "--output", str(tmp_path / "x.yaml"))
    assert result.exit_code == 2 and "ran on A100-SXM4-80GB (Ampere), but --hardware h100-sxm" in result.output
    result = run("calibrate", str(other), "--output", str(tmp_path / "x.yaml"))
    assert result.exit_code == 2 and "--hardware" in result.output
    result = run("calibrate", str(tmp_path / "none.log"), "--hardware", "h100-sxm", "--output", "x.yaml")
    assert result.exit_code == 2 and "does not exist" in result.output
    assert not (tmp_path / "x.yaml").exists()


def test_the_trainer_can_be_named(tmp_path):
    path = table(tmp_path / "mine.yaml", {})
    own = load_trainer("nemo")
    assert all(one.trainer is own for one in read_measured([path], "h100-sxm", trainer=own))


# ------------------------------------------------------------------------------------------------ traces


def traced_plan(tmp_path: Path, name: str, *, gap: float = 0.0, device: str = "NVIDIA H100 80GB HBM3", **said: Any) -> str:
    """A plan, and the trace of its step on GPUs of 0.8 of the clock, as PLAN=TRACE: a kernel of the whole step, and a gap."""
    layout = {key: said.pop(key) for key in ("tp", "zero") if key in said}
    job = {"model": "llama-8b", "num_gpus": 8, "hardware": "h100-sxm", "trainer": "megatron", "global_batch_size": 64, **said}
    one = explicit_plan(None, layout, job)
    slow = job_of(one)
    cluster = dataclasses.replace(slow.cluster, hardware=slow.cluster.hardware.achieving(sustained_clock=0.8))
    step = 1e6 * float(estimate_of(dataclasses.replace(slow, cluster=cluster), one.layout).step_time[0])
    made = Made(0, 8, device)
    for number in range(4):
        made.step(number, number * step * (1 + gap) - 6, 10)
        made.kernel(GEMM, number * step * (1 + gap), step)
        made.collective("_allgather_base", list(range(8)), number * step * (1 + gap) + 10, 100.0)
    one.save(tmp_path / f"{name}.yaml")
    return f"{tmp_path / name}.yaml={made.write(tmp_path / f'{name}.json.gz')}"


def test_traces_are_runs_and_host_bound_ones_are_not(tmp_path: Path) -> None:
    traces = [traced_plan(tmp_path, "job", tp=2, zero=1), traced_plan(tmp_path, "slow", gap=0.3, tp=2, sequence_length=16384)]
    good, bound = read_traced([tuple(one.split("=")) for one in traces], "h100-sxm")
    assert good.run.of_plan and not good.run.unsupported and usable([good.run, bound.run], "time") == [good.run]
    slow = with_factors([good.run], {"sustained_clock": 0.8})
    assert abs(log_errors(slow, "time")[0]) < 1e-4 < 0.1 < abs(log_errors([good.run], "time")[0])
    assert "rank 0 is host-bound: for 23% of the step" in bound.run.unsupported
    [row] = good.to_dict()["collectives"] or [None]
    assert row is None, "it ran under a matrix product"


@pytest.mark.proof
def test_a_clock_is_found_from_traces(tmp_path: Path) -> None:
    jobs = [{"tp": 1, "zero": 1}, {"tp": 2, "zero": 1}, {"tp": 4, "zero": 1}, {"tp": 2, "zero": 1, "sequence_length": 2048}]
    traces = [traced_plan(tmp_path, f"job{n}", **one) for n, one in enumerate(jobs)]
    traces.append(traced_plan(tmp_path, "slow", gap=0.3, tp=2, sequence_length=16384))
    pairs = [tuple(one.split("=")) for one in traces]
    answer = api.calibrate([], hardware="h100-sxm", output=tmp_path / "mine.yaml", traces=pairs)
    document = answer.to_dict()
    assert document["factors"]["sustained_clock"]["times"] == pytest.approx(0.8, rel=0.02)
    assert len(document["errors"]) == 4 and {row["source"] for row in document["errors"]} == {"trace"}
    seen = {one["id"]: one for one in document["traces"]}
    assert seen["job0-1"]["left_out"] is None and seen["slow-5"]["left_out"].startswith("rank 0 is host-bound")
    assert "trace/slow-5 is left out: rank 0 is host-bound" in " ".join(str(answer).split())


def test_a_trace_that_says_nothing_about_the_hardware_is_named(run: Any, tmp_path: Path) -> None:
    other = traced_plan(tmp_path, "other", device="NVIDIA A100-SXM4-80GB")
    rest = ["--hardware", "h100-sxm", "--output", str(tmp_path / "x.yaml")]
    for flags, sentence in (
        (["--trace", other], "trace/other-1 is left out: it ran on NVIDIA A100-SXM4-80GB, and the plan is for"),
        (["--trace", "rank0.json"], "--trace 'rank0.json': write it like plan.yaml=rank0.json.gz"),
        (["--trace", "gone.yaml=rank0.json"], "gone.yaml: cannot be read"),
        ([], "give RUNS, or --trace PLAN=FILE"),
    ):
        done = run("calibrate", *flags, *rest)
        assert done.exit_code == 2 and sentence in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "x.yaml").exists()
