"""The health of a cluster: slow members by bisection, matrices of pairs and rails, and what is said of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from planner.lab.profile.bisection import Group, find_slow, matches


class MadeCluster:
    """Members of which a group is as fast as its slowest, with noise."""

    def __init__(self, slow: dict[int, float], noise: float = 0.02, seed: int = 1, links: tuple[Group, ...] = ()) -> None:
        self.slow, self.noise, self.links, self.rounds = slow, noise, links, 0
        self.random = random.Random(seed)

    def __call__(self, groups: Sequence[Group]) -> list[float]:
        self.rounds += 1
        members = [one for group in groups for one in group]
        assert len(members) == len(set(members)), "groups of a round run at once"
        return [self.pace(group) * self.random.lognormvariate(0.0, self.noise) for group in groups]

    def pace(self, group: Group) -> float:
        pace = 400e9 * min(self.slow.get(one, 1.0) for one in group)
        return pace * (0.5 if any(set(link) <= set(group) and len(group) == 2 for link in self.links) else 1.0)


@pytest.mark.parametrize("count", [4, 5, 7, 16, 33, 64, 512])
def test_slow_members_are_found_in_rounds_of_the_logarithm(count: int) -> None:
    wrong = 0
    for seed in range(20):
        chosen = random.Random(seed).sample(range(count), max(1, min(4, count // 8)))
        slow = {one: random.Random(seed + one).uniform(0.3, 0.75) for one in chosen}
        made = MadeCluster(slow, seed=seed)
        found = find_slow(count, made)
        wrong += {one.member for one in found.slow} != set(slow)
        assert made.rounds <= math.ceil(math.log2(count)) + 3
        assert all(one.share == pytest.approx(slow.get(one.member, 9.0), rel=0.15) for one in found.slow)
    assert wrong == 0


def test_a_healthy_cluster_has_no_slow_member() -> None:
    false = sum(bool(found.slow or found.pairs) for seed in range(100) for found in [find_slow(32, MadeCluster({}, 0.03, seed))])
    assert false <= 2, "of a hundred clusters whose measurements scatter by 3 %"
    assert find_slow(1, MadeCluster({})).rounds == []


def test_a_slow_half_is_followed_down_to_its_node() -> None:
    [slow] = find_slow(16, MadeCluster({5: 0.5}, 0.0)).slow
    assert slow.member == 5 and slow.share == 0.5
    assert slow.path == ((16, 1.0), (8, 0.5), (4, 0.5), (2, 0.5))


def test_what_cannot_be_decided_is_said() -> None:
    found = find_slow(3, MadeCluster({1: 0.4}, 0.0))
    assert not found.slow and not found.undecided, "one group of three has nothing beside it"
    link = find_slow(8, MadeCluster({}, 0.0, links=((2, 3),)))
    assert link.pairs == [(2, 3)] and not link.slow, "slow together, and neither with others"
    both = find_slow(8, MadeCluster({4: 0.5, 5: 0.6}, 0.0))
    assert [one.member for one in both.slow] == [4, 5], "both of one pair, the slowest first"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 16])
def test_everyone_meets_everyone_once(count: int) -> None:
    rounds = matches(count)
    assert sorted(pair for one in rounds for pair in one) == list(combinations(range(count), 2))
    assert all(len({member for pair in one for member in pair}) == 2 * len(one) for one in rounds)
    assert len(rounds) == (0 if count == 1 else count - 1 + count % 2)
