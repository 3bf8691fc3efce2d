"""Files of runs as they are written: the schema of ``profiles/runs``, every value checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, nearest_first
from planner.runs.validation import documents, is_validation

_INT, _NUMBER, _TEXT, _BOOL = "a whole number of at least 0", "a number of at least 0", "a text", "true or false"
_MODEL = {
    **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "window"), _INT),
    **dict.fromkeys(("experts", "topk", "moe_ffn", "shared_experts", "dense_layers"), _INT),
    "name": _TEXT, "attention": _TEXT, "gated": _BOOL, "tied_embeddings": _BOOL, "params_b": _NUMBER,
}  # fmt: skip
_PARALLEL = {
    **dict.fromkeys(("gpus", "tp", "pp", "dp", "cp", "ep", "etp", "vpp", "zero", "shard"), _INT), "sp": _BOOL,
}  # fmt: skip
_MEASURED = {
    **dict.fromkeys(("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu", "mem_gb"), _NUMBER),
    "tflops_kind": _TEXT, "oom": _BOOL,
}  # fmt: skip
_PLAN = "a mapping with the workload, trainer and layout of a plan"
_ROW: dict[str, Any] = {
    "model": _MODEL, "parallel": _PARALLEL, "batch": {"micro": _INT, "global": _INT}, "measured": _MEASURED,
    "layer_ms": {"forward": _NUMBER, "backward": _NUMBER, "combined": _NUMBER}, "precision": _TEXT, "optimizer": _TEXT,
    "recompute": _TEXT, "plan": _PLAN, "flash_attention": _BOOL, "tp_overlap": _BOOL, "grad_overlap": _BOOL, "compile": _BOOL,
    "notes": _TEXT, "id": _TEXT, "framework": _TEXT,
}  # fmt: skip
_SOURCE = {"id": _TEXT, "title": _TEXT, "where": _TEXT, "quality": _TEXT, "date": _TEXT}
_HARDWARE = {"gpu": _TEXT, "gpus_per_node": _INT, "intra_node": _TEXT, "inter_node": _TEXT}
_FILE = {"source": _SOURCE, "hardware": _HARDWARE, "framework": _TEXT, "defaults": _ROW, "rows": None}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file as it is written, defaults merged in; every value has its type or is None."""

    source: str
    """Name of the file (of its ``source.id`` when it was not read from a file)."""
    hardware: Mapping[str, Any]
    framework: str
    about: Mapping[str, Any] = field(default_factory=dict)
    """The source: id, title, where, quality, date."""
    data: Mapping[str, Any]
    """The fields of the row; model, parallel, batch and measured are always mappings."""

    def get(self, path: str) -> Any:
        """A value by its path, ``parallel.tp``; None when it is not there."""
        group, _, key = path.partition(".")
        value = self.data.get(group)
        if not key:
            return value
        return value.get(key) if isinstance(value, dict) else None

    @property
    def id(self) -> str:
        """Its name within the file."""
        return str(self.data["id"])

    @property
    def notes(self) -> str:
        """What the source says beside the numbers; empty when nothing."""
        return str(self.data.get("notes") or "")


def shipped() -> list[Path]:
    """The files of runs that come with the planner."""
    return [library.profiles_directory() / "runs" / f"{name}.yaml" for name in library.names("runs")]


def read_rows(paths: Sequence[str | Path] | None = None) -> list[Row]:
    """Rows of files, or of all ``*.yaml`` in directories; without paths the shipped ones. Raises PlannerError."""
    files: list[Path] = shipped() if paths is None else []
    for path in map(Path, paths or ()):
        if path.is_dir():
            found = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
            if not found:
                raise PlannerError(f"{path}: no .yaml file of runs in this directory")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise PlannerError(f"no such file or directory of runs: {path}")
    return [row for file in files for row in _rows_of_file(file)]


def _rows_of_file(file: Path) -> list[Row]:
    """Rows of a file of runs, or of the validations of plans."""
    data, rows = library.read_yaml(file), list[Row]()
    for document in documents(data, where=str(file)) if is_validation(data) else [data]:
        rows += rows_from_dict(document, where=str(file), source=file.stem)
    for row in rows if is_validation(data) else ():  # only here: a file of runs checks its own ids
        if sum(other.id == row.id for other in rows) > 1:
            raise PlannerError(f"{file}: row {row.id}: this id appears twice; ids must be unique in a file")
    return rows


def rows_from_dict(data: Mapping[str, Any], *, where: str = "runs", source: str = "") -> list[Row]:
    """Rows of one source from plain data. Raises PlannerError with file, row and key of what is wrong."""
    _check_keys(data, _FILE, where)
    for key in ("source", "hardware", "framework", "rows"):
        if data.get(key) is None:
            raise PlannerError(f"{where}: missing key '{key}'")
    about = _typed(data["source"], _SOURCE, f"{where}: source")
    hardware = _typed(data["hardware"], _HARDWARE, f"{where}: hardware")
    framework = _typed({"framework": data["framework"]}, {"framework": _TEXT}, where)["framework"]
    for key, group, mapping in (("id", "source", about), ("gpu", "hardware", hardware)):
        if mapping.get(key) is None:
            raise PlannerError(f"{where}: {group}: missing key '{key}'")
    defaults = _typed(data.get("defaults") or {}, _ROW, f"{where}: defaults")
    if not isinstance(data["rows"], list):
        raise PlannerError(f"{where}: rows is {_short(data['rows'])}; it must be a list")
    rows, seen = [], set()
    for number, entry in enumerate(data["rows"], start=1):
        name = entry.get("id") if isinstance(entry, Mapping) else None
        here = f"{where}: row {name}" if isinstance(name, str) else f"{where}: row {number}"
        merged = _merge(defaults, _typed(entry, _ROW, here))
        if merged.get("id") is None:
            raise PlannerError(f"{here}: missing key 'id'")
        if merged["id"] in seen:
            raise PlannerError(f"{here}: this id appears twice; ids must be unique in a file")
        seen.add(merged["id"])
        for key in ("model", "parallel", "batch", "measured"):
            if merged.get(key) is None:
                raise PlannerError(f"{here}: missing key '{key}'")
        own = merged.get("framework") or framework
        rows.append(Row(source=source or about["id"], hardware=hardware, framework=own, about=about, data=merged))
    return rows


def _merge(defaults: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A row over its defaults; mappings key by key."""
    merged = dict(defaults)
    for key, value in row.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _check_keys(data: Any, known: Mapping[str, Any], where: str) -> None:
    if not isinstance(data, Mapping):
        raise PlannerError(f"{where}: expected a mapping of keys to values, found {_short(data)}")
    for key in data:
        if key not in known:
            raise PlannerError(f"{where}: unknown key {_short(key)}; nearest: {nearest_first(str(key), known)[0]}")


def _typed(data: Any, known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The mapping with every value checked; null stays None, a number or a date where a text belongs becomes one."""
    _check_keys(data, known, where)
    return {key: None if value is None else _value(value, known[key], where, key) for key, value in data.items()}


def _value(value: Any, kind: Any, where: str, key: str) -> Any:
    if isinstance(kind, dict):
        return _typed(value, kind, f"{where}: {key}")
    if kind is _TEXT:
        good = not isinstance(value, (Mapping, list, tuple, bool, bytes, set))
    elif kind is _BOOL:
        good = isinstance(value, bool)
    elif kind is _PLAN:
        good = isinstance(value, Mapping)
    else:
        good = isinstance(value, int if kind is _INT else (int, float)) and not isinstance(value, bool)
        good = good and 0 <= value < 1e15
    if not good:
        raise PlannerError(f"{where}: {key} is {_short(value)}; it must be {kind}, or null when not stated")
    return str(value) if kind is _TEXT else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
