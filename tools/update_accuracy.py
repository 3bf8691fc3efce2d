"""Writes what follows from the errors on the published runs; run it after a change of the cost model or of the runs.

- ``profiles/error_bars.yaml``: the intervals that ``plan`` prints,
- ``profiles/residuals.yaml``: the errors behind them, which reports show,
- ``profiles/ties.yaml``: how often two plans of one job are ordered rightly, by the predicted gap,
- ``tests/data/predictions.csv``: every prediction, with which CI compares the next change,
- ``docs/accuracy.md`` and ``docs/accuracy.png``: the page, with what ``docs/accuracy_notes.yaml`` says about rows and families.

It prints the errors by family before (the stored predictions) and after.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner import library  # noqa: E402
from planner.error_bars import QUANTITIES  # noqa: E402
from planner.questions.accuracy import bars, snapshot
from planner.questions.accuracy.numbers import Pair, pairs_of, summarise
from planner.questions.accuracy.page import page  # noqa: E402
from planner.questions.accuracy.scatter import scatter  # noqa: E402
from planner.questions.calibrate.held_back import held_back_pairs  # noqa: E402
from planner.questions.calibrate.page_held_back import held_back_section  # noqa: E402
from planner.questions.report import evidence
from planner.questions.sensitivity import ties
from planner.runs import read_runs  # noqa: E402

HEAD = """# Error bars of plan: measured / predicted of nine of ten runs, by code, generation of GPU and kind of run.
# Written by tools/update_accuracy.py from the residuals of profiles/runs; planner/questions/accuracy/bars.py says how, docs/accuracy.md
# how well they hold for sources that were left out.
"""
RESIDUALS_HEAD = """# Errors of plan on the published runs, predicted / measured - 1 in percent, by source and class of run: the runs behind
# error_bars.yaml. Written by tools/update_accuracy.py; planner/questions/report/evidence.py reads it.
"""
TIES_HEAD = """# How often two plans of one job are ordered rightly, by the predicted gap ln(slower / faster) between them.
# Written by tools/update_accuracy.py from the sweeps in profiles/runs; planner/questions/sensitivity/ties.py says how.
"""
PREDICTIONS = ROOT / "tests" / "data" / "predictions.csv"


def main() -> None:
    pairs = pairs_of(read_runs())
    if PREDICTIONS.exists():
        print("\n".join(snapshot.report(snapshot.compare(pairs, snapshot.read(PREDICTIONS)))))
    library.write_whole(PREDICTIONS, snapshot.text(pairs))
    print("every source held back: about two minutes", file=sys.stderr)
    held, left = held_back_pairs(pairs)
    tables, proofs = {}, {}
    for quantity in QUANTITIES:
        found, unseen = bars.residuals(pairs, quantity), bars.residuals(held, quantity)
        proofs[quantity] = bars.calibrated(bars.held_back(found, unseen))
        tables[quantity] = bars.build(found, proofs[quantity]["widen"])
    library.write_whole(ROOT / "profiles" / "error_bars.yaml", HEAD + library.dump_yaml(bars.to_dict(tables)))
    rows = {quantity: bars.stored_errors(pairs, bars.residuals(pairs, quantity)) for quantity in QUANTITIES}
    library.write_whole(
        ROOT / "profiles" / "residuals.yaml", RESIDUALS_HEAD + library.dump_yaml(evidence.to_dict(rows))
    )
    write_ties(pairs)
    scatter(pairs, ROOT / "docs" / "accuracy.png")
    notes = library.read_yaml(ROOT / "docs" / "accuracy_notes.yaml")
    proof = held_back_section(pairs, held, left, proofs)
    text = page(pairs, summarise(pairs), picture="accuracy.png", notes=notes, proof=proof)
    library.write_whole(ROOT / "docs" / "accuracy.md", text)


def write_ties(pairs: list[Pair]) -> None:
    counted = ties.build(ties.ordered(pairs), datetime.date.today().isoformat())
    library.write_whole(ROOT / "profiles" / "ties.yaml", TIES_HEAD + library.dump_yaml(ties.to_dict(counted)))


if __name__ == "__main__":
    main()
