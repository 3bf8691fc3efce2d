"""The trace of one rank as columns: what ran on its GPU, who launched it, which collective it was, and the marks of its steps.

Keys of events as torch.profiler writes them: ``cat`` is kernel, gpu_memcpy, gpu_memset on the GPU, cuda_runtime and cuda_driver for
calls of the host (of HIP too), joined by ``args.correlation``. A NCCL kernel carries what record_param_comms knew: 'Collective
name', 'In msg nelems', 'Out msg nelems', 'Group size' and dtype, from torch 2.4 on 'Process Group Name', '... Description' and
'... Ranks' too; before, the operator alone may have them, joined by 'External id'.
[pytorch/kineto, libkineto/src/output_json.cpp; pytorch, torch/csrc/profiler/util.cpp]
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.errors import PlannerError
from planner.kineto.events import Tell, Trace
from planner.kineto.kernel_names import COMMUNICATION, GEMM, element_bytes, family_of, op_of
from planner.record import record
from planner.units import MICRO

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver", "runtime", "hip_runtime")
STEP = re.compile(r"^ProfilerStep\s?#(\d+)$")
MOST_EVENTS = 20_000_000
"""Events on a GPU that are kept: some gigabytes of memory."""
MOST_RANKS = 1 << 20


@record
class Collective:
    """What a kernel of communication moves, and among whom; two kernels with equal ones repeat each other."""

    op: str
    """As nccl-tests calls it: all_reduce, all_gather, ..., send_recv; '' = unknown."""
    group: str = ""
    """Name of the process group."""
    about: str = ""
    """Its description: mesh_tp, TENSOR_MODEL_PARALLEL_GROUP; '' where nobody gave one."""
    size: int = 0
    """Ranks of the group; 0 = unknown."""
    ranks: tuple[int, ...] = ()
    """Which they are; () = unknown."""
    bytes: float = math.nan
    """S of nccl-tests: the whole buffer. nan = unknown."""


@record
class RankTrace:
    """What one rank did; columns of length N over the events of its GPU, by start; seconds from the first event."""

    path: Path
    rank: int | None
    """Of the job, where file or name say it."""
    world: int | None
    """Ranks of the job."""
    device: str
    """Name of the GPU; '' = unknown."""
    spans: Floats
    """(N, 2)."""
    family: NDArray[np.int8]
    """Of ``kernel_names.FAMILIES``."""
    launched: Floats
    """When the host launched it; nan = the trace does not say."""
    which: NDArray[np.int64]
    """Place in ``collectives``; -1 = no communication."""
    collectives: tuple[Collective, ...]
    named: NDArray[np.int64]
    """Place in ``names``."""
    names: tuple[str, ...]
    operator: NDArray[np.int64]
    """External id of the operator behind a matrix product; -1 = unknown."""
    flop: Mapping[int, float]
    """FLOP of operators whose shapes are recorded, by external id."""
    steps: tuple[tuple[int, float, float], ...]
    """ProfilerStep annotations of the host: number, start, end."""
    optimizer: Floats
    """(M, 2): Optimizer.step annotations of the host."""
    on_host: Mapping[str, Floats]
    """Collectives that the host runs (gloo), by name: (M, 2)."""
    notes: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether anything of a GPU was recorded."""
        return len(self.spans) > 0

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return self.path.name if self.rank is None else f"rank {self.rank}"


def read_rank(path: Path, tell: Tell = lambda _: None) -> RankTrace:
    """Read one file. Raises PlannerError for what is no trace of torch.profiler."""
    trace = Trace(path, tell)
    read = _Reader()
    for event in trace:
        read.take(event)
        if len(read.start) > MOST_EVENTS:
            raise PlannerError(f"{path}: more than {MOST_EVENTS} events on GPUs; record fewer steps")
    return read.done(path, trace.about)


@dataclass
class _Reader:
    """Columns while a file is read."""

    start: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    family: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    correlation: list[Any] = field(default_factory=list)
    outside_id: list[int] = field(default_factory=list)
    device: list[Any] = field(default_factory=list)
    said: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Place of an event of communication -> what it says of its collective."""
    names: dict[str, int] = field(default_factory=dict)
    launches: dict[Any, float] = field(default_factory=dict)
    recorded: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """External id of a record_param_comms -> its arguments."""
    flop: dict[int, float] = field(default_factory=dict)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    optimizer: list[tuple[float, float]] = field(default_factory=list)
    on_host: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    categories: Counter[str] = field(default_factory=Counter)

    def take(self, event: Any) -> None:
        """Keep what is of use; what has not the shape of an event is none."""
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        at, length, name = _number(event.get("ts")), _number(event.get("dur")), event.get("name")
        category, args = event.get("cat"), event.get("args")
        if math.isnan(at) or not isinstance(category, str) or not isinstance(name, str):
            return
        args = args if isinstance(args, dict) else {}
        category, length = category.lower(), max(length, 0.0) if length == length else 0.0
        if category in ON_DEVICE:
            self._on_device(name, at, length, args, event)
        elif category in CALLS:
            number = args.get("correlation")
            if isinstance(number, int):
                self.launches[number] = at
        elif category in ("user_annotation", "cpu_op"):
            self._on_host(name, at, length, args)
        if len(self.categories) < 100:
            self.categories[category] += 1

    def _on_device(self, name: str, at: float, length: float, args: dict[str, Any], event: dict[str, Any]) -> None:
        family = family_of(name)
        if "Collective name" in args:
            family = COMMUNICATION
        if family == COMMUNICATION:
            self.said[len(self.start)] = args
        self.start.append(at)
        self.length.append(length)
        self.family.append(family)
        self.named.append(self.names.setdefault(name[:300], len(self.names)))
        self.correlation.append(_hashable(args.get("correlation")))
        self.outside_id.append(_whole(args.get("External id")))
        self.device.append(_hashable(args.get("device", event.get("pid"))))

    def _on_host(self, name: str, at: float, length: float, args: dict[str, Any]) -> None:
        if step := STEP.match(name):
            self.steps.append((int(step[1][:9]), at, at + length))
        elif name.startswith("Optimizer.step#"):
            self.optimizer.append((at, at + length))
        elif name.startswith("gloo:"):
            self.on_host[name.removeprefix("gloo:")[:60]].append((at, at + length))
        elif name == "record_param_comms" and "Collective name" in args:
            self.recorded[_whole(args.get("External id"))] = args
        elif name in _PRODUCTS and (flop := _flop(name, args.get("Input Dims"))):
            self.flop[_whole(args.get("External id"))] = flop

    def done(self, path: Path, about: dict[str, Any]) -> RankTrace:
        """The columns of the device that worked most."""
        if not self.start and not self.steps and not self.optimizer:
            raise _refusal(path, about, self.categories)
        start, length = np.array(self.start), np.array(self.length)
        device, notes = self._device(length)
        marks = [*(one[1] for one in self.steps), *(one[0] for one in self.optimizer)]
        origin = min([*marks, float(np.min(start)) if len(start) else math.inf])
        keep = np.flatnonzero(np.array([one == device for one in self.device], dtype=bool))
        keep = keep[np.argsort(start[keep], kind="stable")]
        launched = np.array([self.launches.get(self.correlation[n], math.nan) for n in keep], dtype=float)
        kinds, which = self._collectives(keep, about)
        operator = np.array([self.outside_id[n] if self.family[n] == GEMM else -1 for n in keep], dtype=np.int64)
        return RankTrace(
            path=path, rank=_rank_of(path, about), world=_info(about, "world_size"), device=_device_name(about, device),
            spans=_seconds(np.column_stack([start[keep], start[keep] + length[keep]]), origin),
            family=np.array(self.family, dtype=np.int8)[keep], launched=(launched - origin) * MICRO,
            which=which, collectives=kinds, named=np.array(self.named, dtype=np.int64)[keep], names=tuple(self.names),
            operator=operator, flop=self.flop,
            steps=tuple(
                (n, (a - origin) * MICRO, (b - origin) * MICRO) for n, a, b in sorted(set(self.steps), key=lambda one: one[1])
            ),
            optimizer=_seconds(np.array(sorted(self.optimizer)).reshape(-1, 2), origin),
            on_host={name: _seconds(np.array(sorted(each)), origin) for name, each in self.on_host.items()}, notes=notes,
        )  # fmt: skip

    def _device(self, length: np.ndarray) -> tuple[Any, tuple[str, ...]]:
        busy: dict[Any, float] = defaultdict(float)
        for one, seconds in zip(self.device, length.tolist(), strict=True):
            busy[one] += seconds
        if len(busy) < 2:
            return next(iter(busy), None), ()
        most = max(busy, key=lambda one: busy[one])
        return most, (f"it holds {len(busy)} GPUs; read is the one that worked most, {str(most)[:20]}",)

    def _collectives(
        self, keep: NDArray[np.int64], about: dict[str, Any]
    ) -> tuple[tuple[Collective, ...], NDArray[np.int64]]:
        """The distinct collectives, and the place of each event among them."""
        groups, found = _groups(about), dict[Collective, int]()
        names, which = list(self.names), np.full(len(keep), -1, dtype=np.int64)
        for place, number in enumerate(keep.tolist()):
            if number in self.said:
                args = self.said[number]
                args = args if "Collective name" in args else self.recorded.get(self.outside_id[number], args)
                which[place] = found.setdefault(_collective(names[self.named[number]], args, groups), len(found))
        return tuple(found), which


def _collective(kernel: str, args: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> Collective:
    said = args.get("Collective name")
    op = op_of(said if isinstance(said, str) and op_of(said) else kernel)
    group = str(args.get("Process Group Name", ""))[:100]
    ranks = groups.get(group) or _ranks(args.get("Process Group Ranks"))
    size = _whole(args.get("Group size"))
    size = len(ranks) if ranks else size if 0 < size < MOST_RANKS else 0
    each = element_bytes(args.get("dtype"))
    into, out = (_number(args.get(f"{side} msg nelems")) * each for side in ("In", "Out"))
    whole = {"all_gather": max(out, into * size), "reduce_scatter": max(into, out * size)}.get(
        op, into if into > 0 else out
    )
    return Collective(
        op=op, group=group, about=str(args.get("Process Group Description", ""))[:100], size=size, ranks=ranks,
        bytes=whole if whole > 0 else math.nan,
    )  # fmt: skip


def _groups(about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Ranks of process groups by name, of the file's distributedInfo."""
    info = about.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and (ranks := _ranks(one.get("ranks"))):
            found[str(one.get("pg_name", ""))[:100]] = ranks
    return found


def _ranks(said: Any) -> tuple[int, ...]:
    """A list of ranks, or its text; () where it is cut ([0, 1, ..., 63]) or no list."""
    if isinstance(said, str):
        if not re.fullmatch(r"\[[\d\s,]*\]", said):
            return ()
        said = [int(word[:9]) for word in re.findall(r"\d+", said)]
    if not isinstance(said, list) or not all(isinstance(one, int) and 0 <= one < MOST_RANKS for one in said):
        return ()
    return tuple(sorted({int(one) for one in said}))


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


def _flop(name: str, shapes: Any) -> float:
    """2 m n k of a product, from the shapes of its operands; 0 = not recorded."""
    first = 1 if name.endswith(("addmm", "baddbmm")) else 0
    try:
        a, b = ([float(x) for x in shapes[first + i]] for i in (0, 1))
        batch = a[0] if len(a) == 3 else 1.0
        flop = 2.0 * batch * a[-2] * a[-1] * b[-1]
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        return 0.0
    return flop if math.isfinite(flop) and len(a) == len(b) and a[-1] == b[-2] else 0.0


def _info(about: Mapping[str, Any], key: str) -> int | None:
    info = about.get("distributedInfo")
    value = _whole(info.get(key)) if isinstance(info, dict) else -1
    return value if 0 <= value < MOST_RANKS else None


def _rank_of(path: Path, about: Mapping[str, Any]) -> int | None:
    found = _info(about, "rank")
    named = re.search(r"rank[-_.]?(\d{1,6})", path.name, re.IGNORECASE)
    return found if found is not None else int(named[1]) if named else None


def _device_name(about: Mapping[str, Any], device: Any) -> str:
    """Name of the GPU that was read, else of the first."""
    listed = about.get("deviceProperties")
    known = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    mine = [one for one in known if one.get("id") == device] or known
    return str(mine[0].get("name") or "")[:80] if mine else ""


def _seconds(spans: np.ndarray, origin: float) -> Floats:
    return (spans.reshape(-1, 2) - origin) * MICRO if len(spans) else np.zeros((0, 2))


def _number(value: Any) -> float:
    """A finite number; nan for all else. Some writers put numbers into strings."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) and abs(number) < 1e18 else math.nan


def _whole(value: Any) -> int:
    number = _number(value)
    return int(number) if number == number else -1


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else None


def _refusal(path: Path, about: Mapping[str, Any], categories: Counter[str]) -> PlannerError:
    """The sentence for a trace of something else."""
    other = about.get("otherData")
    if isinstance(other, dict) and str(other.get("what", "")).startswith("predicted step"):
        return PlannerError(
            f"{path}: this is the predicted step that 'plan report --format trace' wrote, not the trace of a run; give what "
            "torch.profiler's export_chrome_trace wrote"
        )
    seen = (
        f"its events are of {', '.join(name[:30] for name, _ in categories.most_common(4))}"
        if categories
        else "it has no events"
    )
    return PlannerError(
        f"{path}: no kernels and no ProfilerStep: {seen}; give what torch.profiler recorded with ProfilerActivity.CUDA and a "
        "schedule of at least two active steps"
    )
