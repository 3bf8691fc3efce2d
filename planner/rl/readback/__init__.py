"""Configurations of RL frameworks as RL plans."""
