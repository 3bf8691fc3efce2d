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
        with pytest.raises(TypeError, match=r"() has no 'sizes', 'what'"):
            mine(name="a", sizes=1, what=2)
        with pytest.raises(TypeError, match=r"() needs 'name'"):
            mine(size=1)


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
