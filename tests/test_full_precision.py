"""Training in fp32: rates of tf32 and fp32, what is stored; and machines whose launches hide nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from samples import HARDWARE, TRAINERS, job

from planner.cost.estimate import PARTS
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Shard
from planner.cost.memory import states
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.refine import price_exactly
from planner.cost.state_dtypes import stored_as
from planner.hardware import load_hardware
from planner.hardware.accelerator import HOPPER_MMA, PLAIN_EFFICIENCY
from planner.layout import Layout
from planner.trainer import load_trainer

LARGE = (16384.0, 16384.0, 16384.0)


def test_only_the_forward_pass_has_both_operands_along_the_reduction_on_hopper() -> None:
    """tf32: dgrad and wgrad at the rate of mma.sync; in bf16, on Ampere, and where memory is the bound there is no difference."""
    hopper = HARDWARE["h100-sxm"]
    one, of_inputs, _ = hopper.gemm_times(*LARGE, "tf32", gradient_bytes=1.0)
    assert of_inputs / one == pytest.approx(1.0 / HOPPER_MMA, rel=1e-3)
    for profile, dtype in ((hopper, "bf16"), (HARDWARE["a100-sxm-80gb"], "tf32")):
        times = profile.gemm_times(*LARGE, dtype, gradient_bytes=1.0)
        assert times[0] == pytest.approx(times[1], rel=1e-12)
    thin = hopper.gemm_times(1e7, 16.0, 16.0, "tf32", gradient_bytes=1.0)  # bytes alone
    assert thin[1] == pytest.approx(thin[0], rel=1e-9)
    forward, backward = (hopper.grouped_gemm_time(4096.0, 4096.0, 4096.0, 8.0, "tf32", which) for which in ("forward", "dgrad"))
    assert backward > forward / HOPPER_MMA * 0.9


def test_ordinary_cores_come_near_their_peak() -> None:
    """fp32 without tf32: PLAIN_EFFICIENCY of 15.7 TFLOP/s on V100, whatever its tensor cores reach; outputs have 4 bytes."""
    volta = HARDWARE["v100-sxm2-16gb"]
    large = [1e6 * one for one in (1.0, 1.0, 1.0)]
    seconds = float(volta.gemm_time(*large, "fp32"))
    assert 2.0 * large[0] * large[1] * large[2] / seconds == pytest.approx(PLAIN_EFFICIENCY * 15.7e12, rel=1e-3)
    curve = HARDWARE["h100-sxm"].gemm_curve("tf32")
    assert float(curve.bytes_moved(np.array(2.0), np.array(3.0), np.array(5.0))) == 4 * (10 + 15) + 4 * 6


def test_no_kernel_is_faster_than_a_copy_was_measured() -> None:
    t4 = load_hardware("t4")
    assert max(t4.memory_fraction.values()) == pytest.approx(220 / 320)
    assert t4.gemm["bf16"].memory_efficiency == HARDWARE["a100-sxm-80gb"].gemm["bf16"].memory_efficiency  # below it anyway
    assert t4.memory_fraction["permute"] == HARDWARE["a100-sxm-80gb"].memory_fraction["permute"]


@pytest.mark.parametrize(("trainer", "bytes_each"), [("megatron-2021", 16), ("deepspeed", 16), ("fsdp", 16), ("sailor", 16)])
def test_weights_are_their_own_master_weights(trainer: str, bytes_each: float) -> None:
    """Adam in fp32: weight 4, gradient 4, moments 8, whoever keeps them."""
    one = job("gpt", trainer, precision="fp32")
    layout = Layout(zero=0, dp=1)
    parameters = stage_parameters(one.workload, layout, split_stages(one.workload.model, layout), one.trainer.kernels)
    held = states.state_bytes(one.workload, stored_as(one.workload, one.trainer), layout, parameters)
    whole = sum(np.max(held[name]) for name in ("weights", "gradients", "optimizer_states"))
    assert whole == pytest.approx(np.max(parameters.all) * bytes_each, rel=1e-6)


@pytest.mark.parametrize("trainer", ["megatron-2021", "megatron-deepspeed", "nanotron", "deepspeed", "fsdp"])
def test_what_is_stored_is_the_same_whoever_asks_again(trainer: str) -> None:
    """Both the search and the price of one layout ask."""
    one = job("gpt", trainer, precision="fp32")
    once = stored_as(one.workload, one.trainer)
    assert stored_as(one.workload, once).stored == once.stored and once.stored.optimizer_bytes["adam"] == 8.0


def test_zero_1_and_2_of_deepspeed_update_a_copy_in_fp32() -> None:
    """4 bytes per parameter over dp more in fp32: the partition is cloned whatever its dtype; not at ZeRO 0 and 3, nor in bf16, nor
    where it lies on the host."""
    for precision, zero, host, copied in (("fp32", 2, 0, True), ("fp32", 1, 0, True), ("fp32", 0, 0, False), ("fp32", 3, 0, False),
                                          ("fp32", 2, 100, False), ("bf16", 2, 0, False)):  # fmt: skip
        one = job("gpt", "deepspeed", precision=precision)
        layout = Layout(zero=zero, dp=8, offload_optimizer=host)
        parameters = stage_parameters(one.workload, layout, split_stages(one.workload.model, layout), one.trainer.kernels)
        held = sum(np.max(term.workspace_bytes(one.workload, layout, parameters)) for term in one.trainer.terms)
        assert held == pytest.approx(np.max(parameters.all) * 4.0 / 8.0 if copied else 0.0, rel=1e-6)


def test_relu_keeps_its_output_alone() -> None:
    one = job("gpt")
    layout = Layout(tp=2)

    def kept(activation: str) -> float:
        model = replace(one.workload.model, activation=activation)
        shard = Shard(workload=replace(one.workload, model=model), trainer=one.trainer, layout=layout, ep_stride=1.0)
        return float(sum(np.max(operator.saved) for operator in layers.layer(shard, moe=False)[0]))

    assert kept("gelu") - kept("relu") == 4096 * 4096 / 2 * 2  # T f/t in bf16


def test_launches_that_hide_nothing_add_up() -> None:
    """Each pass is longer by all its launches, collectives among them; without a host nothing changes; parts are the whole."""
    layout = Layout(tp=2, dp=4, micro_batch_size=2, num_microbatches=4)
    plain = job("gpt", "megatron-2021")
    for host_time, serial in ((0.0, True), (40e-6, True), (40e-6, False)):
        trainer = plain.trainer.replace(host_time=host_time, overlap=frozenset())
        cluster = replace(plain.cluster, hardware=replace(plain.cluster.hardware, serial_launches=serial))
        found = price_exactly(plain.workload, cluster, trainer, [layout])[0]
        assert float(found.step_time[0]) == pytest.approx(sum(float(found.time[part][0]) for part in PARTS))
        host = float(found.time["host"][0])
        if not host_time:
            nothing = float(found.step_time[0])
            assert host == 0.0
        elif serial:
            assert float(found.step_time[0]) - nothing == pytest.approx(host) and host > 4 * 8 * 39 * 40e-6
            longest = float(found.step_time[0])
        else:
            assert nothing <= float(found.step_time[0]) <= longest
    assert load_hardware("gh200-96gb").serial_launches and not HARDWARE["h100-sxm"].serial_launches


def test_where_launches_hide_nothing_collectives_do_not_either() -> None:
    layout = Layout(tp=4, dp=2, num_microbatches=4)
    one = job("gpt", "megatron-2021")
    assert "tp_backward" in one.trainer.traffic.overlap
    serial = replace(one.cluster, hardware=replace(one.cluster.hardware, serial_launches=True))
    plain, none = (price_exactly(one.workload, cluster, one.trainer, [layout])[0] for cluster in (one.cluster, serial))
    assert float(plain.hidden["tensor"][0]) > 0.0 and float(none.hidden["tensor"][0]) == 0.0


def test_deepspeeds_grid_opens_two_more_communicators() -> None:
    """That of a whole pipeline, and with stages a second one of tensor parallelism; one replica joins its gradients too."""
    trainer, cluster = TRAINERS["megatron-deepspeed"], job("gpt").cluster
    each = cluster.hardware.communicator_memory

    def opened(**degrees: int) -> float:
        return float(np.max(states.communicator_bytes(cluster, Layout(**degrees), trainer))) / each

    assert [opened(dp=8), opened(tp=2), opened(pp=4), opened(tp=2, pp=4), opened(tp=2, pp=2, dp=2)] == [2, 3, 2, 5, 6]
    one = job("gpt", "megatron-deepspeed")
    parameters = stage_parameters(one.workload, Layout(), split_stages(one.workload.model, Layout()))
    term = trainer.terms[0]
    assert np.max(term.workspace_bytes(one.workload, Layout(), parameters)) == pytest.approx(4 * np.max(parameters.all))
    assert term.sent_bytes(one.workload) == 0.0
    assert load_trainer("megatron-deepspeed@2020").terms[0].sent_bytes(one.workload) == 4096**2 * 2 / 2  # a mask, one way
    half = replace(one.workload, precision="fp16")
    assert np.max(term.workspace_bytes(half, Layout(), parameters)) == 0.0
    staged = Layout(tp=2, pp=2)
    kept = [np.max(TRAINERS[name].terms[0].stored_bytes(one.workload, staged)) for name in ("megatron-deepspeed", "sailor")]
    assert kept == [4096 * 1024 * 2, 4096 * 1024 * 2 / 2]  # the whole output of a stage, or each rank its part
