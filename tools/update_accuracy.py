"""Writes what follows from the errors on the published runs: the error bars, and the predictions that CI compares with.

Run it after a change of the cost model, then look at what moved: ``git diff docs/accuracy.md``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner import library  # noqa: E402
from planner.accuracy import bars, pairs_of  # noqa: E402
from planner.error_bars import QUANTITIES  # noqa: E402
from planner.runs import read_runs  # noqa: E402

HEAD = """# Error bars of plan: measured / predicted of nine of ten runs, by trainer, generation of GPU and kind of run.
# Written by tools/update_accuracy.py from the residuals of profiles/runs; planner/accuracy/bars.py says how, docs/accuracy.md how well they hold.
"""


def main() -> None:
    pairs = pairs_of(read_runs())
    tables = {}
    for quantity in QUANTITIES:
        found = bars.residuals(pairs, quantity)
        tables[quantity] = bars.build(found, bars.widening(found))
    text = HEAD + library.dump_yaml(bars.to_dict(tables))
    library.write_whole(ROOT / "profiles" / "error_bars.yaml", text)


if __name__ == "__main__":
    main()
