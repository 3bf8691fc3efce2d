"""Measured runs: reads the schema of ``profiles/runs`` and says each row in the planner's own words.

A row becomes (workload, cluster, trainer, layout, measured), or a reason why it cannot. What a row leaves open is
filled from facts about its framework (``profiles/frameworks.yaml``); further guesses are listed under ``assumptions``.
Nothing here looks at a prediction. Texts of other frameworks live in this file and in frameworks.yaml only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planner import library, units
from planner import model as models
from planner.cluster import Cluster
from planner.cost.parameters import active_parameters, total_parameters
from planner.detect import profile_of
from planner.errors import PlannerError, nearest_first
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import CpMethod, Layout, Module, Recompute, Schedule
from planner.model import ModelSpec
from planner.trainer import OVERLAPS, Trainer, load_trainer
from planner.workload import Workload

# ------------------------------------------------------------------------------------------------ the schema

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
_ROW: dict[str, Any] = {
    "model": _MODEL, "parallel": _PARALLEL, "batch": {"micro": _INT, "global": _INT}, "measured": _MEASURED,
    "layer_ms": {"forward": _NUMBER, "backward": _NUMBER, "combined": _NUMBER}, "precision": _TEXT, "optimizer": _TEXT,
    "recompute": _TEXT, "flash_attention": _BOOL, "tp_overlap": _BOOL, "grad_overlap": _BOOL, "compile": _BOOL,
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
    return [row for file in files for row in rows_from_dict(library.read_yaml(file), where=str(file), source=file.stem)]


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
        rows.append(Row(source=source or about["id"], hardware=hardware, framework=own, data=merged))
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
    else:
        good = isinstance(value, int if kind is _INT else (int, float)) and not isinstance(value, bool)
        good = good and 0 <= value < 1e15
    if not good:
        raise PlannerError(f"{where}: {key} is {_short(value)}; it must be {kind}, or null when not stated")
    return str(value) if kind is _TEXT else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------------------------ the run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, in base units; None = not measured."""

    step_time: float | None = None
    """Seconds of one optimizer step."""
    memory: float | None = None
    """Peak of one GPU, bytes."""
    memory_kind: str = ""
    """'allocated', 'reserved' or 'device'."""
    fits: bool | None = None
    """It ran (True) or ran out of GPU memory (False)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row in the planner's words; the first four are None when ``unsupported`` gives a reason."""

    source: str
    id: str
    family: str
    """Group of sources in the report."""
    stated: bool
    """The row states its model, its degrees and its batch."""
    representative: bool = True
    """The source itself does not call the run broken."""
    unsupported: str = ""
    """Why the planner cannot price it; '' = it can."""
    assumptions: tuple[str, ...] = ()
    """What was filled in because neither the row nor its framework says it."""
    workload: Workload | None = None
    cluster: Cluster | None = None
    trainer: Trainer | None = None
    layout: Layout | None = None
    measured: Measured = Measured()


class _UnsupportedError(Exception):
    """The reason why a row cannot be priced."""


def read_runs(paths: Sequence[str | Path] | None = None) -> list[Run]:
    """All rows of the paths (default: the shipped ones) as runs. Raises PlannerError for files that are broken."""
    return [to_run(row) for row in read_rows(paths)]


def to_run(row: Row) -> Run:
    """One row as a run, or with the reason why it is not supported; never raises for a row that was read."""
    missing, network = _missing(row), "not measured"
    try:
        hardware, network = _hardware(row)
        run = _map(row, hardware, missing)
    except _UnsupportedError as reason:
        run = {"unsupported": str(reason)}
    except PlannerError as error:
        run = {"unsupported": f"not a valid run: {error}"}
    broken = "before the pipeline fix" in row.notes
    family = _family(row, "before the pipeline fix" if broken else f"network {network}")
    return Run(source=row.source, id=row.id, family=family, stated=not missing, representative=not broken, **run)


_NEEDED = (
    "model.hidden", "model.layers", "model.heads", "model.seq", "parallel.tp", "parallel.pp", "batch.global",
    "batch.micro",
)  # fmt: skip


def _missing(row: Row) -> list[str]:
    """Fields without which a layout is not determined; what follows from the others does not count."""
    missing = [path for path in _NEEDED if not row.get(path)]
    if not row.get("model.ffn") and not row.get("model.moe_ffn"):
        missing.append("model.ffn")
    if (row.get("parallel.pp") or 1) > 1 and row.get("parallel.vpp") is None:
        missing.append("parallel.vpp")
    if row.get("model.gated") is None:
        missing.append("model.gated")
    if not row.get("parallel.gpus") and not row.get("parallel.dp"):
        missing.append("parallel.dp")
    if row.get("model.experts") and not row.get("parallel.ep"):
        missing.append("parallel.ep")
    return missing


def _map(row: Row, hardware: HardwareProfile, missing: list[str]) -> dict[str, Any]:
    """Fields of Run for a row that can be priced. Raises _UnsupportedError with the reason."""
    _refuse_unmodelled(row)
    entry, assumptions = _entry(row), list[str]()
    if entry.get("unknown"):
        assumptions.append(
            f"framework '{row.framework}' is not in profiles/frameworks.yaml: priced as {entry['trainer']}"
        )
    missing = [path for path in missing if path != "batch.micro"]
    if missing:
        kind = "model" if missing[0].startswith("model") else "layout"
        raise _UnsupportedError(f"{kind} not stated: {', '.join(path.partition('.')[2] for path in missing)}")
    model = _model_of(row, entry)
    layout = _layout(row, entry, model, assumptions)
    trainer = _trainer(row, entry)
    precision = _precision(row, entry)
    workload = Workload(
        model=model, sequence_length=row.get("model.seq"), global_batch_size=row.get("batch.global"),
        precision=precision, optimizer=_optimizer(row, assumptions), lora_rank=_lora_rank(row, entry),
    )  # fmt: skip
    hardware.peak(_peak_dtype(precision))
    measured = _measure(row, entry, workload, layout, hardware)
    if measured.step_time is None and measured.memory is None and measured.fits is None:
        raise _UnsupportedError("no step time, memory or out-of-memory result was published")
    cluster = Cluster(hardware=hardware, num_gpus=int(layout.num_gpus))
    return {
        "workload": workload, "cluster": cluster, "trainer": trainer, "layout": layout, "measured": measured,
        "assumptions": tuple(assumptions),
    }  # fmt: skip


_UNMODELLED = {
    r"hybrid \(Mamba|^nemotron-3|^nemotron-?h": "the model has Mamba layers, which the planner does not model",
    r"activation offload(ing|\b)": "activations of some layers wait in host memory without recompute; not modelled",
    r"full CPU offload|parameter offload Y|ZeRO-3 offload": "weights live in host memory, which is not modelled",
    r"does not fit \(host memory\)": "it ran out of host memory, not of GPU memory",
    r"for part of the micro-?batches": "recompute of a part of the microbatches is not modelled",
    r"full except attention output": "recompute that keeps the attention output is not modelled",
}  # fmt: skip

_ANY_UNMODELLED = re.compile("|".join(_UNMODELLED), re.IGNORECASE | re.MULTILINE)


def _refuse_unmodelled(row: Row) -> None:
    """Raises _UnsupportedError for what the cost model has no terms for."""
    text = "\n".join((row.notes, row.framework, str(row.get("model.name")), str(row.get("recompute"))))
    if _ANY_UNMODELLED.search(text):
        for pattern, reason in _UNMODELLED.items():
            if re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
                raise _UnsupportedError(reason)


# ------------------------------------------------------------------------------------------------ names


@cache
def _frameworks() -> dict[str, list[dict[str, Any]]]:
    """The table of frameworks, GPUs and families, its expressions compiled."""
    table = library.read_yaml(library.profiles_directory() / "frameworks.yaml")
    return {k: [{**entry, "match": re.compile(entry["match"], re.IGNORECASE)} for entry in v] for k, v in table.items()}


def _entry(row: Row) -> Mapping[str, Any]:
    """The facts about the row's framework. Raises _UnsupportedError."""
    texts = {"framework": row.framework, "notes": row.notes, "id": row.id, "source": row.source}
    for entry in _frameworks()["trainers"]:
        if entry["match"].search(texts[entry["in"]]):
            return entry
    raise _UnsupportedError(f"framework '{row.framework}' is not in profiles/frameworks.yaml")


def _family(row: Row, network: str) -> str:
    """Group of sources that the row belongs to; split by precision, model or network where the table says so."""
    found = _source_family(row.source)
    if found is None:
        return "other"
    split = found.get("split", "")
    low = "bf16" if row.get("precision") in (None, "bf16", "fp16") else "fp8"
    suffix = {"precision": low, "moe": "MoE" if row.get("model.experts") else low, "network": network}.get(split, "")
    return f"{found['family']} {suffix}".rstrip()


@cache
def _source_family(source: str) -> Mapping[str, Any] | None:
    return next((entry for entry in _frameworks()["families"] if entry["match"].search(source)), None)


def _hardware(row: Row) -> tuple[HardwareProfile, str]:
    """The profile with the row's node and network, and whether its network was 'normal', 'slow' or 'not measured'."""
    name = _gpu(str(row.hardware["gpu"]))
    per_node = row.hardware.get("gpus_per_node") or 0
    stated = _stated_bandwidth(str(row.hardware.get("inter_node") or ""), per_node)
    hardware = _node(name, per_node, stated)
    latency = _network_latency(row)
    share = _measured_share(row, hardware)
    if share is None:
        one_node = (row.get("parallel.gpus") or 0) <= hardware.scale_up_domain
        return _node(name, per_node, stated, latency), "normal" if one_node else "not measured"
    # Steps of 3 % keep the groups that are priced in one call few.
    step = math.floor(math.log(share) / math.log(1.03))
    bandwidth = min(hardware.network_bandwidth, hardware.network_bandwidth * 1.03**step)
    return _node(name, per_node, bandwidth, latency), "normal" if share >= 0.5 else "slow"


def _network_latency(row: Row) -> float:
    """Latencies of the framework's cluster over those of the profile; 1 where nothing is known."""
    try:
        return float(_entry(row).get("network_latency", 1.0))
    except _UnsupportedError:
        return 1.0


@cache
def _gpu(text: str) -> str:
    """Name of the profile of a GPU's text. Raises _UnsupportedError."""
    for entry in _frameworks()["hardware"]:
        if entry["match"].search(text):
            return str(entry["hardware"])
    profile = text.lower() if text.lower() in library.names("hardware") else profile_of(text)
    if profile is not None:
        return profile
    raise _UnsupportedError(f"GPU '{text}' is not in profiles/frameworks.yaml")


@cache
def _load_hardware(name: str) -> HardwareProfile:
    """A profile of the library, read once."""
    return load_hardware(name)


@cache
def _node(name: str, per_node: int, bandwidth: float | None, latency: float = 1.0) -> HardwareProfile:
    """A library profile with another node size (0 = its own) and network: bytes/s per GPU (None = its own), and what
    multiplies its latencies.

    A scale-up domain inside one box shrinks with the box; one that spans boxes (NVL72) stays.
    """
    profile = _load_hardware(name)
    changes: dict[str, Any] = {} if bandwidth is None else {"network_bandwidth": bandwidth}
    if per_node:
        inside = profile.scale_up_domain <= profile.gpus_per_node
        changes["scale_up_domain"] = min(profile.scale_up_domain, per_node) if inside else profile.scale_up_domain
        changes["gpus_per_node"] = per_node
    if latency != 1.0:
        changes["network_latency"] = profile.network_latency * latency
        changes["scale_out"] = {op: curve.stretched(latency) for op, curve in profile.scale_out.items()}
    return dataclasses.replace(profile, **changes)


_LINK = re.compile(r"(?:(\d+)x\s)?[^\d]*?(\d+(?:\.\d+)?) Gb/s([^;]*)")


def _stated_bandwidth(text: str, per_node: int) -> float | None:
    """Bytes/s per GPU from the text of a node's network, '8x NDR InfiniBand 400 Gb/s'; None when it has no number.

    Without a number of links and without 'per node' the figure is that of one adapter, and every GPU is given one.
    """
    match = _LINK.match(text)
    if match is None:
        return None
    links, rate = match.group(1), float(match.group(2)) * units.GIGA / 8
    if links is None and "per node" not in match.group(3):
        return rate
    return float(links or 1) * rate / max(per_node, 1)


_BENCH = re.compile(r"world AR/AG/RS ([\d.]+)/([\d.]+)/([\d.]+) GB/s")
_BENCH_SIZE = 2.0**30
"""Bytes per collective in the benchmark of the allocation; the source does not print it, large sizes hardly differ."""


def _measured_share(row: Row, hardware: HardwareProfile) -> float | None:
    """Part of its line rate that the network of this job reached, at most 1; None when not measured or not used.

    The notes give the bus bandwidth of all-gather and reduce-scatter over all ranks, measured by the job itself. In a
    ring over whole nodes each node's NICs carry that bandwidth together, so it stands for figure / gpus_per_node per
    GPU. It already contains protocol losses, which ``scale_out_time`` adds again: the share is therefore the measured
    over the modelled bus bandwidth of the same collective. All-reduce is left out (in-switch reduction).
    """
    match, n = _BENCH.search(row.notes), row.get("parallel.gpus") or 0
    if match is None or n <= hardware.gpus_per_node:
        return None
    figures = [float(match.group(2)), float(match.group(3))]
    if min(figures) <= 0:
        return None
    shares = []
    for op, figure in zip(("all_gather", "reduce_scatter"), figures, strict=True):
        time = float(hardware.scale_out_time(op, _BENCH_SIZE, float(n), hardware.gpus_per_node))
        shares.append(figure * units.GIGA / ((n - 1) / n * _BENCH_SIZE / time))
    return float(min(1.0, sum(shares) / len(shares)))


# ------------------------------------------------------------------------------------------------ model


@cache
def _presets() -> list[tuple[str, str]]:
    """(letters and digits of a name or alias, preset), longest first: the first prefix is the most specific."""
    known = {name: name for name in library.names("models")} | models.aliases()
    return sorted(((re.sub(r"\W", "", n.lower()), p) for n, p in known.items()), key=lambda pair: (-len(pair[0]), pair))


@cache
def _preset(name: str) -> ModelSpec | None:
    """The preset whose name begins the row's model name ('deepseek-v3-4layers'), if there is one."""
    plain = re.sub(r"\W", "", name.lower())
    found = next((preset for known, preset in _presets() if plain.startswith(known)), None)
    return models.load_model(found) if found else None


def _model_of(row: Row, entry: Mapping[str, Any]) -> ModelSpec:
    """The row's model; details that the schema has no field for come from the preset of that name, when sizes agree."""
    heads = row.get("model.heads")
    padded = re.search(r"padded to (\d+) \(TP 8\) or (\d+) \(TP 16\)", row.notes)
    if padded:
        heads = int(padded.group(1 if row.get("parallel.tp") == 8 else 2))
    elif heads % (row.get("parallel.tp") or 1):
        raise _UnsupportedError(f"{heads} heads do not divide by tp {row.get('parallel.tp')}; padding is not stated")
    mtp = bool(entry.get("mtp")) and "w/o MTP" not in row.notes
    return _build_model(tuple(sorted((*row.data["model"].items(), ("heads_run", heads)))), mtp, entry.get("position"))


@cache
def _build_model(items: tuple[tuple[str, Any], ...], mtp: bool, position: str | None) -> ModelSpec:
    m = dict(items)
    heads, kv_heads = m["heads_run"], m.get("kv_heads") or m["heads"]
    if heads != m["heads"]:
        kv_heads = heads if kv_heads == m["heads"] else kv_heads
    preset = _preset(m.get("name") or "")
    if preset and (preset.hidden_size, preset.num_heads) != (m["hidden"], heads):
        preset = None
    mla = m.get("attention") == "mla"
    if mla and (preset is None or not preset.is_mla):
        raise _UnsupportedError(f"model not stated: the MLA sizes of '{m.get('name')}'")
    base: dict[str, Any] = dataclasses.asdict(preset) if preset else _generic(m, position)
    base |= {
        "name": m.get("name") or "model", "num_layers": m["layers"], "hidden_size": m["hidden"], "num_heads": heads,
        "num_kv_heads": heads if mla else kv_heads, "ffn_size": m.get("ffn") or m.get("moe_ffn"), "gated": m["gated"],
        "max_sequence_length": m["seq"], "mtp_layers": base.get("mtp_layers", 0) if mtp else 0,
        "published_parameters": 0.0, "published_active_parameters": 0.0, "source": "",
    }  # fmt: skip
    if not mla:
        base["head_dim"] = m.get("head_dim") or (preset.head_dim if preset else m["hidden"] // heads)
    if m.get("tied_embeddings") is not None:
        base["tied_embeddings"] = m["tied_embeddings"]
    if base.get("position") == "learned":
        base["num_position_embeddings"] = m["seq"]
    base |= _experts(m, preset) | _window(m, preset)
    base["vocab_size"] = m.get("vocab") or _vocabulary(base, m)
    return ModelSpec(**base)


def _generic(m: Mapping[str, Any], position: str | None) -> dict[str, Any]:
    """Details of a model without a preset: GPT-type (plain MLP, one key head per query head), else Llama-type."""
    gpt = not m["gated"] and m.get("attention") in (None, "mha")
    return {
        "position": (position or "learned") if gpt else "rope", "norm": "rmsnorm" if m["gated"] else "layernorm",
        "activation": "silu" if m["gated"] else "gelu", "linear_bias": gpt, "tied_embeddings": gpt,
        "embedding_norm": position == "alibi" and gpt,
    }  # fmt: skip


def _experts(m: Mapping[str, Any], preset: ModelSpec | None) -> dict[str, Any]:
    if not m.get("experts"):
        plain = {"num_experts": 0, "top_k": 0, "expert_ffn_size": 0, "num_shared_experts": 0, "num_dense_layers": 0}
        return {**plain, "shared_expert_ffn_size": 0, "moe_layer_interval": 1}
    shared = m.get("shared_experts") or 0
    width = m.get("moe_ffn") or m.get("ffn")
    same = preset is not None and preset.num_shared_experts == shared
    return {
        "num_experts": m["experts"], "top_k": m.get("topk"), "expert_ffn_size": width, "num_shared_experts": shared,
        "shared_expert_ffn_size": preset.shared_expert_ffn_size if preset and same else shared * (width or 0),
        "num_dense_layers": m.get("dense_layers") or 0,
    }  # fmt: skip


def _window(m: Mapping[str, Any], preset: ModelSpec | None) -> dict[str, Any]:
    """Windowed layers: the preset's share of the layers; all of them when only a window is given."""
    window = m.get("window") or (preset.window if preset else 0)
    if not window:
        return {"window": 0, "num_windowed_layers": 0}
    share = preset.num_windowed_layers / preset.num_layers if preset and preset.window else 1.0
    return {"window": window, "num_windowed_layers": round(share * m["layers"])}


def _vocabulary(base: Mapping[str, Any], m: Mapping[str, Any]) -> int:
    """Vocabulary that is not stated, from the published parameters: V = (P - layers) / (h, or 2 h untied)."""
    if not m.get("params_b"):
        raise _UnsupportedError("model not stated: vocab")
    without = total_parameters(ModelSpec(**{**base, "vocab_size": 1}))
    tables = 1 if base.get("tied_embeddings") else 2
    vocabulary = round((m["params_b"] * units.GIGA - without) / (tables * m["hidden"]))
    if not 1000 <= vocabulary <= 300000:
        raise _UnsupportedError("model not stated: vocab, and the published parameters do not tell it")
    return int(vocabulary)


# ------------------------------------------------------------------------------------------------ layout


def _layout(row: Row, entry: Mapping[str, Any], model: ModelSpec, assumptions: list[str]) -> Layout:
    tp, pp, cp = row.get("parallel.tp"), row.get("parallel.pp"), row.get("parallel.cp") or 1
    ep, vpp = row.get("parallel.ep") or 1, row.get("parallel.vpp") or 1
    dp = row.get("parallel.dp") or max((row.get("parallel.gpus") or 0) // (tp * pp * cp), 1)
    gpus = row.get("parallel.gpus") or tp * pp * cp * dp
    if tp * pp * cp * dp != gpus:
        raise _UnsupportedError(f"tp {tp} times pp {pp} times cp {cp} times dp {dp} are not the {gpus} GPUs stated")
    micro, batch = row.get("batch.micro") or _micro(row, entry, dp, pp, assumptions), row.get("batch.global")
    steps = batch / (micro * dp)
    if steps < 1:
        raise _UnsupportedError(f"global batch {batch} is smaller than micro batch {micro} times dp {dp}")
    if steps != int(steps):
        assumptions.append(f"{steps:.4g} microbatches per replica, rounded up: the last one is smaller")
    etp = _expert_tp(row, entry, tp * cp * dp, ep) if model.is_moe else 1
    if model.is_moe and model.num_experts % ep:
        raise _UnsupportedError(f"{model.num_experts} experts do not divide by ep {ep}")
    if pp * vpp > model.num_layers + 2:
        raise _UnsupportedError(f"{pp} stages times vpp {vpp} are more than {model.num_layers} layers")
    return Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep if model.is_moe else 1, etp=etp, vpp=vpp, dp_shard=_shard(row, dp),
        micro_batch_size=micro, num_microbatches=math.ceil(steps), zero=_zero(row, entry),
        sequence_parallel=int(tp > 1 and _sequence_parallel(row, entry)), cp_method=_cp_method(row, entry),
        schedule=_schedule(row, pp, vpp, assumptions), offload_optimizer=_offload(row.notes),
        **_recompute(row, entry, pp), **_stage_layers(row, model, pp, vpp),
    )  # fmt: skip


def _micro(row: Row, entry: Mapping[str, Any], dp: int, pp: int, assumptions: list[str]) -> int:
    """A micro batch that is not stated: 1 where nothing else is possible, and in a pipeline, where it is the custom.

    Where the framework splits the batch of a replica into as many microbatches as there are stages: what that gives.
    """
    if row.get("batch.global") == dp:
        return 1
    if pp == 1:
        raise _UnsupportedError("layout not stated: micro")
    if entry.get("microbatches") == "pp" and (row.get("batch.global") or 0) % (dp * pp) == 0:
        return int(row.get("batch.global") // (dp * pp))
    assumptions.append("micro batch 1")
    return 1


def _expert_tp(row: Row, entry: Mapping[str, Any], ranks: int, ep: int) -> int:
    """Expert tensor parallel degree: stated, else the framework's default where it divides the ranks of a stage."""
    stated = row.get("parallel.etp")
    etp = stated or (row.get("parallel.tp") if entry.get("etp", 1) == "tp" else 1)
    if ranks % (etp * ep) and not stated:
        etp = 1
    if ranks % (etp * ep):
        raise _UnsupportedError(f"ep {ep} times etp {etp} does not divide the {ranks} ranks of a pipeline stage")
    return int(etp)


def _shard(row: Row, dp: int) -> int:
    """Ranks that share the states when fewer than dp; 0 = all."""
    shard = row.get("parallel.shard") or 0
    if shard and shard < dp and dp % shard:
        raise _UnsupportedError(f"a shard group of {shard} does not divide dp {dp}")
    return int(shard) if shard < dp else 0


def _zero(row: Row, entry: Mapping[str, Any]) -> int:
    zero = row.get("parallel.zero")
    zero = entry.get("zero", 0) if zero is None else zero
    if zero > 3:
        raise _UnsupportedError(f"zero {zero} does not exist; it is 0 to 3")
    return int(zero)


def _sequence_parallel(row: Row, entry: Mapping[str, Any]) -> bool:
    stated = row.get("parallel.sp")
    return bool(stated) if stated is not None else _load_trainer(entry["trainer"]).sequence_parallel == "always"


def _cp_method(row: Row, entry: Mapping[str, Any]) -> int:
    """Ulysses where the notes say so, a ring where they say so, else the trainer's first method."""
    if "Ulysses" in row.notes:
        return int(CpMethod.A2A)
    methods = _load_trainer(entry["trainer"]).cp_methods
    if "ring attention" in row.notes or not methods:
        return int(CpMethod.RING)
    return int({"ring": CpMethod.RING, "a2a": CpMethod.A2A, "allgather": CpMethod.ALLGATHER}[methods[0]])


def _schedule(row: Row, pp: int, vpp: int, assumptions: list[str]) -> int:
    match = re.search(r"schedule:? ([\w-]+)", row.notes)
    named = match.group(1).lower() if match else ""
    if pp == 1:
        return int(Schedule.ONE_F_ONE_B)
    if named == "zb-v":
        return int(Schedule.ZBV)
    if named == "zb-2p":
        # 2p keeps up to twice the microbatches in flight to close the bubble that H1 leaves; no term for it exists.
        assumptions.append("schedule zb-2p priced as zb_h1, which keeps fewer microbatches and leaves a small bubble")
    if named in ("zb-1p", "zb-2p"):
        return int(Schedule.ZB_H1)
    return int(Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B)


_MODULES = {
    "layernorm": Module.NORM, "norm": Module.NORM, "moe_act": Module.MLP_ACTIVATION, "mlp_act": Module.MLP_ACTIVATION,
    "mla_up_proj": Module.MLA_UP_PROJECTION, "mlp": Module.MLP, "moe": Module.MOE, "core_attn": Module.CORE_ATTENTION,
    "shared_experts": Module.SHARED_EXPERTS,
}  # fmt: skip


def _recompute(row: Row, entry: Mapping[str, Any], pp: int) -> dict[str, int]:
    """Mode, modules and layers of a text such as 'full', '10 layers full', 'selective: moe_act,layernorm'."""
    stated = row.get("recompute")
    text = str(entry.get("recompute", "none") if stated is None else stated).strip().lower()
    layers = re.fullmatch(r"(\d+) layers full", text)
    if layers:
        return {"recompute": Recompute.FULL, "recompute_layers": int(layers.group(1))}
    if text in ("none", "full"):
        return {"recompute": Recompute.FULL if text == "full" else Recompute.NONE}
    if text == "per-op selective" or (text == "selective" and "torchtitan" in row.framework):
        return {"recompute": Recompute.SELECTIVE, "recompute_modules": Module.EVERY_SECOND_MATMUL}
    if text == "selective":
        return {"recompute": Recompute.SELECTIVE, "recompute_modules": Module.CORE_ATTENTION}
    match = re.fullmatch(r"selective:\s*(.*)", re.sub(r"\([^)]*\)", "", text).strip())
    names = [name.strip() for name in match.group(1).split(",")] if match else [text]
    mask = 0
    for name in names:
        if match is None or name not in _MODULES:
            raise _UnsupportedError(f"recompute '{stated}' is not understood")
        mask |= _MODULES[name]
    return {"recompute": Recompute.SELECTIVE, "recompute_modules": mask}


def _stage_layers(row: Row, model: ModelSpec, pp: int, vpp: int) -> dict[str, int]:
    """Layers of the first and last stage: from the notes, else one fewer where embedding and head count as a layer."""
    if pp == 1:
        return {}
    last = re.search(r"last stage has (\d+) layer", row.notes)
    if last:
        return {"last_stage_layers": int(last.group(1))}
    printed = re.search(r"pp layout (\S+)", row.notes)
    chunks = _chunk_layers(printed.group(1)) if printed else []
    if len(chunks) == pp * vpp and sum(chunks) == model.num_layers:
        stages = [sum(chunks[rank::pp]) for rank in range(pp)]
        return {"first_stage_layers": stages[0], "last_stage_layers": stages[-1]}
    total = model.num_layers
    if total % pp and (total + 2) % (pp * vpp) == 0 and (total + 2) // pp > 1:
        return {"first_stage_layers": (total + 2) // pp - 1, "last_stage_layers": (total + 2) // pp - 1}
    return {}


def _chunk_layers(text: str) -> list[int]:
    """Transformer layers (t) of each chunk of Megatron's layout text: 'Et*2|(t*4|)*14tmL' -> [2, 4, ..., 4, 1]."""

    def repeat(match: re.Match[str]) -> str:
        return match.group(1) * min(int(match.group(2)), 1024)

    flat = re.sub(r"(\w)\*(\d+)", repeat, text)
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", repeat, flat)
    return [chunk.count("t") for chunk in flat.split("|")]


def _offload(notes: str) -> int:
    """Percent of the optimizer states on the host."""
    if re.search(r"CPU AdamW offload|optimizer offload Y|with optimizer offload", notes):
        return 100
    match = re.search(r"optimizer state offload to CPU, fraction (\d+) %", notes)
    return min(int(match.group(1)), 100) if match else 0


# ------------------------------------------------------------------------------------------------ trainer, workload


@cache
def _load_trainer(name: str) -> Trainer:
    """A trainer of the library, read once."""
    return load_trainer(name)


@cache
def _variant(name: str, changes: tuple[tuple[str, Any], ...], on: frozenset[str], off: frozenset[str]) -> Trainer:
    """A trainer with some fields replaced and some overlaps switched on or off."""
    trainer = _load_trainer(name)
    values = dict(changes)
    overlap = frozenset(values.pop("overlap", trainer.overlap))
    unfused = frozenset(values.pop("unfused", trainer.unfused))
    return trainer.replace(**values, unfused=unfused, overlap=(overlap | on) - off)


def _trainer(row: Row, entry: Mapping[str, Any]) -> Trainer:
    """The trainer with what the row says about kernels, overlap, graphs and compilation."""
    notes, on, off = row.notes, set[str](), set[str]()
    changes: dict[str, Any] = dict(entry.get("changes", {}))
    if row.get("compile") is False:
        changes |= entry.get("eager", {})
    if row.get("flash_attention") is not None:
        changes["attention"] = "flash" if row.get("flash_attention") else "unfused"
    if "RMS kernel" in notes:
        changes |= {"norm_passes": 1.0, "saved_norm_bytes": 2.0}
    if "flash_attentionv1" in notes:
        changes["attention_kernel"] = "fa1"
    if re.search(r"kernel: torch\b", notes):
        changes["unfused"] = [*changes.get("unfused", []), "softmax"]
    if "Liger kernels" in notes:  # head and loss run together in chunks of tokens: no logits of the whole batch
        changes |= {
            "logit_bytes": 0.0,
            **dict.fromkeys(("norm_passes", "loss_passes", "elementwise_passes", "rope_passes"), 1.0),
        }
    if "precision PURE" in notes:
        changes["gradient_reduce_bytes"] = 2.0
    graphs = re.search(r"cuda graphs (\w+)/(\[[^\]]*\]|\w+)", notes)
    if graphs:  # an implementation of 'none' captures nothing, whatever the scope says
        changes["cuda_graphs"] = graphs.group(1) != "none" and bool(re.search(r"'attn'|full", graphs.group(2)))
    elif re.search(r"(?<!no )CUDA graphs(?! router)", notes):
        changes["cuda_graphs"] = True
    if re.search(r"deep-?ep|hybrid-?ep", notes, re.IGNORECASE):
        changes["expert_dispatch"] = "deduplicated"
    switches = {"tp_overlap": entry.get("tp_overlap", ["tp"]), "grad_overlap": ["gradients", "parameters"]}
    for switch, names in switches.items():
        if row.get(switch) is not None:
            (on if row.get(switch) else off).update(names)
    if re.search(r"a2a overlap on|EP overlap( on|,|$)", notes):
        on.add("ep")
    if "CUDA_LAUNCH_BLOCKING=1" in notes:
        off.update(OVERLAPS)
    frozen = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in changes.items()))
    return _variant(entry["trainer"], frozen, frozenset(on), frozenset(off))


def _precision(row: Row, entry: Mapping[str, Any]) -> str:
    """Precision of the row; of fp8 the recipe in the notes, per-tensor scaling when they name none."""
    precision = row.get("precision") or entry.get("precision", "bf16")
    if precision == "fp8":
        if re.search(r"mxfp8", row.notes, re.IGNORECASE):
            return "mxfp8"
        return "fp8_block" if re.search(r"block-?wise|subchannel", row.notes, re.IGNORECASE) else "fp8"
    return str(precision)


def _optimizer(row: Row, assumptions: list[str]) -> str:
    text = str(row.get("optimizer") or "adam").lower()
    if "8-bit" in text or "8bit" in text:
        return "adam_8bit"
    if "muon" in text or "sgd" in text:
        return "muon" if "muon" in text else "sgd"
    if "adam" not in text:
        assumptions.append(f"optimizer {text} stores what Adam stores")
    return "adam"


def _lora_rank(row: Row, entry: Mapping[str, Any]) -> int:
    """Rank of the adapters; 0 = every weight is trained."""
    if not re.search(r"\bLoRA\b", row.notes):
        return 0
    rank = re.search(r"rank (\d+)", row.notes)
    return int(rank.group(1)) if rank else int(entry.get("lora_rank", 16))


# ------------------------------------------------------------------------------------------------ measured


def _matmul(model: ModelSpec) -> float:
    """Parameters that multiply each token: layers with the active experts, and the head; no embedding table."""
    return active_parameters(model, input_embedding=False)


def _core(model: ModelSpec, length: int) -> float:
    """FLOP per token of scores and their product with the values, whole square, 3 passes: 6 L s a (d + d_v)."""
    full = model.num_full_attention_layers * length + model.num_windowed_layers * min(2 * model.window, length)
    return 6.0 * full * model.num_heads * (model.head_dim + model.value_head_size)


def _narayanan(model: ModelSpec, length: int) -> float:
    h, layers = model.hidden_size, model.num_layers
    return 72.0 * layers * h * h * (1 + length / (6 * h)) + 6.0 * h * model.vocab_size


def _palm(model: ModelSpec, length: int) -> float:
    return 6.0 * active_parameters(model) + _core(model, length)


def _causal(model: ModelSpec, length: int) -> float:
    return 6.0 * _matmul(model) + _core(model, length) / 2


def _full(model: ModelSpec, length: int) -> float:
    return 6.0 * _matmul(model) + _core(model, length)


FORMULAS: dict[str, tuple[str, Callable[[ModelSpec, int], float]]] = {
    "narayanan": ("72 L h^2 (1 + s/6h + V/12Lh), recomputed 96 L h^2 (1 + s/6h + V/16Lh) [SC'21 eq. 3]", _narayanan),
    "palm": ("6 N + 12 L a d s, N active, with the embedding [PaLM, appendix B]", _palm),
    "causal": ("6 N_matmul + 6 L a d s: half of the attention square", _causal),
    "full": ("6 N_matmul + 12 L a d s: the whole attention square", _full),
}
"""FLOP per token behind a printed TFLOP/s or MFU, by name: the equation, and what it gives without recompute."""


def flop_per_token(formula: str, model: ModelSpec, length: int, *, recomputed: bool = False) -> float:
    """FLOP per token by a formula of FORMULAS. Full recompute adds a forward pass of the layers, a third of theirs."""
    flop = FORMULAS[formula][1](model, length)
    head = 6.0 * model.hidden_size * model.vocab_size
    return flop + (flop - head) / 3 if recomputed else flop


def _peak_dtype(precision: str) -> str:
    """Dtype whose peak an MFU refers to."""
    return {"mxfp8": "fp8", "fp8_block": "fp8", "fp16": "bf16", "nvfp4": "fp4"}.get(precision, precision)


def _step_seconds(
    row: Row, entry: Mapping[str, Any], workload: Workload, layout: Layout, hardware: HardwareProfile
) -> float | None:
    """Seconds per step: printed, from tokens/s, from TFLOP/s, or from MFU, in this order; 0 counts as not printed."""
    printed, speed = row.get("measured.step_s"), row.get("measured.tokens_per_s_per_gpu")
    if printed:
        return float(printed)
    tokens = workload.tokens / int(layout.num_gpus)
    if speed:
        return float(tokens / speed)
    rate, mfu = row.get("measured.tflops_per_gpu"), row.get("measured.mfu")
    if not rate and not mfu:
        return None
    counted = bool(rate) and str(row.get("measured.tflops_kind") or "").startswith("hardware")
    recomputed = counted and int(layout.recompute) == Recompute.FULL
    formula = str(entry.get("flops", "causal"))
    flop = flop_per_token(formula, workload.model, workload.sequence_length, recomputed=recomputed)
    if workload.lora_rank:
        flop *= 4.0 / 6.0  # no weight gradients of frozen weights
    flops = rate * units.TERA if rate else mfu * hardware.peak(_peak_dtype(workload.precision))
    return float(tokens * flop / flops)


def _measure(
    row: Row, entry: Mapping[str, Any], workload: Workload, layout: Layout, hardware: HardwareProfile
) -> Measured:
    step = _step_seconds(row, entry, workload, layout, hardware)
    memory, kind, oom = row.get("measured.mem_gb"), str(entry.get("memory", "allocated")), row.get("measured.oom")
    match = re.search(r"peak allocated|reserved (?=GiB)|nvidia-smi", row.notes)
    if match:
        kind = {"peak allocated": "allocated", "nvidia-smi": "device"}.get(match.group(0), "reserved")
    unit = units.GIGA if "GB = 1e9" in row.notes else units.GIB
    ran = bool(step or memory)
    return Measured(
        step_time=None if oom else step, memory=memory * unit if memory and not oom else None,
        memory_kind=kind if memory and not oom else "", fits=False if oom else True if ran else None,
    )  # fmt: skip
