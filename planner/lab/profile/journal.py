"""What a profile has measured so far, in one file written whole: an interrupted profile loses nothing.

The file is JSON next to the profile: a header that says which machine and device it belongs to, the points measured and
the points that failed with their reason. ``--resume`` reads it and measures only the rest.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.lab.profile.points import Measured, Point

WRITE_SECONDS = 1.0  # A result waits at most this long for the file, plus the time of one point

WORDS = {"world": "--ranks (of all nodes)", "local": "--ranks", "host": "the host", "name": "the device"}
"""Keys of the header, as a user knows them."""


def digest(data: dict[str, Any]) -> str:
    """Of what a journal holds: nobody's edit or half a disk's failure becomes a measurement."""
    parts = {name: data[name] for name in ("header", "measured", "failed")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Journal:
    """Results of a running profile. Use it as a context manager: it is written when the block ends, however it ends."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        """A new journal; without a path it stays in memory (ranks other than the first)."""
        self.path = path
        self.header = header
        self._measured: dict[Point, Measured] = {}
        self._failed: dict[Point, str] = {}
        self._written = 0.0

    @classmethod
    def resume(cls, path: Path, header: dict[str, Any]) -> Journal:
        """The journal of an earlier run, empty where there is none; what failed is tried again. Raises PlannerError where it is of
        another machine, or broken."""
        journal = cls(path, header)
        if path.exists():
            journal._load(path)
        journal._failed = {}
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The journal of a finished or interrupted run with its failures, to make a profile of. Raises PlannerError."""
        if not path.exists():
            raise PlannerError(f"{path}: nothing was measured")
        journal = cls(path, {})
        journal._load(path)
        return journal

    def _load(self, path: Path) -> None:
        """Adds what the file holds."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["digest"] != digest(data):
                raise PlannerError(f"{path}: was edited or damaged since it was written; run without --resume")
            measured = [Measured.from_dict(entry) for entry in data["measured"]]
            failed = {Point.from_dict(entry["point"]): entry["reason"] for entry in data["failed"]}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PlannerError(f"{path}: is not a journal of a profile ({error}); run without --resume") from error
        for key, value in self.header.items():
            before = data["header"].get(key)
            if before != value:
                raise PlannerError(
                    f"{path}: was measured with {WORDS.get(key, key)} {shown(before)}, now it is {shown(value)}; "
                    "run without --resume, which begins anew, or with another --output"
                )
        self.header = {**data["header"], **self.header}
        self._measured = {found.point: found for found in measured}
        self._failed = failed

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()

    def __contains__(self, point: Point) -> bool:
        return point in self._measured

    def __len__(self) -> int:
        return len(self._measured)

    def of(self, *families: str) -> list[Measured]:
        """Everything measured in some families (all, without an argument), in the order measured."""
        return [found for found in self._measured.values() if not families or found.point.family in families]

    @property
    def failed(self) -> list[tuple[Point, str]]:
        """Points that could not be measured, with the reason."""
        return list(self._failed.items())

    def add(self, found: Measured) -> None:
        """Keep a result; the file follows within WRITE_SECONDS of further results, or when the block ends."""
        self._measured[found.point] = found
        self._failed.pop(found.point, None)
        self._write_sometimes()

    def fail(self, point: Point, reason: str) -> None:
        """Keep that a point could not be measured, and why."""
        self._failed[point] = reason
        self._write_sometimes()

    def _write_sometimes(self) -> None:
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """The file, whole."""
        if self.path is None:
            return
        data = {
            "header": self.header,
            "measured": [found.to_dict() for found in self._measured.values()],
            "failed": [{"point": point.to_dict(), "reason": reason} for point, reason in self._failed.items()],
        }
        data["digest"] = digest(data)
        library.write_whole(self.path, json.dumps(data, indent=0))
        self._written = time.monotonic()
