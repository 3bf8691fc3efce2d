"""Text from a plan in the languages that exports are written in: one function per language, and the templates of scripts.

A name of a model may hold any sign. What a function here returns is a literal, a word or a comment, whatever stands in it.
"""

import json
import math
import re
import shlex
from collections.abc import Iterable
from importlib import resources
from operator import attrgetter
from typing import Any

import yaml


def _template(trainer: str, file: str) -> str:
    return resources.files(f"planner.trainers.{trainer}").joinpath(file).read_text(encoding="utf-8")


def filled(trainer: str, file: str, **texts: str) -> str:
    """A template in a trainer's folder with its @NAME@ marks filled in."""
    text = _template(trainer, file)
    return re.sub(r"@([A-Z]+)@", lambda mark: texts[mark[1].lower()], text) if texts else text


def filled_yaml(job: Any, trainer: str, file: str, **values: Any) -> Any:
    """The data in a YAML template: @layout.tp@ is that field of the job, @NAME@ a value that is given.

    An Expression is put in as it is, for a part of a text.
    """

    def value(mark: re.Match[str]) -> str:
        found = values[mark[1].lower()] if mark[1].isupper() else attrgetter(mark[1])(job)
        if isinstance(found, Expression):
            return str(found)
        return yaml.safe_dump([found], default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1]

    return yaml.safe_load(re.sub(r"@([A-Z_]+|[a-z_.]+)@", value, _template(trainer, file)))


def shell_word(text: str) -> str:
    """One word of bash in which nothing is expanded."""
    return shlex.quote(text)


def shell_command(words: Iterable[str]) -> str:
    """Words as one command of bash over several lines; ``$NAME`` and ``${NAME[@]}`` stay expansions."""
    lines: list[str] = []
    for word in (re.sub(r'[\\"`]', r"\\\g<0>", one) for one in words):
        text = word if re.fullmatch(r"[\w./:=,+@%-]+", word) else f'"{word}"'
        if lines and lines[-1].startswith("-") and " " not in lines[-1] and not word.startswith("-"):
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return " \\\n    ".join(lines)


def shell_message(text: str) -> str:
    """A sentence that can stand between double quotes and braces of bash."""
    return re.sub(r'["$`\\{}]', "", text)


def comment(text: str) -> str:
    """Text for a comment or a docstring: on one line, and without what ends a docstring."""
    return " ".join(text.split()).replace('"""', "'''").replace("\\", "/")


def python_fields(fields: dict[str, Any], indent: int) -> str:
    """Lines ``name=value,`` of a call in Python; an Expression is written as it is."""
    return "".join(f"{' ' * indent}{name}={value!r},\n" for name, value in fields.items())


class Expression(str):
    """Text that is written as it is: its repr is the text."""

    __slots__ = ()
    __repr__ = str.__str__


def json_text(data: Any, indent: int = 2) -> str:
    """A JSON file."""
    return json.dumps(data, indent=indent) + "\n"


def hydra_value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)


class _Blocks(yaml.SafeDumper):
    """Texts of several lines as blocks; nothing is written as a reference to something above."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _text)


def yaml_blocks(data: dict[str, Any]) -> str:
    """A YAML file that holds other files as texts; library.dump_yaml writes all others."""
    return str(yaml.dump(data, Dumper=_Blocks, sort_keys=False, allow_unicode=True, width=140))
