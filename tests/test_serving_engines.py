"""Engines as versioned data, and what each may run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.errors import PlannerError, UnknownNameError
from planner.hardware import load_hardware
from planner.model import load_model
from planner.serving.engine import FACTS, Engine, engine_names, load_engine
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.serving_rules import RULES, legal, rules_of, violations
from planner.units import MIB

H100, A100 = (load_hardware(name) for name in ("h100-sxm", "a100-sxm-80gb"))


# ---------------------------------------------------------------------------------------------------------------- engines


def test_an_engine_is_of_its_version() -> None:
    shares = {"0.6.3": 0.90, "v0.19.0": 0.90, "0.20": 0.92, "0.33.0": 0.92, "0.21.0rc1": 0.92}
    assert {one: load_engine(f"vllm@{one}").accounting.share for one in shares} == shares
    assert load_engine("vllm").version == "0.33" and not load_engine("vllm").note
    assert load_engine("vllm@0.33.4").note == "", "a patch of the newest minor version is known"
    assert "those of 0.33" in load_engine("vllm@0.99").note and "those of 0.4" in load_engine("sglang@0.3").note
    assert not load_engine("vllm@0.13").overlap_scheduler and load_engine("vllm@0.14").overlap_scheduler
    assert load_engine("vllm@0.7.3").mixes_prefill is False and load_engine("vllm@0.8").chunked_prefill
    assert [load_engine(name).admits for name in engine_names()] == ["input", "all", "input"]
    with pytest.raises(UnknownNameError):
        load_engine("vlm")
    with pytest.raises(PlannerError, match="'nightly' has no number; write vllm@0.33"):
        load_engine("vllm@nightly")


@pytest.mark.parametrize("name", engine_names())
def test_every_version_that_a_fact_names_is_an_engine(name: str) -> None:
    facts = library.read_yaml(library.find("engines", name))["facts"]
    assert set(facts) >= {"max_batch", "graphs", "accounting", "host", "formats", "kinds"} and set(facts) <= set(FACTS)
    for fact, history in facts.items():
        since = [tuple(map(int, one["since"].split("."))) for one in history]
        assert since == sorted(set(since)), f"{fact} of {name} is not in order"
        for one in history:
            engine = load_engine(f"{name}@{one['since']}")
            assert engine.sources[fact].startswith(f"since {one['since']}: ") and len(one["source"]) > 10


def defaults(engine: str, hardware: str, **layout: Any) -> tuple[float, float, float]:
    """Default batch and budget, and the largest graph at that batch."""
    one, card, at = load_engine(engine), load_hardware(hardware), ServingLayout(**layout)
    batch, tokens = float(one.default_max_batch(card, at)), float(one.default_max_tokens(card, at))
    return batch, tokens, float(one.largest_graph(replace(at, max_batch=int(batch)), card))


def test_defaults_by_card_and_version() -> None:
    assert defaults("vllm@0.33", "h100-sxm") == (1024, 8192, 512)
    assert defaults("vllm@0.33", "a100-sxm-80gb") == (256, 2048, 512), "a large budget costs an A100 throughput"
    assert defaults("vllm@0.33", "b200-sxm") == (1024, 16384, 1024)
    assert defaults("vllm@0.26", "b200-sxm") == (1024, 8192, 512)
    assert defaults("vllm@0.12", "l40s") == (256, 2048, 512)
    assert defaults("vllm@0.6.4", "h100-sxm") == (256, 2048, 256)
    assert defaults("sglang", "h200-sxm", tp=2) == (2048, 8192, 256)
    assert defaults("sglang", "h200-sxm", tp=4) == (2048, 8192, 512)
    assert defaults("sglang", "h200-sxm", tp=2, attn_dp=2, ep=4) == (4096, 8192, 512), (
        "tp as SGLang counts it: GPUs of a stage"
    )
    assert defaults("sglang", "b200-sxm") == (2048, 16384, 512)
    assert defaults("sglang@0.5.9", "rtx-4090") == (2048, 2048, 24) and defaults("sglang", "rtx-4090") == (
        2048,
        4096,
        48,
    )
    assert defaults("trtllm", "h100-sxm") == (2048, 8192, 2048)


def test_a_batch_is_padded_to_the_next_captured_size_and_eager_above_the_largest() -> None:
    vllm, at = load_engine("vllm@0.15"), ServingLayout(max_batch=200)
    batch = np.array([1.0, 3.0, 5.0, 9.0, 255.0, 257.0, 390.0, 401.0])
    assert list(vllm.padded(batch, at, H100)) == [1, 4, 8, 16, 256, 272, 400, 401], (
        "steps of 8, of 16 above 256, up to twice 200"
    )
    assert list(vllm.captured(batch, at, H100)) == [True] * 7 + [False]
    assert float(load_engine("vllm@0.11").padded(257, at, H100)) == 264
    ranks = ServingLayout(attn_dp=2, ep=2, max_batch=200)
    assert not vllm.captured(201, ranks, H100), "graphs are captured for the batch of a rank"
    sglang = load_engine("sglang")
    assert (
        float(sglang.padded(9, ServingLayout(max_batch=512), H100)) == 12
        and float(sglang.padded(9, ServingLayout(max_batch=10), H100)) == 10
    )
    assert [
        float(load_engine(f"trtllm@{one}").padded(130, ServingLayout(), H100)) for one in ("0.20", "1.2", "1.3")
    ] == [130, 256, 192]


def test_the_own_all_reduce_ends_at_a_size_by_version_card_and_gpus() -> None:
    n = np.array([1, 2, 3, 4, 8, 16])
    assert list(load_engine("vllm@0.10.2").all_reduce_limit(H100, n) / MIB) == [0, 8, 0, 8, 8, 0]
    assert list(load_engine("vllm").all_reduce_limit(H100, n) / MIB) == [0, 64, 0, 32, 64, 0]
    assert load_engine("vllm").all_reduce_limit(load_hardware("b300-sxm"), 8) == 64 * MIB
    assert load_engine("vllm@0.15").all_reduce_limit(load_hardware("b300-sxm"), 8) == 8 * MIB, "10.3 came with 0.19"
    assert load_engine("sglang@0.5.9").all_reduce_limit(load_hardware("mi300x"), 8) == 16 * MIB
    assert list(load_engine("vllm").all_reduce_limit(load_hardware("l40s"), np.array([2, 4]))) == [8 * MIB, 0], (
        "no link between any two"
    )


def test_a_cache_is_fp8_by_default_where_the_checkpoint_has_its_scales() -> None:
    assert (
        load_engine("trtllm").cache_dtype_default("fp8") == "fp8"
        and load_engine("trtllm").cache_dtype_default("fp8_block") == "bf16"
    )
    assert (
        load_engine("vllm").cache_dtype_default("fp8") == "bf16"
        and load_engine("vllm").cache_dtype_default("fp16") == "fp16"
    )
    assert (
        load_engine("vllm").cache_dtype_default("nvfp4") == "fp8"
        and load_engine("vllm@0.13").cache_dtype_default("nvfp4") == "bf16"
    )


# ------------------------------------------------------------------------------------------------------------------ rules

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "vendor": ("trtllm llama-70b mi300x", {"tp": 8}, "trtllm runs on NVIDIA GPUs, and mi300x is from AMD; choose"),
    "model": ("vllm@0.9 qwen3-next-80b-a3b h100-sxm", {"tp": 2, "ep": 2}, "delta net layers, which vllm 0.9 does not run"),
    "formats": (
        "trtllm llama-70b h100-sxm nvfp4", {"tp": 8},
        "trtllm 1.3 does not run nvfp4 weights on h100-sxm (Hopper); it runs bf16, fp16, fp8, fp8_block, mxfp4, int4 there",
    ),
    "heads": ("vllm llama-70b h100-sxm", {"tp": 3}, "tp 3 does not divide the 64 heads of llama-3.1-70b; give a tp of 1, 2, 4"),
    "key-value heads": ("vllm qwen2.5-14b h100-sxm", {"tp": 5}, "tp 5 neither divides the 8 key-value heads"),
    "linear heads": ("vllm qwen3-next-80b-a3b h100-sxm", {"tp": 64, "ep": 64}, "tp 64 does not divide the 32 value heads"),
    "decode context": ("vllm llama-70b h100-sxm", {"tp": 8, "dcp": 2}, "tp 8 must be a multiple of 8 key-value heads x dcp"),
    "attention of TensorRT-LLM": (
        "trtllm deepseek-v3 h200-sxm", {"tp": 4, "attn_dp": 2, "ep": 8}, "tp 4 x attn_dp 2 is tp 1 x attn_dp 8",
    ),
    "stages": ("vllm llama-70b h100-sxm", {"tp": 8, "pp": 81}, "pp 81 is more than the 80 layers"),
    "MLP": ("sglang qwen3-32b h100-sxm fp8_block", {"tp": 16}, "into multiples of the 128 that share a scale"),
    "experts over ranks": ("sglang deepseek-v3 h200-sxm", {"tp": 8, "ep": 4}, "give ep x moe_tp = 8"),
    "number of experts": ("trtllm mixtral-8x7b h100-sxm", {"tp": 16, "ep": 16}, "ep 16 is more than the 8 experts"),
    "width of experts": (
        "vllm@0.28 qwen3-235b-a22b h100-sxm fp8_block", {"tp": 8, "moe_tp": 8},
        "moe_tp 8 does not divide the expert width 1536 of qwen3-235b-a22b into multiples of the 128",
    ),
    "experts of vLLM": (
        "vllm deepseek-v3 h200-sxm", {"tp": 8, "ep": 4, "moe_tp": 2}, "give ep 8 (--enable-expert-parallel) or ep 1",
    ),
    "dense model": ("vllm llama-70b h100-sxm", {"tp": 4, "attn_dp": 2}, "ep, moe_tp and attn_dp are 1; here they are 1, 1 and 2"),
    "weights in host memory": (
        "sglang deepseek-v3 h200-sxm fp8_block", {"tp": 4, "ep": 4, "gpu_weights": 50}, "and deepseek-v3 has ep 4 and attn_dp 1",
    ),
    "room in host memory": (
        "vllm deepseek-v3 rtx-4090", {"gpu_weights": 1}, "99 % of the weights on 1 GPU(s) are 1",
    ),
    "budget of a step": (
        "vllm llama-70b h100-sxm", {"tp": 8, "max_batch": 1024, "max_tokens": 512}, "max_tokens 512 is less than the 1024",
    ),
}  # fmt: skip
"""Rule -> engine, model, card and format; a layout that breaks it; part of the sentence."""


@pytest.mark.parametrize("name", [one.name for one in RULES])
def test_each_rule_says_what_is_wrong(name: str) -> None:
    words, layout, sentence = WRONG[name]
    engine, model, card, *form = words.split()
    precision = Precision(weights=form[0] if form else "bf16")
    one = (load_model(model), load_hardware(card), load_engine(engine), precision, ServingLayout(**layout))
    said = [line for line in violations(*one) if sentence in line]
    assert len(said) == 1 and not legal(*one), violations(*one)
    assert any(rule.name == name for rule in rules_of(one[2]))


def test_what_engines_run() -> None:
    ask = {
        ("vllm", "deepseek-v3", "h200-sxm", "fp8_block"): {"tp": 8, "moe_tp": 8},
        ("sglang", "deepseek-v3", "h200-sxm", "fp8_block"): {"tp": 2, "attn_dp": 4, "ep": 4, "moe_tp": 2},
        ("trtllm", "deepseek-v3", "gb200-nvl72", "nvfp4"): {"attn_dp": 36, "ep": 36},
        ("vllm", "llama-70b", "a100-sxm-80gb", "fp8"): {"tp": 4, "pp": 2},
        ("vllm", "llama-70b", "mi300x", "fp8"): {"tp": 16},
        ("vllm", "llama-70b", "h100-sxm", "bf16"): {"tp": 16, "dcp": 2},
        ("vllm", "deepseek-v3", "h200-sxm", "fp8"): {"tp": 8, "dcp": 8, "ep": 8},
        ("vllm@0.33", "qwen3-235b-a22b", "h100-sxm", "fp8_block"): {"tp": 8, "moe_tp": 8},
        ("sglang", "gpt-oss-120b", "mi355x", "mxfp4"): {"tp": 8, "moe_tp": 8},
    }
    for (engine, model, hardware, form), layout in ask.items():
        found = violations(
            load_model(model),
            load_hardware(hardware),
            load_engine(engine),
            Precision(weights=form),
            ServingLayout(**layout),
        )
        assert found == [], (engine, model)


def test_formats_by_generation() -> None:
    runs = lambda engine, form, card: load_engine(engine).runs(form, load_hardware(card))  # noqa: E731
    assert (
        runs("vllm", "nvfp4", "h100-sxm")
        and not runs("trtllm", "nvfp4", "h100-sxm")
        and runs("trtllm", "nvfp4", "b200-sxm")
    )
    assert (
        not runs("trtllm", "fp8", "a100-sxm-80gb")
        and runs("trtllm", "fp8", "l40s")
        and runs("vllm", "fp8", "a100-sxm-80gb")
    )
    assert runs("vllm", "fp8", "mi300x") and not runs("vllm", "fp8", "mi250x") and not runs("vllm", "nvfp4", "mi300x")
    assert not runs("vllm@0.9", "mxfp4", "b200-sxm") and runs("vllm@0.10.1", "mxfp4", "b200-sxm")
    assert not runs("vllm", "bf16", "t4") and runs("vllm", "fp16", "t4") and not runs("vllm", "fp16", "gaudi3")
    assert isinstance(load_engine("sglang"), Engine)
