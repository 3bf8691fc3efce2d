"""``plan first-day``: the other commands as processes, one after the other, each with a limit, all into one folder."""
