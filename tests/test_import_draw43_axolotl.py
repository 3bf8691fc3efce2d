"""What draw 43 showed of axolotl: switches of attention that are off, low bits beside adapters by release, programs beside a file
that are for other machines."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

AXOLOTL = """base_model: Qwen/Qwen3-8B
datasets: [{path: a}]
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
lora_target_linear: true
bf16: true
"""
DOCKER = """FROM image
RUN git clone https://github.com/OpenAccess-AI-Collective/axolotl.git
WORKDIR /axolotl
RUN git checkout v%s && pip install -e . && pip install transformers==%s
"""


def _read(folder: Path, text: str, said: Given | None = None) -> Reading:
    return read(written(folder, AXOLOTL + text, "lora.yml"), "axolotl", said or Given(num_gpus=1))


@pytest.mark.parametrize("switch", ["", "flash_attention: false\n", "xformers_attention:\n"])
def test_attention_that_nothing_switches_on_is_that_of_transformers(tmp_path: Path, switch: str) -> None:
    found = _read(tmp_path, f"adapter: lora\n{switch}")
    assert found.trainer == "axolotl+attention_kernel=best" and "(4.36 and later) uses sdpa where" in " ".join(found.notes)
    written(tmp_path, DOCKER % ("0.3.0", "4.35.2"), "Dockerfile")
    found = _read(tmp_path, f"adapter: lora\n{switch}")
    assert found.trainer == "axolotl+attention_kernel=eager" and "before 4.36 uses eager" in " ".join(found.notes)
    assert _read(tmp_path, "adapter: lora\nflash_attention: true\n").trainer == "axolotl+attention_kernel=fa2"


@pytest.mark.parametrize(("version", "frozen"), [("0.4.0", "nf4"), ("0.12.2", "nf4"), ("0.13.0", "bf16"), ("0.18.0", "bf16")])
def test_four_bits_beside_lora_by_release(tmp_path: Path, version: str, frozen: str) -> None:
    written(tmp_path, DOCKER % (version, "4.57.0"), "Dockerfile")
    found = _read(tmp_path, "adapter: lora\nload_in_4bit: true\n")
    assert (found.frozen_weights, asked_for(found)) == (frozen, [])
    assert _read(tmp_path, "adapter: qlora\nload_in_4bit: true\n").frozen_weights == "nf4_dq"


def test_four_bits_beside_lora_of_an_open_release_are_asked_about_once(tmp_path: Path) -> None:
    assert asked_for(_read(tmp_path, "adapter: lora\nload_in_4bit: true\n")) == ["load_in_4bit"]
    for word, frozen in (("true", "nf4"), ("false", "bf16")):
        said = Given(num_gpus=1, settings={"load_in_4bit": word})
        found = _read(tmp_path, "adapter: lora\nload_in_4bit: true\n", said)
        assert (asked_for(found), found.frozen_weights) == ([], frozen)
    stored = AXOLOTL.replace("Qwen/Qwen3-8B", "unsloth/Qwen3-8B-bnb-4bit")
    found = read(written(tmp_path, f"{stored}adapter: lora\nload_in_4bit: true\n", "b.yml"), "axolotl", Given(num_gpus=1))
    assert "load_in_4bit" not in asked_for(found) and found.frozen_weights == "nf4"


@pytest.mark.parametrize(("module", "machine"), [
    ("ipex_llm", "GPUs of Intel"), ("intel_extension_for_pytorch", "(xpu)"), ("torch_npu", "NPUs"), ("optimum.habana", "Gaudi"),
])  # fmt: skip
def test_a_program_beside_a_file_that_is_for_other_machines(tmp_path: Path, module: str, machine: str) -> None:
    written(tmp_path, "try:\n    import torch_npu\nexcept ImportError:\n    pass\n", "a.py")
    assert not any("stand-in" in one for one in _read(tmp_path, "adapter: lora\n").notes)
    written(tmp_path, f"from {module} import patch\npatch(train=True)\n", "finetune.py")
    note = _read(tmp_path, "adapter: lora\n").notes[-1]
    assert f"finetune.py next to it imports {module}" in note and machine in note


def test_a_program_that_patches_for_gpus_of_intel_is_for_them(tmp_path: Path) -> None:
    program = ("from ipex_llm import llm_patch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
               "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B')\n"
               "Trainer(model=model, args=TrainingArguments(output_dir='o', per_device_train_batch_size=2)).train()\n")  # fmt: skip
    found = read(written(tmp_path, program, "train.py"), None, Given(num_gpus=1, sequence_length=512))
    assert any("GPUs of Intel (xpu)" in one for one in found.notes)
