"""A published serving run as an estimate takes it: model, device, engine, format, layout, traffic; or why it cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.record import record
from planner.serving.runs.engine_of_row import EngineOf, Series, engine_of, stated_versions
from planner.serving.runs.layout_of_row import Split, split_of
from planner.serving.runs.littles_law import all_at_once, broken
from planner.serving.runs.memory_floor import impossible
from planner.serving.runs.methods import Launch, device, launch_of, method_of, methods, pools_of
from planner.serving.runs.run_models import formats, served_model
from planner.serving.runs.run_schema import ServingRow, read_serving_file
from planner.serving.traffic import Lengths, Speculation, Traffic

NOT_COUNTED = ("spec-unknown", "no-worker-counts", "replicas-unclear", "suspect", "same-measurement-in")
"""Beginnings of flags of rows that are predicted and not counted."""
OFFLINE_REQUESTS = 1500
"""Requests of an offline run that does not say how many: the number of most rows that do."""
MTP = Speculation(depth=1, acceptance=0.85)
"""Multi-token prediction that a row names without figures: one token ahead, 85 to 90 % accepted [DeepSeek-V3, section 5.4.3]."""


@record
class ServingRun:
    """One row, understood as far as possible."""

    row: ServingRow
    model: ModelSpec | None = None
    hardware: HardwareProfile | None = None
    engine: EngineOf | None = None
    formats: Mapping[str, str]
    """Fields of ``Precision`` that are known; without ``cache`` it is what the engine takes by itself."""
    split: Split
    launch: Launch = field(default_factory=Launch)
    """Flags of the server as the row or its method states them."""
    traffic: Traffic | None = None
    """Of a row of MLPerf with the lengths of its data set."""
    assumed: tuple[str, ...] = ()
    """What the row does not say and how it was filled."""
    impossible: str = ""
    """How its figures contradict physics; such a row is predicted and not counted."""
    unsupported: str = ""
    """Why it cannot be priced; '' = it can."""

    @property
    def id(self) -> str:
        """Its name within the file."""
        return self.row.id

    @property
    def source(self) -> str:
        """Name of the file."""
        return self.row.source

    @property
    def measured(self) -> Mapping[str, float]:
        """Figures by schema name."""
        return self.row.measured

    @cached_property
    def law(self) -> str:
        """How it breaks Little's law; '' = it holds, or cannot be checked."""
        return broken(self.row)

    @property
    def family(self) -> str:
        """Model x device x engine: what is left out as a whole, as neighbouring loads are near-copies."""
        model = self.model.name if self.model else str(self.row.get("model"))
        return f"{model} {self.row.get('hardware.gpu')} {self.row.get('engine.name')}"

    @property
    def kind(self) -> str:
        """closed, open, offline, static, disaggregated or mlperf."""
        if self.split.decode is not None:
            return "disaggregated"
        kind = str(self.row.get("load.kind"))
        names = {"concurrency": "closed", "rate": "offline" if self.row.get("load.value") == math.inf else "open"}
        return "mlperf" if kind.startswith("mlperf") else names.get(kind, kind)

    @property
    def moe(self) -> bool:
        """A mixture of experts."""
        return self.model is not None and self.model.is_moe

    @property
    def speculates(self) -> bool:
        """Draft tokens were on, or may have been."""
        return bool(self.traffic and self.traffic.speculation) or "spec-unknown" in self.row.flags

    @property
    def counts(self) -> bool:
        """In the figures of accuracy: its configuration is known and it is no copy of another row."""
        unsaid = self.row.get("load.kind") == "concurrency" and not self.row.get("load.value")
        unsaid = unsaid or 0 in (self.row.get("prefill.workers"), self.row.get("decode.workers"))
        return not (unsaid or self.impossible or any(flag.startswith(NOT_COUNTED) for flag in self.row.flags))

    @property
    def stated(self) -> bool:
        """Its configuration is stated: an answer is owed."""
        return self.counts and self.split.stated


def runs_of(rows: Iterable[ServingRow]) -> list[ServingRun]:
    """Every row as far as it is understood; what a row does not say, others of its series may."""
    every = list(rows)
    known = stated_versions(every)
    return [_run_of(row, known) for row in every]


def read_serving_runs(path: Path) -> list[ServingRun]:
    """Runs of one file. Raises PlannerError."""
    return runs_of(read_serving_file(path))


def _run_of(row: ServingRow, known: Mapping[Series, Sequence[tuple[date, str]]]) -> ServingRun:
    found: dict[str, Any] = {"formats": {}, "split": Split(stated=False)}
    assumed = [f"key {key} is not read" for key in row.unread]
    try:
        found["model"] = served_model(str(row.get("model")))
        taken = methods()["models"].get(str(row.get("model")).strip().lower())
        assumed += [f"model of the shape of {taken['preset']}"] if taken else []
        found["hardware"], said = device(str(row.get("hardware.gpu")))
        assumed += [said] if said else []
        found["engine"] = engine_of(row, known)
        found["launch"] = launch_of(row, found["engine"].name, found["model"].name, found["hardware"])
        cache = found["launch"].cache
        found["formats"] = ({"cache": cache} if cache else {}) | formats(row, found["model"], found["hardware"])
        found["split"] = split_of(row, found["model"], found["hardware"])
        pools = found["split"].prefill, found["split"].decode
        if pools[0] and pools[1]:
            said_of_pools = pools_of(row, (pools[0].attn_dp > 1, pools[1].attn_dp > 1))
            found["launch"] = found["launch"].in_pools(said_of_pools)
        found["traffic"], said = traffic_of(row, found["split"])
        first = found["split"].layouts[0] if len(found["split"].layouts) == 1 else None
        said_of = impossible(row, found["model"], found["hardware"], found["formats"]["weights"], first)
        found["impossible"] = said_of or all_at_once(row, found["traffic"].waves)
        assumed += [*found["engine"].assumed, *found["split"].assumed, *([said] if said else [])]
    except PlannerError as error:
        found["unsupported"] = str(error)
    return ServingRun(row=row, assumed=tuple(assumed), **found)


def traffic_of(row: ServingRow, split: Split) -> tuple[Traffic, str]:
    """Requests and how they arrive, and what was assumed. Raises PlannerError where lengths or load are missing."""
    kind, value, said = str(row.get("load.kind")), row.get("load.value"), ""
    own = _dataset(row)
    lengths = {side: _lengths(row, key, own) for side, key in (("input", "isl"), ("output", "osl"))}
    if kind.startswith("mlperf") or kind == "offline" or value == math.inf:
        requests = row.get("load.requests") or (value if value and value != math.inf else None)
        said = "mean length of inputs" if own else "" if requests else f"{OFFLINE_REQUESTS} requests"
        kind, value = "offline", float(requests or own.get("requests") or OFFLINE_REQUESTS)
    elif kind == "concurrency" and not value:
        value = _in_flight(row, split)
        said = f"{value:g} requests in flight, the batches of its ranks"
    if not value:
        raise PlannerError(f"load: {kind} without a value")
    hit = row.get("options").get("prefix_cache_hit")
    hit = float(hit) if isinstance(hit, (int, float)) and not isinstance(hit, bool) and 0 <= hit < 0.999 else 0.0
    speculation, pools = _speculation(row), pools_of(row)
    said = f"{said}, draft of one token, 85 % accepted".lstrip(", ") if speculation else said
    traffic = Traffic(
        **lengths,
        load=kind,
        value=float(value),
        prefix_hit=hit,
        speculation=speculation,
        waves=_waves(row, kind, value, pools),
        client=pools.get("client", method_of(row).get("client", "http")),
        stream=pools.get("stream", 0.0),
    )
    return traffic, said


def _speculation(row: ServingRow) -> Speculation | None:
    said = str(row.get("options").get("speculative") or "none").lower()
    return None if said in ("none", "off", "false") else MTP


def _waves(row: ServingRow, kind: str, value: float, pools: Mapping[str, Any]) -> float | None:
    """Requests sent over those in flight, as the row or the method of its source says."""
    if kind != "concurrency":
        return None
    requests = row.get("load.requests")
    waves = requests / value if requests else pools.get("waves", method_of(row).get("waves"))
    return None if waves is None else max(float(waves), 1.0)


def _in_flight(row: ServingRow, split: Split) -> float:
    """Requests in flight of a row that gives the batch of one rank."""
    batch = row.get("load.batch_per_rank")
    if batch and split.layouts:
        return float(batch * split.layouts[0].attn_dp * split.layouts[0].replicas)
    batch = row.get("decode.batch")
    return float(batch * split.decode.attn_dp * split.decode.replicas) if batch and split.decode else 0.0


def _dataset(row: ServingRow) -> Mapping[str, Any]:
    name = str(row.get("load.dataset") or "")
    return methods()["datasets"].get(name.removesuffix("-99").removesuffix("-99.9"), {})


def _lengths(row: ServingRow, key: str, dataset: Mapping[str, Any]) -> Lengths:
    """Fixed, uniform in [r x, x], or with the spread of a data set. Raises PlannerError."""
    mean, ratio = row.get(f"load.{key}") or dataset.get(key) or _from_rates(row, key), row.get("load.range_ratio")
    if not mean:
        named = row.get("load.dataset")
        raise PlannerError(f"load: {key} is not stated" + (f" and data set {named} is not known" if named else ""))
    if ratio is not None:
        return Lengths.uniform(max(ratio * mean, 1.0), mean)
    variation = dataset.get(f"{key}_variation", 0.0)
    longest = max(dataset.get(f"{key}_longest", mean), mean)
    return Lengths(mean=mean, squared=mean**2 * (1.0 + variation), longest=longest)


def _from_rates(row: ServingRow, key: str) -> float:
    """Mean tokens of a request from measured tokens/s over requests/s; 0 = not measured."""
    output, total, requests = (
        row.measured.get(name, 0.0) for name in ("tokens_per_s_total_output", "tokens_per_s_total", "request_per_s")
    )
    tokens = output if key == "osl" else total - output if total and output else 0.0
    return max(tokens / requests, 1.0) if requests and tokens > 0 else 0.0
