"""``plan rl``: the command, its tables, the trace of a step."""
