"""Published configurations of torchtune by release: one name is another configuration in each of them."""

import re
from collections.abc import Container, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, nearest_first, shown
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.versions import pinned

RELEASES = ("0.1", "0.2", "0.3.0", "0.3.1", "0.4", "0.5", "0.6", "main")
"""Oldest first; main is what the published configurations are of."""
SETTING = "torchtune"
"""What a user says the release with."""
Version = tuple[int, ...]


def known() -> Mapping[str, dict[str, Any]]:
    """The published configurations by name."""
    data: Mapping[str, dict[str, Any]] = library.read_yaml(Path(__file__).with_name("configs.yaml"))
    return data


def as_released(path: Path, name: str, said: Given, over: Container[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(A published configuration as the release has it that is said or pinned, notes about it); asked where releases differ in more
    than ``over``, the keys that a command gives, and nothing shows which it is. Raises PlannerError."""
    data, asked = known()[name], said.setting(SETTING)
    if asked is not None:
        release = _release_of(asked)
        return _with(data, _differs(name, release)), (f"configuration {name} as torchtune {release} has it, as is said",)
    low, high = pinned(path, "torchtune") or ((), ())
    first = RELEASES.index(_of((*low, 0, 0)[:3])) if low else 0
    possible = RELEASES[first : RELEASES.index(_of((*high, 0, 0)[:3])) + 1 if high else None] or RELEASES  # bounds may contradict
    other = {one: {key: value for key, value in _differs(name, one).items() if key not in over and key not in said.settings}
             for one in possible}  # fmt: skip
    newest = possible[-1]
    if all(one == other[newest] for one in other.values()):
        notes = (f"configuration {name} as torchtune {newest} has it: {_text(data, other[newest])}",) if other[newest] else ()
        return _with(data, other[newest]), notes
    last = [one for one, after in pairwise(possible) if other[one] != other[after]]
    differs = _text(data, other[last[-1]])
    about = f"torchtune's release, which nothing pins to one: up to {last[-1]} configuration {shown(name)} has {differs}"
    if all(one.name != SETTING for one in said.questions):
        said.questions.append(Question(name=SETTING, about=about, choices=(*last, newest)))
    return data, ()


OTHER_STEPS = ("teacher_model", "policy_model", "quantizer", "grpo_samples", "ppo_epochs")


def alike(name: str, recipe: str) -> list[str]:
    """Published configurations that one of another name may be like, the nearest first: of fine-tuning, as its recipe trains."""
    adapters = "lora_" in recipe
    fit = [one for one, data in known().items() if not one.startswith("dev/") and not any(step in data for step in OTHER_STEPS)
           and ("lora_" in str(data["model"]["_component_"])) == adapters] if recipe else list(known())  # fmt: skip
    family, _, last = name.rpartition("/")
    same = [one for one in fit if one.endswith(f"/{last}")] if not any(one.startswith(f"{family}/") for one in fit) else []
    return nearest_first(name, same or fit)


def ask_for_one(path: Path, said: Given) -> None:
    """Asks for the release, where nothing pins one, beside a configuration that is asked for and may be a published one."""
    if said.setting(SETTING) is None and pinned(path, "torchtune") is None:
        about = "release of torchtune, by which published configurations differ"
        said.questions.append(Question(name=SETTING, about=about, choices=("0.2", "0.3.1", "main")))


def _differs(name: str, release: str) -> dict[str, Any]:
    """What a release says otherwise than today; None = not said."""
    older: Mapping[str, Any] = library.read_yaml(Path(__file__).with_name("older_configs.yaml")).get(name, {})
    found: dict[str, Any] = next((older[one] for one in RELEASES[RELEASES.index(release) :] if one in older), {})
    return found


def _with(data: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the keys replaced that are given by their names with dots."""
    found = {one: dict(value) if isinstance(value, dict) else value for one, value in data.items()}
    for name, value in other.items():
        section, _, key = name.rpartition(".")
        part = found.setdefault(section, {}) if section else found
        part.pop(key, None)
        if value is not None:
            part[key] = value
    return found


def _text(data: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What is said otherwise, in a sentence: a=1 instead of 2."""
    def today(name: str) -> Any:
        section, _, key = name.rpartition(".")
        return (data.get(section, {}) if section else data).get(key)

    return ", ".join(f"{name}={_short(value)} instead of {_short(today(name))}" for name, value in other.items())


def _short(value: Any) -> str:
    return "none" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value).rpartition(".")[2]


def _release_of(text: str) -> str:
    """The release that a user means. Raises PlannerError."""
    word = text.strip().lower()
    if word in ("main", "nightly", "latest", "today"):
        return "main"
    found = re.fullmatch(r"v?(\d+(?:\.\d+){1,2})\S*", word)
    if found is None:
        raise PlannerError(f"--set {SETTING}={shown(text)}: a release of torchtune is one of {', '.join(RELEASES)}")
    return _of(tuple(map(int, found[1].split("."))))


def _of(version: Version) -> str:
    """The release that has a version: of one without a patch the last patch."""
    numbers = [tuple(map(int, one.split("."))) for one in RELEASES[:-1]]
    fits = [one for one, number in zip(RELEASES, numbers, strict=False) if number[: len(version)] <= version]
    return "main" if version[:2] > numbers[-1] else fits[-1] if fits else RELEASES[0]
