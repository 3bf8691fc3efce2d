"""Programs of public projects before draw 39: other steps, own options, sections that are handed on whole, trainers in modules."""

from pathlib import Path

import pytest
from import_files import asked_for, written
from test_import_draw39_fine import COMMAND, OPTIONS, SFT

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.given import Given


def test_another_step_is_refused_by_the_argument_that_says_so(tmp_path: Path) -> None:
    text = "base_model: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 1\ntotal_episodes: 100\n"
    with pytest.raises(PlannerError, match="PPO is not modelled, and total_episodes"):
        read(written(tmp_path, text + "bf16: true\n", "run.yaml"), "trl", Given(num_gpus=1, sequence_length=512))


OWN_OPTIONS = """
from dataclasses import dataclass
from peft import AdaLoraConfig, AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, TrainingArguments
from trl import SFTTrainer
@dataclass
class Own:
    model_name: str = "meta-llama/Llama-2-7b-hf"
    per_device_train_batch_size: int = 1
    quantise: int = 1
    use_4bit: bool = True
    lora_r: int = 64
    lora_dropout: float = 0.1
    method: str = "lora"
    gradient_checkpointing: bool = True
    max_seq_length: int = 400
    merge: bool = False
own = HfArgumentParser(Own).parse_args_into_dataclasses()[0]
def make(args):
    bits = BitsAndBytesConfig(load_in_4bit=args.use_4bit) if args.quantise == 1 else None
    return AutoModelForCausalLM.from_pretrained(args.model_name, quantization_config=bits)
if own.method == "lora":
    adapters = LoraConfig(r=own.lora_r, lora_dropout=own.lora_dropout, target_modules=["q_proj", "v_proj"])
else:
    adapters = AdaLoraConfig(target_r=own.lora_r, lora_dropout=own.lora_dropout, target_modules=["q_proj", "v_proj"])
training = TrainingArguments(per_device_train_batch_size=own.per_device_train_batch_size%s)
trainer = SFTTrainer(model=make(own), args=training, peft_config=adapters, max_seq_length=own.max_seq_length)
trainer.train()
if own.merge:
    model = AutoPeftModelForCausalLM.from_pretrained("out", torch_dtype="bfloat16").merge_and_unload()
"""


def test_a_model_that_is_loaded_behind_the_training_is_merged(tmp_path: Path) -> None:
    """Of two loads neither was read: the bits of the one that trains were asked for as a dtype."""
    written(tmp_path, OWN_OPTIONS % "", "tune.py")
    run = written(tmp_path, "python tune.py --quantise 1 --method lora --merge True\n", "run.sh")
    found = read(run, None, Given(num_gpus=1))
    assert (found.frozen_weights, found.lora_rank, found.questions) == ("nf4", 64, ())
    assert not [one for one in found.unread if one.startswith("quantise")]  # what the model is loaded under


def test_options_that_a_program_hands_to_nothing(tmp_path: Path) -> None:
    """gradient_checkpointing is an option of the program that its trainer never hears of: on by its default it was read as on."""
    run = written(tmp_path, "python tune.py --quantise 1\n", "run.sh")
    for handed, recompute in (("", 0), (", gradient_checkpointing=own.gradient_checkpointing", 2)):
        written(tmp_path, OWN_OPTIONS % handed, "tune.py")
        assert read(run, None, Given(num_gpus=1)).fields["recompute"] == recompute
    written(tmp_path, OWN_OPTIONS % "", "tune.py")
    found = read(written(tmp_path, "python tune.py --gradient_checkpointing True\n", "run.sh"), None, Given(num_gpus=1))
    assert asked_for(found) == ["gradient_checkpointing"]


def test_a_field_that_two_calls_are_given(tmp_path: Path) -> None:
    """It keeps its default: it is handed on under its own name."""
    file = written(tmp_path, OWN_OPTIONS % "", "tune.py")
    assert not read(file, None, Given(num_gpus=1, settings={"fsdp": "no_shard"})).questions


def test_the_stage_of_a_program_with_sections_is_not_llama_factorys(tmp_path: Path) -> None:
    """Its message said to switch the bits of the section off."""
    text = "stage: dpo\ndataset: {path: a.jsonl}\nmodel: {name_or_path: Qwen/Qwen2.5-7B}\n"
    text += "training: {per_device_train_batch_size: 1, bf16: true}\n"
    file = written(tmp_path, text + "qlora: {load_in_4bit: true}\nlora: {r: 16, alpha: 32}\n", "own.yaml")
    with pytest.raises(PlannerError, match="sections qlora, lora say what a program of its own makes of the model"):
        read(file, None, Given(num_gpus=1))


WHOLE_SECTIONS = """
import yaml
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def load_config(path):
    return yaml.safe_load(open(path))
def train(model, data, config):
    args = SFTConfig(output_dir="out", **config["training"])
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, peft_config=LoraConfig(**config["lora"]))
    trainer.train()
"""
SAID = {
    "torch_dtype": "bfloat16", "use_peft": "true", "lora_r": "32", "lora_target_modules": "all-linear", "optim": "adamw_8bit",
    "max_length": "2048", "fp16": "false", "per_device_train_batch_size": "4", "gradient_accumulation_steps": "4",
    "gradient_checkpointing": "true", "bf16": "true", "fsdp": "no_shard",
}  # fmt: skip


def test_what_stands_in_sections_that_are_handed_on_whole_is_asked_about(tmp_path: Path) -> None:
    """Rank 8 on q and v, 1024 tokens and Adam were taken by default."""
    file = written(tmp_path, WHOLE_SECTIONS, "tune.py")
    first = read(file, None, Given(num_gpus=1))
    assert {"torch_dtype", "lora_r", "lora_target_modules", "max_length", "optim", "fp16"} <= set(asked_for(first))
    assert "load_in_4bit" in " ".join(map(str, first.questions))
    found = read(file, None, Given(num_gpus=1, model="llama-8b", settings=SAID))
    assert (found.lora_rank, found.lora_targets, found.sequence_length, found.optimizer) == (32, "all", 2048, "adam_8bit")
    bits = {name: value for name, value in SAID.items() if name != "torch_dtype"} | {"load_in_4bit": "true"}
    found = read(file, None, Given(num_gpus=1, model="llama-8b", settings=bits))
    assert (found.frozen_weights, asked_for(found)) == ("nf4", [])


def test_a_function_that_is_called_like_the_method_of_a_trainer(tmp_path: Path) -> None:
    """train(load_config(...)) beside trainer.train(): what it is given was not followed."""
    words = 'per_device_train_batch_size=2, max_length=config["training"]["cut"], bf16=True, gradient_checkpointing=True'
    text = WHOLE_SECTIONS.replace('**config["training"]', words)
    text = text.replace('**config["lora"]', 'r=config["lora"]["rank"], target_modules="all-linear"')
    written(tmp_path, "training: {cut: 512}\nlora: {rank: 4}\n", "own.yaml")
    file = written(tmp_path, text + 'train(None, None, load_config("own.yaml"))\n', "tune.py")
    said = {name: SAID[name] for name in ("torch_dtype", "use_peft", "fsdp")}
    found = read(file, None, Given(num_gpus=1, model="llama-8b", settings=said))
    assert (found.lora_rank, found.sequence_length) == (4, 512)


def test_settings_of_an_evaluation_are_no_training(tmp_path: Path) -> None:
    """A model and sections for generation were a training with every value at its default."""
    text = "model_name_or_path: Qwen/Qwen2.5-1.5B\ndataset_path: a.jsonl\ngeneration: {max_new_tokens: 256}\n"
    file = written(tmp_path, text, "eval.yaml")
    with pytest.raises(PlannerError, match="no argument of a training beside it"):
        read(file, None, Given(num_gpus=1))


def test_a_program_whose_trainer_stands_in_modules(tmp_path: Path) -> None:
    """It was no configuration of anything, whatever it imports from its project."""
    text = WHOLE_SECTIONS.replace('**config["lora"]', "r=4, target_modules=['q_proj', 'v_proj']")
    written(tmp_path, text.replace('**config["training"]', 'max_length=config["cut"]'), "own/tuning.py")
    written(tmp_path, "", "own/__init__.py")
    main = 'from own.tuning import load_config, train\nif __name__ == "__main__":\n    train(None, None, load_config("own.yaml"))\n'
    written(tmp_path, "cut: 512\n", "own.yaml")
    said = {name: SAID[name] for name in ("torch_dtype", "use_peft", "fsdp", "per_device_train_batch_size")}
    found = read(written(tmp_path, main, "main.py"), None, Given(num_gpus=1, model="llama-8b", settings=said))
    assert (found.lora_rank, found.sequence_length) == (4, 512)


def test_bits_under_a_condition_that_is_not_known_are_asked_about(tmp_path: Path) -> None:
    """They were on whatever the settings say."""
    text = SFT.replace('dtype="bfloat16")', 'quantization_config=bits, dtype="bfloat16")')
    for under, asked in (("if cfg.use_qlora:", True), ("if True:", False)):
        made = f"bits = None\n{under}\n    bits = BitsAndBytesConfig(load_in_4bit=True)\nmodel = Auto"
        file = written(tmp_path, text.replace("model = Auto", made), "tune.py")
        found = read(file, None, Given(num_gpus=1))
        assert ("load_in_4bit" in asked_for(found)) is asked
        assert asked or found.frozen_weights.startswith("nf4")
    file = written(tmp_path, text.replace("model = Auto", made.replace("True:", "cfg.use_qlora:")), "tune.py")
    assert read(file, None, Given(num_gpus=1, settings={"load_in_4bit": "false"})).frozen_weights == "bf16"


def test_a_script_that_a_shell_of_srun_starts(tmp_path: Path) -> None:
    """It was followed behind bash alone."""
    written(tmp_path, OPTIONS % ("SFT", "SFT"), "tune.py")
    written(tmp_path, COMMAND, "inner.sh")
    run = written(tmp_path, "#!/bin/bash\n#SBATCH --nodes=1\nsrun --kill-on-bad-exit=1 bash inner.sh\n", "run.sh")
    found = read(run, None, Given(sequence_length=512))
    assert (found.fields["dp"], found.fields["micro_batch_size"]) == (2, 2)


def test_of_two_loads_of_a_model_the_one_with_bits_is_not_taken_unasked(tmp_path: Path) -> None:
    text = SFT.replace('model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", dtype="bfloat16")', TWO_LOADS)
    file = written(tmp_path, text, "tune.py")
    assert "load_in_4bit" in asked_for(read(file, None, Given(num_gpus=1)))
    for answer, weights in (("true", "nf4"), ("false", "bf16")):
        assert read(file, None, Given(num_gpus=1, settings={"load_in_4bit": answer})).frozen_weights == weights


TWO_LOADS = """if cfg.use_4bit:
    bits = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", quantization_config=bits)
else:
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", dtype="bfloat16")"""
