"""Keys of forks whose value is a number or a switch, of torchtitan and of Megatron-LM, and rows that a vocabulary is padded by."""

import time
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 4096\n[parallelism]\n'
    'tensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\n'
)
POLICY = "def policy(meta, config):\n    return config.NAME > 0 and meta[mm_count_key] % config.NAME == 0\n"
TOLD = "keys that torchtitan does not have, not read: "


def _titan(folder: Path, text: str, **said: str) -> Reading:
    return read(written(folder, TITAN + text, "a.toml"), None, Given(num_gpus=8, settings=said))


def test_a_key_of_recompute_that_torchtitan_does_not_have_is_asked_whatever_number_it_has(tmp_path: Path) -> None:
    for word in ("mm_keep_every = 0", "mm_keep_every = 3", "offload_ratio = 0.0", "save_attn = true"):
        with pytest.raises(OpenQuestionsError) as caught:
            _titan(tmp_path, word)
        assert [one.name for one in caught.value.questions] == [f"activation_checkpoint.{word.partition(' ')[0]}"]
    for word in ("save_attn = false", "early_stop = false"):
        found = _titan(tmp_path, word)
        assert asked_for(found) == []
        assert (f"{TOLD}activation_checkpoint.save_attn" in found.notes) == (word == "save_attn = false")
    found = _titan(tmp_path, "mm_keep_every = 0", mm_keep_every="false")
    assert asked_for(found) == [] and f"{TOLD}activation_checkpoint.mm_keep_every" in found.notes
    found = _titan(tmp_path, "[loss]\nname = 'own'\nz_weight = 0.0\n")
    assert asked_for(found) == [] and f"{TOLD}loss.z_weight" in found.notes
    found = _titan(tmp_path, "[curriculum]\nevery = 0\n")
    assert asked_for(found) == [] and "sections that torchtitan does not have, not read: curriculum" in found.notes
    assert not any("curriculum" in one for one in _titan(tmp_path, "[curriculum]\nenable = false\nevery = 0\n").notes)


@pytest.mark.parametrize(("every", "does", "gigabytes"), [
    (0, "keeps all matrix products of a layer, and every second is priced as kept: memory comes out too low by up to 5.75", True),
    (1, "keeps none of the matrix products of a layer, and every second is priced as kept: memory comes out too high by", True),
    (3, "drops one in 3 of the matrix products", True), (2, "matrix products", False),
])  # fmt: skip
def test_matrix_products_that_a_policy_of_the_copy_around_keeps(tmp_path: Path, every: int, does: str, gigabytes: bool) -> None:
    (tmp_path / "torchtitan/distributed").mkdir(parents=True)
    written(tmp_path, POLICY.replace("NAME", "mm_keep_every"), "torchtitan/distributed/activation_checkpoint.py")
    found = _titan(tmp_path, f"mm_keep_every = {every}")
    assert asked_for(found) == [] and any(does in one for one in found.notes) == gigabytes


MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 \\\n"
    "    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 MORE\n"
)


def _megatron(folder: Path, more: str, **said: str) -> Reading:
    return read(written(folder, MEGATRON.replace("MORE", more), "run.sh"), None, Given(settings=said))


@pytest.mark.parametrize(("more", "rows", "note"), [
    ("--tokenizer-type GPT2BPETokenizer --make-vocab-size-divisible-by 1024", 51200, "51200, 50257, padded to a multiple of 1024"),
    ("--tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size 8", 51200, "51200, 50257, padded to a multiple of 1024"),
    ("--tokenizer-type GPT2BPETokenizer --make-vocab-size-divisible-by 64", 0, "vocabulary: 50257 priced; padded to 50304"),
    ("--tokenizer-type GPT2BPETokenizer", 0, "50257, of its tokenizer"),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model EleutherAI/pythia-12b", 0, "50688, the embedding rows of pythia-12b; "
     "its tokenizer may have fewer"),
    ("--tokenizer-type HFTokenizer --vocab-size 32000 --make-vocab-size-divisible-by 8192", 32768, "padded"),
    ("--tokenizer-type HuggingFaceTokenizer --padded-vocab-size 50257 --make-vocab-size-divisible-by 1024", 0, ""),
])  # fmt: skip
def test_a_vocabulary_is_padded_whatever_its_tokenizer_is(tmp_path: Path, more: str, rows: int, note: str) -> None:
    found = _megatron(tmp_path, more)
    assert found.architecture.get("vocab_size", 0) == rows
    assert note in " ".join(found.notes) and ("padded" in " ".join(found.notes)) == ("padded" in note)


def test_experts_that_layers_share_are_asked_about_with_what_a_plan_has(tmp_path: Path) -> None:
    words = "--vocab-size 32000 --num-experts 8 --moe-router-topk 2 --moe-expert-pool-mode deep --moe-own-routing"
    with pytest.raises(OpenQuestionsError) as caught:
        _megatron(tmp_path, words)
    about = {one.name: one.about for one in caught.value.questions}
    assert "layers share experts by its words, which no plan has" in about["moe_expert_pool_mode"]
    high = "each of 8 layers: memory comes out too high"
    assert high in about["moe_expert_pool_mode"] and "share" not in about["moe_own_routing"]
    notes = _megatron(tmp_path, words, moe_expert_pool_mode="false", moe_own_routing="false").notes
    high = "experts are priced in every layer, and memory comes out too high"
    assert f"without --moe-expert-pool-mode 'deep', as said: {high}" in notes
    assert "without --moe-own-routing True, as said" in notes


def test_a_long_text_of_a_policy_is_searched_in_no_time(tmp_path: Path) -> None:
    written(tmp_path, "mm_count" * 16000, "torchtitan/distributed/activation_checkpoint.py")
    began = time.monotonic()
    _titan(tmp_path, "")
    assert time.monotonic() - began < 4  # with an end of any length after each place it grows by the square
