"""Cluster files: what is read, what follows from it, and every sentence about a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sentences import sentence

from planner.cluster_file import ClusterFile, read_cluster
from planner.schema import read

EXAMPLE: dict[str, Any] = {
    "nodes": [
        {
            "kind": "a100",
            "hardware": "a100-sxm-80gb",
            "count": 4,
            "gpus": 8,
            "site": "us-east",
            "price": "12 USD/h",
            "mtbf": "900 h",
        },
        {"kind": "t4", "hardware": "t4", "count": 2, "gpus": 4, "site": "us-west", "slowdown": {"node-5": 1.4}},
    ],
    "links": [
        {
            "between": ["us-east", "us-west"],
            "bandwidth": "5 Gb/s",
            "latency": "35 ms",
            "flows": 8,
            "price": "0.02 USD/GB",
        }
    ],
    "storage": {"read": "20 GB/s", "write": "10 GB/s", "per_node": "2 GB/s"},
    "spares": 1,
}


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The example with one value replaced."""
    data = yaml.safe_load(yaml.safe_dump(EXAMPLE))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


def test_a_cluster_and_what_follows_from_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(EXAMPLE))
    found = read_cluster(path)
    assert (found.num_nodes, found.num_gpus, found.sites) == (6, 40, ("us-east", "us-west"))
    assert found.names_of("t4") == ("node-4", "node-5")
    assert found.slowdowns("t4") == (1.0, 1.4) and found.slowdowns("a100") == (1.0,) * 4
    link = found.link("t4", "a100")
    assert link is not None and link.bandwidth == 5e9 / 8 and link.price == pytest.approx(2e-11)
    assert found.node_kind("a100").usd_per_hour() == 1.5 and found.node_kind("a100").mtbf == 900 * 3600
    assert found.uniform is None
    assert found.without("t4").uniform == found.node_kind("a100") and found.without("t4").links == ()
    path.write_text(yaml.safe_dump(found.to_dict()))
    assert read_cluster(path) == found


def test_gpus_of_a_node_change_the_profile_of_the_kind() -> None:
    four = read(ClusterFile, {"nodes": [{"kind": "a", "hardware": "h100-sxm", "count": 2, "gpus": 4}]}, "c").nodes[0]
    assert four.profile.gpus_per_node == four.profile.scale_up_domain == 4 and four.num_gpus == 8
    rack = read(ClusterFile, {"nodes": [{"kind": "a", "hardware": "gb200-nvl72", "count": 2, "gpus": 2}]}, "c").nodes[0]
    assert rack.profile.scale_up_domain == 72 and rack.profile.gpus_per_node == 2


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("nodes",), [], "nodes is empty"),
        (("nodes", 1, "kind"), "a100", "stands twice"),
        (("nodes", 1, "site"), "a100", "names a kind and a site"),
        (("nodes", 1, "slowdown"), {"node-9": 2.0}, "its nodes are node-4 or node-5"),
        (("nodes", 1, "slowdown"), 0.0, "a number from 0.5 to 100"),
        (("nodes", 0, "count"), 0, "count is 0"),
        (("nodes", 0, "price"), "12 EUR", "write it like 2.69 USD/h"),
        (("links", 0, "between"), ["us-east", "mars"], "a link is between 'mars'"),
        (("links", 0, "between"), ["us-east", "us-east"], "and itself"),
        (("links", 0, "bandwidth"), "0 Gb/s", "has no bandwidth"),
        (("links", 0, "price"), "0.02", "write it like 0.02 USD/GB"),
        (("storage", "write"), "fast", "write it like 400 Gb/s"),
        (("spares",), -1, "spares is -1"),
        (("speed",), 1, "unknown key 'speed'; nearest: spares"),
    ],
)
def test_mistakes_are_said(path: tuple[str | int, ...], value: Any, said: str) -> None:
    assert said in sentence(read, ClusterFile, changed(path, value), "cluster.yaml")


def test_a_kind_that_is_not_there_is_named() -> None:
    found = read(ClusterFile, EXAMPLE, "cluster.yaml")
    for ask in (found.node_kind, found.names_of, found.without):
        assert "no kind 'h100'; it has a100 or t4" in sentence(ask, "h100")
    assert "no node is left" in sentence(found.without("t4").without, "a100")
