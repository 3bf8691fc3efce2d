"""What a rank allocates: every storage that an operation makes, from its first to its last reference, by category.

Weights, gradients and optimizer states are what parameters and optimizer hold between steps. Activations are made by a
forward pass, also when recompute repeats it, and by the loss in both directions; the most of them is looked for between the
passes, when only what the backward pass needs is left. All else is temporary: gathered weights,
gradients on their way, buffers of collectives and of the pipeline.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.lab.reference.transformer import FORWARD, Watch

WRAPPERS = (DTensor, AsyncCollectiveTensor)
"""Tensors that hold another one and no memory."""
WAIT = torch.ops._c10d_functional.wait_tensor.default
LOSS_GRADIENTS = ("planner.loss_gradient", "nll_loss_backward", "_log_softmax_backward_data")
"""Operations of the backward pass whose results, gradients of logits, count as activations."""
CATEGORIES = ("weights", "gradients", "optimizer_states", "activations", "temporary")


@dataclass
class Storage:
    """One piece of memory that is alive."""

    size: int
    """Bytes."""
    category: str
    """One of CATEGORIES."""


@dataclass
class Peak:
    """The moment when most was allocated."""

    total: int = 0
    """Bytes."""
    parts: dict[str, int] = field(default_factory=dict)
    """Bytes by category at that moment; they sum to the total."""


def _outside(original: Any) -> Any:
    """The function as if no forward pass were running."""

    def run(*arguments: Any, **named: Any) -> Any:
        depth, Watch.depth = Watch.depth, 0
        try:
            return original(*arguments, **named)
        finally:
            Watch.depth = depth

    return run


class Witness(TorchDispatchMode):
    """Counts storages while it is entered. ``largest`` holds the most bytes of each category, not all at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak, self.largest = Peak(), dict.fromkeys(CATEGORIES, 0)
        self.points: dict[Any, tuple[int, dict[str, int], dict[str, int]]] = {}
        self._point: Any = None
        self._top, self._most = Peak(), dict.fromkeys(CATEGORIES, 0)
        self._alive: dict[int, Storage] = {}
        self._blind = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # they come again with what they wrap
        if func is WAIT:  # gives back what it waited for; on fake tensors it would be a second buffer
            if not isinstance(
                args[0], FakeTensor
            ):  # unwaited, what it gives is not there yet and what it took stays alive
                func(*args)
            return args[0]
        out = func(*args, **(kwargs or {}))
        if not Watch.depth:  # a forward pass has ended: what is left of it is kept for the backward pass
            self._settle("activations")
        category = "activations" if Watch.depth or any(name in str(func) for name in LOSS_GRADIENTS) else "temporary"
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, WRAPPERS):
                self._see(tensor, category)
        return out

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """What has to be watched beside operations; entered before modules are sharded."""
        wrapped = (
            (torch.UntypedStorage, "resize_", self._resized),
            (FSDPState, "_pre_forward", _outside),  # gathers weights inside of a forward pass: not activations
            (FSDPState, "_post_forward", _outside),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", self._unseen),
        )
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in wrapped]
        for owner, name, wrap in wrapped:
            setattr(owner, name, wrap(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)

    def _unseen(self, original: Any) -> Any:
        """DTensor finds shapes by operations on tensors of the global size, which exist nowhere."""

        def run(*arguments: Any, **named: Any) -> Any:
            blind, self._blind = self._blind, True
            try:
                return original(*arguments, **named)
            finally:
                self._blind = blind

        return run

    def _resized(self, original: Any) -> Any:
        """FSDP frees and allocates by resizing, which is no operation."""

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self._grow(storage, size)
            return result

        return resize

    def _see(self, tensor: Any, category: str) -> None:
        if self._blind or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = Storage(size, category)
        weakref.finalize(storage, self._gone, key)
        self._add(category, size)

    def _gone(self, key: int) -> None:
        one = self._alive.pop(key, None)
        if one is not None:
            self._add(one.category, -one.size)

    def _grow(self, storage: Any, size: int) -> None:
        one = self._alive.get(storage._cdata)
        if one is not None:
            self._add(one.category, size - one.size)
            one.size = size

    def _add(self, category: str, size: int) -> None:
        self.now[category] += size
        self.total += size
        settled = category != "activations" or not Watch.depth
        if size > 0 and settled:
            self._settle(category)
        if self.total > self._top.total:
            self._top = Peak(self.total, dict(self.now))
            if self.total > self.peak.total:
                self.peak = self._top

    def _settle(self, category: str) -> None:
        """The most of a category, of all and since the last point."""
        self.largest[category] = max(self.largest[category], self.now[category])
        self._most[category] = max(self._most[category], self.now[category])

    def at(self, point: Any) -> None:
        """From here on the program is at another point; what was highest at the last one is kept under its name."""
        if self._point is not None:
            before = self.points.get(self._point)
            most = (
                self._most if before is None else {name: max(self._most[name], before[2][name]) for name in CATEGORIES}
            )
            top = self._top if before is None or self._top.total > before[0] else Peak(before[0], before[1])
            self.points[self._point] = (top.total, top.parts, most)
        self._point, self._top, self._most = point, Peak(self.total, dict(self.now)), dict(self.now)

    def is_(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Name what some tensors hold; from now on it counts there."""
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            one = self._alive.get(local.untyped_storage()._cdata)
            if one is not None and one.category != category:
                self.now[one.category] -= one.size
                one.category = category
                self.now[category] += one.size
                self._settle(category)

    def start(self) -> None:
        """Forget the peak: what is alive now is where it starts."""
        self.peak, self.largest = Peak(self.total, dict(self.now)), dict(self.now)


__all__ = ["CATEGORIES", "FORWARD", "Peak", "Witness"]
