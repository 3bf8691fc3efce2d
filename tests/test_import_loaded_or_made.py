"""Adapters that a script loads from a folder to go on with, where it is there, and makes anew else."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

SCRIPT = """
import os
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
def load(folder):
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", torch_dtype="bfloat16")
    if os.path.exists(folder):
        return PeftModel.from_pretrained(model, folder, is_trainable={})
    return get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
words = SFTConfig(output_dir="out", per_device_train_batch_size=1, bf16=True, gradient_checkpointing=True, max_length=1024)
SFTTrainer(model=load("before"), args=words, train_dataset=data).train()
"""


@pytest.mark.parametrize(("trains", "noted"), [("True", True), ("False", False)])
def test_loaded_adapters_may_have_another_rank(tmp_path: Path, trains: str, noted: bool) -> None:
    file = written(tmp_path, SCRIPT.replace("={})", f"={trains})"), "dpo.py")
    found = read(file, None, Given(num_gpus=1))
    assert found.lora_rank == 16 and any("goes on with adapters of a folder" in one for one in found.notes) == noted
    assert read(file, None, Given(num_gpus=1, settings={"lora_r": "64"})).lora_rank == 64
    assert not any("goes_on" in one for one in found.unread)
