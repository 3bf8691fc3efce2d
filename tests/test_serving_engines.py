"""Engines as versioned data, their memory and their rules."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import PlannerError, UnknownNameError
from planner.hardware import load_hardware
from planner.model import load_model
from planner.serving.engine import engine_names, load_engine
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_rules import violations
from planner.serving.traffic import Lengths, Traffic
from planner.units import GIB, KIB

H100 = load_hardware("h100-sxm")
ASK = Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(1024))


def test_an_engine_is_of_its_version() -> None:
    assert load_engine("vllm").accounting.share == 0.92
    assert load_engine("vllm@0.19.0").accounting.share == 0.90
    assert load_engine("vllm@v0.99").note
    with pytest.raises(UnknownNameError):
        load_engine("vlm")
    with pytest.raises(PlannerError, match="no number"):
        load_engine("vllm@nightly")
    assert engine_names() == ["sglang", "trtllm", "vllm"]


def test_llama_70b_on_eight_h100_by_hand() -> None:
    """70.55e9 parameters: embedding and head 128256 x 8192 each; all but norms over 8 ranks, in bf16: 16.4 GiB."""
    model = load_model("llama-70b")
    found = serving_memory(model, H100, load_engine("vllm"), Precision(), ServingLayout(tp=8), ASK)
    norms = (2 * 80 + 1) * 8192
    weights = 2.0 * ((70_553_706_496 - norms) / 8 + norms)
    assert found.weights == pytest.approx(weights, rel=1e-6)
    assert found.bytes_per_token == 2 * 80 * 1 * 128 * 2.0  # one of eight key-value heads on each rank
    assert found.capacity == pytest.approx(found.cache / found.bytes_per_token)


def test_deepseek_v3_keeps_68_kib_a_token_on_every_rank() -> None:
    model = load_model("deepseek-v3")
    layout = ServingLayout(tp=np.array([1, 8]), attn_dp=np.array([8, 1]), moe_tp=8)
    found = serving_memory(
        model, load_hardware("h200-sxm"), load_engine("sglang"), Precision(weights="fp8_block"), layout, ASK
    )
    assert np.all(found.bytes_per_token == 61 * 576 * 2)
    assert found.bytes_per_token[0] / KIB == pytest.approx(68.6, abs=0.05)
    assert found.weights[1] < 88 * GIB


def test_rules_say_what_is_wrong() -> None:
    said = violations(load_model("llama-70b"), H100, load_engine("vllm"), Precision(), ServingLayout(tp=3))
    assert said[0].startswith("tp 3 does not divide the 64 heads of llama-3.1-70b")
