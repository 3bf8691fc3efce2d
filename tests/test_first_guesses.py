"""What a newcomer types first: names of devices and repositories, lengths, rates, help."""

import pytest

from planner import library
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.hardware.names import profile_named
from planner.model import load_model
from planner.model_names import preset_named

DEVICES = {
    "h100": "h100-sxm", "H100": "h100-sxm", "H100_SXM": "h100-sxm", "h100-pcie": "h100-pcie", "a100": "a100-sxm-80gb",
    "A100-40GB": "a100-sxm-40gb", "h800": "h800-sxm", "gb200": "gb200-nvl72", "b300": "b300-sxm", "mi300": "mi300x",
    "4090": "rtx-4090", "rtx4090": "rtx-4090", "RTX 6000 Ada": "rtx-6000-ada", "H20": "h20-sxm", "gh200": "gh200-96gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm", "./mine.yaml": "./mine.yaml",
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_devices_by_the_names_that_people_use(name: str) -> None:
    assert profile_named(name) == DEVICES[name]


@pytest.mark.parametrize("name", library.names("hardware"))
def test_every_profile_has_its_own_name_in_any_spelling(name: str) -> None:
    assert profile_named(name) == profile_named(name.upper()) == profile_named(name.replace("-", "")) == name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rtx", "hardware 'rtx' may be rtx-2080-ti, rtx-3090, "),
        ("l40", "unknown hardware 'l40'; known, nearest first: l40s"),  # another device than an L40S
        ("A100-64GB", "unknown hardware 'A100-64GB'; known, nearest first: a100-sxm-"),
        ("MI300A", "unknown hardware 'MI300A'; known, nearest first: mi300x"),
        ("tpu-v5p", "tpu-v5p: TPUs and Trainium are not modelled"),
        ("", "unknown hardware ''"),
    ],
)
def test_devices_that_are_not_known(name: str, sentence: str) -> None:
    with pytest.raises(PlannerError) as caught:
        profile_named(name)
    assert str(caught.value).startswith(sentence)


def test_what_a_name_is_taken_for_is_said() -> None:
    def said(hardware: str) -> list[str]:
        found = resolve(Request(model="llama-8b", num_gpus=8, hardware=hardware)).assumptions
        return [f"{one.value}: {one.why}" for one in found if one.what == "hardware"]

    assert said("a100") == ["a100-sxm-80gb: what 'a100' usually is"]
    assert said("H100_SXM") == said("h100-sxm") == []


@pytest.mark.parametrize(
    ("repository", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ],
)
def test_repositories_without_the_hub(repository: str, preset: str) -> None:
    assert load_model(repository) == load_model(preset)


def test_repositories_that_no_preset_comes_from() -> None:
    assert preset_named("mistralai/Mistral-7B-v0.3") is None  # other vocabulary than v0.1
    assert preset_named("someone/llama-3.1-8b") is None
