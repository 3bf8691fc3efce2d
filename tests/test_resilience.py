"""``plan resilience``: intervals, goodput, spares, answers to failures, traces."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import planner
from planner.commands.main import main
from planner.elastic.availability import Job, by_minute, read_trace, replay
from planner.elastic.checkpoints import SaveTimes, best_interval, daly, lost_by_failure, wall_over_work, young
from planner.elastic.failure_answers import PARTS, group_shares, kept_steps
from planner.elastic.failure_rates import constants, node_mtbf, published_rates
from planner.elastic.spares import in_repair, short_of, spares_for
from planner.errors import PlannerError
from planner.hardware import load_hardware


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of 32 GPUs as a file."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    planner.plan(model="llama-8b", gpus=32, trainer="fsdp", top=1)[0].save(path)
    return path


def test_young_by_hand() -> None:
    assert young(10.0, 3600.0) == pytest.approx(math.sqrt(2 * 10 * 3600))


@pytest.mark.parametrize("stall", [1e-3, 1.0, 60.0, 3600.0, 36000.0])
def test_daly_is_the_minimum_and_young_its_limit(stall: float) -> None:
    tau = float(daly(stall, 3600.0))
    around = wall_over_work(tau * np.array([0.97, 1.0, 1.03]), stall=stall, mtbf=3600.0, restart=60.0, behind=20.0)
    assert around[1] <= around[0] and around[1] <= around[2]
    if stall < 0.01:
        assert tau == pytest.approx(float(young(stall, 3600.0)), rel=1e-3)


@pytest.mark.parametrize("rare", [1e-30, 1e-16, 1e-13, 0.9e-10, 1.1e-10])
def test_daly_holds_where_failures_are_rare_beyond_rounding(rare: float) -> None:
    """u = sqrt(2 d) (1 - sqrt(2 d) / 3) to first orders; without it rounding gave an interval of 0: a save every step."""
    assert float(daly(rare, 1.0)) == pytest.approx(math.sqrt(2.0 * rare) * (1.0 - math.sqrt(2.0 * rare) / 3.0), rel=1e-6)


def test_wall_over_work_by_hand() -> None:
    """(M / tau) e^{(R + s)/M} (e^{(tau + delta)/M} - 1)"""
    found = float(wall_over_work(300.0, stall=5.0, mtbf=1000.0, restart=60.0, behind=100.0))
    assert found == pytest.approx(1000 / 300 * math.exp(0.16) * (math.exp(0.305) - 1))
    columns = wall_over_work(np.array([300.0, 600.0]), stall=5.0, mtbf=1000.0, restart=60.0, behind=100.0)
    assert columns[0] == found


@pytest.mark.parametrize("behind", [0.0, 100.0])
def test_wall_over_work_against_a_simulation(behind: float) -> None:
    rng = np.random.default_rng(0)
    tau, delta, restart, mtbf, wall, saves, fresh = 300.0, 5.0, 60.0, 1000.0, 0.0, 0, True
    while saves < 8000:
        needed, failure = tau + delta + behind * fresh, rng.exponential(mtbf)
        wall += min(needed, failure)
        saves, fresh = (saves + 1, False) if failure >= needed else (saves, True)
        while failure < needed and (again := rng.exponential(mtbf)) < restart:
            wall += again
        wall += restart * (failure < needed)
    expected = float(wall_over_work(tau, stall=delta, mtbf=mtbf, restart=restart, behind=behind))
    assert wall / (saves * tau) == pytest.approx(expected, rel=0.03)


def test_interval_is_whole_steps_and_waits_for_the_last_save() -> None:
    times = SaveTimes(stall=0.01, behind=100.0, load=5.0)
    assert best_interval(times, 3600.0, 7.0) == 15 * 7.0  # not before 100 s
    assert best_interval(SaveTimes(stall=10.0, behind=0.0, load=5.0), 3600.0, 7.0) in (37 * 7.0, 38 * 7.0)
    with pytest.raises(PlannerError, match="must be above 0"):
        best_interval(times, 0.0)


def test_lost_by_a_failure_is_half_a_cycle_where_failures_are_rare() -> None:
    times = SaveTimes(stall=2.0, behind=30.0, load=5.0)
    assert lost_by_failure(100.0, times, 1e9, 60.0) == pytest.approx(51.0 + 30.0 + 60.0, rel=1e-3)
    assert lost_by_failure(100.0, times, 50.0, 60.0) < 141.0


def test_nodes_that_all_fail_faster_than_they_are_repaired_are_all_away() -> None:
    """8 nodes that fail every few seconds and take a day to come back: no more than 8 are ever in repair."""
    found = in_repair(8, 1.0, 86_400.0)
    assert len(found) == 9 and found[-1] == pytest.approx(1.0)
    with pytest.raises(PlannerError, match="150,000 nodes would be in repair"):
        in_repair(150_000, 1.0, 86_400.0)


def test_a_job_that_never_ends_says_so_and_names_no_best_answer() -> None:
    plan = planner.plan(model="llama-3.2-1b", gpus=16, hardware="h100-sxm", trainer="torchtitan", global_batch_size=64)[0]
    text = str(planner.resilience(plan, mtbf="1min"))
    assert "No answer ends" in text and "Best answer" not in text and "inf" not in text.split("Assumed")[0].split()


def test_spares_by_poisson() -> None:
    """Mean 2: P(N > 4) = 0.0527, P(N > 5) = 0.0166, P(N > 6) = 0.0045."""
    found = in_repair(100, 50.0, 1.0)
    assert found.sum() == pytest.approx(1.0) and found[0] == pytest.approx(math.exp(-2.0))
    assert [spares_for(100, 50.0, 1.0, chance) for chance in (0.06, 0.02, 0.01)] == [4, 5, 6]
    assert short_of(found, 2)[0] == pytest.approx(math.exp(-2.0) * 5.0)
    with pytest.raises(PlannerError, match="--shortage"):
        spares_for(100, 50.0, 1.0, 1.5)


def test_groups_keep_steps_without_a_failure() -> None:
    """300 GPUs, a failure a minute, steps of 10.9 s: 83.4 % of the steps are kept; 82.3 % were measured."""
    assert kept_steps(10.9, 60.0) == pytest.approx(0.834, abs=0.001)
    shares = group_shares(step_time=10.9, mtbf=60.0, groups=30, away=24.0)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["work"] == pytest.approx(0.823, abs=0.03)


def test_published_rates() -> None:
    """Llama 3: 54 days x 2,048 nodes over 419 interruptions."""
    assert node_mtbf(load_hardware("h100-sxm")).seconds == pytest.approx(54 * 86400 * 2048 / 419)
    assert "taken as Hopper" in node_mtbf(load_hardware("b200-sxm")).why
    assert node_mtbf(load_hardware("t4"), spot=True).seconds < 3600.0 * 3
    assert all(one.source and one.date for one in published_rates())
    assert all(one.source and one.value > 0 for one in vars(constants()).values())


def test_shares_sum_to_one_and_goodput_grows_with_mtbf(plan: Path) -> None:
    goodputs = []
    for hours in (100, 1000, 10000):
        found = planner.resilience(plan, mtbf=f"{hours}h", spares=1).found
        for one in found.answers:
            if one.answer.shares:
                assert set(one.answer.shares) == set(PARTS)
                assert sum(one.answer.shares.values()) == pytest.approx(1.0)
                assert all(value >= 0.0 for value in one.answer.shares.values())
        goodputs.append({one.answer.key: one.answer.goodput for one in found.answers})
    for key in ("restart", "shrink", "replica_groups"):
        assert goodputs[0][key] < goodputs[1][key] < goodputs[2][key] < 1.0
    assert goodputs[0]["shrink"] > goodputs[0]["restart"]


def test_more_spares_wait_less(plan: Path) -> None:
    waits = [
        next(one.answer.shares["waiting"] for one in planner.resilience(plan, mtbf="300h", spares=k).found.answers
             if one.answer.key == "restart")
        for k in (0, 1, 3)
    ]  # fmt: skip
    assert waits[0] > waits[1] > waits[2]


BAMBOO = "\n".join([
    *(f"0,add,node-{i}" for i in range(8)),
    "600000,remove,node-3", "1200000,add,node-8", "3600000,remove,node-1", "7200000,add,node-9",
])  # fmt: skip


def test_trace_forms(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.txt"
    first.write_text(BAMBOO)
    lines = ("date,time,count", "2022-05-01,10:00:00,8", "2022-05-01 10:10:00 7", "2022-05-01,10:20:00,8", "2022-05-01,12:00:00,8")
    second.write_text("\n".join(lines))
    found = read_trace(first).to_dict()
    assert (found["hours"], found["removals"], found["additions"], found["most_machines"]) == (2.0, 2, 10, 8)
    assert found["mean_machines"] == pytest.approx((600 * 8 + 600 * 7 + 2400 * 8 + 3600 * 7) / 7200)
    assert read_trace(second).to_dict()["removals"] == 1
    counts, taken, _ = by_minute(read_trace(first))
    assert list(counts[8:12]) == [8, 8, 7, 7] and taken[10] == 1  # what happens on the minute belongs to the one that begins


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "two lines or more"), ("0,add,a\nx,add,b\n1,add,c", "not milliseconds"), ("0,add,a\n5,lost,b", "neither add nor remove"),
     ("2022-05-01,10:00:00,8\n2022-05-01,10:10:00,-3", "machines"), ("2022-05-01,10:00:00,8\n2022-05-01,10:10,x", "not date,time")],
)  # fmt: skip
def test_bad_traces(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(PlannerError, match=says):
        read_trace(path)


def test_replay_by_hand(tmp_path: Path) -> None:
    """Eight machines for an hour, nothing taken: all of it is work but the first start."""
    path = tmp_path / "trace.csv"
    path.write_text("2022-05-01,10:00:00,8\n2022-05-01,11:00:00,8\n")
    job = Job(nodes=8, step_time=10.0, restart=60.0, save=10.0, interval=600.0, behind=10.0, group_nodes=2, away=60.0,
              speed=lambda missing: (8 - missing) / 8)  # fmt: skip
    found = {one.policy: one for one in replay(read_trace(path), job).policies}
    assert found["shrink"].work == found["restart"].work == 60 * 60.0
    for one in found.values():
        assert sum(one.shares.values()) == pytest.approx(1.0)
    path.write_text(BAMBOO)
    peers = replace(job, reroute=lambda missing: (8 - missing) / 8, set_up=30.0)
    found = {one.policy: one for one in replay(read_trace(path), peers).policies}
    whole, seven = 9 + 39, 9 + 59  # minutes with 8 and with 7 machines; a loss takes 40 s of its minute, a return 30 s
    assert found["reroute"].work == pytest.approx(60 * whole + 52.5 * seven + 2 * 17.5 + 2 * 30)
    none = replace(peers, reroute=lambda missing: float(missing < 1))
    gone = {one.policy: one for one in replay(read_trace(path), none).policies}
    assert gone["reroute"].shares["waiting"] == pytest.approx(70 / 121) and gone["reroute"].stops == 2
    assert found["shrink"].work > found["restart"].work
    assert found["restart"].shares["waiting"] > 0.3  # seven machines are not eight
    assert all(sum(one.shares.values()) == pytest.approx(1.0) for one in found.values())
    assert all(one.utilisation <= 1.0 + 1e-9 for one in found.values())


def test_command_prints_what_json_holds(plan: Path, tmp_path: Path) -> None:
    trace, cluster = tmp_path / "trace.csv", tmp_path / "cluster.yaml"
    trace.write_text(BAMBOO)
    cluster.write_text(
        "nodes: [{kind: h, hardware: h100-sxm, count: 4, price: 40 USD/h, mtbf: 900 h}]\n"
        "storage: {read: 20 GB/s, write: 10 GB/s, per_node: 2 GB/s}\nspares: 1\n"
    )
    command = ["resilience", str(plan), "--cluster", str(cluster), "--trace", str(trace)]
    done = CliRunner().invoke(main, [*command, "--json", "--output", str(tmp_path / "picture.png")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["job"]["node_mtbf_s"] == 900 * 3600 and found["job"]["spares"] == 1
    assert found["answers"][0]["usd"] == pytest.approx(found["answers"][0]["days"] * 24 * 40 * 5.0)
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    text = CliRunner().invoke(main, command).output
    assert "Save every" in text and "Best answer" in text and "trace.csv" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--mtbf", "900"], "has no unit"), (["--mtbf", "0h"], "must be above 0"), (["--spares", "-1"], "--spares"),
     (["--days", "-3"], "--days"), (["--shortage", "2"], "--shortage"), (["--interval", "1ms"], "--interval"),
     (["--output", "x.doc"], "name a file that ends"), (["--trace", "none.csv"], "none.csv")],
)  # fmt: skip
def test_bad_input_is_a_sentence(plan: Path, flags: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["resilience", str(plan), *flags])
    assert done.exit_code == 2 and says in done.output


def test_numbers_are_whole_on_a_narrow_terminal(plan: Path) -> None:
    from rich.console import Console

    from planner.questions.resilience.show import print_resilience

    console = Console(width=80)
    with console.capture() as caught:
        print_resilience(console, planner.resilience(plan, mtbf="900h").found)
    assert "…" not in caught.get()
