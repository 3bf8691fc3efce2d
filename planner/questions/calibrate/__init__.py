"""Measured runs and training logs into a corrected hardware profile."""
