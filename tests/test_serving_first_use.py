"""What a newcomer meets in the first minutes of ``plan serve``: sentences, sums and limits of answers at the edges."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hugging_face_configs import CONFIGS
from rich.console import Console

import planner
from planner.commands.main import main
from planner.errors import PlannerError
from planner.serving.export.serve_job import ServeJob
from planner.serving.serve_plan import load_serve_plan
from planner.serving.serving_answer import answer
from planner.serving.serving_inputs import lengths_text
from planner.serving.serving_question import ServeRequest, ask
from planner.serving.serving_reasons import TIED
from planner.serving.traffic import Lengths


def said(*words: str) -> str:
    """What ``plan serve`` prints."""
    done = CliRunner().invoke(main, ["serve", *words])
    assert not isinstance(done.exception, Exception), done.output
    return done.output


@pytest.mark.parametrize(("speculation", "tokens"), [(None, 1.0), ("depth=2,acceptance=0.5,draft=1B", 1.75)])
def test_one_request_in_flight_never_waits_for_its_own_prompt(speculation: str | None, tokens: float) -> None:
    found = planner.serve_estimate(
        model="llama-8b",
        hardware="h100-sxm",
        engine="vllm",
        tp=1,
        input="fixed:100k",
        output="fixed:256",
        concurrency=1,
        speculation=speculation,
    ).file.prediction
    assert found is not None and (found.step_s["draft"] > 0) == (speculation is not None)
    assert found.tpot_s["mean"] * tokens == pytest.approx(sum(found.step_s.values()), rel=1e-5)
    assert found.requests_per_second * found.e2e_s["mean"] == pytest.approx(
        1.0, rel=0.07
    )  # the client is beside the loop


def test_an_answer_of_one_token_is_refused() -> None:
    with pytest.raises(PlannerError, match="--output is 1 token; it must be 2 or more"):
        ask(ServeRequest(model="llama-8b", gpus=1, hardware="h100-sxm", output=1))


@pytest.mark.parametrize("which", ["large batch", "large chunk"])
def test_no_more_in_flight_than_the_cache_holds(which: str) -> None:
    """A larger batch takes memory from the cache: what is ranked was counted with its own batch limit."""
    small: dict[str, Any] = {"model": "llama-8b", "gpus": 1, "hardware": "b200-sxm", "weights": "nvfp4"}
    large: dict[str, Any] = {"model": "deepseek-v3", "gpus": 16, "hardware": "h100-sxm"}
    found = answer(ask(ServeRequest(**(large if which == "large batch" else small), engine="trtllm")))
    for plan in [*found.best, *found.others, *found.front]:
        assert plan.prediction is not None
        assert plan.traffic.value <= plan.prediction.max_concurrency


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_what_is_missing_is_the_sum_of_the_parts_less_the_card(engine: str) -> None:
    plan = planner.serve_estimate(model="llama-70b", hardware="h100-sxm", engine=engine, tp=1)
    found = plan.file.prediction
    assert found is not None and not found.fits
    parts = {name: size for name, size in found.memory_gib.items() if name != "cache"}
    assert found.memory_peak_gib == pytest.approx(sum(parts.values()))
    assert min(parts.values()) >= 0
    assert f"{found.memory_peak_gib - found.memory_limit_gib:.1f} GiB too much" in plan.file.why


def test_what_does_not_start_has_no_times() -> None:
    text = said("estimate", "--model", "llama-70b", "--gpus", "1", "--hardware", "h100-sxm", "--engine", "vllm")
    assert "nine of ten" not in text and "Decode step" not in text
    assert "Memory of the fullest GPU" in text


WORDS: list[tuple[list[str], str, str]] = [
    (["--input", "fixed:127k", "--concurrency", "1"], "Attention takes ", "Attention take "),
    (["--concurrency", "1"], ", 1 request in flight", " 1 requests"),
    (
        ["--concurrency", "4", "--max-batch", "4"],
        "The batch is full: an engine runs 4 requests at most",
        "cache is full",
    ),
]


@pytest.mark.parametrize(("more", "right", "wrong"), WORDS)
def test_sentences_agree_with_their_numbers(more: list[str], right: str, wrong: str) -> None:
    text = said("estimate", "--model", "llama-8b", "--hardware", "h100-sxm", "--engine", "vllm", "--tp", "1", *more)
    assert right in text and wrong not in text


WIDE = [
    (["--model", "llama-70b", "--gpus", "1"], "What would serve"),
    (["--model", "deepseek-v3", "--gpus", "8", "--engine", "sglang"], "What would serve"),
    (["compare", "--model", "mixtral-8x7b", "--gpus", "8", "--engine", "vllm"], "Splits"),
]


@pytest.mark.proof
@pytest.mark.parametrize(("words", "heading"), WIDE)
def test_tables_keep_their_last_column_at_120(words: list[str], heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.terminal.flags.console", lambda: Console(highlight=False, width=120, no_color=True))
    lines = said(*words, "--hardware", "h100-sxm").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(heading))
    end = next(number for number, line in enumerate(lines) if number > at + 5 and not line.strip())
    assert any("$/M out" in line for line in lines[at:end])
    assert "…" not in "".join(lines[at:end])


@pytest.mark.parametrize("call", [planner.serve, partial(planner.serve_estimate, tp=1)])
def test_requests_beyond_the_positions_are_refused_as_engines_do(call: Any) -> None:
    with pytest.raises(PlannerError, match="up to 200256 tokens are longer than the 131072 positions of llama-3.1-8b"):
        call(model="llama-8b", gpus=1, engine="vllm", input=200000)


@pytest.mark.parametrize(("kind", "most"), [("yarn", 32768), ("linear", 8192)])
def test_yarn_reaches_beyond_the_published_length(kind: str, most: int, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 8192}
    config = CONFIGS["mixtral-8x7b"] | {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {"model": str(tmp_path / "config.json"), "gpus": 4, "engine": "vllm", "concurrency": 1, "output": 100}
    plan = planner.serve_estimate(**asked, tp=4, input=most - 100.0)
    plan.save(tmp_path / "plan.yaml")
    assert plan.file.longest == most and ServeJob.of(load_serve_plan(tmp_path / "plan.yaml")).length == most
    with pytest.raises(PlannerError, match=f"longer than the {most} positions"):
        planner.serve_estimate(**asked, tp=4, input=most)


@pytest.mark.parametrize("words", [["what-if", "--hardware", "h200"], ["compare", "other.yaml"]])
def test_commands_of_training_name_those_of_serving(words: list[str], tmp_path: Path) -> None:
    planner.serve_estimate(model="llama-8b", gpus=1, tp=1).save(tmp_path / "serve.yaml")
    done = CliRunner().invoke(main, [words[0], str(tmp_path / "serve.yaml"), *words[1:]])
    assert done.exit_code == 2 and f"plan serve {words[0]}" in done.output


@pytest.mark.parametrize(("words", "sentence"), [
    (["--disaggregated", "--aggregated"], "--disaggregated and --aggregated are two answers to one question"),
    (["--intra-node", ""], "--intra-node: '' is not a quantity"),
])  # fmt: skip
def test_flags_that_say_nothing_are_refused(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(main, ["serve", "--model", "llama-8b", "--gpus", "2", *words])
    assert done.exit_code == 2 and sentence in done.output


def test_import_names_the_engines_that_it_reads(tmp_path: Path) -> None:
    (tmp_path / "hello.sh").write_text("echo hello")
    told = [CliRunner().invoke(main, ["import", *words]).output for words in (["--help"], [str(tmp_path / "hello.sh")])]
    assert all(re.search(r"vllm,\s+sglang,\s+trtllm(,| or)\s+dynamo", one) for one in told)


@pytest.mark.parametrize(("asked", "line"), [
    ({"model": "llama-8b", "hardware": "h100", "tp": 2}, "Curves: matrix products of decodes, matrix products of prompts, "
     "attention of decodes, attention of prompts and all-reduces measured on this device."),
    ({"model": "gpt-oss-120b", "hardware": "a100", "tp": 1, "engine": "vllm"}, "experts derived from another format"),
    ({"model": "llama-8b", "hardware": "rtx-4090", "tp": 1}, "attention of decodes and attention of prompts scaled from l40s"),
])  # fmt: skip
def test_an_estimate_says_where_its_curves_come_from(asked: dict[str, Any], line: str) -> None:
    flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    assert line in " ".join(said("estimate", *flags).split())
    curves = planner.serve_estimate(**asked).to_dict()["curves"]
    assert all(one in line for one in curves) if "measured" in line else any(one in line for one in curves.values())


def test_one_gpu_is_one() -> None:
    request: dict[str, Any] = {"model": "llama-8b", "gpus": 1, "hardware": "mi300x", "engine": "trtllm"}
    with pytest.raises(PlannerError, match="on 1 GPU is legal"):
        answer(ask(ServeRequest(**request)))


def test_two_pools_need_two_gpus() -> None:
    with pytest.raises(PlannerError, match="two pools of .* need 2 GPUs or more, a worker of each takes 1, and there is 1;"):
        answer(ask(ServeRequest(model="llama-8b", gpus=1, hardware="h100-sxm", disaggregated=True)))


def test_lengths_of_one_value_are_one_number() -> None:
    assert lengths_text(Lengths.uniform(1.6, 2.4)) == "2" and lengths_text(Lengths.uniform(8, 12)) == "8 to 12"


def test_an_imported_plan_names_its_hardware_as_other_plans_do(tmp_path: Path) -> None:
    line, out = tmp_path / "serve.sh", tmp_path / "today.yaml"
    line.write_text("vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2\n")
    done = CliRunner().invoke(main, ["import", str(line), "--hardware", "h100", "--output", str(out)])
    assert not isinstance(done.exception, Exception) and load_serve_plan(out).hardware == "h100-sxm", done.output


@pytest.mark.parametrize(("model", "gpus", "concurrency"), [("deepseek-v3", 16, 64), ("llama-8b", 8, 3)])
def test_pools_win_or_lose_by_more_than_counts_as_equal(model: str, gpus: int, concurrency: int) -> None:
    request: dict[str, Any] = {"model": model, "gpus": gpus, "hardware": "h200-sxm", "engine": "vllm"}
    text = answer(ask(ServeRequest(**request, concurrency=concurrency))).pools_note
    change = re.search(r"has ([+-][0-9.]+) % time of a request", text)
    assert change is not None, text
    longer = float(change[1]) / 100.0
    assert ("equal" in text) == (abs(longer) < TIED) and ("wins" in text) == (longer <= -TIED)
