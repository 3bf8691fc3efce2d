"""What files of draw 44 showed: scores of pairs and adapters of old TRL, methods of forks, keys of accelerate given twice."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.cost.state_dtypes import stored_as
from planner.model import load_model
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.workload import Workload

PAIRS = """model_name_or_path: Qwen/Qwen2.5-7B
torch_dtype: bfloat16
max_length: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
beta: 0.1
"""
FOUR_BITS = """model_name_or_path: Qwen/Qwen2.5-7B
torch_dtype: bfloat16
max_seq_length: 1024
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
load_in_4bit: true
use_peft: true
lora_r: 64
lora_target_modules: all-linear
dataset_name: rows
"""
AXOLOTL = """base_model: TinyLlama/TinyLlama-1.1B-Chat-v1.0
datasets: [{path: a}]
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
bf16: true
optimizer: adamw_bnb_8bit
flash_attention: true
"""
SWIFT = """swift sft --model Qwen/Qwen2.5-7B --train_type full --torch_dtype bfloat16 --max_length 2048 \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 8 %s
"""
ACCELERATE = """distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: auto
  train_batch_size: auto
  train_batch_size: 32
  gradient_accumulation_steps: 8
mixed_precision: bf16
num_machines: 1
num_processes: 4
num_processes: 2
"""
MEGATRON = """%s
python %s pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 4 \\
    --max-position-embeddings 1024 --global-batch-size 4 --vocab-size 50304 --bf16 --train-iters 10
"""


def _read(folder: Path, text: str, name: str = "recipe.yaml", gpus: int | None = 1, trl: str = "", **settings: str) -> Reading:
    if trl:
        written(folder, f"trl{trl}\n", "requirements.txt")
    return read(written(folder, text, name), None, Given(num_gpus=gpus, settings=settings))


def _notes(reading: Reading) -> str:
    return " | ".join(reading.notes)


@pytest.mark.parametrize(
    ("trl", "words", "option", "each", "by_autocast"),
    [
        ("==0.8.2", "", "held", 20.0, 20.0), ("<0.12", "", "held", 20.0, 20.0), ("==0.12.2", "", "shifted", 16.0, 16.0),
        ("==0.14.0", "", "whole", 12.0, 12.0), ("==0.8.2", "precompute_ref_log_probs: true\n", "whole", 12.0, 12.0),
        ("==0.15.2", "", "", 8.0, 12.0), ("==0.28.0", "", "", 8.0, 12.0), ("==0.29.0", "", "copied_two", 11.0, 17.0),
        ("==1.5.1", "", "copied_two", 11.0, 17.0), ("==1.5.1", "precompute_ref_log_probs: true\n", "", 8.0, 12.0),
        ("==1.6.0", "", "", 8.0, 12.0), ("==1.14.2", "", "", 8.0, 12.0),
    ],
)  # fmt: skip
def test_bytes_of_scores_of_pairs_by_the_version_of_trl(
    tmp_path: Path, trl: str, words: str, option: str, each: float, by_autocast: float
) -> None:
    workload = Workload(model=load_model("qwen2.5-7b"), sequence_length=1024, global_batch_size=16, objective="dpo")
    for split in ({"fsdp": "no_shard"}, {"fsdp": "full_shard"}, {"deepspeed": "zero3"}):
        found = _read(tmp_path, PAIRS + words, trl=trl, gpus=4 if "deepspeed" in split else 1, **split)
        assert "8 bytes each" not in _notes(found)
        assert "deepspeed" not in split or (f"pair_loss={option}" if option else "+") in f"{found.trainer}+"
        stored = stored_as(workload, load_trainer(found.trainer)).stored
        assert (stored.logit_bytes, stored.loss) == (each if "deepspeed" in split else by_autocast, "full")


def test_scores_of_pairs_of_other_trainers(tmp_path: Path) -> None:
    found = _read(tmp_path, PAIRS, fsdp="no_shard")
    assert "pair_loss=whole" in found.trainer
    assert "8 bytes each or 12 in fp32; before it held up to 20, and from 0.29 to 1.5 up to 17" in _notes(found)
    assert "8 bytes each or 12 in fp32" in _notes(_read(tmp_path, PAIRS, trl=">=1.6", fsdp="no_shard"))
    tiles = _read(tmp_path, PAIRS, trl="==1.16.0", fsdp="no_shard")
    assert "loss=fused_linear" in tiles.trainer and "8 bytes each" not in _notes(tiles)
    for batch, option in ((1, "whole"), (4, "copied+"), (16, "copied+")):
        pairs = PAIRS.replace("batch_size: 2", f"batch_size: {batch}")
        assert f"pair_loss={option}" in f"{_read(tmp_path, pairs, trl='==1.0.0', deepspeed='zero3', gpus=4).trainer}+"
    engine = _read(tmp_path, PAIRS, trl="==0.11.4", deepspeed="zero3", gpus=4)
    assert engine.trainer.startswith("deepspeed") and "pair_loss=held" in engine.trainer
    workload = Workload(model=load_model("qwen2.5-7b"), sequence_length=1024, global_batch_size=16, objective="dpo")
    assert stored_as(workload, load_trainer("llama-factory")).stored.logit_bytes == 16.0
    words = "stage: dpo\nfinetuning_type: full\ntemplate: qwen\ncutoff_len: 1024\ndataset: rows\ndeepspeed: zero3\n"
    factory = read(written(tmp_path, PAIRS + words, "dpo.yaml"), "llama-factory", Given(num_gpus=4)).trainer
    assert factory.startswith("deepspeed") and stored_as(workload, load_trainer(factory)).stored.logit_bytes == 16.0


@pytest.mark.parametrize(
    ("trl", "says"),
    [
        ("==0.9.4", ""), ("==0.7.4", ""),
        ("", "TRL 0.7.5 to 0.8, where that is its version, casts adapters beside such a base to bf16"),
    ],
)  # fmt: skip
def test_adapters_in_half_precision_of_old_trl(tmp_path: Path, trl: str, says: str) -> None:
    notes = _notes(_read(tmp_path, FOUR_BITS, trl=trl, fsdp="no_shard"))
    assert says in notes and ("casts adapters" in notes) is bool(says)
    assert "too high by 0.6 GiB or more" in notes or not says
    text = FOUR_BITS.replace(": bfloat16", ": float32")
    assert "unquantised=" in _read(tmp_path, text, trl=trl, fsdp="no_shard").trainer and "casts them to fp32" not in notes


def test_kernels_and_states_of_axolotl_are_named(tmp_path: Path) -> None:
    text = AXOLOTL + "flash_attn_fuse_mlp: true\nflash_attn_rms_norm: true\nflash_attn_fuse_qkv: false\n"
    notes = _notes(_read(tmp_path, text, "full.yml"))
    assert "flash_attn_fuse_mlp: not priced: time comes out too long" in notes and "flash_attn_rms_norm: not" in notes
    assert "fuse_qkv" not in notes and "too low by up to 0.4 GiB; not so before transformers 4.52" in notes
    written(tmp_path, "transformers==4.38.2\n", "requirements.txt")
    assert "states of the embedding" not in _notes(_read(tmp_path, text, "full.yml"))
    written(tmp_path, "transformers==4.57.1\n", "requirements.txt")
    notes = _notes(_read(tmp_path, text, "full.yml"))
    assert "states of the embedding stay in 32 bits" in notes and "4.52" not in notes


@pytest.mark.parametrize(("version", "noted"), [("", True), ("axolotl==0.6.0", True), ("axolotl==0.7.0", False)])
def test_scores_of_pairs_of_axolotl(tmp_path: Path, version: str, noted: bool) -> None:
    written(tmp_path, f"{version}\n", "requirements.txt")
    assert ("before it held up to 20" in _notes(_read(tmp_path, AXOLOTL + "rl: dpo\n", "full.yml"))) is noted
    assert "before it held" not in _notes(_read(tmp_path, AXOLOTL, "full.yml"))


def test_tasks_and_methods_of_a_fork_of_swift(tmp_path: Path) -> None:
    assert asked_for(_swift(tmp_path, "--task_type causal_lm")) == []
    asked = _swift(tmp_path, "--task_type ewc --ewc_lambda 4").questions
    assert [one.name for one in asked] == ["task_type"] and "'ewc' is none of ms-swift, so of a fork" in asked[0].about
    found = _swift(tmp_path, "--task_type ewc --ewc_lambda 4", task_type="causal_lm")
    assert asked_for(found) == [] and "ewc_lambda: what a method against forgetting holds" in _notes(found)
    assert "too low by up to 14.2 GiB for each copy of the weights" in _notes(found)


def _swift(folder: Path, words: str, **settings: str) -> Reading:
    return _read(folder, SWIFT % words, "run.sh", **settings)


def test_of_keys_of_accelerate_that_are_given_twice_the_last_counts(tmp_path: Path) -> None:
    written(tmp_path, ACCELERATE, "zero3.yaml")
    found = _read(tmp_path, PAIRS, gpus=None, accelerate="zero3.yaml")
    assert (found.num_gpus, found.fields["zero"], asked_for(found)) == (2, 3, [])
    listed = next(one for one in found.unread if one.startswith("of keys that are given twice the last counts"))
    assert "deepspeed_config.gradient_accumulation_steps" in listed


@pytest.mark.parametrize(
    ("before", "flags", "gpus"),
    [
        ('export CUDA_VISIBLE_DEVICES="1"', "", 1), ("export CUDA_VISIBLE_DEVICES=0", "-u", 1), ("", "", None),
        ("export CUDA_VISIBLE_DEVICES=0,1", "", None), ("export CUDA_VISIBLE_DEVICES=0", "-m torch.distributed.launch", 1),
        ("export CUDA_VISIBLE_DEVICES=$1", "", None),
    ],
)  # fmt: skip
def test_python_without_a_launcher_on_one_gpu(tmp_path: Path, before: str, flags: str, gpus: int | None) -> None:
    found = _read(tmp_path, MEGATRON % (before, flags), "run.sh", None)
    assert found.num_gpus == gpus
