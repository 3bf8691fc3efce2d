"""Scores of an evaluation while training, which no plan has: noted where they decide the peak."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

TRL = """model_name_or_path: Qwen/Qwen2.5-7B
torch_dtype: bfloat16
max_length: 8192
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
dataset_name: rows
use_liger_kernel: true
eval_strategy: steps
fsdp: full_shard
"""
AXOLOTL = """base_model: Qwen/Qwen2.5-7B
datasets: [{path: a}]
sequence_len: 8192
micro_batch_size: 4
gradient_accumulation_steps: 4
bf16: true
flash_attention: true
val_set_size: 0.05
gradient_checkpointing: true
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_fused_linear_cross_entropy: true
"""
FACTORY = """stage: sft
model_name_or_path: Qwen/Qwen2.5-7B
finetuning_type: lora
template: qwen
cutoff_len: 4096
dataset: rows
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
eval_strategy: steps
"""


def _notes(folder: Path, text: str, trl: str = "") -> str:
    written(folder, f"trl{trl}\n", "requirements.txt")
    notes = read(written(folder, text, "recipe.yaml"), None, Given(num_gpus=8)).notes
    return " | ".join(one for one in notes if one.startswith("evaluation while training"))


@pytest.mark.parametrize(
    ("text", "trl", "says"),
    [
        # 10 bytes of each of 8 x 8192 x 152064 scores; less 2 T L h and a part of the gradients
        (TRL, "", "8 x 8192 tokens at once, before TRL 0.29 with Liger too: up to 92.8 GiB, 87.7 GiB above"),
        (TRL, "==0.20.0", "8 x 8192 tokens at once, before TRL 0.29"), (TRL, "==0.29.0", ""),
        (f"{TRL}per_device_eval_batch_size: 1\n", "==0.20.0", "1 x 8192 tokens"),
        (TRL.replace("eval_strategy: steps", "do_eval: true"), "", ""),
        (TRL.replace("eval_strategy: steps", "eval_strategy: 'no'"), "", ""),
        (TRL.replace("use_liger_kernel: true\n", ""), "==1.9.0", ""),
        (TRL.replace("use_liger_kernel: true", "loss_type: nll"), "==1.9.0", "8 x 8192 tokens at once: up to 92.8 GiB, 71.5 GiB"),
        (AXOLOTL, "", "4 x 8192 tokens at once: up to 46.4 GiB"), (f"{AXOLOTL}eval_batch_size: 1\n", "", ""),
        (AXOLOTL.replace("0.05", "0"), "", ""), (AXOLOTL.replace("plugins", "other"), "", ""),
        (FACTORY, "", "8 x 4096 tokens at once: up to 46.4 GiB"), (f"{FACTORY}per_device_eval_batch_size: 1\n", "", ""),
    ],
)  # fmt: skip
def test_scores_of_an_evaluation_that_decide_the_peak(tmp_path: Path, text: str, trl: str, says: str) -> None:
    found = _notes(tmp_path, text, trl)
    assert says in found and bool(found) is bool(says)


def test_scores_of_an_evaluation_are_as_long_as_the_plan(tmp_path: Path) -> None:
    """The length that the user says goes before that of the file, and stands where the file has none."""
    for text in (TRL, TRL.replace("max_length: 8192\n", "")):
        said = Given(num_gpus=8, sequence_length=4096)
        assert "8 x 4096 tokens at once" in " ".join(read(written(tmp_path, text, "recipe.yaml"), None, said).notes)


def test_norms_that_llama_factory_upcasts_beside_a_base_in_four_bits(tmp_path: Path) -> None:
    for words, wide in (("quantization_bit: 4\n", True), ("", False)):
        text = f"{FACTORY}{words}upcast_layernorm: true\n"
        found = read(written(tmp_path, text, "recipe.yaml"), None, Given(num_gpus=1))
        assert ("unquantised=norms" in found.trainer) is wide
