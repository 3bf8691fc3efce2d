"""The preset that a configuration means by a repository's name, or by a copy of it that somebody else uploaded."""

import re
from pathlib import Path

from planner import library
from planner.model import ModelSpec, load_model
from planner.model_names import preset_of


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
