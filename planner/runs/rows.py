"""Files of runs, every value checked by the schema of ``profiles/runs``; what a row's texts stand for, by frameworks.yaml.

Files that ``plan validate`` writes are read too: what they measured, as documents of runs.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from planner import library
from planner.error_bars import KINDS, OWN_RUN
from planner.errors import PlannerError, shown
from planner.record import record
from planner.schema import Line, Rule, Text, check_keys, group, mapping, one_of, value_of, within
from planner.trainer_options import text_of

_Whole, _Number = Annotated[int, within(0)] | None, Annotated[float, Rule(kept=True)] | None
_Text, _Line, _Flag = Text | None, Line | None, bool | None


def _group(**kinds: Any) -> Any:
    return Annotated[dict[str, Any], group(kinds)] | None


_MODEL = _group(
    **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "window"), _Whole),
    **dict.fromkeys(("experts", "topk", "moe_ffn", "shared_experts", "dense_layers"), _Whole),
    name=_Line, attention=_Line, position=_Line, gated=_Flag, tied_embeddings=_Flag, params_b=_Number,
)  # fmt: skip
_PARALLEL = _group(
    **dict.fromkeys(("gpus", "tp", "pp", "dp", "cp", "ep", "etp", "vpp", "zero", "shard"), _Whole), sp=_Flag
)
_MEASURED = _group(
    **dict.fromkeys(("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu", "mem_gb"), _Number),
    tflops_kind=_Line, oom=_Flag,
)  # fmt: skip
_ROW = _group(
    model=_MODEL, parallel=_PARALLEL, batch=_group(micro=_Whole, **{"global": _Whole}), measured=_MEASURED,
    layer_ms=_group(forward=_Number, backward=_Number, combined=_Number), plan=Annotated[dict[str, Any], Rule()] | None,
    options=Annotated[dict[str, Any], Rule()] | None, facts=Annotated[dict[str, Any], Rule()] | None,
    lora_rank=_Whole, document_length=_Whole, optimizer_bytes=_Number, notes=_Text,
    **dict.fromkeys(("precision", "optimizer", "recompute", "id", "framework", "lora_targets", "frozen_weights"), _Line),
    **dict.fromkeys(("flash_attention", "tp_overlap", "grad_overlap", "compile"), _Flag),
)  # fmt: skip
CLUSTER_FIGURES = ("ring_latency", "tree_latency", "network_share", "sustained_clock")
"""What a source measured of its own cluster, over the GPU's profile."""
_FILE: dict[str, Any] = {
    "source": _group(
        **dict.fromkeys(("id", "quality", "date"), _Line), title=_Text, where=_Text, kind=Annotated[str, one_of(KINDS)] | None
    ),
    "hardware": _group(
        gpu=_Line, gpus_per_node=_Whole, intra_node=_Line, inter_node=_Line, context_memory=_Line,
        nccl_protocol=Annotated[str, one_of(("simple",))] | None,
        **dict.fromkeys(CLUSTER_FIGURES, _Number),
    ),
    "framework": Line, "defaults": _ROW, "rows": list[Any],
}  # fmt: skip


class UnsupportedError(Exception):
    """The reason why a row cannot be priced."""


@cache
def frameworks() -> dict[str, list[dict[str, Any]]]:
    """The table of frameworks, recipes and families, its expressions compiled."""
    table = library.read_yaml(library.profiles_directory() / "frameworks.yaml")
    for entry in (one for entries in table.values() for one in entries if "match" in one):
        entry["match"] = re.compile(entry["match"], re.IGNORECASE)
    return table


@cache
def _matching(kind: str, text: str) -> tuple[Mapping[str, Any], ...]:
    """Entries of the table that match a text."""
    return tuple(entry for entry in frameworks().get(kind, []) if entry["match"].search(text))


@record
class Row:
    """One row of a file as it is written, defaults merged in; every value has its type or is None."""

    source: str
    """Name of the file (of its ``source.id`` when it was not read from a file)."""
    hardware: Mapping[str, Any]
    framework: str
    about: Mapping[str, Any] = field(default_factory=dict)
    """The source: id, title, where, quality, date, kind."""
    data: Mapping[str, Any]
    """The fields of the row; model, parallel, batch and measured are always mappings."""
    generic: bool = False
    """Read as if only the names of its framework and its hardware were known: no version, no recipe, nothing of its cluster."""
    unlisted: bool = False
    """Read as if its framework were in no table: how far off an unlisted one is, is seen on those that are listed."""

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
        """What the source says in addition to the numbers; empty when nothing."""
        return str(self.data.get("notes") or "")

    @property
    def made_for(self) -> str:
        """Kind of run as its source states it; what somebody reports in an issue is a run of his own; '' = nothing says it."""
        reported = re.search(r"\bissues? #?\d+", str(self.about.get("where") or ""))
        return str(self.about.get("kind") or (OWN_RUN if reported else ""))

    @cached_property
    def entry(self) -> Mapping[str, Any]:
        """What the table says about its framework: the first entry that matches; every row matches one."""
        entries = frameworks()["trainers"]
        one, found = next((one, found) for one in entries if (found := one["match"].search(self.framework)))
        if self.unlisted:  # what its numbers count stays what it is
            one = {**one, **{key: entries[-1][key] for key in ("unknown", "trainer", "alone")}}
        if one.get("unknown") and self.framework in library.names("trainers"):  # as a trainer's log reader says it
            return {**one, "trainer": self.framework, "unknown": False}
        alone = (self.get("parallel.tp") or 1) * (self.get("parallel.pp") or 1) == 1
        named = found.expand(one["alone"] if alone and "alone" in one else one["trainer"])
        return {**one, "trainer": named.partition("@")[0] if self.generic else named}

    @cached_property
    def options(self) -> dict[str, str]:
        """Options of its trainer that its fields and its notes state."""
        flags = {"compile": "compile", "tp_overlap": "tp_overlap", "grad_overlap": "gradient_overlap"}
        said = {name: text_of(self.get(key)) for key, name in flags.items() if self.get(key) is not None}
        if self.get("flash_attention") is not None and not self.get("flash_attention"):
            said["attention_kernel"] = "unfused"
        for one in frameworks()["notes"]:
            if self.note(one["note"]):
                said |= {name: text_of(value) for name, value in one["options"].items()}
        return said | {name: text_of(value) for name, value in ({} if self.generic else self.get("options") or {}).items()}

    def note(self, pattern: str) -> re.Match[str] | None:
        """The first match of an expression in the notes, or in the framework's name; case does not count."""
        return re.search(pattern, f"{self.notes}; {self.framework}", re.IGNORECASE)

    def family(self, network: str) -> str:
        """Group of sources that it belongs to; split by precision, model or network where the table says so."""
        found = next(iter(_matching("families", self.source)), None)
        if found is None:
            return "other"
        low = "bf16" if self.get("precision") in (None, "bf16", "fp16") else "fp8"
        suffix = {"precision": low, "moe": "MoE" if self.get("model.experts") else low, "network": network}
        return f"{found['family']} {suffix.get(found.get('split', ''), '')}".rstrip()


def shipped() -> list[Path]:
    """The files of runs that come with the planner."""
    return [library.profiles_directory() / "runs" / f"{name}.yaml" for name in library.names("runs")]


def read_rows(paths: Sequence[str | Path] | None = None) -> list[Row]:
    """Rows of files, or of all ``*.yaml`` in directories; without paths the shipped ones. Raises PlannerError."""
    return [row for file in (shipped() if paths is None else files_of(paths)) for row in _rows_of_file(file)]


def files_of(paths: Sequence[str | Path]) -> list[Path]:
    """Files, and all ``*.yaml`` and ``*.yml`` of directories and what is below them. Raises PlannerError."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
            if not found:
                raise PlannerError(f"{path}: no .yaml file of runs in this directory")
            files += found
        elif os.path.lexists(path):
            files.append(path)
        else:
            raise PlannerError(f"no such file or directory of runs: {path}")
    return files


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
    check_keys(data, _FILE, where)
    _require({key: data.get(key) for key in _FILE}, ("source", "hardware", "framework", "rows"), where)
    found = {key: value_of(_FILE[key], data[key], where, key) for key in data}
    about, hardware, framework = (found[key] for key in ("source", "hardware", "framework"))
    _require(about, ("id",), f"{where}: source")
    _require(hardware, ("gpu",), f"{where}: hardware")
    rows, seen = [], set()
    for number, entry in enumerate(found["rows"], start=1):
        name = entry.get("id") if isinstance(entry, Mapping) else None
        here = f"{where}: row {name}" if isinstance(name, str) and len(name) <= 200 else f"{where}: row {number}"
        merged = _merge(found.get("defaults") or {}, value_of(_ROW, entry, here, "") or {})
        _require(merged, ("id", "model", "parallel", "batch", "measured"), here)
        if merged["id"] in seen:
            raise PlannerError(f"{here}: this id appears twice; ids must be unique in a file")
        seen.add(merged["id"])
        own = merged.get("framework") or framework
        rows.append(Row(source=source or about["id"], hardware=hardware, framework=own, about=about, data=merged))
    return rows


def _require(data: Mapping[str, Any], needed: Sequence[str], where: str) -> None:
    """Raises PlannerError with the first key that is missing or null."""
    for key in needed:
        if data.get(key) is None:
            raise PlannerError(f"{where}: missing key '{key}'")


def _merge(defaults: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A row over its defaults; mappings key by key."""
    merged = dict(defaults)
    for key, value in row.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = {**merged[key], **value} if both else value
    return merged


# ------------------------------------------------------------------------------------------- files of plan validate

VERSION = 1
"""Format of validation files: one validation (keys as docs/validate.md lists them), or under ``validations`` those of several."""
LEVELS = ("meta", "rank", "truncated", "full", "trainer")
"""What was run, from memory alone to the plan itself on its own trainer."""
OUTCOMES = ("completed", "out_of_memory", "hung", "lost_rank", "failed", "not_equal", "interrupted")
"""How it ended; all but the first are a failed validation. interrupted: the user stopped it, what was measured is kept."""
_NEEDED: dict[str, Any] = {
    "plan": str, "rung": Annotated[str, one_of(LEVELS)], "outcome": Annotated[str, one_of(OUTCOMES)],
    "run": dict[str, Any] | None,
}  # fmt: skip
"""Keys that every validation has; ``run`` is written last, so that a file that was cut off lacks it."""


def is_validation(data: Mapping[str, Any]) -> bool:
    """Whether a file's mapping says that it is a validation."""
    return "planner_validation" in data


def validations_from_dict(data: Mapping[str, Any], *, where: str = "validation") -> list[dict[str, Any]]:
    """The validations in plain data. Raises PlannerError."""
    library.version_of(data, "validation", VERSION, where=where)
    many = data.get("validations", [data])
    if not isinstance(many, list) or not many:
        raise PlannerError(f"{where}: validations is {shown(many)}; it must be a list of at least one")
    here = [f"{where}: validation {number}" for number in range(1, len(many) + 1)] if "validations" in data else [where]
    return [_checked(one, place) for one, place in zip(many, here, strict=True)]


def _checked(one: Any, where: str) -> dict[str, Any]:
    for key in _NEEDED:
        if key not in mapping(one, where):
            raise PlannerError(f"{where}: missing key '{key}'; the file is damaged or cut off")
    return {**one, **{key: value_of(kind, one[key], where, key) for key, kind in _NEEDED.items()}}


def documents(data: Mapping[str, Any], *, where: str) -> list[Mapping[str, Any]]:
    """What a file's validations measured, each in the schema of profiles/runs. Raises PlannerError when none did."""
    found = validations_from_dict(data, where=where)
    measured = [run for one in found for run in _runs(one, where)]
    if not measured:
        levels = " and ".join(dict.fromkeys(str(one["rung"]) for one in found))
        why = next(
            (str(one["no_run"]) for one in found if one.get("no_run")), "nothing was measured that a plan predicts"
        )
        raise PlannerError(
            f"{where}: there is no run in it to learn from (level {levels}): {why}; validate on the plan's own hardware, with "
            "--rung full or --trainer"
        )
    return measured


def _runs(one: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The run of a validation, and of level truncated that of its second depth."""
    depths = one.get("truncated") or []
    runs = [depth.get("run") for depth in depths if isinstance(depth, Mapping)] if isinstance(depths, list) else [depths]
    if any(run is not None and not isinstance(run, Mapping) for run in runs) or not isinstance(depths, list):
        raise PlannerError(f"{where}: truncated is {shown(depths)}; it must be a list of depths, each with a run or null")
    return [run for run in (one["run"], *runs) if run is not None]
