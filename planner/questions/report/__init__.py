"""A plan as a page, Markdown, JSON, a trace or pictures."""
