"""What an RL framework does in a step, as data of its version: profiles/rl/<name>.yaml.

A file names the framework, its newest and oldest known version, and one list per fact, oldest first, each entry with the version
that it holds from (``since``), the value and its source, as files of engines do. Facts of its configuration (keys of exports, of
logs) stand under ``keys`` and belong to the front ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError, UnknownNameError, shown
from planner.rl.rl_layout import MODES, SYNC_METHODS
from planner.schema import Name, Seconds, Text, check_keys, keys, one_of, read, within

Method = Annotated[str, one_of(*SYNC_METHODS)]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One value of a fact from a version on."""

    since: Name
    """First version it holds for."""
    value: Any
    """As the field of RlFramework of the fact's name takes it."""
    source: Text
    """File and version where it was read."""


@dataclass(frozen=True, kw_only=True)
class RlFramework:
    """One framework at one version."""

    name: Name
    version: Name
    note: Text = ""
    """What was assumed of an unknown version."""
    trainer: Name
    """Trainer of the library whose code runs updates and log-probs."""
    trainers: tuple[Name, ...] = ()
    """Other trainers that it can use."""
    engine: Name
    """Engine and version that generate."""
    engines: tuple[Name, ...] = ()
    """Other engines that it can use."""
    modes: tuple[Annotated[str, one_of(*MODES)], ...]
    """Placements that it has, the default first."""
    staleness: Annotated[int, within(0, 1000)] = 0
    """Most steps that generation may run ahead; 1000 = without a bound."""
    partial: bool = False
    """Weights are updated while answers are generated, where generation runs ahead."""
    sync: Annotated[dict[str, Method], keys(MODES, required=False)]
    """Default method of weight sync by mode."""
    methods: tuple[Method, ...] = ()
    """Methods that it has."""
    packs: bool = True
    """Sequences are packed up to the largest length; else each is padded to the longest of its microbatch."""
    offload: bool = True
    """Colocated: training states wait in host memory while it generates, and engines sleep while it trains."""
    recomputes_logprobs: bool = True
    """Log-probs of the policy are computed by the trainer before the update, and not taken from the engine."""
    cache_share: Annotated[float, within(0.05, 1.0)] = 0.6
    """Engine's share of memory by default where pools are colocated."""
    prepare_s: Seconds = 0.0
    """Host time of a step that no phase explains: data, rewards, logging."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fact -> where it was read, with the version it holds from."""

    @property
    def label(self) -> str:
        """name@version."""
        return f"{self.name}@{self.version}"


FACTS = tuple(one for one in RlFramework.__dataclass_fields__ if one not in ("name", "version", "note", "sources"))


def framework_names() -> list[str]:
    """Frameworks of the library."""
    return sorted(path.stem for path in (library.profiles_directory() / "rl").glob("*.yaml"))


def load_framework(text: str) -> RlFramework:
    """A framework by name, or name@version. Raises PlannerError."""
    name, _, version = text.strip().lower().partition("@")
    name = {"nemo": "nemo-rl", "nemorl": "nemo-rl", "primerl": "prime-rl"}.get(name.replace("_", "-"), name.replace("_", "-"))
    if name not in framework_names():
        raise UnknownNameError("framework", name, framework_names())
    return _load(name, version.strip().removeprefix("v"))


@cache
def _load(name: str, version: str) -> RlFramework:
    path = library.profiles_directory() / "rl" / f"{name}.yaml"
    data = check_keys(library.read_yaml(path), ("name", "title", "newest", "oldest", "facts", "keys"), path.name)
    facts = check_keys(data["facts"], FACTS, f"{path.name}: facts")
    newest, oldest = str(data["newest"]), str(data["oldest"])
    asked, note = _numbers(version or newest), ""
    if not asked:
        raise PlannerError(f"framework version {shown(version)} has no number; write {name}@{newest}")
    if asked > _numbers(newest):
        note = f"{name} {version} is not known; its facts are those of {newest}"
    elif asked < _numbers(oldest):
        note = f"{name} {version} is not known; its facts are those of {oldest}"
        asked = _numbers(oldest)
    values, sources = dict[str, Any](), dict[str, str]()
    for fact, entries in facts.items():
        where = f"{path.name}: {fact}"
        known = [one for one in (read(Entry, entry, where) for entry in entries) if _numbers(str(one.since)) <= asked]
        if known:
            values[fact], sources[fact] = known[-1].value, f"since {known[-1].since}: {known[-1].source}"
    whole = {"name": name, "version": version or newest, "note": note, "sources": sources, **values}
    return read(RlFramework, whole, path.name)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.search(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
