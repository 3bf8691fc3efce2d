"""Readers of what people run today: a trainer's configuration becomes a plan."""
