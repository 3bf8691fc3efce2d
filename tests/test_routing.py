"""Load of the busiest expert rank: by hand, its limits, and what a plan assumes."""

import numpy as np
import pytest

from planner.cost.estimate import estimate
from planner.cost.layer.operators import Shard
from planner.cost.layer.routing import busiest
from planner.cost.layer.transformer_layer import layer
from planner.cost.price.stage_times import _launch_time
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.layout import Layout
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
    assert (said.value, said.flag) == ("1.11 on 8 expert ranks", "--expert-imbalance")
    many = resolve(Request(model="qwen3-30b-a3b", num_gpus=64, hardware="h100-sxm")).assumptions
    assert "1.11 on 8 expert ranks, 1.54 on 64 expert ranks" in {one.value for one in many}
    for trainer, gpus in (("fsdp", 8), ("megatron", 1)):  # all experts on every rank
        alone = resolve(Request(model="qwen3-30b-a3b", num_gpus=gpus, hardware="h200-sxm", trainer=trainer)).assumptions
        assert not any(one.what == "expert imbalance" for one in alone)
    asked = resolve(Request(model="qwen3-30b-a3b", num_gpus=8, hardware="h100-sxm", expert_imbalance=1.0))
    assert asked.job.workload.expert_imbalance == 1.0
    assert not any(one.what == "expert imbalance" for one in asked.assumptions)


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(
        PlannerError, match="expert_imbalance is 0.5; it must be a number from 1 to 1024, or 0 for that of a"
    ):
        job(imbalance=0.5)


def test_experts_in_a_loop_wait_for_the_host() -> None:
    """E/e experts of two products: 2 and 4 launches as one kernel each, 2 E/e and 4 E/e in a loop, and 11 and 13 more for each."""
    job_ = resolve(Request(model="qwen3-30b-a3b", num_gpus=1, hardware="h200-sxm", trainer="fsdp")).job
    loop = job_.trainer.replace(unfused=sorted({*job_.trainer.kernels.unfused, "expert_loop"}))
    layout = Layout(recompute=0, **{name: np.ones(1, dtype=int) for name in ("tp", "ep", "micro_batch_size")})
    launches = [
        sum(np.asarray(one.launches, dtype=object) for one in layer(Shard(
            workload=job_.workload, trainer=trainer, layout=layout, ep_stride=1.0), moe=True)[0])
        for trainer in (job_.trainer, loop)
    ]  # fmt: skip
    forward, backward = (float(np.ravel(looped - grouped)[0]) for grouped, looped in zip(*launches, strict=True))
    assert (forward, backward) == (2 * 127 + 11 * 128, 4 * 127 + 13 * 128)
    found = [
        estimate(job_.workload, job_.cluster, trainer, Layout(num_microbatches=1)).time["host"][0]
        for trainer in (job_.trainer, loop)
    ]
    assert found[1] > 10 * found[0]


def test_overlapped_experts_take_the_host_longer() -> None:
    """Times ``expert_overlap_factor`` where several ranks exchange, alone and with graphs as before."""
    job_ = resolve(Request(model="qwen3-30b-a3b", num_gpus=8, hardware="b200-sxm", trainer="megatron")).job
    trainer = job_.trainer.replace(overlap=sorted({*job_.trainer.traffic.overlap, "ep"}))
    assert trainer.host.expert_overlap_factor == 1.5
    for ranks, factor in ((8, 1.5), (1, 1.0)):
        layout = Layout(dp=8, ep=ranks, num_microbatches=1)
        each = [float(np.ravel(_launch_time(one, layout))[0]) for one in (job_.trainer, trainer)]
        assert each[1] == pytest.approx(factor * each[0])
