"""Cut and shares of mixed layouts against every other choice of small cases."""

import itertools

import numpy as np
import pytest

from planner.errors import PlannerError
from planner.mixed.cut import best_cut
from planner.mixed.shares import Replicas, longest, water_fill


def compositions(total: int, parts: int, least: int):
    for cuts in itertools.product(range(least, total + 1), repeat=parts - 1):
        last = total - sum(cuts)
        if last >= least:
            yield (*cuts, last)


@pytest.mark.parametrize("seed", range(12))
def test_the_cut_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, p, m = int(rng.integers(4, 9)), int(rng.integers(1, 5)), int(rng.integers(1, 12))
    costs = []
    for _ in range(p):
        # any costs at all: not even growing with the layers, some that do not fit
        table = rng.uniform(0.1, 1.0, (layers + 1, 1)) * np.arange(layers + 1) + rng.uniform(0, 0.5, (layers + 1, layers + 1))
        costs.append(np.where(np.arange(layers + 1) > rng.integers(2, layers + 2), np.inf, table))
    every = []
    for cut in compositions(layers, p, 0):
        starts = np.concatenate([[0], np.cumsum(cut)])
        taken = [float(costs[j][starts[j], n]) for j, n in enumerate(cut)]
        every.append(sum(taken) + (m - 1) * max(taken) if np.isfinite(max(taken)) else np.inf)
    found = best_cut(costs, m)
    if not np.isfinite(min(every)):
        assert found is None
    else:
        assert found is not None and sum(found.layers) == layers
        assert found.seconds(m) == pytest.approx(min(every), rel=1e-12)


def test_the_cut_by_hand() -> None:
    """A GPU twice as fast takes twice the layers; with a card for three layers only, what fits."""
    n = np.arange(13.0)
    slow, fast = np.tile(2.0 * n, (13, 1)), np.tile(n, (13, 1))
    assert best_cut([slow, fast], 100).layers == (4, 8)
    assert best_cut([np.where(n > 3, np.inf, slow), fast], 100).layers == (3, 9)
    assert best_cut([np.where(n > 3, np.inf, slow), np.where(n > 8, np.inf, fast)], 100) is None
    assert best_cut([slow, fast], 1).layers == (0, 12)  # one microbatch: nothing runs at the same time


@pytest.mark.parametrize("seed", range(12))
def test_shares_are_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [
        Replicas(fixed=float(rng.uniform(0, 3)), each=float(rng.uniform(0.2, 3)), count=int(rng.integers(1, 3)))
        for _ in range(int(rng.integers(1, 3)))
    ]
    count = sum(one.count for one in groups)
    total = int(rng.integers(count, count + 9))
    flat = [one for one in groups for _ in range(one.count)]
    best = min(
        max(one.fixed + m * one.each for one, m in zip(flat, shares, strict=True)) for shares in compositions(total, count, 1)
    )
    found = water_fill(groups, total)
    assert sum(map(sum, found)) == total and min(min(some) for some in found) >= 1
    assert longest(groups, found) == pytest.approx(best, rel=1e-12)


def test_shares_of_many_replicas() -> None:
    groups = [Replicas(fixed=1.0, each=1.0, count=700), Replicas(fixed=1.0, each=3.0, count=300)]
    found = water_fill(groups, 8000)
    assert sum(map(sum, found)) == 8000 and {*found[0]} == {10, 11} and {*found[1]} == {3}
    assert longest(groups, found) == 12.0
    with pytest.raises(PlannerError, match="999 microbatches do not reach for 1000 replicas"):
        water_fill(groups, 999)
