"""PyTorch itself: one script, no framework."""
