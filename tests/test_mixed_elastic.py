"""``plan resilience`` and ``plan reshape`` of plans over several kinds of nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from mixed_samples import export_of, pipeline, stage, two_kinds
from rich.console import Console
from rl_samples import rl_plan

import planner
from planner.cluster_file import ClusterFile, Storage
from planner.commands.main import main
from planner.elastic.elastic_job import Surroundings
from planner.elastic.failing_job import FailingNodes, Failures
from planner.elastic.failure_rates import NodeMtbf
from planner.elastic.mixed_elastic_job import MixedElasticJob
from planner.elastic.resilience import Asked, resilience
from planner.elastic.shards import read_factor, saved_of
from planner.library import read_yaml
from planner.mixed.mixed_layout import MixedLayout
from planner.mixed.mixed_plan import MixedPlan, load_mixed_plan, priced_plan
from planner.questions.watch.mixed_watched import Mixed

HOUR = 3600.0
RATES = {(1, 0): 0.6, (2, 0): 0.25, (0, 1): 0.9, (0, 2): 0.75}
"""Of the best plan without nodes of the two kinds: what a search would find."""


def nodes(kind: str, count: int, hours: float, **more: Any) -> FailingNodes:
    """Equal nodes in one line."""
    return FailingNodes(kind=kind, count=count, mtbf=NodeMtbf(seconds=hours * HOUR, why="given"), repair=HOUR, **more)


def plan_of(cluster: ClusterFile | None = None, tp: int = 4) -> MixedPlan:
    """Two replicas of a stage of big GPUs and one of two small ones; with tp 4 a node of each kind for each."""
    layout = MixedLayout(pipelines=(pipeline(stage("big", 3, tp=tp), stage("small", 1, tp=2), count=2),))
    return priced_plan(export_of(layout, cluster or two_kinds(a=2, t=2), "megatron").job, "megatron", layout)


def job_of(rates: Mapping[tuple[int, ...], float] = RATES, **around: Any) -> MixedElasticJob:
    """That plan with rates that need no search."""
    return MixedElasticJob(plan=plan_of(), around=Surroundings(**around), searched=dict(rates))


def shown(answer: Any) -> str:
    """What is printed."""
    console = Console(width=200)
    with console.capture() as caught:
        answer.show(console)
    return caught.get()


def test_failures_of_kinds_add_up() -> None:
    """1 / M = 4 / 100 h + 2 / 10 h; no node is missing with e^{-4/100} e^{-2/10}, repairs taking an hour."""
    found = Failures(kinds=(nodes("a", 4, 100.0), nodes("b", 2, 10.0, spares=1)))
    assert found.mtbf == pytest.approx(HOUR / 0.24) and found.node_mtbf == pytest.approx(6 * HOUR / 0.24)
    assert found.present() == pytest.approx(np.exp(-0.04) * np.exp(-0.2) * 1.2)
    states = dict(found.states())
    assert sum(states.values()) == pytest.approx(1.0, abs=1e-5)
    assert states[1, 0] == pytest.approx(0.04 * np.exp(-0.04) * np.exp(-0.2) * 1.2, rel=1e-6)
    assert found.scaled(nodes=3).mtbf == pytest.approx(found.mtbf / 3) and found.covered().present() == 1.0


def test_goodput_of_shrinking_is_the_mean_over_what_is_missing() -> None:
    """The rate of each state by its probability: kinds lose by themselves, and together what both lose."""
    job = job_of(mtbf=50 * HOUR)
    failures = job.failures(HOUR)
    mean = sum(p * max(1.0 - (1 - RATES.get((a, 0), 1.0)) - (1 - RATES.get((0, b), 1.0)), (2 - a - b) / 2, 0.0) * ((a, b) != (2, 2))
               for (a, b), p in failures.states())  # fmt: skip
    found = resilience(job, Asked(repair=HOUR))
    by_key = {one.answer.key: one.answer for one in found.answers}
    shares = by_key["shrink"].shares
    running = sum(p for state, p in failures.states() if state != (2, 2))
    assert shares["work"] / (shares["work"] + shares["slower"]) == pytest.approx(mean / running)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert by_key["restart"].shares["waiting"] == pytest.approx(1.0 - np.exp(-4 / 50))
    assert by_key["shrink"].goodput > by_key["restart"].goodput
    big, small = found.kinds
    assert (big.without_one, big.without_all, small.without_one, small.without_all) == (0.6, 0.25, 0.9, 0.75)


def test_a_replica_on_its_own_nodes_is_a_group() -> None:
    groups = job_of().groups()
    assert groups.number == 2 and groups.step_time > 0 and groups.join > 0
    shared = MixedElasticJob(plan=plan_of(two_kinds(a=1, t=2), tp=2), around=Surroundings())
    assert "nodes of their own" in shared.groups().why_not


def test_what_ranks_write_is_the_checkpoint_and_what_they_read_is_theirs() -> None:
    """zero 1: weights on every replica, states once; three of four layers and the embedding on the big stage's eight ranks."""
    job = job_of(storage=Storage(read=1e6, write=1e6))
    saved = saved_of(job.plan.workload, job.trainer)
    writes, reads = job.writes(), job.reads()
    assert writes.sum() == pytest.approx(saved.size) and len(writes) == 12
    of_slots = saved.slots.sum(axis=0) / saved.slots.sum()
    assert writes[:8].sum() / writes.sum() == pytest.approx(of_slots[:4].sum())
    weights, states = (saved.parameters * saved.bytes_each[name] for name in ("weights", "optimizer_states"))
    level = job.trainer.stored.weight_sharding_level
    assert reads.sum() == pytest.approx(weights * (2 if level > 1 else 1) + states)
    assert job.times.behind == pytest.approx(saved.size / 1e6) and job.times.load == pytest.approx(reads.sum() / 1e6)
    assert sum(job.start.values()) > job.times.load + job.step_time


def test_idle_nodes_and_spares_stand_where_they_are_missed() -> None:
    """Of three small nodes one is idle: a spare of that kind; a spare of no kind goes to the kind that is short more often."""
    cluster = two_kinds(a=2, t=3)
    often = tuple(replace(one, mtbf=hours * HOUR) for one, hours in zip(cluster.nodes, (20.0, 200.0), strict=True))
    job = MixedElasticJob(plan=plan_of(replace(cluster, nodes=often)), around=Surroundings(spares=1), searched=dict(RATES))
    assert [one.spares for one in job.failures(HOUR).kinds] == [1, 1]
    assert any(one.what == "spares" and "1 x small" in one.value for one in job.assumptions())


def test_a_kind_that_fails_all_the_time_is_left_out() -> None:
    cluster = two_kinds(a=2, t=2)
    often = tuple(replace(one, mtbf=hours * HOUR) for one, hours in zip(cluster.nodes, (5000.0, 0.05), strict=True))
    plan = plan_of(replace(cluster, nodes=often))
    job = MixedElasticJob(plan=plan, around=Surroundings(), searched=dict(RATES))
    found = resilience(job, Asked(repair=60.0))
    assert found.advice.startswith("Leave small out: without it 75.0 %")
    assert resilience(job_of(mtbf=5000 * HOUR), Asked(repair=60.0)).advice == ""


@pytest.mark.proof
def test_plans_on_fewer_nodes_are_searched() -> None:
    """One small node fewer costs more than nothing and less than a big one; without all small ones the big ones go on."""
    job = MixedElasticJob(plan=plan_of(), around=Surroundings())
    whole, none = job.searched_speed((0, 0)), job.speed((2, 2))
    small, all_small, big = job.speed((0, 1)), job.speed((0, 2)), job.speed((1, 0))
    assert whole == 1.0 and none == 0.0 and 0.0 < big <= small <= 1.0 and 0.0 < all_small <= small


def test_the_command_and_a_trace_of_the_spot_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of the spot kind come and go, the others stay and go on without them."""
    monkeypatch.setattr(MixedElasticJob, "searched_speed", lambda self, missing: RATES[missing])
    file, cluster, trace = tmp_path / "mixed.yaml", tmp_path / "cluster.yaml", tmp_path / "trace.csv"
    plan_of().save(file)
    trace.write_text("2022-05-01,10:00:00,2\n2022-05-01,10:10:00,0\n2022-05-01,11:00:00,2\n2022-05-01,11:30:00,2\n")
    cluster.write_text(
        "nodes:\n- {kind: big, hardware: h100-sxm, count: 2, gpus: 4, price: 20 USD/h, mtbf: 900 h}\n"
        "- {kind: small, hardware: l40s, count: 2, gpus: 2, price: 3 USD/h, mtbf: 10 h, spot: true}\n"
    )
    command = ["resilience", str(file), "--cluster", str(cluster), "--trace", str(trace), "--repair", "1h"]
    done = CliRunner().invoke(main, [*command, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    kinds = [(one["kind"], one["nodes"], one["node_mtbf_s"]) for one in found["kinds"]]
    assert kinds == [("big", 2, 900 * HOUR), ("small", 2, 10 * HOUR)]
    assert found["job"]["mtbf_s"] == pytest.approx(HOUR / (2 / 900 + 2 / 10))
    best = found["answers"][0]
    assert best["usd"] == pytest.approx(best["days"] * 24 * 46.0)
    policies = {one["policy"]: one for one in found["trace"]["policies"]}
    assert policies["restart"]["shares"]["waiting"] == pytest.approx(50 / 91)
    assert policies["shrink"]["shares"]["waiting"] == 0.0 and policies["shrink"]["work"] > policies["restart"]["work"]
    text = CliRunner().invoke(main, command).output
    assert "rate without one" in " ".join(text.split()) and "small" in text


def test_other_nodes_are_planned_with_the_move_counted(tmp_path: Path) -> None:
    """A small node is lost: the ways of the move, what it competes with, and what the new run has to know."""
    file, cluster = tmp_path / "mixed.yaml", tmp_path / "left.yaml"
    plan_of().save(file)
    cluster.write_text(
        "nodes:\n- {kind: big, hardware: h100-sxm, count: 2, gpus: 4}\n- {kind: small, hardware: l40s, count: 1, gpus: 2}\n"
        "storage: {read: 1 MB/s, write: 500 kB/s}\n"
    )
    moved = planner.reshape(file, cluster=cluster, step=7, drain="1s")
    moved.save(tmp_path / "next.yaml")
    moved.save_recipe(tmp_path / "recipe.yaml")
    found = moved.to_dict()
    planned, failed = found["ways"]
    size = saved_of(plan_of().workload, job_of().trainer).size
    assert planned["seconds"] == pytest.approx(sum(planned["parts_s"].values()))
    assert planned["parts_s"]["save"] == pytest.approx(size / 500e3)
    assert planned["parts_s"]["load"] == pytest.approx(found["read_bytes"] / 1e6, rel=1e-3)  # its network is 10,000 times as fast
    assert size <= found["read_bytes"] * 1.0001 and failed["parts_s"]["work done again"] > 0
    assert found["pay_back"]["against"] == "waiting until 8 x big, 4 x small are there again"
    assert found["pay_back"]["seconds"] == pytest.approx(2 * planned["seconds"])
    recipe = read_yaml(tmp_path / "recipe.yaml")
    assert recipe["samples"] == 7 * 8 and recipe["step"] == 7 and recipe["engine"]["engine"] == "torch_dist"
    new = load_mixed_plan(tmp_path / "next.yaml")
    assert new.layout.global_batch_size == 8 and new.layout.gpus_of("small") <= 2
    assert all(one in shown(moved) for one in ("Pay-back:", "Warning of", "Who holds what"))


def test_shards_that_do_not_nest_are_read_more_than_once() -> None:
    """4 -> 3: six of four quarters are read, 1.5 times; 4 -> 8 each quarter twice; 8 -> 4 no more than needed."""
    assert [read_factor(new, old) for new, old in ((3, 4), (8, 4), (4, 8), (5, 5))] == pytest.approx([1.5, 2.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--gpus", "8"], "give --cluster FILE in place of a number"), ([], "give --cluster FILE"),
     (["--cluster", "here", "--to", "pytorch", "--export", "folder"], "plan export PLAN --to pytorch")],
)  # fmt: skip
def test_a_move_of_several_kinds_needs_a_cluster_file(tmp_path: Path, flags: list[str], says: str) -> None:
    file, cluster = tmp_path / "mixed.yaml", tmp_path / "left.yaml"
    plan_of().save(file)
    cluster.write_text("nodes: [{kind: big, hardware: h100-sxm, count: 1, gpus: 4}]\n")
    flags = [str(cluster) if one == "here" else str(tmp_path / one) if one == "folder" else one for one in flags]
    done = CliRunner().invoke(main, ["reshape", str(file), *flags])
    assert done.exit_code == 2 and says in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("cluster", "flags", "says"),
    [("kind: other, hardware: h100-sxm, count: 2", ["--cluster"], "the cluster file has other"),
     ("", ["--trace"], "a trace holds machines of one kind"), ("", ["--mtbf", "0h"], "must be above 0")],
)  # fmt: skip
def test_bad_input_is_a_sentence(tmp_path: Path, cluster: str, flags: list[str], says: str) -> None:
    file, more = tmp_path / "mixed.yaml", tmp_path / "more.yaml"
    plan_of().save(file)
    more.write_text(f"nodes: [{{{cluster}}}]\n" if cluster else "2022-05-01,10:00:00,2\n2022-05-01,11:00:00,2\n")
    done = CliRunner().invoke(main, ["resilience", str(file), *flags, *([str(more)] if len(flags) == 1 else [])])
    assert done.exit_code == 2 and says in " ".join(done.output.split())


def test_watching_says_what_it_does_not_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as busy as planned but one, which is twice as long; their communication is read and not compared."""
    monkeypatch.setattr("planner.questions.watch.mixed_watched._planned_again", lambda *_: [])
    job, table = job_of(), tmp_path / "ranks.csv"
    busy = Mixed(job).expected()
    rows = [f"{rank},{one * (2.0 if rank == 2 else 1.0)},0.5" for rank, one in busy.items() for _ in range(4)]
    table.write_text("rank,compute_s,comm_s\n" + "\n".join(rows))
    job.plan.save(tmp_path / "mixed.yaml")
    seen = planner.watch(tmp_path / "mixed.yaml", table)
    assert [one.found.ranks for one in seen.found.findings] == [(2,)]
    assert seen.to_dict()["skipped"].startswith("times that ranks communicate") and "Not looked at: times" in shown(seen)


def test_rl_plans_are_sent_to_the_training_of_their_policy(tmp_path: Path) -> None:
    file = tmp_path / "rl.yaml"
    rl_plan().save(file)
    for command in (["resilience"], ["reshape", "--gpus", "8"]):
        done = CliRunner().invoke(main, [command[0], str(file), *command[1:]])
        assert done.exit_code == 2 and "plan --model qwen3-8b" in done.output and "Traceback" not in done.output
