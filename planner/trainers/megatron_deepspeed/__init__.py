"""Megatron-DeepSpeed."""
