"""The fine-tuning user: defaults, trainers, what is said when nothing fits, and direct preference optimization."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from planner.commands.main import main as cli
from planner.defaults import Request, ResolvedJob, resolve, tuned_batch_size
from planner.trainer import load_trainer


def asked(**changes: object) -> ResolvedJob:
    return resolve(
        Request(**{"model": "llama-8b", "num_gpus": 1, "hardware": "rtx-4090", "trainer": "fsdp", **changes})
    )  # type: ignore[arg-type]


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


# ------------------------------------------------------------------------------------------------ advice


@functools.cache
def advised(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["--model", "llama-8b", "--gpus", "1", "--hardware", "rtx-4090", *words, "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_advice_of_fine_tuning_begins_with_what_needs_no_other_gpus() -> None:
    document = advised("--trainer", "torchtune")
    changes = [one["change"] for one in document["advice"]]
    assert changes[0].startswith("QLoRA of rank 16") and any("GPUs of this kind" in one for one in changes[1:])
    same = [one for one in document["advice"] if "rtx-4090" in one["command"] and "--gpus 1 " in one["command"]]
    assert [one["usd_per_million_tokens"] for one in same] == sorted(one["usd_per_million_tokens"] for one in same)


def test_advice_is_what_its_command_line_finds() -> None:
    """Adapters make it a job of fine-tuning, with the length and the batch of one."""
    [one] = [one for one in advised("--trainer", "fsdp")["advice"] if "QLoRA" in one["change"]]
    words = one["command"].split()[1:]
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    assert found["plans"][0]["estimate"]["step_time_s"] == pytest.approx(one["step_time_s"])
    assert found["workload"]["sequence_length"] == 2048


def test_changes_are_joined_where_none_alone_is_enough() -> None:
    changes = [
        one["change"]
        for one in advised("--trainer", "fsdp", "--sequence-length", "65536", "--global-batch-size", "1")["advice"]
    ]
    assert any(one.count(",") >= 1 and "QLoRA" in one and "sequences of" in one for one in changes)


def test_by_how_much_it_misses_is_said_once() -> None:
    one = advised("--trainer", "fsdp")["plans"][0]
    said = re.fullmatch(
        r"misses by ([\d.]+) GiB; a plan is safe up to ([\d.]+) of the card's ([\d.]+) GiB, .* weights|.*states",
        one["why"],
    )
    assert said is not None
    misses, safe, usable = map(float, re.findall(r"([\d.]+) (?:GiB|of the card)", one["why"]))
    assert misses == pytest.approx(one["estimate"]["memory_peak_gib"] - safe, abs=0.15) and safe < usable
