"""Writes what follows from the errors on the published runs; run it after a change of the cost model or of the runs.

\b
- ``profiles/error_bars.yaml``: the intervals that ``plan`` prints,
- ``profiles/residuals.yaml``: the errors behind them, which reports show,
- ``profiles/ties.yaml``: how often two plans of one job are ordered rightly, by the predicted gap,
- ``tests/data/predictions.csv``: every prediction, with which CI compares the next change,
- ``docs/accuracy.md``, ``docs/accuracy-appendix.md`` and ``docs/accuracy.png``: the pages, with what ``docs/accuracy_notes.yaml``
  says about rows and families,
- ``docs/serving.md``: its tables of errors.

It prints the errors by family before (the stored predictions) and after.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner import library  # noqa: E402
from planner.error_bars import QUANTITIES  # noqa: E402
from planner.questions.accuracy.accuracy_page import scatter  # noqa: E402
from planner.questions.accuracy.beyond import answered, shipped_beyond  # noqa: E402
from planner.questions.accuracy.bounds import BOUNDS  # noqa: E402
from planner.questions.accuracy.prediction import pairs_of  # noqa: E402
from planner.questions.accuracy.summary import summarise  # noqa: E402
from planner.runs import read_runs  # noqa: E402
from tools.evidence import bars, beyond, serving, snapshot, ties  # noqa: E402
from tools.evidence.appendix import appendix  # noqa: E402
from tools.evidence.held_back import held_back_pairs  # noqa: E402
from tools.evidence.reader import reader  # noqa: E402

HEAD = """# Error bars of plan: measured / predicted of nine of ten runs, by kind of run, code and generation of GPU.
# Written by tools/update_accuracy.py from the residuals of profiles/runs; tools/evidence/bars.py says how. held: the part of
# the runs that they hold as a mean over sources, every campaign left out in turn.
"""
RESIDUALS_HEAD = """# Errors of plan on the published runs, predicted / measured - 1 in percent, by source and class of run: the runs behind
# error_bars.yaml. Written by tools/update_accuracy.py; planner/questions/report/evidence.py reads it.
"""
TIES_HEAD = """# How often two plans of one job are ordered rightly, by the predicted gap ln(slower / faster) between them.
# Written by tools/update_accuracy.py from the sweeps in profiles/runs; tools/evidence/ties.py says how.
"""
PREDICTIONS = ROOT / "tests" / "data" / "predictions.csv"


@click.command(help=__doc__)
@click.option("--beyond", "beyond_alone", is_flag=True, help="Only the section on mixed clusters, links, elastic jobs and RL.")
def main(beyond_alone: bool) -> None:
    """Predict once, then write every file."""
    today = datetime.date.today().isoformat()
    section, page = beyond.section(answered(shipped_beyond())), ROOT / "docs" / "accuracy.md"
    if beyond_alone:
        library.write_whole(page, beyond.replaced(page.read_text(encoding="utf-8"), section))
        return
    served = ROOT / "docs" / "serving.md"
    library.write_whole(served, serving.with_tables(served.read_text(encoding="utf-8"), today))
    pairs = pairs_of(read_runs())
    if PREDICTIONS.exists():
        print("\n".join(snapshot.report(snapshot.compare(pairs, snapshot.read(PREDICTIONS)))))
    library.write_whole(PREDICTIONS, snapshot.text(pairs))
    print("every campaign held back: some minutes", file=sys.stderr)
    held, left = held_back_pairs(pairs)
    unlisted = pairs_of(read_runs(unlisted=True))
    tables, proofs = {}, {}
    for quantity in QUANTITIES:
        found, unseen = bars.residuals(pairs, quantity), bars.residuals(held, quantity)
        rows = bars.held_back(found, unseen)
        tails = bars.tails_of(rows)
        proofs[quantity] = bars.coverage(rows, tails)
        tables[quantity] = (*bars.of_unlisted(bars.residuals(unlisted, quantity)), *bars.build(found, tails))
    library.write_whole(ROOT / "profiles" / "error_bars.yaml", HEAD + library.dump_yaml(bars.to_dict(tables, proofs)))
    errors = {quantity: bars.stored_errors(pairs, bars.residuals(pairs, quantity)) for quantity in QUANTITIES}
    library.write_whole(
        ROOT / "profiles" / "residuals.yaml", RESIDUALS_HEAD + library.dump_yaml(bars.errors_to_dict(errors))
    )
    counted = ties.build(ties.ordered(pairs), today)
    library.write_whole(ROOT / "profiles" / "ties.yaml", TIES_HEAD + library.dump_yaml(ties.to_dict(counted)))
    scatter(pairs, ROOT / "docs" / "accuracy.png")
    notes, summary = library.read_yaml(ROOT / "docs" / "accuracy_notes.yaml"), summarise(pairs, bounded=BOUNDS)
    library.write_whole(page, reader(pairs, summary, held, proofs, notes, section))
    library.write_whole(ROOT / "docs" / "accuracy-appendix.md", appendix(pairs, summary, held, left, proofs, notes))


if __name__ == "__main__":
    main()
