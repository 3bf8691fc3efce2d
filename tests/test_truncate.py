"""Small plans: fewer layers and replicas with the same shards, or why there is none."""

from __future__ import annotations

import dataclasses

import pytest

from planner.cluster import Cluster
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.lab.run.shrink import Truncated, shallower, shrink
from planner.layout import Layout
from planner.model import load_model
from planner.rules import Job, check
from planner.trainer import load_trainer
from planner.units import GIB
from planner.workload import Workload


def big(model: str, layout: Layout, length: int = 8192) -> Job:
    gpus = int(layout.num_gpus)
    work = Workload(model=load_model(model), sequence_length=length, global_batch_size=int(layout.global_batch_size))
    found = Job(
        workload=work,
        cluster=Cluster(hardware=load_hardware("h100-sxm"), num_gpus=gpus),
        trainer=load_trainer("torchtitan"),
    )
    check(found, layout)
    return found


def shard(work: Job, layout: Layout) -> dict[str, float]:
    """What one rank holds of a layer, before states are sharded."""
    model, tp = work.model, int(layout.tp)
    return {
        "heads": model.num_heads / tp, "key heads": model.num_kv_heads / tp, "ffn": model.ffn_size / tp,
        "vocabulary": model.vocab_size / tp, "tokens": work.workload.sequence_length / int(layout.cp),
        "experts": model.num_experts / int(layout.ep), "hidden": model.hidden_size,
        "sequences": int(layout.micro_batch_size),
    }  # fmt: skip


WHOLE = Layout(dp=64, zero=3, num_microbatches=2)
PLANS: list[tuple[str, Layout]] = [
    ("llama-3-8b", WHOLE),
    ("llama-3-8b", Layout(tp=8, dp=8, zero=2, num_microbatches=2, sequence_parallel=1)),
    ("llama-3-8b", Layout(cp=4, dp=16, zero=3, num_microbatches=1, cp_method=2)),
    ("llama-3-70b", Layout(tp=2, pp=4, dp=8, zero=2, num_microbatches=16, sequence_parallel=1, recompute=2)),
    ("llama-3-70b", Layout(tp=8, pp=4, dp=4, dp_shard=2, zero=2, num_microbatches=16, sequence_parallel=1)),
    ("qwen3-30b-a3b", Layout(dp=64, ep=8, zero=3, num_microbatches=1, recompute=2)),
]


@pytest.mark.parametrize(("name", "layout"), PLANS)
def test_a_truncated_plan_has_the_same_shards(name: str, layout: Layout) -> None:
    """On 2, 4, 8 and 16 devices: every shard of a layer, the parameters of a layer on a rank, and more devices keep more."""
    whole = big(name, layout)
    before: Truncated | None = None
    for devices in (2, 4, 8, 16):
        small = shrink(whole, layout, devices, 70 * GIB)
        check(small.job, small.layout)
        assert 2 <= int(small.layout.num_gpus) <= devices and small.job.cluster.num_gpus == int(small.layout.num_gpus)
        assert shard(small.job, small.layout) == shard(whole, layout)
        assert of_a_layer(small.job, small.layout) == pytest.approx(of_a_layer(whole, layout), rel=1e-12)
        assert small.changes and all(one == one.strip() and len(one) < 200 for one in small.changes)
        if before is not None:
            assert int(small.layout.num_gpus) >= int(before.layout.num_gpus)
            for degree in ("tp", "ep", "cp"):
                assert int(getattr(small.layout, degree)) >= int(getattr(before.layout, degree))
        before = small
        less = shallower(whole, layout, small)
        assert less is not None and less.layers == small.layers // 2 and less.layout == small.layout


def of_a_layer(work: Job, layout: Layout) -> float:
    """Parameters of one layer on one rank before states are sharded, but for the router, which counts all experts: the
    difference of two depths."""
    counts = []
    for layers in (2, 4):
        model = dataclasses.replace(work.model, num_layers=layers, num_dense_layers=0)
        one = Layout.stack([layout.replace(pp=1, vpp=1, first_stage_layers=0, last_stage_layers=0)])
        workload = dataclasses.replace(work.workload, model=model)
        found = stage_parameters(workload, one, split_stages(model, one))
        counts.append(float(found.dense[0, 0] + found.expert[0, 0]) - layers * model.num_experts * model.hidden_size)
    return (counts[1] - counts[0]) / 2


def test_a_64_gpu_plan_of_8b_on_two_devices() -> None:
    """FSDP over 64: the states of 32 layers do not fit on two, of 19 they do; everything that differs is said."""
    whole = big("llama-3-8b", WHOLE)
    small = shrink(whole, WHOLE, 2, 70 * GIB)
    assert int(small.layout.dp) == 2 and small.job.model.num_layers == small.layers == 19
    said = " | ".join(small.changes)
    assert "19 layers per stage instead of 32: what fits into 70.0 GiB" in said and "dp 2 instead of 64" in said
    assert "sharded over 2 instead of 64 ranks: 32 times the bytes" in said
    layers = [shrink(whole, WHOLE, 2, memory * GIB).layers for memory in (24, 40, 70, 200)]
    assert layers == sorted(layers) and layers[0] < layers[-1] == 32
    pipeline = PLANS[3][1]
    two = shrink(big("llama-3-70b", pipeline), pipeline, 8, 500 * GIB)
    assert (int(two.layout.tp), int(two.layout.pp), int(two.layout.dp)) == (2, 2, 2)
    assert two.job.model.num_layers == 40 and two.layers == 20  # two of four stages, whole
    assert "pp 2 instead of 4" in " | ".join(two.changes)


@pytest.mark.parametrize(
    ("layout", "devices", "memory", "says"),
    [
        (WHOLE, 1, 70, "needs at least 2 devices for real collectives, this machine has 1; --rung rank"),
        (WHOLE, 64, 70, "the plan has 64 GPUs and this machine 64: nothing to truncate; use --rung full"),
        (WHOLE, 2, 4, "one layer per stage of the truncated plan needs .* of 4.0 GiB on each of 2 devices, because"),
        (Layout(tp=8, dp=8, zero=2, sequence_parallel=1), 0, 70, "this machine has 0"),
    ],
)
def test_what_cannot_be_truncated_is_a_sentence(layout: Layout, devices: int, memory: float, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        shrink(big("llama-3-8b", layout), layout, devices, memory * GIB)


def test_degrees_without_divisors_are_refused() -> None:
    """tp 3 on two devices: nothing is left that two ranks could share."""
    narrow = dataclasses.replace(load_model("llama-3-8b"), num_heads=24, num_kv_heads=6, num_layers=6)
    layout = Layout(tp=3, zero=0, sequence_parallel=1)
    work = Job(
        workload=Workload(model=narrow, sequence_length=6144, global_batch_size=1),
        cluster=Cluster(hardware=load_hardware("h100-sxm"), num_gpus=3), trainer=load_trainer("torchtitan"),
    )  # fmt: skip
    with pytest.raises(
        PlannerError, match="cannot be truncated to 2 devices with the same shards: none of its degrees"
    ):
        shrink(work, layout, 2, 70 * GIB)
