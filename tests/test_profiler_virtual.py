"""What the profiler's own timing code measures on GPUs whose truth is known (``virtual_cuda``), within a few percent of it."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_cuda import VirtualCuda, VirtualRanks, operation

from planner import units
from planner.lab.profile.patterns import Pattern, collective_point, overlap_points
from planner.lab.profile.points import Point

torch = pytest.importorskip("torch")

from planner.lab.profile import collective_timing, compute_timing, device_timing, overlap_timing, timing  # noqa: E402


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
        beside = compute_timing.beside(run, Point.of("gemm", pass_="forward"))
        assert beside["eager_us"] == pytest.approx(host / units.MICRO, rel=0.05)
        assert beside["graph_us"] == pytest.approx(truth / units.MICRO, rel=0.05)


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


def test_an_overlap_of_launches_is_refused(on: Any) -> None:
    """1024 GEMMs that end before the collective begins gave 1.25 for a true 1.3."""
    ranks: Any = on(VirtualCuda((0.0, 30e-6), (1.3, 1.3)), gemm=20e-6)
    for point in overlap_points(2, 2, 2**28, "bf16", 1.0)[:2]:
        with pytest.raises(collective_timing.NotMeasuredError, match=r"takes 20 us alone, less than 10 times the 6 us"):
            overlap_timing.measure_overlap(point, ranks, None, 0.05)  # type: ignore[arg-type]
