"""A running server, or the result of a benchmark, compared with a serve plan."""
