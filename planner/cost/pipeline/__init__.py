"""Pipelines: which stage holds what, how long a schedule takes, in closed form and action by action."""
