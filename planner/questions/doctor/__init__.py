"""Measured against predicted: what explains the gap."""
