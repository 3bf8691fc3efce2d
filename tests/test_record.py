"""``record`` against the dataclass that it stands for."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import pytest

from planner.record import record


def declared(kind: Any) -> tuple[type, type]:
    """A class and one that inherits from it, both of a kind."""

    @kind
    class Base:
        """First."""

        name: str
        size: int = 3
        seen: list[int] = field(default_factory=list, compare=False)
        facts: dict[str, int] = field(default_factory=dict, hash=False)
        secret: int = field(default=0, repr=False)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("size")

        @cached_property
        def double(self) -> int:
            return 2 * self.size

    @kind
    class More(Base):  # type: ignore[misc, valid-type]
        """Second."""

        other: float = 1.0

    return Base, More


def test_a_record_is_a_frozen_dataclass() -> None:
    for mine, theirs in zip(declared(record), declared(dataclass(frozen=True, kw_only=True)), strict=True):
        one, other = (kind(name="a", seen=[1], facts={"x": 1}, secret=4) for kind in (mine, theirs))
        assert is_dataclass(one) and [field.name for field in fields(one)] == [field.name for field in fields(other)]
        assert (repr(one), hash(one), one.double) == (repr(other), hash(other), other.double)
        assert one == replace(one, seen=[2]) and hash(one) == hash(replace(one, facts={}))
        assert one != replace(one, size=4) and one != replace(one, facts={}) and one != other and one != "a"
        assert vars(replace(one, size=7)) == vars(replace(other, size=7))
        with pytest.raises(ValueError, match="size"):
            replace(one, size=-1)
        for kind in (one, other):
            for name in ("size", "new"):
                with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
                    setattr(kind, name, 5)
            with pytest.raises(FrozenInstanceError, match="cannot delete field 'size'"):
                del kind.size
        with pytest.raises(TypeError):
            mine("a")


@record
class Nested:
    """One that may hold itself."""

    inner: Any = None


def test_records_are_pickled_and_shown_within_themselves() -> None:
    held = list[Any]()
    one = Nested(inner=held)
    assert pickle.loads(pickle.dumps(Nested(inner=2))) == Nested(inner=2)
    held.append(one)
    assert repr(one) == "Nested(inner=[...])"


@record
class Named:
    """Fields that are called as what a constructor may use."""

    values: tuple[int, ...]
    factory: list[int] = field(default_factory=list)
    fields: int = 2


def test_any_name_is_a_field_and_values_are_given_once() -> None:
    """Written without ``__setattr__``, which takes six times as long; and not by a second constructor."""
    one, other = Named(values=(1,)), Named(values=(2,), factory=[3], fields=4)
    assert (vars(one), vars(other)) == ({"values": (1,), "factory": [], "fields": 2}, {"values": (2,), "factory": [3], "fields": 4})
    assert one.factory is not Named(values=(1,)).factory
    with pytest.raises(FrozenInstanceError):
        one.__init__(values=(5,))  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"Named.__init__\(\) missing 1 required keyword-only argument: 'values'"):
        Named()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        Named(values=(), size=1)  # type: ignore[call-arg]
    assert one.values == (1,)


class Below(Named):
    """No record of its own: what it inherits makes it."""


def test_a_class_below_a_record_is_made_as_it() -> None:
    """Of which none was made before, and with the constructor that the record then has."""
    assert vars(Below(values=(3,))) == vars(Named(values=(3,))) and isinstance(Below(values=()), Below)
    assert "__init__" not in vars(Below)
