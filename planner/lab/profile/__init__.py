"""Measures the user's own hardware and writes a hardware profile; may import torch."""
