"""Which collectives a rank issues: operation, bytes and group, read off the operations as they are dispatched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.distributed_c10d import get_process_group_ranks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.lab.run.memory_tracker import WRAPPERS

OPERATIONS = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "all_gather": "all_gather", "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter", "all_to_all": "all_to_all", "alltoall": "all_to_all", "broadcast": "broadcast",
    "send": "send", "recv_": "receive",
}  # fmt: skip
GATHERING = ("all_gather",)
"""Operations whose whole buffer is what they put out; of the others it is what they get."""


class Wires(TorchDispatchMode):
    """Counts collectives while it is entered: (operation, ranks of the group, bytes of the full buffer) -> times."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._note(func._opname, args, kwargs or {}, out)
        return out

    def _note(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        operation = next((word for start, word in OPERATIONS.items() if name.lstrip("_").startswith(start)), None)
        if operation is None:
            return
        values = [*pytree.tree_leaves(args), *pytree.tree_leaves(kwargs)]
        sizes = [
            one.numel() * one.element_size()
            for one in [*values, *pytree.tree_leaves(out)]
            if isinstance(one, torch.Tensor)
        ]
        self.found[operation, _ranks(values), max(sizes, default=0)] += 1


def _ranks(values: list[Any]) -> tuple[int, ...]:
    """Ranks of the group among the arguments: a handle, or a name."""
    for one in values:
        if isinstance(one, str) and one not in ("sum", "max", "avg", "min"):
            from torch.distributed.distributed_c10d import _resolve_process_group

            return tuple(sorted(get_process_group_ranks(_resolve_process_group(one))))
        if isinstance(one, torch.ScriptObject):
            try:
                return tuple(sorted(get_process_group_ranks(torch.distributed.ProcessGroup.unbox(one))))
            except (RuntimeError, ValueError, KeyError):
                continue
    return ()
