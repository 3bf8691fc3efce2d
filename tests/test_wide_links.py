"""Long links: the window law, round-trip times from the map, collectives between sites, and the shipped measurements."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from planner import library
from planner.cluster_file import ClusterFile, Link, read_cluster
from planner.errors import PlannerError
from planner.mixed import published, region_links, wide_links
from planner.mixed.published_links import answers
from planner.mixed.region_links import great_circle, machine_of, region_bandwidth, region_of, round_trip

MIB = 2**20
CLUSTER = """
nodes:
- {kind: a100, hardware: a100-sxm-80gb, count: 4, site: east}
- {kind: t4, hardware: t4, count: 2, site: west}
- {kind: v100, hardware: v100-sxm2-16gb, count: 2, site: north}
links:
- {between: [east, west], bandwidth: 5 Gb/s, latency: 35 ms, flows: 8, window: 6 MiB}
- {between: [a100, v100], bandwidth: 1 Gb/s, latency: 10 ms}
- {between: [west, north], bandwidth: 2 Gb/s, latency: 20 ms}
"""


@pytest.fixture()
def cluster(tmp_path: Path) -> ClusterFile:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return read_cluster(file)


def test_one_connection_obeys_its_window_and_several_multiply_it() -> None:
    assert wide_links.path_bandwidth(1e9, 1, 6 * MIB, 0.070) == pytest.approx(6 * MIB / 0.070)
    assert wide_links.path_bandwidth(1e9, 1, 6 * MIB, 0.0) == pytest.approx(1e9)
    assert wide_links.path_bandwidth(1e9, 8, 6 * MIB, 0.070) == pytest.approx(8 * 6 * MIB / 0.070)
    assert wide_links.path_bandwidth(1e8, 8, 6 * MIB, 0.070) == pytest.approx(1e8)
    columns = wide_links.path_bandwidth(1e9, np.array([1, 8, 64]), 6 * MIB, 0.070)
    assert columns == pytest.approx([wide_links.path_bandwidth(1e9, k, 6 * MIB, 0.070) for k in (1, 8, 64)])
    falling = wide_links.path_bandwidth(1e9, 1, MIB, np.linspace(0, 0.3, 50))
    assert all(b <= a for a, b in pairwise(falling))


def test_a_link_is_shared_or_each_nodes_own(cluster: ClusterFile) -> None:
    link = wide_links.site_link(cluster, "east", "west")
    assert link.speed() == pytest.approx(5e9 / 8)  # eight windows would allow 719 MB/s
    own = replace(link, per_node=True)
    assert own.speed(4) == pytest.approx(4 * 5e9 / 8)
    one = replace(link, flows=1)
    assert one.speed() == pytest.approx(6 * MIB / 0.070)
    assert one.speed(2) == pytest.approx(2 * 6 * MIB / 0.070)
    assert wide_links.transfer_time(1e9, link) == pytest.approx(0.035 + 1.6)


def test_collectives_by_hand() -> None:
    assert wide_links.ring_all_reduce_time(1e9, 4, 1e8, 0.01) == pytest.approx(1.5 * 10 + 6 * 0.01)
    link = Link(between=("a", "b"), bandwidth=1e8, latency=0.01)
    assert wide_links.flat_all_reduce_time(1e9, 16, (link, link)) == pytest.approx(2 * 15 / 16 * (10 + 0.02))
    assert wide_links.flat_all_reduce_time(1e9, 2, (link, link)) == pytest.approx(
        wide_links.ring_all_reduce_time(1e9, 2, 1e8, 0.01)
    )


def test_links_of_sites_and_the_ring_over_them(cluster: ClusterFile) -> None:
    assert wide_links.site_link(cluster, "north", "east").bandwidth == 1e9 / 8  # of the kind that stands there
    ring = wide_links.best_ring(cluster, cluster.sites)
    assert sorted(one.latency for one in ring) == [0.010, 0.020, 0.035]
    assert wide_links.best_ring(cluster, ("east",)) == ()
    without = replace(cluster, links=cluster.links[:1])
    with pytest.raises(PlannerError, match="no link between .* and north"):
        wide_links.best_ring(without, without.sites)


def test_the_map() -> None:
    paris, london = (48.86, 2.35), (51.51, -0.13)
    assert great_circle(paris, london) == pytest.approx(344e3, rel=0.01)
    assert region_of("us-central1-a") is region_of("us-central1") is region_of("Iowa")
    assert region_of("us-east-1a").place == "Ashburn" and region_of("oregon").name == "us-west-2"
    assert round_trip("us-central1-a", "us-central1-f") == 0.0
    assert round_trip("tokyo", "london") == round_trip("london", "tokyo")
    names = [one.name for one in region_links.wide_links().regions]
    straight = 2 * region_links.GROUP_INDEX / region_links.LIGHT
    for a in names:  # every pair is joined, and no path is shorter than the great circle
        for b in names[::7]:
            assert round_trip(a, b) >= 0.99 * straight * great_circle(region_of(a).at, region_of(b).at)
    with pytest.raises(PlannerError, match="no cloud region is called 'us-estern-9'; known: us-east"):
        region_of("us-estern-9")


def test_the_least_limit_binds() -> None:
    machine = machine_of("gcp", "a100-sxm-40gb", 1)
    assert region_bandwidth(machine, 1, 0.035) == pytest.approx(4 * 6 * MIB / 0.035)
    assert region_bandwidth(machine_of("gcp", "a100-sxm-40gb", 4), 4, 0.035) == pytest.approx(1.12e9)
    assert region_bandwidth(machine, 1, 0.001) == pytest.approx(1.12e9)
    v100 = machine_of("aws", "v100-sxm2-16gb", 1)
    assert region_bandwidth(v100, 1, 0.001) == pytest.approx(5e9 / 8)  # documented, below 32 vCPUs
    with pytest.raises(PlannerError, match=r"no machine of gcp with 3 x t4 is known \(known sizes: 1, 2 or 4\)"):
        machine_of("gcp", "t4", 3)
    with pytest.raises(PlannerError, match="nothing is known of transfers between regions of azure"):
        region_links.pair_bandwidth("azure", 0.1)


@pytest.mark.parametrize(("name", "bound"), [("dtfm-aws-links", 0.05), ("sailor-gcp-links", 0.05)])
def test_published_links_are_met(name: str, bound: float) -> None:
    file = library.profiles_directory() / "beyond-runs" / "geo" / f"{name}.yaml"
    document = library.read_yaml(file)
    rows = published.answers(document, file.name)  # as plan accuracy asks
    assert [one.id for one in rows] == [one["id"] for one in document["rows"]]
    assert all(one.status == "predicted" for one in rows)
    errors = [abs(one.quantities["gb_per_s"].error) for one in rows]
    assert np.median(errors) <= bound
    delays = [abs(one.quantities["delay_ms"].error) for one in rows if "delay_ms" in one.quantities]
    assert not delays or np.median(delays) <= 0.05


def test_rows_that_cannot_be_answered_say_why() -> None:
    rows = [
        {"id": "a", "from": "atlantis", "to": "oregon", "measured": {"gb_per_s": 1.0}},
        {"id": "b", "from": "oregon", "to": "ohio", "measured": {}},
        {"id": "c", "from": "oregon", "measured": {"gb_per_s": 1.0}},
        {"id": "d", "from": "us-east1", "to": "us-west1", "measured": {"gb_per_s": 0.5}},
        {"id": "e", "from": "oregon", "to": "oregon", "measured": {"gb_per_s": 0.5}},
    ]
    found = answers({"source": {"id": "x"}, "topic": "geo", "rows": rows}, "x.yaml")
    assert [one.status for one in found] == ["refused", "not run", "refused", "refused", "refused"]
    assert "no cloud region is called 'atlantis'" in found[0].reason
    assert "between which places" in found[2].reason and "type of machine" in found[3].reason
