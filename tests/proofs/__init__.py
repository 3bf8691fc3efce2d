"""Proofs of `plan validate`; no command of `plan` needs them. ``python -m tests.proofs.NAME``, or pytest -m proof."""
