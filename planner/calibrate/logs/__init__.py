"""Training logs into measured runs: one reader per framework, all of them giving a row in the schema of profiles/runs."""

from planner.trainers.reading.log_rows import Given, is_log, read_log, row_of_log

__all__ = ["Given", "is_log", "read_log", "row_of_log"]
