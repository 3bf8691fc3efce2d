"""What draw 40 showed of commands that launch a recipe: what stands behind the recipe counts. Short files of the same shape."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

DDP = "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 1\nmixed_precision: bf16\n"
RECIPE = """model_name_or_path: Qwen/Qwen3-8B
max_seq_length: 1024
bf16: true
use_peft: true
lora_r: 16
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
gradient_checkpointing: true
torch_dtype: bfloat16
learning_rate: 1.0e-4
"""
LAUNCH = "accelerate launch --config_file ddp.yaml --num_processes=1 run_sft.py"


def _recipe(folder: Path, document: str, name: str = "README.md", **settings: str) -> Reading:
    written(folder, DDP, "ddp.yaml")
    written(folder, document, f"sft/{name}")
    return read(written(folder, RECIPE, "sft/lora.yaml"), "trl", Given(settings=settings))


@pytest.mark.parametrize(
    "option", ["--load_in_4bit=false", "--load_in_4bit false", "--load-in-4bit=False", "--learning_rate 2e-4 --load_in_4bit=false"]
)
def test_what_a_command_has_behind_its_recipe_goes_over_the_recipe(tmp_path: Path, option: str) -> None:
    found = _recipe(tmp_path, f"# Train\n```shell\n{LAUNCH} sft/lora.yaml {option}\n```\n")
    assert (found.frozen_weights, found.num_gpus) == ("bf16", 1)
    assert "--load_in_4bit=false of a command in sft/README.md goes over the file" in found.notes


def test_other_options_of_that_command_count_too(tmp_path: Path) -> None:
    options = "--per_device_train_batch_size=4 \\\n  --lora_r 32 --no_gradient_checkpointing"
    found = _recipe(tmp_path, f"{LAUNCH} --config sft/lora.yaml {options}; echo done", "run.sh")
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"], found.lora_rank) == (4, 8, 32)
    assert (found.fields["recompute"], found.frozen_weights) == (0, "nf4")


def test_what_the_user_says_goes_before_the_command(tmp_path: Path) -> None:
    found = _recipe(tmp_path, f"{LAUNCH} sft/lora.yaml --load_in_4bit=false", load_in_4bit="true")
    assert found.frozen_weights == "nf4"
    assert not any("goes over" in one for one in found.notes)


def test_a_value_that_only_the_shell_knows_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, DDP, "ddp.yaml")
    written(tmp_path, f"{LAUNCH} sft/lora.yaml --per_device_train_batch_size=$BATCH --learning_rate $LR", "sft/run.sh")
    given = Given()
    read(written(tmp_path, RECIPE, "sft/lora.yaml"), "trl", given)
    assert [one.name for one in given.questions] == ["per_device_train_batch_size"]


def test_ways_that_differ_in_a_deciding_option_are_both_named(tmp_path: Path) -> None:
    ways = f"{LAUNCH} sft/lora.yaml\n{LAUNCH} sft/lora.yaml --load_in_4bit=false\n{LAUNCH} sft/lora.yaml --learning_rate=1\n"
    found = _recipe(tmp_path, ways)
    assert found.frozen_weights == "nf4"
    assert "as the first command of sft/README.md; another command there says --load_in_4bit=false" in found.notes


def test_a_command_for_another_recipe_is_none_for_this_one(tmp_path: Path) -> None:
    found = _recipe(tmp_path, f"{LAUNCH} sft/lora.yaml\n{LAUNCH} sft/full.yaml --load_in_4bit=false\n")
    assert found.frozen_weights == "nf4"
    assert not any("--load_in_4bit" in one for one in found.notes)


def test_a_comment_about_another_recipe_changes_nothing_in_this_one(tmp_path: Path) -> None:
    written(tmp_path, DDP, "ddp.yaml")
    for other, bits in (("--config full.yaml", "nf4"), ("--config=full.yaml", "nf4"), ("--config lora.yaml", "bf16"), ("", "bf16")):
        text = f"# {LAUNCH} {other} --load_in_4bit=false\n{RECIPE}"
        assert read(written(tmp_path, text, "lora.yaml"), "trl", Given()).frozen_weights == bits


FACTORY = """model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
bf16: true
"""


def test_llama_factory_takes_key_and_value_behind_its_file(tmp_path: Path) -> None:
    text = "# llamafactory-cli train job.yaml per_device_train_batch_size=1 lora_rank=64 learning_rate=1e-5\n"
    found = read(written(tmp_path, text + FACTORY), "llama-factory", Given())
    assert (found.fields["micro_batch_size"], found.lora_rank) == (1, 64)
    assert "--lora_rank=64 --per_device_train_batch_size=1 of a command in job.yaml goes over the file" in found.notes
    assert asked_for(found) == []


AXOLOTL = """base_model: Qwen/Qwen3-8B
datasets: [{path: a, type: alpaca}]
adapter: lora
lora_r: 8
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 1
bf16: true
"""


def test_axolotl_takes_options_behind_its_file(tmp_path: Path) -> None:
    text = "# axolotl train job.yaml --micro-batch-size 4 --no-gradient-checkpointing\n"
    found = read(written(tmp_path, text + AXOLOTL + "gradient_checkpointing: true\n"), "axolotl", Given())
    assert (found.fields["micro_batch_size"], found.fields["recompute"]) == (4, 0)
    assert any("of a command in job.yaml goes over the file" in one for one in found.notes)
