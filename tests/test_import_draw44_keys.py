"""Keys of forks whose value is a number or a switch, of torchtitan and of Megatron-LM, and rows that a vocabulary is padded by."""

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
