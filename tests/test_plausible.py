"""Sizes that a typing error gives are said; those of published models are not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from planner import api, library
from planner.model import from_hugging_face, load_model
from planner.plausible import odd_sizes

CONFIGS = json.loads((Path(__file__).parent / "data/hugging_face_configs.json").read_text())


def test_no_published_model_is_doubted() -> None:
    for name in library.names("models"):
        assert list(odd_sizes(load_model(name))) == [], name
    for name, config in CONFIGS.items():
        assert list(odd_sizes(from_hugging_face(config, name=name))) == [], name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 1}, "head_dim 1"), ({"head_dim": 100}, "head_dim 100"), ({"ffn_size": 1}, "ffn_size 1"),
        ({"ffn_size": 143360}, "ffn_size 143360"), ({"vocab_size": 1}, "vocab_size 1"), ({"hidden_size": 4097}, "hidden_size 4097"),
        ({"num_heads": 31, "num_kv_heads": 31}, "num_heads 31"), ({"num_heads": 256}, "num_heads 256"),
        ({"max_sequence_length": 1}, "max_sequence_length 1"), ({"num_layers": 1}, "num_layers 1"),
    ],
)  # fmt: skip
def test_what_no_model_has_is_assumed_aloud(changes: dict[str, Any], said: str) -> None:
    """In what was assumed: the table, JSON, and the plan file."""
    model = dataclasses.replace(load_model("llama-8b"), published_parameters=0.0, **changes)
    plan = api.estimate(model=model, gpus=1, hardware="b200-sxm", sequence_length=1024, global_batch_size=8)
    found = [one["value"] for one in plan.to_dict()["assumptions"] if one["what"] == "odd size"]
    assert said in found and len(found) == len(set(found)) <= 2


def test_a_published_size_that_disagrees_is_said() -> None:
    model = dataclasses.replace(load_model("llama-8b"), published_parameters=1)
    plan = api.estimate(model=model, gpus=8, hardware="h100-sxm")
    assert any(one.what == "parameters" and "a size of its file is wrong" in one.why for one in plan.assumed)
