"""Sites: formulas against papers and by hand, and the report of what crosses between the sites of a layout."""

import io
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.cost.parameters import total_parameters
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.mixed import sites
from planner.mixed.known_links import changed_link, linked, read_outer
from planner.mixed.local_search import search_local, shared_out
from planner.mixed.local_updates import parameters_of, price_layout
from planner.mixed.mixed_axes import MixedPins
from planner.mixed.mixed_estimate import estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Outer, Pipeline, Stage
from planner.mixed.region_links import round_trip
from planner.mixed.site_report import site_report
from planner.model import load_model
from planner.questions.mixed.show_sites import print_sites

EAST = NodeKind(kind="a100", hardware="a100-sxm-80gb", count=2, site="east")
WEST = NodeKind(kind="h100", hardware="h100-sxm", count=2, site="west")
WAN = Link(between=("east", "west"), bandwidth=5e9 / 8, latency=0.035, price=0.02e-9)


def job_over(link: Link = WAN, batch: int = 32) -> MixedJob:
    said = Request(model="llama-8b", num_gpus=8, hardware="h100-sxm", trainer="megatron")
    found = resolve(replace(said, global_batch_size=batch, sequence_length=4096)).job
    cluster = ClusterFile(nodes=(EAST, WEST), links=(link,))
    return MixedJob(workload=found.workload, cluster=cluster, trainers={"a100": found.trainer, "h100": found.trainer})


def whole(kind: str, microbatches: int) -> Pipeline:
    return Pipeline(stages=(Stage(kind=kind, layers=32, tp=8),), count=2, num_microbatches=microbatches)


REPLICAS = MixedLayout(pipelines=(whole("a100", 5), whole("h100", 11)))
REPLICAS_OF_64 = MixedLayout(pipelines=(whole("a100", 10), whole("h100", 22)))
SPANNING = MixedLayout(
    pipelines=(
        Pipeline(stages=(Stage(kind="a100", layers=12, tp=8), Stage(kind="h100", layers=20, tp=8)), count=2, num_microbatches=16),
    )
)


def test_the_utilisation_of_intellect_1() -> None:
    """103, 382 and 469 s of averaging per 38 min of inner steps. [arXiv 2412.01152]"""
    found = sites.utilisation(1, 38 * 60.0, np.array([103.0, 382.0, 469.0]))
    assert found == pytest.approx([0.957, 0.856, 0.829], abs=0.001)
    assert float(sites.utilisation(1, 38 * 60.0, 103.0)) == found[0]
    rising = sites.utilisation(np.array([1, 10, 100]), 1.0, 5.0)
    assert all(a < b for a, b in pairwise(rising))


def test_streaming_hides_a_fragment_behind_the_steps_that_it_may_take() -> None:
    average = 10 * 4 * 0.5  # ten fragments, each within four steps
    assert sites.streaming_utilisation(100, 0.5, average, 10, 4) == 1.0
    assert sites.streaming_utilisation(100, 0.5, 1.5 * average, 10, 4) == pytest.approx(50 / (50 + 10 * (0.15 * average - 2)))
    assert sites.streaming_utilisation(100, 0.5, 1.5 * average, 10, 4) > sites.utilisation(100, 0.5, 1.5 * average)


def test_microbatches_in_flight_hide_a_hand_over() -> None:
    assert sites.extra_in_flight(0.035, 0.015, 0.1) == 1
    assert sites.extra_in_flight(0.035, 0.015, 0.02) == 5
    taus, hops, wires = [0.1] * 4, [0.0, 0.3, 0.0], [0.0, 0.05, 0.0]
    assert sites.pipeline_pace(taus, [0.0] * 3, [0.0] * 3) == pytest.approx(0.1)
    assert sites.pipeline_pace(taus, hops, wires) == pytest.approx((0.3 + 0.6) / 3)  # stage 1 has 3 in flight
    extra = sites.extra_in_flight(0.25, 0.05, 0.1)
    assert extra == 6 and sites.pipeline_pace(taus, hops, wires, extra) == pytest.approx(0.1)
    assert sites.pipeline_pace(taus, hops, wires, extra - 1) > 0.1
    assert sites.pipeline_pace(taus, hops, [0.0, 0.2, 0.0], extra) == pytest.approx(0.2)  # the wire itself
    assert sites.pipeline_seconds(taus, hops, wires, 8, extra) == pytest.approx(0.4 + 0.6 + 7 * 0.1)


def test_compression_by_hand() -> None:
    model = load_model("llama-8b")
    n = total_parameters(model)
    assert sum(a * b * count for a, b, count in sites.matrices(model)) == pytest.approx(n, rel=1e-3)
    assert [sites.compressed(model, n, name).wire / n for name in ("none", "fp16", "int8")] == pytest.approx([4.0, 2.0, 1.0])
    rank = sites.compressed(model, n, "powersgd:4")
    query = 4 * 4 * (4096 + 4096) * 32  # bytes of all query projections
    assert query < rank.wire < 0.01 * n
    assert sites.compressed(model, n, "powersgd:8").wire == pytest.approx(2 * rank.wire)
    assert sites.compressed(model, n, "powersgd:100000").wire <= 4.0 * n * 1.001
    assert sites.kernel_seconds(sites.compressed(model, n, "fp16"), 8, 2e12, 1e14) == pytest.approx(12 * n / 2e12 / 8)
    for name in ("zip", "fp16:4", "powersgd:x", "powersgd:0"):
        with pytest.raises(PlannerError, match="no compression is called|it must be at least 1"):
            sites.compressed(model, n, name)


def test_replicas_in_two_sites_average_over_the_link() -> None:
    job = job_over()
    estimate = estimate_mixed(job, REPLICAS)
    found = site_report(job, REPLICAS, estimate)
    assert found is not None and found.sites == ("east", "west")
    [one] = found.traffic
    width = job.trainer.traffic.gradient_reduce_bytes
    sent = 2 * 3 / 4 * parameters_of(job) * width  # each way: a ring of four replicas
    assert (one.dimension, one.bytes_per_step) == ("data", pytest.approx(2 * sent))
    assert parameters_of(job) == pytest.approx(total_parameters(job.workload.model), rel=1e-9)
    assert one.seconds == pytest.approx(sent / WAN.bandwidth + 1.5 * WAN.latency)
    assert one.exposed <= estimate.time["data_communication"]
    assert one.usd_per_step == found.usd_per_step == pytest.approx(2 * sent * 0.02e-9)
    names = [one.name for one in found.reductions]
    assert names[:2] == ["one ring", "two levels"] and "two levels, powersgd:4" in names
    assert found.reductions[1].bytes_per_step == pytest.approx(2 / 3 * found.reductions[0].bytes_per_step)
    assert found.reductions[1].seconds < found.reductions[0].seconds
    assert not found.in_flight and "hybrid sharding of FSDP" in found.notes[0]


def test_local_updates_are_tabulated_by_interval_and_width() -> None:
    job = job_over()
    layout = replace(REPLICAS, outer=Outer(method="diloco", every=100, bits=8))
    found = site_report(job, layout, price_layout(job, layout))
    assert found is not None and found.outer is not None
    same = next(one for one in found.local if (one.method, one.every, one.bits) == ("diloco", 100, 8))
    assert same == found.outer
    assert same.average == pytest.approx(parameters_of(job) / WAN.bandwidth + 2 * WAN.latency)
    assert same.step == pytest.approx((100 * same.step * same.utilisation + same.average) / 100)
    by = {(one.every, one.bits): one.utilisation for one in found.local if one.method == "diloco"}
    assert by[500, 8] > by[100, 8] > by[10, 8] and by[100, 4] > by[100, 8] > by[100, 32]
    [one] = found.traffic
    assert one.exposed == pytest.approx(found.outer.step * (1 - found.outer.utilisation)) and one.dimension == "data"
    assert found.usd_per_step == found.outer.usd_per_step == pytest.approx(2 * parameters_of(job) / 100 * 0.02e-9)
    assert "planner does not predict the loss" in found.notes[-1]
    assert found.outer_memory == pytest.approx(8 * parameters_of(job))


def test_a_pipeline_over_two_sites() -> None:
    job = job_over()
    estimate = estimate_mixed(job, SPANNING)
    found = site_report(job, SPANNING, estimate)
    assert found is not None
    [one] = found.traffic
    assert one.dimension == "pipeline" and one.bytes_per_step == pytest.approx(2 * 32 * 4096 * 4096 * 2)
    [flight] = found.in_flight
    assert flight.blocking == pytest.approx(estimate.pipelines[0].seconds)
    assert flight.hidden < flight.overlapped < flight.blocking
    assert flight.extra > 0 and flight.memory > 0
    assert 0 < one.exposed < flight.blocking
    assert not found.local and "whole replica" in found.notes[0]
    with pytest.raises(PlannerError, match="local updates need a whole replica in each of two sites"):
        layout = replace(SPANNING, outer=Outer(method="diloco", every=100))
        site_report(job, layout, estimate)


def test_one_site_has_no_report() -> None:
    job = job_over()
    inside = replace(job, cluster=ClusterFile(nodes=(replace(EAST, site="west"), WEST)))
    assert site_report(inside, REPLICAS, estimate_mixed(inside, REPLICAS)) is None


def test_a_faster_or_cheaper_link_never_costs_more() -> None:
    def of(link: Link) -> tuple[float, float, float]:
        job = job_over(link)
        found = site_report(job, REPLICAS, estimate_mixed(job, REPLICAS))
        assert found is not None
        return found.traffic[0].seconds, found.usd_per_step, 1 - found.local[-1].utilisation

    base = of(WAN)
    for better in (replace(WAN, bandwidth=5e9), replace(WAN, latency=0.001), replace(WAN, price=0.0)):
        assert all(a <= b for a, b in zip(of(better), base, strict=True))


def test_the_tables_say_what_the_data_say() -> None:
    for layout in (replace(REPLICAS, outer=Outer(method="streaming_diloco", every=100, bits=4, fragments=10)), SPANNING):
        job = job_over()
        found = site_report(job, layout, estimate_mixed(job, layout))
        assert found is not None
        console = Console(width=160, file=io.StringIO())
        print_sites(console, found)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "Between the sites" in text and "east - west" in text and found.notes[0][:40] in text
        data = json.loads(json.dumps(found.to_dict()))
        assert data["traffic"][0]["bytes_per_step"] == found.traffic[0].bytes_per_step
        assert (data["outer"] is None) == (found.outer is None)


def test_regions_need_no_link() -> None:
    nodes = (replace(EAST, site="us-east-1"), replace(WEST, site="us-west-2"))
    cluster, notes = linked(ClusterFile(nodes=nodes))
    [link] = cluster.links
    assert link.latency == pytest.approx(round_trip("us-east-1", "us-west-2") / 2)
    assert link.flows == 8 * 16 and link.per_node and link.price == pytest.approx(0.02e-9)
    assert "us-east-1 - us-west-2: no link is given" in notes[0]
    assert linked(cluster) == (cluster, ())
    with pytest.raises(PlannerError, match="no link between east and west; add one to links"):
        linked(ClusterFile(nodes=(EAST, WEST)))


def test_options_are_read() -> None:
    cluster = ClusterFile(nodes=(EAST, WEST), links=(WAN,))
    assert changed_link(cluster, "west,east=2Gb/s").links == (replace(WAN, bandwidth=2.5e8),)
    assert changed_link(cluster, "east, west = 2 Gb/s @ 80 ms").links == (replace(WAN, bandwidth=2.5e8, latency=0.08),)
    assert changed_link(ClusterFile(nodes=(EAST, WEST)), "a100,h100=1GB/s").links[0].bandwidth == 1e9
    for text, why in (
        ("east=2Gb/s", "write it like"), ("east,moon=2Gb/s", "the cluster has"), ("east,west=2", "--link"),
        ("east,west=2Gb/s@", "write it like"),
    ):  # fmt: skip
        with pytest.raises(PlannerError, match=why):
            changed_link(cluster, text)
    assert read_outer("diloco:100:8") == Outer(method="diloco", every=100, bits=8)
    assert read_outer("streaming_diloco:100:4:24").fragments == 24
    for text in ("diloco", "diloco:x", "magic:100", "diloco:0", "diloco:1:99"):
        with pytest.raises(PlannerError, match="--outer"):
            read_outer(text)


def test_the_batch_is_shared_out_in_whole_parts() -> None:
    assert shared_out(64, [3.0, 1.0]) == [48, 16]
    assert shared_out(64, [1000.0, 1.0]) == [62, 2]
    assert shared_out(3, [1.0, 1.0]) in ([1, 2], [2, 1])
    assert sum(shared_out(96, [1.0, 2.0, 5.0])) == 96


@pytest.mark.proof
def test_local_updates_are_searched_site_by_site() -> None:
    job = job_over(batch=64)
    found = search_local(job, Outer(method="diloco", every=100, bits=8), MixedPins(micro_batch_size=1))
    assert found.layout.outer == Outer(method="diloco", every=100, bits=8)
    assert found.layout.global_batch_size == 64
    assert all(len({stage.kind for stage in one.stages}) == 1 for one in found.layout.pipelines)
    slowest, priced = max(one.step_time for _, one in found.sites), found.estimate
    report = site_report(job, found.layout, priced)
    assert report is not None and report.outer is not None
    assert priced.step_time == pytest.approx(report.outer.step) == pytest.approx(slowest / report.outer.utilisation)
    assert sum(priced.time.values()) == pytest.approx(priced.step_time, rel=1e-12)
    assert priced.tokens_per_second == pytest.approx(64 * 4096 / priced.step_time)
    assert [len(one.stages) for one in priced.pipelines] == [len(one.stages) for one in found.layout.pipelines]
    assert [one.stages[0].kind for one in priced.pipelines] == [one.stages[0].kind for one in found.layout.pipelines]
    assert priced.step_time < 0.5 * estimate_mixed(job, found.layout).step_time  # averages at every step over the slow link
    assert price_layout(job, REPLICAS_OF_64).step_time == estimate_mixed(job, REPLICAS_OF_64).step_time
    steps = [one.step_time for _, one in found.sites]
    assert min(steps) > 0.7 * max(steps)  # shares level the sites
    inside = replace(job, cluster=ClusterFile(nodes=(replace(EAST, site="west"), WEST)))
    with pytest.raises(PlannerError, match="local updates are between sites, and the cluster has one"):
        search_local(inside, Outer(method="diloco", every=100))
