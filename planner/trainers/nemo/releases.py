"""Recipes of NeMo 2 by release."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from planner import library
from planner.trainers.megatron_bridge.recipe_releases import Releases


@cache
def recipes() -> Mapping[str, Mapping[str, Any]]:
    """Settings of the published recipes by name and kind."""
    data: Mapping[str, Mapping[str, Any]] = library.read_yaml(Path(__file__).with_name("recipes.yaml"))
    return data


@cache
def known_in(release: str) -> Mapping[str, Mapping[str, Any]]:
    """The same as a release has them."""
    older: Mapping[str, Any] = library.read_yaml(Path(__file__).with_name("older_recipes.yaml"))
    later = NEMO.names[NEMO.names.index(release) :]
    found = {name: dict(kinds) for name, kinds in recipes().items()}
    for name, kinds in older.items():
        for kind, releases in kinds.items():
            other: dict[str, Any] = next((releases[one] for one in later if one in releases), {})
            if other and kind in found.get(name, {}):
                found[name][kind] = {one: value for one, value in {**found[name][kind], **other}.items() if value is not None}
    return found


NEMO = Releases(
    library="NeMo", names=("2.0", "2.1", "2.2", "2.3", "2.4", "main"),
    containers=(("24.10", "2.0"), ("25.01", "2.1"), ("25.03", "2.2"), ("25.05", "2.3"), ("25.08", "2.4")),
    pinned=re.compile(
        r"nemo(?:[-_]toolkit)?(?:\.git)?(?:\[[\w,]*\])?\s*(?:==|~=|@|-b|branch|tag|version)\s*[rv]?(2\.\d(?:\.\d+)?)(?![\d.])",
        re.IGNORECASE,
    ),
    of_numbers=lambda major, minor, patch: f"{major}.{minor}", known_in=known_in, version_file="nemo/package_info.py",
)  # fmt: skip
