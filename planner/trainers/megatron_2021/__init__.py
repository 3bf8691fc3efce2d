"""Megatron-LM of 2021 and 2022."""
