"""Runs a plan with PyTorch alone, really or on fake tensors, and holds what happens against what was predicted."""
