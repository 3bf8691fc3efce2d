"""What import reads since draw 35, with files of our own."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

MODEL = "--model_name_or_path Qwen/Qwen3-8B --max_length 1024 --bf16 --per_device_train_batch_size 2"
BRIDGE = """import torch
from megatron.bridge.recipes.qwen.qwen3 import qwen3_4b_pretrain_config
from megatron.bridge.training.pretrain import pretrain

cfg = qwen3_4b_pretrain_config(tensor_model_parallel_size=2, seq_length=1024, global_batch_size=32, micro_batch_size=1)
SHARED
pretrain(config=cfg)
"""


@pytest.mark.parametrize("watcher", ["scripts/gpu_monitor.py", "scripts/dcgm_scrape.py"])
def test_what_watches_gpus_beside_a_training_trains_nothing(tmp_path: Path, watcher: str) -> None:
    start = f"python {watcher} --output gpus.jsonl &\n"
    words = "accelerate launch --num_processes 4 own/train_loop.py --mbs 1 --model Qwen/Qwen3-8B"
    train = f"docker exec box bash -lc 'cd /work && {words}'\n"
    with pytest.raises(OpenQuestionsError, match="forward pass of own/train_loop.py"):
        to_plan(read(written(tmp_path, start + train, "run.sh"), None, Given()))
    found = read(written(tmp_path, f"{start}torchrun --nproc_per_node 4 own/loop.py {MODEL}\n", "b.sh"), None, Given())
    assert (found.num_gpus, found.fields["micro_batch_size"]) == (4, 2)


def test_a_watcher_alone_starts_no_training(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="no command that trains"):
        file = written(tmp_path, "accelerate launch own/gpu_monitor.py --output gpus.jsonl\n", "run.sh")
        read(file, "transformers", Given(num_gpus=1))


@pytest.mark.parametrize("word", ["cp_size", "dp_shard_size", "pp_size", "ep_size", "dp_replicate_size"])
def test_degrees_of_a_program_of_its_own_are_refused(tmp_path: Path, word: str) -> None:
    words = f"torchrun --nproc_per_node 8 own/train_loop.py {MODEL} --{word.replace('_', '-')}"
    with pytest.raises(PlannerError, match=f"{word} decides memory or degrees"):
        read(written(tmp_path, f"{words} 2\n", "run.sh"), None, Given())
    assert read(written(tmp_path, f"{words} 1\n", "one.sh"), None, Given()).num_gpus == 8


def test_a_script_over_a_recipe_says_whether_embedding_and_head_are_one(tmp_path: Path) -> None:
    line = "cfg.model.share_embeddings_and_output_weights = "
    for text, tied in (("", True), (f"{line}True", True), (f"{line}False", False)):
        found = read(written(tmp_path, BRIDGE.replace("SHARED", text), "pretrain.py"), None, Given(num_gpus=8))
        assert found.model is not None and found.model.tied_embeddings == tied
        assert not any("share_embeddings" in one for one in found.unread)


def test_weights_that_a_yaml_over_a_recipe_begins_with_name_its_model(tmp_path: Path) -> None:
    text = (
        "train:\n  global_batch_size: 64\n  micro_batch_size: 1\nmodel:\n  seq_length: 8192\n  tensor_model_parallel_size: 2\n"
        "  pipeline_model_parallel_size: 4\n  expert_model_parallel_size: 2\n  sequence_parallel: true\n"
        "checkpoint:\n  pretrained_checkpoint: /models/NAME\n"
    )
    said = Given(settings={"recipe": "nemotron_3_nano_sft_config"}, num_gpus=32)
    file = written(tmp_path, text.replace("NAME", "NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"), "sft.yaml")
    found = read(file, "megatron-bridge", said)
    assert found.model is not None and found.model.name == "nemotron-3-nano-30b"
    assert any("by its name" in one for one in found.notes)
    other = read(written(tmp_path, text.replace("NAME", "iter_100"), "own.yaml"), "megatron-bridge", said)
    assert other.model is None
    of_recipe = Given(settings={"recipe": "qwen3_8b_sft_config"}, num_gpus=32)
    assert read(file, "megatron-bridge", of_recipe).model_name != "/models/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"
