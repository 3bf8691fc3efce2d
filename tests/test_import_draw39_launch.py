"""What draw 39 showed of counts of processes, and of documents that launch recipes: short files of the same shape."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.reading.shell import evaluate
from planner.trainers.reading.shell.starting import gpus_on_node

WORDS = "tune.py --model_name_or_path Qwen/Qwen3-8B --max_length 1024 --bf16 --per_device_train_batch_size 2"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 1\nmixed_precision: bf16\n"
COUNTED = "export WORLD_SIZE=$((SLURM_GPUS_ON_NODE*SLURM_NNODES))\n"
RECIPE = "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 1024\nbf16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n"
RECIPE += "gradient_checkpointing: true\nlogging_steps: 1\n"


def _gpus(folder: Path, header: str, launch: str = "--num_processes $WORLD_SIZE", between: str = COUNTED) -> int | None:
    written(folder, DDP, "ddp.yaml")
    lines = "".join(f"#SBATCH {one}\n" for one in header.split(";") if one)
    text = f"#!/bin/bash\n{lines}{between}accelerate launch --config_file ddp.yaml {launch} {WORDS}\n"
    return read(written(folder, text, "run.sh"), "transformers", Given()).num_gpus


@pytest.mark.parametrize(
    ("header", "gpus"),
    [
        ("--nodes=1;--gres=gpu:4", 4), ("--nodes=2;--gres=gpu:4", 8), ("--nodes=2;--gres=gpu:a100:2", 4),
        ("--nodes=2;--gpus-per-node=h100:4", 8), ("--nodes=1;--gpus-per-node=2", 2), ("--nodes=1;-G 4", 4),
        ("--nodes=2;--ntasks-per-node=4;--gpus-per-task=1", 8), ("--nodes=1;--gres=nvme:1,gpu:v100:4", 4),
    ],
)  # fmt: skip
def test_a_batch_header_says_the_gpus_of_a_node(tmp_path: Path, header: str, gpus: int) -> None:
    assert _gpus(tmp_path, header) == gpus


def test_what_no_batch_header_says_of_gpus_is_not_known() -> None:
    for batch in ({"gres": "craynetwork:1"}, {"gres": "gpu:$N"}, {"gpus": "16", "nodes": "2"}, {"gpus-per-task": "1"}, {}):
        assert gpus_on_node(batch) is None
    assert gpus_on_node({"gres": "gpu"}) == 1


def test_arithmetic_over_what_only_the_environment_sets_is_open(tmp_path: Path) -> None:
    for text in ("A=$((SLURM_GPUS_ON_NODE * 2))", "A=$(($SLURM_GPUS_ON_NODE * 2))"):
        script = evaluate(text, "a.sh", {})
        assert "SLURM_GPUS_ON_NODE" in (script.variables.text("A") or "")
    assert evaluate("A=$((count + 1))", "a.sh", {}).variables.text("A") == "1"  # of the script itself: 0 where it is not set
    assert "size" in (evaluate("A=$((8 / size))", "a.sh", {}).variables.text("A") or "")
    with pytest.raises(OpenQuestionsError, match="--gpus N"):
        to_plan(read(written(tmp_path, _script(tmp_path), "run.sh"), "transformers", Given()))


def _script(folder: Path, count: str = "$WORLD_SIZE") -> str:
    written(folder, DDP, "ddp.yaml")
    return f"{COUNTED}accelerate launch --config_file ddp.yaml --num_processes {count} {WORDS}\n"


def test_no_process_on_the_command_line_is_a_question(tmp_path: Path) -> None:
    assert _gpus(tmp_path, "--nodes=1", "--num_processes 0") is None
    assert _gpus(tmp_path, "--nodes=1", "--num_processes 2") == 2
    assert _gpus(tmp_path, "--nodes=1", "") == 8
    with pytest.raises(OpenQuestionsError, match="--gpus N"):
        to_plan(read(written(tmp_path, _script(tmp_path, "0"), "run.sh"), "transformers", Given()))


def _recipe(folder: Path, command: str, place: str = "recipes/own/README.md", document: str = "") -> Reading:
    written(folder, DDP, "recipes/accelerate_configs/ddp.yaml")
    written(folder, document or f"Run it:\n```\n{command}\n```\n", place)
    return read(written(folder, RECIPE, "recipes/own/sft/config.yaml"), "trl", Given())


LAUNCH = "accelerate launch --config_file recipes/accelerate_configs/ddp.yaml"


@pytest.mark.parametrize(
    "named", ["recipes/other/sft/config.yaml", "sft/other_config.yaml", "../sft/config.yaml", "/home/me/other/sft/config.yaml",
              "recipes/{model}/{task}/config.yaml", "config.yaml"],
)  # fmt: skip
def test_a_command_of_a_guide_that_starts_another_recipe_is_not_taken(tmp_path: Path, named: str) -> None:
    found = _recipe(tmp_path, f"{LAUNCH} --num_processes=1 scripts/run.py {named}")
    assert found.num_gpus is None and "accelerate" in [one.name for one in found.questions]


@pytest.mark.parametrize(
    "named", ["recipes/own/sft/config.yaml", "sft/config.yaml", "--config=./recipes/own/sft/config.yaml",
              "/home/me/book/recipes/own/sft/config.yaml", "$BOOK/recipes/own/sft/config.yaml"],
)  # fmt: skip
def test_options_of_a_guide_go_before_the_configuration_that_it_names(tmp_path: Path, named: str) -> None:
    found = _recipe(tmp_path, f"{LAUNCH} --num_processes=4 scripts/run.py {named}")
    assert found.num_gpus == 4 and "accelerate" not in [one.name for one in found.questions]
    note = next(one for one in found.notes if "own/README.md" in one)
    assert "recipes/accelerate_configs/ddp.yaml --num_processes 4 by a command" in note


def test_a_general_command_that_is_taken_is_named(tmp_path: Path) -> None:
    found = _recipe(tmp_path, f"{LAUNCH} scripts/run.py recipes/{{model}}/sft/config.yaml")
    assert found.num_gpus == 8 and any("own/README.md" in one for one in found.notes)
    left = _recipe(tmp_path, f"{LAUNCH} --num_processes={{num_gpus}} scripts/run.py recipes/own/sft/config.yaml")
    assert left.num_gpus is None


def test_a_script_beside_a_recipe_is_named_and_its_other_ways_counted(tmp_path: Path) -> None:
    lines = f"{LAUNCH} --num_processes 2 run.py --config config.yaml\n{LAUNCH} --num_processes 4 run.py --config config.yaml\n"
    found = _recipe(tmp_path, "", "recipes/own/sft/go.sh", lines)
    assert found.num_gpus == 2
    assert any("sft/go.sh, the first of its 2 ways" in one for one in found.notes)


def test_machines_of_a_command_say_the_gpus_of_a_node(tmp_path: Path) -> None:
    hybrid = "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 1\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
    written(tmp_path, hybrid, "ddp.yaml")
    command = f"accelerate launch --config_file ddp.yaml --num_processes 16 --num_machines 4 {WORDS}\n"
    found = read(written(tmp_path, command, "run.sh"), "transformers", Given())
    assert found.num_gpus == 16 and found.fields["dp_shard"] == 4


def test_a_missing_file_of_settings_is_asked_for_together_with_the_model(tmp_path: Path) -> None:
    also = r"--set config_file=FILE .*; --model NAME \(only where that file names a checkpoint of your own\)$"
    command = "accelerate launch --num_processes 4 sft.py --config gone/sft.yaml"
    with pytest.raises(OpenQuestionsError, match=also):
        read(written(tmp_path, command, "run.sh"), "trl", Given())
    for text, said in ((f"{command} --model_name_or_path Qwen/Qwen3-8B", Given()), (command, Given(model="qwen3-8b"))):
        with pytest.raises(OpenQuestionsError, match="import that file") as raised:
            read(written(tmp_path, text, "run.sh"), "trl", said)
        assert [one.name for one in raised.value.questions] == ["config_file"]


PROGRAM = """
import yaml
from trl import DPOConfig, DPOTrainer
from unsloth import FastLanguageModel
with open("gone.yaml") as f:
    config = yaml.safe_load(f)
model, tokenizer = FastLanguageModel.from_pretrained(model_name=MODEL, max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj", "v_proj"], use_gradient_checkpointing="unsloth")
arguments = DPOConfig(per_device_train_batch_size=config["batch"], gradient_accumulation_steps=4, bf16=True, max_length=1024)
DPOTrainer(model=model, ref_model=None, args=arguments, train_dataset=data).train()
"""


def test_a_missing_file_that_a_program_reads_is_asked_for_together_with_the_model(tmp_path: Path) -> None:
    for model, asked in (('config["name"]', ["config_file", "--model NAME"]), ('"Qwen/Qwen3-8B"', ["config_file"])):
        with pytest.raises(OpenQuestionsError) as raised:
            to_plan(read(written(tmp_path, PROGRAM.replace("MODEL", model), "dpo.py"), None, Given()))
        assert [one.name for one in raised.value.questions] == asked


@pytest.mark.parametrize(("header", "gpus"), [("#SBATCH --gres=gpu:8\n", 16), ("export CUDA_VISIBLE_DEVICES=0,1\n", 4), ("", None)])
def test_all_devices_of_litgpt_are_those_of_the_batch_header(tmp_path: Path, header: str, gpus: int | None) -> None:
    text = "checkpoint_dir: checkpoints/google/gemma-2-9b\ndevices: auto\nnum_nodes: 2\nlora_r: 8\nprecision: bf16-true\n"
    text += "train: {global_batch_size: 32, micro_batch_size: 1, max_seq_length: 1024}\n"
    written(tmp_path, text, "lora.yaml")
    command = f"#!/bin/bash\n#SBATCH --nodes=2\n{header}srun litgpt finetune_lora --config lora.yaml\n"
    assert read(written(tmp_path, command, "run.sh"), None, Given()).num_gpus == gpus
