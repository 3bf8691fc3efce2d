"""What draw 40 showed of adapters whose layers have other names: which are priced, and the note where more than named are."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import adapter_targets, layers_beside
from planner.trainers.reading.given import Given

RECIPE = """model_name_or_path: Qwen/Qwen3-8B
max_seq_length: 1024
bf16: true
use_peft: true
lora_r: 16
per_device_train_batch_size: 1
gradient_checkpointing: true
learning_rate: 1.0e-4
"""


def _recipe(folder: Path, targets: str) -> Reading:
    return read(written(folder, f"{RECIPE}lora_target_modules: {targets}\n"), "trl", Given(num_gpus=1))


@pytest.mark.parametrize(
    ("names", "targets", "beside"),
    [
        ("c_attn", "qkv", ""), ("c_attn,attn.c_proj", "attention", ""), ("c_attn,c_proj,c_fc", "all", ""),
        ("query_key_value,dense", "attention", ""), ("query_key_value,dense,dense_h_to_4h,dense_4h_to_h", "all", ""),
        ("q_proj,k_proj,v_proj,out_proj,fc_in,fc_out", "all", ""), ("Wqkv,fc1,fc2", "all", "so o too"),
        ("Wqkv,out_proj", "attention", ""), ("W_pack,o_proj,gate_proj,up_proj,down_proj", "all", ""),
        ("wqkv,wo,w1,w2,w3", "all", ""),
        ("q_proj,v_proj,w1,w2,w3", "all", "so k, o too"), ("c_attn,c_proj,w1,w2", "all", ""), ("wq,wv", "qv", ""),
        ("q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj", "attention", ""),
        ("qkv_proj,gate_up_proj", "all", "so o, down too"),
        ("attention", "attention", ""), ("attention_qkv,mlp_fc1,mlp_fc2", "all", "so o too"),
    ],
)  # fmt: skip
def test_linear_layers_by_the_names_of_families(names: str, targets: str, beside: str) -> None:
    assert adapter_targets(names) == targets
    said = " ".join(layers_beside(names, targets))
    assert (beside in said) if beside else not said


def test_layers_of_gpt2_that_are_priced_beside_those_with_adapters_are_named(tmp_path: Path) -> None:
    found = _recipe(tmp_path, "[c_attn, c_proj]")
    assert found.lora_targets == "all"
    assert "adapters on q, k, v, o, down alone are priced as all, so gate, up too" in found.notes
    assert "'c_attn': one adapter on a layer that is several in one is priced as one for each of its parts" in found.notes


def test_a_name_that_is_not_known_brings_a_note(tmp_path: Path) -> None:
    found = _recipe(tmp_path, "[in_proj, x_proj, q_proj]")
    assert "adapters on 'in_proj, x_proj', no linear layer known here, are priced as on all linear layers" in found.notes


EVERY = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"


@pytest.mark.parametrize("words", ["all-linear", "all", EVERY, "[lm_head]"])
def test_what_names_all_linear_layers_brings_none(tmp_path: Path, words: str) -> None:
    assert not any("priced as" in one for one in _recipe(tmp_path, words).notes)


def test_other_readers_say_it_too(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 1024\nbf16: true\n"
    text += "lora_target: q_proj,x_proj\n"
    found = read(written(tmp_path, text), "llama-factory", Given(num_gpus=1))
    assert any(one.startswith("adapters on 'x_proj', no linear layer known here") for one in found.notes)
