"""Presets by the names that people know them by: aliases, and repositories of the Hugging Face hub."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from planner import library

_REPOSITORY = re.compile(r"^source:.*?Hugging Face ([\w.-]+/[\w.-]+)", re.MULTILINE)
_TUNED = "base|instruct|chat|it"
_VARIANT = re.compile(rf"-({_TUNED}|hf|pt)$")
"""Endings of the variants of one architecture: base, tuned, converted. Versions and dates stay: sizes may differ."""
_COPIED = (
    rf"{_TUNED}|hf|pt|bf16|fp16|fp8|unsloth|bnb|[48]bit|int[48]|gptq|awq|gguf|mxfp4|nvfp4|dynamic|2507|think(ing)?"
    r"|fp4(-v\d)?|w4a16|w8a8|mcore|quantized|kv|block|static|pertensor|terminus|deduped"
)
_UPLOADED = re.compile(rf"[-_.]({_COPIED})$")
"""The same in names of copies that somebody else uploaded, quantised ones among them."""
_DATED = re.compile(rf"[-_.]({_COPIED}|exp|preview|v0\.\d|2[3-6](0[1-9]|1[0-2])|0528|0324)$")
"""The same with versions and months, of which sizes rarely differ: near enough for a row of somebody's run."""
_INNER = re.compile(rf"-({_TUNED})\b")
_MAKER = re.compile(r"^(meta|nvidia)-")
FORMATS = (
    (r"nvfp4|\bfp4", "nvfp4"), (r"mxfp4", "mxfp4"), (r"fp8", "fp8"), (r"int4|w4a16|awq|gptq|uint4|4bit", "int4"),
    (r"int8|w8a8|8bit", "int8"),
)  # fmt: skip
"""What names of copies, and of formats in files, mean; the first that matches."""
HUB_ADDRESS = re.compile(r"^(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?$")
"""The address of a page of the hub, with the repository in it."""
_BLOCKS = re.compile(r"(qwen|zai-org|deepseek-ai|minimaxai)/.*-fp8$", re.IGNORECASE)

READ_AS = " read as llama by its keys"
"""What stands behind the model_type in the source of a model whose family is not known."""


def unknown_family(source: str) -> str:
    """'model_type X' of the source of such a model; '' = its family is known."""
    kind, read_as, _ = source.partition(READ_AS)
    return kind if read_as else ""


@cache
def aliases() -> dict[str, str]:
    """Other names of presets: alias -> preset. Read once: an import asks for several spellings of a name."""
    data = library.read_yaml(library.profiles_directory() / "model_aliases.yaml")
    return {str(alias): str(preset) for alias, preset in data.items()}


def preset_named(name: str) -> str | None:
    """The preset that is called so, has this alias, or was read from this repository or a variant of it; None = none.

    Case does not matter. A repository that is not known is None, whatever it is called: its config.json says what it is.
    """
    asked = name.lower()
    known = aliases()
    if "/" in asked:
        return known.get(asked) or repositories().get(_base(asked))
    return asked if library.is_file(_file(asked)) else known.get(asked)


def preset_called(name: str) -> str | None:
    """The same for a name that a user types, whose owner may be missing: llama-3.3-70b-instruct is tuned llama-3.3-70b."""
    bare = [] if "/" in name else _cut(_MAKER.sub("", name.lower()), _VARIANT)
    return next((preset for one in (name, *bare) if (preset := preset_named(one))), None)


def _file(preset: str) -> Path:
    return library.profiles_directory() / "models" / f"{preset}.yaml"


def _base(repository: str) -> str:
    """The repository without what variants of one model add: meta-llama/Meta-Llama-3.1-8B-Instruct and Llama-3.1-8B."""
    owner, _, name = repository.lower().partition("/")
    return f"{owner}/{_cut(name.removeprefix('meta-'), _VARIANT)[-1]}"


def spellings(name: str, endings: re.Pattern[str] = _UPLOADED) -> list[str]:
    """A name without its owner, in small letters, and what is left of it when endings of uploads are cut off one by one; each also
    without what its maker puts before it, and without what says in the middle that it was tuned."""
    shorter = _cut(name.rpartition("/")[2].lower().replace("_", "-"), endings)
    return [one for ending in shorter for one in (ending, _MAKER.sub("", ending), _INNER.sub("", _MAKER.sub("", ending)))]


def preset_of(name: str) -> str | None:
    """The preset whose name, alias or repository this is, whoever uploaded it, once the endings of variants are cut off."""
    cached = re.search(r"models--[\w.-]+--([\w.-]+?)/snapshots/", name)  # as the hub's cache lays them
    asked = spellings((cached[1] if cached else name.strip("/")).replace("___", "."))  # as the cache of ModelScope writes a point
    return next((preset for one in asked if one and (preset := preset_named(one) or _known().get(one)) is not None), None)


def preset_like(name: str) -> str | None:
    """The same, and where there is none the preset that has this name but for versions and months: near enough for a row of
    somebody's run. Aliases are no such names: what mistral-small is depends on the month."""
    return preset_of(name) or _undated().get(spellings(name, _DATED)[-1])


@cache
def _known() -> dict[str, str]:
    """Presets by the names of repositories without their owner, and by aliases, without any ending."""
    found: dict[str, str] = {}
    for name, preset in {**repositories(), **aliases()}.items():
        bare = spellings(name)[-3:]
        for one in (bare[0], bare[2]):
            found.setdefault(one, preset)
    return found


@cache
def _undated() -> dict[str, str]:
    """Presets by their names and those of repositories, without versions and months; of two that share one the preset so called."""
    others = repositories() | {name: preset for name, preset in aliases().items() if "/" in name}
    found = {spellings(name, _DATED)[-1]: preset for name, preset in others.items()}
    return found | {spellings(name, _DATED)[-1]: name for name in library.names("models")}


def format_named(name: str) -> str:
    """The format of weights that the name of a copy says, as ``FORMATS`` calls it; '' where it says none."""
    bare = name.rpartition("/")[2]
    return next((kind for pattern, kind in FORMATS if re.search(pattern, bare, re.IGNORECASE)), "")


def scales_blocks(name: str) -> bool:
    """Whether a copy in fp8 has scales of blocks of 128 x 128: those by the makers of models that do."""
    return _BLOCKS.fullmatch(name) is not None


def quantised_as(name: str) -> str:
    """The format that the name of a copy says, in the words of ``ModelSpec.quantised``; '' where it says none."""
    found = format_named(name)
    words = {"int4": "4 bits", "int8": "8 bits", "fp8": "fp8" if scales_blocks(name) else "fp8 per tensor"}.get(found, found)
    return f"{words}, as {name} is called" if words else ""


def _cut(name: str, endings: re.Pattern[str]) -> list[str]:
    """The name, and what is left of it after each ending."""
    found = [name]
    while (shorter := endings.sub("", found[-1])) not in ("", found[-1]):
        found.append(shorter)
    return found


@cache
def repositories() -> dict[str, str]:
    """Preset by the repository that its source names, in small letters and without what variants add; the files are searched, not
    read, which takes 3 ms."""
    found: dict[str, str] = {}
    for path in sorted((library.profiles_directory() / "models").glob("*.yaml")):
        for repository in _REPOSITORY.findall(path.read_text(encoding="utf-8")):
            found.setdefault(_base(repository), path.stem)
    return found


def named(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of some patterns is this name; '*' stands for anything."""
    return any(one == name or ("*" in one and fnmatchcase(name, one)) for one in patterns)
