"""Forks of trainers whose source lies around a file: its release, its defaults, and the models that it defines otherwise."""

import re
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.megatron.around import parser_around
from planner.trainers.olmo_core.own_sizes import own_factory
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.reading.versions import newer, pinned

LITGPT = """model_name: Llama-3.1-8B
precision: bf16-true
devices: 8
train: {global_batch_size: 64, micro_batch_size: 1, max_seq_length: 2048}
"""
POLICY = """def setup(fsdp):
    strategy = FSDPStrategy(
        auto_wrap_policy={Block}, sharding_strategy=fsdp.sharding_strategy,
        activation_checkpointing_policy={Block} if fsdp.activation_checkpointing else None,
    )
"""
OF_FSDP = """class FSDPArgs:
    sharding_strategy: str = Strategy.SHARD_GRAD_OP
    activation_checkpointing: bool = False
"""
TITAN = """[model]
name = "{family}"
flavor = "{flavor}"
[training]
local_batch_size = 1
seq_len = 2048
{more}
[parallelism]
data_parallel_shard_degree = 8
"""
LLAMA3 = """llama3_configs = {
    "8B": TransformerModelArgs(dim=%d, n_layers=%d, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=%s, multiple_of=%d),
}
"""
QWEN3 = """qwen3_configs = {
    "small": Qwen3ModelArgs(vocab_size=4096, max_seq_len=4096, head_dim=128, dim=2048, n_layers=4, n_heads=8, n_kv_heads=2,
                            qk_norm=True, hidden_dim=1024, enable_weight_tying=True),
}
"""
OLMO = """from olmo_core.nn.transformer import TransformerConfig
model_config = TransformerConfig.{name}(vocab_size=100352)
train_module_config = TransformerTrainModuleConfig(rank_microbatch_size=2 * 2048, max_sequence_length=2048, optim=AdamWConfig())
data_loader_config = NumpyDataLoaderConfig(global_batch_size=64 * 2048, seed=0)
"""
FACTORIES = """class TransformerConfig:
    @classmethod
    def olmo2_1B(cls, vocab_size, **kwargs):
        width = kwargs.pop("d_model", 2048)
        return cls.llama_like(
            d_model=width, vocab_size=vocab_size, n_layers=kwargs.pop("n_layers", {layers}), n_heads=kwargs.pop("n_heads", 16),
            hidden_size_multiplier=1.5, block_name=kwargs.pop("block_name", BlockType.reordered_norm), qk_norm=True, **kwargs,
        )

    @classmethod
    def olmo2_own(cls, vocab_size, **kwargs):
        return cls.olmo2_1B(vocab_size, n_layers=6, **kwargs)

    @classmethod
    def olmo2_370M(cls, vocab_size, use_moe=False, **kwargs):
        if use_moe:
            return cls.llama_like_moe(vocab_size=vocab_size, **kwargs)
        return cls.llama_like(vocab_size=vocab_size, **kwargs)
"""
MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16
"""


def _says(found: Reading, words: str) -> bool:
    return any(words in one for one in found.notes)


@pytest.mark.parametrize(("name", "text", "package", "bounds"), [
    ("swift/version.py", "__version__ = '3.4.1'\n", "ms-swift", ((3, 4, 1), (3, 4, 1))),
    ("src/llamafactory/extras/env.py", 'import os\nVERSION = "0.9.2.dev0"\n', "LLaMA-Factory", ((0, 9, 1, 10**6), (0, 9, 2))),
    ("LLaMA-Factory/src/llamafactory/extras/env.py", 'VERSION = "0.9.3"\n', "LLaMA-Factory", ((0, 9, 3), (0, 9, 3))),
    ("src/axolotl/__init__.py", '__version__ = "0.8.0.dev0"\n', "axolotl", ((0, 7, 10**6), (0, 8, 0))),
    ("verl/version/version", "0.4.1\n", "verl", ((0, 4, 1), (0, 4, 1))),
])  # fmt: skip
def test_the_source_of_a_package_says_its_version(
    tmp_path: Path, name: str, text: str, package: str, bounds: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    home = re.sub(r"(swift|llamafactory|axolotl|verl)/.*", r"\1", name)
    written(tmp_path, "", f"{home}/__init__.py")
    written(tmp_path, text, name)
    written(tmp_path, f"{package}==99.0\n", "requirements.txt")
    assert pinned(tmp_path / "scripts" / "train.sh", package) == bounds


@pytest.mark.parametrize(("name", "text"), [
    ("trl/README.md", "of ours\n"), ("trl/__init__.py", '"""\n0.1 was the first\n"""\n'),
    ("pyproject.toml", '[project]\nname = "mine"\nversion = "3.2.1"\n[[tool.uv.index]]\nname = "trl"\n'),
])  # fmt: skip
def test_numbers_of_something_else_are_no_versions_of_a_package(tmp_path: Path, name: str, text: str) -> None:
    written(tmp_path, "", "trl/__init__.py") if name == "pyproject.toml" else written(tmp_path, "2.0.1\n", "trl/notes.txt")
    written(tmp_path, text, name)
    written(tmp_path, "trl==0.11.0\n", "requirements.txt")
    assert pinned(tmp_path / "scripts" / "train.sh", "trl") == ((0, 11, 0), (0, 11, 0))


def test_a_project_that_is_the_package_says_it_beside(tmp_path: Path) -> None:
    written(tmp_path, "", "litgpt/__init__.py")
    written(tmp_path, '[project]\nname = "litgpt"\nversion = "0.5.7"\ndependencies = ["torch>=2.5.0"]\n', "pyproject.toml")
    assert newer(tmp_path / "job.yaml", "litgpt", (0, 5, 8)) is False
    assert newer(tmp_path / "job.yaml", "litgpt", (0, 5, 7)) is True


@pytest.mark.parametrize(("said", "recompute", "zero"), [
    ("", Recompute.NONE, 2), ("fsdp: {activation_checkpointing: true}\n", Recompute.FULL, 2),
    ("fsdp: {activation_checkpointing: false, sharding_strategy: FULL_SHARD}\n", Recompute.NONE, 3),
])  # fmt: skip
def test_litgpt_a_policy_hangs_on_a_setting_of_the_copy(tmp_path: Path, said: str, recompute: Recompute, zero: int) -> None:
    written(tmp_path, POLICY, "litgpt/pretrain.py")
    written(tmp_path, OF_FSDP, "litgpt/args.py")
    found = read(written(tmp_path, LITGPT + said), None, Given(num_gpus=8))
    assert (found.fields["recompute"], found.fields["zero"]) == (int(recompute), zero)
    assert asked_for(found) == []


def test_torchtitan_a_flavour_under_a_preset_s_name(tmp_path: Path) -> None:
    job = written(tmp_path, TITAN.format(family="llama3", flavor="8B", more=""), "job.toml")
    registry = "torchtitan/models/llama3/__init__.py"
    written(tmp_path, LLAMA3 % (4096, 32, "1.3", 1024), registry)
    same = read(job, None, Given())
    assert same.model is not None and same.model.num_layers == 32 and not _says(same, "layers of")
    written(tmp_path, LLAMA3 % (1024, 8, "1.3", 1024), registry)
    found = read(job, None, Given())
    assert found.model is not None and (found.model.num_layers, found.model.hidden_size, found.model.ffn_size) == (8, 1024, 4096)
    assert _says(found, "which are not those of llama-3.1-8b")


def test_torchtitan_flavours_of_qwen3_are_read(tmp_path: Path) -> None:
    written(tmp_path, QWEN3, "torchtitan/models/qwen3/__init__.py")
    found = read(written(tmp_path, TITAN.format(family="qwen3", flavor="small", more=""), "job.toml"), None, Given())
    assert found.model is not None and found.model.qk_norm and found.model.tied_embeddings
    assert (found.model.num_layers, found.model.num_kv_heads, found.model.ffn_size, found.model.vocab_size) == (4, 2, 1024, 4096)


def test_torchtitan_accumulation_by_a_word_of_its_own(tmp_path: Path) -> None:
    job = written(tmp_path, TITAN.format(family="llama3", flavor="8B", more="grad_accum = 8"), "job.toml")
    with pytest.raises(PlannerError, match="training.grad_accum"):
        read(job, None, Given())


@pytest.mark.parametrize(("name", "layers"), [("olmo2_1B", 20), ("olmo2_own", 6)])
def test_olmo_core_factories_of_the_tree(tmp_path: Path, name: str, layers: int) -> None:
    written(tmp_path, FACTORIES.format(layers=20), "src/olmo_core/nn/transformer/config.py")
    found = read(written(tmp_path, OLMO.format(name=name), "train.py"), None, Given(num_gpus=8))
    assert found.model is not None and (found.model.num_layers, found.model.hidden_size) == (layers, 2048)
    assert _says(found, f"{name} is as the olmo_core around the script has it: d_model 2048, n_layers {layers}")


def test_olmo_core_the_same_factory_says_nothing(tmp_path: Path) -> None:
    written(tmp_path, FACTORIES.format(layers=18), "src/olmo_core/nn/transformer/config.py")
    found = read(written(tmp_path, OLMO.format(name="olmo2_1B"), "train.py"), None, Given(num_gpus=8))
    assert found.model is not None and found.model.num_layers == 18 and not _says(found, "olmo_core around")


def test_olmo_core_a_factory_of_several_ends_is_asked_about(tmp_path: Path) -> None:
    written(tmp_path, FACTORIES.format(layers=18), "src/olmo_core/nn/transformer/config.py")
    job = written(tmp_path, OLMO.format(name="olmo2_370M"), "train.py")
    assert own_factory(job, "olmo2_370M") is None
    with pytest.raises(OpenQuestionsError, match="olmo2_370M of the olmo_core around it is one of its own"):
        read(job, None, Given(num_gpus=8))


def test_verl_defaults_of_the_tree_that_decide_the_micro_batch(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 2, ppo_mini_batch_size: 64}, rollout: {n: 4}}\n"
    written(tmp_path, f"{text}data: {{train_batch_size: 32}}\n", "verl/trainer/config/ppo_trainer.yaml")
    command = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.n_gpus_per_node=8\n"
    found = read(written(tmp_path, command, "examples/train.sh"), None, Given())
    assert (found.fields["micro_batch_size"], found.global_batch_size) == (2, 128) and asked_for(found) == []


def test_megatron_what_its_module_of_arguments_sets(tmp_path: Path) -> None:
    written(tmp_path, "def validate_args(args):\n    args.use_distributed_optimizer = True\n    args.iteration = 0\n",
            "megatron/training/arguments.py")  # fmt: skip
    found = read(written(tmp_path, MEGATRON, "examples/train.sh"), None, Given())
    assert found.fields["zero"] == 1
    assert _says(found, "--use-distributed-optimizer True: arguments.py of the Megatron around it sets it, whatever is said")


def test_megatron_one_copy_in_the_project(tmp_path: Path) -> None:
    written(tmp_path, "MIT\n", "LICENSE")
    copy = written(tmp_path, "parser.add_argument('--swiglu', action='store_true')\n", "Megatron-DeepSpeed/megatron/arguments.py")
    job = written(tmp_path, MEGATRON, "scripts/train.sh")
    assert parser_around(str(job)) == copy.resolve()
    written(tmp_path, "", "Megatron-LM/megatron/arguments.py")
    assert parser_around(str(job)) is None


@pytest.mark.parametrize("text", [
    "python train_imagenet.py {words}\n",
    "PARAMS=( {words} )\n${{LOGGER}} python train_imagenet.py ${{PARAMS[@]}} --num-layers 50\n",
])  # fmt: skip
def test_a_classifier_of_images_is_no_megatron_job(tmp_path: Path, text: str) -> None:
    words = "--num-layers 50 --optimizer sgd --image-shape 4,224,224 --lr 1 --kv-store horovod"
    more = " --seq-length 1 --micro-batch-size 8 --hidden-size 8" * ("PARAMS" not in text)
    with pytest.raises(PlannerError, match="train_imagenet.py trains with classification of images"):
        read(written(tmp_path, text.format(words=words + more), "run.sh"), "megatron", Given(num_gpus=8))


def test_accelerate_with_sections_of_a_program(tmp_path: Path) -> None:
    text = "accelerate_config:\n  distributed_type: DEEPSPEED\n  compute_environment: LOCAL_MACHINE\n  mixed_precision: fp16\n"
    with pytest.raises(PlannerError, match="its sections model_config say what a program of its own makes of the model"):
        read(written(tmp_path, f"{text}model_config:\n  model_name_or_path: a\n  stage: sft\n"), None, Given(num_gpus=8))


def test_llama_factory_words_in_capitals_are_asked_about(tmp_path: Path) -> None:
    text = "stage: sft\nmodel_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: lora\ncutoff_len: 2048\nbf16: true\nIS_Masked: true\n"
    found = read(written(tmp_path, text), None, Given(num_gpus=1))
    assert "IS_Masked" in asked_for(found)
