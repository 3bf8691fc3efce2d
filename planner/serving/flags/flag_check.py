"""Command lines and configurations held against the flags of an engine: unknown names, wrong types, values it does not know."""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from planner.errors import nearest_first
from planner.serving.flags.engine_sources import (
    Flag,
    Flags,
    Record,
    router_flags,
    sglang_flags,
    trtllm_flags,
    vllm_flags,
)

READERS: dict[str, tuple[str, Callable[[Path], Record]]] = {
    "vllm": ("vllm", vllm_flags), "sglang": ("sglang", sglang_flags), "trtllm": ("tensorrt_llm", trtllm_flags),
    "vllm-router": ("vllm_router", lambda root: router_flags(root, "vllm_router", "vllm-router")),
    "sglang-router": ("sglang_router", lambda root: router_flags(root, "sglang_router", "sglang-router")),
}  # fmt: skip
"""Package that is read, and how, by the name of its record."""
_NUMBER = {"int": r"[+-]?\d+", "float": r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf"}
_READABLE = r"[+-]?\d+(\.\d+)?[kmgtKMGT]?|auto"


@cache
def recorded(name: str) -> dict[str, Any]:
    """The record of a package: its version, where it was read, and its flags."""
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return data


def known_flags(name: str) -> tuple[Record, str]:
    """Flags of the package that is installed here, or as recorded; and which of both in words."""
    package, reader = READERS[name]
    record = recorded(name)
    said = f"{record['package']} {record['version']} as recorded"
    try:
        found = importlib.util.find_spec(package)
        places = list(found.submodule_search_locations or []) if found else []
        if places:
            read = reader(Path(places[0]).parent)
            return {
                part: {**record[part], **read[part]} for part in ("programs", "classes")
            }, f"the installed {record['package']}"
    except (OSError, SyntaxError, KeyError, IndexError, ValueError):
        said += ": the installed package has another form than expected"
    return {"programs": record["programs"], "classes": record["classes"]}, said


def wrong_words(record: Record, program: str, words: Sequence[str]) -> list[str]:
    """Sentences on the words behind a program that it would refuse. A value with a ``$`` is the shell's and is not looked at."""
    flags, classes, problems = record["programs"][program], record["classes"], []
    for word, values in _options(flags, words):
        name, _, inner = word.partition(".")
        flag = _resolved(flags, name)
        if flag is None:
            near = nearest_first(name, [one for one in flags if one.startswith("--")])[0]
            problems.append(f"{program} has no {name}; nearest: {near}")
        elif inner:
            problems += _wrong_key(flag, classes, f"{program}: {name}", inner)
        else:
            problems += _wrong_values(flag, classes, f"{program}: {name}", values)
    return problems


def wrong_keys(record: Record, program: str, data: Mapping[str, Any]) -> list[str]:
    """Sentences on the keys and values of a configuration file that the program would refuse."""
    return _wrong_mapping(record["programs"][program], record["classes"], program, data)


def _resolved(flags: Flags, name: str) -> Flag | None:
    flag = flags.get(name)
    return flags[flag["same"]] if flag and "same" in flag else flag


def _options(flags: Flags, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values: the words behind it, or what stands after its equals sign."""
    name, values = "", list[str]()
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            if name:
                yield name, values
            name, mark, value = word.partition("=")
            negated = name.replace("--no-", "--", 1)
            name = negated if name not in flags and name.startswith("--no-") and negated in flags else name
            values = [value] if mark else []
        elif name:
            values.append(word)
    if name:
        yield name, values


def _wrong_values(flag: Flag, classes: Mapping[str, Flags], where: str, values: Sequence[str]) -> list[str]:
    if flag["type"] == "flag":
        return []  # words behind it are the program's own: a model, a file
    if not values:
        return [f"{where} needs a value ({_expected(flag)})"]
    taken = values if flag["type"].endswith("+") else values[:1]
    return [one for value in taken if "$" not in value for one in _wrong_value(flag, classes, where, value)]


def _wrong_value(flag: Flag, classes: Mapping[str, Flags], where: str, value: str) -> list[str]:
    kind = flag["type"].rstrip("+")
    if kind == "json":
        try:
            data = json.loads(value)
        except ValueError:
            return [f"{where} {value}: it must be JSON"]
        return _wrong_record(flag, classes, where, data) if isinstance(data, dict) else []
    wanted = _READABLE if flag.get("readable") else _NUMBER.get(kind, ".*")
    if not re.fullmatch(wanted, value, re.DOTALL) or ("choices" in flag and value not in map(str, flag["choices"])):
        return [f"{where} {value}: it must be {_expected(flag)}"]
    return []


def _wrong_key(flag: Flag, classes: Mapping[str, Flags], where: str, key: str) -> list[str]:
    inner = {one for name in flag.get("keys", ()) for one in classes.get(name, {})}
    head = key.split(".")[0].replace("-", "_")
    return [f"{where}: no key {head}; nearest: {nearest_first(head, inner)[0]}"] if inner and head not in inner else []


def _wrong_record(flag: Flag, classes: Mapping[str, Flags], where: str, data: Mapping[str, Any]) -> list[str]:
    """What the class that takes most of the mapping refuses of it."""
    tried = [_wrong_mapping(classes[name], classes, where, data) for name in flag.get("keys", ()) if name in classes]
    return min(tried, key=len, default=[])


def _wrong_mapping(flags: Flags, classes: Mapping[str, Flags], where: str, data: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, value in data.items():
        flag = flags.get(key)
        if flag is None:
            problems.append(f"{where}: no key {key}; nearest: {nearest_first(str(key), flags)[0]}")
        elif value is not None:
            problems += _wrong_datum(flag, classes, f"{where}: {key}", value)
    return problems


def _wrong_datum(flag: Flag, classes: Mapping[str, Flags], where: str, value: Any) -> list[str]:
    kind = flag["type"].rstrip("+")
    if flag["type"].endswith("+") and isinstance(value, list):
        return [one for each in value for one in _wrong_datum({**flag, "type": kind}, classes, where, each)]
    inner = bool(flag.get("keys"))
    if inner and isinstance(value, Mapping):
        return _wrong_record(flag, classes, where, value)
    fits = {"flag": bool, "int": int, "float": (int, float), "str": str}.get(kind, object)
    right = isinstance(value, fits) and (kind == "flag" or not isinstance(value, bool) or fits is object)  # type: ignore[arg-type]
    if not right or inner or ("choices" in flag and value not in flag["choices"]):
        return [f"{where} is {value!r}; it must be {_expected(flag)}"]
    return []


def _expected(flag: Flag) -> str:
    if "choices" in flag:
        return f"one of {', '.join(map(str, flag['choices']))}"
    kind = flag["type"].rstrip("+")
    return {"int": "a whole number", "float": "a number", "json": "JSON", "flag": "true or false"}.get(kind, "a text")
