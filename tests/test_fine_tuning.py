"""The fine-tuning user: defaults, trainers, what is said when nothing fits, and direct preference optimization."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from samples import MODELS, job

from planner import library
from planner.advice import off_the_host, together
from planner.commands.main import main as cli
from planner.cost.estimate import Estimate, estimate
from planner.cost.parameters import total_parameters
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.cost.state_dtypes import stored_as
from planner.defaults import Request, ResolvedJob, resolve, tuned_batch_size
from planner.errors import PlannerError
from planner.layout import Layout
from planner.rules import Job, check_workload
from planner.runs import rows_from_dict, to_run
from planner.search import Pins
from planner.trainer import known_as, load_trainer


def asked(**changes: Any) -> ResolvedJob:
    return resolve(
        Request(**{"model": "llama-8b", "num_gpus": 1, "hardware": "rtx-4090", "trainer": "fsdp", **changes})
    )


# ------------------------------------------------------------------------------------------------ defaults


@pytest.mark.parametrize(
    ("changes", "length", "batch", "rank"),
    [
        ({}, 8192, 512, 0),
        ({"lora_rank": 8}, 1024, 16, 8),
        ({"lora_rank": 8, "num_gpus": 64}, 1024, 128, 8),  # 2 per GPU
        ({"lora_rank": 8, "sequence_length": 512, "global_batch_size": 3}, 512, 3, 8),
        ({"trainer": "torchtune"}, 2048, 16, 0),
        ({"trainer": "trl"}, 1024, 8, 0),
        ({"trainer": "unsloth"}, 2048, 8, 16),
        ({"trainer": "unsloth", "lora_rank": 0}, 2048, 8, 0),
        ({"trainer": "llama-factory"}, 2048, 8, 8),
        ({"trainer": "megatron", "lora_rank": 16}, 1024, 16, 16),
    ],
)
def test_a_fine_tuning_job_has_its_own_defaults(changes: dict[str, object], length: int, batch: int, rank: int) -> None:
    work = asked(**changes).job.workload
    assert (work.sequence_length, work.global_batch_size, work.lora_rank) == (length, batch, rank)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("LLaMA_Factory", "llama-factory"),
        ("transformers", "fsdp"),
        ("TRL+loss=full", "trl+loss=full"),
        ("swift", "ms-swift"),
    ],
)
def test_a_trainer_has_other_names(written: str, name: str) -> None:
    assert known_as(written) == name and asked(trainer=written).trainer == name


def test_other_names_are_of_trainers_that_exist() -> None:
    aliases = library.read_yaml(library.profiles_directory() / "trainer_aliases.yaml")
    assert set(aliases.values()) <= set(library.names("trainers")) and not set(aliases) & set(library.names("trainers"))
    assert known_as("nothing-like-it") == "nothing-like-it"


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


FULL = ("--trainer", "unsloth", "--lora-rank", "0")
"""All weights of 8B on one GPU of 24 GB, with a trainer that keeps none of them on the host."""


@functools.cache
def advised(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["--model", "llama-8b", "--gpus", "1", "--hardware", "rtx-4090", *words, "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_advice_of_fine_tuning_begins_with_what_needs_no_other_gpus() -> None:
    document = advised(*FULL)
    changes = [one["change"] for one in document["advice"]]
    assert "LoRA of rank 16" in changes[0] and any(one.startswith("1 x ") for one in changes[1:])
    same = [one for one in document["advice"] if "rtx-4090" in one["command"] and "--gpus 1 " in one["command"]]
    assert [one["usd_per_million_tokens"] for one in same] == sorted(one["usd_per_million_tokens"] for one in same)


def test_advice_is_what_its_command_line_finds() -> None:
    """What the user said stays, that no adapters are trained too; with adapters the trainer's habits are those of adapters."""
    advice = {one["change"]: one for one in advised(*FULL)["advice"]}
    for change, rank in (("QLoRA of rank 16: frozen weights in nf4", 16), ("1 x mi325x", 0)):
        words = advice[change]["command"].split()[1:]
        found = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
        assert found["plans"][0]["estimate"]["step_time_s"] == pytest.approx(advice[change]["step_time_s"])
        assert found["workload"]["lora_rank"] == rank


def test_changes_are_joined_where_none_alone_is_enough() -> None:
    """One more each time, then shorter sequences on top of all."""
    job = asked(trainer="unsloth", lora_rank=0, sequence_length=4096, global_batch_size=1).job
    changes = list(together(job))
    assert [sorted(flags) for _, flags in changes[:1]] == [["frozen_weights", "lora_rank", "optimizer"]]
    assert [flags.get("sequence_length") for _, flags in changes[1:]] == [2048, 1024, 512]
    assert all("QLoRA" in text and "Adam with 8-bit" in text for text, _ in changes)


def test_by_how_much_it_misses_is_said_once() -> None:
    one = advised(*FULL)["plans"][0]
    said = re.match(r"misses by ([\d.]+) GiB; a plan is safe up to ([\d.]+) of the card's ([\d.]+) GiB", one["why"])
    assert said is not None
    misses, safe, usable = map(float, said.groups())
    assert misses == pytest.approx(one["estimate"]["memory_peak_gib"] - safe, abs=0.15) and safe < usable


def test_logits_reuse_the_blocks_of_gradients_on_one_gpu() -> None:
    """The loss of 65536 tokens is the peak. Nothing is reduced, so no other stream frees gradients: none are reserved then."""
    one = job("gqa", "fsdp", gpus=1, sequence=65536, batch=1, precision="bf16_true")
    found = estimate(one.workload, one.cluster, one.trainer, Layout.stack([Layout(recompute=2)]))
    logits = 65536 * MODELS["gqa"].vocab_size * one.trainer.stored.logit_bytes
    assert found.memory_allocated[0] > logits > found.memory["gradients"][0] == 0
    assert found.memory["fragmentation"][0] == pytest.approx(one.trainer.stored.fragmentation * found.memory_allocated[0])


# ------------------------------------------------------------------------------------------------ objective dpo

LAYOUT = {"dp": 8, "zero": 3, "micro_batch_size": 1, "num_microbatches": 4}


def priced(trainer: str = "trl", *, layout: dict[str, Any] = LAYOUT, **workload: Any) -> Estimate:
    one = job("gqa", trainer, batch=layout["dp"] * layout["micro_batch_size"] * layout["num_microbatches"], **workload)
    check_workload(one.workload, one.cluster, one.trainer)
    return estimate(one.workload, one.cluster, one.trainer, Layout.stack([Layout(**layout)]))


def both(trainer: str = "trl", **more: Any) -> tuple[Estimate, Estimate]:
    """DPO with pairs, and as many sequences two by two."""
    layout = more.pop("layout", LAYOUT)
    return priced(trainer, layout=layout, objective="dpo", **more), priced(
        trainer, layout={**layout, "micro_batch_size": 2 * layout["micro_batch_size"]}, **more
    )


def test_a_pair_is_two_sequences_and_a_forward_pass_more() -> None:
    """Forward F, input gradients I, weight gradients W of two sequences: 2 F + I + W in place of F + I + W."""
    pairs, plain = both()
    assert pairs.tokens[0] == plain.tokens[0]
    assert pairs.flop[0] == pytest.approx(plain.flop[0] * 4.0 / 3.0)
    one, two = job("gqa", "trl", objective="dpo"), job("gqa", "trl")
    layout = Layout(dp=8, zero=3, num_microbatches=4)
    found = price_blocks(one.workload, one.cluster, one.trainer, layout)
    loss = stored_as(one.workload, two.trainer)  # DPO reads all logits
    usual = price_blocks(two.workload, two.cluster, loss, layout.replace(micro_batch_size=2))
    for part in ("dense", "head", "embedding"):
        pair, sequences = getattr(found, part), getattr(usual, part)
        for name in ("forward", "launches_forward", "dgrad", "wgrad", "recompute", "flop"):
            passes = 2.0 if "forward" in name else 1.0
            np.testing.assert_allclose(pair[INDEX[name]], passes * sequences[INDEX[name]])
    adapters, base = both(lora_rank=8)
    assert adapters.flop[0] == pytest.approx(base.flop[0] * 3.0 / 2.0)


@pytest.mark.parametrize(("zero", "ranks"), [(0, 1), (2, 1), (3, 8)])
def test_reference_model_is_half_precision_and_sharded_with_zero_3_alone(zero: int, ranks: int) -> None:
    pairs, plain = both(layout={**LAYOUT, "zero": zero})
    more = 2.0 * total_parameters(MODELS["gqa"]) / ranks
    assert pairs.memory["weights"][0] - plain.memory["weights"][0] == pytest.approx(more)
    adapters, base = both(lora_rank=8, layout={**LAYOUT, "zero": zero})
    assert adapters.memory["weights"][0] == base.memory["weights"][0], "the base itself is the reference"


def test_reference_model_saves_no_activations() -> None:
    """Only the logits differ: 8 bytes each in DPO."""
    pairs, plain = both("fsdp")
    logits = 2 * 4096 * MODELS["gqa"].vocab_size
    stored = load_trainer("fsdp").stored.logit_bytes
    alive = [one.memory["activations"][0] + one.memory["workspace"][0] for one in (plain, pairs)]
    difference = alive[0] - alive[1]
    assert 0 <= difference <= (stored - 8.0 + 2.0) * logits * 1.001


def test_weights_of_the_reference_are_gathered_for_each_forward_pass() -> None:
    """More traffic with zero 3, none without; parts sum to the step."""
    for zero, more in ((3, True), (0, False)):
        pairs, plain = both(layout={**LAYOUT, "zero": zero})
        traffic = [one.time["data_communication"][0] + one.hidden["data"][0] for one in (pairs, plain)]
        assert (traffic[0] > 1.2 * traffic[1]) == more and traffic[0] >= traffic[1] * 0.999
        assert pairs.step_time[0] == pytest.approx(sum(part[0] for part in pairs.time.values()))


def test_batch_of_dpo_equals_its_rows() -> None:
    one = job("gqa", "trl", objective="dpo")
    rows = [
        Layout(dp=8, zero=zero, micro_batch_size=b, num_microbatches=4 // b) for zero in (0, 2, 3) for b in (1, 2, 4)
    ]
    many = estimate(one.workload, one.cluster, one.trainer, Layout.stack(rows * 8))
    for number, layout in enumerate(rows):
        alone = estimate(one.workload, one.cluster, one.trainer, layout)
        assert many.step_time[number] == pytest.approx(alone.step_time[0])
        assert many.memory_peak[number] == pytest.approx(alone.memory_peak[0])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"trainer": "megatron", "objective": "dpo"},
            "trainer megatron has no objective dpo; use --objective lm",
        ),
        ({"objective": "ppo"}, "unknown objective 'ppo'"),
        (
            {"trainer": "torchtune", "lora_rank": 8, "frozen_weights": "int8"},
            "no frozen weights in int8; it knows bf16, nf4_dq",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(sentence)):
        asked(**change)


# ------------------------------------------------------------------------------------------------ loss left open


def test_lora_of_8b_fits_a_card_of_24_gb() -> None:
    """The loss goes piece by piece, aloud, rather than weights to the host; what is stated stays."""
    found = advised("--trainer", "fsdp", "--lora-rank", "8", "--sequence-length", "2048")
    [loss] = [one for one in found["assumptions"] if one["what"] == "loss"]
    layout = found["plans"][0]["layout"]
    assert found["plans"][0]["fits"] and not layout.get("offload_parameters") and not layout.get("offload_activations")
    assert (loss["value"], loss["flag"]) == ("fused_linear", "--option loss=full")
    assert found["trainer"] == "fsdp+loss=fused_linear"
    stated = advised("--trainer", "fsdp", "--lora-rank", "8", "--sequence-length", "2048", "--option", "loss=full")
    assert stated["trainer"] == "fsdp+loss=full" and not [one for one in stated["assumptions"] if one["what"] == "loss"]
    assert advised("--trainer", "fsdp", "--lora-rank", "8")["trainer"] == "fsdp", "1024 tokens fit as they are"


def test_what_would_be_faster_than_a_plan_on_the_host() -> None:
    """Each is what its flags ask for, the fastest first; adapters are another job than all weights."""

    def ask(changes: Mapping[str, Any]) -> tuple[Job, Pins]:
        fields = {"options" if name == "options" else name: value for name, value in changes.items()}
        return asked(**{"trainer": "fsdp", "sequence_length": 1024, "lora_rank": 8, **fields}).job, Pins()

    job = ask({})[0]
    found = off_the_host(job, 1.0, ask)
    assert [one.gain for one in found] == sorted((one.gain for one in found), reverse=True) and len(found) == 3
    assert {"--lora-rank 8 --frozen-weights nf4", "--option loss=fused_linear"} <= {one.flag for one in found}
    assert not off_the_host(job, 1e9, ask)
    whole = dataclasses.replace(job, workload=job.workload.replace(lora_rank=0))
    assert all("--lora-rank" not in one.flag for one in off_the_host(whole, 1.0, ask))


def test_runs_say_that_they_are_of_preference_optimization() -> None:
    data = library.read_yaml(library.profiles_directory() / "runs" / "torchtune-readme-4090.yaml")
    data["rows"] = [{**data["rows"][1], "notes": "LoRA rank 8, DPO"}]
    [row] = rows_from_dict(data)
    work = to_run(row).workload
    assert work is not None and (work.objective, work.lora_rank, work.tokens) == ("dpo", 8, 2 * 2 * 2048)
