"""Models by the names that people know them by, without the hub."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from planner.model import load_model
from planner.model_names import preset_named
from planner.serving.published import published


@pytest.mark.parametrize(
    ("repository", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("gemma-3-4b-it", "gemma-3-4b"),
    ],
)
def test_repositories_without_the_hub(repository: str, preset: str) -> None:
    assert load_model(repository) == load_model(preset)


@pytest.mark.parametrize(
    ("copy", "preset", "weights"),
    [
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "qwen3-coder-480b-a35b", "fp8_block"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", "int4"),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek-v3", "nvfp4"),
        ("neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "llama-3.1-70b", "int8"),
        ("amd/Llama-3.3-70B-Instruct-FP8-KV", "llama-3.3-70b", "fp8"),
        ("llama-3.1-405b-instruct-fp8", "llama-3.1-405b", "fp8"),
        ("zai-org/GLM-4.6", "glm-4.5", "bf16"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2", "fp8_block"),
    ],
)
def test_copies_that_the_hub_does_not_answer_for(monkeypatch: pytest.MonkeyPatch, copy: str, preset: str, weights: str) -> None:
    """What a server is started with names its format: the preset in that format, where the hub cannot be asked."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    found = load_model(copy)
    assert replace(found, quantised="") == load_model(preset)
    assert published(found).precision.weights == weights
    assert load_model(preset).quantised == ""


def test_repositories_that_no_preset_comes_from() -> None:
    assert preset_named("mistralai/Mistral-7B-v0.3") is None  # other vocabulary than v0.1
    assert preset_named("someone/llama-3.1-8b") is None
