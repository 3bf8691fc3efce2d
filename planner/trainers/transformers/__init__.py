"""Hugging Face transformers: what the trainers around its Trainer share, and the log that it leaves."""

PLACE = 150
