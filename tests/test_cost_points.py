"""Program points of memory where gradients come on demand: parts of a stage and every point, worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from samples import MODELS, TRAINERS, job

from planner.cost.layer.operators import Shard
from planner.cost.memory import peak_points
from planner.cost.memory.states import state_bytes
from planner.cost.pipeline.partition import StageParameters, shard_groups, split_stages, stage_parameters
from planner.cost.price import layer_costs
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.cost.price.stage_times import stage_times
from planner.layout import CpMethod, Layout, Recompute
from planner.space import stack

TITAN = TRAINERS["torchtitan"]
TABLE = 32000 * 1024
M = 2**20
"""1 MiB: 4096 tokens of 1024 values of 2 bytes are 8."""


def states(name: str, layout: Layout, **parameters: float) -> dict[str, Any]:
    """``state_parts`` of the first stage, of given parameters, and of the last one's head and embedding."""
    work, stages = job(name, TITAN).workload, split_stages(MODELS[name], layout)
    sizes = {"adapters": 0.0, "expert_adapters": 0.0, "whole": 0.0, **parameters}
    sizes = {"linear": 0.0, "image_encoder": 0.0, **sizes}
    held = StageParameters(**{key: np.full((1, 1 if "unit" in key else 3), value) for key, value in sizes.items()})
    found = peak_points.state_parts(work, TITAN, layout, stages, held)
    rows = {key: float(value[0, 0]) for key, value in found.items()}
    return {**rows, "last": (found["head_weights"][2, 0], found["table_weights"][2, 0])}


def test_states_of_experts_without_a_pipeline_by_hand() -> None:
    """w 2, r 4; 800 dense and 1600 expert parameters, units of 80 and 160, shared by 8 and by 4 ranks."""
    layout = Layout(dp=8, ep=2, zero=3, num_microbatches=4)
    found = states("moe", layout, dense=800, expert=1600, largest_dense_unit=80, largest_expert_unit=160)
    del found["last"]
    assert found == {
        "gathered": 2 * 2400, "layer_weights": 2 * 240, "dense_weights": 160, "last_weights": 320,
        "head_weights": 2 * TABLE, "table_weights": 2 * TABLE, "dense_reduced": 320, "largest_reduced": 640,
        "largest_gradients": 320, "head_reduced": 4 * TABLE, "table_reduced": 4 * TABLE, "table_gradient": 2 * TABLE,
        "new_layer": 4 * (10 + 40), "new_head": TABLE / 2, "new_all": 4 * (100 + 400), "kept_new": 0,
        "accumulated": 2000, "buckets": 0, "updating": 0, "resharded": 1, "pipelined": 0, "received": 0, "copied": 0,
        "root": 0, "released": 0, "head_copies": 0, "head_pieces": 0, "wrapped": 1,
    }  # fmt: skip


def test_states_of_a_pipeline_by_hand() -> None:
    """tp 2, two replicas of two ranks: the embedding's gradient is whole, 2 of its tables, and 8 microbatches are received."""
    layout = Layout(tp=2, sequence_parallel=1, pp=2, dp=4, dp_shard=2, zero=2, num_microbatches=8)
    found = states("gqa", layout, dense=800, expert=0, largest_dense_unit=80, largest_expert_unit=0)
    table = TABLE / 2
    assert found == {
        "gathered": 1600, "layer_weights": 160, "dense_weights": 160, "last_weights": 160, "head_weights": 0,
        "table_weights": 2 * table, "dense_reduced": 320, "largest_reduced": 320, "largest_gradients": 160, "head_reduced": 0,
        "table_reduced": 4 * table, "table_gradient": 4 * table, "new_layer": 160, "new_head": 0, "new_all": 1600,
        "kept_new": 1, "accumulated": 4 * (800 + table), "resharded": 0, "pipelined": 1, "received": 8 * 4 * M, "copied": 0,
        "buckets": 0, "updating": 0,
        "root": 0, "released": 0, "head_copies": 0, "head_pieces": 0, "wrapped": 1,
        "last": (2 * table, 0),
    }  # fmt: skip


def shapes(name: str, layout: Layout) -> dict[str, float]:
    """``shape_parts`` of the first stage, in MiB, which stores 100, gets 90 back by recompute, and whose head saves 1000."""
    work, stages = job(name, TITAN).workload, split_stages(MODELS[name], layout)
    stored, working, head = (np.full((3, 1), value * float(M)) for value in (100, 90, 1000))
    times = SimpleNamespace(last_layer=stored, working=working, loss=head)
    found = peak_points.shape_parts(work, TITAN, stack([layout]), stages, times)  # type: ignore[arg-type]
    return {key: float(value[0, 0]) / M for key, value in found.items()}


def test_shapes_of_dense_layers_by_hand() -> None:
    """tp 2: rows 8, an output 4, inner tensors 16 each, down projection 4, Q, K and V 6 in MiB; 250 per logit of 2 bytes."""
    assert shapes("gqa", Layout(tp=2, sequence_parallel=1)) == {
        "layer": 100, "working": 90, "transient": 4 + 4 + 32, "forward": 8 + 4, "norm": 1000 - 250, "logits": 125,
        "loss": 250, "boundary": 4, "outputs": 0, "rows": 8, "kept_logits": 0, "after": 0, "waiting": 8 * (6 + 16 + 32),
        "ahead": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("ep", "beside"), [(1, 16), (2, 64)])
def test_shapes_of_expert_layers_by_hand(ep: int, beside: int) -> None:
    """Two copies of 8 MiB, inner tensors 16: after the largest unit 100 + 90 - 2 x 16 - 3 x 16 are left."""
    found = shapes("moe", Layout(dp=2, ep=ep))
    assert found == {
        "layer": 100, "working": 90, "transient": 8 + 32, "forward": beside, "norm": 500, "logits": 250, "loss": 500,
        "boundary": 8, "outputs": 0, "rows": 8, "kept_logits": 0, "after": 110, "waiting": 8 * (12 + 8 + 16 + 32),
        "ahead": 0,
    }  # fmt: skip


S = {
    "layer": 100, "working": 150, "transient": 40, "forward": 30, "norm": 8, "logits": 50, "loss": 90, "boundary": 4, "rows": 6,
    "kept_logits": 5, "after": 20, "waiting": 12, "ahead": 0,
}  # fmt: skip
T = {
    "gathered": 600, "layer_weights": 60, "dense_weights": 25, "last_weights": 35, "head_weights": 70, "table_weights": 80,
    "dense_reduced": 50, "largest_reduced": 64, "largest_gradients": 32, "head_reduced": 140, "table_reduced": 160,
    "table_gradient": 80, "new_layer": 7, "new_head": 9, "new_all": 77, "kept_new": 0, "accumulated": 77, "resharded": 1,
    "received": 11, "copied": 3, "root": 0, "released": 0, "head_copies": 0, "head_pieces": 0,
    "updating": 21,
}  # fmt: skip


def arrays(values: dict[str, float]) -> dict[str, Any]:
    """The same as arrays of one number."""
    return {key: np.array([float(value)]) for key, value in values.items()}


def points(found: list[Any]) -> list[tuple[float, ...]]:
    """Plain numbers of program points."""
    return [tuple(float(one[0]) for one in point) for point in found]


def shared(part: float) -> Any:
    """A stage at which this part of the gradients is accumulated."""
    return SimpleNamespace(accumulated_share=np.array([part]))


def test_points_of_a_step_that_drops_weights_by_hand() -> None:
    """The rows of the module's table at zero 3, before any gradient is accumulated; new gradients stay."""
    assert points(peak_points._alone(np.array([1000.0]), shared(0.0), arrays(S), arrays(T))) == [
        (1000, 0, 30 + 60 + 35), (1058, 0, 140), (1098, 0, 0), (1063, 0, 70 + 6 + 70 + 25), (1005, 0, 70 + 140 + 9 + 25),
        (1155, 0, 40 + 140 + 9 + 85), (1055, 0, 40 + 50 + 16 + 85), (925, 0, 32 + 140 + 9 + 85), (925, 0, 64 + 32 + 9 + 25),
        (255, 70, 40 + 50 + 60 + 80), (5, 77, 240), (5, 77, 21),
    ]  # fmt: skip


def test_points_of_a_step_that_keeps_weights_by_hand() -> None:
    """w (N + U) and so on below zero 3, with gradients accumulated and replicas; the embedding's gradient is larger than w E. Adam
    has one gradient of each weight."""
    t = arrays({**T, "resharded": 0, "kept_new": 1, "table_gradient": 160, "new_layer": 47})
    assert points(peak_points._alone(np.array([1000.0]), shared(1.0), arrays(S), t)) == [
        (1000, 77, 30 + 530 + 35), (1058, 77, 670), (1098, 77, 600), (1063, 77, 70 + 6 + 600),
        (1005, 77, 70 + 140 + 9 + 530), (1155, 77, 40 + 140 + 9 + 530), (1055, 77, 40 + 50 + 9 + 47 + 470),
        (925, 77, 32 + 140 + 9 + 530), (925, 77, 64 + 47 + 3 + 9 + 470), (255, 77 + 30, 40 + 50 + 60 + 80),
        (5, 154, 160 + 80 + 50 + 80), (5, 77, 21),
    ]  # fmt: skip


def pipelined(
    t: dict[str, float], s: dict[str, float], held: float, waiting: float, uneven: float = 0.0
) -> list[tuple[float, ...]]:
    """Points of a stage with three microbatches in flight at half of the gradients, and two at all of them."""
    counts = {
        "in_flight": 3,
        "accumulated_share": 0.5,
        "logits_held": held,
        "waiting_weights": waiting,
        "accumulated_flight": 2,
        "resident": math.inf,
        "uneven": uneven,
    }
    return points(peak_points._pipelined(np.array([1000.0]), SimpleNamespace(**arrays(counts)), arrays(s), arrays(t)))  # type: ignore[arg-type]


def test_points_of_the_stages_of_a_pipeline_by_hand() -> None:
    """Weights 600 and buffers 11 always; 12 per waiting weight gradient, half of one less where its pass runs in the middle."""
    assert pipelined(T, S, 1, 2) == [
        (3000, 38.5, 24 + 611), (3098, 38.5, 70 + 6 + 635), (3200, 38.5, 40 + 635), (2970, 38.5, 32 + 635), (2000, 77, 80 + 611),
        (2000, 77, 24 + 611), (2098, 77, 70 + 6 + 635), (2200, 77, 40 + 635), (1970, 77, 32 + 635), (1000, 77, 80 + 611),
        (0, 77, 160 + 7 + 611),
    ]  # fmt: skip
    middle = {**T, "table_weights": 0, "head_weights": 0, "table_gradient": 0, "table_reduced": 0}
    no_head = {**S, "logits": 0, "norm": 0, "loss": 0}
    assert pipelined(middle, no_head, 0, 2) == [
        (3000, 38.5, 24 + 611), (3000, 38.5, 629), (3146, 38.5, 36 + 629), (2916, 38.5, 32 + 629), (2000, 77, 611),
        (2000, 77, 24 + 611), (2000, 77, 629), (2146, 77, 36 + 629), (1916, 77, 32 + 629), (1000, 77, 611),
        (0, 77, 64 + 3 + 7 + 611),
    ]  # fmt: skip
    assert pipelined(T, S, 3, 0)[0] == (3000 + 2 * 58, 38.5, 30 + 611)
    assert [pipelined(T, S, 1, 2, uneven=300)[where][0] for where in (0, 5)] == [3000 + 300, 2000 + 200]


def test_prediction_modules_by_hand() -> None:
    """One beside a head that saves 1000 MiB, loss and logits within: the token's embedding and what the projection reads, 8 and 16
    MiB (tp 2: 4 and 16), stay from its forward pass on, or with recompute the embedding alone; its backward pass has them all, and
    with recompute what the projection puts out."""
    for layout, kept, ahead in (
        (Layout(), 24, 24), (Layout(recompute=2), 8, 8 + 16 + 8), (Layout(tp=2, sequence_parallel=1), 20, 20),
    ):  # fmt: skip
        found = shapes("mla", layout)
        assert found["boundary"] == 8 / layout.tp and found["ahead"] == ahead
        assert found["norm"] == (1000 - found["loss"]) + (1000 - found["loss"] + found["logits"] + kept)
    more = [(one[0] + 7 * (number in (2, 3, 7, 8)), *one[1:]) for number, one in enumerate(pipelined(T, S, 1, 2))]
    assert pipelined(T, {**S, "ahead": 7}, 1, 2) == more


def test_last_layer_of_a_stage_with_one_expert_layer() -> None:
    """Eight stages of one layer each: the last layer of every stage is an expert layer, and saves what one saves."""
    one, layout = job("moe"), Layout(pp=8, num_microbatches=8)
    blocks = price_blocks(one.workload, one.cluster, one.trainer, layout)
    stages = split_stages(MODELS["moe"], layout)
    found = stage_times(MODELS["moe"], one.cluster, one.trainer, layout, stages, blocks, np.zeros((1, 3)))
    assert found.last_layer[:, 0].tolist() == [float(blocks.moe[INDEX["saved"], 0])] * 3


def test_attention_of_torch_context_parallelism_by_hand() -> None:
    """T 1024, Q = O = 1024, KV 512, c 4: T (10 Q + 2 O + 24 KV) = 24 MiB beside all but the MLP's three inner tensors of 1 MiB."""
    layout = stack([Layout(cp=4, cp_method=int(CpMethod.ALLGATHER), recompute=2, zero=3)])
    narrow = dataclasses.replace(MODELS["gqa"], ffn_size=512)
    work = dataclasses.replace(job("gqa", TITAN).workload, model=narrow)
    shard = Shard(workload=work, trainer=TITAN, layout=layout, ep_stride=1.0)
    assert TITAN.terms[0].attention_gradient_bytes(shard).tolist() == [24 * M]
    ring = dataclasses.replace(shard, layout=layout.replace(cp_method=int(CpMethod.RING)))
    assert TITAN.terms[0].attention_gradient_bytes(ring).tolist() == [0]
    some = np.full((3, 1), 100.0 * M)
    times = SimpleNamespace(last_layer=some, working=some, loss=some)
    stages = split_stages(narrow, layout)
    found = peak_points.shape_parts(work, TITAN, layout, stages, times)  # type: ignore[arg-type]
    assert found["transient"].tolist() == [[(24 - 3) * M]] * 3
    wide = peak_points.shape_parts(job("gqa", TITAN).workload, TITAN, layout, stages, times)  # type: ignore[arg-type]
    assert wide["transient"].tolist() == [[(8 + 2 + 16) * M]] * 3, "inner tensors of 8 MiB: the MLP's backward pass has more"


def test_experts_outside_of_state_sharding_by_hand() -> None:
    """8 ranks, ep 2: experts are whole on each of 4 ranks, never gathered, and their gradients are all-reduced over those 4."""
    trainer = TITAN.with_facts({"expert_parallel": "outside"})
    layout = Layout(dp=8, ep=2, zero=3)
    dense, expert = shard_groups(layout, trainer)
    assert (dense.item(), expert.item()) == (8, 1)
    assert shard_groups(layout.replace(ep=1), trainer)[1].item() == 8, "experts that are not spread are sharded like all else"
    assert [one.item() for one in shard_groups(layout, TITAN)] == [8, 4]
    one = job("moe", trainer, batch=8)
    sizes = stage_parameters(one.workload, layout, split_stages(one.model, layout))
    held = state_bytes(one.workload, trainer, layout, sizes)
    assert held["weights"][0, 0] == pytest.approx(4 * (sizes.dense[0, 0] / 8 + sizes.expert[0, 0]))
    assert held["optimizer_states"][0, 0] == pytest.approx(8 * (sizes.dense[0, 0] / 8 + sizes.expert[0, 0]))
    found = peak_points.state_parts(one.workload, trainer, layout, split_stages(one.model, layout), sizes)
    assert found["layer_weights"][0, 0] == found["dense_weights"][0, 0], "no expert is gathered"
    assert found["gathered"][0, 0] == pytest.approx(2 * sizes.dense[0, 0])


def test_layers_of_which_nothing_is_recomputed_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With recompute there are those without it, which have the seconds, and those with it, which have the bytes."""
    one, made, own = job("gqa", "megatron", gpus=8, batch=8), list[Shard](), layer_costs.operators_of
    monkeypatch.setattr(layer_costs, "operators_of", lambda shard: made.append(shard) or own(shard))
    plain = Layout(tp=2, dp=4)
    for layout, times in ((plain, 1), (plain.replace(recompute=int(Recompute.SELECTIVE), recompute_modules=1), 2)):
        made.clear()
        price_blocks(one.workload, one.cluster, one.trainer, layout)
        assert len(made) == times
