"""The preset that a configuration means by a repository's name, or by a copy of it that somebody else uploaded."""

import re
from functools import cache
from pathlib import Path

from planner.model import ModelSpec, load_model
from planner.model_names import aliases, preset_named, repositories

_FORM = re.compile(
    r"[-_.](hf|base|instruct|chat|it|pt|bf16|fp16|fp8|unsloth|bnb|[48]bit|int[48]|gptq|awq|gguf|mxfp4|nvfp4|fp4|w4a16|w8a8|dynamic|2507|thinking)$"
)
"""Endings that change neither sizes nor layers: tuned, converted, quantised. Versions stay: their sizes may differ."""
_PART = re.compile(r"-(instruct|chat|base|it)\b")
"""The same in the middle of a name."""


def named_model(name: str, path: Path) -> tuple[ModelSpec | None, tuple[str, ...]]:
    """The model and what was taken for what; None where no preset has the name. Never asks the hub: that takes long to fail."""
    if not re.fullmatch(r"[\w.+/@=:,~ ${}-]{1,300}", name):
        return None, ()
    folder = path.parent / name
    local = next((one for one in (folder, Path(name)) if (one / "config.json").is_file()), None)
    if local is not None:
        return load_model(str(local / "config.json")), ()
    if (preset := preset_of(name)) is not None:
        called = name.rpartition("/")[2].lower()
        note = () if called in (preset, f"meta-{preset}") else (f"model {name}: the preset {preset}, by its name",)
        return load_model(preset), note
    return None, ()


def preset_of(name: str) -> str | None:
    """The preset whose name, alias or repository this is, whoever uploaded it, once the endings of variants are cut off."""
    cached = re.search(r"models--[\w.-]+--([\w.-]+?)/snapshots/", name)  # as the hub's cache lays them
    asked = (cached[1] if cached else name.strip("/").rpartition("/")[2]).lower().replace("_", "-")
    while asked and len(asked) <= 200:
        for one in (asked, asked.removeprefix("meta-"), _PART.sub("", asked)):
            if (preset := preset_named(one) or _known().get(one)) is not None:
                return preset
        shorter = _FORM.sub("", asked)
        if shorter == asked:
            return None
        asked = shorter
    return None


@cache
def _known() -> dict[str, str]:
    """Presets by the names of repositories without their owner, and by aliases."""
    found: dict[str, str] = {}
    for name, preset in {**repositories(), **aliases()}.items():
        tail = _cut(name.rpartition("/")[2].lower().replace("_", "-"))
        for one in (tail, _PART.sub("", tail)):
            found.setdefault(one, preset)
    return found


def _cut(name: str) -> str:
    while (shorter := _FORM.sub("", name)) != name:
        name = shorter
    return name
