"""The report of a serve plan: the page, Markdown, JSON and pictures show the same numbers, those of the plan."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import PlannerError
from planner.questions.report.document import Document, shown
from planner.questions.report.markdown import markdown
from planner.questions.report.page import page
from planner.questions.report.show import CHARTS, EVERY_CHART
from planner.questions.serve.serve_document import build_serving
from planner.serving.serve_plan import STEP_PARTS


@pytest.fixture(scope="module")
def plan() -> Any:
    return planner.serve_estimate(
        model="llama-8b", gpus=2, hardware="h100-sxm", tp=2, engine="vllm", concurrency=16, tpot="1s"
    )


@pytest.fixture(scope="module")
def document(plan: Any) -> Document:
    return build_serving(plan.file, None, lambda _: None)


def test_numbers_are_those_of_the_plan(plan: Any, document: Document) -> None:
    found, row = plan.file.prediction, plan.row
    figures = {one.label: one for one in document.figures}
    assert figures["Tokens/s of a GPU"].value == pytest.approx(row.tokens_per_second_per_gpu, rel=1e-5)
    assert figures["Time per output token"].value == pytest.approx(found.latency("tpot"), rel=1e-5)
    assert shown(found.latency("ttft"), "seconds") in document.verdict and document.fits
    step = document.chart("serve-step")
    assert sum(line[1] for line in step.rows) == pytest.approx(sum(found.step_s[one] for one in STEP_PARTS), rel=1e-4)
    memory = document.chart("serve-memory")
    assert memory.rows[-1][4] == pytest.approx(found.memory_peak_gib, rel=1e-4)
    mine = [line for line in document.chart("serve-load").rows if line[4]]
    assert len(mine) == 1 and mine[0][2] == pytest.approx(found.latency("tpot"), rel=1e-4)
    front = document.chart("serve-front").rows
    assert [line[0] for line in front].count("this plan") == 1 and len(front) > 3
    assert [one.name for one in document.charts] == list(CHARTS["serve plan"])


def test_headings_are_filled_in(document: Document) -> None:
    assert document.chart("serve-load").columns[0].title == "requests in flight"
    assert not re.search(r"\{\w+\}", markdown(document))


def test_all_formats_show_the_same(document: Document) -> None:
    data = json.loads(json.dumps(document.to_dict()))
    text, words = page(document, ""), markdown(document)
    embedded = json.loads(re.search(r'id="report-charts">(.*?)</script>', text, re.DOTALL)[1])
    assert list(embedded) == [one["name"] for one in data["charts"]] == list(CHARTS["serve plan"])
    for one in data["charts"]:
        _, cells = document.chart(one["name"]).cells()
        for row in cells[:40]:
            kept = [cell for cell in row if cell != "-"]
            assert all(cell.replace("|", "\\|") in words for cell in kept)
            assert all(f">{html.escape(cell).replace('&#x27;', '&#39;')}</td>" in text for cell in kept)
    assert "Tokens to train on" not in text and 'download="serve.yaml"' in text and "Why this deployment" in words


def test_the_command_knows_which_plan_it_has(plan: Any, tmp_path: Path, run: Any) -> None:
    file = tmp_path / "serve.yaml"
    plan.save(file)
    assert planner.plan_kind(file) == "serve" and planner.load_serve(file).file == plan.file
    done = run("report", str(file), "--format", "json")
    assert done.exit_code == 0 and json.loads(done.stdout)["title"] == "llama-3.1-8b served on 2 x h100-sxm"
    for flags, sentence in (
        (("--chart", "pareto"), "a serve plan has no chart pareto; charts: serve-front"),
        (("--format", "trace"), "a serve plan has no trace; formats: html"),
        (("--tokens", "1T"), "--tokens is about training"),
    ):
        done = run("report", str(file), *flags)
        assert done.exit_code == 2 and sentence in done.output
    assert len(set(EVERY_CHART)) == len(EVERY_CHART)


@pytest.mark.proof
def test_a_picture(plan: Any, tmp_path: Path) -> None:
    made = plan.report(tmp_path / "step.png", chart="serve-step")
    assert made[:4] == b"\x89PNG" and (tmp_path / "step.png").read_bytes() == made


@pytest.mark.proof
def test_a_plan_that_does_not_serve_says_so_first() -> None:
    short = planner.serve_estimate(model="llama-70b", gpus=1, hardware="h100-sxm", engine="vllm", concurrency=1)
    document = build_serving(short.file, None, lambda _: None)
    assert (
        not document.fits
        and document.verdict.startswith("This plan does not start")
        and "GiB too much" in document.notices[0]
    )
    slow = planner.serve_estimate(model="llama-8b", gpus=1, hardware="h100-sxm", engine="vllm", rate="500/s")
    assert "does not keep up with 500/s" in build_serving(slow.file, None, lambda _: None).verdict
    with pytest.raises(PlannerError, match="the tokens|a serve plan has no trace"):
        slow.report(format="trace")
