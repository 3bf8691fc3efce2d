"""What projects around torchtune showed in draw 46: builders, losses, recipes and degrees of their own."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.layout import CpMethod
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given

CONFIG = """output_dir: /out
enable_activation_checkpointing: true
tokenizer: {{_component_: lab.models.qwen3.tokenizer, max_seq_len: 4096}}
dataset:
  _component_: torchtune.datasets.{data}_dataset
model:
  _component_: lab.models.qwen3.qwen3_8b
{more}batch_size: 1
epochs: 1
gradient_accumulation_steps: 2
loss: {{_component_: {loss}}}
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-5}}
device: cuda
dtype: bf16
"""
RECIPE = """from torchtune import config
from torchtune.recipe_interfaces import FTRecipeInterface
class Recipe(FTRecipeInterface):
    def forward(self, model, batch):
        {scores}
"""
ON_THE_HOST = "all_logits = torch.stack([chunk.cpu() for chunk in model(batch)])"
SAFE = "torchtune.modules.loss.LinearCrossEntropyLoss"


def _read(folder: Path, loss: str = SAFE, more: str = "", data: str = "alpaca", **given: object) -> Reading:
    path = written(folder / "recipes/configs/qwen3/runs", CONFIG.format(loss=loss, more=more, data=data), "8B.yaml")
    return read(path, None, Given(**{"num_gpus": 16, "model": "qwen3-8b", **given}))  # type: ignore[arg-type]


def _notes(reading: Reading) -> str:
    return " | ".join(reading.notes)


def test_a_recipe_is_torchtunes_by_any_part_of_it(tmp_path: Path) -> None:
    found = _read(tmp_path, loss="lab.modules.LigerLoss", num_gpus=None, model=None)
    assert found.trainer.startswith("torchtune") and found.num_gpus is None
    assert (found.model, found.model_name) == (None, "lab.models.qwen3.qwen3_8b")
    told = _read(tmp_path)
    assert (told.fields["dp"], told.global_batch_size, told.sequence_length, asked_for(told)) == (16, 32, 4096, [])


@pytest.mark.parametrize(
    ("loss", "noted"),
    [
        ("lab.modules.loss.DPOLoss", True), ("lab.loss.LinearCrossEntropyLoss", True), ("torchtune.rlhf.loss.DPOLoss", False),
        (SAFE, False), ("torch.nn.CrossEntropyLoss", False), ("LinearCrossEntropyLoss", False),
    ],
)  # fmt: skip
def test_a_loss_of_its_own_with_the_name_of_one_of_torchtune(tmp_path: Path, loss: str, noted: bool) -> None:
    text = f"loss {loss} is the project's own: taken for torchtune's {loss.rpartition('.')[2]}, and what it keeps"
    assert (text in _notes(_read(tmp_path, loss))) is noted


def test_the_only_recipe_above_a_file_is_named(tmp_path: Path) -> None:
    pairs = "lab.modules.loss.DPOLoss"
    assert "is the project's own: read as" not in _notes(_read(tmp_path))
    written(tmp_path / "recipes", RECIPE.format(scores="return model(batch)"), "sft_run.py")
    written(tmp_path / "recipes", RECIPE.format(scores=ON_THE_HOST), "dpo_run.py")
    written(tmp_path / "recipes", "print('torchtune')\n", "convert.py")
    assert "recipe sft_run.py is the project's own: read as a recipe of torchtune reads the file" in _notes(_read(tmp_path))
    on_the_host = _notes(_read(tmp_path, pairs))
    assert "recipe dpo_run.py is the project's own" in on_the_host
    assert "it takes the scores to the host, and the plan has them on the GPU: memory comes out too high by up to 6" in on_the_host
    written(tmp_path / "recipes", RECIPE.format(scores="return model(batch)"), "sft_other.py")
    assert "is the project's own: read as" not in _notes(_read(tmp_path))  # which of them nobody says
    commented = "# tune run --nproc_per_node 8 full_finetune_distributed --config a.yaml\n"
    assert "dpo_run.py" not in _notes(_read(tmp_path, pairs, more=commented))


def test_degrees_of_a_fork(tmp_path: Path) -> None:
    more = "ulysses_sequence_parallel_size: 4\nmoe_expert_parallel_size: 8\n"
    found = _read(tmp_path, more=more, model="qwen3-30b-a3b")
    assert [found.fields[one] for one in ("dp", "cp", "cp_method", "ep", "zero")] == [4, 4, int(CpMethod.A2A), 8, 3]
    assert (found.global_batch_size, asked_for(found)) == (8, [])
    for name, what in (("ulysses_sequence", "context parallelism over heads"), ("moe_expert", "expert parallelism")):
        assert f"{name}_parallel_size is a setting of a fork of torchtune: read as {what}" in _notes(found)
    plan = to_plan(found, {"num_gpus": 16, "model": "qwen3-30b-a3b"})
    assert (plan.layout.cp, plan.layout.ep) == (4, 8)
    alone = _read(tmp_path, more="ulysses_sequence_parallel_size: 1\nmoe_expert_parallel_size: 1\n")
    assert "degrees" not in alone.trainer and "cp_method" not in alone.fields and "ep" not in alone.fields
    both = _read(tmp_path, more=f"context_parallel_dim: 2\n{more}", model="qwen3-30b-a3b")
    assert asked_for(both) == ["ulysses_sequence_parallel_size"]
    assert asked_for(_read(tmp_path, more=more)) == ["moe_expert_parallel_size"]  # of a model without experts
    assert load_trainer("torchtune").legal.expert_parallel == "none"


def test_what_a_builder_of_experts_says_of_their_products_is_not_asked(tmp_path: Path) -> None:
    assert asked_for(_read(tmp_path, more="  router_aux_loss_coef: 0.001\n  use_grouped_gemm: true\n")) == []
