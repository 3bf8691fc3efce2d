"""Serving on several kinds of nodes: each alone, replicas with routing shares, prefill and decode on two kinds over a link."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import planner
from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.commands.main import main
from planner.errors import PlannerError
from planner.model import load_model
from planner.serving import pools
from planner.serving.engine import load_engine
from planner.serving.kinds_answer import serve_kinds
from planner.serving.kinds_rows import KindsAnswer, KindsRow
from planner.serving.served import Served
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.serving_question import ServeRequest
from planner.serving.traffic import Lengths, Traffic

H100 = NodeKind(kind="h100", hardware="h100-sxm", count=1, gpus=8, site="us-east-1")
A100 = NodeKind(kind="a100", hardware="a100-sxm-80gb", count=1, gpus=8, site="us-west-2")
LINK = Link(between=("us-east-1", "us-west-2"), bandwidth=25e9 / 8, latency=0.03, price=0.02e-9)
CLUSTER = ClusterFile(nodes=(H100, A100), links=(LINK,))
ASKED = ServeRequest(model="llama-70b", engine="vllm", ttft="2s", tpot="50ms")


def way(found: KindsAnswer, text: str) -> KindsRow:
    return next(one for one in found.rows if one.text == text)


@pytest.fixture(scope="module")
def found() -> KindsAnswer:
    return serve_kinds(ASKED, CLUSTER)


def test_routing_shares_are_those_of_the_capacity(found: KindsAnswer) -> None:
    alone = [way(found, f"{kind} alone") for kind in ("h100", "a100")]
    both = way(found, "replicas on h100 and a100")
    whole = sum(one.requests_per_second for one in alone)
    assert [one.routed for one in both.shares] == pytest.approx([one.requests_per_second / whole for one in alone])
    assert sum(one.routed for one in both.shares) == pytest.approx(1.0)
    assert both.requests_per_second == pytest.approx(whole)
    assert both.usd_per_hour == pytest.approx(sum(one.usd_per_hour or 0 for one in alone))
    assert both.limits_kept and both.tpot_s == max(one.tpot_s or 0 for one in alone) <= 0.050


def test_a_kind_alone_is_what_plan_serve_says_of_it(found: KindsAnswer) -> None:
    said = {"model": "llama-70b", "engine": "vllm", "ttft": "2s", "tpot": "50ms"}
    plain = planner.serve(**said, gpus=8, hardware="a100-sxm-80gb", disaggregated=False)
    assert way(found, "a100 alone").tokens_per_second == pytest.approx(plain[0].row.tokens_per_second)


def test_the_cache_of_all_prompts_passes_the_link(found: KindsAnswer) -> None:
    apart = way(found, "prefill on h100, decode on a100")
    token = 80 * 2 * 8 * 128 * 2  # layers, keys and values, heads, width, bytes
    assert apart.link_bytes_per_second == pytest.approx(apart.requests_per_second * 2048 * token, rel=0.01)
    assert apart.link_bytes_per_second <= LINK.bandwidth
    nodes = way(found, "replicas on h100 and a100").usd_per_hour or 0
    assert apart.usd_per_hour == pytest.approx(nodes + 3600 * apart.link_bytes_per_second * 0.02e-9)
    assert [one.role for one in apart.shares] == ["prefill", "decode"]


@pytest.mark.proof
def test_a_faster_link_serves_more_until_the_gpus_are_what_binds(found: KindsAnswer) -> None:
    name, rates = "prefill on h100, decode on a100", list[float]()
    for factor in (0.2, 1.0, 20.0):
        faster = replace(CLUSTER, links=(replace(LINK, bandwidth=factor * LINK.bandwidth),))
        rates.append(way(serve_kinds(ASKED, faster), name).requests_per_second)
    assert rates[0] < rates[1] < rates[2]
    assert rates[0] <= 0.2 * rates[1]  # the link is what binds, and a transfer takes half of the limit on TTFT
    assert rates[2] < 20 * rates[1]


@pytest.mark.proof
def test_under_a_rate_what_serves_is_ordered_by_price() -> None:
    found = serve_kinds(replace(ASKED, rate="3/s"), CLUSTER)
    kept = [one for one in found.rows if one.limits_kept]
    assert kept[0].text == "h100 alone" and kept == sorted(kept, key=lambda one: one.usd_per_hour or 0)
    both = way(found, "replicas on h100 and a100")
    assert sum(one.requests_per_second for one in both.shares) == pytest.approx(3.0)
    assert both.shares[0].requests_per_second == pytest.approx(3.0 * both.shares[0].routed)


def test_without_a_link_two_sites_share_requests_but_no_cache() -> None:
    found = serve_kinds(ASKED, replace(CLUSTER, links=()))
    assert not [one for one in found.rows if one.what == "prefill and decode"]
    assert "no link between us-east-1 and us-west-2 is given" in found.notes[0]


def test_a_kind_on_which_nothing_starts_is_named() -> None:
    small = NodeKind(kind="t4", hardware="t4", count=1, gpus=1, site="us-east-1")
    found = serve_kinds(ASKED, ClusterFile(nodes=(H100, small)))
    assert [one.text for one in found.rows] == ["h100 alone"] and found.notes[0].startswith("t4: ")
    with pytest.raises(PlannerError, match="the model starts on no kind of the cluster: t4: "):
        serve_kinds(ASKED, ClusterFile(nodes=(small,)))
    slow = replace(A100, slowdown={"": 1.2})
    assert "measured slowdown" in serve_kinds(ASKED, ClusterFile(nodes=(H100, slow))).notes[0]


def test_one_kind_in_two_pools_is_priced_as_before() -> None:
    """With a link that is no limit and prompts on the same GPU, pools across a link are pools but for the link's set-up."""
    served = Served(model=load_model("llama-8b"), hardware=H100.profile, engine=load_engine("vllm"), precision=Precision())
    pair = ServingLayout(tp=2), ServingLayout(tp=2)
    traffic = Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(128), load="rate", value=2.0)
    plain, prompts = pools.estimate(served, *pair, traffic), pools.prefill_of(served, pair[0], traffic)
    wide = pools.compared(served, prompts, pair[1], traffic, None, pools.Across(bandwidth=1e15))
    assert float(np.asarray(wide.ttft.mean)) == pytest.approx(float(np.asarray(plain.ttft.mean)), rel=0.05)
    assert float(np.asarray(wide.tpot.mean)) == pytest.approx(float(np.asarray(plain.tpot.mean)), rel=1e-6)
    far = pools.compared(served, prompts, pair[1], traffic, None, pools.Across(bandwidth=1e15, latency=0.05))
    assert float(np.asarray(far.ttft.mean)) == pytest.approx(float(np.asarray(wide.ttft.mean)) + 0.25, rel=0.02)


@pytest.mark.proof
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n"
        "- {kind: h100, hardware: h100-sxm, count: 1, site: us-east-1}\n"
        "- {kind: l40s, hardware: l40s, count: 1, site: us-east-1}\n"
    )
    said = ["serve", "--model", "llama-8b", "--engine", "vllm", "--cluster", str(file), "--tpot", "30ms"]
    done = CliRunner().invoke(main, said, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "replicas on h100 and l40s" in done.output and "routed" in done.output
    plain = CliRunner().invoke(main, [*said, "--json"])
    ways = json.loads(plain.stdout)["ways"]
    assert {one["text"] for one in ways} >= {"h100 alone", "l40s alone", "prefill on h100, decode on l40s"}
    for flags, sentence in (
        (["--gpus", "8"], "--gpus stands beside a cluster file"), (["--cheapest"], "--cheapest stands beside --cluster"),
        (["--output", str(tmp_path / "x.yaml")], "each kind is a plan of its own"),
    ):  # fmt: skip
        wrong = CliRunner().invoke(main, [*said, *flags])
        assert wrong.exit_code == 2 and sentence in (wrong.output + str(wrong.exception)), wrong.output
    none = CliRunner().invoke(main, [*said[:-1], "1us"])
    assert none.exit_code == 1 and "No way keeps the limits" in none.output


def test_links_of_known_regions_are_assumed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    sites = "us-east-1", "us-west-2"
    lines = [f"- {{kind: {kind}, hardware: l40s, count: 1, site: {site}}}" for kind, site in zip("ab", sites, strict=True)]
    file.write_text("\n".join(["nodes:", *lines]))
    found = planner.serve_cluster(file, model="llama-8b", engine="vllm", tpot="50ms").to_dict()
    assert any(one["text"] == "prefill on a, decode on b" for one in found["ways"])
    assert "us-east-1 - us-west-2: no link is given; by what is known of these regions" in found["notes"][-1]
    file.write_text(file.read_text().replace("us-west-2", "our-lab"))
    found = planner.serve_cluster(file, model="llama-8b", engine="vllm", tpot="50ms").to_dict()
    assert not any("prefill" in one["text"] for one in found["ways"]) and "no link between" in found["notes"][0]
