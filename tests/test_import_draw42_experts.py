"""How experts are cut where a program of NeMo or Megatron-Bridge does not say it."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

NEMO = "from nemo.collections import llm\nrecipe = llm.{}.{}_recipe(name='a', num_nodes={}, num_gpus_per_node=8)\n{}"


@pytest.mark.parametrize(
    ("name", "start", "nodes", "more", "degrees"),
    [
        ("mixtral_8x7b_16k", "pretrain", 4, "", [4, 1, 4]), ("mixtral_8x22b", "pretrain", 16, "", [2, 8, 2]),
        ("qwen3_30b_a3b", "pretrain", 4, "", [4, 4, 1]), ("llama3_8b", "pretrain", 1, "", [1, 1, 1]),
        ("mixtral_8x7b_16k", "pretrain", 4, "recipe.trainer.strategy.tensor_model_parallel_size = 2\n", [2, 1, 2]),
        ("mixtral_8x7b_16k", "pretrain", 4, "recipe.trainer.strategy.expert_tensor_parallel_size = 1\n", [4, 1, 1]),
        ("llama3_70b", "pretrain", 4, "", [4, 1, 1]),
    ],
)  # fmt: skip
def test_experts_of_nemo_are_cut_as_the_layers_are(
    tmp_path: Path, name: str, start: str, nodes: int, more: str, degrees: list[int]
) -> None:
    found = read(written(tmp_path, NEMO.format(name, start, nodes, more), "start.py"))
    assert [found.fields[one] for one in ("tp", "ep", "etp")] == degrees


BRIDGE = """
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, TrainingConfig
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

model = AutoBridge.from_hf_pretrained("{}").to_megatron_provider(load_weights=False)
config = ConfigContainer(model=model, train=TrainingConfig(global_batch_size=32, micro_batch_size=1), mixed_precision="bf16_mixed")
config.model.tensor_model_parallel_size = 2
config.model.expert_model_parallel_size = {}
config.model.seq_length = 4096
{}
finetune(config=config, forward_step_func=forward_step)
"""
UNSET = "model.expert_tensor_parallel_size"


def _bridge(folder: Path, model: str, ep: int, more: str = "", **settings: str) -> Reading:
    return read(written(folder, BRIDGE.format(model, ep, more), "start.py"), None, Given(num_gpus=8, settings=settings))


def test_a_program_of_megatron_bridge_without_a_recipe_is_asked_how_experts_are_cut(tmp_path: Path) -> None:
    moe, dense = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"
    assert asked_for(_bridge(tmp_path, moe, 4)) == [UNSET]
    for answer in ("2", "1"):
        found = _bridge(tmp_path, moe, 4, **{UNSET: answer})
        assert found.fields["etp"] == int(answer) and not asked_for(found)
    said = _bridge(tmp_path, moe, 4, f"config.{UNSET} = 1")
    assert said.fields["etp"] == 1 and not asked_for(said)
    whole = _bridge(tmp_path, moe, 1)  # without expert parallelism every release cuts them as layers
    assert whole.fields["etp"] == 2 and not asked_for(whole)
    other = _bridge(tmp_path, dense, 1)
    assert other.fields["etp"] == 1 and not asked_for(other)


def test_recipes_of_megatron_bridge_say_how_experts_are_cut(tmp_path: Path) -> None:
    text = "from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config\n"
    text += "from megatron.bridge.training.pretrain import pretrain\n"
    text += "cfg = qwen3_30b_a3b_pretrain_config()\ncfg.model.tensor_model_parallel_size = 2\npretrain(cfg, forward_step)\n"
    found = read(written(tmp_path, text, "start.py"), None, Given(num_gpus=8, settings={"recipe_version": "main"}))
    assert found.fields["etp"] == 1 and not asked_for(found)


def test_such_a_program_behind_a_script(tmp_path: Path) -> None:
    written(tmp_path, BRIDGE.format("Qwen/Qwen3-30B-A3B", 4, ""), "train.py")
    found = read(written(tmp_path, "torchrun --nproc_per_node=8 train.py\n", "run.sh"))
    assert asked_for(found) == [UNSET] and found.num_gpus == 8
