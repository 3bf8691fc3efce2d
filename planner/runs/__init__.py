"""Measured runs: reads the schema of ``profiles/runs`` and says each row in the planner's own words.

A row becomes (workload, cluster, trainer, layout, measured), or a reason why it cannot. What a row leaves open is
filled from facts about its framework (``profiles/frameworks.yaml``); further guesses are listed under ``assumptions``.
Nothing here looks at a prediction. Texts of other frameworks live in this package and in frameworks.yaml only.
"""

from planner.runs.mapping import Run, read_runs, share, to_run
from planner.runs.measured import FORMULAS, Measured, flop_per_token
from planner.runs.rows import Row, read_rows, rows_from_dict, shipped

__all__ = [
    "FORMULAS", "Measured", "Row", "Run", "flop_per_token", "read_rows", "read_runs", "rows_from_dict", "share",
    "shipped", "to_run",
]  # fmt: skip
