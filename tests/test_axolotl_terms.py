"""Context parallelism of axolotl: contiguous pieces, keys and values gathered head by head."""

import dataclasses

import numpy as np
import pytest
from samples import TRAINERS, job

from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Attention, Shard
from planner.layout import CpMethod, Layout


def shard_of(cp: int, document_length: int = 0) -> Shard:
    work = job("gqa", "axolotl").workload.replace(document_length=document_length)
    layout = Layout(cp=cp, cp_method=int(CpMethod.ALLGATHER))
    return Shard(workload=work, trainer=TRAINERS["axolotl"], layout=layout, ep_stride=1.0)


def pairs(shard: Shard) -> float:
    """Pairs of query and key that one rank works on, times two."""
    one = next(one for one in layers.layer(shard, moe=False)[0] if one.name == "core_attention")
    assert isinstance(one, Attention)
    return float(np.max(np.asarray(one.documents * one.seq_q) * one.seq_kv))


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_last_rank_is_the_slowest(cp: int) -> None:
    """The last of c pieces sees s / c queries times s (1 - 1 / 2c) keys: (2c - 1) / c times the mean of s / c times s / 2."""
    shard = shard_of(cp)
    balanced = dataclasses.replace(shard, trainer=dataclasses.replace(shard.trainer, terms=()))
    assert pairs(shard) == pytest.approx((2 * cp - 1) / cp * pairs(balanced))
    length = shard.workload.sequence_length
    assert pairs(shard) == pytest.approx(2 * length / cp * length * (1 - 1 / (2 * cp)))


def test_documents_of_one_rank_are_balanced() -> None:
    length = shard_of(1).workload.sequence_length
    assert pairs(shard_of(4, length // 4)) == pytest.approx(pairs(shard_of(1, length // 4)) / 4)
    assert pairs(shard_of(4, length // 2)) == pytest.approx(1.5 * pairs(shard_of(1, length // 2)) / 4)  # two pieces each


def test_without_context_parallelism_nothing_is_added() -> None:
    _, collectives = layers.layer(shard_of(1), moe=False)
    assert pairs(shard_of(1)) == pytest.approx(float(shard_of(1).workload.sequence_length) ** 2)
    assert not [one for one in collectives if one.group == "cp" and float(np.max(one.n)) > 1]


def test_every_head_is_gathered_behind_the_attention_of_another() -> None:
    shard = shard_of(4)
    mine = {one.name: one for one in layers.layer(shard, moe=False)[1] if one.group == "cp" and float(np.max(one.n)) > 1}
    other = dataclasses.replace(shard, trainer=dataclasses.replace(shard.trainer, terms=()))
    plain = {one.name: one for one in layers.layer(other, moe=False)[1] if one.group == "cp"}
    assert set(mine) == {"kv_gather", "kv_gather_again", "kv_scatter_gradient"}
    for name, one in mine.items():
        assert float(np.max(one.count)) == 2 * shard.model.num_kv_heads  # keys and values apart
        assert float(np.max(one.size * one.count)) == pytest.approx(float(np.max(plain[name].size)))
    assert mine["kv_gather"].overlap == "cp" in shard.trainer.traffic.overlap and not mine["kv_scatter_gradient"].overlap
    head = 2 * shard.model.head_dim * shard.element
    (term,) = shard.trainer.terms
    assert float(np.max(term.attention_gradient_bytes(shard))) == 3 * shard.workload.sequence_length * head
