"""Recipes of Megatron-Bridge by release, and the card that the name of an MLPerf configuration means."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.megatron_bridge import recipe_releases
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

PROGRAM = """{about}
from megatron.bridge.recipes.qwen.qwen3 import qwen3_8b_pretrain_config
from megatron.bridge.training.pretrain import pretrain

def main():
    cfg = qwen3_8b_pretrain_config({words})
    cfg.model.tensor_model_parallel_size = 1
    cfg.train.micro_batch_size = 2
    cfg.train.global_batch_size = 128
    {more}
    pretrain(config=cfg)

main()
"""
MLPERF = "export DGXNNODES={nodes} DGXNGPU={each} MINIBS=16 TENSOR_MODEL_PARALLEL=2 MICRO_BATCH_SIZE=1 FP8=True\n"


def _program(folder: Path, about: str = "", words: str = "", more: str = "", **settings: str) -> Reading:
    file = written(folder, PROGRAM.format(about=about, words=words, more=more), "jobs/train.py")
    return read(file, None, Given(num_gpus=16, settings=settings))


def _gradients(reading: Reading) -> str:
    return "fp32" if "gradient_dtype=fp32" in reading.trainer else "bf16" if "gradient_dtype=bf16" in reading.trainer else "?"


@pytest.mark.parametrize(
    ("about", "words", "release", "dtype"),
    [
        ('"""Pre-training (NeMo 26.04)"""', "", "0.4", "fp32"), ("# image: nvcr.io/nvidia/nemo:25.11.01", "", "0.2", "fp32"),
        ("# pip install megatron-bridge==0.5.1", "", "0.5", "fp32"), ("", "mock=True, seq_length=4096", "0.3.0", "fp32"),
        ('"""NeMo 26.06"""', "mock=True", "0.3.0", "fp32"), ("# nvcr.io/nvidia/nemo:26.08", "", "0.6", "bf16"),
    ],
)  # fmt: skip
def test_a_program_is_read_with_the_recipe_of_its_release(
    tmp_path: Path, about: str, words: str, release: str, dtype: str
) -> None:
    found = _program(tmp_path, about, words)
    assert _gradients(found) == dtype and not found.questions
    assert any(f"recipes as Megatron-Bridge {release} has them" in one for one in found.notes)
    assert found.fields["tp"] == 1 and found.fields["micro_batch_size"] == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Dockerfile", "FROM nvcr.io/nvidia/nemo:26.04\n"), ("jobs/run.sbatch", "srun --container-image=/x/nemo-efa-26.04.sqsh\n"),
        ("requirements.txt", "megatron-bridge==0.4.2\n"),
        ("src/megatron/bridge/package_info.py", "MAJOR = 0\nMINOR = 4\nPATCH = 1\n"),
    ],
)  # fmt: skip
def test_files_beside_a_program_show_the_release(tmp_path: Path, name: str, text: str) -> None:
    written(tmp_path, text, name)
    found = _program(tmp_path)
    assert _gradients(found) == "fp32" and not found.questions
    assert any("grad_reduce_in_fp32=True instead of False of today's recipe" in one for one in found.notes)


def test_the_release_is_asked_for_where_the_plan_depends_on_it(tmp_path: Path) -> None:
    (asked,) = _program(tmp_path).questions
    assert asked.name == "recipe_version" and asked.choices == ("0.5", "main")
    assert "up to 0.5" in asked.about and "grad_reduce_in_fp32=True instead of False" in asked.about
    assert _gradients(_program(tmp_path, recipe_version="26.04")) == "fp32"
    assert _gradients(_program(tmp_path, recipe_version="v0.5.1")) == "fp32"
    assert _gradients(_program(tmp_path, recipe_version="main")) == "bf16"
    with pytest.raises(PlannerError, match=r"one of 0\.2, 0\.3\.0"):
        _program(tmp_path, recipe_version="old")


def test_nothing_is_asked_where_the_program_says_what_differs(tmp_path: Path) -> None:
    more = "cfg.mixed_precision = 'bf16_mixed'; cfg.mixed_precision.grad_reduce_in_fp32 = True"
    more += "; cfg.optimizer.use_precision_aware_optimizer = False"
    found = _program(tmp_path, more=more.replace("; ", "\n    "))
    assert not found.questions and _gradients(found) == "fp32"
    text = PROGRAM.format(about="", words="", more="").replace("qwen3_8b", "llama3_8b")
    assert not read(written(tmp_path, text, "same.py"), None, Given(num_gpus=16)).questions


def test_a_recipe_that_a_command_or_a_yaml_names(tmp_path: Path) -> None:
    command = "{image}torchrun --nproc_per_node=8 run_recipe.py --recipe qwen3_8b_sft_config train.global_batch_size=64\n"
    (asked,) = read(written(tmp_path, command.format(image=""), "open/run.sh"), None, Given(num_gpus=8)).questions
    assert asked.name == "recipe_version"
    image = "# nvcr.io/nvidia/nemo:26.02\n"
    found = read(written(tmp_path, command.format(image=image), "old/run.sh"), None, Given(num_gpus=8))
    assert not found.questions and found.fields["zero"] == 1 and found.fields["tp"] == 4
    over = "recipe:\n  _target_: megatron.bridge.recipes.qwen.qwen3_30b_a3b_pretrain_config\n"
    settings = {"recipe_version": "0.4"}
    old = read(written(tmp_path, over, "over.yaml"), None, Given(num_gpus=8, settings=settings))
    assert (old.fields["tp"], old.fields["pp"], old.fields["ep"]) == (4, 2, 4)
    assert old.global_batch_size == 32 and _gradients(old) == "fp32"


def test_every_older_recipe_is_a_published_one_and_another_one() -> None:
    today = recipe_releases.known_in("main")
    for name, releases in recipe_releases._older().items():
        assert name in today and set(releases) <= set(recipe_releases.RELEASES)
        assert all(recipe_releases.deciding(recipe_releases.known_in(one)[name]) != {} for one in releases)


@pytest.mark.parametrize(
    ("name", "nodes", "each", "hardware", "note"),
    [
        ("config_DGXH100_4x8.sh", 4, 8, "h100-sxm", "hardware h100-sxm: by the file's name"),
        ("config_NVLink_H100_4x8.sh", 4, 8, "h100-sxm", "by the file's name"),
        ("config_PCIeH100.sh", 1, 2, "h100-pcie", "--hardware h100-nvl where PCIeH100 means that one"),
        ("config_NVL_H100.sh", 1, 2, "h100-nvl", "by the file's name"), ("config_H100-NVL.sh", 1, 2, "h100-nvl", "by the file's"),
        ("config_H200_PCIe_1x8.sh", 1, 8, "h200-sxm", "the library has no h200-pcie: h200-sxm stands for it"),
    ],
)  # fmt: skip
def test_the_card_of_an_mlperf_configuration(
    tmp_path: Path, name: str, nodes: int, each: int, hardware: str, note: str
) -> None:
    found = read(written(tmp_path, MLPERF.format(nodes=nodes, each=each), f"llama31_8b/{name}"), None, Given())
    assert found.hardware == hardware and not found.questions
    assert any(note in one for one in found.notes)


@pytest.mark.parametrize("name", ["config_NVLink_H100_BF16.sh", "config_H100_2x.sh"])
def test_two_gpus_of_a_node_may_be_any_form_of_the_card(tmp_path: Path, name: str) -> None:
    found = read(written(tmp_path, MLPERF.format(nodes=1, each=2), f"llama31_8b/{name}"), None, Given())
    with pytest.raises(OpenQuestionsError, match=r"--hardware NAME \(which H100 it is: .* a node has 2: h100-nvl, h100-pcie"):
        to_plan(found)
    assert to_plan(found, {"hardware": "h100-nvl"}).layout.tp == 2


NEMO = """{about}
import nemo_run as run
from nemo.collections import llm

recipe = llm.{name}.pretrain_recipe(name="a", num_nodes=16, num_gpus_per_node=8{words})
run.run(recipe)
"""


def _nemo(folder: Path, name: str, about: str = "", words: str = "") -> Reading:
    return read(written(folder, NEMO.format(about=about, name=name, words=words), "train.py"), None, Given())


def test_recipes_of_nemo_2_by_release(tmp_path: Path) -> None:
    (asked,) = _nemo(tmp_path, "mixtral_8x22b").questions
    assert asked.name == "recipe_version" and "up to 2.2, model.seq_length=65536 instead of 4096" in asked.about
    old = _nemo(tmp_path, "mixtral_8x22b", "# nvcr.io/nvidia/nemo:25.02")
    assert old.sequence_length == 65536 and not old.questions
    assert [one for one in old.notes if "NeMo" in one] == ["recipes as NeMo 2.2 has them, by train.py"]
    assert _nemo(tmp_path, "mixtral_8x22b", "# nvcr.io/nvidia/nemo:25.04").sequence_length == 4096
    assert _nemo(tmp_path, "mixtral_8x22b", words=", performance_mode=True", about="# nemo_toolkit==2.1.0").sequence_length == 4096
    assert _nemo(tmp_path, "llama31_405b", "# nemo_toolkit[nlp]==2.1.0").fields["pp"] == 9
    assert any("as NeMo 2.5 publishes it" in one for one in _nemo(tmp_path, "llama3_8b").notes)
    assert not _nemo(tmp_path, "llama3_8b").questions
    tuned = NEMO.format(about="", name="llama3_8b", words="").replace("pretrain", "finetune")
    found = read(written(tmp_path, tuned, "tune.py"), None, Given())
    assert not found.questions and found.lora_targets == "all"
    assert any("nothing here shows: up to 2.0, peft.target_modules=['linear_qkv'] instead" in one for one in found.notes)


def test_a_command_of_nemo_2_by_release(tmp_path: Path) -> None:
    text = "# {image}\nnemo llm pretrain --factory 'gemma_7b(num_nodes=1)' trainer.devices=8\n"
    old = read(written(tmp_path, text.format(image="nvcr.io/nvidia/nemo:24.09"), "a/run.sh"), None, Given())
    assert old.fields["tp"] == 1 and not old.questions
    (asked,) = read(written(tmp_path, text.format(image=""), "b/run.sh"), None, Given()).questions
    assert asked.choices == ("2.0", "main")
    said = text.format(image="").replace("trainer.devices=8", "trainer.devices=8 trainer.strategy.tensor_model_parallel_size=4")
    assert not read(written(tmp_path, said, "c/run.sh"), None, Given()).questions
