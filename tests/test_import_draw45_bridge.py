"""Programs and settings of Megatron-Bridge within a fork of it."""

from pathlib import Path

from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

PROGRAM = """import sys
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.start import pretrain
from megatron.bridge.training.lay import apply_overrides
from omegaconf import OmegaConf
FILE = "own_settings.yaml"
def main():
    cfg = llama3_8b_pretrain_config()
    cfg.train.micro_batch_size = 2
    pretrain(cfg)
if __name__ == "__main__":
    main()
"""
LIBRARY = """def pretrain(cfg):
    if cfg.something:
        cfg.mixed_precision = chosen(cfg)
        cfg.ddp.use_distributed_optimizer = chosen(cfg)
"""


def test_the_library_in_a_fork_is_not_taken_for_a_part_of_the_program(tmp_path: Path) -> None:
    written(tmp_path, LIBRARY, "src/megatron/bridge/training/start.py")
    found = read(written(tmp_path, PROGRAM, "examples/start_here.py"), None, Given(num_gpus=64, global_batch_size=512))
    assert (asked_for(found), found.precision, found.fields["micro_batch_size"]) == ([], "bf16", 2)


def test_settings_without_a_recipe_are_asked_about_with_that_of_the_program_that_names_them(tmp_path: Path) -> None:
    written(tmp_path, PROGRAM, "examples/start_here.py")
    path = written(tmp_path, "model: {seq_length: 4096}\ntrain: {global_batch_size: 512}\n", "examples/conf/own_settings.yaml")
    said = Given(num_gpus=64)
    found = read(path, "megatron-bridge", said)
    assert next(one.choices for one in found.questions if one.name == "recipe") == ("llama3_8b_pretrain_config",)


def test_settings_named_after_a_recipe_are_asked_about_with_it(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {global_batch_size: 512}\n", "llama3_8b_pretrain_example.yaml")
    found = read(path, "megatron-bridge", Given(num_gpus=64))
    assert next(one.choices for one in found.questions if one.name == "recipe") == ("llama3_8b_pretrain_config",)
