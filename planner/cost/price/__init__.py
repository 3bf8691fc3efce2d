"""Seconds of operators and collectives, and of the stages that they add up to."""
