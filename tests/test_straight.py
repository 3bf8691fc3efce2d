"""Times that a simulator computed are told from measured ones, shown, and kept out of every figure about measured runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import library
from planner.questions.accuracy import bars
from planner.questions.accuracy.numbers import pairs_of, summarise
from planner.questions.accuracy.page import page
from planner.questions.accuracy.straight import scatter_of, straightness
from planner.questions.sensitivity import ties
from planner.runs import Run, read_runs

RUNS = library.profiles_directory() / "runs"
COMPUTED = "oss-vtrain-single-node"


@pytest.mark.parametrize(
    ("points", "scatter"),
    [
        ({2: 5.0, 4: 9.0, 8: 17.0, 16: 33.0}, 0.0),
        # Times t: what is left of (1, 1, 1) beside the columns 1 / t and m / t. With D = diag(1 / t) these are D (1, 1, 1) and
        # D (1, 2, 3), so that D^-1 (1, -2, 1) = (1, -2, 1.0309) is normal to both: |1 - 2 + 1.0309| / sqrt(1 + 4 + 1.0628).
        ({1: 1.0, 2: 1.0, 3: 1.0 / 0.97}, 0.01256),
    ],
)
def test_scatter_around_a_line(points: dict[int, float], scatter: float) -> None:
    assert scatter_of(points) == pytest.approx(scatter, abs=1e-5)


def test_every_source_with_series_is_what_it_is_listed_as(every_run: list[Run]) -> None:
    """A measured series scatters by far more than the digits that were printed; one that does not was computed."""
    found = {one.source: one for one in straightness(every_run)}
    assert found[COMPUTED].computed and found[COMPUTED].series == 288
    for one in found.values():
        assert (one.largest < 1e-5) if one.computed else (one.median > 1e-4), one


def test_computed_rows_are_shown_and_do_not_count(tmp_path: Path) -> None:
    pairs = pairs_of(read_runs([RUNS / f"{COMPUTED}.yaml", RUNS / "oss-zero-bubble-1f1b.yaml"]))
    measured = [pair for pair in pairs if not pair.run.computed]
    assert 0 < len(measured) < len(pairs) and {pair.run.source for pair in measured} == {"oss-zero-bubble-1f1b"}
    summary = summarise(pairs)
    assert summary["overall"] == summarise(measured)["overall"]
    assert summary["families"]["vTrain"]["n"] == 1440
    assert summary["ranking"]["families"]["vTrain"]["sweeps"] == 96 and summary["ranking"]["overall"]["sweeps"] == 0
    assert {one.source for one in bars.residuals(pairs, "step_time")} == {"oss-zero-bubble-1f1b"}
    assert len(ties.ordered(pairs)) == len(ties.ordered(measured))
    text = page(pairs, summary, picture="", notes={"computed": {COMPUTED: "Why.", "absent": "Not here."}}, proof="")
    assert f"| {COMPUTED} | computed | 288 |" in text and "oss-vtrain-single-node (1,440 rows)" in text
    assert "Why." in text and "Not here." not in text
