"""What axolotl does by itself: FSDP by its two versions, a batch by release, Liger's loss by model, switches of its command."""

import json
from pathlib import Path

from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

AXOLOTL = """datasets: [{path: a}]
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
flash_attention: true
"""
LLAMA = AXOLOTL + "base_model: meta-llama/Llama-3.1-8B\n"
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_fused_linear_cross_entropy: true\n"


def _read(folder: Path, text: str, gpus: int = 8) -> Reading:
    return read(written(folder, text, "job.yml"), "axolotl", Given(num_gpus=gpus))


def _says(found: Reading, text: str) -> bool:
    return any(text in one for one in found.notes)


def test_the_second_version_of_fsdp_without_a_word_about_resharding(tmp_path: Path) -> None:
    second = LLAMA + "fsdp_version: 2\nfsdp_config: {transformer_layer_cls_to_wrap: LlamaDecoderLayer%s}\n"
    found = _read(tmp_path, second % "")
    assert found.fields["zero"] == 3 and _says(found, "reshard_after_forward is not said")
    found = _read(tmp_path, second % ", reshard_after_forward: true")
    assert found.fields["zero"] == 3 and not _says(found, "reshard_after_forward")
    words = second % ", fsdp_reshard_after_forward: false" + "fsdp: [full_shard, auto_wrap]\n"
    assert _read(tmp_path, words).fields["zero"] == 2  # the words are those of the first version


def test_the_first_version_is_full_shard_where_no_word_says_otherwise(tmp_path: Path) -> None:
    first = LLAMA + "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n"
    assert _read(tmp_path, first).fields["zero"] == 3
    assert _read(tmp_path, first + "fsdp: [shard_grad_op, auto_wrap]\n").fields["zero"] == 2


def test_a_batch_size_is_that_of_one_gpu_by_release(tmp_path: Path) -> None:
    text = LLAMA.replace("gradient_accumulation_steps: 4", "batch_size: 16")
    found = _read(tmp_path, text)
    assert found.global_batch_size == 128 and _says(found, "0.1 and 0.2 divide its accumulation by the GPUs")
    written(tmp_path, "axolotl==0.4.0\n", "requirements.txt")
    assert not _says(_read(tmp_path, text), "divide its accumulation")


def test_the_loss_of_liger_counts_by_model(tmp_path: Path) -> None:
    pythia = f"{AXOLOTL}base_model: EleutherAI/pythia-6.9b\n{LIGER}"
    found = _read(tmp_path, pythia, 1)
    assert "loss=fused_linear" in found.trainer and _says(found, "axolotl before 0.13 keeps all scores")
    written(tmp_path, "axolotl==0.8.0\n", "requirements.txt")
    found = _read(tmp_path, pythia, 1)
    assert "loss=" not in found.trainer and _says(found, "so all scores are kept")
    assert not _says(_read(tmp_path, LLAMA + LIGER, 1), "scores")
    found = _read(tmp_path, f"{LLAMA}{LIGER}use_eaft: true\n", 1)
    assert "loss=" not in found.trainer and _says(found, "use_eaft: a loss of its own")


def test_a_switch_of_the_command_turns_a_setting_off(tmp_path: Path) -> None:
    written(tmp_path, LLAMA + "gradient_checkpointing: true\n", "conf.yml")
    file = written(tmp_path, "axolotl train conf.yml --no-gradient-checkpointing --micro-batch-size 1\n", "run.sh")
    found = read(file, "axolotl", Given(num_gpus=8))
    assert found.fields["recompute"] == 0 and found.fields["micro_batch_size"] == 1 and not found.unread


def test_packed_samples_without_flash_attention_have_a_mask(tmp_path: Path) -> None:
    text = LLAMA.replace("flash_attention", "sdp_attention").replace("4096", "32768") + "sample_packing: true\n"
    assert _says(_read(tmp_path, text), "sample_packing without flash attention") and _says(_read(tmp_path, text), "by 4.0 GiB")
    assert not _says(_read(tmp_path, text.replace("sdp_attention", "flash_attention")), "its mask")


def test_experts_of_llama_4_that_are_made_layers_lie_in_4_bits(tmp_path: Path) -> None:
    text = AXOLOTL + "base_model: axolotl-quants/Llama-4-Scout-17B-16E\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\n"
    for more, kind in (("", "fp32"), ("llama4_linearized_experts: true\n", "linear")):
        file = written(tmp_path, f"{text}lora_target_linear: true\n{more}", "job.yml")
        assert f"frozen_experts={kind}" in read(file, "axolotl", Given(num_gpus=1, model="llama-4-scout")).trainer


def test_a_notebook_that_imports_load_cfg_is_read_without_a_name(tmp_path: Path) -> None:
    lines = ["from axolotl.cli.config import load_cfg\n", "from axolotl.utils.dict import DictDefault\n",
             "config = DictDefault(base_model='Qwen/Qwen3-8B', datasets=[{'path': 'a'}], sequence_len=1024, micro_batch_size=2,\n",
             "  gradient_accumulation_steps=4, adapter='qlora', load_in_4bit=True, lora_target_linear=True, bf16=True)\n",
             "cfg = load_cfg(config)\n"]  # fmt: skip
    book = {"cells": [{"cell_type": "code", "source": lines}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    found = read(written(tmp_path, json.dumps(book, indent=1), "a.ipynb"), None, Given(num_gpus=1))
    assert found.sequence_length == 1024 and found.lora_rank == 8 and found.global_batch_size == 8


def test_kernels_of_liger_in_layers_that_keep_all_have_a_note(tmp_path: Path) -> None:
    text = LLAMA + LIGER + "liger_rms_norm: true\n"
    assert _says(_read(tmp_path, text), "Liger's norms: priced as those of torch")
    assert _says(_read(tmp_path, text + "liger_glu_activation: true\n"), "Liger's norms and SwiGLU: priced as those of torch")
    assert not _says(_read(tmp_path, text + "gradient_checkpointing: true\n"), "Liger's norms")
    for more in ("liger_rms_norm: false\n", "liger_rms_norm: true\n"):  # off, and without the plugin
        assert not _says(_read(tmp_path, LLAMA + more), "Liger's norms")


def test_a_sweep_has_a_note(tmp_path: Path) -> None:
    written(tmp_path, LLAMA, "conf.yml")
    file = written(tmp_path, "axolotl train conf.yml --sweep sweep.yml\n", "run.sh")
    assert _says(read(file, "axolotl", Given(num_gpus=8)), "sweep: each of its trainings changes settings")
