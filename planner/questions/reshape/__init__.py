"""``plan reshape``: the best plan on another number of GPUs, the move counted."""
