"""Fake tensors for a step that repeats the same few operations a hundred thousand times.

torch's FakeTensorMode asks the meta kernel of an operation once per shapes, and most of its time goes into the key of its cache
(17 properties of each tensor, sparse and symbolic ones among them) and into what it does not cache: operations of libraries
and unsafe views. Here the key has what decides a strided tensor's metadata, and what is known of an operation is where its
outputs lie: on an input, or fresh. All that this does not know goes torch's own way, as every operation does the first time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

SIMPLE = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are their own key, with their type: 1, 1.0 and True are equal."""
NAMESPACES = ("aten", "prims", "planner", "_c10d_functional")
OWN_WAY = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Operations whose outputs depend on more than their key, or that change what an input is."""
MOVES_STORAGE = ("set_", "resize_")
SPANS = (torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction)
"""FSDP puts names around what it does, which are no tensors."""


class _UnknownError(Exception):
    """An argument without a key."""


class _Output(NamedTuple):
    """Where one output of an operation lies."""

    of: int | None
    """Number of the tensor argument whose storage it has; None = its own."""
    same: bool
    """It is that argument."""
    shape: Any
    stride: Any
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class RepeatedFakes(FakeTensorMode):
    """FakeTensorMode that repeats what it has seen without asking again."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[Any, tuple[Any, list[_Output]]] = {}
        """By key: type of the whole output (None = one tensor), and its tensors."""
        self._own_way: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: no switch for it around every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SPANS:
            return func(*args, **(kwargs or {}))
        if func in self._own_way:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        key: list[Any] = [func, torch.get_default_dtype()]
        tensors: list[FakeTensor] = []
        try:
            _add_to_key(key, tensors, args)
            if kwargs:
                _add_to_key(key, tensors, kwargs.items())
        except _UnknownError:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        name = tuple(key)
        known = self._known.get(name)
        if known is None:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
            self._learn(func, name, tensors, out)
            return out
        kind, outputs = known
        made = [self._made(one, tensors) for one in outputs]
        return made[0] if kind is None else kind(made)

    def _made(self, one: _Output, tensors: list[FakeTensor]) -> FakeTensor:
        if one.same:
            return tensors[one.of or 0]
        if one.of is None:
            bare = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=one.dtype, device="meta")
            bare.set_(tensors[one.of].untyped_storage(), one.offset, one.shape, one.stride)
        return FakeTensor(self, bare, one.device, requires_grad=one.requires_grad)

    def _learn(self, func: Any, name: Any, tensors: list[FakeTensor], out: Any) -> None:
        """Keeps what an operation gave, where the same key gives the same again."""
        kind = type(out) if isinstance(out, (tuple, list)) else None
        every = [out] if kind is None else list(out)
        if kind not in (None, tuple, list) or not every or not all(type(one) is FakeTensor for one in every) or not _repeats(func):
            self._own_way.add(func)
            return
        if any(one.constant is not None for one in (*every, *tensors)):
            return
        places = {one.untyped_storage()._cdata: number for number, one in enumerate(tensors)}
        found = [_output_of(one, tensors, places) for one in every]
        if func._schema.is_mutable and not all(one.same for one in found):
            self._own_way.add(func)
        elif all(one.of is not None or _is_whole(one, out) for one, out in zip(found, every, strict=True)):
            self._known[name] = kind, found


def _add_to_key(key: list[Any], tensors: list[FakeTensor], values: Any) -> None:
    """Adds what decides the outputs, and the tensors in their order."""
    for one in values:
        kind = type(one)
        if kind is FakeTensor:
            if one.constant is not None or one.layout is not torch.strided:
                raise _UnknownError
            tensors.append(one)
            key += (one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device, one.requires_grad)
        elif kind in SIMPLE:
            key += (kind, one)
        elif kind is list or kind is tuple:
            key += (kind, len(one))
            _add_to_key(key, tensors, one)
        else:
            raise _UnknownError


def _repeats(func: Any) -> bool:
    """Whether the metadata of inputs decides those of the outputs, and nothing else changes."""
    simple = func._opname not in MOVES_STORAGE and not any(tag in func.tags for tag in OWN_WAY)
    return isinstance(func, torch._ops.OpOverload) and func.namespace in NAMESPACES and simple


def _output_of(out: FakeTensor, tensors: list[FakeTensor], places: dict[int, int]) -> _Output:
    same = next((number for number, one in enumerate(tensors) if one is out), None)
    return _Output(
        of=places.get(out.untyped_storage()._cdata) if same is None else same, same=same is not None, shape=out.shape,
        stride=out.stride(), offset=out.storage_offset(), dtype=out.dtype, device=out.fake_device, requires_grad=out.requires_grad,
    )  # fmt: skip


def _is_whole(one: _Output, out: Tensor) -> bool:
    """A fresh storage is as large as its tensor."""
    bare = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
    return one.offset == 0 and bare.untyped_storage().nbytes() == out.untyped_storage().nbytes()
