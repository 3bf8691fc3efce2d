"""What is said of a plan beside the trainer: an early head, the rows of NullTokenizer, gradients in fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_import_draw41_nanotron import YAML

from planner.options import matters
from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan

WORDS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --global-batch-size 16"
)


def _read(folder: Path, words: str) -> Any:
    file = folder / "run.sh"
    file.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} {words}\n")
    return read(file, None)


@pytest.mark.parametrize(("rows", "layers", "pp", "said"), [
    (32000, 8, 2, False), (128000, 8, 2, True), (128000, 8, 1, False), (100000, 8, 4, True), (100000, 8, 2, False),
])  # fmt: skip
def test_a_head_of_nanotron_that_lies_before_the_last_stage_is_said(
    tmp_path: Path, rows: int, layers: int, pp: int, said: bool
) -> None:
    """h = 1024, f = 2816: a layer of 12.8 h^2, heads of 31, 98 and 125 h^2; before the head at most (p - 1) / p of all."""
    file = tmp_path / "it.yaml"
    text = YAML.replace("pp: 1, tp: 4", f"pp: {pp}, tp: 1").replace("vocab_size: 32000", f"vocab_size: {rows}")
    file.write_text(text.replace("num_hidden_layers: 8", f"num_hidden_layers: {layers}"))
    assert any("lies before the last stage" in one for one in read(file).notes) is said


def test_null_tokenizer_has_one_word_more_and_is_padded(tmp_path: Path) -> None:
    null = "--bf16 --tokenizer-type NullTokenizer --vocab-size 32000"
    found = _read(tmp_path, null)
    assert found.model.vocab_size == 32000 and any("one word more, padded to 32128" in one for one in found.notes)
    wide = _read(tmp_path, f"{null} --make-vocab-size-divisible-by 8192 --tensor-model-parallel-size 2")
    assert wide.architecture["vocab_size"] == 32768
    assert any("vocabulary: 32768, 32000 and one word of NullTokenizer" in one for one in wide.notes)
    other = _read(tmp_path, null.replace("NullTokenizer", "GPTSentencePieceTokenizer"))
    assert other.model.vocab_size == 32000 and not any("NullTokenizer" in one for one in other.notes)


def test_gradients_of_fp16_are_not_assumed_in_fp32(tmp_path: Path) -> None:
    fp16, bf16 = (to_plan(_read(tmp_path, f"--{one} --vocab-size 32000"), {}) for one in ("fp16", "bf16"))
    assert [matters("gradient_dtype", one.workload, 8) for one in (fp16, bf16)] == [False, True]
    said = "gradients are in fp16, and so they are in memory; their reduction is priced in fp32"
    for words in ("--fp16", "--bf16", "--fp16 --accumulate-allreduce-grads-in-fp32"):
        assert any(said in one for one in _read(tmp_path, f"{words} --vocab-size 32000").notes) is (words == "--fp16")
