"""The search of serving: it finds what pricing everything finds, ranks what starts first, and its numbers are one."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

import planner
from planner.errors import PlannerError
from planner.questions.serve.show import number, time
from planner.serving.candidates import at_loads
from planner.serving.priced_table import OBJECTIVES, joined
from planner.serving.serve_plan import ServePlan, load_serve_plan
from planner.serving.serving_answer import Answered, answer
from planner.serving.serving_estimate import estimate, running_at_most
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_search import FINALISTS, SEVERAL, chosen, front, front_of, priced, ranked, splits, value_of

SMALL: dict[str, Any] = {
    "model": "llama-8b",
    "gpus": 2,
    "hardware": "h100-sxm",
    "engine": "vllm",
    "input": 1024,
    "output": 128,
}


def asked(**more: Any) -> Question:
    return ask(ServeRequest(**{**SMALL, **more}))


@cache
def answered(**more: Any) -> Answered:
    return answer(asked(**more))


def best_of(question: Question, objective: str = "offline") -> Any:
    table = joined([priced(one, question.task) for one in question.served()])
    rows = ranked(table, question.task, objective, 1)
    return chosen(table, question.task, rows)[0] if len(rows) else None


# ------------------------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("more", [{}, {"engine": "sglang"}, {"tpot": "12ms"}])
def test_one_objective_alone_finds_the_best_of_all_objectives(more: dict[str, Any]) -> None:
    question = asked(model="mixtral-8x7b", gpus=8, **more)
    for one in question.served():
        whole, alone = priced(one, question.task), priced(one, question.task, alone="offline")
        first, second = (chosen(table, question.task, ranked(table, question.task, "offline", 1))[0] for table in (whole, alone))
        assert (first.layout, first.traffic, first.total) == (second.layout, second.traffic, pytest.approx(second.total))
        assert 0 < len(alone) < len(whole)


def test_rounding_puts_no_row_on_the_front() -> None:
    """Found as 0.0882451424759965 s with fewer prompts/s beside 0.08824514247599653 s with more."""
    speed, total = 1.0 / np.array([0.0882451424759965, 0.08824514247599653, 0.12]), np.array([9.41, 9.63, 9.63 * (1.0 + 1e-15)])
    assert front_of(speed, total).tolist() == [1]


def test_ranked_rows_are_the_best_of_each_deployment() -> None:
    """However many loads of one deployment stand before the next."""
    question = asked(gpus=4)
    table = joined([priced(one, question.task) for one in question.served()])
    table = table.take(np.repeat(np.arange(len(table)), 3))
    worth = value_of(table, question.task, "offline")
    order = np.lexsort((np.broadcast_to(table.layout.engine_gpus, len(table)), -worth))
    _, first = np.unique(table.deployments(order), axis=0, return_index=True)
    assert len(table) > SEVERAL * len(first) / 2
    for top in (1, 2, len(first), len(first) + 5):
        assert ranked(table, question.task, "offline", top).tolist() == order[np.sort(first)[:top]].tolist()


@pytest.mark.parametrize("limits", [{}, {"ttft": "300ms", "tpot": "12ms"}])
def test_search_finds_what_pricing_every_split_at_every_load_finds(limits: dict[str, str]) -> None:
    question = asked(gpus=4, **limits)
    one, task = question.served()[0], question.task
    layout, _ = splits(one, task)
    layout = replace(layout, replicas=np.maximum(task.gpus // np.asarray(layout.engine_gpus), 1))
    memory = estimate(one, layout, task.traffic).memory
    most = running_at_most(one, replace(layout, max_batch=2**15), task.traffic, memory)
    raised = replace(layout, max_batch=np.maximum(layout.max_batch, np.asarray(most).astype(int)))
    most = np.minimum(most, running_at_most(one, raised, task.traffic, estimate(one, raised, task.traffic).memory))
    rows, load = at_loads(most)
    every = layout.take(rows)
    every = replace(every, max_batch=np.maximum(every.max_batch, load))
    found = estimate(one, every, task.traffic, load * np.asarray(every.replicas))
    ttft, tpot = np.asarray(found.ttft.mean), np.asarray(found.tpot.mean)
    kept = np.asarray(found.fits) & (ttft <= task.limits.ttft) & (tpot <= task.limits.tpot)
    total = np.where(kept, found.output_tokens_per_second, 0.0)
    best = best_of(question)
    assert kept.any() and best.total == pytest.approx(total.max(), rel=1e-9)
    assert best.layout == replace(every, max_batch=every.max_batch).row(int(np.argmax(total)))


def test_a_row_of_a_search_is_what_its_deployment_alone_costs() -> None:
    question = asked(engine="vllm,trtllm")
    table = joined([priced(one, question.task) for one in question.served()])
    rows = np.linspace(0, len(table) - 1, 7).astype(int)
    for row, one in zip(rows, chosen(table, question.task, rows), strict=True):
        alone = estimate(one.served, one.layout, one.traffic)
        assert one.total == pytest.approx(table["total"][row], rel=1e-9)
        assert one.total == pytest.approx(float(alone.output_tokens_per_second), rel=1e-9)
        assert one.found.ttft.mean == pytest.approx(float(alone.ttft.mean), rel=1e-9)
        assert one.user == pytest.approx(1.0 / float(alone.tpot.mean), rel=1e-9)
        assert one.found.memory.cache == pytest.approx(float(alone.memory.cache), rel=1e-9)


def test_what_does_not_start_is_never_ranked() -> None:
    """Llama 70B in 16 bits needs two of these GPUs: one alone has nothing that starts."""
    table = answered(model="llama-70b", weights="bf16")
    assert table.kept and all(plan.prediction is not None and plan.prediction.fits for plan in table.best)
    assert all(plan.layout.engine_gpus == 2 for plan in table.best)
    none = answered(model="llama-70b", gpus=1, weights="bf16")
    assert (
        not none.fit and not none.kept and "does not start" in none.best[0].why and "GiB too much" in none.best[0].why
    )


def test_objectives_are_the_ends_of_the_front_and_its_knee() -> None:
    question = asked()
    table = joined([priced(one, question.task) for one in question.served()])
    points = table.take(front(table))
    assert np.all(np.diff(points["user"]) <= 0) and np.all(np.diff(points["total"]) > 0)
    offline, balanced, interactive = (int(ranked(table, question.task, one, 1)[0]) for one in OBJECTIVES)
    assert table["total"][offline] == table["total"].max()
    assert table["user"][interactive] >= 0.95 * table["user"].max()
    assert (table["total"] * table["user"]).max() == table["total"][balanced] * table["user"][balanced]


def test_more_gpus_never_answer_less() -> None:
    totals = [best_of(asked(gpus=gpus)).total for gpus in (1, 2, 3, 6)]
    assert all(more >= less * (1.0 - 1e-9) for less, more in pairwise(totals)), totals


def test_looser_limits_never_lower_goodput() -> None:
    found = [best_of(asked(tpot=f"{ms}ms", ttft=f"{40 * ms}ms", percentile="p99")) for ms in (8, 9, 12, 20)]
    kept = [one.total if one.meets else 0.0 for one in found]
    assert kept[-1] > 0 and all(more >= less for less, more in pairwise(kept)), kept
    assert max(kept) <= best_of(asked()).total


def test_a_load_ranks_what_keeps_the_limits_by_the_length_of_answers() -> None:
    question = asked(rate="2/s", ttft="300ms", tpot="12ms")
    table = joined([priced(one, question.task) for one in question.served()])
    worth = value_of(table, question.task, "offline")
    first = int(ranked(table, question.task, "offline", 1)[0])
    assert table["score"][first] <= 1.0 and table["e2e"][first] == table["e2e"][table["score"] <= 1.0].min()
    assert worth[first] == worth.max()


def test_littles_law_holds_of_every_plan() -> None:
    for said in ({"weights": "bf16"}, {"rate": "3/s", "disaggregated": False, "weights": "bf16"}):
        for plan in answered(**said).best:
            found = plan.prediction
            assert found is not None
            inside = found.requests_per_second * found.latency("e2e")
            if plan.traffic.load == "rate":
                assert found.requests_per_second == pytest.approx(plan.traffic.value, rel=1e-6)
            else:
                assert inside == pytest.approx(plan.traffic.value, rel=0.01)

            assert found.total_tokens_per_second > found.output_tokens_per_second


def test_json_says_what_the_table_says() -> None:
    found = planner.serve(**SMALL, top=1)
    data, text = json.loads(json.dumps(found.to_dict())), str(found)
    assert [one["row"]["purpose"] for one in data["plans"]] == list(found.found.purposes)
    for one, plan in zip(data["plans"], found, strict=True):
        row = one["row"]
        assert row["tokens_per_second"] == plan.file.prediction.output_tokens_per_second
        words = (row["purpose"], row["engine"], row["layout"], row["load"], number(row["tokens_per_second_per_gpu"]))
        cells = (*words, number(row["tokens_per_second_per_user"]), time(row["ttft_s"]), time(row["tpot_s"]))
        assert any(all(f" {cell} " in line for cell in cells) for line in text.splitlines()), cells
        assert row["usd_per_million_output"] == pytest.approx(
            2 * 6.88 / 3600 / row["tokens_per_second"] * 1e6, rel=1e-9
        )
    assert data["searched"]["legal"] >= data["searched"]["start"] > 0


def questions(seed: int, count: int = 6) -> list[Question]:
    """Random ones, whose models fit."""
    draw = Random(seed)
    found = []
    for _ in range(count):
        said = {
            "model": draw.choice(["llama-8b", "qwen3-32b", "gpt-oss-120b", "qwen3-30b-a3b", "mixtral-8x7b"]),
            "gpus": draw.choice([4, 8, 16]), "hardware": draw.choice(["a100", "h100", "rtx-4090", "l40s", "b200"]),
            "engine": draw.choice(["vllm", "vllm", "sglang", "trtllm", None]), "input": draw.choice([128, 512, 4096]),
            "output": draw.choice([64, 256]), **draw.choice([{}, {}, {"concurrency": 9000}, {"rate": "3/s"}, {"tpot": "400ms"}]),
            "layout": draw.choice([{}, {}, {"max_batch": 1500}, {"max_tokens": 4096}]),
            "disaggregated": draw.choice([None, None, True]),
        }  # fmt: skip
        found.append(ask(ServeRequest(**said)))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_that_is_shown_is_one_that_starts(seed: int, tmp_path: Any) -> None:
    """Budgets of a step that were tried were less than the batch, which vLLM refuses; a pinned batch was raised in pools."""
    shown = 0
    for question in questions(seed):
        try:
            found = answer(question)
        except PlannerError:
            continue  # nothing is legal
        for plan in (*found.best, *found.front, *found.others):
            plan.save(tmp_path / "plan.yaml")
            again, pinned = planner.serve_estimate(tmp_path / "plan.yaml").file, question.task.pins.get("max_batch")
            assert plan.prediction is not None and again.prediction is not None
            assert (again.layout, again.prefill, again.traffic) == (plan.layout, plan.prefill, plan.traffic)
            assert all(one.max_batch == (pinned or one.max_batch) for one in plan.pools().values())
            for name in ("output_tokens_per_second", "cache_tokens", "memory_peak_gib", "max_concurrency"):
                assert getattr(again.prediction, name) == pytest.approx(getattr(plan.prediction, name)), (name, plan.layout)
            for name in ("ttft", "tpot", "e2e"):
                assert again.prediction.latency(name, "p99") == pytest.approx(plan.prediction.latency(name, "p99"))
            shown += 1
    assert shown > 10


def test_a_plan_survives_its_file(tmp_path: Any) -> None:
    plan = planner.serve_estimate(**{**SMALL, "tp": 2, "concurrency": 16})
    plan.save(tmp_path / "serve.yaml")
    again = load_serve_plan(tmp_path / "serve.yaml")
    assert again == plan.file and isinstance(again, ServePlan) and again.layout.tp == 2 and again.gpus == 2


def test_a_plan_with_something_changed(tmp_path: Any) -> None:
    plan = planner.serve_estimate(**{**SMALL, "gpus": 4, "tp": 2, "concurrency": 16})
    plan.save(tmp_path / "serve.yaml")
    assert planner.serve_estimate(tmp_path / "serve.yaml").file == plan.file
    more = planner.serve_estimate(tmp_path / "serve.yaml", rate="2/s", cache="fp8").file
    assert (more.traffic.load, more.traffic.value, more.precision.cache) == ("rate", 2, "fp8")
    assert (more.layout.tp, more.layout.replicas, more.traffic.input) == (2, 2, plan.file.traffic.input)
    wider = planner.serve_estimate(plan, tp=4, engine="sglang").file
    assert (wider.layout.tp, wider.layout.replicas, wider.engine_name) == (4, 1, "sglang")
    pools = planner.serve_estimate(plan, prefill="tp=2", tp=2, gpus=4)
    assert planner.serve_estimate(pools, concurrency=8).file.prefill == pools.file.prefill


def test_idle_gpus_are_paid_for() -> None:
    three = planner.serve_estimate(**{**SMALL, "gpus": 3, "tp": 2, "concurrency": 16})
    two = planner.serve_estimate(**{**SMALL, "gpus": 2, "tp": 2, "concurrency": 16})
    assert three.row.tokens_per_second == two.row.tokens_per_second
    assert three.row.tokens_per_second_per_gpu == pytest.approx(2 / 3 * two.row.tokens_per_second_per_gpu)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"ttft": "500"}, "--ttft: '500' has no unit; write 500ms or 500s"),
        ({"tpot": "5 apples"}, "--tpot"),
        ({"rate": "often"}, "--rate: 'often' is not a rate of requests; write it like 5/s or 300/min"),
        ({"rate": "5/s", "concurrency": 4}, "--concurrency and --rate are two loads; give one"),
        ({"input": "uniform:900-800"}, "goes down"),
        ({"input": "zipf:900"}, "no distribution"),
        ({"input": 0}, "--input is 0 tokens"),
        ({"speculation": "depth=3"}, "needs both"),
        ({"speculation": "depth=3,acceptance=2"}, "acceptance from 0 to 1"),
        ({"prefix_hit": "150%"}, "--prefix-hit is 1.5"),
        ({"weights": "fp7"}, "unknown --weights format 'fp7'"),
        ({"engine": "vlm"}, "unknown engine 'vlm'; known, nearest first: vllm"),
        ({"percentile": "p42"}, "it must be mean, p50, p90 or p99"),
        ({"tp": 4}, "tp 4 needs 4 GPUs and there are 2"),
        ({"gpus": 0}, "--gpus is 0"),
        ({"tp": 3, "gpus": 4}, "tp 3 does not divide the 32 heads"),
        ({"price": -1.0}, "--price"),
        ({"color": "red"}, "takes no 'color'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlannerError) as caught:
        planner.serve(**{**SMALL, **said})
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_lengths_come_in_several_forms(tmp_path: Any) -> None:
    from planner.serving.serving_inputs import read_lengths, read_rate, read_seconds, read_speculation

    assert read_lengths("128k", "--input").mean == 131072
    uniform = read_lengths("uniform:800-1000", "--input")
    assert uniform == read_lengths("800-1000", "--input") and (uniform.mean, uniform.longest) == (900, 1000)
    (tmp_path / "seen.csv").write_text("tokens,requests\n100,3\n500,1\n# a comment\n")
    (tmp_path / "seen.json").write_text("[100, 100, 100, 500]")
    one, other = (read_lengths(f"@{tmp_path / name}", "--input") for name in ("seen.csv", "seen.json"))
    assert one == other and (one.mean, one.squared, one.longest) == (200, (3 * 100**2 + 500**2) / 4, 500)
    assert (read_rate("300/min"), read_rate("5 req/s"), read_rate("5")) == (5, 5, 5)
    assert read_seconds("500ms", "--ttft") == 0.5 and np.isinf(read_seconds(None, "--ttft"))
    speculation = read_speculation("depth=3,acceptance=70%,draft=1B")
    assert speculation is not None and (speculation.depth, speculation.draft_parameters) == (3, 1e9)


def test_published_formats() -> None:
    from planner.model import load_model
    from planner.serving.published import alternatives, precision_text, published

    said = {
        name: precision_text(published(load_model(name)).precision)
        for name in ("deepseek-v3", "gpt-oss-20b", "kimi-k2.5", "llama-8b")
    }
    assert said == {
        "deepseek-v3": "fp8_block",
        "gpt-oss-20b": "mxfp4 experts",
        "kimi-k2.5": "int4 experts",
        "llama-8b": "bf16",
    }
    question = asked(hardware="a100-sxm-80gb")
    assert [precision_text(one) for one in alternatives(question.precision, question.hardware)] == ["int4"]
    assert "fp8" in [precision_text(one) for one in asked().others] and FINALISTS > 0


def test_the_command_line(run: Any, tmp_path: Any) -> None:
    flags = [
        "--model",
        "llama-8b",
        "--gpus",
        "2",
        "--hardware",
        "h100",
        "--engine",
        "vllm",
        "--input",
        "1k",
        "--output",
        "128",
    ]
    file = tmp_path / "serve.yaml"
    done = run("serve", *flags, "--weights", "bf16", "--output", str(file), "--json")
    assert done.exit_code == 0, done.output
    assert load_serve_plan(file).to_dict() == json.loads(done.stdout)["plans"][0]["plan"]
    done = run("serve", "estimate", *flags, "--tp", "2")
    assert done.exit_code == 0 and "Decode step" in done.output and "excludes" not in done.output
    assert run("serve", "--gpus", "2").exit_code == 2 and run("serve", "nonsense").exit_code == 2


def test_an_engine_of_several_nodes_fills_them() -> None:
    """Launchers start equal processes on equal nodes; what is pinned is priced all the same."""
    sizes: dict[str, Any] = {"model": "deepseek-v3", "hardware": "h100-sxm", "gpus": 12}
    free, pinned = asked(**sizes), asked(**sizes, layout={"tp": 4, "pp": 3})
    found, said = (
        np.concatenate([splits(one, question.task)[0].engine_gpus for one in question.served()]) for question in (free, pinned)
    )
    assert len(found) and np.all(found <= 8)
    assert set(said) == {12}
