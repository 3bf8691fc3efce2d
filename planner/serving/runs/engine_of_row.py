"""The engine of a row and its version: as stated, by its image, by runs of its series, or by the day."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any

from planner.errors import PlannerError
from planner.record import record
from planner.serving.runs.methods import method_of, methods
from planner.serving.runs.run_schema import ServingRow

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines with data of their own."""
Series = tuple[str, ...]
"""Source, stack, model, GPU and format of weights: runs that one script started, with one image until it was changed."""
SAME_IMAGE = timedelta(days=14)
"""How far from a run, either way, another one of its series says its image: sources change it every month or two."""
_VERSION = re.compile(r"(?<![\w.])v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:rc|post|dev)\d+)*)")
_DAY = re.compile(r"20\d\d-\d\d(?:-\d\d)?")


@record
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


def engine_of(row: ServingRow, known: Mapping[Series, Sequence[tuple[date, str]]]) -> EngineOf:
    """Engine and version: as stated, else of the image, else that of runs of its series about that day (``stated_versions``), else
    the newest of the day of the run among those of its source or all. Raises PlannerError.
    """
    stated, assumed = str(row.get("engine.name") or ""), list[str]()
    name = _named(row)
    own = name in ENGINES
    if not own:
        name = methods()["engines"].get(name, "")
        if not name:
            raise PlannerError(
                f"engine '{stated[:40]}' is not known; known: {', '.join((*ENGINES, *methods()['engines']))}"
            )
        assumed.append(f"engine {stated} priced as {name}")
    version = _stated(row, name) if own or "dynamo/" in str(row.get("engine.image") or "") else ""
    image = _images(name, row) if not version else {}
    if not version and own and "until" not in image:  # a script of its own has its own image
        version = _near(row, known.get(_series(row), ()))
        assumed += [f"version {version}, of runs of its series about that day"] if version else []
    if not version:
        version, day = _newest(name, row)
        assumed.append(f"version {version or 'newest'}, the newest on {day}" if day else "newest version")
    return EngineOf(name=name, version=version, assumed=tuple(assumed))


def stated_versions(rows: Iterable[ServingRow]) -> dict[Series, list[tuple[date, str]]]:
    """Days and versions of those runs of each series that say theirs."""
    found: dict[Series, list[tuple[date, str]]] = defaultdict(list)
    for row in rows:
        day, name = _day(row), _named(row)
        if day and name in ENGINES and (version := _stated(row, name)):
            found[_series(row)].append((day, version))
    return found


def _series(row: ServingRow) -> Series:
    keys = ("engine.name", "engine.stack", "model", "hardware.gpu", "precision.weights")
    return (row.source, *(str(row.get(key) or "") for key in keys))


def _near(row: ServingRow, stated: Sequence[tuple[date, str]]) -> str:
    """The version of the nearest day, '' where none is near enough."""
    day = _day(row)
    if not day or not stated:
        return ""
    other, version = min(stated, key=lambda one: (abs(one[0] - day), one))
    return version if abs(other - day) <= SAME_IMAGE else ""


def _day(row: ServingRow) -> date | None:
    try:
        return date.fromisoformat(str(row.get("date"))[:10])
    except ValueError:
        return None


def _named(row: ServingRow) -> str:
    """The engine's name as the row has it; where that is "other", the one of ENGINES in its version."""
    name = str(row.get("engine.name") or "").lower()
    said = str(row.get("engine.version")).lower() if name == "other" else ""
    return next((one for one in ENGINES if one in said), name)


def _stated(row: ServingRow, name: str) -> str:
    """The version in the row, else in the tag of its image; '' = neither."""
    image = str(row.get("engine.image") or "")
    if "dynamo/" in image:
        return _inside_dynamo(image, name)
    return _number(str(row.get("engine.version") or ""), name) or _number(image.partition(":")[2], name)


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


def _images(name: str, row: ServingRow) -> Mapping[str, Any]:
    """The line of the method of its source that names the images it used by day; {} where there is none."""
    said = {"engine": name, "gpu": row.get("hardware.gpu"), "lengths": [row.get("load.isl"), row.get("load.osl")]}
    weights = str(row.get("precision.weights") or "")
    lines = (one for one in method_of(row).get("images", ()) if all(one.get(key, value) == value for key, value in said.items()))
    return next((one for one in lines if one["weights"] in weights and str(row.get("date")) < str(one.get("until", "9"))), {})


def _newest(name: str, row: ServingRow) -> tuple[str, str]:
    """The newest version of the day of a run, among the images of its source or all releases, and the day; ('', '') where no day
    is known."""
    said = (row.get("date"), method_of(row).get("date"), row.about.get("title"), row.about.get("where"))
    day = next((found[0] for one in said if one and (found := _DAY.search(str(one)))), "")
    versions = {str(key): str(one) for key, one in (_images(name, row).get("versions") or methods()["releases"][name]).items()}
    before = [one for one in sorted(versions) if one <= day] if day else []
    return (versions[before[-1]], day) if before else ("", "")
