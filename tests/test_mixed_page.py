"""Reports of mixed and RL plans: pages, Markdown, JSON and traces show the numbers of the plan."""

from __future__ import annotations

import html
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner import api
from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.mixed.local_updates import price_layout
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_plan import MixedPlan, priced_plan
from planner.mixed.mixed_timeline import actions
from planner.questions.mixed.mixed_document import build_mixed, trace_of_mixed
from planner.questions.report.document import Document, shown
from planner.questions.report.markdown import markdown
from planner.questions.report.page import page
from planner.questions.report.show import CHARTS
from planner.questions.report.subject import Spending
from planner.questions.rl.rl_document import build_rl
from planner.questions.rl.rl_trace import slices
from tests.mixed_samples import export_of, pipeline, stage
from tests.test_rl_search import SMALL


@pytest.fixture(scope="module")
def plan() -> MixedPlan:
    """A pipeline over both kinds beside one of each kind, in two sites."""
    nodes = (
        NodeKind(kind="big", hardware="h100-sxm", count=1, gpus=4, site="east", price=24.0 / 3600.0),
        NodeKind(kind="small", hardware="l40s", count=2, gpus=2, site="west", price=3.0 / 3600.0),
    )
    cluster = ClusterFile(nodes=nodes, links=(Link(between=("east", "west"), bandwidth=2e9, latency=0.01, price=1e-11),))
    layout = MixedLayout(
        pipelines=(
            pipeline(stage("big", 11, recompute="full"), stage("small", 5, recompute="full"), m=6, count=2),
            pipeline(stage("big", 8), stage("big", 8), m=4),
        ), zero=1,
    )  # fmt: skip
    return priced_plan(export_of(layout, cluster, "megatron", model="llama-3.2-1b").job, "megatron", layout)


@pytest.fixture(scope="module")
def document(plan: MixedPlan) -> Document:
    return build_mixed(plan, Spending(), lambda _: None)


@pytest.fixture(scope="module")
def rl() -> Any:
    return api.plan_rl(**SMALL)[0]


@pytest.fixture(scope="module")
def rl_document(rl: Any) -> Document:
    return build_rl(rl.file, None, lambda _: None)


@pytest.mark.proof
def test_the_page_of_a_mixed_plan_shows_its_numbers(plan: MixedPlan, document: Document) -> None:
    one = plan.prediction
    assert [chart.name for chart in document.charts] == list(CHARTS["mixed plan"])
    assert shown(one.step_time_s, "seconds") in document.verdict
    figures = {figure.label: figure.value for figure in document.figures}
    assert figures["Lost to the kinds"] == pytest.approx(one.lost_between_stages + one.lost_between_replicas, rel=1e-5)
    steps = 1e12 / plan.workload.tokens
    assert figures["Cost"] == pytest.approx(steps * one.usd_per_step, rel=1e-5)  # type: ignore[operator]
    time = document.chart("mixed-time").rows
    assert sum(row[2] for row in time[:-1]) == pytest.approx(one.step_time_s, rel=1e-4)  # type: ignore[misc]
    lost = document.chart("mixed-lost").rows
    for place in {row[0] for row in lost}:
        assert sum(row[3] for row in lost if row[0] == place) == pytest.approx(1.0, abs=1e-4)  # type: ignore[misc]
    cluster = document.chart("mixed-cluster")
    assert sum(row[2] for row in cluster.rows if row[1] == "in use") == plan.layout.num_gpus  # type: ignore[misc]
    assert "2 GB/s" in cluster.notes[0]
    layers = document.chart("mixed-layers").rows
    assert sum(row[7] - row[6] for row in layers) == 2 * 16  # type: ignore[operator]
    memory = document.chart("mixed-memory")
    peaks = dict.fromkeys(row[5] for row in memory.rows)
    assert list(peaks) == pytest.approx([stage.memory_peak_gib for stage in one.stages], rel=1e-5)
    kinds = [row[0] for row in document.alternatives.rows]
    assert kinds[-2:] == ["big alone", "small alone"] and "this plan" in kinds[-3]


def test_actions_of_a_mixed_step_follow_each_other_and_end_with_it(plan: MixedPlan) -> None:
    found = price_layout(plan.job(), plan.layout)
    lanes = dict[tuple[int, int], list[Any]]()
    for one in actions(plan.layout, found):
        lanes.setdefault((one.pipeline, one.stage), []).append(one)
    assert len(lanes) == 4
    for (number, place), lane in lanes.items():
        lane.sort(key=lambda one: one.start)
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(lane))
        busy = sum(one.end - one.start for one in lane if one.microbatch >= 0)
        assert busy == pytest.approx(found.pipelines[number].stages[place].busy, rel=1e-3)
    assert max(one.end for lane in lanes.values() for one in lane) == pytest.approx(found.step_time, rel=1e-6)
    data = json.loads(trace_of_mixed(plan))
    names = [one["args"]["name"] for one in data["traceEvents"] if one["name"] == "process_name"]
    assert names[0] == "stage 1.1 big (11 layers, tp 1)" and len(names) == 4
    assert max(one["ts"] + one.get("dur", 0) for one in data["traceEvents"]) == pytest.approx(1e6 * found.step_time, rel=1e-6)


def test_the_page_of_an_rl_plan_shows_its_numbers(rl: Any, rl_document: Document) -> None:
    one = rl.file.prediction
    assert [chart.name for chart in rl_document.charts] == list(CHARTS["RL plan"])
    assert shown(one.step_s, "seconds") in rl_document.verdict and "[bold]" not in rl_document.job
    phases = rl_document.chart("rl-phases").rows
    assert sum(row[1] for row in phases) == pytest.approx(one.step_s, rel=1e-4)  # type: ignore[misc]
    assert len(rl_document.chart("rl-steps").rows) == len(slices(rl.file))
    assert {row[0]: row[2] for row in rl_document.chart("rl-memory").rows}["update"] == pytest.approx(one.memory_gib["train"], 1e-5)
    assert "1, this plan" in [row[0] for row in rl_document.alternatives.rows]


def test_all_formats_show_the_same(document: Document, rl_document: Document) -> None:
    for made in (document, rl_document):
        text, words, data = page(made, ""), markdown(made), json.loads(json.dumps(made.to_dict()))
        embedded = json.loads(re.search(r'id="report-charts">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
        assert list(embedded) == [one["name"] for one in data["charts"]]
        assert not re.search(r"\{\w+\}", words) and f'download="{made.file}"' in text
        for one in made.charts:
            for row in one.cells()[1][:20]:
                assert all(f">{html.escape(cell).replace('&#x27;', '&#39;')}</td>" in text for cell in row if cell != "-")


def test_the_command_takes_every_kind_of_plan(plan: MixedPlan, rl: Any, tmp_path: Path, run: Any) -> None:
    mixed, trained = tmp_path / "mixed.yaml", tmp_path / "rl.yaml"
    plan.save(mixed)
    rl.save(trained)
    done = run("report", str(trained), "--output", str(tmp_path / "step.trace.json"))
    assert done.exit_code == 0
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    assert sum(one.get("dur", 0) for one in events if one["pid"] == 0) == pytest.approx(3e6 * rl.step_time, rel=1e-3)
    for file, flags, sentence in (
        (mixed, ("--chart", "rl-steps"), "a mixed plan has no chart rl-steps; charts: mixed-cluster"),
        (mixed, ("--price", "3"), "give price in its cluster file"),
        (trained, ("--tokens", "1T"), "an RL plan costs dollars per thousand steps"),
        (trained, ("--chart", "waterfall"), "an RL plan has no chart waterfall; charts: rl-steps"),
    ):
        done = run("report", str(file), *flags)
        assert done.exit_code == 2 and sentence in done.output, done.output
    for words in (("compare", str(mixed), str(mixed)), ("sensitivity", str(trained))):
        done = run(*words)
        assert done.exit_code == 2 and "it is for plan" in done.output


@pytest.mark.proof
def test_pictures(plan: MixedPlan, rl: Any, tmp_path: Path) -> None:
    """Every chart draws."""
    for made, of in ((api.load_mixed, "mixed plan"), (api.load_rl, "RL plan")):
        file = tmp_path / f"{of}.yaml"
        (plan if made is api.load_mixed else rl).save(file)
        for name in CHARTS[of]:
            assert made(file).report(chart=name)[:4] == b"\x89PNG"
