"""What files of people with LLaMA-Factory and axolotl showed: short files of the same shape, each failed before."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

AXOLOTL = (
    "base_model: Qwen/Qwen3-8B\ndatasets: [{path: a}]\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    "bf16: true\n"
)
FACTORY = (
    "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\nstage: dpo\ndo_train: true\nfinetuning_type: lora\ncutoff_len: 1024\n"
    "template: qwen\nper_device_train_batch_size: 1\nbf16: true\n"
)
HOST = "accelerate puts DeepSpeedCPUAdam with fp32 states in the place of the optimizer"


@pytest.mark.parametrize(
    ("extra", "name", "states", "noted"),
    [
        ({}, "adamw_torch_8bit", "adam", True),
        ({}, "paged_adamw_8bit", "adam", True),
        ({}, "adamw_torch_fused", "adam", False),
        ({}, "lion_32bit", "lion", False),
        ({"zero_force_ds_cpu_optimizer": False}, "adamw_torch_8bit", "adam_8bit", False),
        ({"optimizer": {"type": "AdamW"}}, "adamw_torch_8bit", "adam", False),
    ],
)
def test_states_on_the_host_are_those_of_deepspeed(tmp_path: Path, extra: dict, name: str, states: str, noted: bool) -> None:
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, **extra}
    written(tmp_path, json.dumps(zero), "ds.json")
    found = read(written(tmp_path, f"{AXOLOTL}optimizer: {name}\ndeepspeed: ds.json\n"), None, Given(num_gpus=4))
    assert (found.optimizer, found.fields["offload_optimizer"], HOST in " ".join(found.notes)) == (states, 100, noted)


def test_a_section_that_deepspeed_does_not_read(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2}, "moe": {"enabled": True, "num_experts": 128, "expert_parallel_size": 2}}
    written(tmp_path, json.dumps(zero), "ds.json")
    found = read(written(tmp_path, AXOLOTL + "deepspeed: ds.json\n"), None, Given(num_gpus=4))
    assert (found.fields.get("ep", 1), found.unread, asked_for(found)) == (1, (), [])
    assert "moe: no section that DeepSpeed reads" in " ".join(found.notes)


def test_scores_of_pairs_in_fp32(tmp_path: Path) -> None:
    """8 bytes more for each of 2 x 1,024 x 152,064 scores over DeepSpeed; priced so without."""
    zero = FACTORY + "deepspeed: ds_z2_config.json\n"
    text = "in fp32: memory comes out too low by up to {} GiB"
    assert text.format(2.3) in " ".join(read(written(tmp_path, zero), None, Given(num_gpus=1)).notes)
    assert text.format(9.3) in " ".join(read(written(tmp_path, zero.replace("size: 1", "size: 4")), None, Given(num_gpus=1)).notes)
    for other in (FACTORY, zero.replace("dpo", "sft")):
        assert "scores" not in " ".join(read(written(tmp_path, other), None, Given(num_gpus=1)).notes)


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ("", True),
        ("sdp_attention: true\n", True),
        ("flash_attention: true\n", False),
        ("attn_implementation: flash_attention_2\n", False),
        ("deepspeed: zero3\n", False),
        ("fsdp: [full_shard]\n", False),
        ("adapter: lora\nlora_target_linear: true\n", False),
        ("plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n", False),
    ],
)
def test_tables_in_fp32_without_flash_attention(tmp_path: Path, more: str, noted: bool) -> None:
    found = read(written(tmp_path, AXOLOTL + more), None, Given(num_gpus=1))
    assert ("axolotl keeps embedding, head and norms in fp32" in " ".join(found.notes)) is noted


def test_pairs_over_four_bits_are_prepared_by_trl(tmp_path: Path) -> None:
    text = AXOLOTL + "adapter: qlora\nload_in_4bit: true\nlora_target_linear: true\n"
    cast = "TRL before 0.27 casts them to fp32: memory then comes out too low"
    assert cast in " ".join(read(written(tmp_path, text + "rl: dpo\n"), None, Given(num_gpus=1)).notes)
    assert cast not in " ".join(read(written(tmp_path, text), None, Given(num_gpus=1)).notes)
    written(tmp_path, "trl==1.8.0\n", "requirements.txt")
    assert cast not in " ".join(read(written(tmp_path, text + "rl: dpo\n"), None, Given(num_gpus=1)).notes)


def test_two_batches_that_axolotl_does_not_start_with(tmp_path: Path) -> None:
    path = written(tmp_path, AXOLOTL + "batch_size: 8\n")
    assert asked_for(read(path, None, Given(num_gpus=1))) == ["batch_size"]
    found = read(path, None, Given(num_gpus=1, settings={"batch_size": "null"}))
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"], asked_for(found)) == (2, 4, [])
    alone = read(written(tmp_path, AXOLOTL.replace("gradient_accumulation_steps", "batch_size")), None, Given(num_gpus=1))
    assert (alone.fields["num_microbatches"], asked_for(alone)) == (2, [])


def test_a_block_of_quantisation_that_axolotl_drops(tmp_path: Path) -> None:
    text = AXOLOTL + "adapter: lora\nlora_target_linear: true\nquantization_config: {load_in_4bit: true, quant_method: bnb}\n"
    found = read(written(tmp_path, text), None, Given(num_gpus=1))
    assert (found.frozen_weights, found.unread) == ("bf16", ())
    assert "quantization_config: no setting of axolotl" in " ".join(found.notes)


VERL = "torchrun --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-0.6B data.train_batch_size=8"


@pytest.mark.parametrize(
    ("lines", "ended"),
    [
        ("swift sft --model Qwen/Qwen3-0.6B --dataset a {}--max_length 1024 {}--lora_rank 4", False),
        ("swift sft --model Qwen/Qwen3-0.6B --dataset a \\ \n  --max_length 1024 {}--lora_rank 4", True),
        ("swift sft --model Qwen/Qwen3-0.6B --dataset a {}--max_length 1024 {}# --packing true {}--lora_rank 4", True),
        ("A=(\n--max_length 1024 {}# --packing true {}--lora_rank 4\n)\nswift sft --model Qwen/Qwen3-0.6B ${{A[@]}}", False),
        ("# swift pt {}# --packing {}\nswift sft --model Qwen/Qwen3-0.6B --dataset a --max_length 1024 --lora_rank 4", False),
        ("swift sft --model Qwen/Qwen3-0.6B --dataset a {}--max_length 1024 \\\n\n  --lora_rank 4", True),
        (f"{VERL} model.lora_rank=4 {{}}# data.micro_batch_size_per_gpu=1 {{}}data.max_length=1024", True),
        (f"{VERL} model.lora_rank=4 \\ \n  data.max_length=1024", True),
        ("swift sft --model Qwen/Qwen3-0.6B --dataset a {}`# short` {}--max_length 1024 {}--lora_rank 4", False),
    ],
)
def test_a_command_that_a_shell_ends_before_its_options(tmp_path: Path, lines: str, ended: bool) -> None:
    text = lines.format(*["\\\n  "] * 4) + "\n"
    found = read(written(tmp_path, text, "job.sh"), None, Given(num_gpus=1))
    assert (found.sequence_length, found.lora_rank) == (1024, 4)
    assert ("ends the command in a shell" in " ".join(found.notes)) is ended


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ("sequence_len: 1000\npad_to_sequence_len: true\n", 1024),
        ("sequence_len: 1000\nsample_packing: true\n", 1024),
        ("sequence_len: 1000\npad_to_sequence_len: true\npad_to_multiple_of: 8\n", 1000),
        ("sequence_len: 1000\nsample_packing: true\npad_to_sequence_len: false\n", 1000),
        ("sequence_len: 1000\n", 1000),
    ],
)
def test_padded_rows_of_axolotl(tmp_path: Path, more: str, rows: int) -> None:
    text = AXOLOTL.replace("sequence_len: 2048\n", "")
    found = read(written(tmp_path, text + more), None, Given(num_gpus=1))
    assert found.sequence_length == rows
    assert ("rows of 1024 tokens: sequence_len 1000, padded to a multiple of 64" in found.notes) is (rows == 1024)


KERNELS = "axolotl's fused kernels of adapters "


@pytest.mark.parametrize(
    ("more", "pin", "note"),
    [
        ("", "", "are on by themselves from axolotl 0.10 on and are not priced: memory comes out too high"),
        ("lora_dropout: 0.05\n", "", "are on by themselves from axolotl 0.16 on and are not priced: memory comes out too high"),
        ("lora_dropout: 0.05\n", "0.12.0", ""),
        ("", "0.12.0", "are on by themselves and are not priced: memory comes out too high"),
        ("gradient_checkpointing: true\n", "0.12.0", "are on by themselves and are not priced: time comes out too long"),
        ("lora_mlp_kernel: true\n", "", "(lora_mlp_kernel) are not priced: memory comes out too high"),
        ("lora_mlp_kernel: false\n", "", ""),
        ("load_in_8bit: true\n", "", ""),
        ("trust_remote_code: true\n", "", ""),
        ("rl: dpo\n", "", ""),
    ],
)
def test_fused_kernels_of_adapters_that_axolotl_switches_on(tmp_path: Path, more: str, pin: str, note: str) -> None:
    if pin:
        written(tmp_path, f"axolotl=={pin}\n", "requirements.txt")
    found = read(written(tmp_path, f"{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_linear: true\n{more}"), None, Given(num_gpus=1))
    size = " by 6.8 GiB and more" * note.endswith("high")  # 4 bytes for 4,096 tokens of 12,288 channels in 36 layers
    assert [one for one in found.notes if one.startswith(KERNELS)] == [f"{KERNELS}{note}{size}"] * bool(note)
