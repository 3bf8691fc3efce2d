"""``record``: a class of named values that are given once, by name, and compared by value.

It is ``dataclass(frozen=True, kw_only=True)``, whose fields, ``replace`` and all else hold, but for this: a dataclass compiles six
methods for each class, 1.3 ms of every start, where a record compiles its constructor and shares the others. The constructor writes
into the instance's own dictionary, a fifth of the time of giving each value to ``__setattr__``: pricing makes thousands of records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """The class as a record. Raises FrozenInstanceError where a value is given twice."""
    own = vars(cls)
    for name, method in _SHARED.items():
        if name not in own:
            setattr(cls, name, method)
    found = dataclass(kw_only=True, repr=False, eq=False, init=False)(cls)
    every = fields(found)  # type: ignore[arg-type]
    found.__init__ = _constructor(found, every)  # type: ignore[method-assign]
    found._compared = _values([one.name for one in every if one.compare])  # type: ignore[attr-defined]
    found._hashed = _values([one.name for one in every if (one.compare if one.hash is None else one.hash)])  # type: ignore[attr-defined]
    return found


def _values(names: list[str]) -> Any:
    return staticmethod(attrgetter(*names) if names else lambda _: ())


def _constructor(cls: type, every: tuple[Field[Any], ...]) -> Any:
    """``__init__`` with every field by name, and what follows it."""
    known: dict[str, Any] = {"_factory": MISSING, "_twice": FrozenInstanceError}
    taken, lines = list[str](), ["_its = self.__dict__", "if _its: raise _twice('its values were given')"]
    for one in every:
        name, given = one.name, f"_of_{one.name}"
        if one.default_factory is not MISSING:
            known[given] = one.default_factory
            taken.append(f"{name}=_factory")
            lines.append(f"_its['{name}'] = {name} if {name} is not _factory else {given}()")
            continue
        known[given] = one.default
        taken.append(name if one.default is MISSING else f"{name}={given}")
        lines.append(f"_its['{name}'] = {name}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    head = f"def __init__(self{''.join(f', {one}' for one in ('*', *taken))}):" if taken else "def __init__(self):"
    exec("\n ".join([head, *lines]), known)  # names of fields are those of the class, as in the standard library's own
    made_of = known["__init__"]
    made_of.__qualname__, made_of.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made_of.__annotations__ = {one.name: one.type for one in every} | {"return": None}
    return made_of


def _set(self: Any, name: str, value: Any) -> None:
    values = self.__dict__
    if name in values or name not in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    values[name] = value


def _delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _equal(self: Any, other: Any) -> bool:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return bool(self._compared(self) == self._compared(other))


def _hash(self: Any) -> int:
    return hash(self._hashed(self))


@recursive_repr("...")
def _repr(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


_SHARED: dict[str, Callable[..., Any]] = {
    "__setattr__": _set, "__delattr__": _delete, "__eq__": _equal, "__hash__": _hash, "__repr__": _repr,
}  # fmt: skip
