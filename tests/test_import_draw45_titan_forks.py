"""Forks of torchtitan: types of weights, optimizers, replicas and vocabularies of their own."""

from pathlib import Path

import pytest
from import_files import written

from planner.cost.parameters import total_parameters
from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

TOML = """
[model]
name = "{name}"
flavor = "own_1b"
tokenizer_path = "./assets/small.model"
[optimizer]
name = "{optimizer}"
[training]
local_batch_size = 4
seq_len = 2048
{training}
[parallelism]
data_parallel_replicate_degree = 4
data_parallel_shard_degree = 8
{parallelism}
[activation_checkpoint]
mode = "none"
"""
REGISTRY = """
llama3_configs = {"own_1b": Args(dim=2048, n_layers=8, n_heads=32, multiple_of=1024, rope_theta=10000)}
"""
LATENT = """
latent_dense_configs = {
    "own_1b": Args(
        num_hidden_layers=4, hidden_size=1024, intermediate_size=2048 + 2048, kv_lora_rank=64, q_lora_rank=128,
        num_attention_heads=16, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32, rope_scaling=None,
        attention_bias=False, dtype="bfloat16",
    ),
}
"""
ARGS = "class Args:\n    def update_from_config(self, job_config, tokenizer):\n        self.vocab_size = tokenizer.n_words\n"
TRAIN = "if config.training.weights_precision is not None:\n    torch.set_default_dtype(MAP[config.training.weights_precision])\n"
OPTIMIZER = """
class Other(Optimizer):
    def step(self):
        self.state[p]["second"] = self.state[p]["first"] = zeros
class Signs(Optimizer):
    def step(self):
        state = self.state[p]
        state["step"] = 1
        state["buffer"] = buffer
        extra["small"] = small
"""
USUAL = {"name": "llama3", "optimizer": "AdamW", "training": "", "parallelism": ""}


def _job(folder: Path, **parts: str) -> Path:
    """A configuration within a copy of torchtitan whose tokenizer has 1000 ranks."""
    tree = {"models/llama3/__init__.py": REGISTRY, "models/latent_dense/__init__.py": LATENT, "train.py": TRAIN,
            "components/optimizer.py": "from .optimizers.signs import Signs\n", "components/optimizers/signs.py": OPTIMIZER,
            "models/llama3/model/args.py": ARGS, "models/latent_dense/model/args.py": ARGS}  # fmt: skip
    for name, text in tree.items():
        written(folder, text, f"torchtitan/{name}")
    written(folder, "".join(f"YWE{i % 10}= {i}\n" for i in range(1000)), "assets/small.model")
    return written(folder, TOML.format(**{**USUAL, **parts}), "configs/job.toml")


def _read(folder: Path, said: Given | None = None, **parts: str) -> Reading:
    return read(_job(folder, **parts), None, said or Given())


def test_a_word_for_the_type_of_weights_is_read_where_torch_gets_it(tmp_path: Path) -> None:
    word = {"training": 'weights_precision = "bfloat16"'}
    found = _read(tmp_path, **word)
    assert found.precision == "bf16_true" and not found.unread
    (tmp_path / "torchtitan/train.py").unlink()
    with pytest.raises(OpenQuestionsError, match="--set training.dtype=bfloat16.float32 .training.weights_precision is 'bfloat16'"):
        read(tmp_path / "configs/job.toml")
    for kind, precision in (("bfloat16", "bf16_true"), ("float32", "bf16")):
        assert read(tmp_path / "configs/job.toml", None, Given(settings={"training.dtype": kind})).precision == precision
    with pytest.raises(PlannerError, match="training.weights_precision decides memory"):
        _read(tmp_path, training='weights_precision = "float16"')


def test_an_optimizer_of_a_fork_is_asked_with_the_rest(tmp_path: Path) -> None:
    job = {"optimizer": "Signs", "training": 'default_dtype = "bfloat16"'}
    with pytest.raises(OpenQuestionsError, match="optimizer.name=AdamW .it is 'Signs'.*keeps 1 state a weight") as error:
        _read(tmp_path, **job)
    assert [one.name for one in error.value.questions] == ["optimizer.name", "training.dtype"]
    found = _read(tmp_path, Given(settings={"optimizer.name": "AdamW", "training.dtype": "bfloat16"}), **job)
    assert found.model is not None and found.optimizer == "adam" and found.precision == "bf16_true"
    more = total_parameters(found.model) * 2 / 8 / 2**30
    assert f"stands in for Signs; its class keeps 1 state a weight, priced as 2: memory comes out too high by up to {more:.2f}" in (
        " ".join(found.notes))  # fmt: skip
    script = written(tmp_path, "torchrun --nproc_per_node=8 torchtitan/train.py --job.config_file ./configs/job.toml\n", "run.sh")
    by_script = read(script, None, Given(settings={"optimizer.name": "AdamW", "training.dtype": "bfloat16"}))
    assert any("stands in for Signs" in one for one in by_script.notes)
    unseen = _read(tmp_path, Given(settings={"optimizer.name": "AdamW"}), optimizer="Unseen")
    assert any("stands in for Unseen; each state a weight more or less" in one for one in unseen.notes)


@pytest.mark.parametrize("word", ["force_disable_gradient_all_reduce", "no_sync", "skip_grad_sync"])
def test_replicas_that_train_apart_are_said(tmp_path: Path, word: str) -> None:
    assert any("do not average their gradients" in one for one in _read(tmp_path, parallelism=f"{word} = true").notes)
    assert not any("do not average" in one for one in _read(tmp_path, parallelism=f"{word} = false").notes)


@pytest.mark.parametrize(("name", "layers"), [("llama3", 8), ("latent_dense", 4)])
def test_a_vocabulary_left_to_the_tokenizer_is_counted(tmp_path: Path, name: str, layers: int) -> None:
    found = _read(tmp_path, name=name)
    assert found.model is not None and (found.model.vocab_size, found.model.num_layers) == (1256, layers)
    assert any("a vocabulary of 1256, by small.model" in one for one in found.notes)


def test_entries_of_tokenizer_json(tmp_path: Path) -> None:
    job = _job(tmp_path)
    text = '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "b"}, {"content": "<s>"}]}'
    written(tmp_path, text, "assets/tokenizer.json")
    job.write_text(job.read_text().replace("assets/small.model", "assets"))
    found = read(job).model
    assert found is not None and found.vocab_size == 3
    (tmp_path / "assets/tokenizer.json").unlink()
    found = read(job).model
    assert found is not None and found.vocab_size == 128256


def test_experts_are_not_taken_for_dense_layers(tmp_path: Path) -> None:
    job = _job(tmp_path, name="latent_dense")
    written(tmp_path, "n_routed_experts: int = 64\n", "torchtitan/models/latent_dense/model/model.py")
    assert read(job).model is None
