"""Functions of a project around OLMo-core's factories, in the script and in its modules."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

OWN = """
def own_100M(vocab_size, n_heads=8, **kwargs):
    \"\"\"A small one.\"\"\"
    d_model = kwargs.pop("d_model", 512)
    return TransformerConfig.llama_like(
        d_model=d_model, vocab_size=vocab_size, n_layers=kwargs.pop("n_layers", 10), n_heads=n_heads, **kwargs
    )

def own_200M(vocab_size):
    return TransformerConfig.llama_like(d_model=1024, vocab_size=vocab_size, n_layers=16, n_heads=16)
"""
BY_HAND = """
def own_by_hand(vocab_size):
    config = TransformerConfig.llama_like(d_model=1024, vocab_size=vocab_size, n_layers=16, n_heads=16)
    for block in config.blocks:
        block.extend()
    return config
"""
SCRIPT = """
from olmo_core.nn.transformer import TransformerConfig
{own}
def main():
    tokens = TokenizerConfig.dolma2()
    model = {call}
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=4096, max_sequence_length=2048, optim=AdamWConfig(lr=1e-3),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp, param_dtype=DType.bfloat16),
    )
    loader = NumpyDataLoaderConfig(global_batch_size=65536)
"""
ROWS = "tokens.padded_vocab_size()"


def _read(folder: Path, own: str, call: str) -> Reading:
    return read(written(folder, SCRIPT.format(own=own, call=call), "src/scripts/train.py"), None, Given(num_gpus=8))


@pytest.mark.parametrize("own", [OWN, "from scripts.own_models import own_100M, own_200M as own_200M\n"])
@pytest.mark.parametrize(("call", "sizes"), [
    (f"own_100M(vocab_size={ROWS})", (10, 512, 8)), (f"own_100M({ROWS}, 4, n_layers=6, d_model=256)", (6, 256, 4)),
    (f"own_100M(vocab_size={ROWS}, n_kv_heads=2)", (10, 512, 8)), (f"own_200M(vocab_size={ROWS})", (16, 1024, 16)),
])  # fmt: skip
def test_a_function_around_a_factory(tmp_path: Path, own: str, call: str, sizes: tuple[int, int, int]) -> None:
    written(tmp_path, OWN, "src/scripts/own_models.py")
    model = _read(tmp_path, own, call).model
    assert model is not None and (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) == (*sizes, 100352)
    assert model.num_kv_heads == (2 if "n_kv_heads" in call else sizes[2])


def test_other_functions_are_asked_about(tmp_path: Path) -> None:
    written(tmp_path, OWN + BY_HAND, "src/scripts/own_models.py")
    for call in (f"own_by_hand(vocab_size={ROWS})", f"own_100M(vocab_size={ROWS}, **more)"):
        with pytest.raises(OpenQuestionsError, match="--model NAME"):
            _read(tmp_path, "from scripts.own_models import own_100M, own_by_hand\n", call)
