"""Files of published serving runs, every value checked: what a row says, nothing derived.

A file of serving runs has the key ``client`` or ``engine`` with ``source`` and ``rows`` (profiles/serving-runs/README.md). A key
that is nearly a known one is refused as a slip; other unknown keys are kept aside and named in the answer of the row.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError, shown
from planner.record import record
from planner.schema import Line, Rule, Text, mapping, one_of, value_of, within

MOST_ROWS = 100_000
"""Rows of one file."""
KINDS = ("offline", "concurrency", "rate", "static", "mlperf-offline", "mlperf-server", "mlperf-interactive")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "unstated")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
RATES = (
    "tokens_per_s_total_output", "tokens_per_s_per_gpu", "tokens_per_s_total", "tokens_per_s_total_per_gpu", "request_per_s",
)  # fmt: skip
OTHERS = ("latency_s", "memory_gb")
_Degree = Annotated[int, within(1, 1_000_000)] | None
_Workers = Annotated[int, within(0, 1_000_000)] | None
_Tokens = Annotated[float, within(1, 1e8)] | None
_Line, _Text = Line | None, Text | None
_POOL: dict[str, Any] = {
    **dict.fromkeys(("tp", "pp", "dp", "ep", "moe_tp", "attn_dp", "dcp", "batch", "gpus"), _Degree), "workers": _Workers,
}  # fmt: skip
_GROUPS: dict[str, dict[str, Any]] = {
    "hardware": {"gpu": Line, "count": _Degree, "nodes": _Degree},
    "engine": dict.fromkeys(("name", "version", "image", "stack"), _Line),
    "parallel": _POOL, "prefill": _POOL, "decode": _POOL,
    "precision": dict.fromkeys(("weights", "kv", "activations", "experts", "attention"), _Line),
    "load": {
        "kind": Annotated[str, one_of(KINDS)], "value": Annotated[float, within(0, float("inf"))] | None, "dataset": _Line,
        **dict.fromkeys(("isl", "osl"), _Tokens), "range_ratio": Annotated[float, within(0, 1)] | None,
        **dict.fromkeys(("max_batch", "max_tokens", "requests", "batch_per_rank"), _Degree),
    },
}  # fmt: skip
_FREE = ("measured", "options", "source")
"""Groups whose other keys mean nothing here and are no slip."""
_PLAIN: dict[str, Any] = {
    "id": Line, "model": Line, "notes": _Text, "date": _Line, "client": _Line, "flags": list[Line] | None,
}  # fmt: skip
_ROW = (*_PLAIN, *_GROUPS, "measured", "options")
_FILE = ("source", "engine", "client", "rows", "defaults")
_NUMBER = Annotated[float, Rule(above=True, most=1e12)]


@record
class ServingRow:
    """One row as it is written; groups are always mappings, absent values are absent."""

    source: str
    """Name of the file (of its ``source.id`` when it was not read from a file)."""
    about: Mapping[str, Any]
    """The source: id, title, where, quality, licence."""
    client: str
    """closed, open, static or mlperf; '' = not said."""
    data: Mapping[str, Any]
    """Its fields; engine of the file merged in."""
    measured: Mapping[str, float]
    """What was measured by schema name, ``ttft_ms.p50``, in the unit of the name."""
    unread: tuple[str, ...] = ()
    """Keys that mean nothing to the planner."""

    def get(self, path: str) -> Any:
        """A value by its path, ``load.isl``; None when it is not there."""
        group, _, key = path.partition(".")
        value = self.data.get(group)
        return value.get(key) if key and isinstance(value, Mapping) else None if key else value

    @property
    def id(self) -> str:
        """Its name within the file."""
        return str(self.data["id"])

    @property
    def flags(self) -> tuple[str, ...]:
        """What its source or collector warns of."""
        return tuple(self.data.get("flags") or ())


def serving_rows(data: Mapping[str, Any], *, where: str = "runs", source: str = "") -> list[ServingRow]:
    """Rows of one source from plain data. Raises PlannerError with file, row and key of what is wrong."""
    unread = tuple(_other_keys(data, _FILE, where))
    about = _group(data.get("source") or {}, {"id": _Line}, f"{where}: source")[0]
    if not source and not about.get("id"):
        raise PlannerError(f"{where}: source: missing key 'id'")
    engine, other = _group(data.get("engine") or {}, _GROUPS["engine"], f"{where}: engine")
    client = value_of(_Line, data.get("client"), where, "client") or ""
    rows = data.get("rows")
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        raise PlannerError(f"{where}: rows is {shown(rows)}; it must be a list of at most {MOST_ROWS:,} rows")
    found, seen = [], set[str]()
    for number, entry in enumerate(rows, start=1):
        name = entry.get("id") if isinstance(entry, Mapping) else None
        here = f"{where}: row {name if isinstance(name, (str, int)) and len(str(name)) < 200 else number}"
        values, measured, more = _row(entry, here)
        if values["id"] in seen:
            raise PlannerError(f"{here}: this id appears twice; ids must be unique in a file")
        seen.add(values["id"])
        values["engine"] = {**engine, **values.get("engine", {})}
        found.append(ServingRow(
            source=source or about["id"], about=about, client=values.get("client") or client, data=values, measured=measured,
            unread=(*unread, *other, *more),
        ))  # fmt: skip
    return found


def read_serving_file(path: Any) -> list[ServingRow]:
    """Rows of one file. Raises PlannerError."""
    return serving_rows(library.read_yaml(path), where=str(path), source=path.stem)


def _row(entry: Any, where: str) -> tuple[dict[str, Any], dict[str, float], list[str]]:
    """Checked fields, measured figures by name, and the keys that were not read."""
    unread = _other_keys(mapping(entry, where), _ROW, where)
    for key in ("id", "model", "hardware", "load", "measured"):
        if entry.get(key) is None:
            raise PlannerError(f"{where}: missing key '{key}'")
    values: dict[str, Any] = {key: value_of(_PLAIN[key], entry[key], where, key) for key in _PLAIN if key in entry}
    for key, kinds in _GROUPS.items():
        if entry.get(key) is not None:
            values[key], more = _group(entry[key], kinds, f"{where}: {key}")
            unread += [f"{key}.{one}" for one in more]
    for group, key in (("hardware", "gpu"), ("load", "kind")):
        if values[group].get(key) is None:
            raise PlannerError(f"{where}: {group}: missing key '{key}'")
    values["options"] = dict(mapping(entry.get("options") or {}, f"{where}: options"))
    return values, _figures(entry["measured"], f"{where}: measured"), unread


def _group(data: Any, kinds: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Checked values of a group, null left out, and the keys that are not of it."""
    found = mapping(data, where)
    other = [] if where.endswith(_FREE) else _other_keys(found, tuple(kinds), where)
    checked = {key: value_of(kind, found[key], where, key) for key, kind in kinds.items() if key in found}
    kept = {key: one for key, one in found.items() if where.endswith(_FREE) and key not in kinds}
    return {key: one for key, one in {**kept, **checked}.items() if one is not None}, other


def _other_keys(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> list[str]:
    """Keys that are not known. Raises PlannerError for one that is nearly a known one: a slip would be lost silently."""
    found = []
    for key in data:
        if key in known:
            continue
        text = key if isinstance(key, str) else shown(key)
        if near := difflib.get_close_matches(text[:60], known, n=1, cutoff=0.8):
            raise PlannerError(f"{where}: unknown key {shown(text)}; nearest: {near[0]}")
        found.append(text if len(text) <= 60 and text.isprintable() else shown(text))
    return found


def _figures(data: Any, where: str) -> dict[str, float]:
    """Numbers by schema name; figures that the planner has no name for are left out."""
    found: dict[str, float] = {}
    for key, value in mapping(data, where).items():
        if key in LATENCIES:
            for name, one in mapping(value, f"{where}: {key}").items():
                if name in STATISTICS and one is not None:
                    found[f"{key}.{name}"] = value_of(_NUMBER, one, where, f"{key} {name}")
        elif key in RATES or key in OTHERS:
            if value is not None:
                found[key] = value_of(_NUMBER, value, where, key)
        else:
            _other_keys({key: value}, (*LATENCIES, *RATES, *OTHERS), where)
    return found
