"""What a user says of traffic, read from text: lengths, limits, rates, speculation; one sentence where it is not understood."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

from planner import library
from planner.errors import PlannerError, shown
from planner.serving.serving_layout import ServingLayout
from planner.serving.traffic import Lengths, Speculation
from planner.units import parse, parse_amount, parse_count

LONGEST = 100_000_000
"""Tokens of a prompt or an answer."""
MOST_LENGTHS = 20_000_000
"""Bytes of a file of lengths."""
DEGREES = tuple(one.name for one in fields(ServingLayout))
"""What a split names."""
PERCENTILES = ("mean", "p50", "p90", "p99")
_RATE = re.compile(
    r"^\s*(\d+\.?\d*|\.\d+)\s*(?:(?:req(?:uests?)?)?\s*(?:/|per\s+)\s*(s|sec|second|min|minute|h|hour))?\s*$"
)
_PER = {"s": 1.0, "m": 60.0, "h": 3600.0}


def read_lengths(text: object, what: str, spread: float = 0.0) -> Lengths:
    """Lengths of a prompt or an answer: ``2048``, ``8k``, ``fixed:2048``, ``uniform:800-1000``, ``@lengths.txt``. Raises
    PlannerError.

    A number alone is the mean of lengths that are uniform within ``spread`` of it, 0.2: from 0.8 to 1.2 times; ``fixed:`` takes
    none.

    A file holds a number of tokens on every line, or tokens and how many requests have them; or a JSON list of numbers.
    """
    if isinstance(text, Lengths):
        return text
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _around(_possible(float(text), what), spread)
    said = str(text).strip() if isinstance(text, str) else shown(text)
    if said.startswith("@"):
        return _lengths_of_file(Path(said[1:]), what)
    kind, colon, ends = said.partition(":")
    if kind.strip().lower() == "fixed" and colon:
        return Lengths.fixed(_count(ends, what))
    if colon or re.fullmatch(r"[\d.]+[kKmM]?i?\s*(-|\.\.)\s*[\d.]+[kKmM]?i?", said):
        if colon and kind.strip().lower() not in ("uniform", "u"):
            raise PlannerError(
                f"{what}: {shown(said)} is no distribution; write 2048, fixed:2048, uniform:800-1000 or @file"
            )
        low, sign, high = (
            re.split(r"(-|\.\.)", ends if colon else said, maxsplit=1)
            if re.search(r"-|\.\.", ends or said)
            else (ends, "", "")
        )
        if not sign:
            raise PlannerError(f"{what}: {shown(said)} needs two ends; write it like uniform:800-1000")
        least, most = (_count(one, what) for one in (low, high))
        if least > most:
            raise PlannerError(f"{what}: {shown(said)} goes down; write the smaller end first, like uniform:800-1000")
        return Lengths.uniform(least, most)
    return _around(_count(said, what), spread)


def _around(mean: float, spread: float) -> Lengths:
    """Uniform around a mean, none below one token."""
    low = max(mean * (1.0 - spread), 1.0)
    return Lengths.uniform(low, 2.0 * mean - low)


def _count(text: str, what: str) -> float:
    return _possible(float(parse_count(text.strip(), what=what)[0]), what)


def _possible(tokens: float, what: str) -> float:
    if not (math.isfinite(tokens) and 1 <= tokens <= LONGEST):
        raise PlannerError(f"{what} is {tokens:g} tokens; it must be from 1 to {LONGEST:,}")
    return tokens


def _lengths_of_file(path: Path, what: str) -> Lengths:
    """Lengths as they were seen, one a line or with how often; or a list in JSON."""
    text = library.read_text(path, most=MOST_LENGTHS)
    if text.lstrip().startswith("["):
        found = library.parse_json(text, str(path))
        rows = [[one] for one in found] if isinstance(found, list) else []
    else:
        rows = library.fields_of_lines(text)
    values, counts = list[float](), list[float]()
    for number, row in enumerate(rows, 1):
        try:
            tokens, count = float(row[0]), float(row[1]) if len(row) > 1 else 1.0
        except (TypeError, ValueError):
            if number == 1 and not isinstance(row[0], (list, dict)) and len(rows) > 1:
                continue  # a heading
            raise PlannerError(
                f"{what}: entry {number} of {path} is {shown(row)}; write a number of tokens, and perhaps how many requests have it"
            ) from None
        if not (math.isfinite(count) and 0 <= count <= 1e15):
            raise PlannerError(f"{what}: entry {number} of {path} has the count {count:g}; it must not be negative")
        values.append(_possible(tokens, f"{what}: entry {number} of {path}"))
        counts.append(count)
    total = sum(counts)
    if not total:
        raise PlannerError(f"{what}: {path} holds no lengths; write a number of tokens on every line")
    mean = sum(one * count for one, count in zip(values, counts, strict=True)) / total
    squared = sum(one**2 * count for one, count in zip(values, counts, strict=True)) / total
    return Lengths(
        mean=mean,
        squared=max(squared, mean**2),
        longest=max(one for one, count in zip(values, counts, strict=True) if count),
    )


def read_seconds(text: object, what: str) -> float:
    """A limit: ``500ms``, ``0.5s``; a number in Python is seconds. Infinite for None. Raises PlannerError."""
    if text is None:
        return math.inf
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    else:
        said = str(text)
        if re.fullmatch(r"\s*[\d.]+\s*", said):
            raise PlannerError(f"{what}: {shown(said.strip())} has no unit; write {said.strip()}ms or {said.strip()}s")
        value = parse(said, "seconds", what=what)
    if not 0 < value <= 1e6:
        raise PlannerError(f"{what} is {value:g} s; it must be above 0 and at most 1e6 s")
    return value


def read_rate(text: object, what: str = "--rate") -> float:
    """Requests per second: ``5/s``, ``300/min``, ``5``. Raises PlannerError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    else:
        found = _RATE.match(str(text))
        if found is None:
            raise PlannerError(f"{what}: {shown(str(text))} is not a rate of requests; write it like 5/s or 300/min")
        value = float(found[1]) / _PER[(found[2] or "s")[0]]
    if not (math.isfinite(value) and 0 < value <= 1e9):
        raise PlannerError(f"{what} is {value:g} requests/s; it must be above 0 and at most 1e9")
    return value


def read_concurrency(text: object, what: str = "--concurrency") -> float:
    """Requests in flight: ``256``, ``2k`` (2048). Raises PlannerError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    else:
        value = float(parse_count(str(text), what=what)[0])
    if not (value == int(value) and 1 <= value <= 1e9):
        raise PlannerError(f"{what} is {value:g}; it must be a whole number of requests from 1 to 1e9")
    return value


def read_speculation(text: object, what: str = "--speculation") -> Speculation | None:
    """Speculative decoding: ``depth=3,acceptance=0.7`` with ``draft=1B`` parameters where a model drafts. Raises PlannerError."""
    if text is None or isinstance(text, Speculation):
        return text
    said: dict[str, str] = {}
    for part in str(text).split(","):
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in ("depth", "acceptance", "draft") or name.strip() in said:
            raise PlannerError(
                f"{what}: {shown(part.strip())} is not understood; write it like depth=3,acceptance=0.7 or with draft=1B "
                "parameters of a draft model"
            )
        said[name.strip()] = value.strip()
    if not {"depth", "acceptance"} <= said.keys():
        raise PlannerError(f"{what} needs both: drafted tokens and the share accepted, like depth=3,acceptance=0.7")
    try:
        depth, acceptance = (
            int(said["depth"]),
            float(said["acceptance"].rstrip("%")) / (100.0 if said["acceptance"].endswith("%") else 1.0),
        )
    except ValueError:
        raise PlannerError(
            f"{what}: {shown(str(text))} holds no numbers; write it like depth=3,acceptance=0.7"
        ) from None
    if not 1 <= depth <= 64 or not 0 <= acceptance <= 1:
        raise PlannerError(
            f"{what}: depth must be from 1 to 64 and acceptance from 0 to 1, not {depth} and {acceptance:g}"
        )
    draft = parse_amount(said["draft"], what=f"{what} draft") if "draft" in said else 0.0
    return Speculation(depth=depth, acceptance=acceptance, draft_parameters=draft)


def share_of(text: object, what: str) -> float:
    """A share as it is written, whatever its size: ``0.3``, ``30%``. Raises PlannerError."""
    try:
        said = str(text).strip()
        return float(said.removesuffix("%")) / (100.0 if said.endswith("%") else 1.0)
    except ValueError:
        raise PlannerError(f"{what}: {shown(text)} is not a share; write it like 0.3 or 30%") from None


def read_share(text: object, what: str) -> float:
    """A part of 1: ``0.3``, ``30%``. Raises PlannerError."""
    value = share_of(text, what)
    if not 0 <= value <= 0.999:
        raise PlannerError(f"{what} is {value:g}; it must be from 0 to 0.999")
    return value


def lengths_text(lengths: Lengths) -> str:
    """Lengths in a few words: 2048, 800 to 1000, mean 512 (longest 8192)."""
    if lengths.variation < 1e-9:
        return f"{lengths.mean:,.0f}"
    low, high = 2.0 * lengths.mean - lengths.longest, lengths.longest
    if low >= 1 and abs((low**2 + low * high + high**2) / 3.0 / lengths.squared - 1.0) < 1e-6:
        return f"{low:,.0f} to {high:,.0f}" if f"{low:.0f}" != f"{high:.0f}" else f"{high:,.0f}"
    return f"mean {lengths.mean:,.0f} (longest {lengths.longest:,.0f})"


def read_split(text: str) -> dict[str, int]:
    """A split like 'tp=4,pp=2', 'tp 4 pp 2' or 'tp4 pp2 x2'. Raises PlannerError."""
    found: dict[str, int] = {}
    names = {"x": "replicas", "dp": "attn_dp", "r": "replicas"}
    for word in re.sub(r"\s*=\s*|(?<=[a-zA-Z])\s+(?=\d)", "", text).replace(",", " ").split():
        match = re.fullmatch(r"([a-zA-Z_-]+?)(\d{1,7})", word)
        name = match[1].lower().replace("-", "_") if match else ""
        name = names.get(name, name)
        if match is None or name not in DEGREES or name in found:
            raise PlannerError(
                f"split {shown(text)}: {shown(word)} is not understood; write it like tp=4,pp=2 or replicas=8"
            )
        found[name] = int(match[2])
    if not found:
        raise PlannerError(f"split {shown(text)} says nothing; write it like tp=4,pp=2")
    return found
