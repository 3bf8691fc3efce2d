"""The preset that a configuration means by a repository's name, or by a copy of it that somebody else uploaded."""

import re
from functools import cache
from pathlib import Path

from planner import library
from planner.model import ModelSpec, load_model
from planner.model_names import aliases, preset_named, repositories, spellings


def named_model(name: str, path: Path) -> tuple[ModelSpec | None, tuple[str, ...]]:
    """The model and what was taken for what; None where no preset has the name. Never asks the hub: that takes long to fail."""
    if not re.fullmatch(r"[\w.+/@=:,~ ${}-]{1,300}", name):
        return None, ()
    folder = path.parent / name
    local = next((one for one in (folder, Path(name)) if library.is_file(one / "config.json")), None)
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
    asked = spellings(cached[1] if cached else name.strip("/"))
    return next((preset for one in asked if one and (preset := preset_named(one) or _known().get(one)) is not None), None)


@cache
def _known() -> dict[str, str]:
    """Presets by the names of repositories without their owner, and by aliases, without any ending."""
    found: dict[str, str] = {}
    for name, preset in {**repositories(), **aliases()}.items():
        bare = spellings(name)[-3:]
        for one in (bare[0], bare[2]):
            found.setdefault(one, preset)
    return found
