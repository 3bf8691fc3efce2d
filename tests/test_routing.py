"""Load of the busiest expert rank: by hand, its limits, and what a plan assumes."""

import numpy as np
import pytest

from planner.cost.layer.routing import busiest
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.model import load_model
from planner.workload import Workload


def job(model: str = "deepseek-v3", imbalance: float = 0.0) -> Workload:
    return Workload(model=load_model(model), sequence_length=4096, global_batch_size=64, expert_imbalance=imbalance)


def test_busiest_rank_by_hand() -> None:
    """DeepSeek-V3, 64 ranks of 4 experts: sigma^2 = 252 x 248 / (4 x 8 x 255 x 138) = 0.2356^2; 2.344 of it."""
    sigma = (252 * 248 / (4 * 8 * 255 * 138)) ** 0.5
    assert float(busiest(job(), np.asarray(64))) == pytest.approx(1 + 2.344 * sigma)
    # Mixtral on 2 ranks of 4: (8 - 4) (8 - 2) / (4 x 2 x 7 x 138).
    assert float(busiest(job("mixtral-8x7b"), np.asarray(2))) == pytest.approx(
        1 + 0.564 * (4 * 6 / (4 * 2 * 7 * 138)) ** 0.5
    )


def test_the_constant_gives_back_what_it_was_read_off() -> None:
    """64 experts, 6 per token, one per rank: 0.62 above the mean."""
    model = load_model("deepseek-v3")
    work = job().replace(model=type(model)(**{**vars(model), "num_experts": 64, "top_k": 6}))
    assert float(busiest(work, np.asarray(64))) == pytest.approx(1.62, abs=0.01)


def test_limits_columns_and_order() -> None:
    """One rank holds all experts; more ranks are never more even; columns are priced as singles; a given number holds."""
    ranks = np.array([1, 2, 8, 64, 256])
    found = busiest(job(), ranks)
    assert found[0] == 1.0
    assert np.all(np.diff(found) > 0)
    assert np.array_equal(found, [float(busiest(job(), np.asarray(one))) for one in ranks])
    assert list(busiest(job(imbalance=1.5), ranks)) == [1.0, 1.5, 1.5, 1.5, 1.5]
    assert list(busiest(job(imbalance=1.0), ranks)) == [1.0] * 5


def test_a_plan_assumes_natural_routing_and_says_so() -> None:
    found = resolve(Request(model="qwen3-30b-a3b", num_gpus=8, hardware="h100-sxm"))
    assert found.job.workload.expert_imbalance == 0.0
    said = next(one for one in found.assumptions if one.what == "expert imbalance")
    assert (said.value, said.flag) == ("1.11 on 8 expert ranks, 1.86 on 128", "--expert-imbalance")
    asked = resolve(Request(model="qwen3-30b-a3b", num_gpus=8, hardware="h100-sxm", expert_imbalance=1.0))
    assert asked.job.workload.expert_imbalance == 1.0
    assert not any(one.what == "expert imbalance" for one in asked.assumptions)


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(
        PlannerError, match="expert_imbalance is 0.5; it must be a number from 1 to 1024, or 0 for that of a"
    ):
        job(imbalance=0.5)
