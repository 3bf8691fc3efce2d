"""The fine-tuning user: defaults, trainers, what is said when nothing fits, and direct preference optimization."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.defaults import Request, ResolvedJob, resolve, tuned_batch_size
from planner.trainer import load_trainer


def asked(**changes: object) -> ResolvedJob:
    return resolve(Request(**{"model": "llama-8b", "num_gpus": 1, "hardware": "rtx-4090", "trainer": "fsdp", **changes}))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ defaults


@pytest.mark.parametrize(
    ("changes", "length", "batch", "rank"),
    [
        ({}, 8192, 512, 0),
        ({"lora_rank": 8}, 2048, 16, 8),
        ({"lora_rank": 8, "num_gpus": 64}, 2048, 128, 8),  # 2 per GPU
        ({"lora_rank": 8, "sequence_length": 512, "global_batch_size": 3}, 512, 3, 8),
        ({"trainer": "torchtune"}, 2048, 16, 0),
        ({"trainer": "trl"}, 1024, 8, 0),
        ({"trainer": "unsloth"}, 2048, 8, 16),
        ({"trainer": "unsloth", "lora_rank": 0}, 2048, 8, 0),
        ({"trainer": "llama-factory"}, 2048, 8, 8),
        ({"trainer": "megatron", "lora_rank": 16}, 2048, 16, 16),
    ],
)
def test_a_fine_tuning_job_has_its_own_defaults(changes: dict[str, object], length: int, batch: int, rank: int) -> None:
    work = asked(**changes).job.workload
    assert (work.sequence_length, work.global_batch_size, work.lora_rank) == (length, batch, rank)


def test_what_is_assumed_says_how_to_change_it() -> None:
    said = {one.what: one for one in asked(trainer="unsloth").assumptions}
    assert said["adapters"].value == "rank 16" and said["adapters"].flag == "--lora-rank"
    assert "fine-tuning" in said["sequence length"].why and "2 per GPU" in said["global batch"].why
    assert said["optimizer"].value == "adam_8bit"


@given(st.integers(1, 64), st.integers(1, 4096))
def test_a_batch_for_fine_tuning_divides_by_the_gpus(few: int, gpus: int) -> None:
    batch = tuned_batch_size(few, gpus)
    assert batch % gpus == 0 and batch >= few
    assert batch < 2 * max(few, 2 * gpus, gpus & -gpus) * (gpus // (gpus & -gpus))


@pytest.mark.parametrize("name", ["torchtune", "trl", "unsloth", "axolotl", "llama-factory", "ms-swift", "litgpt"])
def test_a_trainer_for_fine_tuning_says_its_habits(name: str) -> None:
    assert load_trainer(name).legal.fine_tuning.sequence_length > 0
    assert load_trainer(name).code_base == "fsdp"
