"""Spoiled files and flags of every kind, seeded; benchmarks/fuzz.py makes a million of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing import KINDS, one

QUICK = {
    "config.json": 700, "model": 450, "trainer": 180, "plan": 50, "hardware": 20, "runs": 50, "log": 20, "configuration": 30,
    "flags": 5,
}  # fmt: skip
"""How many of each in the quick suite; with those of the proof they are more than 20,000."""
PROOF = {
    "config.json": 9000, "model": 5500, "trainer": 3000, "plan": 400, "hardware": 300, "runs": 700, "log": 250,
    "configuration": 400, "flags": 60,
}  # fmt: skip
assert QUICK.keys() == PROOF.keys() == KINDS.keys() and sum(PROOF.values()) + sum(QUICK.values()) > 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoiled_input_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    found = {one(kind, seed, tmp_path) for seed in range(QUICK[kind])}
    assert found == {"sentence", "accepted"} or kind == "flags"  # neither all are refused nor all let through


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_many_spoiled_inputs_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    assert {one(kind, seed, tmp_path) for seed in range(10**6, 10**6 + PROOF[kind])} == {"sentence", "accepted"}
