"""Aleph Alpha's training code of 2023."""
