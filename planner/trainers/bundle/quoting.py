"""Text from a plan in the languages that exports are written in: one function per language, and the templates of scripts.

Names are checked where they are read, prose may hold any sign. What a function here returns is a literal, a word or a comment,
whatever stands in it.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml

from planner.errors import CONTROL
from planner.trainers.bundle.target import ExportJob, Rendered, Setting

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def template(trainer: str, file: str) -> str:
    """The text of a file in a trainer's folder, or in a package that is named in full."""
    package = trainer if trainer.startswith("planner.") else f"planner.trainers.{trainer}"
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def filled_yaml(job: ExportJob, trainer: str, file: str, **values: Any) -> dict[str, Any]:
    """The data in a YAML template of jinja2, which may name the facts of the job and ``values``; every value is written as
    YAML, an Expression as it is."""
    return yaml_from(trainer, file, {**job.facts, **values})


def yaml_from(trainer: str, file: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The data in a YAML template that names these facts and no others; {} of an empty one."""
    return yaml.load(_templates(_literal).get_template(f"{trainer}/{file}").render(facts), _LOADER) or {}


def filled_text(job: ExportJob, file: str, **values: Any) -> str:
    """A file of the bundle from a template of jinja2, in this folder or in that of a trainer."""
    return str(_templates(None).get_template(file if "/" in file else f"bundle/{file}").render({**job.facts, **values}))


def text_from(file: str, **facts: Any) -> str:
    """A file from a template of jinja2, ``package/name``, that names these facts and no others."""
    return str(_templates(None).get_template(file).render(facts))


def refused(job: ExportJob, trainer: str, **values: Any) -> list[str]:
    """The sentences of a trainer's refusals.yaml whose conditions hold; both name the facts of the job and ``values``."""
    return str(_refusals(trainer).render({**job.facts, **values})).split("\0")[:-1]


@cache
def _refusals(trainer: str) -> Any:
    rules = yaml.safe_load(template(trainer, "refusals.yaml"))
    return _templates(None).from_string("".join(f"{{% if {when} %}}{say}\0{{% endif %}}" for when, say in rules.items()))


@cache
def _templates(literal: Callable[[Any], Any] | None) -> Any:
    """The templates in the folders of the trainers; ``literal`` writes a value in the language of the file."""
    import jinja2  # only an export needs it

    loader = jinja2.FunctionLoader(lambda name: template(*name.split("/")))
    found = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, finalize=literal, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, comment_start_string="{%#", comment_end_string="#%}",  # bash has ${#name}
    )  # fmt: skip
    found.filters |= {one.__name__: one for one in (shell_message, comment, markdown, one_line)} | {"plain": Expression}
    return found


def _literal(value: Any) -> Any:
    if isinstance(value, Expression):
        return value
    if value is None or isinstance(value, int):
        return json.dumps(value)
    return yaml.dump([value], Dumper=_DUMPER, default_flow_style=True, sort_keys=False, width=2**30).strip()[1:-1]


def run_of(
    job: ExportJob,
    trainer: str,
    files: Mapping[str, str],
    more: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> Rendered:
    """The run that run.txt describes, with the files; it may name ``versions``, those of the folder, and ``values``.

    ``more``: fields of Rendered that depend on the plan.
    """
    versions = Expression(getattr(importlib.import_module(f"planner.trainers.{trainer}"), "VERSIONS", ""))
    data = filled_yaml(job, trainer, "run.txt", versions=versions, **values)
    for part in ("environment", "variables"):
        data[part] = {name: Setting(*pair) for name, pair in data.get(part, {}).items()}
    for part in ("entry", "smoke"):
        data[part] = tuple(data[part].split() if isinstance(data[part], str) else data[part])
    for part in ("prepare", "notes", "install"):
        data[part] = tuple(data.get(part, ()))
    return Rendered(files=files, **{**data, **more})


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
    return one_line(text).replace('"', "'").replace("\\", "/")


def one_line(text: str) -> str:
    """Text without breaks of lines and other control characters."""
    return " ".join(re.sub(f"[{CONTROL}]", " ", text).split())


def markdown(text: object) -> str:
    """Text for a line or a cell of Markdown: on one line, no HTML, links, pictures or code."""
    return re.sub(r"[\\`|\[\]]|<(?=[A-Za-z/!?])", r"\\\g<0>", one_line(str(text)))


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
