"""Traces of torch.profiler: what ran on a GPU in a step, and what waited for what."""
