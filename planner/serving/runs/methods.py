"""What rows of serving runs leave unsaid about launches, devices and clients, from profiles/serving_methods.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from planner import library
from planner.hardware import HardwareProfile, load_hardware
from planner.record import record
from planner.serving.engine import Engine
from planner.serving.engine_facts import Case
from planner.serving.runs.run_schema import ServingRow
from planner.serving.serving_layout import WEIGHTS


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


@record
class Launch:
    """Flags that a server was started with, where they are known."""

    cache: str = ""
    """Format of the cache."""
    max_tokens: int | None = None
    """Token budget of a step; None = the engine's default."""
    receive: int = 1
    """Steps between two looks for new requests."""
    receive_spread: int = 1
    """Steps at most that attention data parallelism waits until every rank has a prompt."""
    hold: int = 0
    """Steps that prompts are held back from the first that waits on, without attention data parallelism."""
    grid: tuple[tuple[float, float], ...] = ()
    """Captured batches, as ``Graphs.grid``; () = the engine's own."""
    dependent: tuple[str, ...] = ()
    """Where kernels are launched ahead, as ``Graphs.dependent``; () = the engine's own."""
    held: int | None = None
    """Disaggregated: requests that all decode workers hold together; None = the engine's own limit."""
    prefill: tuple[int, int] = (0, 0)
    """Disaggregated: tokens and requests in a pass of a rank that computes prompts; 0 = as the other pool."""
    largest: int = 0
    """Largest captured batch of a rank, at most its batch limit; 0 = the engine's own."""
    waiting: tuple[str, ...] | None = None
    """Formats whose kernels wait for each other, as ``Graphs.waiting``, of those that the engine has; None = all of them."""
    arrivals: float = 0.0
    """Disaggregated: bytes/s of a cache that decodes stop for, as ``Shortfall.arrivals``; 0 = the engine's own."""
    chain: float = 0.0
    """Kernels of a mixture of experts, as ``Fusion.experts``; 0 = the engine's own."""
    overlap: bool | None = None
    """Whether the host prepares a step ahead; None = as the version does by default."""
    stand_in: bool = False
    """The engine's data stand for another one's, which loads its own kernels when it starts."""

    @property
    def changes(self) -> tuple[object, ...]:
        """What ``started`` changes: launches that agree in it start the same engine."""
        own = self.grid, self.dependent, self.overlap, self.largest, self.waiting
        return *own, self.arrivals, self.chain, self.stand_in

    def started(self, engine: Engine) -> Engine:
        """The engine with what these flags change of it."""
        own = engine.graphs
        graphs = replace(own, grid=self.grid or own.grid, dependent=self.dependent or own.dependent)
        if self.largest:
            graphs = replace(graphs, most=(Case(value=float(self.largest)),), per_sequence=1.0)
        if self.waiting is not None:
            graphs = replace(graphs, waiting={name: one for name, one in own.waiting.items() if name in self.waiting})
        fusion = engine.fusion
        if self.chain:
            fusion = replace(fusion, experts=dict.fromkeys(WEIGHTS, (Case(value=self.chain),)))
        overlap = engine.overlap_scheduler if self.overlap is None else self.overlap
        shortfall = engine.shortfall
        if self.arrivals:
            shortfall = replace(shortfall, arrivals=(Case(value=self.arrivals),))
        if self.stand_in:
            shortfall = replace(shortfall, start={})
        return replace(engine, graphs=graphs, fusion=fusion, shortfall=shortfall, overlap_scheduler=overlap)

    def in_pools(self, said: Mapping[str, Any]) -> Launch:
        """With what ``pools_of`` says of a disaggregated row."""
        tokens, requests = said.get("prefill", (0, 0))
        waiting = said.get("waiting")
        return replace(
            self,
            prefill=(int(tokens), int(requests)),
            largest=int(said.get("largest", 0)),
            waiting=None if waiting is None else tuple(waiting),
            arrivals=float(said.get("arrivals", 0.0)),
            chain=float(said.get("chain", 0.0)),
        )


def launch_of(row: ServingRow, engine: str, model: str, hardware: HardwareProfile) -> Launch:
    """Flags of a row, and those that the method of its source gives an engine: the first line of its settings that fits."""
    weights, flight = str(row.get("precision.weights") or ""), row.get("load.value") or 0.0
    lengths = tuple(row.get(f"load.{side}") for side in ("isl", "osl"))
    for one in method_of(row).get("settings", ()):
        fits = one["engine"] == engine and model.startswith(one.get("model", "")) and one.get("weights", "") in weights
        fits = fits and (row.get("parallel.tp") or 1) < one.get("below_tp", np.inf)
        fits = fits and one.get("stack", "") in str(row.get("engine.stack"))
        fits = fits and str(row.get("date")) >= str(one.get("since", ""))
        fits = fits and str(row.get("engine.version")).startswith(one.get("version", ""))
        fits = fits and ("until" not in one or str(row.get("date")) < str(one["until"]))
        if fits and hardware.arch.startswith(one.get("arch", "")) and lengths == tuple(one.get("lengths", lengths)):
            break
    else:
        one = {}
    tokens = one.get("max_tokens", 0)
    if "tokens_above" in one:  # on top of the prompt and a token of each sequence
        tokens = max(tokens, int(one["tokens_above"] + flight + (lengths[0] or 0)))
    tokens = int(one["prompts"] * (lengths[0] or 0)) if "prompts" in one else tokens
    receive = max((steps for least, steps in one.get("receive", ()) if flight >= least), default=1)
    return Launch(
        cache=one.get("kv", ""),
        max_tokens=row.get("load.max_tokens") or tokens or None,
        receive=receive,
        receive_spread=one.get("receive_spread", 1),
        hold=max((steps for least, steps in one.get("hold", ()) if flight >= least), default=0),
        grid=tuple((float(start), float(step)) for start, step in one.get("graphs", ())),
        dependent=tuple(one.get("dependent", ())),
        held=pools_of(row).get("holds", {}).get(flight),
        overlap=one.get("async"),
        stand_in=row.get("engine.name") in set(methods()["engines"]) - {"other"},
    )


def tensor_group(row: ServingRow) -> bool:
    """Whether the scripts of a row's source had no flag for data parallelism: what it calls that is a tensor group."""
    name, day = row.get("engine.name"), str(row.get("date"))
    return any(one["engine"] == name and day < str(one["until"]) for one in method_of(row).get("tensor", ()))


def pools_of(row: ServingRow, spread: tuple[bool, bool] = (False, False)) -> Mapping[str, Any]:
    """What the method of its source says of the two pools of a disaggregated row: of each fact the first line that fits.

    ``spread``: whether the workers for prompts, and those that decode, are attention data parallel.
    """
    said = {"stack": row.get("engine.stack"), "gpu": row.get("hardware.gpu"), "input": row.get("load.isl")}
    said |= {"spread_prefill": spread[0], "spread": spread[1]}
    lengths, weights = [row.get("load.isl"), row.get("load.osl")], str(row.get("precision.weights"))
    day, found = str(row.get("date")), dict[str, Any]()
    for one in method_of(row).get("pools", ()):
        fits = all(one.get(name, value) == value for name, value in said.items())
        fits = fits and one.get("weights", "") in weights and one.get("lengths", lengths) == lengths
        if fits and str(one.get("since", "")) <= day and ("until" not in one or day < str(one["until"])):
            found = {**one, **found}
    return found


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
