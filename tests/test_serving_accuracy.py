"""plan accuracy on serving runs: the form of its JSON, bounds, classes, intervals; training files stay as they were."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from planner import api, library
from planner.commands.main import main
from planner.errors import PlannerError
from planner.questions.accuracy.serving_errors import CLASSES, ServingPair, coverage, figures_of, of_class
from planner.questions.accuracy.serving_summary import PROMISED, serving_tables, summarise_serving
from planner.questions.accuracy.training_and_serving import sorted_files
from planner.serving import intervals
from planner.serving.runs.predicted_runs import DOES_NOT_FIT, PREDICTED, ServingAnswer
from planner.serving.runs.run_schema import serving_rows
from planner.serving.runs.serving_run import runs_of
from tests.test_serving_runs import MOE, document, row
from tools.update_serving_bars import bar, ends, left_out

TRAINING = library.profiles_directory() / "runs" / "torchtune-readme-4090.yaml"


def pairs(*rows: dict[str, Any], tpot: float = 16.5, status: str = PREDICTED) -> list[ServingPair]:
    """Rows with an answer of our own: 10 % above 15 ms, and half of a time to first token of 150 ms."""
    values = {"tpot_ms.mean": tpot, "ttft_ms.mean": 75.0, "tokens_per_s_total_output": 120.0, "latency_s": 1.0}
    found = []
    for run in runs_of(serving_rows(document(*rows))):
        quantities = {name: value for name, value in values.items() if name in run.measured}
        found.append(ServingPair(run=run, answer=ServingAnswer(status=status, quantities=quantities)))
    return found


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """A file of serving runs."""
    path.write_text(library.dump_yaml(document(*rows)), encoding="utf-8")
    return path


def test_json_of_a_serving_file(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", row(flags=["repeat"]), row(id="b", hardware={"gpu": "arc-pro-b60"}))
    answer = CliRunner().invoke(main, ["accuracy", str(file), "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    first, second = found["runs"]
    assert (first["source"], first["id"], first["status"]) == ("mine", "a", "predicted")
    assert set(first["quantities"]) == {"ttft_ms.mean", "tpot_ms.mean"}
    for one in first["quantities"].values():
        assert set(one) == {"measured", "predicted", "range"} and one["range"][0] < one["predicted"] < one["range"][1]
    assert first["quantities"]["tpot_ms.mean"]["measured"] == 15.0
    assert second["status"] == "unsupported" and "arc-pro-b60" in second["reason"] and second["quantities"] == {}
    assert found["summary"]["serving"]["coverage"]["rows"] == 2


def test_files_of_both_kinds_in_one_folder(tmp_path: Path) -> None:
    write(tmp_path / "serving.yaml", row())
    (tmp_path / "training.yaml").write_text(TRAINING.read_text(encoding="utf-8"), encoding="utf-8")
    assert [[one.name for one in some] for some in sorted_files([tmp_path])] == [["training.yaml"], ["serving.yaml"], []]
    found = api.accuracy([tmp_path]).found
    alone = api.accuracy([TRAINING]).found
    assert [one for one in found["runs"] if "step_time_s" in one] == [
        {**one, "source": "training"} for one in alone["runs"]
    ]
    assert "serving" in found["summary"] and "serving" not in alone["summary"]


def test_tables_of_serving_alone_are_those_of_serving(tmp_path: Path) -> None:
    answer = CliRunner().invoke(main, ["accuracy", str(write(tmp_path / "a.yaml", row())), "--worst", "3"])
    assert (
        answer.exit_code == 0
        and "What is promised of serving" in answer.output
        and "Serving, the worst rows" in answer.output
    )
    assert "Step time" not in answer.output


def test_page_of_serving_runs(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    some = write(
        tmp_path / "a.yaml", row(), row(id="b", model=MOE, hardware={"gpu": "h200-sxm", "count": 8}, parallel={"tp": 8})
    )
    answer = CliRunner().invoke(main, ["accuracy", str(some), "--page", str(page)])
    assert answer.exit_code == 0, answer.output
    text = page.read_text(encoding="utf-8")
    assert "## What is promised of serving" in text and "| TPOT, closed loop, dense | 1 |" in text
    assert page.with_suffix(".png").stat().st_size > 1000
    api.accuracy([TRAINING, some]).write_page(page)
    both = page.read_text(encoding="utf-8")
    assert both.startswith("# Accuracy") and both.rstrip().endswith("|") and "## Serving, the worst rows" in both


def test_a_wrong_file_ends_with_one_sentence(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", row(load={"isl": "many"}))
    answer = CliRunner().invoke(main, ["accuracy", str(file)])
    assert answer.exit_code != 0
    with pytest.raises(PlannerError, match="row a: load: isl is 'many'; it must be a number"):
        api.accuracy([file])


# ---------------------------------------------------------------------------------------------------- errors and classes


def test_classes_count_what_their_bounds_speak_of() -> None:
    offline = {"kind": "offline", "value": 100, "range_ratio": None}
    some = pairs(
        row(), row(id="experts", model=MOE, hardware={"gpu": "h200-sxm", "count": 8}, parallel={"tp": 8}),
        row(id="spec", flags=["spec-unknown"]), row(id="offline", load=offline, measured={"tokens_per_s_total_output": 100.0}),
        row(id="draft", options={"speculative": "mtp"}),
    )  # fmt: skip
    found = {one.name: [(pair.run.id, round(error, 6)) for pair, error in of_class(some, one)] for one in CLASSES}
    assert found["TPOT, closed loop, dense"] == [("a", 0.1)] and found["TPOT, closed loop, experts"] == [
        ("experts", 0.1)
    ]
    assert found["TTFT below saturation"] == [("a", -0.5), ("experts", -0.5)]
    assert found["offline throughput, dense"] == [("offline", 0.2)] and found["speculation, TPOT"] == [("draft", 0.1)]


def test_figures_weigh_families_alike() -> None:
    first, second = pairs(row(), row(id="b", hardware={"gpu": "h200-sxm"}))
    figures = figures_of([(first, 0.1), (first, -0.3), (second, 0.5)])
    assert figures["n"] == 3 and figures["families"] == 2 and figures["mean_abs"] == pytest.approx(0.3)
    assert figures["bias"] == pytest.approx(0.1) and figures["mean_of_families"] == pytest.approx((0.2 + 0.5) / 2)
    assert figures_of([])["mean_abs"] is None


def test_throughput_that_breaks_littles_law_is_no_error_of_the_model() -> None:
    broken = row(measured={"tokens_per_s_total_output": 20000.0})
    dropped = next(one for one in CLASSES if one.name == "throughput, closed loop")
    assert (
        of_class(pairs(broken), dropped) == []
        and len(of_class(pairs(row(measured={"tokens_per_s_total_output": 900.0})), dropped)) == 1
    )


def test_bounds_say_whether_they_are_met() -> None:
    summary = summarise_serving(pairs(row()))
    met = {one["name"]: one["met"] for one in summary["bounds"]}
    assert len(met) == len(PROMISED) and met["TPOT, dense, mean"] is False and met["TPOT, experts, mean"] is None
    assert met["answered of the runs that state their configuration"] is True and met["ran, refused for memory"] is True
    better = {one["name"]: one["met"] for one in summarise_serving(pairs(row(), tpot=15.1))["bounds"]}
    assert better["TPOT, dense, mean"] is True
    refused = summarise_serving(pairs(row(), status=DOES_NOT_FIT))
    assert {one["name"]: one["met"] for one in refused["bounds"]}["ran, refused for memory"] is False
    promised, classes, _, rows = serving_tables(summary)
    assert len(promised.rows) == len(PROMISED) and len(classes.rows) == 2 and rows.rows[0] == ("runs", "1")


def test_coverage_counts_rows_that_state_their_configuration() -> None:
    found = coverage(pairs(row(), row(id="b", flags=["replicas-unclear"]), row(id="c", parallel=None)))
    assert (found["rows"], found["counted"], found["stated"], found["answered_of_stated"]) == (3, 2, 1, 1.0)


# ------------------------------------------------------------------------------------------------------------- intervals


def test_every_quantity_and_kind_has_an_interval() -> None:
    for quantity in ("ttft_ms.mean", "ttft_ms.p99", "tpot_ms.p50", "itl_ms.mean", "e2e_ms.p90", "latency_s", "tokens_per_s_total",
                     "request_per_s", "memory_gb"):  # fmt: skip
        for kind in (*intervals.KINDS, intervals.ALL, "of no kind"):
            low, high = intervals.range_of(quantity, kind, 10.0)
            assert 0 < low <= 10.0 <= high and math.isfinite(high)
    low, high = intervals.range_of("tpot_ms.mean", "closed dense", np.array([1.0, 2.0]))
    assert low.shape == (2,) and high[1] == pytest.approx(2 * high[0])
    assert intervals.kind_of("concurrency", True, True) == "closed experts, saturated"


def test_intervals_hold_nine_of_ten_of_families_that_were_left_out() -> None:
    shares = intervals.held()
    assert all(0.88 <= shares[base] <= 0.97 for base in ("ttft", "tpot", "throughput", "latency")), shares


def test_ends_weigh_families_alike_and_widen_until_those_left_out_are_held() -> None:
    many, few = np.linspace(-0.1, 0.1, 1000), np.array([0.5, 0.6])
    low, high = ends({"many": many, "few": few}, 0.9)
    assert high > 0.5 and low == pytest.approx(-0.08, abs=0.01)  # 5 % of the weight, which is 10 % of the first family
    draw = np.random.default_rng(3)
    families = {str(number): draw.normal(draw.normal(0.0, 0.2), 0.05, 40) for number in range(12)}
    found, held = bar(families)
    assert held >= 0.9 > left_out(families, 0.8, 1.0) and found["low"] < 0.85 and found["high"] > 1.15
    assert found["runs"] == 480 and found["families"] == 12
