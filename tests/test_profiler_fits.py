"""Groups, fits, launchers and the assembly of the profiler: no torch, no other process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import library
from planner.curves import COLLECTIVES, NetworkCurve
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.lab.launch import torchrun as launch
from planner.lab.launch.gpus import Gpus
from planner.lab.launch.place import commands, first_host, place_from
from planner.lab.launch.state import State
from planner.lab.profile import fit_links
from planner.lab.profile import profile_file as assemble
from planner.lab.profile.all_ranks import rank_point
from planner.lab.profile.patterns import (
    Pattern,
    asked_patterns,
    coarse_first,
    collective_point,
    collective_points,
    factor,
    plain_patterns,
    sizes,
)
from planner.lab.profile.points import Journal, Measured, Point, Settings
from planner.lab.profile.timing import slowest_group, slowest_of
from planner.schema import read

# ------------------------------------------------------------------------------------------------ groups


def rank_grid(order: tuple[str, ...], degrees: dict[str, int]) -> np.ndarray:
    """Rank numbers on a grid with one axis per dimension, the first of ``order`` innermost."""
    shape = [degrees[name] for name in reversed(order)]
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    return np.transpose(grid, [len(order) - 1 - order.index(name) for name in sorted(order)])


@pytest.mark.parametrize("world", [4, 8, 12])
def test_patterns_are_the_groups_of_every_layout(world: int) -> None:
    """Counted on grids of ranks, without strides."""
    wanted: set[tuple[frozenset[int], ...]] = set()
    for tp, cp, dp, pp in itertools.product(range(1, world + 1), repeat=4):
        if tp * cp * dp * pp != world:
            continue
        for order in (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp")):
            grid = rank_grid(order, {"tp": tp, "cp": cp, "dp": dp, "pp": pp})  # axes sorted: cp dp pp tp
            for axis in range(4):
                if grid.shape[axis] > 1:
                    rows = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
                    wanted.add(tuple(sorted((frozenset(row.tolist()) for row in rows), key=min)))
    found = {
        tuple(sorted((frozenset(group) for group in pattern.groups(world)), key=min))
        for pattern in asked_patterns(world)
    }
    assert wanted <= found
    for pattern in asked_patterns(world):
        members = sorted(itertools.chain(*pattern.groups(world)))
        assert members == list(range(world)), "every rank is in exactly one group"


def test_points_by_hand() -> None:
    assert [(one.n, one.stride) for one in plain_patterns(16, 8)] == [(2, 1), (4, 1), (8, 1), (16, 1), (2, 8)]
    assert sizes(2**20)[0] == 1024 and sizes(2**20)[-1] == 2**20 and len(sizes(2**20)) == 11
    assert sizes(1.5e6)[-1] == 2**21, "the largest that is used lies inside"
    points = collective_points(4, 4, 2**20, main="fp32", other="bf16")
    assert len(set(points)) == len(points)
    first = points[: 3 * (6 + 5)]  # ends and middle of six operations for pairs, five for four ranks
    assert {point["size"] for point in first} == {1024, 2**15, 2**20} and {point["op"] for point in first} == set(
        COLLECTIVES
    )
    assert all(
        point["op"] in ("all_reduce", "reduce_scatter", "reduce") for point in points if point["dtype"] == "bf16"
    )
    assert Pattern(n=4, stride=2).groups(8) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert Pattern(n=2, stride=8).nodes(8) == 2 and Pattern(n=4, stride=2).per_node(4) == 2


@given(st.integers(2, 40))
def test_coarse_first_names_every_octave_once(count: int) -> None:
    found = list(itertools.chain(*coarse_first(count)))
    assert sorted(found) == list(range(count)) and {0, count - 1} <= set(coarse_first(count)[0])


def test_bus_factors_of_nccl_tests() -> None:
    assert [factor(op, 4) for op in ("all_reduce", "all_gather", "gather", "scatter", "reduce", "broadcast")] == [
        1.5, 0.75, 0.75, 0.75, 1.0, 1.0,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ fits


OCTAVES = 1024.0 * 2.0 ** np.arange(12)


def rows(op: str, n: int, stride: int, local: int, seconds: Any, dtype: str = "fp32") -> list[Measured]:
    pattern = Pattern(n=n, stride=stride)
    return [
        Measured(
            point=collective_point(op, pattern, int(size), dtype, local), median=float(t), low=0.98 * float(t),
            high=1.02 * float(t), repetitions=9,
        )
        for size, t in zip(OCTAVES, seconds, strict=True)
    ]  # fmt: skip


def test_a_line_is_found() -> None:
    one = fit_links.fit_line(OCTAVES, 30e-6 + OCTAVES / 2e9)
    assert one.latency == pytest.approx(30e-6, rel=1e-3) and 1 / one.per_byte == pytest.approx(2e9, rel=1e-3)
    assert one.errors["worst_percent"] < 0.1
    with pytest.raises(PlannerError, match="1 size does not determine a line"):
        fit_links.fit_line(OCTAVES[:1], OCTAVES[:1])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=12))
def test_any_times_give_a_finite_line_and_a_curve_that_loads(times: list[float]) -> None:
    """Noise, even times that fall with the size, gives numbers that a profile may hold."""
    line = fit_links.fit_line(OCTAVES[: len(times)], np.array(times))
    assert np.all(np.isfinite(line.time(OCTAVES))) and np.all(line.time(OCTAVES) > 0)
    json.dumps(line.to_dict())


def test_measured_points_are_the_curve_and_missing_octaves_are_filled() -> None:
    measured = []
    for op in COLLECTIVES:
        pair = 20e-6 + factor(op, 2) * OCTAVES / 5e9
        measured += rows(op, 2, 1, 4, pair)
        if op != "send_recv":
            four = rows(op, 4, 1, 4, 3 * pair)
            measured += four[:4] + four[5:9]  # one octave is missing inside, three at the end
    found = fit_links.scale_up(fit_links.curves(measured), "fp32")
    assert set(found) == set(COLLECTIVES) and found["all_reduce"]["first_size"] == "1024.0 B"
    us = {n: np.array(text.split(), float) for n, text in found["all_reduce"]["us"].items()}
    assert us[2] == pytest.approx(1e6 * (20e-6 + OCTAVES / 5e9), rel=1e-4)
    assert us[4][:4] == pytest.approx(3 * us[2][:4], rel=1e-4)
    assert us[4] == pytest.approx(3 * us[2], rel=0.12)
    with pytest.raises(PlannerError, match="no all_gather inside a node was measured"):
        fit_links.scale_up(fit_links.curves(rows("all_reduce", 2, 1, 4, OCTAVES)), "fp32")


def test_across_nodes_the_constants_come_back() -> None:
    """Times made from a known network, 12.5 GB/s per NIC, give times back within a percent, for groups in between too."""
    measured, local, rate = [], 4, 12.5e9
    for op in COLLECTIVES:
        for n, stride in ((2, 4), (4, 4), (8, 4), (8, 1), (16, 1)):
            if op == "send_recv" and n > 2:
                continue
            r = Pattern(n=n, stride=stride).per_node(local)
            x = fit_links.transfer_bytes(op, OCTAVES * 64, n, r) / rate
            grows = np.log2(n / r) if op in ("all_reduce", "broadcast") else n - 1.0
            times = np.minimum(15e-6 + 2e-6 * grows + x / 0.3, 40e-6 + 4e-6 * grows + x / 0.9)
            measured += [
                Measured(
                    point=collective_point(op, Pattern(n=n, stride=stride), int(64 * size), "bf16", local),
                    median=t, low=t, high=t, repetitions=9,
                )
                for size, t in zip(OCTAVES, times.tolist(), strict=True)
            ]  # fmt: skip
    curves = fit_links.curves(measured)
    assert fit_links.network_rate(curves) == pytest.approx(0.9 * rate, rel=0.1)
    found = fit_links.scale_out(curves, "bf16", rate, "made")
    for op in COLLECTIVES:
        assert found[op]["errors"]["median_percent"] < 1.0, (op, found[op]["errors"])
        assert found[op]["bulk"]["efficiency"] == pytest.approx(0.9, abs=0.03)


def test_across_nodes_three_sizes_make_one_line() -> None:
    """What a short budget leaves: t = 30 us + x / 0.8, here and at sizes that were not measured."""
    rate, few = 10e9, OCTAVES[[0, len(OCTAVES) // 2, -1]] * 64
    measured = []
    for op in COLLECTIVES:
        x = fit_links.transfer_bytes(op, few, 2, 1) / rate
        measured += [
            Measured(
                point=collective_point(op, Pattern(n=2, stride=4), int(size), "bf16", 4), median=t, low=t, high=t, repetitions=9
            )
            for size, t in zip(few, (30e-6 + x / 0.8).tolist(), strict=True)
        ]  # fmt: skip
    found = fit_links.scale_out(fit_links.curves(measured), "bf16", rate, "made")
    for op in COLLECTIVES:
        curve = read(NetworkCurve, found[op], op)
        assert curve.fast == curve.bulk and curve.bulk.efficiency == pytest.approx(0.8, rel=0.01)
        assert curve.bulk.latency == pytest.approx(30e-6, rel=0.01)
    with pytest.raises(PlannerError, match="no all_reduce across nodes was measured at two sizes"):
        fit_links.scale_out([], "bf16", rate, "made")


# ------------------------------------------------------------------------------------------------ launchers


TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a",
    "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}  # fmt: skip


def test_places() -> None:
    found = place_from(TORCHRUN)
    assert found is not None and (found.rank, found.world, found.local_rank, found.node) == (5, 8, 1, 1)
    assert found.agent_store and (found.address, found.port) == ("a", 29400)
    found = place_from(SRUN)
    assert found is not None and (found.rank, found.world, found.local_rank, found.node) == (5, 8, 1, 1)
    assert (found.address, found.agent_store) == ("gpu003", False)
    assert place_from({}) is None
    assert place_from({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None, "the shell of an allocation is no rank"
    assert place_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None
    for broken, words in (
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x'"), ({**TORCHRUN, "RANK": "9"}, "rank 9 of 8"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not"), ({**SRUN, "SLURM_LOCALID": ""}, "SLURM_LOCALID"),
    ):  # fmt: skip
        with pytest.raises(PlannerError, match=words):
            place_from(broken)
    assert [first_host(text) for text in ("n1", "n1,n2", "gpu[03-07,9]-ib,b", "x[2,5]")] == [
        "n1",
        "n1",
        "gpu03-ib",
        "x2",
    ]


def test_printed_commands_are_shell(run: Any) -> None:
    done = run("profile", "--output", "my cluster.yaml", "--print-commands", "--nodes", "4", "--ranks", "8")
    assert done.exit_code == 0, done.output
    assert "torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=0 --rdzv-backend=c10d" in done.output
    assert "#SBATCH --job-name=profile --nodes=4 --ntasks-per-node=1 --gpus-per-node=8" in done.output
    on_cpu = run("profile", "--output", "x.yaml", "--print-commands", "--device", "cpu", "--ranks", "8").output
    assert "--nodes=2 --ntasks-per-node=8 --distribution=block" in on_cpu and "gpus" not in on_cpu
    login = run("profile", "--output", "x.yaml", "--print-commands", "--nodes", "4")
    assert "--nproc-per-node=8" in login.output and "no GPU here: 8 per machine assumed; --ranks N says" in login.output
    login = run("profile", "--output", "x.yaml", "--print-commands", "--nodes", "4", "--hardware", "gb300-nvl72").output
    assert "--nproc-per-node=4" in login and "no GPU here: 4 per machine as gb300-nvl72 has" in login
    text = commands("profile", 4, 8, ["--no-python", "plan", "profile", "--output", "my cluster.yaml"])
    assert "--no-python plan profile --output 'my cluster.yaml'" in text and "--rdzv-endpoint=$head:29400" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "--standalone" in commands("profile", 1, 8, ["--no-python", "plan"])
    with pytest.raises(PlannerError, match="at least 1"):
        commands("profile", 0, 8, [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "where to? Give --output FILE.yaml"),
        (("--output", "x.txt"), "a profile is a YAML file"),
        (("--output", "x.yaml", "--budget", "10"), "--budget: '10' has no unit; write it like 90s or 10m"),
        (("--output", "x.yaml", "--budget", "0m"), "--budget is 0 s; it must be above zero"),
        (("--output", "x.yaml", "--only", "colectives"), "unknown part 'colectives' of a profile; known: collectives"),
        (("--output", "x.yaml", "--model", "llama-7"), "unknown model 'llama-7'"),
        (("--output", "/nowhere/x.yaml"), "there is no directory /nowhere"),
        (("--output", "x.yaml", "--device", "cuda"), "neither the driver nor torch reports a GPU here"),
        (
            ("--output", "x.yaml", "--device", "cpu", "--ranks", "0"),
            "--ranks 0: the number of processes on this machine, from 1 to 64; it has",
        ),
        (("--output", "x.yaml", "--hardware", "none-such-9"), "unknown hardware 'none-such-9'"),
    ],
)
def test_bad_flags_are_sentences(run: Any, flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.lab.profile.command.need_torch", lambda: None)
    none = {"torch": "2.13.0+cpu", "cuda": None, "hip": None, "gpus": [], "error": ""}
    monkeypatch.setattr("planner.lab.launch.gpus.ask_torch", lambda *_: [none])
    done = run("profile", *flags)
    assert done.exit_code == 2 and words in done.output, done.output


def test_an_unknown_gpu_needs_a_relative(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.lab.profile.command.gpus_here", lambda _: Gpus(("NVIDIA Z1",), (80e9,)))
    done = run("profile", "--output", "x.yaml")
    assert done.exit_code == 2 and "no profile of 'NVIDIA Z1'; give --hardware with the nearest relative" in done.output


def test_ranks_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun waits long for a stopped rank, which has a session of its own; what it was started by is not ended."""
    monkeypatch.setattr(launch, "AFTER_LAST_WORDS", 0.2)
    agent = "import subprocess, sys; print('stopping'); subprocess.run(['setsid', 'sh', '-c', 'kill -STOP $$', sys.argv[-1]])"
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "agent"))
    (tmp_path / "agent").write_text(f"#!/bin/sh\nexec {sys.executable} -c \"{agent}\" {tmp_path}/rank\n")
    (tmp_path / "agent").chmod(0o755)
    (tmp_path / "failure.txt").write_text("rank 1 (a) stopped answering")
    shown: list[Any] = []
    with pytest.raises(PlannerError, match="^rank 1 .a. stopped answering(; all that .*)?$"):
        launch.run_here("module", "{}", 2, tmp_path, shown.append)
    words = f"{tmp_path}/rank".encode()
    running = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert shown and not any(words in one for one in running)


def test_what_a_failed_run_says_of_its_journal(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a journal that this run has written is said to hold what it measured."""
    output = tmp_path / "mine.yaml"
    journal = tmp_path / "mine.journal.json"

    def fails(*_: Any) -> float:
        raise PlannerError("rank 1 (a) died")

    def writes(*more: Any) -> float:
        library.write_whole(journal, "{}")
        return fails(*more)

    words = ("profile", "--device", "cpu", "--output", str(output))
    for how, kept in ((fails, False), (writes, True), (fails, False)):
        monkeypatch.setattr("planner.lab.profile.command.profile_here", how)
        done = run(*words)
        assert done.exit_code == 2 and "error: rank 1 (a) died" in done.output
        assert (f"what was measured is kept in {journal}; --resume goes on" in done.output) == kept, done.output


def test_the_bar_says_at_most_only_of_a_limit() -> None:
    assert State(spent=3.0, budget=10.0).left == "at most 7 s left"
    assert State(expected=7.0).left == "about 7 s left"
    assert State(spent=30.0, budget=10.0).left == "over the budget" and State(spent=3.0).left == ""


# ------------------------------------------------------------------------------------------------ the file


def journal_of(path: Path, world: int, local: int, device: str = "cpu") -> Journal:
    head = {
        "device": device, "name": "NVIDIA H100 80GB HBM3" if device == "cuda" else "Some CPU", "host": "node7",
        "nodes": world // local, "world": world, "local": local, "cores": 8, "memory": 2.0**34, "units": 132,
        "driver": "570.1" if device == "cuda" else "", "versions": {"torch": "2.13.0", "nccl": "2.29.2"},
    }  # fmt: skip
    journal = Journal(path, head)
    dtype = assemble.main_dtype(device)
    for pattern in plain_patterns(world, local):
        for op in COLLECTIVES:
            if op == "send_recv" and pattern.n != 2:
                continue
            speed = 20e9 if pattern.nodes(local) > 1 else 300e9
            seconds = 20e-6 * pattern.n + factor(op, pattern.n) * OCTAVES / speed / min(pattern.per_node(local), 1)
            for one in rows(op, pattern.n, pattern.stride, local, seconds, dtype):
                journal.add(one)
    return journal


def test_links_of_a_known_gpu_join_its_library_profile(tmp_path: Path) -> None:
    wanted = Settings(
        output=str(tmp_path / "mine.yaml"), device="cuda", budget=60.0, command="plan profile --output mine.yaml"
    )
    journal = journal_of(wanted.journal, 16, 8, "cuda")
    for fact, size in (("communicator", 3e8), ("expert_communicator", 5e8)):
        point = Point.of("bytes", name=fact)
        journal.add(Measured(point=point, median=size, low=size, high=size, repetitions=1, confidence=0.0))
    journal.write()
    profile = assemble.write_profile(wanted, 12.0)
    assert (profile.communicator_memory, profile.expert_communicator_memory) == (3e8, 5e8), (
        "with --only collectives too"
    )
    again = load_hardware(wanted.output)
    assert again.name == "mine" and again.measured["scale_up"] == again.measured["scale_out"] == "measured"
    assert again.measured["gemm"] == "scaled from h100-sxm" and again.peak_flops == load_hardware("h100-sxm").peak_flops
    for op in COLLECTIVES:
        n = 2 if op == "send_recv" else 8
        wished = 20e-6 * n + factor(op, n) * OCTAVES / 300e9
        assert again.scale_up_time(op, OCTAVES, n) == pytest.approx(wished, rel=1e-3), op
    origin = again.provenance
    assert origin is not None and origin.driver == "570.1" and origin.versions["nccl"] == "2.29.2"
    assert "16 ranks on 2 nodes" in origin.machine and origin.command == "plan profile --output mine.yaml"
    assert origin.spread["collective all_reduce"] == pytest.approx(2.0) and origin.cost["seconds"] == 12.0
    assert origin.residuals["all_reduce n8 stride1 bf16"][0] < 0.1
    kept = again.measurements["collective"]
    assert {(row["op"], row["n"]) for row in kept} >= {("all_gather", 8), ("send_recv", 2)}
    assert kept[0]["fits"][0]["median_percent"] < 0.1 and len(kept[0]["us"].split()) == len(OCTAVES)
    assert "&id" not in Path(wanted.output).read_text() and profile.name == "mine"


def test_too_little_is_said(tmp_path: Path) -> None:
    wanted = Settings(output=str(tmp_path / "mine.yaml"), device="cpu", budget=60.0)
    with pytest.raises(PlannerError, match="nothing was measured"):
        assemble.write_profile(wanted, 1.0)
    journal_of(wanted.journal, 2, 2).write()
    with pytest.raises(PlannerError, match="run again with --resume and --only compute"):
        assemble.write_profile(wanted, 1.0)
    assert not Path(wanted.output).exists()


def test_a_slow_card_and_a_slow_link_stand_out(tmp_path: Path) -> None:
    assert slowest_of([1.0, 1.0, 1.3, 1.0]) == (2, pytest.approx(1.3)) and slowest_of([2.0]) == (0, 1.0)
    assert slowest_group([[0, 1], [2, 3], [4, 5]], [1.0, 1.1, 2.2, 1.0, 1.0, 1.0]) == ("2 3", pytest.approx(2.2 / 1.05))
    wanted = Settings(output=str(tmp_path / "mine.yaml"), device="cuda", budget=60.0)
    journal = journal_of(wanted.journal, 16, 8, "cuda")
    journal.add(Measured(
        point=rank_point("cuda"), median=1e-3, low=1e-3, high=1e-3, repetitions=1,
        details={"host": "node9", "over_median": 1.3, "ranks": 16, "slowest": 9},
    ))  # fmt: skip
    slow = collective_point("send_recv", Pattern(n=2, stride=1), 2**20, "bf16", 8)
    journal.add(Measured(
        point=slow, median=1e-2, low=1e-2, high=1e-2, repetitions=9,
        details={"over_median": 2.5, "slowest_group": "4 5"},
    ))  # fmt: skip
    journal.write()
    notes = assemble.write_profile(wanted, 1.0).notes
    assert any("rank 9 (node9) computes 1.30 times as long" in note for note in notes), notes
    assert any("send_recv of 1 MiB" in note and "ranks 4 5 take 2.5 times as long" in note for note in notes), notes
