"""``plan --cluster`` over two sites: what crosses is shown, local updates are an option, links are changed by what-if."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner import api
from planner.commands.main import main
from planner.errors import PlannerError

FILE = """
nodes:
- {kind: h100, hardware: h100-sxm, count: 1, site: us-east-1, price: 24 USD/h}
- {kind: a100, hardware: a100-sxm-80gb, count: 1, site: us-west-2, price: 12 USD/h}
"""
LINK = "links:\n- {between: [us-east-1, us-west-2], bandwidth: 5 Gb/s, latency: 31 ms, price: 0.02 USD/GB}\n"
JOB = ["--model", "llama-3.2-1b", "--global-batch-size", "64", "--sequence-length", "4096", "--micro-batch-size", "1"]


@pytest.fixture()
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE + LINK)
    return file


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, list(words), env={"COLUMNS": "170"})
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output if code == 0 else done.output + str(done.exception)


@pytest.mark.proof
def test_what_crosses_is_shown_and_in_the_price(cluster: Path, tmp_path: Path) -> None:
    plan = tmp_path / "mixed.yaml"
    said = ["--cluster", str(cluster), *JOB, "--outer", "diloco:50:8", "--json", "--output", str(plan)]
    found = json.loads(run(*said).partition("\n")[2])
    first, layouts = found["plans"][0], [one["layout"] for one in found["plans"]]
    assert layouts[0]["outer"] == {"method": "diloco", "every": 50, "bits": 8, "fragments": 1} and "outer" not in layouts[1]
    crossing = first["between_sites"]
    assert crossing["traffic"][0]["dimension"] == "data" and crossing["outer"]["every"] == 50
    nodes = (24 + 12) / 3600 * first["estimate"]["step_time_s"]
    assert first["estimate"]["usd_per_step"] == pytest.approx(nodes + crossing["usd_per_step"])
    assert sum(first["estimate"]["time_s"].values()) == pytest.approx(first["estimate"]["step_time_s"])
    assert first["estimate"]["loss_scales"] == [1.0] * len(layouts[0]["pipelines"])  # inside a site all are alike
    text = run("estimate", str(plan))
    assert "Between the sites" in text and "Share of time in training" in text and "joined by torchft" in text
    changed: Any = json.loads(run("what-if", str(plan), "--link", "us-east-1,us-west-2=1Gb/s@80ms", "--without", "a100", "--json"))
    alone, slower = changed["changes"]
    assert slower["change"] == "us-east-1,us-west-2 at 1Gb/s@80ms"
    assert slower["kept_step_time_s"] > first["estimate"]["step_time_s"]
    assert alone["kept_step_time_s"] is None and "outer" not in alone["best"]["layout"]


@pytest.mark.proof
def test_links_of_known_regions_are_assumed(cluster: Path) -> None:
    cluster.write_text(FILE)
    found: Any = api.plan_mixed(
        cluster, model="llama-3.2-1b", global_batch_size=64, sequence_length=4096, micro_batch_size=1, outer="diloco:50", top=1
    )
    said = [one for one in found[0].file.assumptions if one.what == "link"]
    assert "by what is known of these regions a node reaches 116 Gb/s over 128 connections" in said[0].why
    assert found[0].file.cluster.links[0].per_node
    cluster.write_text(FILE.replace("us-west-2", "our-lab"))
    with pytest.raises(PlannerError, match="no link between us-east-1 and our-lab; add one to links"):
        api.plan_mixed(cluster, model="llama-3.2-1b")


def test_local_updates_need_two_sites(cluster: Path) -> None:
    assert "write it like diloco:100:8" in run("--cluster", str(cluster), *JOB, "--outer", "diloco", code=2)
    assert "give its file with --cluster" in run(*JOB, "--gpus", "8", "--outer", "diloco:9", code=2)
    cluster.write_text(FILE.replace("us-west-2", "us-east-1"))
    assert "the cluster has one" in run("--cluster", str(cluster), *JOB, "--outer", "diloco:9", code=2)
