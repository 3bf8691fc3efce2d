"""The operators of a step and what keeps them from the peak: nothing is lost, and each loss has its own cause."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.cost.price.stage_times import block_counts
from planner.cost.state_dtypes import stored_as
from planner.explicit import explicit_plan
from planner.layout import Layout
from planner.plan_file import Plan
from planner.timeline.operator_times import LOSSES, computation_of
from planner.timeline.priced_plan import Priced, job_of, price

JOBS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "dense": ({"model": "llama-8b", "num_gpus": 8, "trainer": "megatron"}, {"tp": 2}),
    "pipeline": ({"model": "llama-70b", "num_gpus": 64, "trainer": "megatron"}, {"tp": 4, "pp": 4}),
    "uneven pipeline": (
        {"model": "llama-8b", "num_gpus": 8, "trainer": "megatron"}, {"pp": 4, "first_stage_layers": 5, "last_stage_layers": 5},
    ),
    "fp8": ({"model": "llama-70b", "num_gpus": 64, "trainer": "megatron", "precision": "fp8"}, {"tp": 4}),
    "experts": ({"model": "mixtral-8x7b", "num_gpus": 64, "trainer": "megatron"}, {"ep": 8}),
    "balanced experts": ({"model": "mixtral-8x7b", "num_gpus": 64, "trainer": "megatron", "expert_imbalance": 1.0}, {"ep": 8}),
    "latent attention": ({"model": "deepseek-v3", "num_gpus": 256, "trainer": "megatron"}, {"ep": 64, "recompute": 2}),
    "hybrid": ({"model": "qwen3-next-80b-a3b", "num_gpus": 64, "trainer": "megatron"}, {"ep": 8}),
    "adapters": ({"model": "llama-8b", "num_gpus": 8, "trainer": "fsdp", "lora_rank": 16}, {}),
    "preferences": ({"model": "llama-8b", "num_gpus": 8, "trainer": "fsdp", "objective": "dpo"}, {}),
    "unfused attention": ({"model": "llama-8b", "num_gpus": 8, "trainer": "megatron-2021"}, {"tp": 2}),
    "gradients added by kernels": ({"model": "llama-8b", "num_gpus": 8, "trainer": "nanotron"}, {"pp": 2, "zero": 0}),
}  # fmt: skip


@cache
def plan_of(name: str) -> Plan:
    said, values = JOBS[name]
    return explicit_plan(None, values, {"hardware": "h100-sxm", "global_batch_size": 256, **said})


@cache
def priced_of(name: str) -> Priced:
    plan = plan_of(name)
    return price(job_of(plan), plan.layout)


@pytest.mark.parametrize("name", JOBS)
def test_operators_and_losses_are_the_computation_of_the_step(name: str) -> None:
    priced = priced_of(name)
    found, now = computation_of(priced), priced.estimate
    compute, ideal = float(now.time["compute"][0]), float((now.flop / now.peak_flops)[0])
    assert sum(found.losses.values()) == pytest.approx(compute - ideal, rel=1e-12)
    assert sum(one.at_peak for one in found.operators) == pytest.approx(ideal, rel=1e-12)
    every = sum(one.seconds for one in found.operators)
    assert every + found.losses["uneven"] == pytest.approx(compute, rel=1e-12)
    for one in found.operators:
        assert one.at_peak + sum(one.losses.values()) == pytest.approx(one.seconds, rel=1e-12, abs=1e-12)
    # The mean GPU by another way: the blocks that estimates are made of, and the sums of gradients.
    job, layout = priced.job, Layout.stack([priced.assigned])
    blocks = price_blocks(job.workload, job.cluster, stored_as(job.workload, job.trainer), layout)
    rows, m = [INDEX[row] for row in ("forward", "dgrad", "wgrad")], int(layout.num_microbatches[0])
    mean = sum(n * float(getattr(blocks, kind)[rows].sum()) for kind, n in block_counts(job.model).items())
    sums = sum(one.seconds for one in found.operators if one.name == "gradient_sums")
    assert every - sums == pytest.approx(m * mean / int(priced.layout.pp), rel=1e-12)
    if int(priced.layout.pp) == 1:
        assert every == pytest.approx(compute, rel=1e-12) and found.losses["uneven"] == 0.0
    assert {one.name for one in found.operators} >= {"mlp_norm", "loss"} and len(found.operators) > 9
    assert tuple(found.losses) == LOSSES


def test_each_loss_has_its_cause() -> None:
    losses = {name: computation_of(priced_of(name)).losses for name in JOBS}
    for name in ("dense", "pipeline", "fp8", "experts", "latent attention", "hybrid", "adapters"):
        for loss in ("shapes", "attention", "memory_bound", "clock"):
            assert losses[name][loss] > 0, (name, loss)
    for loss, those in (
        ("precision", {"fp8"}), ("imbalance", {"experts", "latent attention", "hybrid"}), ("scans", {"hybrid"}),
    ):  # fmt: skip
        assert {name for name in JOBS if losses[name][loss] > 1e-9} == those, loss
    staged = {name for name, (_, values) in JOBS.items() if values.get("pp", 1) > 1}
    assert {name for name in JOBS if abs(losses[name]["uneven"]) > 1e-9} == staged
    sums = {name for name in JOBS if "gradient_sums" in {one.name for one in computation_of(priced_of(name)).operators}}
    assert "gradients added by kernels" in sums and "dense" not in sums


def test_the_clock_and_the_memory_are_told_apart() -> None:
    priced = priced_of("fp8")
    before = computation_of(priced).losses
    hardware = priced.job.cluster.hardware

    def changed(**changes: Any) -> dict[str, float]:
        cluster = dataclasses.replace(priced.job.cluster, hardware=dataclasses.replace(hardware, **changes))
        return computation_of(price(dataclasses.replace(priced.job, cluster=cluster), priced.layout)).losses

    fast = changed(sustained_clock=1.0)
    assert fast["clock"] == pytest.approx(0.0, abs=1e-9) and before["clock"] > 1.0
    assert {name: fast[name] for name in LOSSES if name != "clock"} == pytest.approx(
        {name: before[name] for name in LOSSES if name != "clock"}, rel=1e-9, abs=1e-9
    )
    kernels = priced.job.trainer.kernels
    plain = dataclasses.replace(priced.job.trainer, kernels=dataclasses.replace(kernels, casts={}))
    uncast = computation_of(price(dataclasses.replace(priced.job, trainer=plain), priced.layout)).losses
    assert uncast["memory_bound"] < before["memory_bound"], "quantising is bound by memory"
    assert uncast["shapes"] == pytest.approx(before["shapes"], rel=1e-9)
    assert np.isfinite(list(before.values())).all()
