"""Rounds of MLPerf: which NeMo they ran with, variables that only help, and weights in 8 bits by rows and by columns."""

from pathlib import Path

import pytest
from import_files import written

from planner.api import import_config
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

CONFIG = """
export DGXNNODES=16 DGXNGPU=8 MINIBS=32 TENSOR_MODEL_PARALLEL=4 PIPELINE_MODEL_PARALLEL=8 INTERLEAVED_PIPELINE=12
export FP8=True TP_COMM_OVERLAP=True MICRO_BATCH_SIZE=1
MODEL_PARALLEL=$((TENSOR_MODEL_PARALLEL * PIPELINE_MODEL_PARALLEL))
DATA_PARALLEL=$((DGXNNODES * DGXNGPU / MODEL_PARALLEL))
export GLOBAL_BATCH_SIZE=$((MINIBS * DATA_PARALLEL))
"""
FP8 = """
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --num-layers 32 \\
    --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 \\
    --global-batch-size 64 --vocab-size 32000 --bf16 --use-distributed-optimizer {more}
"""


def _mlperf(folder: Path, place: str, text: str = CONFIG) -> Reading:
    return read(written(folder, text, f"{place}/gpt3/pytorch/config_DGXH100_16x8x32x4x8.sh"), None, Given())


@pytest.mark.parametrize(
    ("place", "image", "trainer"),
    [
        ("training_results_v3.0", "", "nemo@23.09"), ("my_training_results_v3_1", "pytorch:24.04", "nemo@23.09"),
        ("training_results_v4.1", "", "nemo@24.04"), ("training_results_v5.0", "pytorch:24.04", "nemo"), ("copy", "", "nemo"),
        ("copy", "pytorch:23.04", "nemo@23.09"), ("copy", "nemo:24.07", "nemo@24.04"), ("copy", "pytorch:25.04", "nemo"),
    ],
)  # fmt: skip
def test_a_round_says_which_nemo_it_ran_with(tmp_path: Path, place: str, image: str, trainer: str) -> None:
    if image:
        written(tmp_path, f"ARG FROM_IMAGE_NAME=nvcr.io/nvidia/{image}-py3\n", f"{place}/gpt3/pytorch/Dockerfile")
    found = _mlperf(tmp_path, place)
    assert found.trainer.partition("+")[0] == trainer and load_trainer(found.trainer)
    own = [one for one in found.notes if "fp32 AdamW of their own" in one]
    assert len(own) == (trainer == "nemo@23.09")
    assert not own or "up to 1.8 GiB more there" in own[0]  # (14 - 12 / 4) bytes of 50257 x 12288 / 4 + 2048 x 12288


def test_variables_that_only_calculate_are_no_degrees(tmp_path: Path) -> None:
    found = _mlperf(tmp_path, "copy")
    assert (found.fields["tp"], found.fields["pp"], found.global_batch_size) == (4, 8, 128)
    assert not any("PARALLEL" in one for one in found.unread)
    for more in ("export MODEL_PARALLEL\n", "python train.py --parallel $MODEL_PARALLEL\n"):
        with pytest.raises(OpenQuestionsError, match="--set MODEL_PARALLEL=1"):
            _mlperf(tmp_path, "copy", CONFIG + more)


@pytest.mark.parametrize(
    ("more", "hardware", "says"),
    [
        ("--fp8-format hybrid", "h100-sxm", "by columns on Hopper, the plan by rows alone: weights take up to 3.0 GiB more"),
        ("--fp8-format hybrid", "b200-sxm", ""), ("--fp8-format hybrid --fp8-recipe mxfp8", "b200-sxm", "up to 3.0 GiB more"),
        ("--fp8-format hybrid --fp8-param-gather", "h100-sxm", ""), ("", "h100-sxm", ""),
    ],
)  # fmt: skip
def test_copies_of_weights_by_columns_are_named(tmp_path: Path, more: str, hardware: str, says: str) -> None:
    found = import_config(written(tmp_path, FP8.format(more=more), "train.sh"), hardware=hardware)
    noted = [one for one in found.notes if "by columns" in one]
    assert len(noted) == bool(says) and all(says in one for one in noted)


def test_a_frozen_base_in_8_bits_has_no_copies(tmp_path: Path) -> None:
    text = CONFIG.replace("PIPELINE_MODEL_PARALLEL=8", "PIPELINE_MODEL_PARALLEL=1").replace("DGXNNODES=16", "DGXNNODES=1")
    for frozen, says in (("True", 0), ("False", 1)):
        file = written(tmp_path, f"{text}export FP8_PARAMS={frozen} SP=True\n", "llama2_70b_lora/config_DGXH100_1x8x32x4x1.sh")
        assert sum("by columns on Hopper" in one for one in import_config(file).notes) == says
