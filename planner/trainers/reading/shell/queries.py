"""What jq and yq would read, one value of a JSON or YAML file by its dotted name, what seq counts and the GPUs of a job. Nothing is
executed."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.shell.arithmetic import arithmetic
from planner.trainers.reading.shell.text import CLOSE, is_open

_QUERY = re.compile(
    r"""\s*(?:cat\s+(\S+)\s*\|\s*)?(?:yq|jq)(?:\s+(?:-\w|--raw-output|eval|e))*\s+(['"]?)\.([\w.]+)\2(?:\s+([^\s|<>;&]+))?\s*"""
)
_ENTRIES = re.compile(
    r"""\s*yq\s+'[^']{0,200}\.(\w+)\s*\|\s*to_entries\b[^']{0,300}\.key \+ " " \+ \.value[^']{0,200}'\s+(\S+)\s*(?:\|\s*tr .*)?"""
)
"""A section of options as words of a command: what is false is left out, what is true has no value."""
_SOUGHT = r"(?:which|command\s+-v|type\s+-[pP]|hash\s+-t)\s+(['\"]?)([\w.-]{1,100})\1(?:\s+2>\s*(?:/dev/null|&1))?"
_WHERE = re.compile(
    rf"\s*{_SOUGHT}\s*(?:\|\s*head\s+-n?\s*1\s*)?(?:\|\|\s*(?:true|:|exit\s+\d+|echo(?:\s+\S+)?|{_SOUGHT.replace('1)', '3)')})\s*)?"
)
"""Where a program lies, whatever stands in its place where it is not found: its name stands for it."""
_SEQ = re.compile(r"\s*seq((?:\s+\S+){1,3})\s*")
_PRINTED = re.compile(r"""\s*python3?\s+-c\s+(['"])\s*print\(\s*(?:int\()?([^'"]{1,200}?)\)?\s*\)\s*;?\1\s*""")
"""What a line of Python calculates."""
_GETOPT = re.compile(r"""\s*(?:\S*/)?getopt\s.*\s--\s+(['"]?)\$[@*]\1\s*""", re.DOTALL)
"""Arguments of the script with their options first."""
_FOUND = re.compile(r"""\s*echo\s+(.+?)\s*\|\s*grep\s+-oP\s+(['"])\(\?<=(--[\w-]+[ =])\)\\d\+\2\s*""", re.DOTALL)
"""A number behind a word of a text."""
_CARDS = re.compile(
    r"""\s*(?:nvidia-smi\s+(?:-L|--list-gpus|--query-gpu=\S+\s+--format=csv,noheader)(?:\s+2>\s*/dev/null)?\s*\|\s*(?:wc\s+-l|grep\s+-c\s+\S+)"""
    r"""|python3?\s+-c\s+(['"])\s*import\s+torch;\s*print\(torch\.cuda\.device_count\(\)\)\s*\1)\s*"""
)
"""GPUs that a job sees."""
_WHOLE = re.compile(r"[\d\s*+()-]+(//[\d\s*+()-]+)*")
MOST_COUNTED = 64
"""Numbers of seq: more, and no loop over them is meant to be chosen from."""
_PRESET_FIELDS = {
    "hidden_size": "hidden_size", "intermediate_size": "ffn_size", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "vocab_size": "vocab_size",
    "max_position_embeddings": "max_sequence_length",
}  # fmt: skip
"""Keys of a config.json and the fields of a model that hold them."""


def queried(text: str, where: str, expand: Callable[[str], str]) -> str | None:
    """The value that a command asks of a file beside the script ``where``; None where it is another command, or not there.

    The config.json of a model that is known by its folder's name need not be there."""
    if (found := _WHERE.fullmatch(text)) is not None:
        return found[2]
    if (counted := _SEQ.fullmatch(text)) is not None:
        return _numbers([expand(one) for one in counted[1].split()])
    if _CARDS.fullmatch(text):  # as many as it asked for
        cards = expand("$SLURM_GPUS_ON_NODE")
        return cards if cards.isdecimal() else None
    if _GETOPT.fullmatch(text):
        given = expand("$*")
        return "--" if is_open(given) else f"{given} --".strip()
    if (sought := _FOUND.fullmatch(text)) is not None:
        number = re.search(rf"(?<!\S){re.escape(sought[3])}(\d+)", expand(sought[1]).strip('"'))
        return None if number is None else number[1]
    if (printed := _PRINTED.fullmatch(text)) is not None:
        inner = expand(printed[2])
        value = arithmetic(inner.replace("//", "/"), str) if _WHOLE.fullmatch(inner) else None
        return None if value is None else str(value)
    if (entries := _ENTRIES.fullmatch(text)) is not None:
        return _words(where, expand(entries[2]).rpartition(CLOSE)[2].lstrip("/").removesuffix(".tmp"), entries[1], expand)
    asked = _QUERY.fullmatch(text)
    if asked is None or not (asked[1] or asked[4]):
        return None
    path = expand(asked[1] or asked[4])
    if re.fullmatch("\ue000[^\ue000\ue001]+\ue001", path):  # which file it is, one variable says
        return path
    name = path.rpartition(CLOSE)[2].lstrip("/")
    value = _in_file(where, name, asked[3])
    return None if value is None or isinstance(value, dict | list) else {True: "true", False: "false"}.get(value, str(value))


def _words(where: str, name: str, section: str, expand: Callable[[str], str]) -> str | None:
    """The options of a section with the variables in them, as envsubst fills them in."""
    found = _in_file(where, name, section)
    if not isinstance(found, Mapping):
        return None
    plain = {key: "" if one is None else one for key, one in found.items()}
    values = {key: str(one).lower() if isinstance(one, bool) else expand(str(one)) for key, one in plain.items()}
    return " ".join(key if one == "true" else f"{key} {one}" for key, one in values.items() if one != "false")


def _numbers(words: list[str]) -> str | None:
    """What ``seq FIRST STEP LAST`` prints, on one line; None where a number is not known."""
    if not all(re.fullmatch(r"-?\d{1,9}", one) for one in words):
        return None
    first, step, last = {1: ("1", "1", *words), 2: (*words[:1], "1", *words[1:])}.get(len(words), tuple(words))
    numbers = range(int(first), int(last) + (1 if int(step) > 0 else -1), int(step)) if int(step) else ()
    return " ".join(map(str, numbers)) if len(numbers) <= MOST_COUNTED else None


def _in_file(where: str, name: str, key: str) -> Any:
    from planner.model import load_model
    from planner.model_names import preset_of
    from planner.trainers.reading.settings import beside, file_settings

    file = beside(Path(where), name) if name else None
    if file is not None:
        try:
            value: Any = file_settings(file, "a file of settings")
        except PlannerError:
            return None
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        return value
    preset = preset_of(Path(name).parent.name) if name.endswith("/config.json") and key in _PRESET_FIELDS else None
    return getattr(load_model(preset), _PRESET_FIELDS[key]) if preset else None
