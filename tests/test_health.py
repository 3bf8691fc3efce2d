"""The health of a cluster: slow members by bisection, matrices of pairs and rails, and what is said of them."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from planner.lab.profile.bisection import Group, find_slow, matches
from planner.lab.profile.health_words import draw, sentences, tables


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


def test_one_late_reading_makes_nobody_slow() -> None:
    """A single pair of the last rounds reads late, as on a host that something else kept busy."""

    class Disturbed(MadeCluster):
        def __call__(self, groups: Sequence[Group]) -> list[float]:
            late = [(1, 3)] if self.rounds == 2 else []
            return [pace * (0.4 if group in late else 1.0) for group, pace in zip(groups, super().__call__(groups), strict=True)]

    made = Disturbed({2: 0.5}, 0.0)
    found = find_slow(4, made)
    assert [one.member for one in found.slow] == [2] and not found.pairs
    assert found.rounds[2] == [((0, 2), 200e9), ((1, 3), 160e9)] and found.rounds[3] == [((1, 2), 200e9), ((0, 3), 400e9)]


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


# ------------------------------------------------------------------------------------------------ what is said


def a_check(**more: Any) -> dict[str, Any]:
    """Of four healthy nodes of two GPUs."""
    hosts = ["a", "b", "c", "d"]
    inside = [[None, 200e9], [200e9, None]]
    return {
        "device": "NVIDIA H100 80GB HBM3", "hosts": hosts, "ranks_per_node": 2,
        "product": {"over_median": 1.01, "slowest": 1, "host": "a"},
        "inside": [inside for _ in hosts], "rails": [[48e9, 49e9] for _ in hosts],
        "between": [[None if a == b else 97e9 for b in range(4)] for a in range(4)],
        "bisection": {
            "members": "nodes", "healthy": 380e9, "tolerance": 0.1, "slow": [], "links": [], "undecided": [],
            "rounds": [
                [{"members": [0, 1, 2, 3], "bandwidth": 300e9}],
                [{"members": [0, 1], "bandwidth": 380e9}, {"members": [2, 3], "bandwidth": 150e9}],
            ],
        },
        **more,
    }  # fmt: skip


def slow_node(**more: Any) -> dict[str, Any]:
    healthy = a_check()
    return {**healthy, "bisection": {**healthy["bisection"], "slow": [{"member": 2, "share": 0.4, "path": []}]}, **more}


def test_a_sentence_names_what_is_slow_by_how_much_and_where_to_look() -> None:
    assert sentences(a_check()) == []
    rails = [[48e9, 49e9], [48e9, 49e9], [48e9, 20e9], [48e9, 49e9]]
    [said] = sentences(slow_node(rails=rails))
    assert said.startswith("node 2 (c) is slow: its all-reduce with a healthy one reaches 40% of 353.9 GiB/s")
    assert "it is the NIC of its GPU 1: look at its NICs (ibstat" in said
    [said] = sentences(slow_node(rails=[[48e9, 49e9], [48e9, 49e9], [18e9, 20e9], [48e9, 49e9]]))
    assert "and at PCIe switches and ACS" in said
    [said] = sentences(slow_node())
    assert "its NICs are as fast as others one by one: look at its clock, power limit and heat" in said
    [said] = sentences(a_check(rails=rails))
    assert said.startswith("the NIC of GPU 1 of node 2 (c) moves 18.63 GiB/s, 42% of the median: look at its NICs")
    inside = [[[None, 200e9], [200e9, None]] for _ in range(4)]
    inside[3][0][1] = 90e9
    [said] = sentences(a_check(inside=inside))
    assert said.startswith("from rank 6 to 7 on d: 83.82 GiB/s, 45% of others: look at nvidia-smi nvlink --status")
    [said] = sentences(a_check(product={"over_median": 1.3, "slowest": 5, "host": "c"}))
    assert said.startswith("rank 5 (c) computes 30% longer than the median: look at its clock")


def test_tables_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from rich.console import Console

    out = Console(width=120, record=True, file=io.StringIO())
    for table in tables(a_check()):
        out.print(table)
    text = out.export_text()
    assert "From GPU to GPU on a, GB/s" in text and "Each NIC, by GPU, GB/s" in text and "2 of 2" in text
    assert draw(a_check(), tmp_path / "x.png") and (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
