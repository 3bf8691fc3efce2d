"""The report of a plan: its numbers, and that page, Markdown, JSON and pictures show the same ones."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import multiprocessing
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cost.estimate import PARTS, estimate
from planner.error_bars import QUANTITIES, Kind, shipped
from planner.errors import PlannerError
from planner.explicit import explicit_plan
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.plan_file import Plan, load_plan
from planner.questions.best_plan import resolved_of
from planner.questions.report import evidence as stored_errors
from planner.questions.report.build import build
from planner.questions.report.document import Chart, Document, shown
from planner.questions.report.evidence import evidence
from planner.questions.report.landscape import landscape, pareto
from planner.questions.report.markdown import markdown
from planner.questions.report.page import filled, page, picture, start_library
from planner.questions.report.scaling import at_size, scaled
from planner.questions.report.show import CHARTS
from planner.questions.report.step_charts import KERNEL_TEXT, waterfall
from planner.questions.sensitivity.pull import pulls
from planner.search import Pins, fits, search
from planner.timeline.operator_times import LOSSES, computation_of
from planner.timeline.priced_plan import price
from planner.trainer import load_trainer


def for_ever(*_: Any) -> None:
    """A search that does not end, in a process that does not hear Ctrl-C."""
    time.sleep(3600.0)


def records(chart: Chart) -> list[dict[str, Any]]:
    """The rows that a chart draws, as mappings."""
    return filled(chart)["datasets"]["rows"]


def plan_of(**values: int) -> Plan:
    said = {"model": "llama-8b", "num_gpus": 8, "global_batch_size": 32, "hardware": "h100-sxm", "trainer": "megatron"}
    return explicit_plan(None, values, said)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The best plan of a small job with a pipeline, as a search writes it."""
    given = plan_of(tp=2, pp=2)
    finding = search(resolved_of(given).job, Pins(values={"tp": 2, "pp": 2}), top=1)
    layout = finding.layouts[0]
    values = {name: int(value) for name, value in layout.columns().items()}
    return explicit_plan(
        None, values, {"model": "llama-8b", "num_gpus": 8, "global_batch_size": 32, "hardware": "h100-sxm"}
    )


@pytest.fixture(scope="module")
def document(plan: Plan) -> Document:
    return build(plan, lambda _: [at_size(resolved_of(plan), count) for count in (4, 8, 16)])


@pytest.fixture(scope="module")
def text(document: Document) -> str:
    return page(document, start_library()())


@pytest.fixture(scope="module")
def unfit() -> Document:
    """A plan of a model that is far too large for one GPU."""
    return build(explicit_plan(None, {"dp": 8, "zero": 0}, {
        "model": "llama-70b", "num_gpus": 8, "global_batch_size": 8, "hardware": "h100-sxm", "trainer": "megatron",
    }))  # fmt: skip


# ------------------------------------------------------------------------------------------------ numbers


def test_waterfall_sums_to_the_step_and_loses_nothing(plan: Plan) -> None:
    one, losses = plan.prediction, computation_of(price(resolved_of(plan).job, plan.layout)).losses
    bars = waterfall(one, losses)
    assert bars[0][2] == 0.0 and bars[-1][3] == pytest.approx(one.step_time_s, rel=1e-12)
    assert all(before[3] == after[2] for before, after in pairwise(bars))
    by_name = {name: seconds for name, seconds, _, _ in bars}
    kernels = sum(by_name[name] for name in LOSSES)
    assert by_name["ideal"] + kernels == pytest.approx(one.time_s["compute"], rel=1e-12)
    assert {name: by_name[name] for name in PARTS[1:]} == {name: one.time_s[name] for name in PARTS[1:]}
    assert by_name["ideal"] == pytest.approx(one.mfu * one.step_time_s)


@pytest.mark.proof
def test_the_largest_loss_is_split(plan: Plan, document: Document) -> None:
    losses = computation_of(price(resolved_of(plan).job, plan.layout)).losses
    drawn = document.chart("waterfall")
    seconds = {str(row[0]): row[2] for row in drawn.rows}
    for name in ("shapes", "attention", "memory_bound", "clock", "uneven"):
        assert seconds[name] == pytest.approx(losses[name], rel=1e-5)
    assert f"kernels below the peak with {shown(sum(losses.values()), 'seconds')}" in drawn.reading
    seen = [f"{KERNEL_TEXT[name]} {shown(part, 'seconds')}" for name, part in losses.items() if part > 0.01 * sum(losses.values())]
    assert len(seen) > 4 and not [text for text in seen if text not in drawn.reading]
    operators = records(document.chart("operators"))
    assert sum(one["seconds"] for one in operators) == pytest.approx(plan.prediction.time_s["compute"] - losses["uneven"], rel=1e-4)
    assert operators[0]["operator"] == "mlp up" and 0.4 < operators[0]["reached"] < 1.0
    assert operators[-1]["operator"].startswith("others (") and {row["kind"] for row in operators} >= {"attention", "memory-bound"}


def test_pareto_front_is_what_nothing_beats() -> None:
    random = np.random.default_rng(7)
    memory, speed = random.integers(0, 40, 300).astype(float), random.integers(0, 40, 300).astype(float)
    front = {(memory[row], speed[row]) for row in pareto(memory, speed)}
    beaten = {
        (m, s) for m, s in zip(memory, speed, strict=True)
        if any((a <= m and b > s) or (a < m and b >= s) for a, b in zip(memory, speed, strict=True))
    }  # fmt: skip
    assert front == set(zip(memory, speed, strict=True)) - beaten


@pytest.mark.proof
def test_every_cell_is_what_a_pinned_search_finds(plan: Plan) -> None:
    resolved = resolved_of(plan)
    job = resolved.job
    found = landscape(job, plan.layout, price(job, plan.layout).estimate, search(job, Pins(), top=8))
    assert {(one.tp, one.pp) for one in found.cells} >= {(1, 1), (2, 2), (1, 8), (8, 1)}
    for cell in found.cells:
        pinned = search(job, Pins(values={"tp": cell.tp, "pp": cell.pp}), top=1)
        assert cell.best is not None and cell.best.fits == pinned.fit
        gap = math.log(cell.best.step_time_s / float(pinned.estimates[0].step_time[0]))
        assert -1e-9 <= gap < 0.12, f"tp {cell.tp} pp {cell.pp}: {gap:.3f}"
        if math.isclose(
            cell.best.step_time_s, min(one.best.step_time_s for one in found.cells if one.best and one.best.fits)
        ):
            assert gap < 1e-9, "the best cell is the search's"
    speeds = [one.tokens_per_second_per_gpu for one in found.front]
    assert speeds == sorted(speeds) and all(one.fits for one in found.front)
    drawn = [one for one in found.points if one.fits]
    for one in drawn:
        above = [p for p in found.front if p.memory_gib <= one.memory_gib * 1.0001]
        assert not above or one.tokens_per_second_per_gpu <= max(p.tokens_per_second_per_gpu for p in above) * 1.0001


@pytest.mark.proof
def test_cells_where_nothing_fits_or_is_legal_say_why(unfit: Document) -> None:
    cells = {(row["tp"], row["pp"]): row for row in records(unfit.chart("heatmap"))}
    assert cells[1, 1]["state"] == "memory" and "GiB" in str(cells[1, 1]["label"])
    assert "more than the card has" in str(cells[1, 1]["why"])
    said = {"model": "llama-8b", "num_gpus": 8, "global_batch_size": 4, "sequence_length": 512}
    rows = records(build(explicit_plan(None, {"tp": 2}, said)).chart("heatmap"))
    illegal = {(row["tp"], row["pp"]): row["why"] for row in rows if row["state"] == "illegal"}
    assert set(illegal) == {(1, 1)}, "eight replicas do not share four sequences"
    assert illegal[1, 1] == "not legal: every layout breaks a rule, most of them 'batch'"


def test_pulls_are_estimates_on_a_changed_profile(plan: Plan) -> None:
    resolved = resolved_of(plan)
    job = resolved.job
    now = price(job, plan.layout).estimate
    found = {one.quantity.key: one for one in pulls(resolved, plan.layout, now, search(job, Pins(), top=8).layouts)}
    assert "network" not in found, "one node has no network"
    for one in found.values():
        for side in one.sides:
            moved = one.quantity.scale(resolved, side.factor).job
            alone = estimate(moved.workload, moved.cluster, moved.trainer, Layout.stack([plan.layout]))
            before = estimate(job.workload, job.cluster, job.trainer, Layout.stack([plan.layout]))
            assert 1 + side.change == pytest.approx(float(alone.step_time[0] / before.step_time[0]), rel=1e-9)
    gemm = found["gemm"]
    assert gemm.sides[0].change > 0.2 and gemm.sides[1].change < 0
    memory = found["usable_memory"].sides[0]
    assert memory.flip is not None
    for nearer, fit in ((1.03, True), (0.97, False)):
        moved = found["usable_memory"].quantity.scale(resolved, memory.flip * nearer).job
        one = estimate(moved.workload, moved.cluster, moved.trainer, Layout.stack([plan.layout]))
        assert bool(fits(moved, one)[0]) == fit


def test_evidence_holds_the_runs_behind_the_interval(tmp_path: Path) -> None:
    for quantity in QUANTITIES:
        for bar in shipped()[quantity]:
            if bar.code_base == "Megatron Core" and bar.arch == "Hopper":
                found = evidence(quantity, load_trainer("megatron"), load_hardware("h100-sxm"), Kind(bar.user, bar.model))
                assert (len(found.errors), len(found.sources)) == (bar.runs, bar.sources), bar
    kinds = {(one.user, one.code_base, one.model, one.arch) for one in stored_errors.stored()["step_time"]}
    assert len(kinds) > 20
    for wrong, sentence in (
        ("memory: []\n", "must be a list"),
        ("step_time:\n- {source: a}\n", "missing keys 'where'"),
        ("step_time:\n- {source: a, where: b, user: e, code_base: c, model: m, arch: d, percent: 'x'}\n", "must be numbers"),
        ("step_time:\n- {source: a, where: b, user: e, code_base: c, model: m, arch: d, percent: '-200'}\n", "above -100"),
    ):
        path = tmp_path / "residuals.yaml"
        path.write_text(wrong)
        with pytest.raises(PlannerError, match=sentence):
            stored_errors.read(path)


@pytest.mark.proof
def test_scaling_picture(plan: Plan, document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in records(document.chart("scaling")) if row["kind"] == "strong"]
    assert [row["gpus"] for row in rows] == [4, 8, 16] and rows[0]["efficiency"] == 1.0
    for row in rows:
        assert row["efficiency"] == pytest.approx(row["rate"] / rows[0]["rate"], rel=1e-5)
        assert row["total_rate"] == pytest.approx(row["rate"] * row["gpus"], rel=1e-5)
    monkeypatch.setattr("planner.questions.report.scaling.sizes", lambda num_gpus, _: [4, num_gpus])
    for processes in (1, 2):
        with scaled(plan, processes) as result:
            found = result(lambda text: None)
        assert [round(one.prediction.step_time_s, 9) for size in found for one in size if one.prediction] == [
            round(one.prediction.step_time_s, 9)
            for count in (4, 8) for one in at_size(resolved_of(plan), count) if one.prediction
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ one document


def test_charts_hold_the_numbers_of_the_plan(plan: Plan, document: Document) -> None:
    one = plan.prediction
    figures = {figure.label: figure for figure in document.figures}
    assert figures["Step time"].value == pytest.approx(one.step_time_s, rel=1e-5)
    assert figures["Memory"].value == pytest.approx(one.memory_peak_gib, rel=1e-5)
    assert document.fits and document.verdict.startswith("Tensor 2 x pipeline 2 x")
    low, high = (shown(value, "seconds") for value in one.step_time_range_s)  # as wide as `plan` printed it: options are unstated
    assert f"({low} to {high} for nine of ten runs)" in document.verdict
    assert shown(one.step_time_s, "seconds") in document.verdict
    memory = document.chart("memory")
    assert max(row[3] for row in memory.rows) == pytest.approx(one.memory_peak_gib, rel=1e-5)
    for stage in (0, 1):
        parts = [row for row in memory.rows if row[0] == stage]
        assert sum(row[2] for row in parts) == pytest.approx(parts[0][3], rel=1e-4)
    over = document.chart("memory-timeline")
    assert max(row[5] for row in over.rows) == pytest.approx(one.memory_peak_gib, rel=1e-4)
    assert over.rows[-1][1] == pytest.approx(one.step_time_s, rel=1e-5)
    actions = document.chart("pipeline")
    passes = [row for row in actions.rows if row[1] in ("forward", "backward")]
    assert len(passes) == 2 * 2 * int(plan.layout.vpp) * int(plan.layout.num_microbatches) == actions.facts["actions"]
    assert max(row[5] for row in actions.rows) == pytest.approx(one.step_time_s, rel=1e-5)
    assert [name.name for name in document.charts] == list(CHARTS["plan"])
    mine = next(row for row in records(document.chart("heatmap")) if row["plan"])
    assert (mine["tp"], mine["pp"]) == (2, 2)
    assert (
        next(row for row in records(document.chart("pareto")) if row["group"] == "this plan")["step_s"]
        == figures["Step time"].value
    )


def test_all_formats_show_the_same(document: Document, text: str) -> None:
    data = json.loads(json.dumps(document.to_dict()))
    embedded = json.loads(re.search(r'id="report-charts">(.*?)</script>', text, re.DOTALL)[1])
    words, read = markdown(document), text.replace("\u00a0", " ")
    assert list(embedded) == [one["name"] for one in data["charts"]]
    for one in data["charts"]:
        drawn = embedded[one["name"]]["data"]
        keep = [drawn["columns"].index(key) for key in one["columns"]]
        assert [[row[at] for at in keep] for row in drawn["rows"][: len(one["rows"])]] == one["rows"]
        headings, cells = document.chart(one["name"]).cells()
        assert one["reading"] in words and html.escape(one["reading"]).replace("&#x27;", "&#39;") in read
        for row in cells[:40]:
            shown_cells = [cell for cell in row if cell != "-"]
            assert all(cell.replace("|", "\\|") in words for cell in shown_cells)
            assert all(f">{html.escape(cell).replace('&#x27;', '&#39;')}</td>" in text for cell in shown_cells)
        assert headings
        drawn_rows = records(document.chart(one["name"]))
        assert [[row[key] for key in one["columns"]] for row in drawn_rows] == one["rows"]
    for figure in data["figures"]:
        assert figure["text"] in words and html.escape(figure["text"]) in text
    assert data["verdict"] in words and data["verdict"] in read
    assert not re.search(r"\d s\b", re.search(r'class="verdict">([^<]*)', text)[1])  # no line ends between a number and its unit


def test_page_asks_for_nothing_and_is_small(text: str) -> None:
    assert len(text.encode()) < 2_000_000
    assert "default-src 'none'" in text
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', outside)
    assert outside.count("<figure") == len(CHARTS["plan"]) == outside.count("<details>") == outside.count('role="img"')


def test_names_from_a_file_cannot_break_the_page(plan: Plan, document: Document) -> None:
    evil = "</script><script>alert(1)</script><!-- <b>&"
    first, *others = document.charts
    hurt = dataclasses.replace(
        document, title=evil, verdict=evil, notices=(evil,), why=(evil,), date=evil, version=evil, plan={"why": evil},
        run=({"what": evil, "command": f"plan --model '{evil}'"},),
        charts=(dataclasses.replace(first, title=evil, reading=evil, short=evil, docs=evil), *others),
    )  # fmt: skip
    made = page(hurt, "window.vegaEmbed = '</script><!--'")
    assert "<script>alert" not in made and "<!-- <b>" not in made
    assert made.count("</script>") == 4


def test_a_plan_that_does_not_fit_says_so_first(unfit: Document) -> None:
    assert not unfit.fits and unfit.verdict.startswith("This plan does not fit: it needs")
    assert "GiB more than the 79.2 GiB" in unfit.verdict and unfit.notices
    assert "The fastest layout of this job that fits is" in unfit.notices[0]
    made = page(unfit, "")
    assert made.index("does not fit") < made.index("Step time") and 'class="verdict alarm"' in made
    assert {one.label for one in unfit.figures if one.alarm} == {"Memory", "Runs out of memory"}
    assert any(point["group"] == "this plan" for point in records(unfit.chart("pareto")))


def test_an_edited_plan_is_priced_again(plan: Plan) -> None:
    stale = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, step_time_s=1.0))
    found = build(stale)
    assert "The plan file says 1 s per step; priced again" in found.notices[0]
    assert found.figures[0].value == pytest.approx(plan.prediction.step_time_s, rel=1e-5)
    broken = dataclasses.replace(plan, layout=plan.layout.replace(dp=1))
    with pytest.raises(PlannerError, match="rule 'GPUs'"):
        build(broken)


def test_long_steps_are_cut_in_the_middle(plan: Plan, document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.questions.report.step_charts.MOST_ACTIONS", 20)
    short, whole = build(plan).chart("pipeline"), document.chart("pipeline")
    passes = [row for row in short.rows if row[1] in ("forward", "backward")]
    assert 16 <= len(passes) <= 24 < whole.facts["actions"] == short.facts["actions"]
    low, high = float(short.facts["gap_from_s"]), float(short.facts["gap_to_s"])
    assert 0 < low < high < plan.prediction.step_time_s and "is left out" in short.notes[0]
    assert all(row[4] <= low * 1.001 or row[5] >= high * 0.999 for row in passes) and whole.facts["gap_from_s"] is None


def test_a_faster_plan_today_leaves_no_choice_to_change(unfit: Document) -> None:
    assert unfit.chart("sensitivity").reading.endswith("Another plan is the better choice already.")
    assert not any(row["flip"] for row in records(unfit.chart("sensitivity")))


def test_pictures_are_png(document: Document) -> None:
    made = picture(document, "heatmap")
    assert made.startswith(b"\x89PNG") and len(made) > 5000


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.proof
def test_the_command(plan: Plan, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.questions.report.scaling.sizes", lambda num_gpus, _: [num_gpus])
    monkeypatch.setattr("planner.questions.report.scaling.os.cpu_count", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "plan.yaml"
    plan.save(file)
    assert load_plan(file).layout == plan.layout
    written = run("report", str(file), "--output", str(tmp_path / "r.html"))
    assert written.exit_code == 0 and "wrote" in written.output
    cached = list((tmp_path / "cache" / "planner").iterdir())
    assert len(cached) == 1
    whole = cached[0].read_text()
    assert start_library()() == whole and whole in (tmp_path / "r.html").read_text().replace("<\\/", "</")
    as_json = json.loads(run("report", str(file), "--format", "json").stdout)
    assert as_json["planner_report"] == 1 and as_json["plan"]["layout"] == plan.layout.to_dict()
    words = run("report", str(file), "--output", str(tmp_path / "r.md"))
    assert words.exit_code == 0 and as_json["verdict"] in (tmp_path / "r.md").read_text()
    trace = run("report", str(file), "--output", str(tmp_path / "step.trace.json"))
    events = json.loads((tmp_path / "step.trace.json").read_text())
    assert trace.exit_code == 0 and events["traceEvents"]


def test_bad_input_is_a_sentence(plan: Plan, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.yaml"
    plan.save(file)
    for arguments, sentence in (
        (["--output", str(tmp_path / "r.txt")], "the ending does not say what to write"),
        (["--format", "png"], "which chart? give --chart: of a plan waterfall, operators"),
        (["--format", "json", "--chart", "memory"], "it goes with --format png, not with json"),
    ):
        found = run("report", str(file), *arguments)
        assert found.exit_code == 2 and sentence in found.output
    assert run("report", str(tmp_path / "none.yaml")).exit_code == 2
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    found = run("report", str(file), "--output", str(tmp_path / "r.html"))
    assert (
        found.exit_code == 2 and "pip install vl-convert-python" in found.output and not (tmp_path / "r.html").exists()
    )
    found = run("report", str(file), "--chart", "memory", "--output", str(tmp_path / "r.png"))
    assert found.exit_code == 2 and "pip install vl-convert-python" in found.output


@pytest.mark.proof
def test_searches_of_other_sizes_end_with_the_report(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while they run: their processes are gone when the command is, however long they would have taken."""
    monkeypatch.setattr("planner.questions.report.scaling.at_size", for_ever)
    monkeypatch.setattr("planner.questions.report.scaling.os.cpu_count", lambda: 2)
    before = multiprocessing.active_children()
    started: list[Any] = []
    with pytest.raises(KeyboardInterrupt), scaled(plan, 2):
        started += [one for one in multiprocessing.active_children() if one not in before]
        raise KeyboardInterrupt
    assert len(started) == 2 and not any(one.is_alive() for one in started)
