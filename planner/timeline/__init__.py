"""One plan, second by second and byte by byte: its passes, the slices of its step, its memory over time."""
