"""Imports of Megatron's scripts that a draw showed wrong: words that a fork does not read, and notes that are not so."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read

SIZES = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 1000"
)


def _run(folder: Path, words: str, before: str = "") -> Path:
    return written(folder, f"{before}torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} {words}\n", "run.sh")


@pytest.mark.parametrize(("reads", "heads"), [("args.num_query_groups", 16), ("config.num_key_value_heads", 4)])
def test_heads_that_no_layer_of_a_fork_reads(tmp_path: Path, reads: str, heads: int) -> None:
    written(tmp_path, "from ownmegatron.training import pretrain\n", "pretrain_gpt.py")
    lines = f"# args.num_key_value_heads\nself.groups = args.num_query_groups if args.grouped else 0\nself.n = {reads}\n"
    written(tmp_path / "ownmegatron/model", lines, "transformer.py")
    written(tmp_path / "ownmegatron/training", "args.num_key_value_heads = 1\n", "arguments.py")
    found = read(_run(tmp_path, "--bf16 --num-key-value-heads 4"))
    assert found.model is not None and found.model.num_kv_heads == heads
    assert any("--num-key-value-heads 4 does nothing in ownmegatron" in one for one in found.notes) is (heads == 16)


@pytest.mark.parametrize(("kind", "stage", "told"), [("bf16", 1, False), ("fp16", 1, True), ("bf16", 2, True)])
def test_fp32_gradients_of_deepspeed_are_told_of_where_16_bits_are_priced(
    tmp_path: Path, kind: str, stage: int, told: bool
) -> None:
    sums = '"data_types": {"grad_accum_dtype": "fp32"}'
    engine = f'{{"zero_optimization": {{"stage": {stage}}}, "{kind}": {{"enabled": true}}, {sums}}}'
    words = f"--deepspeed --deepspeed_config ds.json --{kind} --special-tokens-file t.txt"
    found = read(_run(tmp_path, words, f"cat > ds.json <<EOF\n{engine}\nEOF\n"))
    assert any("gradients are priced in 16 bits" in one for one in found.notes) is told
    assert asked_for(found) == [] and not any("special" in one for one in found.unread)


def test_flash_attention_in_layers_of_legacy_models_is_told(tmp_path: Path) -> None:
    notes = read(_run(tmp_path, "--bf16 --use-legacy-models --use-flash-attn")).notes
    assert any(one.startswith("layers are Megatron's own with flash attention, priced as Transformer Engine's") for one in notes)


def test_quoted_words_before_a_program_may_say_its_processes(tmp_path: Path) -> None:
    script = _run(tmp_path, "--bf16").read_text()
    found = read(written(tmp_path, script.replace("--nproc_per_node 8", "'$LAUNCH'"), "run.sh"))
    assert found.num_gpus is None and not any("starts one process" in one for one in found.notes)
