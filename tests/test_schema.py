"""The reader of checked data: every type, back again, and the sentence for every kind of mistake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from planner import library
from planner.errors import PlannerError
from planner.schema import Number, Positive, Rule, Seconds, Text, check, keys, one_of, plain, read, within


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A group of keys."""

    size: int
    note: Text = ""


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One field of every kind."""

    name: str
    yes: bool = True
    count: Annotated[int, within(1, 1024)] = 1
    passes: float = 1.0
    signed: Number = 0.0
    share: Positive = 1.0
    time: Seconds = 0.0
    kernel: Annotated[str, one_of("flash", "unfused")] = "flash"
    levels: tuple[Annotated[int, within(0, 3, says="levels from 0 to 3")], ...] = ()
    pair: tuple[float, float] = (1.0, 2.0)
    overlap: frozenset[Annotated[str, one_of({"tp": 1, "pp": 2})]] = frozenset()
    table: dict[str, float] | None = None
    rates: dict[str, Annotated[float, Rule(unit="bytes/s")]] | None = None
    whole: Annotated[dict[str, Positive], keys(("u", "v"))] | None = None
    some: Annotated[dict[str, float], keys(("u", "v"), required=False)] | None = None
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    anything: Any = None


FULL = {
    "name": "x", "yes": False, "count": 8, "passes": 2, "signed": -1, "share": 0.5, "time": "3 us", "kernel": "unfused",
    "levels": [0, 3], "pair": [1, 2.5], "overlap": ["tp"], "table": {"a": 1}, "rates": {"b": "2 GB/s"},
    "whole": {"u": 1, "v": 2}, "some": {"v": 0}, "inner": {"size": 1, "note": 2026}, "many": [{"size": 3}], "anything": {1: [2]},
}  # fmt: skip


def test_every_type_is_read_and_written_back() -> None:
    thing = read(Thing, FULL, "f")
    assert (thing.count, thing.passes, thing.time, thing.levels, thing.pair) == (8, 2.0, 3e-6, (0, 3), (1.0, 2.5))
    assert thing.overlap == frozenset({"tp"}) and thing.rates == {"b": 2e9} and thing.whole == {"u": 1.0, "v": 2.0}
    assert thing.inner == Inner(size=1, note="2026") and thing.many == (Inner(size=3),) and thing.anything == {1: [2]}
    assert isinstance(thing.passes, float) and plain(thing)["time"] == "3e-06 s"
    assert read(Thing, plain(thing), "f") == thing
    assert read(Thing, {"name": "x"}, "f") == Thing(name="x")
    check(Inner(size=3))
    with pytest.raises(PlannerError, match=r"^size is True; it must be a whole number that is not negative$"):
        check(Inner(size=True))


WRONG: list[tuple[dict[Any, Any], str]] = [
    ({"nme": 1}, "f: unknown key 'nme'; nearest: name"),
    ({3: 1}, "f: unknown key '3'; nearest: "),
    ({"planner_plan": 2}, "f is a plan, as --output writes it, and a file of another kind is asked for here"),
    ({"planner_serve_plan": 1}, "f is a serve plan, as --output of 'plan serve' writes it"),
    ({"yes": 1}, "f: yes is 1; it must be true or false"),
    ({"count": True}, "f: count is True; it must be a whole number from 1 to 1024"),
    ({"count": 8.0}, "f: count is 8.0; it must be a whole number from 1 to 1024"),
    ({"count": 0}, "f: count is 0; it must be a whole number from 1 to 1024"),
    ({"passes": float("nan")}, "f: passes is nan; it must be a number that is not negative"),
    ({"passes": 10**400}, "f: passes is 1000"),
    ({"signed": float("-inf")}, "f: signed is -inf; it must be a number"),
    ({"share": 0}, "f: share is 0; it must be a number above 0"),
    ({"time": 7}, "f: time: '7' has no unit; write it like 2.5 us"),
    ({"kernel": ["flash"]}, "f: kernel is ['flash']; it must be one of flash, unfused"),
    ({"levels": [True]}, "f: levels is [True]; it must be a list of levels from 0 to 3"),
    ({"levels": 3}, "f: levels is 3; it must be a list of levels from 0 to 3"),
    ({"pair": [1]}, "f: pair is [1]; it must be a list of 2 values, each a number that is not negative"),
    ({"overlap": ["tps"]}, "f: overlap is ['tps']; it must be a list of tp, pp"),
    ({"table": {"a": "1"}}, "f: table a is '1'; it must be a number that is not negative"),
    ({"rates": {"b": "2 GB"}}, "f: rates b: '2 GB' has the unit 'GB', which does not measure bytes/s"),
    ({"whole": {"u": 1}}, "f: whole: missing key 'v'"),
    ({"some": {"uu": 1}}, "f: some: unknown key 'uu'; nearest: u"),
    ({"inner": 3}, "f: inner: expected a mapping of keys to values, found int"),
    ({"inner": {}}, "f: inner: missing key 'size'"),
    ({"many": [{"size": 1}, {"size": "2"}]}, "f: many 2: size is '2'; it must be a whole number that is not negative"),
    ({"many": {}}, "f: many is {}; it must be a list of values"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_mistake_is_one_sentence(change: dict[Any, Any], message: str) -> None:
    with pytest.raises(PlannerError) as error:
        read(Thing, FULL | change, "f")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_what_is_missing_is_listed() -> None:
    with pytest.raises(PlannerError, match=r"^f: missing key 'size'; cut off$"):
        read(Inner, {}, "f", hint="; cut off")
    with pytest.raises(PlannerError, match=r"^f: expected a mapping of keys to values, found list$"):
        read(Inner, [], "f")


@pytest.mark.parametrize("key", sorted(library.WRITTEN))
def test_a_file_of_another_kind_is_named_with_the_commands_that_take_it(key: str) -> None:
    asked = "rl_plan" if key == "planner_plan" else "plan"
    with pytest.raises(PlannerError) as found:
        library.version_of({key: 1}, asked, 1, where="x.yaml")
    what, taken = library.WRITTEN[key]
    assert what in str(found.value) and str(found.value).endswith(taken)
