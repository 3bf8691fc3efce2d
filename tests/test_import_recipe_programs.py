"""A recipe of TRL is what the program makes of it that its project starts it with."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

RECIPE = "\n".join((
    "model_name_or_path: meta-llama/Llama-3.1-8B-Instruct", "dataset_name: own/data", "per_device_train_batch_size: 1",
    "gradient_accumulation_steps: 8", "gradient_checkpointing: true", "bf16: true", "use_peft: true", "lora_r: 16",
))  # fmt: skip
PAIRS = "\n".join((
    "model_name_or_path: meta-llama/Llama-3.2-1B-Instruct", "dataset_name: own/pairs", "per_device_train_batch_size: 4",
    "gradient_accumulation_steps: 8", "gradient_checkpointing: true", "bf16: true", "max_length: 2048", "beta: 0.1",
))  # fmt: skip
LEAN = """
from trl import SFTTrainer, SFTConfig, ModelConfig, TrlParser
from unsloth import FastLanguageModel

def main():
    args, model_config = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=model_config.model_name_or_path, max_seq_length=args.max_seq_length, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(model, r=model_config.lora_r, use_gradient_checkpointing="unsloth")
    SFTTrainer(model, args=args, train_dataset=data, tokenizer=tokenizer).train()
"""
PLAIN = """
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

def main(script_args, training_args, model_args):
    trainer = SFTTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=data,
                         peft_config=get_peft_config(model_args))
    trainer.train()

if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config())
"""
OWN = """
import argparse
from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser, get_peft_config

class Plain(DPOTrainer):
    pass

class Watched(DPOTrainer):
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval=train_eval)
        again = self.concatenated_forward(model, batch)
        metrics["margin"] = (again["chosen_logps"] - again["rejected_logps"]).mean()
        return loss, metrics

KINDS = {"plain": Plain, "watched": Watched}

def main(args, model_args, trainer_name):
    Made = KINDS%s
    Made(model=model_args.model_name_or_path, args=args, train_dataset=data, peft_config=get_peft_config(model_args)).train()

if __name__ == "__main__":
    first = argparse.ArgumentParser()
    first.add_argument("--trainer", default="plain")
    own, rest = first.parse_known_args()
    main(*TrlParser((DPOConfig, ModelConfig)).parse_args_and_config(rest), trainer_name=own.trainer)
"""
ZERO1 = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 1\n"


def found(folder: Path, files: Mapping[str, str], name: str, length: int | None = None, **settings: str) -> Reading:
    for one, text in files.items():
        (folder / one).parent.mkdir(parents=True, exist_ok=True)
        (folder / one).write_text(text)
    return read(folder / name, None, Given(sequence_length=length, settings=settings))


@pytest.mark.parametrize(
    ("document", "command"),
    [
        ("README.md", "poetry run python scripts/lean.py configs/sft/a.yaml"),
        ("slurm/train.sbatch", "srun torchrun --nproc_per_node 1 scripts/lean.py --config configs/sft/a.yaml"),
        ("run.sh", "train() {\n  uv run scripts/lean.py --config $1\n}\ntrain configs/sft/a.yaml"),
    ],
)
def test_a_program_of_unsloth_that_starts_a_recipe_loads_its_base(tmp_path: Path, document: str, command: str) -> None:
    files = {"configs/sft/a.yaml": RECIPE, "scripts/lean.py": LEAN, document: command}
    reading = found(tmp_path, files, "configs/sft/a.yaml", 4096)
    assert (reading.trainer.split("+")[0], reading.frozen_weights, reading.lora_rank) == ("unsloth", "nf4_dq", 16)
    assert (reading.num_gpus, reading.fields["offload_activations"]) == (1, 1)
    assert any("read as lean.py takes it" in one for one in reading.notes)


def test_a_length_that_nobody_says_is_asked_for_where_unsloth_is_handed_it(tmp_path: Path) -> None:
    files = {"a.yaml": RECIPE, "lean.py": LEAN, "README.md": "python lean.py a.yaml"}
    asked = " ".join(map(str, found(tmp_path, files, "a.yaml").questions))
    assert "--sequence-length S (lean.py hands max_seq_length to unsloth, which nobody says" in asked


def test_switches_of_a_recipe_do_not_change_what_the_program_always_does(tmp_path: Path) -> None:
    text = RECIPE.replace("use_peft: true", "use_peft: false\nload_in_4bit: false")
    reading = found(tmp_path, {"a.yaml": text, "lean.py": LEAN, "README.md": "python lean.py a.yaml"}, "a.yaml", 4096)
    assert (reading.frozen_weights, reading.lora_rank) == ("nf4_dq", 16)


def test_the_program_of_other_recipes_of_the_folder_is_the_likely_one(tmp_path: Path) -> None:
    files = {"sft/a.yaml": RECIPE, "sft/b.yaml": RECIPE, "lean.py": LEAN, "README.md": "python lean.py sft/b.yaml"}
    reading = found(tmp_path, files, "sft/a.yaml", 4096)
    assert reading.trainer.startswith("unsloth")
    assert any("README.md starts other recipes of this folder with lean.py" in one for one in reading.notes)


def test_of_several_likely_programs_one_is_asked_for(tmp_path: Path) -> None:
    commands = "python lean.py sft/b.yaml\npython plain.py --config sft/c.yaml\n"
    files = {"sft/a.yaml": RECIPE, "lean.py": LEAN, "plain.py": PLAIN, "README.md": commands}
    asked = " ".join(map(str, found(tmp_path, files, "sft/a.yaml", 4096).questions))
    assert "--set program=lean.py|plain.py (which program starts it" in asked
    assert found(tmp_path, files, "sft/a.yaml", 4096, program="lean.py").frozen_weights == "nf4_dq"
    plain = found(tmp_path, files, "sft/a.yaml", 4096, program="plain.py", fsdp="no_shard")
    assert (plain.trainer.split("+")[0], plain.lora_rank) == ("trl", 16)


def test_a_program_like_those_of_trl_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = found(tmp_path / "alone", {"a.yaml": RECIPE}, "a.yaml", 4096, fsdp="no_shard")
    command = "accelerate launch scripts/sft.py --config recipes/a.yaml"
    files = {"recipes/a.yaml": RECIPE, "scripts/sft.py": PLAIN, "README.md": command}
    assert found(tmp_path, files, "recipes/a.yaml", 4096, fsdp="no_shard") == alone


def test_a_launcher_of_a_folder_above_says_how_a_recipe_is_split(tmp_path: Path) -> None:
    command = 'start() {\n  accelerate launch --config_file zero1.yaml sft.py --config "$1"\n}\nstart recipes/model/a.yaml\n'
    files = {"recipes/model/a.yaml": RECIPE, "zero1.yaml": ZERO1, "sft.py": PLAIN, "run.sh": command}
    reading = found(tmp_path, files, "recipes/model/a.yaml", 4096)
    assert (reading.fields["zero"], reading.num_gpus) == (1, 4)


@pytest.mark.parametrize("table", ["[trainer_name]", ".get(trainer_name, Plain)"])
def test_a_class_of_a_table_that_runs_the_model_again_is_asked_about(tmp_path: Path, table: str) -> None:
    launch = "accelerate launch --config_file zero1.yaml run.py --trainer {} --config dpo/a.yaml"
    files = {"dpo/a.yaml": PAIRS, "zero1.yaml": ZERO1, "run.py": OWN % table, "run.sh": launch.format("watched")}
    asked = " ".join(map(str, found(tmp_path, files, "dpo/a.yaml").questions))
    assert "--set get_batch_loss_metrics=false (of Watched runs the model 3 times or more" in asked
    reading = found(tmp_path, {**files, "run.sh": launch.format("plain")}, "dpo/a.yaml")
    assert (reading.questions, reading.objective, reading.fields["zero"], reading.num_gpus) == ((), "dpo", 1, 4)


def test_a_program_that_cannot_be_read_and_a_class_that_is_not_there_are_told_of(tmp_path: Path) -> None:
    text = "from trl import SFTTrainer\nfrom own import start\nstart()\n"
    files = {"a.yaml": RECIPE, "run.py": text, "README.md": "python run.py a.yaml"}
    reading = found(tmp_path, files, "a.yaml", 4096, fsdp="no_shard")
    assert any("its program run.py is not read: it builds no trainer that is known here" in one for one in reading.notes)
    program = "from away import AwayTrainer\n" + (OWN % "[trainer_name]").replace('"watched": Watched', '"away": AwayTrainer')
    launch = "accelerate launch --config_file zero1.yaml run.py --trainer away --config dpo/a.yaml"
    reading = found(tmp_path, {"dpo/a.yaml": PAIRS, "zero1.yaml": ZERO1, "run.py": program, "run.sh": launch}, "dpo/a.yaml")
    assert any("AwayTrainer, which run.py trains with, is not there" in one for one in reading.notes)


@pytest.mark.parametrize(("program", "recipe"), [("train_dpo.py", "sft_a.yaml"), ("evaluate.py", "a.yaml")])
def test_a_program_of_another_step_or_that_does_not_train_is_not_the_likely_one(tmp_path: Path, program: str, recipe: str) -> None:
    (tmp_path / "alone").mkdir()
    alone = found(tmp_path / "alone", {recipe: RECIPE}, recipe, 4096, fsdp="no_shard")
    files = {recipe: RECIPE, program: OWN % "[trainer_name]", "README.md": f"python {program} --config dpo_b.yaml"}
    assert found(tmp_path, files, recipe, 4096, fsdp="no_shard") == alone


def test_a_pass_of_the_first_step_alone_is_not_asked_about(tmp_path: Path) -> None:
    once = "        if not self.warm:\n            model(**batch)\n            self.warm = True\n"
    body = f"    def training_step(self, model, batch):\n{once}"
    made = f"class Plain(DPOTrainer):\n{body}        return super().training_step(model, batch)\n"
    launch = "accelerate launch --config_file zero1.yaml run.py --trainer plain --config dpo/a.yaml"
    program = (OWN % "[trainer_name]").replace("class Plain(DPOTrainer):\n    pass\n", made)
    files = {"dpo/a.yaml": PAIRS, "zero1.yaml": ZERO1, "run.py": program, "run.sh": launch}
    assert "def training_step" in program and found(tmp_path, files, "dpo/a.yaml").questions == ()
