"""How arguments of Megatron-LM are written: a script, a YAML mapping, or the dump in a training log."""

import ast
import re
import shlex
from typing import Any

import yaml

from planner.errors import PlannerError
from planner.trainers.reading.values import whole_number

Arguments = dict[str, Any]
"""Name of an argument, without dashes -> True, False, None, a text or a list of texts."""

DUMPED = re.compile(r"^(?:.*?:)?\s*(\w+) \.{2,} (.*?)\s*$")
"""A line of _print_args: two spaces, the name, dots, the value; logs may put a rank before it."""
RENAMED = {
    "fp8_format": "fp8", "fp4_format": "fp4", "norm_epsilon": "layernorm_epsilon", "num_moe_experts": "num_experts",
}  # fmt: skip
"""Flags whose name in the dump differs."""


def read_arguments(text: str, where: str) -> tuple[Arguments, bool]:
    """Arguments by name, and whether they come from a dump, which holds all of them."""
    if "--" not in text or re.search(r"^\s*(?:.*?:)?\s*\w+ \.{4,} ", text, re.M):
        lines = [DUMPED.match(line) for line in text.splitlines()]
        dumped = {one.group(1): _literal(one.group(2)) for one in lines if one}
        if dumped:
            return dumped, True
    if re.search(r"^\s*MODEL_ARGS:|^\s*['\"]?--[\w-]+['\"]?:", text, re.M):
        return _from_yaml(text, where), False
    return _from_words(_words(text, where), where), False


def _literal(text: str) -> Any:
    """A value as Python printed it; texts stay texts."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text.startswith("["):
        try:
            return [str(one) for one in ast.literal_eval(text)]
        except (ValueError, SyntaxError):
            return text
    return text.removeprefix("torch.")


def _words(text: str, where: str) -> list[str]:
    """Words of a command line or a shell script; of several arrays the one called ARGUMENTS."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlannerError(f"{where}: not a list of arguments ({error})") from error
    if "ARGUMENTS=(" in words:
        words = words[words.index("ARGUMENTS=(") + 1 :]
        words = words[: words.index(")")] if ")" in words else words
    return [word for word in words if word not in ("(", ")") and not re.fullmatch(r"\w+=\(", word)]


def _from_words(words: list[str], where: str) -> Arguments:
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if value else []
        elif name:
            found[name].append(word)
    if not found:
        raise PlannerError(f"{where}: no argument that starts with -- was found")
    return {RENAMED.get(name, name): _value(name, values) for name, values in found.items()}


def _value(name: str, values: list[str]) -> Any:
    if not values:
        return True
    many = name in ("recompute_modules", "cp_comm_type") or len(values) > 1
    return values if many else values[0]


def _from_yaml(text: str, where: str) -> Arguments:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlannerError(f"{where}: not YAML ({str(error).splitlines()[0]})") from error
    data = data.get("MODEL_ARGS", data) if isinstance(data, dict) else data
    if not isinstance(data, dict):
        raise PlannerError(f"{where}: expected a mapping of arguments, found {type(data).__name__}")
    words = []
    for key, value in data.items():
        if value is False or value is None:
            continue
        words += [f"--{str(key).lstrip('-').replace('_', '-')}", *([] if value is True else str(value).split())]
    return _from_words(words, where)


def number(found: Arguments, name: str, where: str, default: int | None = None, least: int = 0) -> int | None:
    """A whole number, or the default where it is not given. Raises PlannerError with the name."""
    value = found.get(name)
    if value is None:
        return default
    text = str(value)
    return whole_number(int(text) if re.fullmatch(r"-?\d{1,15}", text) else value, f"{where}: {name}", least=least)


def sure(found: Arguments, name: str, where: str, default: int = 0, least: int = 0) -> int:
    """The same with 0 for what is not given."""
    return number(found, name, where, default, least) or default
