"""What a rank allocates, and which collectives it issues, read off the operations as they are dispatched (torch).

Memory: every storage that an operation makes, from its first to its last reference, by category. Weights, gradients and optimizer
states are what parameters and optimizer hold between steps. Activations are made by a forward pass, also when recompute repeats
it, and by the loss in both directions; the most of them is looked for between the passes, when only what the backward pass needs
is left. All else is temporary: gathered weights, gradients on their way, buffers of collectives and of the pipeline.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group, get_process_group_ranks
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.lab.reference.transformer import ForwardPass
from planner.lab.run.host_states import HostStates, local

WRAPPERS = (DTensor, AsyncCollectiveTensor)
"""Tensors that hold another one and no memory."""
WAIT = torch.ops._c10d_functional.wait_tensor.default
DEVICE = torch.ops.prim.device.default
LOSS_GRADIENTS = ("planner.loss_gradient", "nll_loss_backward", "_log_softmax_backward_data")
"""Operations of the backward pass whose results, gradients of logits, count as activations."""
CATEGORIES = ("weights", "gradients", "optimizer_states", "activations", "temporary")
OPERATIONS = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "all_gather": "all_gather", "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter", "all_to_all": "all_to_all", "alltoall": "all_to_all", "broadcast": "broadcast",
    "send": "send", "recv_": "receive",
}  # fmt: skip
"""How torch's names of collectives begin -> ours."""


@dataclass
class Storage:
    """One piece of memory that is alive."""

    size: int
    """Bytes."""
    category: str
    """One of CATEGORIES."""


@dataclass
class Most:
    """The most that was allocated while the program was at one point, or at any."""

    parts: dict[str, int]
    """Bytes by category when all of it was most; they sum to the peak."""
    held: dict[str, int]
    """Most bytes of each category, not all at one moment."""

    @property
    def total(self) -> int:
        """The peak, bytes."""
        return sum(self.parts.values())


def overall(points: Iterable[Most]) -> Most:
    """The most at any of some points."""
    every = list(points)
    peak = max(every, key=lambda one: one.total)
    return Most(peak.parts, {name: max(one.held[name] for one in every) for name in CATEGORIES})


def operation_of(name: str) -> str:
    """One of ours for torch's name of a collective; "" = none."""
    return next((word for start, word in OPERATIONS.items() if name.lstrip("_").startswith(start)), "")


@functools.cache
def _kind(func: Any) -> tuple[bool, bool]:
    """Whether an operation is a collective, and whether it makes gradients of logits."""
    collective = func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
    return collective, any(name in str(func) for name in LOSS_GRADIENTS)


def optimizer_states(optimizer: Any) -> list[Any]:
    """All that an optimizer holds of its parameters, numbers of steps included."""
    return [one for state in optimizer.state.values() for one in state.values()]


def _while_it_runs(owner: Any, name: str, value: Any) -> Callable[[Any], Any]:
    """Makes functions during whose calls an attribute has another value."""

    def wrap(original: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            before = getattr(owner, name)
            setattr(owner, name, value)
            try:
                return original(*arguments, **named)
            finally:
                setattr(owner, name, before)

        return run

    return wrap


class MemoryTracker(TorchDispatchMode):
    """Counts storages and collectives while it is entered; ``points``: the most since ``start`` at each point of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.points: dict[Any, Most] = {}
        self.found: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        """Collectives since ``start``: (operation, ranks of the group, bytes of the full buffer) -> times."""
        self._alive: dict[int, Storage] = {}
        self._blind = False
        self.start()

    @property
    def peak(self) -> Most:
        """The most since ``start``."""
        return overall(self.points.values())

    def start(self) -> None:
        """Forget what was most: what is alive now is where it starts."""
        self.points.clear()
        self.found.clear()
        self.at("start")

    def at(self, point: Any) -> None:
        """From here on the program is at this point, until the next call."""
        self._most = self.points.setdefault(point, Most(dict(self.now), dict(self.now)))
        self._grown(*CATEGORIES)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: no switch for it around every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for before nearly every operation, and makes nothing
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # they come again with what they wrap
        if func is WAIT:  # gives back what it waited for; on fake tensors it would be a second buffer
            if not isinstance(args[0], FakeTensor):  # unwaited, it is not there yet and what it was made of stays alive
                func(*args)
            return args[0]
        out = func(*args, **(kwargs or {}))
        communicates, of_loss = _kind(func)
        if communicates:
            self._count(operation_of(func._opname), pytree.tree_leaves((args, kwargs)), out)
        if not ForwardPass.depth:  # a forward pass has ended: what is left of it is kept for the backward pass
            self._grown("activations")
        category = "activations" if ForwardPass.depth or of_loss else "temporary"
        for tensor in (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, WRAPPERS):
                self._see(tensor, category)
        return out

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """What has to be watched that is no operation; entered before modules are sharded."""
        no_forward_pass = _while_it_runs(ForwardPass, "depth", 0)
        wrapped = (
            (torch.UntypedStorage, "resize_", self._resized),
            (FSDPState, "_pre_forward", no_forward_pass),  # gathers weights inside of a forward pass: not activations
            (FSDPState, "_post_forward", no_forward_pass),
            # DTensor finds shapes by operations on tensors of the global size, which exist nowhere
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", _while_it_runs(self, "_blind", True)),
            (HostStates, "update_on_host", _while_it_runs(self, "_blind", True)),  # host memory is counted apart
        )
        with contextlib.ExitStack() as stack:
            for owner, name, wrap in wrapped:
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, wrap(original))
            yield

    def _resized(self, original: Any) -> Any:
        """FSDP frees and allocates by resizing, which is no operation."""

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            one = self._alive.get(storage._cdata)
            if one is not None:
                self._add(one.category, size - one.size)
                one.size = size
            return result

        return resize

    def _see(self, tensor: Any, category: str) -> None:
        device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device  # the latter is an operation of its own
        if self._blind or device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = Storage(storage.nbytes(), category)
            weakref.finalize(storage, self._gone, key)
            self._add(category, self._alive[key].size)

    def _gone(self, key: int) -> None:
        one = self._alive.pop(key, None)
        if one is not None:
            self._add(one.category, -one.size)

    def _add(self, category: str, size: int) -> None:
        self.now[category] += size
        if size > 0:
            self._grown(*([] if category == "activations" and ForwardPass.depth else [category]))

    def _grown(self, *categories: str) -> None:
        """Keeps the most of such categories and of all."""
        for name in categories:
            self._most.held[name] = max(self._most.held[name], self.now[name])
        if sum(self.now.values()) > self._most.total:
            self._most.parts = dict(self.now)

    def assign(self, category: str, tensors: Iterable[Any]) -> None:
        """What some tensors hold counts in this category from now on; what is no tensor is left out."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            one = self._alive.get(local(tensor).untyped_storage()._cdata)
            if one is not None and one.category != category:
                self.now[one.category] -= one.size
                one.category = category
                self.now[category] += one.size
                self._grown(category)

    def _count(self, operation: str, values: list[Any], out: Any) -> None:
        tensors = [one for one in (*values, *pytree.tree_leaves(out)) if isinstance(one, torch.Tensor)]
        size = max((one.numel() * one.element_size() for one in tensors), default=0)
        if operation:
            self.found[operation, _ranks(values), size] += 1

    def collectives(self) -> list[dict[str, Any]]:
        """Operation, ranks of the group, from each to the next, bytes and times, as a record has them."""
        return [
            {"operation": operation, "ranks": len(ranks), "stride": ranks[1] - ranks[0] if len(ranks) > 1 else 1,
             "bytes": size, "times": times}
            for (operation, ranks, size), times in sorted(self.found.items())
        ]  # fmt: skip


def _ranks(values: list[Any]) -> tuple[int, ...]:
    """Ranks of the group among the arguments: a handle, or a name."""
    for one in values:
        if isinstance(one, str) and one not in ("sum", "max", "avg", "min"):
            return tuple(sorted(get_process_group_ranks(_resolve_process_group(one))))
        if isinstance(one, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                return tuple(sorted(get_process_group_ranks(torch.distributed.ProcessGroup.unbox(one))))
    return ()
