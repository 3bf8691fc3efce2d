"""Per-operator recompute: what a layer keeps, by the order of its matrix products, against hand-worked sums."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import MLA, MODELS, TRAINERS, model
from test_cost_layers import PAPER, B, S, saved

from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Shard
from planner.cost.price.compute import repeated
from planner.layout import Layout, Module, Recompute
from planner.model import ModelSpec
from planner.workload import Workload


def shard_of(spec: ModelSpec, trainer: str, **layout: Any) -> Shard:
    """Sizes of one rank."""
    work = Workload(model=spec, sequence_length=S, global_batch_size=8)
    layouts = Layout.stack([Layout(**{"micro_batch_size": B, **layout})])
    return Shard(workload=work, trainer=TRAINERS[trainer], layout=layouts, ep_stride=1.0)


PER_OPERATOR = {"recompute": Recompute.SELECTIVE, "recompute_modules": int(Module.EVERY_SECOND_MATMUL)}
LATENT = model("latent", **MLA)
H, F, Q, UP, V = 1024, 4096, 16 * 96, 16 * (64 + 64), 16 * 64  # of LATENT: hidden, MLP, queries, keys with values, values


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        # wq and wv, attention, w1 and w2: the first, third, fifth and seventh product
        (MODELS["gqa"], 1024 + 4 * 64 + 1024 + 4096 + 1024),
        # wq_a and wkv_a, attention, wo, w3
        (LATENT, 384 + (256 + 32) + V + H + F),
        # wq and wkv_b, attention, w1 and w2
        (dataclasses.replace(LATENT, q_lora_rank=0), Q + UP + V + F + H),
        # wq and wv, attention, w1; w2 is the sixth
        (PAPER, 2048 + 2048 + 2048 + 8192),
    ],
)
def test_per_operator_recompute_counts_the_products_in_order(spec: ModelSpec, kept: float) -> None:
    """Outputs of every second product, the layer's input, and 4 bytes per row and head of attention."""
    each = 2 * (spec.hidden_size + kept) + 4 * 16
    assert saved(spec, TRAINERS["torchtitan"], **PER_OPERATOR) == pytest.approx(S * B * each, rel=1e-12)


def test_per_operator_recompute_keeps_what_ranks_have_summed() -> None:
    """With tensor parallelism: all T rows of wo or w2, and the T_s of both reduce-scatters; MLA's down projections are whole."""
    whole = H + 384 + 256 + 32
    split = V + F + (H + 2 * H)  # the layer's input, and both sums
    each = 2 * (whole + split / 2) + 4 * 16 / 2
    found = saved(LATENT, TRAINERS["torchtitan"], tp=2, sequence_parallel=1, **PER_OPERATOR)
    assert found == pytest.approx(S * B * each, rel=1e-12)


def test_shared_experts_count_on_and_the_router_does_not() -> None:
    """Behind four products of attention the shared experts' w1 and w2 are kept, behind five their w3; routed ones are repeated."""
    shared = dataclasses.replace(MODELS["moe"], num_shared_experts=1, shared_expert_ffn_size=1024)

    def kept(spec: ModelSpec, **layout: Any) -> dict[str, float]:
        shard = shard_of(spec, "torchtitan", **PER_OPERATOR, **layout)
        found = {}
        for one in layers.layer(shard, moe=True)[0]:
            freed = repeated(int(one.module), shard, one.share)
            found[one.name] = float(np.ravel((1 - freed) * one.saved + one.kept)[0]) / (2 * S * B)
        return found

    four, five = kept(shared), kept(MODELS["mla"])
    assert four["attention_out"] == 0 and four["shared_up"] == 1024 and four["shared_down"] == 1024
    assert five["attention_out"] == 1024 and five["shared_up"] == 1024 and five["shared_down"] == 0
    for found in (four, five):
        assert found["mlp_norm"] == found["router"] == found["experts_up"] == found["experts_down"] == 0
    assert kept(shared, tp=2, sequence_parallel=1)["shared_down"] == 1024 + 512


def test_the_norm_before_experts_keeps_the_rows_of_its_readers() -> None:
    """Router and routed experts take the rank's own rows, shared experts the gathered ones: Megatron gathers them again."""
    plain, shared = MODELS["moe"], dataclasses.replace(MODELS["moe"], num_shared_experts=1, shared_expert_ffn_size=1024)

    def rows(spec: ModelSpec, trainer: str) -> float:
        operators, _ = layers.layer(shard_of(spec, trainer, tp=4, sequence_parallel=1), moe=True)
        norm = next(one for one in operators if one.name == "mlp_norm")
        return float(np.ravel(norm.saved)[0]) / (2 * S * B * spec.hidden_size)

    assert [rows(one, name) for name in ("torchtitan", "megatron") for one in (plain, shared)] == [0.25, 1.25, 0.25, 0.25]
