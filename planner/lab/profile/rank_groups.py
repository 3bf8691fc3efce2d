"""The ranks of a running profile: who is where, groups of a pattern, agreement between all; and what they run (torch).

A collective has real tensors: what to run, what to fill in, what must come out. Inputs and results are slices of two buffers that
are made once, so that no timing includes an allocation or first touch.
"""

import contextlib
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner import library
from planner.detect import PATIENT, asked_driver, processor
from planner.lab.launch.meeting import JOIN_SECONDS, meet
from planner.lab.launch.place import Place
from planner.lab.launch.state import State, to_file
from planner.lab.launch.torchrun import DIRECTORY
from planner.lab.launch.watch import Watch, heed_signals
from planner.lab.profile.patterns import DTYPE_BYTES, Pattern
from planner.lab.profile.points import Settings
from planner.lab.profile.tensors import DTYPES

CONTROL_SECONDS = 7 * 86400.0
"""Ranks wait this long for the first one's next word while it measures alone; the watch sees to hangs."""

FORMING_SECONDS = 120.0
"""A communicator and its first collective may take so long: 2 to 30 s were seen with 512 ranks and more."""
MOST_COMMUNICATORS = 8
"""Of one node at the same time: each takes about 10 of the 128 multicast slots of its NVSwitches.  [NVIDIA/nccl#2077]"""
CHUNK = 2**24  # Elements that are filled or checked at once: their indices take eight bytes each
SAFE_SUM = 256  # bf16 counts exactly up to here: 8 bits of mantissa


@dataclass(kw_only=True)
class Ranks:
    """All ranks of the profile as one of them sees them."""

    place: Place  # Of this rank
    device: str  # "cpu" or "cuda"
    local: int  # Ranks of a node, the same on every one
    hosts: list[str]  # Host of each rank, with the node's number where one host plays several
    names: list[str]  # Device of each rank
    watch: Watch  # Ends the profile when a rank or link fails
    timeout: float  # Seconds that one step may take
    groups: dict[Pattern, Any] = field(default_factory=dict)
    """Process groups that are formed, the last used last; None where this rank is in none."""

    @property
    def world(self) -> int:
        """All ranks."""
        return self.place.world

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which keeps the results."""
        return self.place.rank == 0

    @property
    def backend(self) -> str:
        """Of the collectives that are measured."""
        return "nccl" if self.device == "cuda" else "gloo"

    def group(self, pattern: Pattern) -> Any:
        """The process group of a pattern that this rank is in; formed by all ranks together when it is not there. Those that were
        not used for longest are destroyed for it: a node has few multicast slots for communicators, and each takes memory."""
        if pattern in self.groups:
            self.groups[pattern] = self.groups.pop(pattern)
            return self.groups[pattern]
        while len(self.groups) > 1 and sum(map(self._on_a_node, [*self.groups, pattern])) > MOST_COMMUNICATORS:
            self.destroy(self.groups.pop(next(iter(self.groups))))
        self.groups[pattern] = self.form(pattern.groups(self.world))
        return self.groups[pattern]

    def _on_a_node(self, pattern: Pattern) -> int:
        """Communicators of a pattern that share a node's switches; at least the one of a rank."""
        together = pattern.per_node(self.local)
        return self.local // together if together > 1 else 1

    def form(self, lists: Sequence[Sequence[int]]) -> Any:
        """Process groups of these ranks each, formed by all ranks together; the one that this rank is in, or None. That has a limit
        of its own: a communicator of hundreds of ranks takes half a minute."""
        self.watch.again(max(self.timeout, FORMING_SECONDS))
        found = None
        for ranks in lists:  # all ranks walk through all: so groups get their names from a counter that agrees, and no name twice
            handle = dist.new_group(
                list(ranks), timeout=timedelta(seconds=max(self.timeout, FORMING_SECONDS) + 10.0), backend=self.backend,
                device_id=torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else None,
            )  # fmt: skip
            if self.place.rank in ranks:
                found = handle
        return found

    def destroy(self, group: Any) -> None:
        """Ends a process group of this rank; all its ranks do it at the same point."""
        if group is not None:
            dist.destroy_process_group(group)

    def barrier(self) -> None:
        """All ranks are here."""
        dist.barrier()

    def slowest(self, samples: Sequence[float]) -> list[float]:
        """The longest of each sample over all ranks."""
        values = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(value) for value in values]

    def from_first(self, values: Sequence[float], meanwhile: Callable[[], object] | None = None) -> list[float]:
        """Rank 0's numbers, on every rank; until they come the others do ``meanwhile`` over and over, where it is given."""
        sent = torch.tensor(values, dtype=torch.float64)
        work: Any = dist.broadcast(sent, 0, async_op=True)
        while meanwhile and not work.is_completed():
            meanwhile()
        work.wait()
        return [float(value) for value in sent]

    def collect(self, value: Any) -> list[Any]:
        """An object from every rank, on every rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


def join(place: Place, device: str, timeout: float, ended: Callable[[str], None], wait: float = JOIN_SECONDS) -> Ranks:
    """Meets the other ranks. Raises PlannerError where some do not come, or where the nodes differ."""
    met = meet(place, device, timeout, ended, wait)
    with met.watch.doing("joining the process group", list(range(place.world)), wait):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("control", met.store), rank=place.rank, world_size=place.world,
            timeout=timedelta(seconds=CONTROL_SECONDS),
        )  # fmt: skip
    return Ranks(
        place=place, device=device, local=met.nodes.count(met.nodes[0]), hosts=met.watch.hosts, names=met.names,
        watch=met.watch, timeout=timeout,
    )  # fmt: skip


def versions(device: str) -> dict[str, str]:
    """Of every library that has a part in the figures."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "linux": platform.release()}
    try:
        found["planner"] = metadata.version("planner")
    except metadata.PackageNotFoundError:
        found["planner"] = "of a checkout that is not installed"
    if device != "cuda":
        return found | {"gloo": f"of torch {torch.__version__}"}
    return found | {
        "cuda": str(torch.version.cuda or torch.version.hip), "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": str(torch.backends.cudnn.version()),
    }  # fmt: skip


def header(ranks: Ranks) -> dict[str, Any]:
    """Of the journal: what the results belong to."""
    hosts = sorted(set(ranks.hosts))
    found = {
        "device": ranks.device, "name": processor(), "host": hosts[0].split(" node ")[0], "nodes": len(hosts),
        "world": ranks.world, "local": ranks.local, "cores": os.cpu_count() or 1,
        "memory": float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "driver": "",
        "versions": versions(ranks.device),
    }  # fmt: skip
    if ranks.device == "cuda":
        card: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"name": ranks.names[0], "driver": asked_driver(PATIENT).version, "memory": float(card.total_memory)}
    return found


Show = Callable[[State], object]


@contextlib.contextmanager
def at_work(
    settings: Settings, place: Place, show: Show, lost: Callable[[], object] = lambda: None
) -> Iterator[tuple[Ranks, Show]]:
    """The body measures as this rank, between meeting and end; how far it is goes where the launcher looks, or to ``show``.

    Where a rank or link fails ``lost`` is called, the reason is left for the launcher or printed, and the process ends.
    """
    quiet()
    directory = os.environ.get(DIRECTORY)

    def ended(sentence: str) -> None:
        lost()
        if sentence and directory:
            library.write_whole(Path(directory) / "failure.txt", sentence)
        elif sentence:
            print(f"error: {sentence}", file=sys.stderr, flush=True)

    ranks = join(place, settings.device, settings.timeout, ended)
    heed_signals(ranks.watch)
    with watched(ranks, directory):
        yield ranks, to_file(Path(directory) / "state.json") if directory else show


@contextlib.contextmanager
def watched(ranks: Ranks, directory: str | None) -> Iterator[None]:
    """The body measures as this rank, between meeting and end: an error ends all ranks with its reason, Ctrl-C silences the watch,
    and the launcher's ``directory`` learns that the rank is done."""
    try:
        yield
        ranks.watch.done()
    except KeyboardInterrupt:
        ranks.watch.silence()
        raise
    except Exception as error:
        ranks.watch.fail(error)
        raise
    if directory:
        (Path(directory) / f"done-{ranks.place.rank}").touch()


def quiet() -> None:
    """Names that torch has renamed warn once per call site; the profile needs none of that on the terminal."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


# ------------------------------------------------------------------------------------------------ what they run


class Buffers:
    """Two byte buffers of ``capacity`` bytes and some more on one device, reused by every operation."""

    def __init__(self, capacity: int, device: str) -> None:
        slack = capacity + 4 * 4096  # uneven divisions round each of up to 4096 ranks' parts up by an element
        self.source = torch.zeros(slack, dtype=torch.uint8, device=device)
        self.result = torch.zeros(slack, dtype=torch.uint8, device=device)

    def view(self, which: torch.Tensor, count: int, dtype: str) -> torch.Tensor:
        """The first ``count`` elements as that type."""
        return which[: count * DTYPE_BYTES[dtype]].view(DTYPES[dtype])


def period(n: int) -> int:
    """Of the content of buffers whose n are added: it repeats after so many elements."""
    return max(1, min(5, SAFE_SUM // (2 * n)))


def content(rank: torch.Tensor | int, index: torch.Tensor, n: int) -> torch.Tensor:
    """Element ``index`` of the buffer of the group's rank: small whole numbers, so that sums of n are exact in bf16."""
    return ((index * 7 + rank * 3) % period(n) + rank % 2).to(torch.float32)


def added(index: torch.Tensor, n: int) -> torch.Tensor:
    """Element ``index`` of the sum of the buffers of n ranks: out of a table of one period, however many ranks there are."""
    one = torch.arange(period(n)).reshape(1, -1)
    table = content(torch.arange(n).reshape(-1, 1), one, n).sum(0)
    return table.to(index.device)[index % period(n)]


class Operation:
    """One collective or transfer of ``size`` bytes (S as nccl-tests counts them) in a group, ready to run again and again."""

    def __init__(self, op: str, size: int, dtype: str, group: Any, buffers: Buffers) -> None:
        self.op, self.group, self.in_place = op, group, op in ("all_reduce", "broadcast", "reduce")
        self.ranks, self.me, self.n = dist.get_process_group_ranks(group), group.rank(), group.size()
        self.added = 1 if op.startswith("send_recv") else self.n  # ranks whose shares make the whole
        count = DTYPE_BYTES[dtype] * self.added
        self.part = max(1, size // count if self.added == 1 else -(-size // count))  # elements of one share
        whole = self.part * self.added
        self.source = buffers.view(buffers.source, self.part if op in ("all_gather", "gather") else whole, dtype)
        self.result = buffers.view(buffers.result, self.part if op in ("reduce_scatter", "scatter") else whole, dtype)
        self._call = self._calls()[op]

    def run(self) -> object:
        """Runs it; on a GPU it is queued on the current stream."""
        return self._call(False)

    def start(self) -> Any:
        """Starts it and returns its work handle, for running something at the same time; a transfer has none."""
        return self._call(True)

    def calm(self) -> None:
        """Zeros in the inputs, so that sums in place do not grow while it is timed."""
        self.source.zero_()

    def fill(self) -> None:
        """Puts the pattern of this rank into the inputs and nonsense into the results."""
        for start in range(0, self.source.numel(), CHUNK):
            part = self.source[start : start + CHUNK]
            index = torch.arange(start, start + part.numel(), device=part.device)
            part.copy_(content(self.me, index, self.added))
        if not self.in_place:
            self.result.fill_(-1.0)

    def wrong(self) -> str:
        """After ``fill`` and one ``run``: what is wrong with the result of this rank, or nothing."""
        if (self.op in ("reduce", "gather") and self.me != 0) or (self.op == "send_recv" and self.me != 1):
            return ""  # this rank's result does not count
        result = self.source if self.in_place else self.result
        return difference(result, self._wanted, exact=2 * self.added <= SAFE_SUM)

    def _calls(self) -> dict[str, Callable[[bool], Any]]:
        """By operation, blocking or not."""
        source, result, group, n = self.source, self.result, self.group, self.n
        root, at_root = self.ranks[0], self.me == 0
        gathered = list(result.chunk(n)) if self.op == "gather" and at_root else None
        pieces = list(source.chunk(n)) if self.op == "scatter" and at_root else None
        return {
            "all_reduce": lambda later: dist.all_reduce(source, group=group, async_op=later),
            "all_gather": lambda later: dist.all_gather_into_tensor(result, source, group=group, async_op=later),
            "reduce_scatter": lambda later: dist.reduce_scatter_tensor(result, source, group=group, async_op=later),
            "all_to_all": lambda later: dist.all_to_all_single(result, source, group=group, async_op=later),
            "broadcast": lambda later: dist.broadcast(source, root, group=group, async_op=later),
            "reduce": lambda later: dist.reduce(source, root, group=group, async_op=later),
            "gather": lambda later: dist.gather(source, gathered, root, group=group, async_op=later),
            "scatter": lambda later: dist.scatter(result, pieces, root, group=group, async_op=later),
            "send_recv": lambda _: self._transfer(sends=at_root, receives=self.me == 1),
            "send_recv_ring": lambda _: self._transfer(),
            "send_recv_both": lambda _: self._transfer(),
        }

    def _transfer(self, *, sends: bool = True, receives: bool = True) -> None:
        """To the next rank and from the one before, at once."""
        ranks, me, group = self.ranks, self.me, self.group
        following, before = ranks[(me + 1) % len(ranks)], ranks[me - 1]
        steps = [dist.P2POp(dist.isend, self.source, following, group=group)] * sends
        steps += [dist.P2POp(dist.irecv, self.result, before, group=group)] * receives
        for work in dist.batch_isend_irecv(steps):
            work.wait()

    def _wanted(self, i: torch.Tensor) -> torch.Tensor:
        """What element i of the result must be."""
        n, me, part = self.n, self.me, self.part
        if self.op.startswith("send_recv"):
            return content((me - 1) % n, i, 1)
        if self.op in ("all_gather", "gather"):
            return content(i // part, i % part, n)
        if self.op == "all_to_all":
            return content(i // part, i % part + me * part, n)
        i = i + me * part if self.op in ("reduce_scatter", "scatter") else i
        return content(0, i, n) if self.op in ("broadcast", "scatter") else added(i, n)


def difference(result: torch.Tensor, expected: Callable[[torch.Tensor], torch.Tensor], *, exact: bool) -> str:
    """The first element that differs, in words; "" where none does. Large bf16 sums may round by one part in 64."""
    allowed = 0.0 if exact or result.dtype == torch.float32 else 1.0 / 64.0
    for start in range(0, result.numel(), CHUNK):
        found = result[start : start + CHUNK].to(torch.float32)
        wanted = expected(torch.arange(start, start + found.numel(), device=result.device))
        off = ((found - wanted).abs() > allowed * wanted.abs()) | ~torch.isfinite(found)
        if bool(off.any()):
            place = int(off.nonzero()[0].item())
            return (
                f"element {start + place} of {result.numel()} is {found[place].item():g}, "
                f"expected {wanted[place].item():g}"
            )
    return ""
