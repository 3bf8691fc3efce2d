"""Bytes per GPU: states, activations, workspace, buffers, and their peak."""
