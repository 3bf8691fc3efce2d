"""What rows of serving runs leave unsaid about engines, devices and clients, from profiles/serving_methods.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.serving.runs.run_schema import ServingRow

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines with data of their own."""
_VERSION = re.compile(r"(?<![\w.])v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:rc|post|dev)\d+)*)")
_DAY = re.compile(r"20\d\d-\d\d(?:-\d\d)?")


@cache
def methods() -> dict[str, Any]:
    """The table."""
    return library.read_yaml(library.profiles_directory() / "serving_methods.yaml")


@cache
def _sources() -> tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]:
    return tuple((re.compile(one["match"], re.IGNORECASE), one) for one in methods()["sources"])


def method_of(row: ServingRow) -> dict[str, Any]:
    """What the method of a row's source says of all its rows; empty = nothing is known."""
    text = f"{row.about.get('id', '')} {row.about.get('title', '')}"
    return dict(next((one for pattern, one in _sources() if pattern.search(text)), {}))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Flags that a server was started with, where they are known."""

    cache: str = ""
    """Format of the cache."""
    max_tokens: int | None = None
    """Token budget of a step; None = the engine's default."""
    receive: int = 1
    """Steps between two looks for new requests."""
    receive_spread: int = 1
    """The same where attention data parallelism waits until every rank has a prompt."""


def launch_of(row: ServingRow, engine: str, model: str, hardware: HardwareProfile) -> Launch:
    """Flags of a row, and those that the method of its source gives an engine: the first line of its settings that fits."""
    weights, flight = str(row.get("precision.weights") or ""), row.get("load.value") or 0.0
    lengths = tuple(row.get(f"load.{side}") for side in ("isl", "osl"))
    for one in method_of(row).get("settings", ()):
        fits = one["engine"] == engine and model.startswith(one.get("model", "")) and one.get("weights", "") in weights
        if fits and hardware.arch.startswith(one.get("arch", "")) and lengths == tuple(one.get("lengths", lengths)):
            break
    else:
        one = {}
    tokens = one.get("max_tokens", 0)
    if "tokens_above" in one:  # on top of the prompt and a token of each sequence
        tokens = max(tokens, int(one["tokens_above"] + flight + (lengths[0] or 0)))
    receive = max((steps for least, steps in one.get("receive", ()) if flight >= least), default=1)
    return Launch(
        cache=one.get("kv", ""),
        max_tokens=row.get("load.max_tokens") or tokens or None,
        receive=receive,
        receive_spread=one.get("receive_spread", receive),
    )


@dataclass(frozen=True, kw_only=True)
class EngineOf:
    """The engine of a row."""

    name: str
    """One of ENGINES."""
    version: str = ""
    """'' = the newest."""
    assumed: tuple[str, ...] = ()
    """What the row does not say."""

    @property
    def full(self) -> str:
        """Name and version as ``load_engine`` takes them."""
        return f"{self.name}@{self.version}" if self.version else self.name


def engine_of(row: ServingRow) -> EngineOf:
    """Engine and version: as stated, else of the image, else the newest of the day of the run. Raises PlannerError."""
    image, version, assumed = str(row.get("engine.image") or ""), str(row.get("engine.version") or ""), list[str]()
    stated = str(row.get("engine.name") or "")
    name = stated.lower()
    if name == "other":
        name = next((one for one in ENGINES if one in version.lower()), name)
    own = name in ENGINES
    if not own:
        name = methods()["engines"].get(name, "")
        if not name:
            raise PlannerError(
                f"engine '{stated[:40]}' is not known; known: {', '.join((*ENGINES, *methods()['engines']))}"
            )
        assumed.append(f"engine {stated} priced as {name}")
    if "dynamo/" in image:
        version = _inside_dynamo(image, name)
    else:
        version = (_number(version, name) or _number(image.partition(":")[2], name)) if own else ""
    if not version:
        version, day = _newest(name, row)
        assumed.append(f"version {version or 'newest'}, the newest on {day}" if day else "newest version")
    return EngineOf(name=name, version=version, assumed=tuple(assumed))


def _number(text: str, name: str) -> str:
    """The engine's own version number in a text; that of TensorRT, CUDA or PyTorch is none."""
    if name == "trtllm" and re.search(r"tensorrt\b(?!.?llm)|cuda", text, re.IGNORECASE):
        return ""
    named = re.search(rf"(?i){name}[- ]?v?(?=\d)", text)
    found = _VERSION.search(text[named.end() :] if named else text)
    return found[1] if found else ""


def _inside_dynamo(image: str, name: str) -> str:
    """Version of the engine inside an image of Dynamo: the longest release that its tag begins with."""
    tag = image.rpartition(":")[2]
    known = [one for one in methods()["dynamo"] if tag == one or tag.startswith((f"{one}.", f"{one}-"))]
    return str(methods()["dynamo"][max(known, key=len)].get(name, "")) if known else ""


def _newest(name: str, row: ServingRow) -> tuple[str, str]:
    """The newest version of the day of a run, and the day; ('', '') where no day is known."""
    said = (row.get("date"), method_of(row).get("date"), row.about.get("title"), row.about.get("where"))
    day = next((found[0] for one in said if one and (found := _DAY.search(str(one)))), "")
    versions = {str(key): str(one) for key, one in methods()["releases"][name].items()}
    before = [one for one in sorted(versions) if one <= day] if day else []
    return (versions[before[-1]], day) if before else ("", "")


def dies(name: str) -> int:
    """Devices, as a program sees them, of one that a file counts: two of a package with two dies."""
    return int(methods()["hardware"].get(name.lower(), {}).get("dies", 1))


@cache
def device(name: str) -> tuple[HardwareProfile, str]:
    """Profile of a device by its name in a file, and what was assumed. Raises PlannerError."""
    own = methods()["hardware"].get(name.lower())
    if own is None:
        return load_hardware(name), ""
    return load_hardware(own["profile"]), f"{name}: {own['profile']} ({own['note']})"
