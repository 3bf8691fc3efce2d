"""Linear layers in 8 bits: what a product is, how far rounding moves it, which values share a scale, and what is kept."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)


def layer(precision: str, *, fused: bool, inputs: int = 64, outputs: int = 32, block: int = 8) -> Any:
    """A linear layer of one rank in fp32."""
    import torch

    from planner.lab.reference.eight_bits import RECIPES, QuantisedLinear, Shared

    found = QuantisedLinear(inputs, outputs, bias=False)
    recipe = RECIPES[precision].sized(block)
    found.how = Shared(recipe=recipe, fused=fused)
    torch.nn.init.normal_(found.weight, generator=torch.Generator().manual_seed(2))
    return found


def drawn(*shape: int, seed: int = 1) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_products_are_those_of_the_kernel_of_torch() -> None:
    """Of every pair of types that the passes multiply, with a scale per tensor and per row, as they lie or turned; what a GPU runs
    is called here by the processor, which has the kernel too, if slowly."""
    import torch

    from planner.lab.reference.eight_bits import E4M3, E5M2, RECIPES, Shared, _product_on_gpu, product

    for left, right in ((E4M3, E4M3), (E5M2, E4M3)):
        for name in ("fp8", "fp8_row"):
            how = Shared(recipe=RECIPES[name], fused=False)
            given = drawn(16, 32), drawn(16, 32, seed=2)
            a, b = (how.quantised(one, 1, how.recipe.tile, None, t) for one, t in zip(given, (left, right), strict=True))
            turned = [how.quantised(one, 0, how.recipe.tile, None, t).turned for one, t in zip(given, (left, right), strict=True)]
            for x, y in ((a, b), turned):
                wanted = product(x, y, torch.bfloat16).float()
                found = _product_on_gpu(x.values, x.scale, y.values, y.scale, (*x.tile, *y.tile), torch.bfloat16)
                assert found.dtype == torch.bfloat16 and wanted.abs().max() > 1.0
                assert (found.float() - wanted).abs().max() < 2.0**-8 * wanted.abs().max()
            shapes = ((), ()) if name == "fp8" else ((16, 1), (1, 16))
            scales = (one.scale.reciprocal().reshape(shape) for one, shape in zip((a, b), shapes, strict=True))
            exact = torch._scaled_mm(a.values, b.values.t(), *scales, out_dtype=torch.float32)
            assert (product(a, b, torch.float32) - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("precision", ["fp8", "fp8_row", "fp8_block", "mxfp8"])
def test_rounding_is_that_of_arithmetic(precision: str) -> None:
    """The casts of torch and the serial model's own steps, also where most values are too small for 8 bits."""
    import torch

    from planner.lab.reference.eight_bits import E4M3, E5M2, Shared, _meant
    from planner.lab.run import serial_rounding

    how: Shared = layer(precision, fused=False).how
    judge = serial_rounding.Rounding(precision, 8, ())
    x = drawn(40, 20) * torch.exp2(torch.randint(-30, 6, (40, 20), generator=torch.Generator().manual_seed(3)))
    x[:8] = 0.0
    for dtype, kind in ((E4M3, serial_rounding.E4M3), (E5M2, serial_rounding.E5M2)):
        found = how.quantised(x, 1, how.recipe.tile, None, dtype)
        meant = _meant(found.values, found.scale, *found.tile, torch.float64)
        assert torch.equal(meant, judge.round(x, kind).double())
    weight = how.weight(x, 1)
    assert torch.equal(_meant(weight.values, weight.scale, *weight.tile, torch.float64),
                       judge.round(x, serial_rounding.E4M3, True).double())  # fmt: skip


def test_errors_are_those_of_the_equation() -> None:
    """Y of operands with relative errors e is off by sqrt(e_x^2 + e_w^2), however many products are added up.

    A mantissa m of b bits is off by 2^-b / sqrt(12) / m, m as 1 / m between 1 and 2: e = 2^-b sqrt(3 / 96 / ln 2), 2.65 % with
    the three bits of e4m3, 5.31 % with the two of e5m2. 8 % of that are left to chance.
    """
    import torch

    def e(bits: int) -> float:
        return 2.0**-bits * math.sqrt(3.0 / 96.0 / math.log(2.0))

    for depth in (64, 1024):
        one = layer("fp8", fused=False, inputs=depth, outputs=128).double()
        x = drawn(1, 256, depth).double().requires_grad_()
        y = one(x)
        dy = drawn(1, 256, 128, seed=5).double()
        found = torch.autograd.grad(y, (x, one.weight), dy)
        wanted = (x @ one.weight.T, dy @ one.weight, dy[0].T @ x[0])
        errors = [float((a - b).detach().norm() / b.detach().norm()) for a, b in zip((y, *found), wanted, strict=True)]
        forward, backward = math.hypot(e(3), e(3)), math.hypot(e(3), e(2))
        assert errors == pytest.approx([forward, backward, backward], rel=0.08)


def test_a_value_too_large_spoils_only_what_shares_its_scale() -> None:
    """One value of 2^30: with it in the scale, values about 1 become 0."""
    lost = {}
    for precision in ("fp8", "fp8_row", "fp8_block", "mxfp8"):
        how = layer(precision, fused=False).how
        x = drawn(16, 32)
        x[3, 5] = 2.0**30
        tokens, weight, turned = how.input(x, 1), how.weight(x, 1), how.input(x, 0)
        lost[precision] = [int((one.values.float() == 0.0).sum()) for one in (tokens, weight, turned)]
    assert lost == {
        "fp8": [511, 511, 511], "fp8_row": [31, 31, 15], "fp8_block": [7, 63, 7], "mxfp8": [7, 7, 7],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "fused", "made", "kept"),
    [
        ("fp8", False, False, 4 * 64), ("fp8", True, False, 64), ("fp8", True, True, 0),
        ("fp8_row", True, False, 64), ("fp8_row", False, True, 4 * 64), ("fp8_block", True, False, 64),
    ],
)  # fmt: skip
def test_what_is_kept_of_an_input(precision: str, fused: bool, made: bool, kept: int) -> None:
    """Bytes per token besides scales: eager code keeps the input, compiled code 8 bits of it, or nothing that it makes again."""
    import torch

    from planner.lab.reference.eight_bits import remembers

    one, tokens, seen = layer(precision, fused=fused), 256, {}

    def pack(tensor: Any) -> Any:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    source = drawn(1, tokens, 64).requires_grad_()
    x = source * 2.0
    x = remembers(x, lambda given: given * 2.0, source) if made else x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = one(x)
    for there in (source, one.weight):
        seen.pop(there.untyped_storage().data_ptr(), None)
    assert kept * tokens <= sum(seen.values()) <= (kept + 40) * tokens
    assert y.grad_fn is not None
    whole = layer(precision, fused=False)
    wanted = torch.autograd.grad(whole(source * 2.0).sum(), source)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), source)[0], wanted)
