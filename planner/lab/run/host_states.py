"""An optimizer some of whose states lie in host memory: gradients go there, the update runs there, weights come back (torch).

[Megatron Core, cpu_offloading/hybrid_optimizer.py; DeepSpeed, ZeRO-Offload, arXiv 2101.06840]
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def local(tensor: Any) -> Tensor:
    """What this rank holds of a parameter or a gradient."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class HostStates:
    """Two optimizers of one kind, on the device and on the host; whole parameters go to the host, the largest first, as long as
    they are at most the share of it."""

    def __init__(self, parameters: Iterable[nn.Parameter], share: float, make: Callable[..., Any]) -> None:
        """``share`` of the parameters, 0 to 1; ``make`` an optimizer of some parameters."""
        self.parameters, self.make = list(parameters), make
        sizes = [local(one).numel() for one in self.parameters]
        room, moved = share * sum(sizes), set[int]()
        for number in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            if sizes[number] <= room:
                moved.add(number)
                room -= sizes[number]
        self.moved = [one for number, one in enumerate(self.parameters) if number in moved]
        kept = [one for number, one in enumerate(self.parameters) if number not in moved]
        self.on_device = make(kept) if kept else None
        self.copies: list[nn.Parameter] = []
        """Weights in host memory, from the first update on."""
        self.on_host: Any = None

    @property
    def state(self) -> dict[Any, Any]:
        """What lies on the device."""
        return self.on_device.state if self.on_device is not None else {}

    @property
    def host_bytes(self) -> int:
        """Of states, weights and gradients in host memory; numbers of steps are left out."""
        states = [one for state in self.on_host.state.values() for one in state.values()] if self.on_host is not None else []
        tensors = [*(one for one in states if isinstance(one, Tensor) and one.ndim), *self.copies, *(c.grad for c in self.copies)]
        return sum(one.numel() * one.element_size() for one in tensors if one is not None)

    def zero_grad(self) -> None:
        """Of the device; those of the host are written over."""
        for one in self.parameters:
            one.grad = None

    def step(self) -> None:
        """Both updates."""
        if self.on_device is not None:
            self.on_device.step()
        self.update_on_host()

    def update_on_host(self) -> None:
        """Gradients there, update, weights back."""
        with torch.no_grad():
            if self.on_host is None:
                self._allocate()
            for one, copy in zip(self.moved, self.copies, strict=True):
                if one.grad is not None and copy.grad is not None:
                    copy.grad.copy_(local(one.grad), non_blocking=True)
            self._wait()
        self.on_host.step()
        with torch.no_grad():
            for one, copy in zip(self.moved, self.copies, strict=True):
                local(one).copy_(copy, non_blocking=True)
            self._wait()

    def _allocate(self) -> None:
        """Pinned where there is a GPU."""
        for one in map(local, self.moved):
            pinned = one.is_cuda
            copy = nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=pinned).copy_(one))
            copy.grad = torch.zeros(one.shape, dtype=one.dtype, device="cpu", pin_memory=pinned)
            self.copies.append(copy)
        self.on_host = self.make(self.copies)

    def _wait(self) -> None:
        if any(local(one).is_cuda for one in self.moved):
            torch.cuda.synchronize()
