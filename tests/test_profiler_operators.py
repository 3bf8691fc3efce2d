"""What the profiler runs is what its points say: products, plain operations, layers, and operands that a GPU would take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.lab.profile import definitions
from planner.lab.profile.compute_points import compute_points
from planner.lab.profile.definitions import COMPILED, EAGER, Heads, flop, moved_bytes
from planner.lab.profile.points import Point

torch = pytest.importorskip("torch")


def counted(run: Any) -> float:
    """FLOP of matrix products that torch itself counts."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def test_products_do_the_work_that_their_point_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.lab.profile import tensors
    from planner.lab.profile.operator_runs import layer, operator

    monkeypatch.setattr(tensors, "cache_bytes", lambda _: 0.0)  # one set of operands

    points = [definitions.gemm("fp32", name, 24, 40, 56) for name in definitions.GEMM_PASSES]
    points += [
        Point.of("grouped_gemm", dtype="fp32", tokens=8, n=24, k=40, groups=3, **{"pass": name})
        for name in definitions.GEMM_PASSES
    ]
    for point in points:
        assert counted(operator(point, "cpu")) == flop(point), point.label
    sizes: dict[str, Any] = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2, "seq": 32}
    for gated in (True, False):
        for pass_ in ("forward", "backward"):
            point = Point.of("layer", pass_=pass_, gated=gated, dtype="fp32", **sizes)
            attention = definitions.attention("fp32", pass_, Heads(2, 4, 2, 16, 16, 32))
            assert counted(layer(point, "cpu")) == flop(point) - flop(attention), (
                point.label
            )  # torch counts no flash attention
    latent = sizes | {"kv_heads": 4, "q_rank": 24, "kv_rank": 8, "rope_dim": 8, "value_dim": 12}
    for pass_ in ("forward", "backward"):
        point = Point.of("layer", pass_=pass_, gated=True, dtype="fp32", **latent)
        attention = definitions.attention("fp32", pass_, Heads(2, 4, 4, 16, 12, 32))
        assert counted(layer(point, "cpu")) == flop(point) - flop(attention), point.label


def test_a_layer_of_experts_multiplies_what_its_point_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all grouped products are T K, whatever the router says; the combination weighs K outputs of each token."""
    from planner.lab.profile import operator_runs
    from planner.lab.reference import transformer as experts

    rows: list[tuple[int, ...]] = []
    grouped = experts.OPS.grouped
    recorded = SimpleNamespace(grouped=lambda x, w, n: rows.append((*x.shape, *w.shape, *n)) or grouped(x, w, n))
    monkeypatch.setattr(experts, "OPS", recorded)
    point = Point.of(
        "layer", pass_="forward", hidden=32, ffn=1, heads=2, kv_heads=1, head_dim=16, batch=1, seq=24, gated=True, dtype="fp32",
        experts=4, top_k=2, expert_ffn=16, shared_ffn=8,
    )  # fmt: skip
    dense = counted(operator_runs.layer(point, "cpu"))
    up, down = (48, 32, 4, 16, 32, 12, 12, 12, 12), (48, 16, 4, 32, 16, 12, 12, 12, 12)
    assert rows == [up, up, down]
    products, combined, attention = 3 * 2 * 48 * 32 * 16, 2 * 24 * 2 * 32, 2 * 2 * (24 * 12) * 32
    # torch counts neither flash attention nor, unless it looks inside, grouped products; it does count the combination
    assert dense in (flop(point) - attention + combined, flop(point) - attention + combined - products)


def test_products_add_to_an_fp32_gradient_in_place() -> None:
    """dW += dY^T X, dense and grouped one after the other, to the last value: twice is twice."""
    from planner.lab.profile import operator_runs as operators

    dense = operators.operator(definitions.gemm("fp32", definitions.ACCUMULATING, 6, 4, 5), "cpu")
    first = torch.as_tensor(dense()).clone()
    assert torch.allclose(dense(), 2 * first) and first.abs().sum() > 0
    point = Point.of("grouped_gemm", dtype="fp32", tokens=6, n=4, k=5, groups=3, **{"pass": definitions.ACCUMULATING})
    plain = Point.of("grouped_gemm", dtype="fp32", tokens=6, n=4, k=5, groups=3, **{"pass": "wgrad"})
    made = operators.operator(point, "cpu")
    turns = operators.operator(plain, "cpu")()
    assert counted(made) == flop(point) == flop(plain)
    assert [tuple(one.shape) for one in turns] == [(4, 5)] * 3


def test_one_rank_of_context_parallelism_attends_to_half_of_the_keys() -> None:
    """Both ends of the sequence, against the whole computed by plain torch; pieces of the last end merge to its rows."""
    from planner.lab.profile import operator_runs as operators

    torch.manual_seed(0)
    point = definitions.attention("fp32", "forward", Heads(1, 2, 1, 8, 8, 8, seq_kv=32))
    drawn: list[Any] = []
    real = operators.values
    operators.values = lambda *a: drawn.append(torch.randn(a[0])) or drawn[-1]  # type: ignore[attr-defined,assignment]
    try:
        first, own, before = operators.operator(point, "cpu")()  # type: ignore[misc]
    finally:
        operators.values = real  # type: ignore[attr-defined]
    query, key, value = drawn
    assert query.shape[2] == 8 and key.shape[2] == value.shape[2] == 32

    def rows(q: Any, end: int, begin: int, seen: Any) -> Any:
        scores = (q @ key[:, :, begin:end].transpose(2, 3)) / 8**0.5
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value[:, :, begin:end]

    below = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.allclose(first, rows(query[:, :, :4], 4, 0, below), atol=1e-5)
    assert torch.allclose(own, rows(query[:, :, 4:], 32, 28, below), atol=1e-5)
    assert torch.allclose(before, rows(query[:, :, 4:], 28, 0, torch.ones(4, 28, dtype=torch.bool)), atol=1e-5)
    pairs = 4 * 4 / 2 * 2 + 4 * 28  # what the three kernels work on is what the point counts, half of all
    assert flop(point) == 2 * 2 * pairs * 16


def test_plain_operations_are_what_they_stand_for() -> None:
    """The rotary embedding turns pairs (i, i + d / 2) by position times rate and keeps their length; SwiGLU and its gradients
    are those of the formula; and the kernels and tensors that they count are those that torch runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from planner.lab.profile.operator_runs import operator

    class Traffic(TorchDispatchMode):
        """Elements in and out of every kernel, views left out."""

        def __init__(self) -> None:
            super().__init__()
            self.kernels, self.elements = 0, 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not function.is_view and "detach" not in str(function):
                inside = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
                self.kernels += 1
                self.elements += out.numel() + sum(one.numel() for one in inside if 2 * one.numel() >= out.numel())
            return out

    for pass_ in ("forward", "backward"):
        for point in (
            definitions.memory_bound("swiglu", pass_, 6, 10, "fp32", kernel=EAGER),
            definitions.rope(pass_, 6, (8, 4, 8), "fp32", EAGER)
        ):  # fmt: skip
            run = operator(point, "cpu")
            run()
            with Traffic() as seen:
                run()
            elements = float(point.values["rows"]) * float(point.values["columns"])
            assert seen.elements == pytest.approx(moved_bytes(point) / 4.0, rel=0.01), point.label
            assert seen.elements > 4 * elements and seen.kernels == definitions.kernels(point), point.label
    turned = operator(definitions.rope("forward", 6, (4, 2, 8), "fp32", EAGER), "cpu")()
    assert [tuple(one.shape) for one in turned] == [(1, 6, 4, 8), (1, 6, 2, 8)]  # type: ignore[attr-defined]


def test_the_whole_layer_is_a_causal_transformer_layer() -> None:
    """A later token changes no earlier output; positions enter; every weight has a gradient."""
    from planner.lab.profile.operator_runs import built

    torch.manual_seed(0)
    common = {"hidden": 32, "ffn": 48, "heads": 4, "batch": 1, "seq": 12, "gated": True, "dtype": "fp32"}
    kinds: tuple[dict[str, Any], ...] = (
        {"kv_heads": 2, "head_dim": 8},
        {"kv_heads": 4, "head_dim": 12, "q_rank": 16, "kv_rank": 8, "rope_dim": 4, "value_dim": 8},
    )
    for kind in kinds:
        made = built(Point.of("layer", pass_="forward", **common, **kind), "cpu")  # type: ignore[arg-type]
        x = torch.randn(1, 12, 32)
        other = x.clone()
        other[:, 7:] += 1.0
        before, after = made(x), made(other)
        assert torch.allclose(before[:, :7], after[:, :7], atol=1e-5)
        assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-2)
        assert not torch.allclose(made(torch.roll(x, 1, dims=1))[:, 5], before[:, 4], atol=1e-3)
        before.sum().backward()
        assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in made.parameters())


def test_memory_bound_operators_run_in_both_passes() -> None:
    from planner.lab.profile.operator_runs import operator

    kinds = [kind for kind in definitions.MEMORY_BYTES if kind[0] not in ("swiglu", "rope")]
    for op, pass_ in kinds:
        point = definitions.memory_bound(op, pass_, 6, 10, "fp32")
        made = operator(point, "cpu")()
        assert moved_bytes(point) > 0
        first = made[0] if isinstance(made, tuple) else made
        if first is not None:  # an optimizer step returns nothing
            assert tuple(first.shape) == (6, 10), op
    with pytest.raises(PlannerError, match="no memory-bound operator 'norm_forward' with a pass 'backward'"):
        moved_bytes(definitions.memory_bound("norm_forward", "backward", 6, 10, "fp32"))


def test_a_gpu_would_take_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own shape functions for CUDA, without a GPU: layouts, alignment and types of every forward operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from planner.lab.profile import operator_runs as operators
    from planner.lab.profile import tensors

    monkeypatch.setattr(tensors, "cache_bytes", lambda _: 0.0)
    kinds: dict[tuple[Any, ...], Point] = {}
    for point in compute_points(("qwen3-30b-a3b",), "h100-sxm", "cuda"):
        if point.family in ("gemm", "grouped_gemm", "attention", "memory_bound"):
            if "seq_kv" in point.values:
                continue  # attention to parts of longer keys: slices need a build with CUDA; a CPU runs them above
            kinds.setdefault(
                tuple(point.values.get(name) for name in ("pass", "dtype", "op", "kernel", "groups")), point
            )
    without = {
        "copy",
        "norm_backward",
        "optimizer",
        "rope",
    }  # need a build with CUDA, or gradients
    checked = set()
    for point in kinds.values():
        value = point.values
        if value.get("pass") in ("backward", definitions.ACCUMULATING) or value.get("op") in without:
            continue
        if value.get("kernel") == COMPILED:
            continue  # what it compiles is checked uncompiled
        with FakeTensorMode(), torch.no_grad():
            made = operators.operator(point, "cuda")()
        if point.family == "gemm":
            assert tuple(made.shape) == definitions.rows_columns_depth(point)[:2], point.label
            low = value["dtype"] in definitions.SCALED
            assert made.dtype == (torch.bfloat16 if low else tensors.DTYPES[str(value["dtype"])])
        if point.family == "grouped_gemm":
            rows, n, k, groups = (int(value[name]) for name in ("tokens", "n", "k", "groups"))
            wanted = {"forward": (rows * groups, n), "dgrad": (rows * groups, k), "wgrad": (groups, n, k)}
            assert tuple(made.shape) == wanted[str(value["pass"])], point.label
        checked.add((point.family, value.get("dtype")))
    assert ("attention", "bf16") in checked
    low = {("gemm", name) for name in definitions.SCALED}
    assert low | {("gemm", name) for name in ("bf16", "fp16", "tf32")} | {("grouped_gemm", "bf16")} <= checked
    for pass_ in definitions.GEMM_PASSES:
        point = Point.of("grouped_gemm", dtype="fp8", tokens=32, n=64, k=128, groups=4, **{"pass": pass_})
        with FakeTensorMode(), torch.no_grad():
            made = operators.operator(point, "cuda")()
        assert tuple(made.shape) == {"forward": (128, 64), "dgrad": (128, 128), "wgrad": (4, 64, 128)}[pass_]
