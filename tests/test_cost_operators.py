"""Bytes, kernels and sizes of single operators and states of a small layer, each counted by hand from its equation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import MODELS, TRAINERS, job
from test_cost_layers import shard_of

from planner.cost.layer import parts
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Gemm, MemoryBound, Operator, Shard
from planner.cost.memory import peak_points, states
from planner.cost.pipeline.partition import split_stages, stage_layers, stage_parameters
from planner.layout import CpMethod, Layout, Schedule
from planner.space import stack

MEGATRON = TRAINERS["megatron"]
T, H, A, S = 4096, 1024, 16, 4096
"""Tokens of a microbatch, hidden size, heads and sequence length of the models of samples.py."""


def changed(stored: dict[str, Any] | None = None, **kernels: Any) -> Shard:
    """A shard of the dense GPT under Megatron with other records."""
    trainer = dataclasses.replace(
        MEGATRON,
        kernels=dataclasses.replace(MEGATRON.kernels, **kernels),
        stored=dataclasses.replace(MEGATRON.stored, **(stored or {})),
    )
    return shard_of("gpt", trainer)


def counts(one: Operator) -> tuple[float, ...]:
    """Bytes forward and backward, saved and kept, and kernels forward and backward."""
    moved = (one.forward, one.backward) if isinstance(one, MemoryBound) else (0.0, 0.0)
    return tuple(float(np.max(x)) for x in (*moved, one.saved, one.kept, *one.launches))


def named(operators: list[Operator], name: str) -> Operator:
    """The operator of that name."""
    return next(one for one in operators if one.name == name)


@pytest.mark.parametrize("dropout", [False, True])
def test_scores_in_memory_by_hand(dropout: bool) -> None:
    """b a s^2 scores of 2 bytes: softmax reads and writes (4), backward reads two and writes one (6), keeps 2 per score.

    Dropout reads and writes them once more and has a mask of one byte: 5 more each way, 3 more kept: Korthikanti's 5 a s^2 b.
    """
    operators = layers.layer(changed({"dropout": dropout}, attention="unfused"), moe=False)[0]
    scores = A * S * S
    mask = 5 * dropout
    assert counts(named(operators, "softmax")) == (
        (4 + mask) * scores, (6 + mask) * scores, (2 + 3 * dropout) * scores, 0, 1 + dropout, 1 + dropout,
    )  # fmt: skip
    for name in ("scores", "values"):
        one = named(operators, name)
        assert isinstance(one, Gemm) and one.activations and one.useful == 0.5 and not one.low_precision
        assert one.launches == (1.0, 2.0) and float(np.max(one.groups)) == A
    assert counts(named(operators, "values"))[3] == 2 * T * H


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(("unfused", "added"), [(frozenset(), 2), (frozenset({"gradient_sum"}), 6)])
def test_residuals_and_embedding_by_hand(dropout: bool, unfused: frozenset[str], added: int) -> None:
    """A residual reads two rows and writes one; dropout writes a mask of a byte, and reads it with a row to write one.

    Backward the gradient of the branch is one read more beside the norm, two reads and a write in a kernel of its own.
    """
    shard = changed({"dropout": dropout}, unfused=unfused)
    rows = T * H
    residual = counts(named(layers.layer(shard, moe=False)[0], "mlp_residual"))
    assert residual == ((6 + dropout) * rows, (added + 3 * dropout) * rows, 0, dropout * rows, 1, 0.5 + dropout)
    embedding = counts(named(layers.embedding(shard)[0], "embedding"))
    assert embedding == (4 * rows, 6 * rows, 0, 8 * T + dropout * rows, 3, 3)


@pytest.mark.parametrize(("passes", "kind"), [(1.0, "cross_entropy"), (2.0, "elementwise")])
def test_loss_by_hand(passes: float, kind: str) -> None:
    """2 + 4 bytes per logit, pass and direction; 6 and 3 kernels per pass; element-wise kernels from two passes on."""
    loss = named(layers.head(changed(passes={"loss": passes}))[0], "loss")
    logits = T * 32000
    assert isinstance(loss, MemoryBound) and loss.kind == kind
    forward, backward, _, _, *kernels = counts(loss)
    assert (forward, backward, *kernels) == (6 * passes * logits, 6 * passes * logits, 6 * passes, 3 * passes)


def test_casts_of_fp8_attention_are_four_kernels_each_way() -> None:
    """Forward queries, keys and values in and the output out; backward its gradient in and theirs out."""
    trainer = dataclasses.replace(
        MEGATRON, kernels=dataclasses.replace(MEGATRON.kernels, fp8=MEGATRON.kernels.fp8 | {"attention"})
    )
    shard = dataclasses.replace(shard_of("gpt", trainer), workload=job("gpt", precision="mxfp8").workload)
    casts = named(layers.layer(shard, moe=False)[0], "attention_casts")
    assert counts(casts) == (3 * 4 * T * H, 3 * 4 * T * H, 0, 0, 4, 4)


@pytest.mark.parametrize(("unfused", "each"), [(frozenset({"softmax"}), 10), (frozenset(), 4)])
def test_gradients_of_scores_by_hand(unfused: frozenset[str], each: int) -> None:
    """b (a/t) (s/c) s scores: 4 + 4 + 2 bytes each as plain operations, twice 2 fused; none with flash attention."""
    trainer = changed(attention="unfused", unfused=unfused).trainer
    layout = Layout(tp=2, cp=2, micro_batch_size=3)
    work = job("gpt").workload
    assert float(np.max(states._score_gradients(work, trainer, layout))) == 3 * 8 * 2048 * 4096 * each
    assert float(np.max(states._score_gradients(work, MEGATRON, layout))) == 0


def test_offloaded_states_and_communicators_by_hand() -> None:
    """Half of 12 bytes of states, 4 of gradient and 2 of weight per parameter; one communicator a group and the world's."""
    one = job("gpt")
    layout = Layout(dp=8, offload_optimizer=50, num_microbatches=4)
    parameters = stage_parameters(one.workload, layout, split_stages(MODELS["gpt"], layout))
    held = states.state_bytes(one.workload, MEGATRON, layout, parameters)
    on_host = states.host_bytes(one.workload, MEGATRON, layout, parameters, held)
    assert np.max(on_host) == pytest.approx(np.max(parameters.all) * (12 + 4 + 2) / 2, rel=1e-12)
    hardware = one.cluster.hardware
    opened = states.communicator_bytes(one.cluster, Layout(tp=2, dp=4, ep=4))
    assert float(np.max(opened)) == 3 * hardware.communicator_memory + hardware.expert_communicator_memory
    assert float(np.max(states.communicator_bytes(one.cluster, Layout()))) == 0


def test_router_and_exchange_by_hand() -> None:
    """fp32 logits of 16 experts are kept; a weight of 4 bytes for 2 copies of a token travels both ways, counts of 8 once."""
    operators, collectives = layers.layer(shard_of("moe", ep=4, dp=4), moe=True)
    router = named(operators, "router")
    assert float(np.max(router.saved)) == T * 16 * 4 and router.launches == (6.0, 6.0)
    sent = {
        one.name: (float(np.max(one.size)), one.backward, one.copies) for one in collectives if "dispatch_" in one.name
    }
    assert sent["dispatch_weights"] == (4 * 2 * T, False, 0)
    assert sent["dispatch_weights_gradient"] == (4 * 2 * T, True, 0)
    assert sent["dispatch_counts"] == (8 * 16 * 4, False, 0)


def test_elementwise_passes_multiply_bytes_and_kernels() -> None:
    """Twice the passes: twice the bytes and kernels of a residual."""
    rows = T * H
    residual = named(
        layers.layer(changed(passes={"elementwise": 2.0}, unfused=frozenset()), moe=False)[0], "mlp_residual"
    )
    assert counts(residual) == (12 * rows, 4 * rows, 0, 0, 2, 1)


def test_sums_of_input_gradients_by_hand() -> None:
    """Two gradients beyond the first: 3 rows each as plain torch; read by each of 3 passes of a norm, once by a copy or where
    they are reduce-scattered."""
    rows = 2 * T * H
    fused = changed(passes={"norm": 3.0}, unfused=frozenset(), tp_copies=False)
    split = dataclasses.replace(fused, layout=Layout(tp=2, sequence_parallel=1))
    alike = dataclasses.replace(fused, layout=Layout(tp=2))
    plain = changed(unfused=frozenset({"gradient_sum"}))
    cases = (
        (plain, "norm", 6, 2), (fused, "norm", 6, 0), (fused, "copy", 2, 0), (split, "norm", 2, 0), (alike, "norm", 6, 0),
        (alike, "copy", 2, 0),
    )  # fmt: skip
    for shard, reader, times, kernels in cases:
        (one,) = parts.input_gradient_sum(shard, "x", 2.0, float(T), reader=reader)
        assert counts(one) == (0, times * rows, 0, 0, 0, kernels), (reader, times)
    assert parts.input_gradient_sum(fused, "x", 0.0, float(T), reader="norm") == []


def test_adapters_of_expert_layers_by_hand() -> None:
    """Rank 16 at the joint projection and the output of 8 expert layers: (h + q + k + v) + (q + h) numbers each."""
    work = job("moe", lora_rank=16, lora_targets="attention").workload
    held = stage_parameters(work, Layout(), split_stages(MODELS["moe"], Layout()))
    assert float(held.adapters[0, 0]) == 8 * 16 * (1024 + 1024 + 256 + 256 + 2048)


def test_stages_without_layers_by_hand() -> None:
    """-1 is a stage of none: the other three of four get 3, 3 and 2 of 8 layers."""
    assert stage_layers(8, Layout(pp=4, first_stage_layers=-1)) == [0, 3, 3, 2]
    assert stage_layers(8, Layout(pp=4, last_stage_layers=-1)) == [3, 3, 2, 0]
    assert stage_layers(8, Layout(pp=4, first_stage_layers=1, last_stage_layers=2)) == [1, 3, 2, 2]


def test_outputs_and_receive_buffers_of_a_pipeline_by_hand() -> None:
    """A V on 4 ranks keeps 2 - 2 / p outputs on its ends; plain stages keep the first's, which receives nothing from before."""
    v = stack([Layout(pp=4, schedule=int(Schedule.ZBV))])
    plain = stack([Layout(pp=4)])
    stages = split_stages(MODELS["gqa"], plain)
    assert peak_points._outputs(v, stages)[:, 0].tolist() == [1.5, 0, 1.5]
    assert peak_points._outputs(stack([Layout(pp=2, schedule=int(Schedule.ZBV))]), stages)[:, 0].tolist() == [1, 1, 1]
    assert peak_points._outputs(plain, stages)[:, 0].tolist() == [1, 0, -1]
    assert peak_points._received(v, stages)[0].tolist() == [2, 4, 2]
    assert peak_points._received(plain, stages)[0].tolist() == [1, 2, 1]


def test_ring_of_two_by_hand() -> None:
    """c 2, t 2, in MiB: Q 2, K and V 1; merged (2 + 2.25) Q, and 2.5 KV forward, 9.25 KV backward; 4 + 2 and 3 + 4 kernels."""
    shard = shard_of("gqa", tp=2, cp=2, cp_method=int(CpMethod.RING))
    merge = named(layers.layer(shard, moe=False)[0], "ring_merge")
    assert counts(merge) == (11 * 2**20, 17.75 * 2**20, 0, 0, 6, 7)
    alone = [one.name for one in layers.layer(shard_of("gqa"), moe=False)[0]]
    assert "ring_merge" not in alone
