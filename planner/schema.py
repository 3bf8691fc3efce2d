"""The one reader of checked data: a mapping from a file becomes a frozen dataclass, or a sentence says what is wrong with it.

    @record
    class Thing:
        name: Name                                             # letters, digits and some signs
    kind: str                                              # a text of one line; Text: of several
        tp: bool                                               # true or false
        divisor: Annotated[int, within(1, 1024)]               # a whole number; true is none, 8.0 is none
        norm_passes: float                                     # not negative, at most 1e15
        share: Positive                                        # above 0
        host_time: Seconds                                     # text with a unit, as ``units.parse`` reads it
        attention: Annotated[str, one_of("flash", "unfused")]
        zero: tuple[Annotated[int, within(0, 3)], ...]         # a list; tuple[float, float]: exactly two
        overlap: frozenset[Annotated[str, one_of(OVERLAPS)]]
        optimizer_bytes: dict[str, float]                      # any names
        fractions: Annotated[dict[str, Positive], keys(OPS)]   # exactly these names (``required=False``: some of them)
        inner: Inner | None = None                             # a dataclass, or a class with ``from_dict(data, where=)``

    thing = read(Thing, data, "file.yaml")       # PlannerError: unknown key with the nearest, missing key, wrong value
    plain(thing)                                 # back to plain data: quantities with their unit, tuples as lists

``check_keys`` is for mappings that are no dataclass, ``value_of`` for one value of any of these types, ``check`` for what a
constructor was given. Fields without a default are required. Messages begin with ``where``: file, then the groups of keys; that of
a constructor (``__post_init__``) is put behind it. ``plain_fields`` is ``plain`` without what is as its default.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from planner import library, units
from planner.errors import CONTROL, PlannerError, nearest_first, shown
from planner.record import record

T = TypeVar("T")
LARGEST = 1e15
"""No number of a file without bounds of its own is larger."""


@record
class Rule:
    """What a value must be beyond its type; the second part of ``Annotated``."""

    unit: str = ""
    """A quantity of this dimension of ``units``: bytes, bytes/s, FLOP/s, seconds, watts, USD/h, USD/byte, tokens."""
    choices: tuple[str, ...] = ()
    """The texts that are allowed; of a mapping the keys."""
    required: bool = False
    """Of a mapping: every one of the keys."""
    group: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """Of a mapping: its keys with the type of each."""
    least: float = 0.0
    """Smallest number."""
    most: float = LARGEST
    """Largest number."""
    above: bool = False
    """The smallest number is refused itself."""
    says: str = ""
    """What the message says that the value must be, where the rule would say less."""
    loose: bool = False
    """A number or a date stands for its text."""
    signs: re.Pattern[str] | None = None
    """What a text must match as a whole; None: it is of one line."""
    kept: bool = False
    """Of a number: an integer stays one."""
    reader: Callable[[Any, str], Any] | None = None
    """Reads the value itself, given the place for its messages."""


def one_of(*names: str | Iterable[str]) -> Rule:
    """One of some texts, given one by one or as a collection."""
    return Rule(choices=tuple(text for name in names for text in ([name] if isinstance(name, str) else name)))


def keys(names: Iterable[str], *, required: bool = True) -> Rule:
    """A mapping with exactly these keys, or with some of them."""
    return Rule(choices=tuple(names), required=required)


def group(kinds: Mapping[str, Any]) -> Rule:
    """A mapping with some of these keys, each with a type of its own: for groups that stay mappings."""
    return Rule(group=kinds)


def within(least: float, most: float = LARGEST, *, says: str = "") -> Rule:
    """A number from least to most."""
    return Rule(least=least, most=most, says=says)


Positive = Annotated[float, Rule(above=True)]
Number = Annotated[float, within(-LARGEST)]
Count = Annotated[int, within(1)]
_LINE = re.compile(f"[^{CONTROL}\\n\\t]*")
_NAME = r"[\w.+ /@=:,()-]{1,200}"
Text = Annotated[str, Rule(loose=True, signs=re.compile(f"[^{CONTROL}]*"), says="a text without control characters")]
"""Prose, of any number of lines."""
_NAMED = "a name: 1 to 200 letters, digits, spaces and . + / @ = : , ( ) _ -"
Name = Annotated[str, Rule(loose=True, signs=re.compile(_NAME), says=_NAMED)]
"""What something is called, where a person reads it."""
Line = Annotated[str, Rule(loose=True)]
"""A text of one line; a number or a date stands for its text."""
Seconds = Annotated[float, Rule(unit="seconds")]
Bytes = Annotated[float, Rule(unit="bytes")]
Bandwidth = Annotated[float, Rule(unit="bytes/s")]
FlopRate = Annotated[float, Rule(unit="FLOP/s")]
Watts = Annotated[float, Rule(unit="watts")]
HourlyPrice = Annotated[float, Rule(unit="USD/h")]
TrafficPrice = Annotated[float, Rule(unit="USD/byte")]

_SYMBOLS = {"bytes": "B", "bytes/s": "B/s", "seconds": "s", "watts": "W", "USD/byte": "USD/B", "tokens": ""}


@functools.cache
def fields_of(cls: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Types of the fields of a dataclass by name, in their order; defaults of those that have one."""
    hints, none, defaults = typing.get_type_hints(cls, include_extras=True), dataclasses.MISSING, {}
    for field in dataclasses.fields(cls):
        if field.default is not none or field.default_factory is not none:
            defaults[field.name] = field.default if field.default_factory is none else field.default_factory()
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}, defaults


def quantities_of(cls: Any) -> tuple[str, ...]:
    """Fields of a dataclass that are quantities."""
    return tuple(key for key, kind in fields_of(cls)[0].items() if _parts(kind)[1].unit)


def mapping(data: object, where: str) -> Mapping[str, Any]:
    """The data, if it is a mapping. Raises PlannerError."""
    if not isinstance(data, Mapping):
        raise PlannerError(f"{where}: expected a mapping of keys to values, found {library.kind_of(data)}")
    return data


def check_keys(
    data: object, known: Collection[str], where: str, *, required: Iterable[str] = (), hint: str = ""
) -> Mapping[str, Any]:
    """The mapping, if it has no unknown key and every required one; ``hint`` ends the sentence on missing ones."""
    found = mapping(data, where)
    for key in found:
        if key not in known:
            text = key if isinstance(key, str) else shown(key)
            if text in library.WRITTEN:
                raise PlannerError(library.other_kind(text, where))
            near = f"; nearest: {nearest_first(text, known)[0]}" if known else "; there is none here"
            raise PlannerError(f"{where}: unknown key {shown(text)}{near}")
    missing = [repr(key) for key in required if key not in found]
    if missing:
        raise PlannerError(f"{where}: missing key{'s' if len(missing) > 1 else ''} {', '.join(missing)}{hint}")
    return found


def read(cls: type[T], data: object, where: str, *, hint: str = "") -> T:
    """An instance of a dataclass from a mapping. Raises PlannerError with place, key, value and what would be right."""
    make: Any = cls
    kinds, defaults = fields_of(make)
    found = check_keys(data, kinds, where, required=[key for key in kinds if key not in defaults], hint=hint)
    values = {key: value_of(kind, found[key], where, key) for key, kind in kinds.items() if key in found}
    try:
        return make(**values)
    except PlannerError as error:
        raise PlannerError(f"{where}: {error}") from error


def check(instance: Any, where: str = "") -> None:
    """The values of a dataclass that hold no quantities, as its constructor was given them. Raises PlannerError."""
    for key, kind in fields_of(instance.__class__)[0].items():
        value_of(kind, getattr(instance, key), where, key)


def value_of(kind: Any, value: Any, where: str, key: str) -> Any:
    """One value as the type of its field. Raises PlannerError."""
    kind, rule, optional, scalar = _parts(kind)
    if kind is Any or (optional and value is None):
        return value
    if scalar and _fits(kind, rule, value):
        return kind(value) if kind is str or (kind is float and not rule.kept) else value
    place = ": ".join(part for part in (where, key) if part)
    if scalar:
        nothing = ", or null" if optional else ""
        raise PlannerError(f"{place} is {shown(value)}; it must be {_expected(kind, rule, value)}{nothing}")
    if rule.reader:
        return rule.reader(value, place)
    if rule.unit:
        return units.parse(value, rule.unit, what=place)
    if rule.group is not None:
        found = check_keys(value, rule.group, place)
        return {name: value_of(rule.group[name], one, place, name) for name, one in found.items()}
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (tuple, list, frozenset):
        return _sequence(origin, inner, value, where, key)
    if origin in (dict, Mapping):
        needed = rule.choices if rule.required else ()
        found = check_keys(value, rule.choices or mapping(value, place), place, required=needed)
        for name in () if rule.choices else found:
            value_of(Line, name, where, f"a key of {key}")
        return {str(name): value_of(inner[1], found[name], where, f"{key} {name}") for name in needed or found}
    if isinstance(value, kind):
        return value
    return kind.from_dict(value, where=place) if hasattr(kind, "from_dict") else read(kind, value, place)


def plain_fields(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain data, without those that are as their default: for a ``to_dict``."""
    kinds, defaults = fields_of(instance.__class__)
    values = {key: getattr(instance, key) for key in kinds}
    return {key: plain(one, kinds[key]) for key, one in values.items() if key not in defaults or one != defaults[key]}


def plain(value: Any, kind: Any = Any) -> Any:
    """Plain data that ``read`` takes back: of a dataclass every field, or what its ``to_dict`` writes."""
    kind, rule, *_ = _parts(kind)
    inner = (*typing.get_args(kind), Any, Any)
    if rule.unit and value is not None:
        return f"{value!r} {_SYMBOLS.get(rule.unit, rule.unit)}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return {key: plain(getattr(value, key), own) for key, own in fields_of(value.__class__)[0].items()}
    if isinstance(value, Mapping):
        return {key: plain(one, inner[1]) for key, one in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        return [plain(one, inner[0]) for one in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


_KNOWN: dict[int, tuple[Any, tuple[Any, Rule, bool, bool]]] = {}


def _parts(kind: Any) -> tuple[Any, Rule, bool, bool]:
    """Type, rule, whether null is allowed, and whether it is a plain scalar; by identity, as hashing types takes long."""
    if id(kind) in _KNOWN:
        return _KNOWN[id(kind)][1]
    optional = typing.get_origin(kind) in (typing.Union, types.UnionType)
    inner = next(one for one in typing.get_args(kind) if one is not type(None)) if optional else kind
    annotated = typing.get_origin(inner) is Annotated
    bare, rule = (inner.__origin__, inner.__metadata__[0]) if annotated else (inner, Rule())
    scalar = bare in (bool, int, float, str) and not rule.unit and rule.reader is None
    _KNOWN[id(kind)] = kind, (bare, rule, optional, scalar)
    return bare, rule, optional, scalar


def _sequence(origin: Any, inner: tuple[Any, ...], value: Any, where: str, key: str) -> Any:
    """A list as a tuple, list or frozenset; a wrong scalar in it shows the whole list."""
    element, rule, _, scalar = _parts(inner[0])
    pair = origin is tuple and inner[-1] is not Ellipsis
    kinds = inner if pair else inner[:1] * (len(value) if isinstance(value, (list, tuple, frozenset)) else 0)
    wrong = not isinstance(value, (list, tuple, frozenset)) or len(kinds) != len(value)
    if wrong or (scalar and not all(_fits(element, rule, one) for one in value)):
        many = ", ".join(rule.choices) or rule.says or (f"{len(inner)} values" if pair else "values")
        each = f", each {_expected(element, rule)}" if scalar and not (rule.choices or rule.says) else ""
        raise PlannerError(f"{where}: {key} is {shown(value)}; it must be a list of {many}{each}")
    places = [key if scalar else f"{key} {number}" for number in range(1, len(value) + 1)]
    return origin(value_of(one, item, where, at) for one, item, at in zip(kinds, value, places, strict=True))


def _fits(kind: Any, rule: Rule, value: Any) -> bool:
    """Whether a scalar has its type and keeps its rule."""
    if kind is bool:
        return isinstance(value, bool)
    if kind is str:
        loose = rule.loose and not isinstance(value, (Mapping, list, tuple, bool, bytes, set, type(None)))
        if not isinstance(value, str) and not loose:
            return False
        return value in rule.choices if rule.choices else (rule.signs or _LINE).fullmatch(str(value)) is not None
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        return False
    return rule.least <= value <= rule.most and not (rule.above and value == rule.least)


def _expected(kind: Any, rule: Rule, value: Any = None) -> str:
    """What a scalar must be, for a message about a value."""
    if rule.says or rule.choices:
        return rule.says or f"one of {', '.join(rule.choices)}"
    if kind in (bool, str):
        return "true or false" if kind is bool else "a text of one line, without control characters"
    noun = "a whole number" if kind is int else "a number"
    most = f", and at most {rule.most:g}" if isinstance(value, (int, float)) and value > rule.most else ""
    if rule.above:
        return f"{noun} above {rule.least:g}{most}"
    if rule.most < LARGEST:
        return f"{noun} from {rule.least:.12g} to {rule.most:.12g}"
    return {0.0: f"{noun} that is not negative", -LARGEST: noun}.get(rule.least, f"{noun} from {rule.least:g}") + most
