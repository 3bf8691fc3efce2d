"""Ranks of one job, started and watched: what the profiler and the validator share."""
