"""Operands of the measured operators: their values, their types, and sets of them that take turns; and memory-bound operators as
torch runs them: single kernels, plain operations in turn, and what torch.compile makes of them."""

import contextlib
import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812

from planner import units
from planner.errors import PlannerError
from planner.lab.profile.definitions import COMPILED, EAGER, ELEMENT
from planner.lab.profile.points import Point, Run
from planner.lab.reference.transformer import Place, angles, rotary

DTYPES: dict[str, Any] = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
MOST_SETS = 16  # Of more the tensors take longer to make than to time
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
    """How many operand sets rotate so that none is still in the cache when its turn comes, as far as MOST_SETS go."""
    return max(1, min(_sets_wanted(bytes_each, device), MOST_SETS, int(MOST_BYTES / max(bytes_each, 1.0))))


def _sets_wanted(bytes_each: float, device: str) -> int:
    return int(2.0 * cache_bytes(device) / max(bytes_each, 1.0)) + 1


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


class Rotation:
    """One run of each operand set after the other. What a run puts out stays until its turn comes again, as in a layer: the next
    one does not write into the same memory."""

    def __init__(self, runs: Sequence[Run], before: Run | None = None) -> None:
        self._runs, self._turns = runs, itertools.cycle(range(len(runs)))
        self._kept: list[object] = [None] * len(runs)
        self.before = before
        """Before each sample, untimed: empties a cache that all sets fit into."""
        self.most_inner = len(runs) if before else 10**9
        """Runs in a sample; more would find their operands in the cache."""

    def __call__(self) -> object:
        turn = next(self._turns)
        self._kept[turn] = self._runs[turn]()
        return self._kept[turn]


def rotating(make: Callable[[], Run], bytes_each: float, device: str) -> Rotation:
    """``make`` makes an operand set and what runs on it. Where the sets run out before the cache of a GPU is full, it is emptied
    before each sample: a B200 keeps 16 sets of less than 15 MB."""
    count = sets(bytes_each, device)
    warm = device == "cuda" and count == MOST_SETS and count < _sets_wanted(bytes_each, device)
    return Rotation([make() for _ in range(count)], flush() if warm else None)


@cache
def flush() -> Run:
    """Writes twice the size of the GPU's cache."""
    return cast(Run, torch.empty(int(2.0 * cache_bytes("cuda")), dtype=torch.uint8, device="cuda").zero_)


def gradients(outputs: Sequence[Any], wanted: Sequence[Any]) -> Run:
    """The backward pass of a graph that is kept, from random gradients of its outputs."""
    above = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(list(outputs), list(wanted), above, retain_graph=True)


# ------------------------------------------------------------------------------------------------ memory-bound operators


def memory_bound(point: Point, device: str) -> Run:
    """One run of a point; ``definitions.MEMORY_BYTES`` and ``EAGER_TENSORS`` count its bytes. Raises PlannerError."""
    op = point["op"]
    if point.values.get("kernel") == COMPILED:
        torch.compiler.reset()  # shapes of earlier points count against torch's limit of recompilations, 8 of one function
    if op == "optimizer":
        return adam(point["rows"] * point["columns"], device)
    makers: dict[str, Callable[[Point, str], Run]] = {"swiglu": _swiglu, "rope": _rope, "cross_entropy": _loss}
    maker = makers.get(op, _single)
    each = 2.0 * ELEMENT[point["dtype"]] * point["rows"] * point["columns"]
    return rotating(lambda: maker(point, device), each, device)


def _tensors(point: Point, device: str, count: int) -> list[Any]:
    rows, columns, dtype = point.each("rows", "columns", "dtype")
    return [values((rows, columns), dtype, device) for _ in range(count)]


def _single(point: Point, device: str) -> Run:
    """Norms, additions, copies and casts: one kernel of torch's own."""
    op, (x, y) = point["op"], _tensors(point, device, 2)
    if op in ("norm_forward", "norm_backward"):
        scale = values(x.shape[1:], point["dtype"], device)
        if op == "norm_forward":
            return lambda: F.rms_norm(x, scale.shape, scale)
        return _either_pass(lambda: [F.rms_norm(x, scale.shape, scale)], (x, scale), point)
    order = torch.randperm(len(x), device=device)
    runs: dict[str, Run] = {
        "permute": lambda: torch.index_select(x, 0, order),
        "quantize": lambda: x.to(torch.float8_e4m3fn),
        "copy": lambda: y.copy_(x),
        "elementwise": lambda: torch.add(x, y),
    }
    return runs[op]


def compiled(function: Callable[..., Any], point: Point, device: str) -> Callable[..., Any]:
    """The function as the key's ``kernel`` says: eager, or one kernel made by torch.compile. Raises PlannerError."""
    if point["kernel"] == EAGER:
        return function
    if device != "cuda":
        raise PlannerError(f"{point.label}: fused kernels of torch.compile are measured on a GPU; this is a CPU")
    from torch._functorch import config

    # The graph is kept, so that its backward pass can be run again and again: its buffers must not be reused by it.
    config.donated_buffer = False
    return cast(Callable[..., Any], torch.compile(function, fullgraph=True, dynamic=False))


def gate(up: Any, gate_: Any) -> Any:
    """silu(gate) * up."""
    return F.silu(gate_) * up


def _swiglu(point: Point, device: str) -> Run:
    """SwiGLU between separate gate and up projections."""
    both, function = _tensors(point, device, 2), compiled(gate, point, device)
    return _either_pass(lambda: [function(*both)], both, point)


def _rope(point: Point, device: str) -> Run:
    """The rotary embedding of q and k of the reference transformer."""
    rows, columns, kv, d, dtype = point.each("rows", "columns", "kv_heads", "head_dim", "dtype")
    heads = [values((1, rows, count, d), dtype, device) for count in (columns // d - kv, kv)]
    cosine, sine = (table.to(DTYPES[dtype]) for table in angles(torch.arange(rows, device=device), d, torch.float32))
    place = Place(cosine=cosine, sine=sine)

    def rotate(q: Any, k: Any) -> list[Any]:
        return [rotary(one, place, fused=False) for one in (q, k)]

    function = compiled(rotate, point, device)
    return _either_pass(lambda: function(*heads), heads, point)


def _either_pass(forward: Callable[[], list[Any]], inputs: Sequence[Any], point: Point) -> Run:
    """The forward pass with what the backward pass needs kept, or the backward pass."""
    for one in inputs:
        one.requires_grad_(True)
    return gradients(forward(), inputs) if point["pass"] == "backward" else forward


def adam(parameters: int, device: str) -> Run:
    """torch's fused AdamW on one fp32 tensor: 28 bytes per parameter."""
    weight = torch.nn.Parameter(torch.randn(parameters, device=device))
    weight.grad = torch.randn_like(weight)
    return cast(Run, torch.optim.AdamW([weight], lr=1e-3, fused=True).step)


def _loss(point: Point, device: str) -> Run:
    """Log-softmax in fp32, or its gradient."""
    (logits,) = _tensors(point, device, 1)
    if point["pass"] == "forward":
        return lambda: F.log_softmax(logits, -1, dtype=torch.float32)
    output = F.log_softmax(logits, -1, dtype=torch.float32)
    gradient = torch.randn_like(output)
    kept = logits.dtype if device == "cuda" else torch.float32  # the CPU's kernel keeps the type of the softmax
    return lambda: torch.ops.aten._log_softmax_backward_data(gradient, output, -1, kept)
