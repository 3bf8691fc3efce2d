"""What a profile would run on a GPU, without one: every compiled shape, one failed point among good ones, a device that is lost."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.lab.profile import definitions
from planner.lab.profile.definitions import COMPILED
from planner.lab.profile.points import LOST, Journal, Measured, Point, Settings

torch = pytest.importorskip("torch")


@pytest.fixture
def compiler_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of a GPU on tensors of the processor; torch.compile traces and guards as ever, and runs what it traced."""
    from planner.lab.profile import tensors

    real = tensors.values
    monkeypatch.setattr(tensors, "values", lambda shape, dtype, _: real(shape, dtype, "cpu"))
    monkeypatch.setattr(tensors, "cache_bytes", lambda _: 10.0)  # a few sets of operands each
    monkeypatch.setattr(tensors, "flush", lambda: None, raising=False)
    monkeypatch.setattr(torch, "arange", functools.partial(_on_cpu, torch.arange))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def _on_cpu(make: Callable[..., Any], *sizes: Any, device: str = "", **more: Any) -> Any:
    return make(*sizes, **more)


@pytest.mark.proof
@pytest.mark.usefixtures("compiler_on_a_cpu")
def test_more_compiled_shapes_than_torch_recompiles() -> None:
    """torch gives a function up after 8 shapes; the default profile has 17 of the rotary embedding alone."""
    from planner.lab.profile.operator_runs import operator

    limit = torch._dynamo.config.recompile_limit
    for rows in range(1, limit + 2):
        run: Any = operator(definitions.rope("forward", rows, (2, 1, 4), "fp32", COMPILED), "cuda")
        for _ in range(2):  # as many sets of operands
            turned = run()
        assert [tuple(one.shape) for one in turned] == [(1, rows, 2, 4), (1, rows, 1, 4)]


POINTS = [definitions.gemm("fp32", "forward", size, 8, 8) for size in (64, 96, 128, 160)]


def one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: Callable[[Point], Exception | None], lost: str = "",
    *, resume: bool = False,
) -> Journal:  # fmt: skip
    """The journal of a rank that measures POINTS, some of which raise; ``lost`` is what the driver then says of the device."""
    from planner.lab.launch.state import Teller
    from planner.lab.profile import compute_timing, worker
    from planner.lab.profile import operator_runs as operators

    def measured(point: Point, device: str) -> Any:
        if error := raised(point):
            raise error
        return lambda: None

    monkeypatch.setattr(operators, "operator", measured)
    monkeypatch.setattr(compute_timing, "lost", lambda: lost)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compute_timing, "_timed", lambda *_, **__: Measured.fact(POINTS[0], 1e-3))
    monkeypatch.setattr(compute_timing, "warm_up", lambda point, *_: Measured.fact(point, 1.0))
    settings = Settings(output=str(tmp_path / "node.yaml"), device="cuda", budget=5.0, resume=resume)
    watch = SimpleNamespace(doing=lambda *_: contextlib.nullcontext())
    ranks: Any = SimpleNamespace(place=SimpleNamespace(rank=0), timeout=9.0, first=True, watch=watch, device="cuda")
    journal = Journal.resume(settings.journal, {}) if resume else Journal(settings.journal, {})
    run = worker.Run(settings=settings, ranks=ranks, journal=journal, teller=Teller(None), begun=time.monotonic())
    try:
        worker._alone(run, [point for point in POINTS if point not in journal], 1.0)
    finally:
        journal.write()
    return journal


def test_a_point_that_fails_is_kept_with_its_error_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever torch, its compiler or a library raises: a ValueError of the scaled products, an assertion."""
    errors = {96: ValueError("scale_a must be float8_e8m0fnu"), 160: AssertionError("no Triton")}
    journal = one_after_the_other(monkeypatch, tmp_path, lambda point: errors.get(point["m"]))
    assert [one.point["m"] for one in journal.of("gemm")] == [64, 128]
    assert {point["m"]: reason for point, reason in journal.failed} == {
        96: f"{POINTS[1].label}: scale_a must be float8_e8m0fnu", 160: f"{POINTS[3].label}: no Triton",
    }  # fmt: skip


def test_a_device_that_is_lost_ends_with_a_sentence_and_resume_goes_on_behind_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "CUDA error: an illegal memory access was encountered"
    error = RuntimeError(said)
    sentence = f"the GPU gives no further results after gemm .*m=96.*: {said}; .*--resume leaves this point out"
    with pytest.raises(PlannerError, match=sentence):
        one_after_the_other(monkeypatch, tmp_path, lambda point: error if point["m"] == 96 else None, said)
    kept = Journal.read(tmp_path / "node.journal.json")
    assert [one.point["m"] for one in kept.of("gemm")] == [64]
    again = one_after_the_other(monkeypatch, tmp_path, lambda _: None, resume=True)
    assert [one.point["m"] for one in again.of("gemm")] == [64, 128, 160]
    assert [(point["m"], reason.startswith(LOST)) for point, reason in again.failed] == [(96, True)]


@pytest.mark.proof
@pytest.mark.parametrize("hardware", ["h100-sxm", "b200-sxm"])
def test_every_forward_point_of_the_default_profile_takes_its_operands(
    monkeypatch: pytest.MonkeyPatch, hardware: str
) -> None:
    """torch's own shape functions for CUDA, without a GPU: layouts, alignment, types and scales.

    A build without CUDA cannot slice or copy fake tensors of the device: parts of longer keys, rotations and copies are checked
    on those of the processor. Gradients, and products that add to an fp32 gradient, need a build with CUDA; layers run elsewhere.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from planner.lab.profile import tensors
    from planner.lab.profile.compute_points import compute_points
    from planner.lab.profile.operator_runs import attention_shapes, operator

    monkeypatch.setattr(tensors, "cache_bytes", lambda _: 0.0)
    tensors._drawn()  # cached: not a fake one
    checked: dict[tuple[str, str], int] = {}
    for point in compute_points((), hardware, "cuda"):
        value = point.values
        if value.get("pass") in (None, "backward", definitions.ACCUMULATING) or point.family == "layer":
            continue
        here = "seq_kv" in value or value.get("op") in ("rope", "copy")
        kernel = {COMPILED: definitions.EAGER, "cudnn": "default" if here else "cudnn"}.get(str(value.get("kernel")))
        like = Point.of(
            point.family, **value | ({"kernel": kernel} if kernel else {})
        )  # uncompiled, and what a CPU has
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            made: Any = operator(like, "cpu" if here else "cuda")()
        shapes = [tuple(one.shape) for one in (made if isinstance(made, list | tuple) else [made]) if one is not None]
        if point.family == "gemm":
            assert shapes == [definitions.rows_columns_depth(point)[:2]], point.label
        if point.family == "grouped_gemm":
            rows, n, k, groups = (int(value[name]) for name in ("tokens", "n", "k", "groups"))
            wanted = {"forward": (rows * groups, n), "dgrad": (rows * groups, k), "wgrad": (groups, n, k)}
            assert shapes == [wanted[str(value["pass"])]], point.label
        if point.family == "attention":
            queries, _, values = attention_shapes(point)
            assert all(one[:2] + one[3:] == (*queries[:2], values[3]) for one in shapes), point.label
        kind = str(value["dtype"]), "here" if here else "cuda"
        checked[kind] = checked.get(kind, 0) + 1
    assert sum(checked.values()) > 500
    assert {dtype for dtype, where in checked if where == "cuda"} >= {"bf16", "fp16", "tf32", *definitions.SCALED}
