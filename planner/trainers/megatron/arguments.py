"""How arguments of Megatron-LM are written: a script, a YAML mapping, or the dump in a training log."""

import ast
import re
import shlex
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.values import MOST, whole_number

DUMPED = re.compile(r"^(?:.*?:)?\s*(\w+) \.{2,} (.*?)\s*$")
"""A line of _print_args: two spaces, the name, dots, the value; logs may put a rank before it."""
RENAMED = {
    "fp8_format": "fp8", "fp4_format": "fp4", "norm_epsilon": "layernorm_epsilon", "num_moe_experts": "num_experts",
}  # fmt: skip
"""Flags whose name in the dump differs."""
LISTS = ("recompute_modules", "cp_comm_type")
"""Flags that take several values."""


class Arguments(dict[str, Any]):
    """Name of an argument, without dashes -> True, False, None, a text or a list of texts."""

    where: str
    """The file."""
    dumped: bool = False
    """They come from a dump, which holds all of them."""

    def spelled(self, name: str) -> str:
        """An argument as the file writes it."""
        return name if self.dumped else "--" + name.replace("_", "-")

    def number(self, name: str, default: int = 0, *, least: int = 0, most: int = MOST) -> int:
        """A whole number, or the default where it is 0 or not given. Raises PlannerError with the name."""
        value = self.get(name)
        if value is None:
            return default
        text = str(value)
        given = int(text) if re.fullmatch(r"-?\d{1,15}", text) else value
        return whole_number(given, f"{self.where}: {self.spelled(name)}", least=least, most=most) or default


def read_arguments(text: str, where: str) -> Arguments:
    """The arguments in a text. Raises PlannerError."""
    found = Arguments()
    found.where = where
    if "--" not in text or re.search(r"^\s*(?:.*?:)?\s*\w+ \.{4,} ", text, re.M):
        lines = [DUMPED.match(line) for line in text.splitlines()]
        found.update({one.group(1): _literal(one.group(2)) for one in lines if one})
        found.dumped = bool(found)
    if not found:
        mapping = re.search(r"^\s*MODEL_ARGS:|^\s*['\"]?--[\w-]+['\"]?:", text, re.M)
        words = _words_of_mapping(text, where) if mapping else _words(text, where)
        found.update(_from_words(words, where))
    return found


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


def _words_of_mapping(text: str, where: str) -> list[str]:
    """The same of a mapping in YAML."""
    data = library.parse_yaml(text, where)
    data = data.get("MODEL_ARGS", data)
    if not isinstance(data, dict):
        raise PlannerError(f"{where}: expected a mapping of arguments, found {type(data).__name__}")
    given = {f"--{str(key).lstrip('-')}": value for key, value in data.items() if value is not False and value is not None}
    return [word for key, value in given.items() for word in (key, *([] if value is True else str(value).split()))]


def _from_words(words: list[str], where: str) -> dict[str, Any]:
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
    return {
        RENAMED.get(name, name): (values if len(values) > 1 or name in LISTS else values[0]) if values else True
        for name, values in found.items()
    }
