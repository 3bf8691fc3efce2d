"""What draw 43 showed of trainers in a tree: verl's SFT trainer with another kernel, and the head of LitGPT's quantised base."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

SFT = (
    "torchrun --standalone --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64 data.max_length=2048 "
    "data.micro_batch_size_per_gpu=4 model.partial_pretrain=Qwen/Qwen3-8B use_remove_padding=true"
)
LITERAL = """def build():
    # attn_implementation="eager" is too slow
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="%s")
"""
ASKED = """def build(config):
    kernel = config.model.get("attn_implementation", "%s")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=kernel)
"""


def _sft(folder: Path, program: str, more: str = "") -> Reading:
    written(folder, program, "verl/verl/trainer/fsdp_sft_trainer.py")
    return read(written(folder, f"{SFT} {more}\n", "verl/own/run.sh"))


@pytest.mark.parametrize(("program", "more", "kernel", "notes"), [
    (LITERAL % "flash_attention_2", "", "fa2", 0), (LITERAL % "sdpa", "", "best", 1), (ASKED % "sdpa", "", "best", 1),
    (ASKED % "sdpa", "ulysses_sequence_parallel_size=2", "best", 2), (ASKED % "eager", "", "eager", 1),
    (ASKED % "sdpa", "+model.attn_implementation=flash_attention_2", "fa2", 0),
    (ASKED % "sdpa", "+model.override_config.attn_implementation=eager", "eager", 0), ("", "", "fa2", 0),
])  # fmt: skip
def test_the_kernel_of_a_trainer_in_the_tree(tmp_path: Path, program: str, more: str, kernel: str, notes: int) -> None:
    found = _sft(tmp_path, program, more)
    assert f"attention_kernel={kernel}" in found.trainer or (kernel == "fa2" and "attention_kernel" not in found.trainer)
    assert len([one for one in found.notes if "of the tree" in one or "all-to-all" in one]) == notes


LITGPT = """checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-true
devices: 1
lora_r: 8
train: {global_batch_size: 16, micro_batch_size: 1, max_seq_length: 1024}
"""


@pytest.mark.parametrize(("quantize", "more"), [("bnb.nf4-dq", "0.36 GiB"), ("bnb.int8-training", "0.24 GiB"), (None, "")])
def test_the_head_of_a_quantised_base_is_named(tmp_path: Path, quantize: str | None, more: str) -> None:
    line = f"quantize: {quantize}\n" if quantize else ""
    found = read(written(tmp_path, LITGPT + line, "lora.yaml"), "litgpt", Given(num_gpus=1))
    notes = [one for one in found.notes if "lays lm_head in few bits" in one]
    assert len(notes) == bool(quantize) and all(one.endswith(f"up to {more}") for one in notes)
