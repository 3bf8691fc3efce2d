"""``plan watch``: what is read, which rank is slow, what it costs, what pays."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import planner
from planner.commands.main import main
from planner.elastic import prometheus
from planner.elastic.elastic_job import ElasticJob, Surroundings
from planner.elastic.expert_placement import placed, unevenness
from planner.elastic.gpu_states import gpus_of_table
from planner.elastic.mixed_elastic_job import MixedElasticJob
from planner.elastic.observed import KNOWN, of_metrics
from planner.elastic.prometheus import from_query, from_text, metrics_of
from planner.elastic.seen_tables import table_of
from planner.elastic.stragglers import levels
from planner.errors import PlannerError
from planner.library import read_ends, read_yaml
from planner.questions.watch import watched
from planner.questions.watch.mixed_watched import Mixed
from planner.questions.watch.replans import Held, replica_times, stretch, uneven_shares

GPUS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of 16 GPUs."""
    path = tmp_path_factory.mktemp("watch")
    planner.plan(model="llama-8b", gpus=GPUS, trainer="torchtitan", top=1)[0].save(path / "plan.yaml")
    return path


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test of it plans again with the measured speeds: that takes a second each time."""
    if "planned_again" not in request.node.name:
        monkeypatch.setattr(watched, "planned_again", lambda held: [])


def ranks(path: Path, slow: dict[int, float], noise: float = 0.004, ranks: int = GPUS, planned: float = 1.0) -> Path:
    """A table of 20 steps: compute of each rank, the rest of the step waited for the slowest."""
    rng = np.random.default_rng(1)
    lines = ["step,rank,node,step_s,compute_s,wait_s"]
    for step in range(20):
        busy = [planned * slow.get(rank, 1.0) * (1.0 + noise * rng.standard_normal()) for rank in range(ranks)]
        lines += [f"{step},{r},n{r // 8},{max(busy) + 0.1},{b},{max(busy) + 0.1 - b}" for r, b in enumerate(busy)]
    path.write_text("\n".join(lines))
    return path


def kinds(found: Any) -> list[tuple[str, str]]:
    """What was found."""
    return [(one.found.kind, one.found.who) for one in found.found.findings]


def test_equal_ranks_are_as_planned(folder: Path) -> None:
    found = planner.watch(folder / "plan.yaml", ranks(folder / "even.csv", {}))
    assert kinds(found) == [] and found.found.actions == ()


def test_slow_rank_is_named_and_priced(folder: Path) -> None:
    losses = []
    for size in (1.1, 1.3):
        found = planner.watch(folder / "plan.yaml", ranks(folder / "slow.csv", {5: size}), price=2.0)
        assert kinds(found) == [("slow_rank", "rank 5 on n0")]
        [one] = found.found.findings
        assert one.found.size == pytest.approx(size, rel=0.02)
        assert 0 < one.loss <= 1.0 - 1.0 / (size * 1.02)
        assert one.usd_per_day == pytest.approx(one.loss * GPUS * 2.0 * 24)
        losses.append(one.loss)
    assert losses[1] > losses[0]


def test_waits_name_the_rank_that_waits_least(folder: Path) -> None:
    """Without compute times: the step less its waits."""
    text = ranks(folder / "waits.csv", {9: 1.2}).read_text().replace("compute_s", "other")
    (folder / "waits.csv").write_text(text)
    assert kinds(planner.watch(folder / "plan.yaml", folder / "waits.csv")) == [("slow_rank", "rank 9 on n1")]


def test_a_whole_node_is_one_finding(folder: Path) -> None:
    table = ranks(folder / "node.csv", {rank: 1.2 for rank in range(5)})
    assert len(kinds(planner.watch(folder / "plan.yaml", table))) == 5
    big = folder / "big.yaml"
    planner.plan(model="llama-8b", gpus=32, trainer="torchtitan", top=1)[0].save(big)
    table = ranks(folder / "node.csv", {rank: 1.2 for rank in range(8, 16)}, ranks=32)
    assert kinds(planner.watch(big, table)) == [("slow_node", "n1")]


def test_levels_by_hand() -> None:
    found = levels({0: [1.0, 2.0], 1: [1.0, 2.0], 2: [1.5, 3.0], 3: [4.0, 4.0]}, {0: 0, 1: 0, 2: 0, 3: 1})
    assert found == {0: 1.0, 1: 1.0, 2: 1.5, 3: 1.0}


def test_stretch_by_hand() -> None:
    """p 4, m 5: of 8 units the slow stage has five; two slow stages of one pipeline add where one waits for the other."""
    assert stretch(np.array([[2.0, 1.0, 1.0, 1.0]]), 5) == pytest.approx(13 / 8)
    assert stretch(np.array([[2.0]]), 5) == 2.0
    assert stretch(np.array([[2.0, 1.5, 1.0, 1.0]]), 5) == pytest.approx(13.5 / 8)
    assert stretch(np.array([[1.5, 1.0], [1.0, 1.2]]), 1) == pytest.approx(2.5 / 2)


@pytest.mark.parametrize("slow", [{3: 1.3}, {3: 1.3, 9: 1.6}, {3: 1.25, 9: 1.25, 12: 2.0}])
def test_shares_by_brute_force(folder: Path, slow: dict[int, float]) -> None:
    """Equal replicas of one stage: the least time in which all microbatches are done, over levels of water."""
    job = ElasticJob(plan=planner.load(folder / "plan.yaml").file, around=Surroundings())
    dp, m = int(job.plan.layout.dp), int(job.plan.layout.num_microbatches)
    assert int(job.plan.layout.pp) == 1 and replica_times(job.places, slow)[9, 0] == slow.get(9, 1.0)
    held = Held(job=job, levels=slow, step_at=lambda size: size)
    [change] = uneven_shares(held)
    each = replica_times(job.places, slow)[:, 0]
    levels = sorted({k * x for x in each for k in range(1, 2 * m + 1)})
    best = next(z for z in levels if sum(int(z / x + 1e-9) for x in each) >= dp * m)
    assert change.step == pytest.approx(best / m) and change.step < max(slow.values())


@pytest.mark.proof
def test_several_slow_nodes_are_planned_again(folder: Path) -> None:
    """Two slow ranks on two nodes: what they cost together, other nodes for both, and a plan with both speeds."""
    plan = folder / "more.yaml"
    planner.plan(model="llama-8b", gpus=32, trainer="torchtitan", top=1)[0].save(plan)
    table = ranks(folder / "both.csv", {5: 1.3, 9: 1.2}, ranks=32)
    found = planner.watch(plan, table, spares=2)
    seen = found.found
    assert len(seen.findings) == 2 and seen.loss == pytest.approx(max(one.loss for one in seen.findings))
    whats = [one.what for one in seen.actions]
    assert "replace n0 and n1 by spares" in whats
    again = next(one for one in seen.actions if one.plan is not None)
    factors = [x for kind in again.plan["cluster"]["nodes"] for x in kind["slowdown"].values()]
    assert sorted(factors) == pytest.approx([1.25, 1.35]) or sorted(factors) == pytest.approx([1.2, 1.3])
    kept = planner.watch(plan, table, before=found).found.again
    assert kept is seen.again
    assert 0 < again.gain < seen.loss and again.pays
    assert found.save(folder / "next.yaml").startswith("plan again")
    assert planner.load_mixed(folder / "next.yaml").to_dict()["layout"] == again.plan["layout"]
    new = planner.load_mixed(folder / "next.yaml").file
    mixed = Mixed(MixedElasticJob(plan=new, around=Surroundings()))
    for slow, loss in (({}, 0.0), ({2: 1.4}, 0.2)):  # the new plan is watched too: as planned, and with a slow rank
        busy = {rank: planned * slow.get(rank, 1.0) for rank, planned in mixed.expected().items()}
        table = ranks(folder / "new.csv", busy, ranks=new.layout.num_gpus)
        found = planner.watch(folder / "next.yaml", table)
        assert [one.found.ranks for one in found.found.findings] == [(rank,) for rank in slow]
        assert found.found.loss == pytest.approx(loss, abs=0.1) and len(found.found.actions) == 2 * len(slow)
    assert planner.watch(folder / "plan.yaml", ranks(folder / "even.csv", {})).save(folder / "none.yaml") == ""
    assert not (folder / "none.yaml").exists()


def test_stages_are_slow_against_the_plan(folder: Path) -> None:
    """The last stage has the head: as long as planned it is not slow, twice as long it is."""
    plan = folder / "stages.yaml"
    planner.plan(model="llama-8b", gpus=GPUS, pp=4, tp=4, vpp=1, top=1)[0].save(plan)
    job = ElasticJob(plan=planner.load(plan).file, around=Surroundings())
    stages = watched.stage_seconds(watched.price_plan(job.plan))
    assert max(stages) > 1.06 * min(stages)
    for factor, kind in ((1.0, []), (1.5, [("slow_stage", "stage 2")])):
        slow = {rank: stages[at] * (factor if at == 2 else 1.0) for rank, at in enumerate(job.places.stage)}
        assert kinds(planner.watch(plan, ranks(folder / "stages.csv", slow))) == kind


DMON = """#Entity   SMCLK   DVCCTR                POWER     TMPTR
ID                                      W         C
GPU 0     1755    0                     650.100   60
GPU 1     1400    64                    480.000   N/A
GPU 0     1755    0                     651.000   61
GPU 1     1402    64                    481.000   88
#Entity   SMCLK   DVCCTR                POWER     TMPTR
GPU 1     1398    0                     480.500   88
"""


def test_dcgmi_dmon_of_two_nodes(folder: Path) -> None:
    """A file for each node, which has its name; the GPU that throttles is the rank that is slow, and explains it."""
    for node, text in (("n0", DMON), ("n1", DMON.replace("1400", "1755").replace("1402", "1755").replace("1398", "1755"))):
        (folder / f"{node}.txt").write_text(text)
    files = [folder / "n0.txt", folder / "n1.txt"]
    alone = planner.watch(folder / "plan.yaml", *files)
    assert kinds(alone) == [("throttled", "n0/GPU 1")]
    [one] = alone.found.findings
    assert one.found.ranks == (1,) and "hardware thermal slowdown, 88 C" in one.found.evidence and one.loss > 0.1
    both = planner.watch(folder / "plan.yaml", ranks(folder / "slow.csv", {1: 1.25}), *files)
    assert kinds(both) == [("slow_rank", "rank 1 on n0")] and "1400 MHz" in both.found.findings[0].found.evidence
    (folder / "n0.txt").write_text(DMON + "GPU 2  1\n")
    with pytest.raises(PlannerError, match="2 values below 5 headings"):
        planner.watch(folder / "plan.yaml", folder / "n0.txt")


def test_slow_links_are_named(folder: Path) -> None:
    """A pair of ranks; a ring among others; a bus with half of its lanes."""
    pairs = "\n".join(f"{a},{b},{0.4 if (a, b) == (0, 8) else 0.1}" for a in range(8) for b in range(8, 16))
    (folder / "pairs.csv").write_text(f"rank,peer,comm_s\n{pairs}\n")
    [found] = planner.watch(folder / "plan.yaml", folder / "pairs.csv").found.findings
    assert found.found.who == "rank 0 to rank 8, node-0 to node-1" and found.found.size == pytest.approx(4.0) and found.loss > 0
    (folder / "bus.csv").write_text("node,index,pcie.link.width.current,pcie.link.width.max\nn0,3,8,16\nn0,4,16,16\n")
    [found] = planner.watch(folder / "plan.yaml", folder / "bus.csv").found.findings
    assert (found.found.kind, found.found.who) == ("narrow_bus", "n0/GPU 3") and found.found.evidence == "8 of 16 lanes of PCIe"
    planner.plan(model="llama-8b", gpus=GPUS, tp=8, pp=1, top=1)[0].save(folder / "tp.yaml")
    times = "\n".join(f"{rank},{0.9 if rank % 8 == 3 else 0.3}" for rank in range(GPUS))
    (folder / "ring.csv").write_text(f"rank,comm_s\n{times}\n")
    [found] = planner.watch(folder / "tp.yaml", folder / "ring.csv").found.findings
    assert found.found.who == "the data parallel ring of ranks 3, 11" and found.found.size == pytest.approx(3.0)


def test_experts_are_placed_by_load(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    loads = rng.pareto(2.0, (4, 16)) + 0.2
    order = placed(loads, 4)
    assert [sorted(row) for row in order.tolist()] == [list(range(16))] * 4
    assert 1.0 <= unevenness(loads, 4, order) < unevenness(loads, 4)
    assert unevenness(np.array([[3.0, 1.0, 1.0, 1.0]]), 2) == pytest.approx(4 / 3)
    planner.plan(model="mixtral-8x7b", gpus=GPUS, ep=4, top=1)[0].save(tmp_path / "plan.yaml")
    rows = [f"{layer},{expert},{10 + 30 * (expert < 2)}" for layer in range(32) for expert in range(8)]
    (tmp_path / "experts.csv").write_text("\n".join(["layer,expert,tokens", *rows]))
    found = planner.watch(tmp_path / "plan.yaml", tmp_path / "experts.csv", remaining="10days")
    [one] = found.found.findings
    assert one.found.kind == "expert_imbalance" and one.found.size == pytest.approx(80 / 35) and one.loss > 0
    [action] = found.found.actions
    assert action.pays and 0 < action.gain < one.loss and found.save(tmp_path / "order.yaml").startswith("place the experts")
    written = read_yaml(tmp_path / "order.yaml")["layers"]
    assert len(written) == 32 and {0, 1} not in [{*written[0][i : i + 2]} for i in (0, 2, 4, 6)]
    (tmp_path / "experts.csv").write_text("expert,tokens\n99,1\n")
    with pytest.raises(PlannerError, match="the model has 8 experts"):
        planner.watch(tmp_path / "plan.yaml", tmp_path / "experts.csv")


def test_long_files_are_read_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("heading\n" + "\n".join(str(number) for number in range(1000)))
    lines = read_ends(path, 40, 40).split("\n")
    assert lines[:3] == ["heading", "0", "1"] and lines[-1] == "999" and 10 < len(lines) < 30
    assert all(line in ("heading", *map(str, range(1000))) for line in lines)
    assert read_ends(path, 4000, 4000) == path.read_text()


def test_a_change_pays_only_in_time(folder: Path) -> None:
    table = ranks(folder / "slow.csv", {5: 1.3})
    long = planner.watch(folder / "plan.yaml", table, spares=1, remaining="10days").found
    short = planner.watch(folder / "plan.yaml", table, spares=1, remaining="1s").found
    assert any(one.pays for one in long.actions) and not any(one.pays for one in short.actions)
    assert short.verdict == "nothing that would pay for its move"
    for one in long.actions:
        assert one.pays_after is None or one.pays_after == pytest.approx(one.cost / one.gain)
    assert all(one.gain <= long.loss + 1e-9 for one in long.actions)


SMI = """timestamp, index, clocks.sm [MHz], power.draw [W], temperature.gpu, clocks_event_reasons.active
2026/11/23 06:00:00.000, 0, 1755 MHz, 650.1 W, 60, 0x0000000000000000
2026/11/23 06:00:00.000, 1, 1400 MHz, 480.0 W, 88, 0x0000000000000020
2026/11/23 06:00:00.000, 2, 1755 MHz, [N/A], 61, 0x0000000000000001
"""
EXPORTER = """# HELP DCGM_FI_DEV_SM_CLOCK SM clock
DCGM_FI_DEV_SM_CLOCK{gpu="0",Hostname="a"} 1755
DCGM_FI_DEV_SM_CLOCK{gpu="1",Hostname="a"} 1200
DCGM_FI_DEV_SM_CLOCK{gpu="0",Hostname="b"} 1755
DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="b"} 79
my_train_compute_seconds{rank="0"} 1.5
my_train_compute_seconds{rank="1"} NaN
unknown_metric 3
"""


def test_tables_of_nvidia_smi() -> None:
    table = table_of(SMI, "gpus.csv", KNOWN)
    assert table is not None
    gpus = gpus_of_table(table, "")
    assert [one.clock for one in gpus] == [1755.0, 1400.0, None]  # the last one was idle
    assert gpus[1].reasons == ("software thermal slowdown",) and gpus[2].reasons == () and gpus[2].power is None
    dcgm = table_of("Hostname,gpu,DCGM_FI_DEV_SM_CLOCK,DCGM_FI_DEV_GPU_TEMP\na,0,1755,60\n", "dcgm.csv", KNOWN)
    assert dcgm is not None
    [one] = gpus_of_table(dcgm, "")
    assert (one.name, one.clock, one.temperature) == ("a/GPU 0", 1755.0, 60.0)


def test_metrics_of_an_exporter() -> None:
    seen = of_metrics(from_text(EXPORTER, "here"), "here")
    assert {one.name: one.clock for one in seen.gpus} == {"a/GPU 0": 1755.0, "a/GPU 1": 1200.0, "b/GPU 0": 1755.0}
    assert next(one for one in seen.gpus if one.name == "b/GPU 0").xid == 79
    assert seen.ranks["compute"] == {0: (1.5,)}
    with pytest.raises(PlannerError, match="no metric"):
        from_text("up 1\n", "here")


def test_logs_of_trainers_are_read(folder: Path) -> None:
    lines = "\n".join(
        f" [2026-01-01 00:00:0{i}] iteration {i:8d}/ 100 | consumed samples: {i * 64:12d} | "
        "elapsed time per iteration (ms): 25000.0 | "
        f"throughput per GPU (TFLOP/s/GPU): 400.0 | learning rate: 1.0E-04 | global batch size: {64:5d} | lm loss: 2.0E+00 |"
        for i in range(1, 9)
    )  # fmt: skip
    (folder / "train.log").write_text(lines)
    found = planner.watch(folder / "plan.yaml", folder / "train.log").found
    assert found.measured == pytest.approx(25.0)
    assert "as planned" in found.verdict or "slower" in found.verdict


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes]]]:
    """An endpoint on this machine: its address, and what it answers by path."""
    answers: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path.split("?")[0])
            self.send_response(404 if body is None else 302 if body == b"elsewhere" else 200)
            if body == b"elsewhere":
                self.send_header("Location", "/metrics")
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: Any) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", answers
    httpd.shutdown()
    httpd.server_close()


def test_endpoints(server: tuple[str, dict[str, bytes]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, answers = server
    answers["/metrics"] = EXPORTER.encode()
    clocks = enumerate((900, 1755, 1755))
    result = [{"metric": {"__name__": "DCGM_FI_DEV_SM_CLOCK", "gpu": str(i)}, "value": [0, str(v)]} for i, v in clocks]
    answers["/api/v1/query"] = json.dumps({"status": "success", "data": {"result": result}}).encode()
    answers["/away"] = b"elsewhere"
    assert len(metrics_of(f"{url}/metrics")) == 5
    assert len(metrics_of(url)) == 3
    found = planner.watch(folder / "plan.yaml", url=url)
    assert kinds(found) == [("throttled", "GPU 0")]
    for path in ("/none", "/away"):
        with pytest.raises(PlannerError, match="does not answer"):
            metrics_of(url + path)
    monkeypatch.setattr(prometheus, "MOST_BYTES", 100)
    with pytest.raises(PlannerError, match="more than 100 bytes"):
        metrics_of(f"{url}/metrics")


@pytest.mark.parametrize("text", ["[]", "{}", '{"data": {"result": 3}}'])
def test_answers_of_other_servers(text: str) -> None:
    with pytest.raises(PlannerError, match=r"data\.result"):
        from_query(text, "here")


def test_command_for_cron(folder: Path) -> None:
    table = ranks(folder / "slow.csv", {5: 1.3})
    done = CliRunner().invoke(main, ["watch", str(folder / "plan.yaml"), str(table), "--once", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ranks"] == GPUS and found["findings"][0]["who"] == "rank 5 on n0" and found["at_step"] == 19
    text = CliRunner().invoke(main, ["watch", str(folder / "plan.yaml"), str(table)]).output
    assert "slow rank" in text and "Verdict" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [("rank,step_s\n", "no rows"), ("rank,step_s\nx,1\n", "no number"), ("rank,step_s\n-1,1\n", "whole number"),
     ("rank,node\n0,a\n", "no column of times"), ("rank,compute_s\n99,1.0\n", "the plan has 16 GPUs"), ("what,ever\n1,2\n", "log"),
     ("\n", "is empty")],
)  # fmt: skip
def test_bad_tables_are_a_sentence(folder: Path, text: str, says: str) -> None:
    (folder / "bad.csv").write_text(text)
    done = CliRunner().invoke(main, ["watch", str(folder / "plan.yaml"), str(folder / "bad.csv")])
    assert done.exit_code == 2 and says in done.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [([], "nothing to watch"), (["--url", "file:///etc/passwd"], "http"), (["--url", "http://"], "http")],
)
def test_bad_input_is_a_sentence(folder: Path, flags: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["watch", str(folder / "plan.yaml"), *flags])
    assert done.exit_code == 2 and says in done.output
