"""One plan over time: its passes, the slices of its step, its memory."""
