"""Flags of a layout that somebody pins one at a time: the search finds what goes with them."""

from typing import Any

import pytest

import planner
from planner.errors import PlannerError
from planner.layout import Recompute

JOB: dict[str, Any] = {"model": "llama-70b", "gpus": 64, "hardware": "h100-sxm"}


@pytest.mark.parametrize(
    ("pinned", "follows"),
    [
        ({"recompute_layers": 4}, {"recompute": int(Recompute.FULL), "recompute_layers": 4}),
        ({"recompute_modules": ("mlp",)}, {"recompute": int(Recompute.SELECTIVE)}),
        ({"offload_layers": 10}, {"offload_activations": 1, "offload_layers": 10}),
        ({"first_stage_layers": 9, "pp": 8}, {"first_stage_layers": 9, "last_stage_layers": 5}),
        ({"last_stage_layers": 5, "pp": 8}, {"first_stage_layers": 9, "last_stage_layers": 5}),
    ],
)  # fmt: skip
def test_one_flag_is_enough(pinned: dict[str, Any], follows: dict[str, int]) -> None:
    layout = planner.plan(**JOB, **pinned)[0].layout
    assert {name: int(getattr(layout, name)) for name in follows} == follows


def test_an_explicit_layout_too() -> None:
    found = planner.estimate(**JOB, tp=4, pp=4, recompute_layers=4).layout
    assert (int(found.recompute), int(found.recompute_layers)) == (Recompute.FULL, 4)


def test_what_was_said_stays_said() -> None:
    with pytest.raises(PlannerError, match="recompute none with modules mlp"):
        planner.plan(**JOB, recompute="none", recompute_modules=("mlp",))
    with pytest.raises(PlannerError, match="80 layers do not split over 8 pipeline stages with first_stage_layers 9 and last"):
        planner.plan(**JOB, pp=8, first_stage_layers=9, last_stage_layers=0)


def test_a_trainer_without_a_number_of_layers_says_so() -> None:
    with pytest.raises(PlannerError, match="full is of all layers, so recompute_layers is 0"):
        planner.plan(**JOB, trainer="torchtitan", recompute_layers=4)


def test_a_batch_that_is_no_power_of_two_has_micro_batches_that_divide_it() -> None:
    """24 sequences on 8 GPUs are three each: all three at once, found without being pinned."""
    job = {"model": "llama-8b", "gpus": 8, "hardware": "h100-sxm", "trainer": "trl", "global_batch_size": 24}
    found, pinned = planner.plan(**job)[0], planner.plan(**job, micro_batch_size=3)[0]
    assert int(found.layout.micro_batch_size) == 3 and found.layout == pinned.layout
