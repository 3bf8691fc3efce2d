"""What a class of transformers keeps follows the name of the model in the file, where a preset that is like it is priced."""

from pathlib import Path

from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

PROGRAM = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("NAME")
model = get_peft_model(model, LoraConfig(r=128, target_modules="all-linear"))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=1, bf16=True)
Trainer(model=model, args=args, train_dataset=rows).train()
"""


def _notes(folder: Path, name: str, preset: str) -> str:
    said = Given(num_gpus=1, model=preset, sequence_length=512)
    return " ".join(read(written(folder, PROGRAM.replace("NAME", name), "train.py"), None, said).notes)


def test_the_class_is_that_of_the_name_in_the_file(tmp_path: Path) -> None:
    assert "gpt_neo takes eager attention" in _notes(tmp_path, "EleutherAI/gpt-neo-1.3B", "pythia-1.4b")
    joint = "are one layer, which PEFT gives one adapter"
    assert joint in _notes(tmp_path, "bigcode/starcoderbase-1b", "gpt3-1.3b")
    assert joint not in _notes(tmp_path, "EleutherAI/gpt-neo-1.3B", "pythia-1.4b")
