"""What the copy of a trainer around a configuration says of models: flavours and losses of torchtitan, layers of nanotron."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

TOML = """[model]
name = "llama3"
flavor = "{flavor}"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"
"""
REGISTRY = """
llama3_configs = {{
    "3B": TransformerModelArgs(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0, multiple_of=1024, rope_theta=500000{more}
    ),
}}
register_train_spec(TrainSpec(name="llama3", config=llama3_configs, build_loss_fn={loss}))
SPEC = TrainSpec(
    build_loss_fn={loss},
)
"""


def _titan(folder: Path, flavor: str = "3B", more: str = "", loss: str = "build_cross_entropy_loss") -> Reading:
    written(folder, REGISTRY.format(more=more, loss=loss), "torchtitan/models/llama3/__init__.py")
    return read(written(folder, TOML.format(flavor=flavor), "torchtitan/models/llama3/train_configs/own.toml"))


def test_a_flavour_of_the_registry_around_a_configuration(tmp_path: Path) -> None:
    found = _titan(tmp_path)
    assert found.model is not None and not asked_for(found) and "models/llama3/__init__.py" in " ".join(found.notes)
    model = found.model
    assert (model.hidden_size, model.num_layers, model.num_kv_heads, model.ffn_size) == (3072, 28, 8, 8192)
    assert model.vocab_size == 128256 and not model.tied_embeddings


@pytest.mark.parametrize(("flavor", "more"), [("3B", ', activation="gelu"'), ("4B", ""), ("3B", ", n_extra=EXTRA")])
def test_a_flavour_whose_words_are_not_all_known_is_asked(tmp_path: Path, flavor: str, more: str) -> None:
    assert _titan(tmp_path, flavor, more).model is None


def test_a_loss_of_a_project_in_torchtitans_registry_is_said(tmp_path: Path) -> None:
    assert "the loss is build_pairs_loss of the project" in " ".join(_titan(tmp_path, loss="build_pairs_loss").notes)
    assert "the loss is" not in " ".join(_titan(tmp_path).notes)


NANOTRON = """
model:
  dtype: bfloat16
  model_config: {{{kind}: true, hidden_size: 4096, intermediate_size: 11008, num_attention_heads: 32, num_hidden_layers: 32,
    num_key_value_heads: 32, vocab_size: 32000}}
optimizer: {{accumulate_grad_in_fp32: true, zero_stage: 0}}
parallelism: {{dp: 1, pp: 2, tp: 1}}
tokens: {{batch_accumulation_per_replica: 1, micro_batch_size: 2, sequence_length: 256}}
"""


def test_a_kind_of_layers_that_nanotron_does_not_have_is_named(tmp_path: Path) -> None:
    ways = []
    for kind in ("is_bitnet_config", "is_llama_config"):
        try:
            found = read(written(tmp_path, NANOTRON.format(kind=kind)), "nanotron", Given())
            ways.append([one.about for one in found.questions])
        except OpenQuestionsError as error:
            ways.append([one.about for one in error.questions])
    assert "is_bitnet_config" in " ".join(ways[0]) and not ways[1]


def test_a_flavour_for_tests_has_a_small_tokenizer_and_is_asked(tmp_path: Path) -> None:
    registry = REGISTRY.replace('"3B"', '"debugmodel"').format(more="", loss="build_cross_entropy_loss")
    written(tmp_path, registry, "torchtitan/models/llama3/__init__.py")
    file = written(tmp_path, TOML.format(flavor="debugmodel"), "torchtitan/models/llama3/train_configs/debug.toml")
    assert read(file).model is None
