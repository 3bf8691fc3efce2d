"""The regression gate: predictions of all published runs against the stored ones; and the page that is made from them."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from planner import library
from planner.error_bars import KEYS
from planner.errors import PlannerError
from planner.questions.accuracy.accuracy_page import link, page, scatter
from planner.questions.accuracy.beyond import answered, shipped_beyond
from planner.questions.accuracy.bounds import BOUNDS
from planner.questions.accuracy.prediction import Pair
from planner.questions.accuracy.summary import summarise
from planner.questions.report import evidence
from planner.ties import shipped_ties
from tools.evidence import bars, beyond, snapshot, ties
from tools.evidence.appendix import appendix
from tools.evidence.reader import reader

ROOT = Path(__file__).resolve().parent.parent
PREDICTIONS = ROOT / "tests" / "data" / "predictions.csv"


@pytest.fixture(scope="module")
def pairs(every_pair: list[Pair]) -> list[Pair]:
    return every_pair


def test_no_family_got_worse(pairs: list[Pair], capsys: pytest.CaptureFixture[str]) -> None:
    changes = snapshot.compare(pairs, snapshot.read(PREDICTIONS))
    with capsys.disabled():
        print("\n" + "\n".join(snapshot.report(changes)))
    assert len(changes) >= 15 and sum(one.runs for one in changes) > 1600
    worse = [one for one in changes if one.worse]
    assert not worse, (
        f"{snapshot.report(worse)}: mend it, or store new predictions with tools/update_accuracy.py and say why"
    )


def test_stored_predictions_are_those_of_now(pairs: list[Pair]) -> None:
    """Else the accuracy pages, the error bars and the ties describe another cost model."""
    stored, now = (list(csv.DictReader(text.splitlines())) for text in (PREDICTIONS.read_text(), snapshot.text(pairs)))
    assert [(row["source"], row["id"]) for row in now] == [(row["source"], row["id"]) for row in stored]
    for column, near in (("step_time_s", {"rel": 1e-3}), ("memory_gib", {"rel": 1e-3}), ("out_of_memory", {"abs": 2e-3})):
        before, after = ([float(row[column]) for row in rows] for rows in (stored, now))
        assert after == pytest.approx(before, **near), (
            f"{column} moved: store new predictions and pages with tools/update_accuracy.py, and say why"
        )


def test_stored_ties_are_those_of_the_predictions(pairs: list[Pair]) -> None:
    counted, stored = ties.build(ties.ordered(pairs), "now"), shipped_ties()
    assert stored.pairs == pytest.approx(counted.pairs, rel=0.1) and stored.sources == counted.sources
    for gap in (*ties.STEPS, stored.equal_gap):
        assert stored.chance(gap) == pytest.approx(counted.chance(gap), abs=0.05), (
            "run tools/update_accuracy.py: the order of published layouts is predicted better or worse than the table says"
        )


def test_errors_that_reports_show_are_those_of_the_predictions(pairs: list[Pair]) -> None:
    for quantity, kept in evidence.stored().items():
        now = bars.stored_errors(pairs, bars.residuals(pairs, quantity))
        entries = [{key: getattr(one, key) for key in ("source", "where", *KEYS)} for one in kept]
        assert [(entry, len(one.percent)) for entry, one in zip(entries, kept, strict=True)] == [
            (entry, len(errors)) for entry, errors in now
        ]
        errors = ([one.percent for one in kept], [errors for _, errors in now])
        medians = [np.median(np.abs(np.concatenate(one))) for one in errors]
        assert abs(medians[0] - medians[1]) <= snapshot.TOLERANCE, "store new ones with tools/update_accuracy.py"


def test_gate_sees_what_got_worse_and_what_was_lost(pairs: list[Pair]) -> None:
    stored = {
        (p.run.source, p.run.id): p.run.measured.step_time
        for p in pairs
        if p.run.family == "zero-bubble" and p.time_error
    }
    changes = snapshot.compare(pairs, {key: value for key, value in stored.items() if value is not None})
    (change,) = changes
    assert change.worse and change.before == 0.0 and change.after > 0.01 and change.moved > 50
    assert "(WORSE)" in snapshot.report(changes)[0]
    own = {key: p.predicted.step_time for p in pairs if (key := (p.run.source, p.run.id)) in stored}
    (same,) = snapshot.compare(pairs, {key: value for key, value in own.items() if value is not None})
    assert not same.worse and same.moved == 0 and snapshot.report([same]) == ["no prediction moved"]


def test_stored_predictions_round_trip(pairs: list[Pair], tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    some = pairs[:400]
    path.write_text(snapshot.text(some))
    stored = snapshot.read(path)
    for pair in some:
        if pair.predicted.step_time is not None:
            assert stored[pair.run.source, pair.run.id] == pytest.approx(pair.predicted.step_time, rel=1e-3)
    path.write_text("source,id\nx,y\n")
    with pytest.raises(PlannerError, match="not a file of stored predictions"):
        snapshot.read(path)


def test_page_shows_every_source_and_sweep(pairs: list[Pair], tmp_path: Path) -> None:
    some = [pair for pair in pairs if pair.run.family in ("Hagemann", "zero-bubble", "torchtitan")]
    summary = summarise(some)
    text = page(some, summary, "p.png")
    assert "![" in text and "## The 20 worst rows" in text
    columns_are_equal(text)
    for source in {pair.run.source for pair in some if pair.time_error is not None}:
        assert f"| {source} |" in text
    assert text.count(" layers), ") == len(summary["ranking"]["sweeps"])
    scatter(some, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_page_counts_runs_that_are_in_no_summary(pairs: list[Pair]) -> None:
    some = [pair for pair in pairs if "nanotron" in pair.run.family]
    text, reasons = page(some, summarise(some), "p.png"), [pair.run.set_aside for pair in some if pair.run.set_aside]
    assert len(set(reasons)) == 3
    for reason in set(reasons):
        assert f"| in no summary: {reason} | {reasons.count(reason)} |" in text


def columns_are_equal(text: str) -> None:
    """Every row of a table has the columns of the row above."""
    for above, below in pairwise(text.splitlines()):
        if above.startswith("|") and below.startswith("|"):
            assert above.replace("\\|", "").count("|") == below.replace("\\|", "").count("|"), below


def test_pages_of_the_project_say_what_the_notes_hold(pairs: list[Pair]) -> None:
    some = [pair for pair in pairs if pair.run.family in ("Hagemann", "zero-bubble", "torchtitan")]
    summary, proofs = summarise(some, bounded=BOUNDS), {}
    for quantity in bars.QUANTITIES:
        rows = bars.held_back(bars.residuals(some, quantity))
        proofs[quantity] = bars.coverage(rows, bars.tails_of(rows))
    summary["bounds"] = [{**one, "met": one["name"] != "regret of the pick"} for one in summary["bounds"]]
    limit = {"bound": "regret of the pick", "floor": "8 %", "short": "few rows", "proof": "rows a and b"}
    rows = [{"source": "torchao", "rows": "all", "why": "the power limit is not stated"}]
    peers = {"text": "Peers:", "headings": ["who", "runs", "median", "within"], "rows": [["P", 1, "9 %", "5 %"]]}
    notes = {"rows": rows, "limits": [limit], "peers": {**peers, "families": {"Hagemann": 13}}}
    whole = appendix(some, summary, some, [], proofs, notes)
    columns_are_equal(whole)
    assert "| Hagemann | 13 % |" in whole and "the power limit is not stated" in whole and "rows a and b" in whole
    short = reader(some, summary, some, proofs, notes)
    columns_are_equal(short)
    assert "(asked: at most 3.0 %); few rows." in " ".join(short.split()) and "rows a and b" not in short
    assert f"{summary['overall']['n']:,}" in short


def test_the_section_on_other_jobs_is_made_of_its_rows() -> None:
    text = beyond.section(answered([one for one in shipped_beyond() if one.parent.name == "elastic"]))
    columns_are_equal(text)
    assert text.startswith(beyond.HEADING) and "| elastic | reconfigure_s |" in text
    page = "# A\n\n## What is not reached, and why\n\nno\n"
    once = beyond.replaced(page, text)
    assert once.count(beyond.HEADING) == 1 and beyond.replaced(once, text) == once and once.endswith("and why\n\nno\n")


def test_links() -> None:
    assert link("arXiv 2205.05198, Table 4") == "[arXiv 2205.05198](https://arxiv.org/abs/2205.05198)"
    assert (
        link("repository NVIDIA/dgxc-benchmarking, a.md")
        == "[NVIDIA/dgxc-benchmarking](https://github.com/NVIDIA/dgxc-benchmarking)"
    )
    assert link("a wiki, page 3") == "a wiki"


def test_page_of_the_project_is_short_and_the_appendix_whole() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 115 and "accuracy.png" in text and "(accuracy-appendix.md)" in text
    for heading in ("Step time", "Memory", "Choice", "What is not reached", "How to reproduce"):
        assert f"\n## {heading}" in text
    whole = (ROOT / "docs" / "accuracy-appendix.md").read_text(encoding="utf-8")
    assert "## Choice" in whole and "left out\n" in whole
    assert len(whole.split("### By source")[1].split("## Memory")[0].strip().splitlines()) > 90
    notes = library.read_yaml(ROOT / "docs" / "accuracy_notes.yaml")
    assert set(notes) == {"peers", "rows", "limits"}
    assert {one["bound"] for one in notes["limits"]} <= {one.name for one in BOUNDS}
    for name in (word for row in notes["rows"] for word in row["source"].split(", ")):
        assert list((ROOT / "profiles" / "runs").glob(f"{name}.yaml")), f"{name} is no source"
