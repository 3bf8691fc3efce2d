"""What LLaMA-Factory does by itself: defaults by release, switches that others undo, settings that count for nothing."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

FACTORY = """stage: sft
do_train: true
dataset: a
template: qwen
per_device_train_batch_size: 2
bf16: true
"""
QWEN = FACTORY + "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\n"
BASH = """python src/train_bash.py --stage sft --do_train --model_name_or_path {} --dataset a --finetuning_type lora \\
  --per_device_train_batch_size 4 --fp16 {}
"""


def _read(folder: Path, text: str, **settings: str) -> Reading:
    return read(written(folder, text, "job.yaml"), "llama-factory", Given(num_gpus=1, settings=settings))


def _bash(folder: Path, words: str = "", model: str = "meta-llama/Llama-2-7b-hf", before: str = "") -> Reading:
    return read(written(folder, before + BASH.format(model, words), "run.sh"), "llama-factory", Given(num_gpus=1))


def _says(found: Reading, text: str) -> bool:
    return any(text in one for one in found.notes)


@pytest.mark.parametrize("loss", ["use_dft_loss: true", "use_eaft_loss: true", "label_smoothing_factor: 0.1"])
def test_a_loss_of_its_own_keeps_the_scores_that_liger_would_not(tmp_path: Path, loss: str) -> None:
    liger = QWEN + "enable_liger_kernel: true\ncutoff_len: 4096\n"
    assert _read(tmp_path, liger).trainer == "llama-factory+loss=fused_linear"
    found = _read(tmp_path, f"{liger}{loss}\n")
    assert found.trainer == "llama-factory" and _says(found, "all scores are kept")


def test_the_table_of_liger_is_its_own(tmp_path: Path) -> None:
    text = f"{FACTORY}cutoff_len: 4096\nmodel_name_or_path: HuggingFaceTB/SmolLM3-3B\n"
    found = _read(tmp_path, text + "enable_liger_kernel: true\n")
    assert found.trainer == "llama-factory" and _says(found, "has no patch of Liger's for HuggingFaceTB/SmolLM3-3B")
    assert _read(tmp_path, text + "use_liger_kernel: true\n").trainer == "llama-factory+loss=fused_linear"  # of transformers


def test_the_length_is_that_of_the_release(tmp_path: Path) -> None:
    found = _read(tmp_path, QWEN)
    assert found.sequence_length == 2048 and _says(found, "before, 1024")
    written(tmp_path, "llamafactory==0.9.0\n", "requirements.txt")
    found = _read(tmp_path, QWEN)
    assert found.sequence_length == 1024 and not _says(found, "before, 1024")
    written(tmp_path, "llamafactory==0.9.3\n", "requirements.txt")
    assert _read(tmp_path, QWEN).sequence_length == 2048 and not _says(_read(tmp_path, QWEN), "before, 1024")


def test_old_releases_take_eager_attention_where_flash_attn_is_not_on(tmp_path: Path) -> None:
    found = _bash(tmp_path)
    assert found.trainer == "llama-factory+attention_kernel=eager" and _says(found, "--set flash_attn=sdpa")
    assert _bash(tmp_path, "--flash_attn").trainer == "llama-factory+attention_kernel=fa2"
    assert _bash(tmp_path, model="THUDM/chatglm3-6b").trainer == "llama-factory"  # code of its own
    clone = "git clone -b v{} https://github.com/hiyouga/LLaMA-Factory\n"
    found = _bash(tmp_path, before=clone.format("0.6.3"))
    assert found.trainer == "llama-factory+attention_kernel=eager" and not _says(found, "--set flash_attn")
    assert _bash(tmp_path, before=clone.format("0.5.0")).trainer == "llama-factory"
    written(tmp_path, "llmtuner==0.6.2\n", "requirements.txt")
    assert _read(tmp_path, QWEN).trainer == "llama-factory+attention_kernel=eager"


def test_old_programs_train_no_tables_and_go_on_from_checkpoints(tmp_path: Path) -> None:
    found = _bash(tmp_path, "--resize_vocab --checkpoint_dir out/sft")
    assert found.lora_whole == "none" and _says(found, "checkpoint_dir: adapters go on from there")
    assert _says(found, "0.1 started with q_proj and v_proj") and not _says(_bash(tmp_path, "--lora_target all"), "started with")
    assert _read(tmp_path, QWEN + "resize_vocab: true\n").lora_whole == "both"


@pytest.mark.parametrize("name", ["freeze_language_model", "train_mm_proj_only"])
def test_training_an_image_encoder_alone_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlannerError, match=f"{name}: training the"):
        _read(tmp_path, f"{QWEN}finetuning_type: full\n{name}: true\n")


def test_an_image_encoder_that_is_trained_too_has_a_note(tmp_path: Path) -> None:
    text = f"{FACTORY}model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct\nfinetuning_type: full\n"
    assert _says(_read(tmp_path, text + "freeze_vision_tower: false\n"), "0.68 billion weights; freeze_vision_tower")
    assert not _says(_read(tmp_path, text), "freeze_vision_tower")


@pytest.mark.parametrize(("model", "frozen"), [("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "nf4"), ("Qwen/Qwen3-8B-FP8", "bf16")])
def test_quantization_bit_leaves_quantised_uploads_alone(tmp_path: Path, model: str, frozen: str) -> None:
    found = _read(tmp_path, f"{FACTORY}model_name_or_path: {model}\nquantization_bit: 8\n")
    assert found.frozen_weights == frozen and _says(found, "quantization_bit counts for nothing")
    assert _read(tmp_path, QWEN + "quantization_bit: 8\n").frozen_weights == "int8"


def test_the_mask_of_packed_sequences_has_a_note_with_its_bytes(tmp_path: Path) -> None:
    packed = QWEN + "neat_packing: true\ncutoff_len: 32768\n"
    assert _says(_read(tmp_path, packed), "its mask is not priced: memory comes out too low by 4.0 GiB")
    assert not _says(_read(tmp_path, packed + "flash_attn: fa2\n"), "neat_packing")


def test_what_recomputes_all_the_same(tmp_path: Path) -> None:
    off = QWEN + "disable_gradient_checkpointing: true\n"
    assert _read(tmp_path, off).fields["recompute"] == 0
    assert _read(tmp_path, off + "gradient_checkpointing: true\n").fields["recompute"] == 2
    gemma = f"{FACTORY}model_name_or_path: google/gemma-3n-E4B-it\n"
    assert _read(tmp_path, gemma).fields["recompute"] == 0


def test_unsloth_takes_its_loss_in_pieces(tmp_path: Path) -> None:
    found = _read(tmp_path, QWEN + "use_unsloth: true\n")
    assert found.trainer == "llama-factory+loss=fused_linear" and _says(found, "before 2024-12 keeps all scores")
    assert _read(tmp_path, QWEN.replace("sft", "dpo") + "use_unsloth: true\n").trainer == "llama-factory"


def test_tables_that_nothing_casts_have_a_note(tmp_path: Path) -> None:
    text = QWEN.replace("bf16: true", "pure_bf16: true") + "additional_target: embed_tokens,lm_head\n"
    assert _says(_read(tmp_path, text), "too high by up to 4.1 GiB each")
    assert not _says(_read(tmp_path, text.replace("pure_bf16", "bf16")), "tables that are trained")
