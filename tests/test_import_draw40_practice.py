"""What files of users showed of ms-swift, torchtune and LitGPT: files that a script names and sources, remarks, nodes."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

SWIFT = "swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type lora --max_length 2048 --deepspeed zero3"
TUNE = """
model: {_component_: torchtune.models.llama2.%s}
tokenizer: {_component_: torchtune.models.llama2.llama2_tokenizer, max_seq_len: 2048}
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torch.nn.CrossEntropyLoss}
batch_size: 2
dtype: bf16
"""


def test_a_script_is_sourced_from_a_folder_above(tmp_path: Path) -> None:
    written(tmp_path, 'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"\nBATCH=8\n', "course/common.sh")
    text = 'source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/common.sh"\n'
    found = read(written(tmp_path, f'{text}{SWIFT} --per_device_train_batch_size "$BATCH"\n', "course/first/train.sh"))
    assert (found.num_gpus, found.fields["micro_batch_size"], asked_for(found)) == (1, 8, [])


def test_remarks_between_options_say_nothing(tmp_path: Path) -> None:
    steps = "--per_device_train_batch_size 2 \\\n  `# steps` --gradient_accumulation_steps 2"
    found = read(written(tmp_path, f"NPROC_PER_NODE=4 {SWIFT} \\\n  `# --- batch ---` \\\n  {steps}\n", "go.sh"))
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"], found.global_batch_size) == (2, 2, 16)


@pytest.mark.parametrize("before", [
    "NNODES=$WORLD_SIZE NODE_RANK=$RANK ", "log=${NNODES}nodes_rank${NODE_RANK}.log\n", "export NNODES=$SLURM_NNODES\n",
])  # fmt: skip
def test_nodes_that_the_environment_counts_are_not_one(tmp_path: Path, before: str) -> None:
    path = written(tmp_path, f"{before}NPROC_PER_NODE=8 {SWIFT}\n", "go.sh")
    assert read(path).num_gpus is None
    assert read(path, None, Given(num_gpus=16)).fields["dp"] == 16


@pytest.mark.parametrize(("before", "gpus"), [("NNODES=2 NODE_RANK=$RANK ", 16), ("", 8), ("export NNODES=${NNODES:-4}\n", 32)])
def test_nodes_that_are_counted(tmp_path: Path, before: str, gpus: int) -> None:
    assert read(written(tmp_path, f"{before}NPROC_PER_NODE=8 {SWIFT}\n", "go.sh")).num_gpus == gpus


def test_adapters_of_a_run_are_no_question_where_their_rank_is_said(tmp_path: Path) -> None:
    text = f'NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo {SWIFT[10:]} --adapters "$LAST" --ref_adapters "$LAST" --lora_rank 16\n'
    found = read(written(tmp_path, text, "go.sh"))
    assert (asked_for(found), found.lora_rank, found.objective) == ([], 16, "dpo")


def test_configurations_of_a_checkout_go_before_the_published(tmp_path: Path) -> None:
    written(tmp_path, TUNE % "llama2_7b", "recipes/configs/llama2/own_full.yaml")
    written(tmp_path, TUNE % "llama2_13b", "recipes/configs/llama2/7B_full.yaml")
    command = "tune run --nproc_per_node 2 full_finetune_distributed --config llama2/%s model.x=1 dataset.source=own/data\n"
    found = read(written(tmp_path, command % "own_full", "scripts/go.sh"))
    assert found.model is not None and (found.model.name, found.num_gpus) == ("llama-2-7b", 2)
    found = read(written(tmp_path, command % "7B_full", "scripts/go.sh"))
    assert found.model is not None and found.model.name == "llama-2-13b"


def test_the_recipe_of_a_command_is_no_override(tmp_path: Path) -> None:
    written(tmp_path, TUNE % "llama2_7b", "own.yaml")
    recipe, model = "./recipes/full_finetune_distributed.py", "torchtune.models.llama2.llama2_13b"
    text = f"tune run --nnodes 1 --nproc_per_node 2 {recipe} --config own.yaml model={model}\n"
    found = read(written(tmp_path, text, "go.sh"))
    assert found.model is not None and found.model.name == "llama-2-13b"
    assert not any("recipe" in one for one in read(written(tmp_path, text, "go.sh")).notes)


def test_models_of_a_family_under_a_name_of_their_own(tmp_path: Path) -> None:
    found = read(written(tmp_path, TUNE % "tinyllama"))
    assert found.model is not None and found.model.name == "tinyllama-1.1b"


def test_the_compiler_of_litgpt_is_torch_or_asked_about(tmp_path: Path) -> None:
    text = "model_name: tiny-llama-1.1b\ndevices: 8\nprecision: bf16-mixed\ncompiler: %s\ntrain: {max_seq_length: 2048}\n"
    found = read(written(tmp_path, text % "torch"))
    assert (found.trainer, asked_for(found)) == ("litgpt+compile=on+gradient_sync=last", [])
    assert asked_for(read(written(tmp_path, text % "thunder"))) == ["compiler"]


def test_mlps_in_pieces_are_asked_about(tmp_path: Path) -> None:
    text = f"NPROC_PER_NODE=2 {SWIFT} --use_tiled_mlp true --tiled_mlp_num_shards 4\n"
    assert asked_for(read(written(tmp_path, text, "go.sh"))) == ["use_tiled_mlp"]


@pytest.mark.parametrize(("start", "gpus"), [
    ("torchrun --nproc_per_node 4 recipes/full_finetune_distributed.py", 4),
    ("tune  run --nproc_per_node 2 full_finetune_distributed", 2),
    ("python recipes/full_finetune_single_device.py", 1), ("python -m torchtune._cli.tune run full_finetune_single_device", 1),
])  # fmt: skip
def test_recipes_are_started_without_tune(tmp_path: Path, start: str, gpus: int) -> None:
    written(tmp_path, TUNE % "llama2_7b", "own.yaml")
    found = read(written(tmp_path, f"{start} --config own.yaml batch_size=4\n", "go.sh"))
    assert (found.num_gpus, found.fields["micro_batch_size"], found.sequence_length) == (gpus, 4, 2048)
    assert found.trainer.startswith("torchtune") and not any("project's own" in one for one in found.notes)
