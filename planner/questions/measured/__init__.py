"""A running server, or the result of a benchmark, beside a serve plan."""
