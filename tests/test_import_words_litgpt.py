"""LitGPT as it reads its own settings: models of its list and of a model_config, batches that do not divide, switches of forks."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

LORA = """
checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-true
devices: 2
lora_r: 8
train:
  global_batch_size: 16
  micro_batch_size: 2
  max_seq_length: 2048
"""
PRETRAIN = """
model_name: tiny-llama-1.1b
precision: bf16-mixed
devices: 8
train:
  global_batch_size: 512
  micro_batch_size: 4
  max_seq_length: 2048
"""


def _of(folder: Path, text: str, said: Given | None = None) -> Reading:
    return read(written(folder, text), None, said or Given())


def test_a_model_config_is_the_model(tmp_path: Path) -> None:
    config = "model_config: {name: own, n_layer: 6, n_head: 8, n_embd: 512, n_query_groups: 2, vocab_size: 151643, bias: false,\n"
    config += "  block_size: 1024, mlp_class_name: LLaMAMLP, intermediate_size: 1408, norm_class_name: RMSNorm}\n"
    model = _of(tmp_path, PRETRAIN + config).model
    assert model is not None and (model.num_layers, model.hidden_size, model.num_kv_heads, model.ffn_size) == (6, 512, 2, 1408)
    assert model.gated and model.vocab_size == 152064  # a multiple of padding_multiple 512
    found = _of(tmp_path, PRETRAIN.replace("  max_seq_length: 2048\n", "") + config)
    assert found.sequence_length == 1024 and "block_size 1024" in found.notes[-1]
    assert _of(tmp_path, PRETRAIN + config.replace("n_layer: 6", "n_layer: 6, loops: 4")).model is None  # a fork's: asked for


def test_names_of_the_list_without_a_preset_are_known(tmp_path: Path) -> None:
    model = _of(tmp_path, PRETRAIN.replace("tiny-llama-1.1b", "pythia-160m")).model
    assert model is not None and (model.num_layers, model.hidden_size, model.vocab_size) == (12, 768, 50304)
    model = _of(tmp_path, LORA.replace("meta-llama/Llama-3.2-1B", "microsoft/phi-2")).model
    assert model is not None and (model.num_layers, model.hidden_size, model.vocab_size) == (32, 2560, 51200)


def test_what_is_left_over_of_a_batch_is_dropped(tmp_path: Path) -> None:
    found = _of(tmp_path, LORA.replace("micro_batch_size: 2", "micro_batch_size: 3"))
    assert (found.global_batch_size, found.fields["num_microbatches"]) == (12, 2)
    assert "global_batch_size is 16: 2 micro batches of 3 on 2 GPUs make 12; what is left over is dropped" in found.notes
    with pytest.raises(PlannerError, match="16 is less than micro_batch_size 32 on each of 2 GPUs, which LitGPT refuses"):
        _of(tmp_path, LORA.replace("micro_batch_size: 2", "micro_batch_size: 32"))


def test_the_batch_of_several_nodes_is_that_of_the_version(tmp_path: Path) -> None:
    text = PRETRAIN + "num_nodes: 2\n"
    found = _of(tmp_path, text)
    assert found.global_batch_size == 512 and any("from 0.5.8 on" in one for one in found.notes)
    written(tmp_path, "litgpt==0.5.3\n", "requirements.txt")
    found = _of(tmp_path, text)
    assert (found.global_batch_size, found.fields["num_microbatches"], found.fields["dp_shard"]) == (1024, 16, 8)
    assert any("before 0.5.8 it is that of a node" in one for one in found.notes)


@pytest.mark.parametrize(("line", "recompute"), [
    ("activation_checkpointing: false", Recompute.NONE), ("gradient_checkpointing: true", Recompute.FULL), ("", Recompute.FULL),
])  # fmt: skip
def test_switches_of_forks_for_recompute_count(tmp_path: Path, line: str, recompute: int) -> None:
    found = _of(tmp_path, f"{LORA}{line}\n")
    assert found.fields["recompute"] == recompute and asked_for(found) == []
    assert _of(tmp_path, f"{LORA}  {line}\n").fields["recompute"] == recompute  # in train


@pytest.mark.parametrize(("line", "name", "without"), [
    ("  cpu_offload: true", "train.cpu_offload", "false"), ("  accumulation_iters: 4", "train.accumulation_iters", "null"),
    ("parallel: {tp: 2}", "parallel", "null"), ("  use_fsdp: true", "train.use_fsdp", "false"),
])  # fmt: skip
def test_words_of_forks_in_sections_are_asked_about(tmp_path: Path, line: str, name: str, without: str) -> None:
    assert asked_for(_of(tmp_path, f"{LORA}{line}\n")) == [name]
    assert asked_for(_of(tmp_path, f"{LORA}{line}\n", Given(settings={name: without}))) == []


def test_compile_of_a_fork_counts(tmp_path: Path) -> None:
    assert _of(tmp_path, f"{PRETRAIN}compile: false\n").trainer == "litgpt+gradient_sync=last"
    assert _of(tmp_path, PRETRAIN).trainer == "litgpt+compile=on+gradient_sync=last"


def test_adapters_are_those_of_any_of_their_words(tmp_path: Path) -> None:
    found = _of(tmp_path, LORA.replace("lora_r: 8", "lora_alpha: 16"))
    assert (found.lora_rank, found.lora_targets, found.frozen_weights) == (8, "qv", "bf16")
    full = _of(tmp_path, LORA.replace("lora_r: 8\n", ""))
    assert full.lora_rank == 0 and "full fine-tuning" in full.notes[-1]
    some = _of(tmp_path, f"{LORA}lora_mlp: true\n")
    assert some.lora_targets == "all" and any("so k, o too" in one for one in some.notes)


@pytest.mark.parametrize(("word", "precision"), [("bf16", "bf16"), ("16", "fp16"), ("32", "fp32")])
def test_old_names_of_precisions(tmp_path: Path, word: str, precision: str) -> None:
    assert _of(tmp_path, LORA.replace("bf16-true", word)).precision == precision


def test_four_bits_of_either_kind_take_as_much(tmp_path: Path) -> None:
    text = LORA.replace("devices: 2", "devices: 1")
    assert _of(tmp_path, f"{text}quantize: bnb.fp4\n").frozen_weights == "nf4"
    assert _of(tmp_path, f"{text}quantize: bnb.fp4-dq\n").frozen_weights == "nf4_dq"


def test_a_third_state_of_adam_is_asked_about(tmp_path: Path) -> None:
    optimizer = "optimizer: {class_path: torch.optim.AdamW, init_args: {amsgrad: true}}\n"
    assert asked_for(_of(tmp_path, LORA + optimizer)) == ["optimizer.init_args.amsgrad"]


@pytest.mark.parametrize(("command", "rank", "gpus"), [
    ("litgpt finetune_lora meta-llama/Llama-3.2-1B", 8, 1),
    ("python litgpt/finetune/lora.py --checkpoint_dir c/Llama-3.2-1B --devices 4", 8, 4),
    ("python litgpt/finetune/full.py --checkpoint_dir c/Llama-3.2-1B --devices 2", 0, 2),
    ("fabric run --devices 4 litgpt/pretrain.py Llama-3.2-1B --devices 4", 0, 4),
])  # fmt: skip
def test_commands_without_options_and_by_their_programs(tmp_path: Path, command: str, rank: int, gpus: int) -> None:
    found = read(written(tmp_path, f"{command}\n", "go.sh"))
    assert found.model is not None and found.model.name == "llama-3.2-1b"
    assert (found.lora_rank, found.num_gpus) == (rank, gpus)


def test_devices_of_minus_one_are_all(tmp_path: Path) -> None:
    found = _of(tmp_path, LORA.replace("devices: 2", "devices: -1"), Given(num_gpus=8))
    assert (found.num_gpus, found.fields["dp"], found.fields["zero"]) == (8, 8, 3)
