"""Virtual stages whose gathered weights a pipeline drops and gathers again: how often, and what of it passes wait for."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fresh import fresh

from planner.cost.price.data_parallel import data_parallel
from planner.hardware import Slowdown
from planner.layout import Layout, Schedule
from planner.trainer import Trainer, load_trainer

LOWERED = """
import json, sys
from torch.distributed.pipelining import schedules

def gathers(p, v, m, rank):
    rounds = max(1, m // p)
    each = m // rounds
    warm = min((v - 1) * each + 2 * (p - 1 - rank), m * v)
    forward = lambda step: step // each % v * p + rank
    backward = lambda step: (v - 1 - (step - warm) // each % v) * p + rank
    order = schedules._get_1f1b_rank_ops(v, p, warm, m * v - warm, warm, rank, forward, backward)
    lowered = schedules._add_unshard_reshard(order)
    return sum(one.computation_type == schedules.UNSHARD for one in lowered)

print("FOUND", json.dumps([[gathers(p, v, m, rank) for rank in (0, p - 1)] for p, v, m in json.loads(sys.argv[1])]))
"""
CASES = [(2, 4, 8), (2, 10, 16), (4, 8, 12), (4, 8, 4), (4, 5, 16), (8, 4, 32), (2, 4, 2)]


def torchtitan(held: int = 3) -> Trainer:
    trainer = load_trainer("torchtitan")
    [term] = trainer.terms
    return dataclasses.replace(trainer, terms=(dataclasses.replace(term, gathered_virtual_stages=held),))


def layout(p: int, v: int, m: int, **more: int) -> Layout:
    said = {"pp": p, "vpp": v, "num_microbatches": m, "dp": 4, "zero": 2, "schedule": int(Schedule.INTERLEAVED), **more}
    return Layout.stack([Layout(**said)])


def again(p: int, v: int, m: int, **more: int) -> float:
    return float(np.ravel(load_trainer("torchtitan").terms[0].gathered_again(layout(p, v, m, **more)))[0])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed")
def test_how_often_is_what_torch_lowers() -> None:
    """Counted in torch's own lowered schedules, on the first and on the last rank."""
    [line] = [line for line in fresh(LOWERED, json.dumps(CASES)).splitlines() if line.startswith("FOUND")]
    for (p, v, m), (first, last) in zip(CASES, json.loads(line.removeprefix("FOUND")), strict=True):
        assert again(p, v, m) == pytest.approx(first / v - 1.0, abs=1e-12), (p, v, m)
        assert last == first - (2 if m > p else 0)


def test_few_virtual_stages_other_schedules_and_old_versions_gather_once() -> None:
    assert again(2, 4, 8) == pytest.approx(11 / 4)  # 2 x 4 rounds x 1 beyond three, and 7, of which 4 are the first
    assert again(2, 3, 8) == again(2, 2, 8) == again(4, 1, 16) == 0.0
    assert again(2, 4, 8, schedule=int(Schedule.ONE_F_ONE_B)) == 0.0
    old = load_trainer("torchtitan@0.2").terms
    assert all(float(np.max(np.ravel(one.gathered_again(layout(2, 4, 8))))) == 0.0 for one in old)


@pytest.mark.parametrize(
    ("passes", "exposed"), [(0.0, 11 / 4 * 8.0), (4.0, 11 / 4 * 2.0), (8.0, 0.0), (6.0, 11 / 4 * 1.0)]
)
def test_half_hides_behind_p_pairs_of_passes_and_half_behind_one(passes: float, exposed: float) -> None:
    """8 s to gather 4 virtual stages, 2 s each, on 2 ranks: with 1 s for both passes of one, half of the gathers find 2 s to hide
    behind and half 1 s."""

    def seconds(trainer: Trainer, **more: int) -> tuple[float, float]:
        one = layout(2, 4, 8, **more)
        values = {"reduce": 0.0, "gather": 8.0, "reduced_last": 0.0, "gathered_first": 0.0, "reference": 0.0, "copies": 0.0}
        traffic: Any = SimpleNamespace(**{name: np.full((3, 1), value) for name, value in values.items()})
        half = np.full((3, 1), passes / 2.0)
        found = data_parallel(trainer, one, traffic, half, half, Slowdown(compute=1.0, communication=1.0))
        return float(found[0][0, 0]), float(found[1][0, 0])

    (once, hidden_once), (found, hidden) = seconds(torchtitan(0)), seconds(torchtitan(3))
    assert found - once == pytest.approx(exposed, abs=1e-12)
    assert found + hidden - once - hidden_once == pytest.approx(11 / 4 * 8.0)
    assert seconds(torchtitan(3), zero=0) == seconds(torchtitan(0), zero=0)
    assert seconds(torchtitan(3), zero=3) == seconds(torchtitan(0), zero=3)
