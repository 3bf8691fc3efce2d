"""What the profiler's own timing code measures on GPUs whose truth is known (``virtual_cuda``), within a few percent of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_cuda import Event, VirtualCuda, VirtualRanks, operation

from planner import units
from planner.errors import PlannerError
from planner.lab.profile import compute_points, definitions
from planner.lab.profile.patterns import Pattern, collective_point, factor, form_points, overlap_points
from planner.lab.profile.points import Journal, Measured, Point, Settings

torch = pytest.importorskip("torch")

from planner.lab.profile import (  # noqa: E402
    collective_forms,
    collective_timing,
    compute_timing,
    device_timing,
    overlap_timing,
    timing,
)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the project's timing code on a virtual machine."""

    def install(cuda: VirtualCuda, collective: float = 1e-3, gemm: float = 1e-3, mm: float = 6e-6) -> VirtualRanks:
        fake = cuda.as_torch(empty=lambda *_, **__: None, mm=lambda *_, **__: cuda.kernel(gemm, mm))
        for module in (collective_timing, device_timing, overlap_timing):
            monkeypatch.setattr(module, "torch", fake)
        for module in (timing, device_timing, overlap_timing):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=cuda.perf_counter))
        for module in (collective_timing, overlap_timing):
            monkeypatch.setattr(module, "Operation", operation(cuda, collective))
        monkeypatch.setattr(overlap_timing, "values", lambda *_: None)
        device_timing.spin_rate.cache_clear()
        return VirtualRanks(cuda)

    yield install
    device_timing.spin_rate.cache_clear()


SKEWS = ((0.0, 0.0), (0.0, 30e-6), (0.0, 100e-6))


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("truth", [8e-6, 12e-6, 16e-6, 400e-6])
def test_messages_shorter_than_their_dispatch(on: Any, truth: float, skew: tuple[float, float]) -> None:
    """A host needs 25 us for a collective: of shorter ones nothing but that was measured before."""
    ranks: Any = on(VirtualCuda(skew), collective=truth)
    point = collective_point("all_reduce", Pattern(n=2, stride=1), 2**10, "bf16", 2)
    found = collective_timing.measure_collective(point, ranks, None, 0.05)  # type: ignore[arg-type]
    assert found is not None
    assert found.median == pytest.approx(truth, rel=0.03)
    assert "queued" not in found.details
    assert ranks.cuda.blocked == 0


KERNELS = {
    "RoPE backward of a shard of 8": (16, 25e-6, 63e-6), "compiled SwiGLU backward": (1, 30e-6, 73e-6),
    "flash attention of 1k tokens": (1, 15e-6, 32e-6), "a long product": (1, 2e-3, 6e-6),
}  # fmt: skip
"""Kernels of a run, its seconds on the device, and those of the host."""


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_shorter_than_their_dispatch(on: Any, name: str) -> None:
    count, truth, host = KERNELS[name]
    cuda = VirtualCuda((0.0,))
    on(cuda)

    def run() -> None:
        for _ in range(count):
            cuda.kernel(truth / count, host / count)

    found = timing.measure(run, device="cuda", budget_s=0.02)
    assert found.median == pytest.approx(truth, rel=0.03)
    eager = timing.measure(run, device="cuda", budget_s=0.02, ahead=False)
    assert eager.median == pytest.approx(max(truth, host), rel=0.05), "what it takes beside: the host's time"
    if truth < compute_timing.SHORT:
        more = compute_timing.more_figures(run, Point.of("gemm", pass_="forward"))
        assert more["eager_us"] == pytest.approx(host / units.MICRO, rel=0.05)
        assert more["graph_us"] == pytest.approx(truth / units.MICRO, rel=0.05)


SLOWER = ((1.0, 1.0), (1.3, 1.3), (1.1, 1.6))
FEW = {(60e-6, SLOWER[0], SKEWS[2]), (105e-6, SLOWER[1], SKEWS[1]), (900e-6, SLOWER[2], SKEWS[0])}


@pytest.mark.parametrize(
    ("collective", "slower", "skew"),
    [
        pytest.param(*case, marks=[] if case in FEW else [pytest.mark.proof])
        for case in product((60e-6, 105e-6, 900e-6, 11e-3), SLOWER, SKEWS)
    ],
)
def test_overlap_is_neither_dispatch_nor_skew(
    on: Any, collective: float, slower: tuple[float, float], skew: tuple[float, float]
) -> None:
    """Without any contention 1.25 to 3.0 was reported for short collectives, by dispatch and peers that come late."""
    ranks: Any = on(VirtualCuda(skew, slower), collective=collective, gemm=1.5e-3)
    gemm, message = (
        overlap_timing.measure_overlap(point, ranks, None, 0.05)  # type: ignore[arg-type]
        for point in overlap_points(2, 2, 2**28, "bf16", 1.0)[:2]
    )
    assert (gemm.point["of"], message.point["of"]) == ("gemm", "collective")
    assert gemm.details["slowdown"] == pytest.approx(slower[0], rel=0.02)
    assert message.details["slowdown"] == pytest.approx(slower[1], rel=0.02)
    assert message.details["alone"] == pytest.approx(collective, rel=0.02)
    assert gemm.details["alone"] == pytest.approx(1.5e-3, rel=0.02)


def test_one_queue_of_all_streams_shows_no_overlap(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron sets it: collectives behind the first would begin before any product beside them."""
    ranks: Any = on(VirtualCuda((0.0, 0.0)))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(collective_timing.NotMeasuredError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 makes one queue"):
        overlap_timing.measure_overlap(overlap_points(2, 2, 2**28, "bf16", 1.0)[0], ranks, None, 0.05)  # type: ignore[arg-type]


def test_what_ends_too_early_is_queued_longer_or_refused(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs that end before the collective does, and a host that is slower than the spin, are seen, and tried again."""
    ranks: Any = on(VirtualCuda((0.0, 30e-6), (1.3, 1.3)), collective=2e-3)
    gemm, message = overlap_points(2, 2, 2**28, "bf16", 1.0)[:2]
    for name, value in (("COVER", 0.2), ("START_SPIN", 50e-6)):  # too few of them, too short a spin at first
        with monkeypatch.context() as patch:
            patch.setattr(overlap_timing, name, value)
            for point in (gemm, message):
                found = overlap_timing.measure_overlap(point, ranks, None, 0.05)  # type: ignore[arg-type]
                assert found.details["slowdown"] == pytest.approx(1.3, rel=0.02)
    monkeypatch.setattr(Event, "query", lambda _: True)  # the device is there before the host, however long it spins
    with pytest.raises(
        collective_timing.NotMeasuredError, match="the device began before the host had queued it, 4 times"
    ):
        overlap_timing.measure_overlap(gemm, ranks, None, 0.05)  # type: ignore[arg-type]


def test_an_overlap_of_launches_is_refused(on: Any) -> None:
    """1024 GEMMs that end before the collective begins gave 1.25 for a true 1.3."""
    ranks: Any = on(VirtualCuda((0.0, 30e-6), (1.3, 1.3)), gemm=20e-6)
    for point in overlap_points(2, 2, 2**28, "bf16", 1.0)[:2]:
        with pytest.raises(collective_timing.NotMeasuredError, match=r"takes 20 us alone, less than 10 times the 6 us"):
            overlap_timing.measure_overlap(point, ranks, None, 0.05)  # type: ignore[arg-type]


def test_operands_that_a_large_cache_would_keep_are_measured_cold(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 sets of 1 MB stay in the 126 MB of a B200: out of the cache a run takes 6 us, out of memory 10."""
    from planner.lab.profile import tensors

    cuda = VirtualCuda((0.0,))
    on(cuda)
    kept: set[int] = set()

    def empty() -> None:
        cuda.kernel(80e-6, 4e-6)
        kept.clear()

    def make() -> Any:
        def run() -> None:
            cuda.kernel(6e-6 if id(run) in kept else 10e-6, 5e-6)
            kept.add(id(run))

        return run

    monkeypatch.setattr(tensors, "cache_bytes", lambda _: 126e6)
    monkeypatch.setattr(tensors, "flush", lambda: empty)
    for size, sets in ((1e6, tensors.MOST_SETS), (126e6, 3)):  # of the large ones three push each other out
        kept.clear()
        run = tensors.rotating(make, size, "cuda")
        assert len(run._runs) == sets
        if sets == 3:
            assert run.before is None
            continue
        found = timing.measure(run, device="cuda", budget_s=0.02)
        assert found.median == pytest.approx(10e-6, rel=0.01)


@pytest.mark.parametrize("slowest", [0, 2])
def test_what_neighbours_share_is_measured_on_all_ranks_and_the_slowest_counts(
    monkeypatch: pytest.MonkeyPatch, slowest: int
) -> None:
    """A clock and copies beside idle neighbours are not those of a job."""
    from planner.hardware import load_hardware
    from planner.lab.profile import all_ranks
    from planner.lab.profile.fit_compute import machine_keys
    from planner.lab.profile.fitting import Base

    ranks: Any = VirtualRanks(VirtualCuda((0.0,) * 4))
    mine = {"sustained": 1.8e-3, "host_copy": 5e-3}

    def measured(point: Point, device: str, budget_s: float) -> Measured:
        assert device == "cuda"
        return Measured.fact(
            point, mine[point.family], details={"first": 1.5e-3} if point.family == "sustained" else {}
        )

    def collect(found: Any) -> list[Any]:
        others = [found] * 4
        others[slowest] = replace(found, median=1.25 * found.median)
        return others

    ranks.collect = collect
    monkeypatch.setattr(compute_timing, "measure_compute", measured)
    points = all_ranks.shared_points(4)
    assert sorted(point.family for point in points) == ["host_copy", "host_copy", "sustained"]
    rows = [all_ranks.measure_shared(point, ranks, 1.0) for point in points]
    for one in rows:
        assert one.median == pytest.approx(1.25 * mine[one.point.family])
        assert (one.details["slowest"], one.details["over_median"]) == (slowest, pytest.approx(1.25))
    alone = [
        Measured.fact(replace(p, key=tuple(pair for pair in p.key if pair[0] != "ranks")), mine["host_copy"])
        for p in points[1:]
    ]
    guess = load_hardware("h100-sxm")
    base = Base(peak_flops=dict(guess.peak_flops), bandwidth=guess.memory_bandwidth, compute_units=132, guess=guess)
    keys = machine_keys([*rows, *alone], base, "cuda")
    assert keys["sustained_clock"] == pytest.approx(1.5 / 2.25, abs=1e-3)
    assert float(keys["pcie_bandwidth"].split()[0]) == pytest.approx(256 * 2**20 / 6.25e-3, rel=1e-3)

    ranks.collect = lambda found: [found, PlannerError("CUDA out of memory"), found, found]
    with pytest.raises(collective_timing.NotMeasuredError, match=r"rank 1 \(node\): CUDA out of memory"):
        all_ranks.measure_shared(points[0], ranks, 1.0)


def test_products_beside_collectives_have_random_operands() -> None:
    """On ones a GPU draws less power: a card that its power limit slows down looks well."""
    assert float(overlap_timing.square(32, "fp32", "cpu")().std()) > 1.0  # type: ignore[attr-defined]


def test_forms_beside_the_curves(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a message of 8 us: what a host that dispatches while it is timed makes of it, and a CUDA graph."""
    ranks: Any = on(VirtualCuda((0.0, 30e-6)), collective=8e-6)
    monkeypatch.setattr(collective_forms, "Operation", operation(ranks.cuda, 8e-6))
    ranks.collect = lambda value: [value, value]
    found = {}
    for form in ("eager", "graph"):
        point = next(one for one in form_points(2, 2, [2**10], "bf16", 0.5) if one["form"] == form)
        one = collective_forms.measure_form(point, ranks, None, 0.05)  # type: ignore[arg-type]
        assert one is not None
        found[form] = one.median
    assert found["eager"] == pytest.approx(25e-6, rel=0.05)
    assert found["graph"] == pytest.approx(8e-6, rel=0.03)


def test_a_collective_that_cannot_be_captured_is_left_out_on_all_ranks(
    on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: Any = on(VirtualCuda((0.0, 0.0)))

    def refuse(_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(collective_forms, "Operation", operation(ranks.cuda, 8e-6))
    monkeypatch.setattr(collective_forms, "captured", refuse)
    ranks.collect = lambda value: ["", value]
    point = next(one for one in form_points(2, 2, [2**10], "bf16", 0.5) if one["form"] == "graph")
    with pytest.raises(
        collective_timing.NotMeasuredError, match=r"all_reduce \(graph\) of 1 KiB .*: cannot be captured: oper"
    ):
        collective_forms.measure_form(point, ranks, None, 0.05)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ a whole profile

KERNEL, MESSAGE, BUS, HOST = 3e-6, 9e-6, 300e9, 25e-6
"""Seconds of an empty kernel and an empty message, bytes per second of the link, and seconds of the host for either."""


def seconds_of(point: Point) -> float:
    """On the virtual device: 600 TFLOP/s and 2.8 TB/s."""
    return KERNEL + definitions.flop(point) / 600e12 + definitions.moved_bytes(point) / 2.8e12


@pytest.mark.proof
def test_a_whole_profile_of_a_virtual_node_is_that_of_the_node(
    on: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All parts of two ranks, from the points to the file that is read back; none fails."""
    from planner.hardware import load_hardware
    from planner.lab.launch.state import Teller
    from planner.lab.profile import all_ranks, profile_file, worker
    from planner.lab.profile import operator_runs as operators

    cuda = VirtualCuda((0.0, 20e-6), (1.1, 1.4))
    ranks: Any = on(cuda, gemm=1.5e-3)
    clock = SimpleNamespace(perf_counter=cuda.perf_counter, monotonic=cuda.perf_counter)
    for module in (timing, worker, compute_timing, device_timing, overlap_timing):
        monkeypatch.setattr(module, "time", clock)

    def made(op: str, size: int, *_: Any) -> Any:
        return operation(cuda, MESSAGE + size / BUS * factor(op, 2), HOST)()

    def large(point: Point) -> float:
        return 100.0 if point.values.get("name") == "usable" else 1.0

    def operator(point: Point, _: str) -> Any:
        if point["dtype"] in ("mxfp8", "nvfp4"):
            raise ValueError("compute capability 10.0")
        return lambda: cuda.kernel(seconds_of(point), HOST)

    for module in (collective_timing, collective_forms, overlap_timing):
        monkeypatch.setattr(module, "Operation", made)
    monkeypatch.setattr(collective_forms, "InPlace", made)
    monkeypatch.setattr(collective_forms, "dist", SimpleNamespace(all_reduce=lambda *_, **__: None))
    monkeypatch.setattr(collective_forms, "torch", cuda.as_torch())
    monkeypatch.setattr(operators, "operator", operator)
    hot = 1.1 * seconds_of(definitions.gemm("bf16", "forward", 8192, 8192, 8192))
    monkeypatch.setattr(compute_timing, "_product", lambda *_: lambda: cuda.kernel(hot, 6e-6))
    monkeypatch.setattr(operators, "which_kernel", lambda *_: {})
    monkeypatch.setattr(compute_timing, "captured", lambda run, runs=16: lambda: [run() for _ in range(runs)])
    facts = {"memory_fact": 8e8, "launch": 2e-6, "warm_up": 1e-3, "host_copy": 5e-3, "on_host": 0.05}
    for name, value in facts.items():
        monkeypatch.setattr(
            compute_timing, name, lambda point, *_, value=value: Measured.fact(point, value * large(point))
        )
    monkeypatch.setattr(compute_timing, "lost", lambda: "")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(worker, "Buffers", lambda *_: None)
    monkeypatch.setattr(worker, "_communicator", lambda _: None)
    monkeypatch.setattr(all_ranks, "SECONDS", {"cuda": 2.0})
    monkeypatch.setitem(compute_points.SUSTAINED_SECONDS, "cuda", 2.5)

    ranks.place, ranks.names = SimpleNamespace(rank=0, world=2), ["NVIDIA H100 80GB HBM3"] * 2
    ranks.from_first = lambda values, meanwhile=None: [float(one) for one in values]
    ranks.collect = lambda value: [value, value]
    ranks.form, ranks.destroy = lambda _: "a group", lambda _: None
    settings = Settings(output=str(tmp_path / "node.yaml"), device="cuda", budget=30.0, models=("llama-8b",))
    head = {
        "device": "cuda", "name": ranks.names[0], "host": "node", "nodes": 1, "world": 2, "local": 2, "cores": 8,
        "memory": 8e10, "driver": "580", "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    journal = Journal(settings.journal, head)
    run = worker.Run(settings=settings, ranks=ranks, journal=journal, teller=Teller(None), begun=0.0)
    with journal:
        worker._measure(run)
    reasons = {why.rsplit(": ")[-1] for _, why in journal.failed}
    assert reasons <= {"the budget was spent", "compute capability 10.0"}
    for one in journal.of("gemm", "attention", "memory_bound", "grouped_gemm"):
        assert one.median == pytest.approx(seconds_of(one.point), rel=0.03), one.point.label
    for one in journal.of("collective"):
        wanted = MESSAGE + one.point["size"] / BUS * factor(one.point["op"], 2)
        assert one.median == pytest.approx(wanted, rel=0.03), one.point.label
    assert {one.point["form"] for one in journal.of("collective_form")} == {"eager", "graph", "in_place", "no_nvls"}
    profile_file.write_profile(settings, 40.0)
    again = load_hardware(settings.output)
    assert again.overlap["inside"].compute == pytest.approx(1.1, rel=0.02)
    assert again.overlap["inside"].communication == pytest.approx(1.4, rel=0.02)
    assert float(again.scale_up_time("all_reduce", 1024.0, 2)) == pytest.approx(MESSAGE, rel=0.03)
    assert again.sustained_clock == pytest.approx(1 / 1.1, rel=0.02)
    assert len(again.measurements["collective_form"]) == len(journal.of("collective_form")) > 20
