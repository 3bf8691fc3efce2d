"""Models by the names that people know them by, without the hub."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from planner.model import load_model
from planner.model_names import preset_like, preset_named, preset_of
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
        ("Qwen/Qwen3.5-27B", "qwen3.5-27b"),
        ("Qwen/Qwen3.5-122B-A10B", "qwen3.5-122b-a10b"),
        ("Qwen/Qwen3-VL-2B-Instruct", "qwen3-vl-2b"),
        ("zai-org/GLM-5.2", "glm-5.2"),
        ("MiniMaxAI/MiniMax-M2.7", "minimax-m2"),
        ("01-ai/Yi-34B-Chat", "yi-34b"),
        ("01-ai/Yi-1.5-9B-Chat", "yi-1.5-9b"),
        ("internlm/internlm2-20b", "internlm2-20b"),
        ("Qwen/Qwen1.5-110B-Chat", "qwen1.5-110b"),
        ("deepseek-ai/deepseek-llm-67b-chat", "deepseek-llm-67b"),
        ("codellama/CodeLlama-70b-Instruct-hf", "codellama-70b"),
        ("CohereForAI/c4ai-command-r-08-2024", "command-r-32b"),
        ("EleutherAI/pythia-6.9b", "pythia-6.9b"),
        ("EleutherAI/gpt-neox-20b", "gpt-neox-20b"),
        ("allenai/OLMo-2-0425-1B-Instruct", "olmo-2-1b"),
        ("qwen3.5-397b", "qwen3.5-397b-a17b"),
        ("command-r-08-2024", "command-r-32b"),
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
        ("Qwen/Qwen3.5-27B-FP8", "qwen3.5-27b", "fp8_block"),
        ("Qwen/Qwen3.6-35B-A3B-FP8", "qwen3.5-35b-a3b", "fp8_block"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "qwen3-32b", "fp8"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "nemotron-3-nano-30b", "nvfp4"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "nemotron-3-super-120b", "nvfp4"),
        ("nvidia/Nemotron-3-Ultra-550B-A55B", "nemotron-3-ultra", "bf16"),
        ("nvidia/Nemotron-H-56B-Base-8K", "nemotron-h-56b", "bf16"),
        ("nvidia/GLM-5.2-NVFP4", "glm-5.2", "nvfp4"),
        ("nvidia/Kimi-K2.7-Code-NVFP4", "kimi-k2.5", "nvfp4"),
        ("allenai/Olmo-3-32B-Think", "olmo-3-32b", "bf16"),
        ("deepseek-ai/DeepSeek-V3.2-Speciale", "deepseek-v3.2", "fp8_block"),
        ("NousResearch/Hermes-3-Llama-3.1-70B", "llama-3.1-70b", "bf16"),
        ("NousResearch/Hermes-4-405B", "llama-3.1-405b", "bf16"),
        ("EleutherAI/pythia-1b-deduped", "pythia-1b", "bf16"),
        ("internlm/internlm2_5-7b-chat", "internlm2-7b", "bf16"),
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


def test_rows_of_runs_may_differ_in_version_and_month() -> None:
    """A user who names another version is asked for its config.json; a row of somebody's run is near enough."""
    near = {"mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b", "acme/Llama-3.3-70B-Instruct-preview": "llama-3.3-70b"}
    for name, preset in near.items():
        assert preset_of(name) is None
        assert preset_like(name) == preset
    assert preset_like("mistralai/Mistral-Small-Instruct-2409") is None  # 22 billion: the alias mistral-small is another month's
    assert preset_like("someone/yi-34b-200k") is None
