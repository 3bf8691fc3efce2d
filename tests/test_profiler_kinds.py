"""plan profile on machines that differ: each kind measured, the link between them, a cluster file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.cluster_file import read_cluster
from planner.commands.main import main
from planner.errors import PlannerError
from planner.lab.launch.place import Place

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
pytestmark = needs_torch


def here(*ranks: tuple[str, int, str]) -> list[dict[str, Any]]:
    """What ranks say of themselves: host, node, device."""
    return [{"host": host, "node": node, "name": name, "gpu": ""} for host, node, name in ranks]


def test_kinds_are_runs_of_their_own() -> None:
    from planner.lab.profile.kinds import kinds_of, own_place, profile_of_kind

    everyone = here(
        ("a", 0, "NVIDIA A100-SXM4-80GB"), ("a", 0, "NVIDIA A100-SXM4-80GB"), ("b", 1, "Tesla T4"),
        ("c", 2, "NVIDIA A100-SXM4-80GB"),
        ("c", 2, "NVIDIA A100-SXM4-80GB"),
    )  # fmt: skip
    kinds = kinds_of(everyone)
    assert [(one.name, one.ranks, one.nodes, one.local) for one in kinds] == [
        ("a100-sxm-80gb", (0, 1, 3, 4), 2, 2), ("t4", (2,), 1, 1),
    ]  # fmt: skip
    place = Place(rank=3, world=5, local_rank=0, node=2, address="x", port=1, agent_store=False)
    mine = own_place(place, kinds[0], everyone)
    assert (mine.rank, mine.world, mine.node, mine.part, mine.agent_store) == (2, 4, 1, "-a100-sxm-80gb", True)
    assert profile_of_kind("runs/my.yaml", "t4") == "runs/my-t4.yaml"
    odd = kinds_of(here(("a", 0, "Some / Card"), ("b", 1, "some card"), ("c", 2, "!!")))
    assert [one.name for one in odd] == ["some-card", "some-card-2", "device"]


def test_what_cannot_be_joined_is_said() -> None:
    from planner.lab.profile.kinds import kinds_of

    with pytest.raises(PlannerError, match="choose with CUDA_VISIBLE_DEVICES"):
        kinds_of(here(("a", 0, "NVIDIA A100-SXM4-80GB"), ("a", 0, "Tesla T4")))
    with pytest.raises(PlannerError, match="have different numbers of ranks; start as many on each"):
        kinds_of(here(("a", 0, "Tesla T4"), ("a", 0, "Tesla T4"), ("b", 1, "Tesla T4"), ("c", 2, "NVIDIA L4")))


@pytest.mark.proof
def test_a_profile_of_two_kinds_is_a_cluster_file(tmp_path: Path) -> None:
    """Three gloo processes: two on a node of one device, one on a node of another. What lies between them takes 50 ms more per
    message, which is the link's latency and no part of its bandwidth."""
    from profiler_kinds_ranks import as_kinds
    from profiler_ranks import together

    output = tmp_path / "mine.yaml"
    names = ("Intel Fast 1", "Intel Fast 1", "Intel Slow 2")
    said = together(3, as_kinds, names, str(output), 0.05)
    assert said[1] is None and said[2] is None and isinstance(said[0], tuple), said
    cluster = read_cluster(output)
    assert cluster.to_dict() == said[0][0]
    assert [(one.kind, one.count, one.gpus_per_node) for one in cluster.nodes] == [
        ("intel-fast-1", 1, 2),
        ("intel-slow-2", 1, 1),
    ]
    for one in cluster.nodes:
        assert one.profile.device in names and one.profile.measured["gemm"].startswith("measured")
    assert cluster.nodes[0].profile.measured["scale_up"] == "measured"
    (link,) = cluster.links
    assert link.between == ("intel-fast-1", "intel-slow-2") and link.per_node
    assert 0.05 < link.latency < 0.08 and link.bandwidth > 1e7
    done = CliRunner().invoke(main, ["hardware", "show", str(output)])
    assert done.exit_code == 0 and "2 nodes, 3 GPUs, 1 site" in done.output
