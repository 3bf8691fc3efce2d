"""Weights, states and activations in host memory: bytes where they lie, copies, the update on the host."""

import dataclasses

import numpy as np
import pytest
from samples import MODELS, TRAINERS, job, priced
from test_cost import numbers

from planner.cost.memory import states
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.price.state_traffic import activation_offload, host_bandwidth, host_copy_seconds, host_sum_seconds
from planner.explain import host_text
from planner.layout import Layout, Recompute

FSDP = Layout(dp=8, zero=3, num_microbatches=4, recompute=Recompute.FULL)
ON_HOST = FSDP.replace(offload_parameters=1)


def test_weights_gradients_and_states_are_on_the_host_and_nowhere_else() -> None:
    """fp32 weights 4, gradients 4, two moments 8: 16 bytes of a shard of an eighth."""
    one = job("gqa", "fsdp", gpus=8, batch=32)
    here, there = priced(one, FSDP), priced(one, ON_HOST)
    parameters = float(np.max(stage_parameters(one.workload, FSDP, split_stages(MODELS["gqa"], FSDP)).all))
    assert float(there.host_memory[0]) == pytest.approx(parameters / 8 * 16, rel=1e-9)
    for name in ("weights", "gradients", "optimizer_states"):
        assert float(there.memory[name][0]) == 0
    assert float(here.memory["weights"][0]) == pytest.approx(parameters / 8 * 4, rel=1e-9)
    assert there.memory_peak[0] < here.memory_peak[0] and there.step_time[0] > here.step_time[0]
    freed = sum(float(here.memory[name][0]) for name in ("weights", "gradients", "optimizer_states"))
    assert there.memory_allocated[0] >= here.memory_allocated[0] - freed - 1


def test_copies_and_sums_by_hand() -> None:
    """A shard's bytes over PCIe each way; a further microbatch reads two gradients and writes one in host memory."""
    one = job("gqa", "fsdp", gpus=8, batch=32)
    stages = split_stages(MODELS["gqa"], ON_HOST)
    held = states.state_bytes(one.workload, one.trainer, ON_HOST, stage_parameters(one.workload, ON_HOST, stages))
    hardware = one.cluster.hardware
    outward, inward = host_copy_seconds(one.cluster, ON_HOST, held)
    assert np.max(inward) == pytest.approx(np.max(held["weights"]) / hardware.pcie_bandwidth)
    assert np.max(outward) == pytest.approx(np.max(held["gradients"]) / hardware.pcie_bandwidth)
    rate = hardware.host_memory_bandwidth * hardware.cpu_adam_bandwidth_fraction / 8
    assert host_bandwidth(one.cluster) == pytest.approx(rate)
    each = np.max(held["gradients"]) * (3 / rate + 1 / hardware.pcie_bandwidth)
    assert np.max(host_sum_seconds(one.cluster, one.trainer, ON_HOST, held)) == pytest.approx(each)
    assert not np.any(host_sum_seconds(one.cluster, TRAINERS["deepspeed"], ON_HOST, held))
    several, single = (priced(one, ON_HOST.replace(num_microbatches=m)).time["offload"][0] for m in (4, 1))
    assert several - single == pytest.approx(3 * each)
    assert not np.any(host_copy_seconds(one.cluster, FSDP, held))


@pytest.mark.parametrize("trainer", ["fsdp", "torchtitan", "deepspeed", "trl"])
@pytest.mark.parametrize("layout", [ON_HOST, ON_HOST.replace(offload_activations=1), FSDP.replace(offload_activations=1)])
def test_parts_are_the_total_alone_as_in_a_batch_and_slower_links_are_slower(trainer: str, layout: Layout) -> None:
    one = job("moe", trainer, gpus=8, batch=32)
    alone = numbers(priced(one, layout))
    together = numbers(priced(one, Layout.stack([FSDP, layout, FSDP.replace(micro_batch_size=2)])))
    for name, value in alone.items():
        assert value[0] == pytest.approx(together[name][1 if len(together[name]) > 1 else 0], rel=1e-9)
    found = priced(one, layout)
    assert found.step_time[0] == pytest.approx(sum(part[0] for part in found.time.values()))
    slow = one.cluster.hardware.scaled(pcie_bandwidth=0.02)
    slower = priced(dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, hardware=slow)), layout)
    assert slower.step_time[0] > found.step_time[0] and slower.memory_peak[0] == pytest.approx(found.memory_peak[0])


def test_activations_of_some_layers_by_hand() -> None:
    """Of L layers N are moved; two of these are under way. What they save takes PCIe time beyond the computation."""
    one = job("gqa", "megatron", gpus=1, batch=4, sequence=8192)
    plain = Layout(num_microbatches=4)
    layers = MODELS["gqa"].num_layers
    half = plain.replace(offload_activations=1, offload_layers=layers // 2)
    whole = plain.replace(offload_activations=1)
    kept, some, none = (float(priced(one, each).memory["activations"][0]) for each in (plain, half, whole))
    loss = kept - float(priced(one, plain).host_memory[0]) - (kept - none) / (1 - 2 / layers)
    stored = (kept - none) / (1 - 2 / layers)
    assert loss >= 0 and kept - some == pytest.approx(stored * (layers // 2 - 2) / layers, rel=1e-6)
    assert float(priced(one, whole).host_memory[0]) == pytest.approx(kept - none, rel=1e-6)
    stages = split_stages(MODELS["gqa"], half)
    seconds = activation_offload(one.cluster, half, stages, np.full((3, 1), 63e9), np.full((3, 1), 0.2), np.full((3, 1), 1.0))
    assert seconds.max() == pytest.approx(63e9 / 2 / one.cluster.hardware.pcie_bandwidth - 0.2)


def test_an_update_on_the_host_reads_and_writes_everything_in_its_memory() -> None:
    """Where weights live there nothing is transferred at the end; the host's memory alone decides."""
    one = job("gqa", "deepspeed", gpus=8, batch=8)
    layout = Layout(dp=8, zero=3)
    states_there, all_there = (
        float(priced(one, layout.replace(**{name: value})).time["offload"][0])
        for name, value in (("offload_optimizer", 100), ("offload_parameters", 1))
    )
    assert 0 < all_there <= states_there


def test_what_lies_on_the_host_has_a_word_of_its_own() -> None:
    """Two layouts that differ in what is moved never have the same word in the table."""
    moved = [
        Layout(offload_parameters=weights, offload_optimizer=share, offload_activations=activations)
        for weights, share, activations in ((0, 0, 0), (0, 0, 1), (0, 50, 0), (0, 100, 0), (0, 100, 1), (1, 100, 0), (1, 100, 1))
    ]
    words = [host_text(one) for one in moved]
    assert len(set(words)) == len(words) and words[-2:] == ["weights + states", "all"]
