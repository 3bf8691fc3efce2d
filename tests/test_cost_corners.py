"""Corners of the cost model, each by hand: one layer, two ranks, a stage without experts, groups of few."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from samples import MODELS, TRAINERS, job
from test_cost_layers import shard_of
from test_cost_operators import H, T, changed, counts, named

from planner.cluster import strides
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.eager_kernels import STRIDED_SLOWDOWN, elements
from planner.cost.layer.operators import MemoryBound
from planner.cost.memory.states import workspace_bytes
from planner.cost.pipeline.partition import StageParameters, Stages, split_stages
from planner.cost.price import layer_costs, state_traffic
from planner.cost.price.deduplicate import distinct, distinct_values
from planner.cost.price.stage_times import _model_flop
from planner.cost.unique_stages import StageTable
from planner.curves.attention import AttentionCurve
from planner.curves.collectives import NetworkCurve, Segment
from planner.layout import Layout, Recompute
from planner.rules.rule import divisors_text

TITAN = TRAINERS["torchtitan"]


def held(dense: float, expert: float, dense_unit: float, expert_unit: float) -> StageParameters:
    """The same parameters on all three stages."""
    units = {"largest_dense_unit": dense_unit, "largest_expert_unit": expert_unit}
    none = dict.fromkeys(("adapters", "expert_adapters", "linear", "image_encoder", "whole"), 0.0)
    sizes = {"dense": dense, "expert": expert, **none}
    return StageParameters(
        **{name: np.full((1, 3), float(value)) for name, value in sizes.items()},
        **{name: np.full((1, 1), float(value)) for name, value in units.items()},
    )


def test_equal_candidates_are_found_for_any_value() -> None:
    """Values below 0 (a stage without layers) and millions apart."""
    table = Layout(
        first_stage_layers=np.array([-1, 3, -1, 5, 3]), num_microbatches=np.array([1, 3 << 20, 1, 7, 3 << 20])
    )
    found, rows = distinct(table, ("first_stage_layers", "num_microbatches"), few=0)
    assert len(found) == 3
    for name in ("first_stage_layers", "num_microbatches"):
        assert np.array_equal(np.asarray(getattr(found, name))[rows], getattr(table, name))


def test_a_first_stage_without_layers() -> None:
    """It holds the embedding; the second of two stages has all 8 layers."""
    stages = split_stages(MODELS["gqa"], Layout(pp=2, first_stage_layers=-1))
    assert (stages.dense[0, 0], stages.dense[0, 2], stages.embedding[0, 0]) == (0, 8, 1)


def test_flop_of_a_prediction_module_of_a_dense_model() -> None:
    """One more layer and one more head: 9 x 10 + 2 x 3."""
    blocks = {
        name: np.full((len(layer_costs.QUANTITIES), 1), flop)
        for name, flop in {"dense": 10.0, "moe": 7.0, "embedding": 0.0, "head": 3.0}.items()
    }
    model = dataclasses.replace(MODELS["gqa"], mtp_layers=1)
    assert _model_flop(model, SimpleNamespace(**blocks))[0] == 9 * 10 + 2 * 3  # type: ignore[arg-type]


def test_a_stage_of_experts_alone_reduces_and_gathers_them() -> None:
    """Nothing dense is held: what is left takes the time that experts take beside dense weights less that of those."""
    one, layout = job("moe"), Layout(dp=8, ep=2, zero=1, num_microbatches=4)
    stages = split_stages(MODELS["moe"], layout)

    def seconds(dense: float, expert: float) -> tuple[float, float]:
        parameters = held(dense, expert, dense / 8, expert / 8)
        found = state_traffic.reduce_and_gather(one.workload, one.cluster, TITAN, layout, stages, parameters)
        return float(found[0][0, 0]), float(found[1][0, 0])

    for alone, both, rest in zip(seconds(0, 8e8), seconds(8e8, 8e8), seconds(8e8, 0), strict=True):
        assert 0 < alone == pytest.approx(both - rest, rel=1e-9)


@pytest.mark.parametrize(("experts", "expected"), [(0.0, (0.5, 0.0)), (1.0, (0.5, 0.5)), (2.0, (0.5, 0.5))])
def test_a_layer_as_large_as_the_embedding_is_the_last_unit(experts: float, expected: tuple[float, float]) -> None:
    """Half a table dense and half in experts, of a stage with one expert layer; without one the embedding is larger."""
    work, table = job("moe", TITAN).workload, MODELS["moe"].vocab_size * 1024.0
    shape: dict[str, Any] = {"dense": 1.0, "moe": experts, "embedding": 1.0, "head": 0.0, "weight": 1.0,
                              "first_dense": 1.0, "first_moe": experts}  # fmt: skip
    stages = Stages(**{name: np.full((1, 3), value) for name, value in shape.items()})
    found = state_traffic.last_unit(work, TITAN, Layout(dp=8), stages, held(1, 1, table / 2, table / 2))
    dense, expert = (float(np.broadcast_to(part, (1, 3))[0, 0]) / table for part in found)
    assert (dense, expert) == (expected if experts else (1.0, 0.0))


def test_two_expert_ranks_have_their_own_distance() -> None:
    """tp 2 inside etp 2: neighbours of ep are two ranks apart; one expert rank has no distance, 1."""
    for ep in (2, 4):
        layout = Layout(tp=2, dp=8, ep=ep, etp=2)
        assert float(layer_costs._ep_stride(layout)) == float(strides(layout)["ep"]) == 2.0
    assert float(layer_costs._ep_stride(Layout(tp=2, dp=8, etp=2))) == 1.0


@pytest.mark.parametrize(("zero", "own"), [(0, 16.0), (1, 0.0), (2, 0.0)])
def test_experts_of_every_rank_lie_in_their_layers_unit(zero: int, own: float) -> None:
    """From ZeRO 1 on, where experts are not spread over ranks, dense and experts are 10 + 16 of one unit."""
    one, layout = job("moe", TITAN), Layout(dp=8, zero=zero, num_microbatches=4)
    stages = split_stages(MODELS["moe"], layout)
    dense, expert = state_traffic._parts(one.workload, one.cluster, TITAN, layout, stages, held(10, 16, 1, 2))
    assert (float(dense.learned[0, 0]), float(expert.learned[0, 0])) == (26 - own, own)


def test_workspace_of_a_stage_without_experts_has_none() -> None:
    """Eight stages: the first one holds the dense layer alone, so the size of an expert unit does not matter there."""
    one, layout = job("mla", TITAN), Layout(pp=8, dp=2, zero=2, num_microbatches=8)
    stages = split_stages(MODELS["mla"], layout)
    assert stages.moe[0, 0] == 0 < stages.moe[0, 1]
    first, middle = (
        np.ptp(
            [
                workspace_bytes(one.workload, one.cluster, TITAN, layout, stages, held(9, 9, 1, unit))[0, stage]
                for unit in (0, 1e9)
            ]
        )
        for stage in (0, 1)
    )
    assert first == 0 and middle > 0


def test_two_of_all_layers_wait_on_the_gpu_while_activations_are_offloaded() -> None:
    """One dense and seven expert layers and the prediction module: 2 / 9."""
    one = job("mla", gpus=1)
    layout = Layout(num_microbatches=32, recompute=int(Recompute.FULL), offload_activations=1)
    layout = Layout(**{name: np.broadcast_to(value, (1,)) for name, value in layout.columns().items()})
    found = StageTable(one.workload, one.cluster, one.trainer, layout).take(slice(0, 1))
    assert found.resident[0, 0] == pytest.approx(2 / 9)


def test_columns_on_demand_are_those_of_all() -> None:
    """Whole, and of the middle stage of some rows; what nobody asks for is not priced."""
    one = job("mla", gpus=8)
    layout = Layout(dp=np.array([8, 4, 8, 2]), pp=np.array([1, 2, 1, 4]), num_microbatches=8, zero=1)
    layout = Layout(**{name: np.broadcast_to(value, (4,)) for name, value in layout.columns().items()})
    table = StageTable(one.workload, one.cluster, one.trainer, layout)
    lazy, some = table.on_demand(), table.on_demand().some(np.array([3, 0]), slice(1, 2))
    assert lazy.forward.shape == (3, 4) and not any("priced" in vars(one) for one in lazy.tables[1:])
    whole = table.take(slice(0, 4))
    assert set(whole.slowest) == {name for name in whole.slowest if np.array_equal(lazy.slowest[name], whole.slowest[name])}
    for name in ("backward", "weights", "workspace", "in_flight", "reduce", "stored"):
        np.testing.assert_array_equal(getattr(lazy, name), getattr(whole, name))
        np.testing.assert_array_equal(getattr(some, name), getattr(whole, name)[1:2, [3, 0]])
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = lazy.nothing_of_that_name


def test_equal_values_are_looked_up_once() -> None:
    m, n = np.array([1.0, 2.0, 1.0, 1.0]), np.array([3.0, 3.0, 3.0, 4.0])
    first, which = distinct_values([m, 5.0, n], 4, few=0)
    assert len(first) == 3
    np.testing.assert_array_equal(m[first][which], m)
    np.testing.assert_array_equal(n[first][which], n)
    assert distinct_values([m, n], 4) == (slice(None), slice(None))  # too few to look for equal ones


def test_bias_behind_attention_by_hand() -> None:
    """T h values of 2 bytes: a strided read and write forward; the gradient is read once; one kernel and two."""
    shard = changed(unfused=frozenset({"expert_bias"}))
    model = dataclasses.replace(shard.model, expert_bias=True)
    shard = dataclasses.replace(shard, workload=dataclasses.replace(shard.workload, model=model))
    bias = counts(named(layers.layer(shard, moe=False)[0], "attention_bias"))
    assert bias == (2 * STRIDED_SLOWDOWN * 2 * T * H, 2 * T * H, 0, 0, 1, 2)


def test_kernels_of_an_activation_in_two() -> None:
    """SiLU, then its product with the up projection: two kernels forward, three backward."""
    trainer = changed(unfused=frozenset({"swiglu"})).trainer
    activation = named(layers.layer(shard_of("gqa", trainer), moe=False)[0], "mlp_activation")
    assert activation.launches == (2.0, 3.0)


def test_elements_of_plain_kernels() -> None:
    """Of a fused norm, 2 tensors of 2 bytes, the elements; what is always one kernel has none."""
    shard = shard_of("gqa", TITAN)
    norm = MemoryBound(name="norm", kind="norm", forward=2 * 2.0 * T * H, backward=0.0)
    assert elements(norm, shard) == T * H
    assert elements(dataclasses.replace(norm, kind="copy"), shard) is None
    assert elements(norm, shard_of("gpt", TITAN)) is None  # a layer norm


def test_one_tile_leaves_the_other_units_idle() -> None:
    """c U / 1 = 66 times the seconds at the rate; at 132 tiles none is idle."""
    constants = {"head_dims": 128.0, "launch": 0.0, "efficiency": 0.5, "s0": 0.0, "c": 0.5}
    curve = AttentionCurve(**{name: np.array([value]) for name, value in constants.items()})
    one, many = (float(curve.time(1e9, 1024.0, tiles, 128.0, 1e12, 132.0)) for tiles in (1.0, 132.0))
    assert (one, many) == pytest.approx((66 * 2e-3, 2e-3))


def test_bandwidth_inside_racks_falls_with_their_number() -> None:
    """On 8 racks 1 - 0.1 log2(4) = 0.8 of it is left: 8 s inside take 10."""
    line = Segment(efficiency=1.0, latency=0.0, latency_per_rank=0.0, latency_per_doubling=0.0)
    curve = NetworkCurve(fast=line, bulk=line, inside=(1.0, 0.1, 0.2))
    assert float(curve.time(1.0, 8.0, 64.0, 8.0, 1.0, 1.0)) == pytest.approx(10.0)


def test_a_sentence_names_sixteen_divisors() -> None:
    assert divisors_text(2**20).split(", ") == [str(2**n) for n in range(16)]
