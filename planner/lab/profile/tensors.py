"""Operands of the measured operators: their values, their types, and sets of them that take turns."""

import contextlib
import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from planner import units
from planner.lab.profile.points import Run, Taker

DTYPES: dict[str, Any] = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
MOST_SETS = 16
MOST_BYTES = 2.0 * units.GIB  # Operand sets that rotate, and what they may take together
USUAL_CACHE = 32.0 * units.MIB  # Where the kernel does not say


def values(shape: tuple[int, ...], dtype: str, device: str) -> Any:
    """Normal values: not constant ones, on which a GPU draws less power and clocks higher."""
    if device == "cpu":  # drawing them would take longer than what is measured
        count, drawn = math.prod(shape), _drawn()
        made = drawn.repeat(-(-count // len(drawn)))[:count] if count > len(drawn) else drawn[:count].clone()
        return made.view(shape).to(DTYPES[dtype])
    made = torch.randn(shape, device=device, dtype=torch.float32 if dtype in ("fp8", "tf32") else DTYPES[dtype])
    return made.to(DTYPES[dtype])


@cache
def _drawn() -> Any:
    """Normal values that a processor's tensors repeat."""
    return torch.randn(2**20 - 1)


def precision(dtype: str) -> None:
    """fp32 products run in tf32 only where that is asked for."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")


def cache_bytes(device: str) -> float:
    """The last-level cache: that of the GPU, or of the processor as the kernel says."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    try:
        said = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return float(said.rstrip("KM")) * (units.MIB if said.endswith("M") else units.KIB)
    except (OSError, ValueError):
        return USUAL_CACHE


def sets(bytes_each: float, device: str) -> int:
    """How many operand sets rotate so that none is still in the cache when its turn comes."""
    wanted = int(2.0 * cache_bytes(device) / max(bytes_each, 1.0)) + 1
    return max(1, min(wanted, MOST_SETS, int(MOST_BYTES / max(bytes_each, 1.0))))


@cache
def keep_memory() -> None:
    """A processor's freed memory stays with the process, as a GPU's does in torch's allocator: else every larger tensor is
    fetched from the kernel again and zeroed page by page, in one operator more often than in another, and every microbatch
    meets its activations as new pages, 3 us of the kernel for 4 KiB.  [glibc, mallopt]"""
    m_trim_threshold, m_top_pad, m_mmap_threshold, most = -1, -2, -3, 2**31 - 1
    with contextlib.suppress(OSError, AttributeError):  # another C library: its own ways
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(m_mmap_threshold, most)
        library.mallopt(m_trim_threshold, most)
        library.mallopt(m_top_pad, 2**26)


def rotating(make: Callable[[], Run], bytes_each: float, device: str) -> Run:
    """One run of each operand set after the other; ``make`` makes a set and what runs on it. What a run puts out stays until
    its turn comes again, as in a layer: the next one does not write into the same memory."""
    runs = [make() for _ in range(sets(bytes_each, device))]
    kept: list[object] = [None] * len(runs)
    turns = itertools.cycle(range(len(runs)))

    def run() -> object:
        turn = next(turns)
        kept[turn] = runs[turn]()
        return kept[turn]

    return run


def gradients(outputs: Sequence[Any], wanted: Sequence[Any]) -> Run:
    """The backward pass of a graph that is kept, from random gradients of its outputs."""
    above = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(list(outputs), list(wanted), above, retain_graph=True)


def event_taker(run: Run, before: Run | None = None) -> Taker:
    """Samples by device events; a block of them is queued before the host waits, so that the device never idles between an event
    and its kernel (elapsed_time is in milliseconds). ``before`` is queued before the first event of each sample."""

    def take(count: int, inner: int) -> list[float]:
        pairs: list[tuple[Any, Any]] = []
        for _ in range(count):
            if before:
                before()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / units.KILO / inner for start, end in pairs]

    return take
