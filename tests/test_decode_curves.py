"""The kernels of serving: they load, grow with every size, and respect what the hardware can do."""

import numpy as np
import pytest

from planner import library
from planner.hardware import load_hardware
from planner.serving.curves import DecodeCurves, decode_curves
from planner.serving.serving_layout import WEIGHT_BYTES, WEIGHTS

DEVICES = ("a100-sxm-80gb", "h100-sxm", "b200-sxm", "l40s", "mi300x", "v100-sxm2-32gb")


@pytest.fixture(scope="module", params=DEVICES)
def curves(request: pytest.FixtureRequest) -> DecodeCurves:
    return decode_curves(load_hardware(request.param))


def grows(times: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(times)) and np.all(times > 0) and np.all(np.diff(times) >= -1e-12 * times[1:]))


SIZES = np.unique(np.round(np.exp(np.linspace(0.0, np.log(20_000.0), 240))))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_products_grow_and_read_their_weights(curves: DecodeCurves, weights: str) -> None:
    hardware = curves.hardware
    for n, k in ((256.0, 4096.0), (8192.0, 8192.0), (28672.0, 5120.0)):
        times = np.asarray(curves.linear_time(SIZES, n, k, weights))
        assert np.all(times >= WEIGHT_BYTES[weights] * n * k / hardware.memory_bandwidth)
        assert grows(times[SIZES <= 128])
    assert grows(np.asarray(curves.linear_time(16, SIZES, 3000, weights)))
    assert grows(np.asarray(curves.linear_time(16, 3000, SIZES, weights)))


def test_every_device_has_curves() -> None:
    for name in library.names("hardware"):
        curves = decode_curves(load_hardware(name))
        assert set(curves.provenance) >= {"linear", "decode_attention", "decode_mla", "experts", "all_reduce"}
        assert float(curves.linear_time(1, 4096, 4096, "bf16")) > 0
