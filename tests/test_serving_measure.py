"""A running server under the load of a plan: what is sent, what is measured, how a run ends; files of benchmarks."""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.commands.main import main
from planner.errors import PlannerError
from planner.serving.measure import bench_prompts
from planner.serving.measure.bench_files import BenchResult, bench_of_data, figures, read_bench, result_of, written
from planner.serving.measure.bench_prompts import Form, requests
from planner.serving.measure.load_driver import Drive, Driven, drive
from planner.serving.measure.plan_comparison import compare_with
from planner.serving.measure.stream_client import Address, Answer
from planner.serving.plan_pricing import priced
from planner.serving.serve_plan import FIGURES, LATENCIES
from planner.serving.traffic import Lengths, Traffic
from tests.serve_samples import sample_plan
from tests.stand_in_server import StandIn, running

ROOT = Path(__file__).resolve().parent.parent
PLAN = priced(sample_plan())
SMALL = Traffic(input=Lengths.uniform(20, 40), output=Lengths.fixed(6), value=4)


def driven(server: StandIn, traffic: Traffic = SMALL, **asked: Any) -> tuple[Driven, BenchResult]:
    """A run against a stand-in."""
    told = {"count": 12, "warmup": 1, **asked}
    request = Drive(address=Address.of(server.url), traffic=traffic, vocabulary=1000, **told)
    run = drive(request)
    return run, result_of(run, request)


# ------------------------------------------------------------------------------------------------ a server under load


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


@pytest.mark.parametrize("model", [None, "stand-in"])
def test_a_server_that_is_not_ready_yet_is_waited_for(model: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router listens before its engines are known to it: with a model's name the first 503 is that of the probe."""
    with running(not_ready=2) as server:
        run, _ = driven(server, model=model)
    assert len(run.done) == 12
    monkeypatch.setattr(bench_prompts, "READY_WITHIN", 0.1)
    with running(not_ready=100) as server, pytest.raises(PlannerError, match="503: .*No models available"):
        driven(server, model=model)


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
        ('{"a": 1, "a": 2}', "given twice"), ("[" * 1000, "nested deeper"), ("NaN", "expected the result"),
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


# ------------------------------------------------------------------------------------------------ the commands


@pytest.mark.proof
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
