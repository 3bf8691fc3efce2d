"""Benchmarks compared with a plan: what was different, and what the host times of an engine are."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from planner.commands.main import main
from planner.errors import PlannerError
from planner.library import dump_yaml
from planner.questions.calibrate.serving_fit import _factors, fit_serving, read_served
from planner.serving.engine import Engine, load_engine
from planner.serving.export.serving_folder import make_export
from planner.serving.measure.bench_files import BenchResult
from planner.serving.measure.plan_comparison import compare_with
from planner.serving.plan_pricing import priced
from planner.serving.serve_plan import FIGURES, LATENCIES, ServePlan
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.traffic import Lengths, Speculation
from tests.serve_samples import sample_plan

PLAN = priced(sample_plan())


# ------------------------------------------------------------------------------------------------ compared with a plan


def as_measured(plan: ServePlan) -> BenchResult:
    """What a run would give that goes exactly as a plan predicts."""
    found = plan.prediction
    assert found is not None
    return BenchResult(
        source="a run", load=(plan.traffic.load, plan.traffic.value), completed=1000,
        latencies={name: {figure: found.latency(name, figure) for figure in FIGURES} for name in LATENCIES},
        rates={"output_tokens_per_second": found.output_tokens_per_second, "requests_per_second": found.requests_per_second},
        lengths=(plan.traffic.input.mean, plan.traffic.output.mean),
    )  # fmt: skip


def test_a_run_as_predicted_needs_no_explanation() -> None:
    found = compare_with(PLAN, as_measured(PLAN))
    assert all(abs(one.error) < 1e-9 for one in found.rows) and not found.causes and not found.notes


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"precision": Precision(weights="bf16")}, "the weights are in 16 bits"),
        ({"layout": replace(PLAN.layout, replicas=1)}, "only one engine gets the requests"),
        ({"layout": replace(PLAN.layout, tp=2)}, "tensor parallelism is half as wide"),
        ({"traffic": replace(PLAN.traffic, prefix_hit=0.95)}, "prompts are found in the prefix cache"),
    ],
)
def test_what_was_different_is_named_first(change: dict[str, Any], cause: str) -> None:
    other = priced(replace(PLAN, **change))
    found = compare_with(PLAN, as_measured(other))
    assert found.causes[0].what == cause and found.causes[0].explains > 0.98
    assert abs(found.rows[0].error) == max(abs(one.error) for one in found.rows) or found.rows[0].error < 0


def test_drafts_that_are_not_accepted_are_named() -> None:
    drafting = priced(replace(PLAN, traffic=replace(PLAN.traffic, speculation=Speculation(depth=3, acceptance=0.8))))
    found = compare_with(drafting, as_measured(PLAN))
    assert found.causes[0].what == "nothing is drafted, or no draft is accepted"


def test_another_load_is_priced_before_it_is_compared() -> None:
    busier = priced(replace(PLAN, traffic=replace(PLAN.traffic, value=128.0, input=Lengths.fixed(2048))))
    found = compare_with(PLAN, as_measured(busier))
    assert all(abs(one.error) < 1e-6 for one in found.rows)
    assert found.notes[0] == "the run had concurrency 128, the plan concurrency 64"
    assert found.notes[1] == "its prompts had 2048 tokens on average, the plan's 1024"


def test_intervals_say_whether_a_run_lies_within() -> None:
    assert PLAN.prediction is not None
    tpot = PLAN.prediction.latency("tpot")
    told = replace(PLAN, prediction=replace(PLAN.prediction, ranges={"tpot": (0.9 * tpot, 1.1 * tpot)}))
    row = next(one for one in compare_with(told, as_measured(PLAN)).rows if one.quantity == "tpot.mean")
    assert row.inside and row.interval == (0.9 * tpot, 1.1 * tpot)


# ------------------------------------------------------------------------------------------------ calibration


SMALL_MODEL = priced(sample_plan("llama-3.1-8b", layout=ServingLayout(tp=4), precision=Precision(weights="fp8")))
"""Whose steps are short, so that the host counts."""


def other_host(factor: float, extra: float) -> Engine:
    """The engine of the plan on another host."""
    engine = load_engine(SMALL_MODEL.engine)
    times = {
        name: value * factor if name in ("step", "sequence", "launch") else value for name, value in engine.host.items()
    }
    return replace(engine, host={**times, "first_token": times["first_token"] + extra})


def benchmarks(folder: Path, engine: Engine, kernels: float = 1.0) -> list[str]:
    """Runs of few and of many requests at once, as they go on another host and GPU: PLAN=FILE."""
    found = []
    for load in (1.0, 2.0, 64.0, 256.0):
        plan = replace(SMALL_MODEL, traffic=replace(SMALL_MODEL.traffic, value=load))
        other = priced(plan, engine)
        run = as_measured(other)
        (folder / "serve.yaml").write_text(dump_yaml(SMALL_MODEL.to_dict()))
        file = folder / f"bench-{load:g}.json"
        tpot = run.latencies["tpot"]["mean"]
        assert other.prediction is not None
        share = other.prediction.step_s["host"] / sum(other.prediction.step_s.values())
        file.write_text(json.dumps({
            "max_concurrency": load, "completed": 1000, "mean_tpot_ms": 1e3 * tpot * (kernels * (1 - share) + share),
            "mean_ttft_ms": 1e3 * run.latencies["ttft"]["mean"],
        }))  # fmt: skip
        found.append(f"{folder / 'serve.yaml'}={file}")
    return found


def test_a_slow_host_is_told_from_its_benchmarks(tmp_path: Path) -> None:
    pairs = [tuple(map(Path, one.split("="))) for one in benchmarks(tmp_path, other_host(2.0, 0.05))]
    found = fit_serving(read_served(pairs))
    assert found.host_range[0] < 2.0 < found.host_range[1] and found.host > 1.4 and found.kernels < 1.1
    assert found.first_token - found.base.host["first_token"] == pytest.approx(0.05, abs=0.015)
    before = sum(abs(math.log(one[2] / one[1])) for one in found.rows)
    assert sum(abs(math.log(one[3] / one[1])) for one in found.rows) < 0.35 * before, (
        "the runs are met better than before"
    )


def test_a_host_as_it_was_priced_stays_and_a_slow_gpu_is_not_taken_for_one(tmp_path: Path) -> None:
    same = fit_serving(
        read_served([tuple(map(Path, one.split("="))) for one in benchmarks(tmp_path, other_host(1.0, 0.0))])
    )
    assert same.host == pytest.approx(1.0, abs=0.01) and same.kernels == pytest.approx(1.0, abs=0.01)
    slow = fit_serving(
        read_served([tuple(map(Path, one.split("="))) for one in benchmarks(tmp_path, other_host(1.0, 0.0), 1.15)])
    )
    assert slow.host_range[0] < 1.0 < slow.host_range[1], "what the runs do not tell stands in the interval"
    host, kernels, doubt = _factors(np.full(4, 0.1), np.full(4, math.log(1.1)))
    assert host > kernels > 1.02 and doubt > 0.4, "runs with the same small share of the host tell it hardly"


def test_the_engine_file_prices_plans_and_is_checked(tmp_path: Path) -> None:
    pairs, out = benchmarks(tmp_path, other_host(2.5, 0.05)), tmp_path / "my-engine.yaml"
    runner = CliRunner()
    words = [word for pair in pairs for word in ("--bench", pair)]
    said = runner.invoke(main, ["calibrate", *words, "--output", str(out)])
    assert said.exit_code == 0 and "host x " in said.output, said.output
    own = load_engine(str(out))
    assert (
        own.name == "vllm" and own.label == str(out) and own.host["step"] > 1.7 * load_engine("vllm@0.33").host["step"]
    )
    plan = priced(replace(SMALL_MODEL, engine=str(out)))
    assert plan.engine_name == "vllm" and plan.prediction is not None and SMALL_MODEL.prediction is not None
    assert plan.prediction.latency("tpot") > SMALL_MODEL.prediction.latency("tpot")
    assert ServePlan.from_dict(plan.to_dict()) == plan
    assert "--tensor-parallel-size" in make_export(plan, "vllm").files["serve.sh"]
    for text, sentence in (
        ("extends: vllm@0.33\nhost: {stop: 1 ms}\n", "unknown key 'stop'"), ("extends: vllm@0.33\nhost: {step: 3}\n", "step"),
        (f"extends: {out}\nhost: {{}}\n", "extend an engine of the library"), ("host: {}\n", "missing key 'extends'"),
        ("extends: tgi\nhost: {}\n", "unknown engine 'tgi'"),
    ):  # fmt: skip
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(PlannerError) as error:
            load_engine(str(tmp_path / "bad.yaml"))
        assert sentence in str(error.value)
    for more, sentence in (
        (words[:2], "one run does not tell"), ([*words, "--hardware", "h100-sxm"], "give no RUNS"),
        (["--bench", "x"], "--bench 'x'"), (["--hardware", "h100-sxm"], "what was"), ([], "which profile"),
    ):  # fmt: skip
        found = runner.invoke(main, ["calibrate", *more, "--output", str(tmp_path / "x.yaml")])
        assert found.exit_code == 2 and sentence in found.output, found.output
    assert not (tmp_path / "x.yaml").exists()
