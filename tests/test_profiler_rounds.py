"""How the profiler measures on a machine that others use: rounds, a yardstick, and a journal that outlives the worker."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profiler_samples import LAYERS, known

from planner.errors import PlannerError
from planner.lab.profile import definitions
from planner.lab.profile.compute_points import warm_up_point
from planner.lab.profile.points import Measured, Point
from planner.lab.profile.timing import Rounds, Yardstick, measure, steady, warm_up

pytest.importorskip("torch")


def test_rounds_and_the_yardstick_take_a_busy_machine_out() -> None:
    """A machine that is slowed to half from the 16th run on: samples after it are the same by the yardstick; the warm-up waits
    for two windows that agree and no longer than its limit; of rounds the middle one counts."""
    work = {"runs": 0}

    def spin(times: int) -> None:
        work["runs"] += 1
        for _ in range(times * (2 if work["runs"] > 16 else 1)):
            sum(range(20000))

    for _ in range(3):  # a clock that jumps in the middle of it is tried again
        work["runs"] = 0
        yardstick = Yardstick(run=lambda: spin(2), reference=1.0)
        base = sorted(yardstick.seconds() for _ in range(10))[2]
        found = measure(
            lambda: spin(6), device="cpu", clock="cpu", budget_s=0.3, yardstick=replace(yardstick, reference=base)
        )  # fmt: skip
        if found.median == pytest.approx(3.0 * base, rel=0.25) and found.details["slowed"] > 1.4:
            break
    assert found.median == pytest.approx(3.0 * base, rel=0.25) and found.details["slowed"] > 1.4
    assert found.measured(definitions.gemm("fp32", "forward", 8, 8, 8)).details.keys() == {"slowed"}
    assert not steady([1.0] * 9) and steady([3.0, 2.0, *[1.0] * 10]) and not steady([2.0] * 5 + [1.0] * 5)
    falling = iter(np.exp(-np.arange(400.0)))
    blocks, lasted = warm_up(lambda: float(next(falling)) if not time.sleep(0.04) else 0.0, 0.5)
    assert not steady(blocks) and 0.5 <= lasted < 2.0
    rounds, point = Rounds(), definitions.gemm("fp32", "forward", 8, 8, 8)
    counted_ = [rounds.add(known(point, seconds)) for seconds in (3.0, 1.0, 2.0)]
    assert [one.median for one in counted_] == [3.0, 1.0, 2.0]
    assert counted_[-1].details == {"rounds": 3, "over_rounds": 2.0} and point in rounds


def test_what_was_measured_is_kept_and_a_point_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is stopped in the second round: the journal has the first one whole; a resumed one measures the rest."""
    from planner.lab.profile import compute_timing, worker
    from planner.lab.profile.journal import Journal
    from planner.lab.profile.points import Settings
    from planner.lab.profile.profile_file import _failures

    product, low, late = (
        definitions.gemm(dtype, "forward", 64, 64, 64 * scale)
        for dtype, scale in (("fp32", 1), ("nvfp4", 1), ("fp32", 2))
    )
    more = [definitions.gemm("nvfp4", name, 64, 64, 64) for name in ("dgrad", "wgrad")]
    whole = Point.of("layer", pass_="forward", dtype="fp32", **LAYERS[0])
    points, visited = [product, low, *more, whole, late], []

    def measured(point: Point, device: str, budget: float) -> Measured:
        visited.append(point)
        if point in (low, *more):
            raise PlannerError(f"{point.label}: products in nvfp4 need a GPU; this is a CPU")
        if visited.count(whole) == 2:
            raise KeyboardInterrupt
        return known(point, 1e-3 * len(visited))

    class Ranks:
        first, timeout, place, watch = True, 1.0, type("Place", (), {"rank": 0}), None

    Ranks.watch = type("Watch", (), {"doing": staticmethod(lambda *_: contextlib.nullcontext())})  # type: ignore[assignment]
    monkeypatch.setattr(compute_timing, "measure_compute", measured)
    path = tmp_path / "mine.journal.json"

    def go(journal: Journal, points: list[Point]) -> None:
        settings = Settings(output=str(tmp_path / "mine.yaml"), device="cpu", budget=30.0)
        teller: Any = worker.Teller(None)
        with journal:
            run = worker.Run(
                settings=settings, ranks=Ranks(), journal=journal, teller=teller, begun=time.monotonic(),  # type: ignore[arg-type]
            )  # fmt: skip
            worker._alone(run, points, 1.0)

    with pytest.raises(KeyboardInterrupt):
        go(Journal(path, {}), points)
    assert visited == [warm_up_point("cpu"), product, low, *more, whole, product, whole], (
        "failed ones are not tried again"
    )
    kept = Journal.read(path)
    assert product in kept and whole in kept and late not in kept
    assert _failures(kept) == [
        f"not measured: {low.label} and 2 more like it: products in nvfp4 need a GPU; this is a CPU"
    ]
    assert [one.details["rounds"] for one in kept.of() if one.point == product] == [2]
    visited.clear()
    resumed = Journal.resume(path, {})
    go(resumed, [point for point in points if point not in resumed])
    assert late in resumed and visited.count(late) == 5 and product not in visited and visited.count(low) == 1
