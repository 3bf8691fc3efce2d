"""Megatron-LM and Megatron Core."""
