"""A running server under the load of a plan: what is sent, what is measured, how a run ends; benchmarks of others beside a plan."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice, pairwise
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
from planner.serving.measure.bench_files import BenchResult, bench_of_data, figures, read_bench, result_of, written
from planner.serving.measure.bench_prompts import Form, requests
from planner.serving.measure.beside_plan import compare_with
from planner.serving.measure.load_driver import Drive, Driven, drive
from planner.serving.measure.stream_client import Address, Answer
from planner.serving.plan_pricing import priced
from planner.serving.serve_plan import FIGURES, LATENCIES, ServePlan
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.traffic import Lengths, Speculation, Traffic
from tests.serve_samples import sample_plan
from tests.stand_in_server import StandIn, running

ROOT = Path(__file__).resolve().parent.parent
SMALL = Traffic(input=Lengths.uniform(20, 40), output=Lengths.fixed(6), value=4)


def driven(server: StandIn, traffic: Traffic = SMALL, **asked: Any) -> tuple[Driven, BenchResult]:
    """A run against a stand-in."""
    told = {"count": 12, "warmup": 1, **asked}
    request = Drive(address=Address.of(server.url), traffic=traffic, vocabulary=1000, **told)
    run = drive(request)
    return run, result_of(run, request)


@pytest.mark.parametrize("chunked", [True, False])
def test_known_delays_are_measured(chunked: bool) -> None:
    with running(first=0.03, gap=0.01, chunked=chunked) as server:
        run, found = driven(server)
    assert len(run.done) == 12 and not run.stopped and server.most == 4, "never more in flight than asked for"
    assert all(one.output_tokens == 6 and len(one.gaps) == 5 and 20 <= one.input_tokens <= 40 for one in run.done)
    for one in run.done:
        assert one.ttft >= 0.03 and one.latency >= 0.03 + 5 * 0.01, "a late look shortens the gap behind it, never the whole"
        assert one.latency == pytest.approx(one.ttft + sum(one.gaps))
        assert one.tpot == pytest.approx(sum(one.gaps) / 5), "the first token is left out"
    assert found.latencies["e2e"]["mean"] >= 0.03 + 5 * 0.01
    assert found.rates["output_tokens_per_second"] == pytest.approx(6 * found.rates["requests_per_second"])
    concurrency = found.rates["requests_per_second"] * found.latencies["e2e"]["mean"]
    assert 0 < concurrency <= 4.0, "Little's law: no more in flight than asked for"


def test_prompts_are_drawn_as_the_plan_says() -> None:
    form = Form(model="m", path="/v1/completions", tokens=True, ignore_eos=True)
    traffic = Traffic(input=Lengths.uniform(100, 300), output=Lengths.uniform(10, 20), prefix_hit=0.25)
    some = list(islice(requests(form, traffic, 32000), 200))
    sizes = [len(one.body["prompt"]) for one in some]
    assert min(sizes) >= 99 and max(sizes) <= 301 and 180 < sum(sizes) / 200 < 220
    assert all(10 <= one.output <= 20 == 20 and one.body["max_tokens"] == one.output for one in some)
    assert len({tuple(one.body["prompt"][:50]) for one in some}) == 1, "a quarter of the mean prompt is shared"
    assert len({tuple(one.body["prompt"][50:60]) for one in some}) == 200
    assert all(1000 <= token < 31000 for one in some for token in one.body["prompt"]), "no special tokens"


@pytest.mark.parametrize("refused", [{"chat_only": True}, {"refuses_tokens": True}, {"refuses_ignore_eos": True}])
def test_the_form_that_a_server_takes_is_found(refused: dict[str, bool]) -> None:
    with running(per_word=3, **refused) as server:
        run, found = driven(server)
        body = server.bodies[-1]
    assert run.form.path == ("/v1/chat/completions" if "chat_only" in refused else "/v1/completions")
    assert ("ignore_eos" in body) == ("refuses_ignore_eos" not in refused)
    assert found.lengths is not None and 20 - 3 <= found.lengths[0] <= 40 + 3, (
        "prompts in words have the tokens that were asked for"
    )


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with running(first=0.3) as server:
        run, found = driven(server, replace(SMALL, load="rate", value=100.0), count=20, warmup=0)
        assert server.most > 8, "arrivals go on while nothing is answered"
    assert len(run.done) == 20 and found.load == ("rate", 100.0)
    starts = sorted(one.started for one in run.done)
    assert len({round(b - a, 4) for a, b in pairwise(starts)}) > 5, "Poisson: the gaps differ"


def test_offline_sends_all_at_once() -> None:
    with running(first=0.2) as server:
        run, _ = driven(server, replace(SMALL, load="offline", value=16.0), count=None, warmup=0)
        assert server.most == 16 == len(run.done)


def test_the_limit_ends_a_run_and_keeps_what_was_measured() -> None:
    with running(first=0.05, gap=0.01) as server:
        run, found = driven(server, count=10000, limit=1.0)
    assert run.stopped == "the limit of 1 s" and 0 < len(run.done) < 10000
    assert found.completed == len(run.done) and found.rates["requests_per_second"] > 0


def test_ctrl_c_ends_a_run_and_writes_what_was_measured(tmp_path: Path) -> None:
    sample_plan(traffic=SMALL).save(tmp_path / "serve.yaml")
    out = tmp_path / "bench.json"
    with running(first=0.02, gap=0.002) as server:
        command = [
            "validate",
            str(tmp_path / "serve.yaml"),
            "--url",
            server.url,
            "--requests",
            "100000",
            "--output",
            str(out),
        ]
        child = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        end = time.monotonic() + 30
        while len(server.bodies) < 12 and time.monotonic() < end:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        printed, said = child.communicate(timeout=30)
    assert child.returncode == 1 and "Traceback" not in said, said
    data = json.loads(out.read_text())
    assert data["stopped"] == "Ctrl-C" and 0 < data["completed"] < 100000 and data["mean_ttft_ms"] >= 20
    assert "Stopped before its end: Ctrl-C" in printed


BROKEN = [
    ({"breaks": "junk"}, "no answer in HTTP"),
    ({"breaks": "silent"}, "the answer held no tokens"),
    ({"breaks": "bad"}, "JSONDecodeError"),
    ({"breaks": "endless"}, "an event of more than"),
    ({"fail_after": 0}, "HTTP 500"),
]


@pytest.mark.parametrize(("kinds", "sentence"), BROKEN, ids=[sentence for _, sentence in BROKEN])
def test_a_server_that_does_not_answer_is_a_sentence(kinds: dict[str, Any], sentence: str) -> None:
    with running(**kinds) as server, pytest.raises(PlannerError) as error:
        driven(server)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_failures_on_the_way_are_counted_and_many_in_a_row_end_the_run() -> None:
    with running(fail_after=10) as server:
        run, found = driven(server, count=500)
    assert 0 < len(run.done) < 10 and found.failed >= 20
    assert run.stopped.startswith("20 requests in a row failed (HTTP 500")
    with running(breaks="cut") as server:
        _, found = driven(server, replace(SMALL, output=Lengths.fixed(4), value=1), count=4)
    assert (found.completed, found.failed) == (1, 3), "a stream that ends before its end is no answer"


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "http://a:99999", "http://a b", "http://a\r\nX: y", "", "http://[::1"]
)
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(PlannerError, match=r"--url"):
        Address.of(url)
    assert str(Address.of("localhost:8000/v1/")) == "http://localhost:8000"
    assert str(Address.of("https://host/api/v1")) == "https://host:443/api"


def test_nobody_listens() -> None:
    with pytest.raises(PlannerError, match="is it running, and ready?"):
        drive(Drive(address=Address.of("http://127.0.0.1:9"), traffic=SMALL, vocabulary=1000))


# ------------------------------------------------------------------------------------------------ files of benchmarks


def test_percentiles_are_those_of_numpy_and_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    assert figures([1.0, 2.0, 3.0, 4.0]) == {
        "mean": 2.5,
        "p50": 2.5,
        "p90": pytest.approx(3.7),
        "p99": pytest.approx(3.97),
    }
    answers = [
        Answer(ttft=0.1 * n, latency=0.1 * n + 0.9, gaps=[0.1] * 9, input_tokens=100, output_tokens=10, started=float(n))
        for n in (1, 2, 3)
    ]  # fmt: skip
    run = Driven(
        form=Form(model="m", path="/v1/completions", tokens=True, ignore_eos=True),
        answers=answers,
        asked=3,
        duration=2.0,
    )
    asked = Drive(address=Address.of("h"), traffic=replace(SMALL, value=3), vocabulary=10)
    found = result_of(run, asked)
    assert found.latencies["ttft"]["mean"] == pytest.approx(0.2) and found.latencies["tpot"]["p50"] == pytest.approx(
        0.1
    )
    assert found.rates == {
        "requests_per_second": 1.5,
        "output_tokens_per_second": 15.0,
        "total_tokens_per_second": 165.0,
    }
    path = tmp_path / "bench.json"
    path.write_text(written(found, run, asked, sample_plan()))
    back = read_bench(path, 8)
    for name in LATENCIES:
        assert back.latencies[name] == {figure: pytest.approx(found.latencies[name][figure]) for figure in FIGURES}
    assert back.rates == found.rates and back.load == ("concurrency", 3.0) and back.lengths == (100.0, 10.0)


VLLM = {
    "backend": "openai", "max_concurrency": 64, "request_rate": "inf", "completed": 640, "total_input_tokens": 655360,
    "total_output_tokens": 163840, "request_throughput": 5.0, "output_throughput": 1280.0, "total_token_throughput": 6400.0,
    "mean_ttft_ms": 200.0, "median_ttft_ms": 150.0, "p99_ttft_ms": 900.0, "mean_tpot_ms": 25.0, "median_tpot_ms": 24.0,
    "mean_e2el_ms": 6500.0, "failed": 2,
}  # fmt: skip
SGLANG = {**VLLM, "total_throughput": 6400.0, "mean_e2e_latency_ms": 6500.0, "p90_ttft_ms": 500.0}
INFERENCEX = {
    "hw": "h200", "conc": 64, "isl": 1024, "osl": 256, "tput_per_gpu": 800.0, "output_tput_per_gpu": 160.0,
    "mean_ttft": 0.2, "p99_ttft": 0.9,    "mean_tpot": 0.025, "mean_e2el": 6.5,
}  # fmt: skip


def test_results_of_vllm_sglang_and_inferencex_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(VLLM))
    one = read_bench(path, 8)
    assert one.latencies["ttft"] == {"mean": 0.2, "p50": 0.15, "p99": 0.9} and one.latencies["e2e"]["mean"] == 6.5
    assert (one.load, one.lengths, one.failed) == (("concurrency", 64.0), (1024.0, 256.0), 2)
    path.write_text(json.dumps({"mean_ttft_ms": 9}) + "\n" + json.dumps(SGLANG) + "\n")
    last = read_bench(path, 8)
    assert last.latencies["ttft"]["p90"] == 0.5 and last.latencies["e2e"]["mean"] == 6.5, "the last line counts"
    path.write_text(json.dumps([INFERENCEX]))
    record = read_bench(path, 8)
    assert record.latencies["tpot"] == {"mean": 0.025} and record.rates["output_tokens_per_second"] == 8 * 160.0
    assert record.lengths == (1024.0, 256.0) and record.load == ("concurrency", 64.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not JSON"), ("{", "not JSON"), ("[]", "expected the result of one benchmark"),
        ("{}", "no result of a benchmark was found"),
        ('{"mean_ttft_ms": "fast"}', "mean_ttft_ms is 'fast'"), ('{"mean_ttft_ms": -1}', "mean_ttft_ms is -1"),
        ('{"mean_ttft_ms": 1e99}', "mean_ttft_ms is 1e+99"), ('{"mean_ttft_ms": true}', "mean_ttft_ms is True"),
        ('{"a": 1, "a": 2}', "given twice"), ("[" * 1000, "JSON"), ("NaN", "expected the result"),
    ],
)  # fmt: skip
def test_damaged_results_are_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(PlannerError) as error:
        read_bench(tmp_path / "a.json", 8)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_random_results_are_read_or_refused() -> None:
    draws = random.Random(26)
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        10**30,
        1e308,
        float("nan"),
        float("inf"),
        "x",
        "1.5",
        "1.2.3",
        [],
        {},
        [None, "a", 3],
        0.5,
        64,
    ]
    names = [*VLLM, *INFERENCEX, "ttfts", "latencies", "errors", "conc", "num_gpus", "stopped"]
    for _ in range(150):
        data = {name: draws.choice(values) for name in draws.sample(names, draws.randint(1, 12))}
        try:
            found = bench_of_data(data, "x", 8)
            compare_with(PLAN, found, causes=False)
        except PlannerError as error:
            assert str(error)


# ------------------------------------------------------------------------------------------------ beside a plan

PLAN = priced(sample_plan())


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


def test_the_commands(tmp_path: Path) -> None:
    plan, bench = tmp_path / "serve.yaml", tmp_path / "bench.json"
    PLAN.save(plan)
    bench.write_text(json.dumps(VLLM))
    runner = CliRunner()
    said = runner.invoke(main, ["doctor", str(plan), "--measured", str(bench)])
    assert said.exit_code == 0 and "Largest deviation" in said.output and "time per output token, mean" in said.output
    data = json.loads(runner.invoke(main, ["doctor", str(plan), "--measured", str(bench), "--json"]).output)
    assert data["quantities"]["tpot.mean"]["measured"] == 0.025
    for words, sentence in (
        (["doctor", str(plan)], "give --measured with the JSON of a benchmark"),
        (["doctor", str(plan), "--measured", "14s"], "14s"),
        (["validate", str(plan)], "say where its server runs"),
        (["validate", str(plan), "--url", "http://127.0.0.1:9", "--limit", "ten"], "--limit"),
        (
            ["validate", str(plan), "--url", "http://127.0.0.1:9", "--output", "/nowhere/x.json"],
            "there is no directory",
        ),
    ):
        found = runner.invoke(main, words)
        assert found.exit_code == 2 and sentence in found.output, found.output
    with running() as server:
        said = runner.invoke(
            main, ["validate", str(plan), "--url", server.url, "--requests", "8", "--output", str(bench), "--json"]
        )
    assert said.exit_code == 0, said.output
    assert json.loads(bench.read_text())["completed"] == 8


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
