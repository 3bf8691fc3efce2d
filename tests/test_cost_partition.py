"""Which layers and parameters each pipeline stage holds, and parameters of whole models: all counted by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from samples import TRAINERS

from planner.cost.parameters import active_parameters, count_parameters, total_parameters
from planner.cost.pipeline.partition import (
    assign_layers,
    split_stages,
    stage_layers,
    stage_parameters,
    stage_positions,
)
from planner.layout import Layout, Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.target import layers_per_chunk, virtual_stages
from planner.workload import Workload

SIZES: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 4, "num_heads": 2, "num_kv_heads": 2, "head_dim": 2, "ffn_size": 6, "vocab_size": 10,
    "max_sequence_length": 16,
}  # fmt: skip
GQA = {"num_kv_heads": 1}
MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 5, "num_dense_layers": 1}
SHARED = {"num_shared_experts": 1, "shared_expert_ffn_size": 3}
MLA = {
    "q_lora_rank": 3, "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 2, "head_dim": 3,
}  # fmt: skip
GPT = {
    "gated": False, "activation": "gelu", "norm": "layernorm", "position": "learned", "num_position_embeddings": 16,
    "tied_embeddings": True, "linear_bias": True, "embedding_norm": True,
}  # fmt: skip


def tiny(**changes: Any) -> ModelSpec:
    return ModelSpec(name="tiny", **{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "total", "active"),
    [
        # table and head 40 each, norm 4; a layer: Q, K, V and O 16 each, MLP 72, norms 8
        ({}, 84 + 4 * (64 + 72 + 8), 84 + 4 * 144),
        (GQA, 84 + 4 * (16 + 2 * 8 + 16 + 72 + 8), 84 + 4 * 128),
        ({"tied_embeddings": True}, 44 + 4 * 144, 44 + 4 * 144),
        ({"qk_norm": True, "norms_per_layer": 4}, 84 + 4 * (144 + 8 + 4), 84 + 4 * 156),
        # biases of Q, K, V 4 each and of O 4; MLP 2 x 24 + 6 + 4; norms of 8; 16 positions and a norm after them
        (GPT, 40 + 64 + 8 + 8 + 4 * (64 + 12 + 4 + 48 + 6 + 4 + 16), 40 + 64 + 16 + 4 * 154),
        # one layer with the MLP, three with 4 experts of 60 and a router of 16; a token meets 2 of 4
        (MOE, 84 + 144 + 3 * (72 + 4 * 60 + 16), 84 + 144 + 3 * (72 + 2 * 60 + 16)),
        ({**MOE, **SHARED}, 84 + 144 + 3 * (72 + 4 * 60 + 36 + 16), 84 + 144 + 3 * (72 + 2 * 60 + 36 + 16)),
        (
            {**MOE, "expert_bias": True, "router_bias": True},
            84 + 144 + 3 * (72 + 4 * (60 + 10 + 4) + 20),
            84 + 144 + 3 * 240,
        ),
        # q 4 x 3 + 3 x 2 x 3, kv 4 x (2 + 1) + 2 x 2 x (2 + 2), O 4 x 4, norms 3 and 2
        (MLA, 84 + 4 * (12 + 18 + 12 + 16 + 16 + 5 + 72 + 8), 84 + 4 * 159),
        ({**MLA, "q_lora_rank": 0}, 84 + 4 * (24 + 12 + 16 + 16 + 2 + 72 + 8), 84 + 4 * 150),
        # biases of the down projections 3 and 2 + 1; without a compressed query 2 x 3 of the query instead of 3
        ({**MLA, "qkv_bias": True}, 84 + 4 * (159 + 3 + 2 + 1), 84 + 4 * 165),
        ({**MLA, "q_lora_rank": 0, "qkv_bias": True}, 84 + 4 * (150 + 6 + 2 + 1), 84 + 4 * 159),
    ],
)
def test_parameters_by_hand(changes: dict[str, Any], total: int, active: int) -> None:
    model = tiny(**changes)
    assert total_parameters(model) == total
    assert active_parameters(model) == active
    looked_up = 0 if model.tied_embeddings else 40
    assert active_parameters(model, input_embedding=False) == active - looked_up


def test_prediction_modules_by_hand() -> None:
    """A projection 8 x 4 and three norms of 4, next to a layer of the kind of the last one."""
    assert count_parameters(tiny(mtp_layers=2)).mtp == 32 + 12
    assert count_parameters(tiny()).mtp == 0
    for changes, layer in (({}, 144), (MOE, 328), ({**MOE, "num_dense_layers": 0, "moe_layer_interval": 3}, 144)):
        model = tiny(mtp_layers=2, **changes)
        assert total_parameters(model, include_mtp=True) - total_parameters(model) == 2 * (44 + layer)


@pytest.mark.parametrize(
    ("layout", "layers", "three"),
    [
        ({"pp": 1}, [10], (10, 10, 10)),
        ({"pp": 2}, [5, 5], (5, 5, 5)),
        ({"pp": 4}, [3, 3, 2, 2], (3, 3, 2)),
        ({"pp": 2, "first_stage_layers": 6}, [6, 4], (6, 6, 4)),
        ({"pp": 2, "last_stage_layers": 3}, [7, 3], (7, 7, 3)),
        ({"pp": 4, "first_stage_layers": 1}, [1, 3, 3, 3], (1, 3, 3)),
        ({"pp": 4, "first_stage_layers": 1, "last_stage_layers": 2}, [1, 4, 3, 2], (1, 4, 2)),
        ({"pp": 3, "last_stage_layers": -1}, [5, 5, 0], (5, 5, 0)),
    ],
)
def test_layers_of_stages_by_hand(layout: dict[str, int], layers: list[int], three: tuple[int, ...]) -> None:
    """10 layers; -1 is a stage without any. The middle one of the three is the largest of those between."""
    one = Layout(**layout)
    stages = split_stages(tiny(num_layers=10), one)
    assert stage_layers(10, one) == layers
    assert stages.dense[0].tolist() == list(three)
    assert stages.weight[0].tolist() == [1, max(one.pp - 2, 0), float(one.pp > 1)]
    assert stage_positions(one).tolist() == [[0, float(one.pp > 2), one.pp - 1]]
    assert stage_positions(one, 2)[0, 1] == 2.0 * (one.pp > 2)


@pytest.mark.parametrize(
    ("layout", "dense", "moe", "embedding", "head"),
    [
        ({"pp": 1}, [2, 2, 2], [9, 9, 9], [1, 1, 1], [2, 2, 2]),
        ({"pp": 2}, [2, 2, 0], [3, 3, 6], [1, 1, 0], [0, 0, 2]),
        ({"pp": 5}, [2, 0, 0], [0, 2, 3], [1, 0, 0], [0, 0, 2]),
        ({"pp": 2, "vpp": 2, "schedule": Schedule.ZBV}, [2, 2, 0], [3, 3, 6], [1, 1, 0], [2, 2, 0]),
        ({"pp": 5, "vpp": 2, "schedule": Schedule.DUALPIPE_V}, [1, 0, 0], [1, 2, 3], [1, 0, 0], [2, 0, 0]),
    ],
)
def test_experts_embedding_and_heads_by_hand(
    layout: dict[str, int], dense: list[int], moe: list[int], embedding: list[int], head: list[int]
) -> None:
    """10 layers, the first two dense, and a prediction module with a second head; in a V both ends are on rank 0, and chunks of
    one layer put the second dense one on rank 1."""
    stages = split_stages(tiny(num_layers=10, mtp_layers=1, **{**MOE, "num_dense_layers": 2}), Layout(**layout))
    for name, expected in (("dense", dense), ("moe", moe), ("embedding", embedding), ("head", head)):
        assert getattr(stages, name)[0].tolist() == expected, name


@pytest.mark.parametrize(("interval", "dense", "moe"), [(1, [1, 0, 0], [2, 3, 3]), (2, [2, 1, 1.5], [1, 2, 1.5])])
def test_experts_in_every_layer_or_every_second_by_hand(interval: int, dense: list[float], moe: list[float]) -> None:
    """9 layers on 3 stages, the first one dense: 8 or 4 with experts, of which a middle stage has what the ends leave."""
    stages = split_stages(tiny(num_layers=9, moe_layer_interval=interval, **MOE), Layout(pp=3))
    assert (stages.dense[0].tolist(), stages.moe[0].tolist()) == (dense, moe)


def test_leading_dense_layers_lie_where_the_exported_chunks_have_them() -> None:
    """First, last and every middle stage against the layers by number that exporters write, for 300 drawn layouts."""
    draw, seen, several = random.Random(16), 0, 0
    while seen < 300:
        pp, vpp = draw.choice([2, 3, 4, 7]), draw.choice([1, 2, 3])
        schedule = Schedule.ZBV if vpp == 2 and draw.random() < 0.4 else Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
        first, last = draw.choice([0, 1, 2]) * (pp > 2), draw.choice([0, 1, 3]) * (pp > 2)
        layout = Layout(pp=pp, vpp=vpp, schedule=schedule, first_stage_layers=first, last_stage_layers=last)
        layers, dense = draw.randint(4 + pp, 40), draw.randint(1, 6)
        model = tiny(num_layers=layers, **{**MOE, "num_dense_layers": dense})
        held, counted = [0] * pp, [0] * pp
        for rank, _, numbers in virtual_stages(layers_per_chunk(layers, layout), layout):
            held[rank] += len(numbers)
            counted[rank] += sum(number < dense for number in numbers)
        for rank in range(pp):
            found, where = split_stages(model, layout, max(rank, 1)), 0 if rank == 0 else 2 if rank == pp - 1 else 1
            assert found.dense[0, where] == counted[rank], (layers, dense, layout, rank)
            assert found.moe[0, where] == held[rank] - counted[rank]
        mean = split_stages(model, layout)
        assert (mean.dense[0, 0], mean.dense[0, 2]) == (counted[0], counted[-1])
        seen, several = seen + 1, several + (counted[0] < dense)
    assert several > 50


def test_layers_by_cost_by_hand() -> None:
    """A layer costs 4 x 16 + 3 x 24 = 136, a head of 68 x 10 = 5 of them: shares of 15 / 2 and 15 / 3."""
    model, trainer = tiny(num_layers=10, vocab_size=170), TRAINERS["nanotron"]
    found = assign_layers(model, trainer, Layout.stack([Layout(pp=pp) for pp in (1, 2, 3, 15)]))
    assert found.first_stage_layers.tolist() == [0, 8, 5, 1]  # type: ignore[union-attr]
    assert found.last_stage_layers.tolist() == [0, 2, -1, -1]  # type: ignore[union-attr]
    given = Layout(pp=2, first_stage_layers=3)
    assert assign_layers(model, trainer, given).first_stage_layers == 3
    assert assign_layers(model, TRAINERS["megatron"], Layout(pp=2)) == Layout(pp=2)


@pytest.mark.parametrize(
    ("changes", "layout", "dense", "expert"),
    [
        # tp 2 on one key-value head: Q 8, K and V 8 each whole, O 8, MLP 36, norms 8; tables 20, final norm 4
        (GQA, {"tp": 2, "pp": 2}, [2 * 76 + 20, 2 * 76 + 20, 2 * 76 + 24], [0, 0, 0]),
        (GQA, {"tp": 2}, [4 * 76 + 44] * 3, [0, 0, 0]),
        ({**GQA, "tied_embeddings": True}, {"tp": 2, "pp": 2}, [172, 172, 176], [0, 0, 0]),
        ({**GQA, "tied_embeddings": True}, {"tp": 2}, [4 * 76 + 24] * 3, [0, 0, 0]),
        # the router is whole; the four experts of 60 over ep 2
        ({**MOE, **SHARED}, {"tp": 2, "ep": 2, "pp": 2}, [76 + 74 + 20] * 2 + [2 * 74 + 24], [120, 120, 240]),
        # a prediction module: one layer more, its projection 32 / 2 and norms 12, and a table of its own to look tokens up
        ({"mtp_layers": 1}, {"tp": 2, "pp": 2}, [2 * 76 + 20] * 2 + [3 * 76 + 24 + 20 + 16 + 12], [0, 0, 0]),
        (GPT, {"tp": 2}, [4 * (32 + 6 + 4 + 24 + 3 + 4 + 16) + 20 + 72 + 8] * 3, [0, 0, 0]),
    ],
)
def test_parameters_of_stages_by_hand(
    changes: dict[str, Any], layout: dict[str, int], dense: list[int], expert: list[int]
) -> None:
    one = Layout(**layout)
    workload = Workload(model=tiny(**changes), sequence_length=16, global_batch_size=8)
    found = stage_parameters(workload, one, split_stages(workload.model, one))
    assert found.dense[0].tolist() == dense
    assert np.broadcast_to(found.expert, (1, 3))[0].tolist() == expert
    assert found.all[0].tolist() == [a + b for a, b in zip(dense, expert, strict=True)]


@pytest.mark.parametrize(("targets", "width"), [("qkv", 16), ("attention", 24), ("all", 24 + 4 + 12 + 10)])
def test_adapters_by_hand(targets: str, width: int) -> None:
    """Rank 3 on inputs plus outputs: Q, K, V as one layer of 4 + 12, O 4 + 4, gate and up 4 + 12, down 6 + 4; over tp 2."""
    workload = Workload(model=tiny(), sequence_length=16, global_batch_size=8, lora_rank=3, lora_targets=targets)
    found = stage_parameters(workload, Layout(tp=2), split_stages(workload.model, Layout(tp=2)))
    assert found.adapters[0].tolist() == [4 * 3 * width / 2] * 3


def test_largest_units_by_hand() -> None:
    """ZeRO 3 gathers a layer without experts: 136 / 2 + 8 with tp 2; of a mixture the larger kind; experts of one layer."""
    for changes, unit, experts in (({}, 76, 0), (MOE, 76, 240), ({**MOE, "num_dense_layers": 0}, 56, 240)):
        workload = Workload(model=tiny(**changes), sequence_length=16, global_batch_size=8)
        found = stage_parameters(workload, Layout(tp=2), split_stages(workload.model, Layout(tp=2)))
        assert np.ravel(found.largest_dense_unit).tolist() == [unit]
        assert np.ravel(found.largest_expert_unit).tolist() == [experts]
