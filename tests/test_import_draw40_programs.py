"""What draw 40 showed of programs over transformers' Trainer: short programs of the same shape."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

PROGRAM = """import os
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, Trainer, TrainingArguments

class Unused:
    def __getitem__(self, i):
        return self.tokenizer(self.texts[i], truncation=True, max_length=4096)

class Job:
    def __init__(self, config=None):
        self.config = config or self.usual()

    def usual(self):
        return {"name": "gpt2", "length": 512, "batch": 1, "steps": 16}

    def rows(self, texts):
        return self.tokenizer(texts, truncation=True, max_length=self.config["length"])

    def train(self, rows):
        MODEL
        args = TrainingArguments(output_dir="o", per_device_train_batch_size=self.config["batch"],
                                 gradient_accumulation_steps=self.config["steps"]EXTRA)
        trainer = Trainer(model=self.model, args=args, train_dataset=rows)
        trainer.train()

def main():
    job = Job(GIVEN)
    for part in ("a", "b"):
        job.train(part)

main()
"""
BUILT = "self.model = GPT2LMHeadModel(GPT2Config(n_layer=4))"


def _program(folder: Path, model: str = BUILT, extra: str = "", given: str = "", **said: str) -> Reading:
    text = PROGRAM.replace("MODEL", model, 1) if model else PROGRAM
    text = text.replace("EXTRA", extra).replace("GIVEN", given)
    settings = {"fsdp": "no_shard", **said}
    return read(written(folder, text, "train.py"), "trl", Given(num_gpus=1, model="gpt3-125m", settings=settings))


def test_a_model_that_a_program_builds_asks_nothing_about_adapters(tmp_path: Path) -> None:
    found = _program(tmp_path)
    assert (asked_for(found), found.lora_rank, found.precision) == ([], 0, "fp32")
    assert "its trainer is made in a loop: one of those trainings is priced" in found.notes


def test_a_mapping_of_a_function_and_that_of_main_are_followed(tmp_path: Path) -> None:
    found = _program(tmp_path)
    assert (found.sequence_length, found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (512, 1, 16)
    other = _program(tmp_path, given='{"name": "gpt2", "length": 256, "batch": 2, "steps": 4}')
    assert (other.sequence_length, other.fields["micro_batch_size"], other.fields["num_microbatches"]) == (256, 2, 4)


def test_a_class_of_a_model_with_a_head_is_a_language_model(tmp_path: Path) -> None:
    written(tmp_path, "transformers==4.57.1\n", "requirements.txt")
    found = _program(tmp_path, 'self.model = GPT2LMHeadModel.from_pretrained(self.config["name"])')
    assert (found.model_name, asked_for(found)) == ("gpt2", [])


@pytest.mark.parametrize("extra", [", use_cpu=True", ", no_cuda=True", ""])
def test_a_job_on_cpus_is_refused_before_anything_is_asked(tmp_path: Path, extra: str) -> None:
    hidden = "" if extra else 'os.environ["CUDA_VISIBLE_DEVICES"] = "-1"\n        '
    text = PROGRAM.replace("MODEL", f"{hidden}self.model = load()").replace("EXTRA", extra).replace("GIVEN", "")
    with pytest.raises(PlannerError, match="it trains on CPUs, which no plan is for"):
        read(written(tmp_path, text, "train.py"), "trl", Given())


def test_a_command_that_hides_all_gpus_is_refused_as_well(tmp_path: Path) -> None:
    words = "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 2 --max_length 512"
    with pytest.raises(PlannerError, match="it trains on CPUs"):
        read(written(tmp_path, f"CUDA_VISIBLE_DEVICES=-1 python sft.py {words}\n", "run.sh"), "trl", Given())
    with pytest.raises(PlannerError, match="it trains on CPUs"):
        read(written(tmp_path, f"accelerate launch --cpu sft.py {words}\n", "run.sh"), "trl", Given())
