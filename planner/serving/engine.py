"""What an engine (vLLM, SGLang, TensorRT-LLM) does, as data of its version: profiles/engines/<name>.yaml.

A file holds one list per fact, oldest first, each entry with the version that it holds from (``since``), the value and its source. An
engine of a version takes of each fact the last entry that is not newer. Facts that depend on the card or the tensor degree are
lists of cases, of which the first that holds counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np

from planner import library
from planner.arrays import Floats, NDArray
from planner.errors import PlannerError, UnknownNameError
from planner.hardware import HardwareProfile
from planner.schema import Bytes, Line, Name, Positive, Rule, Seconds, Text, check_keys, keys, one_of, read, within
from planner.serving.serving_layout import CACHES, ServingLayout

HOST = ("step", "sequence", "prefill_token", "first_token")
"""Host times: of one step; of one sequence in it; of one prompt token; of a request before its first token (client, tokeniser)."""
ADMITS = ("input", "all")
ACCOUNTS = ("share_of_total", "reserve", "share_of_free")
Count = Annotated[float, within(0, 1e9)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A value, and the card and layout that it is for."""

    value: float
    """Sequences, tokens, bytes or a share."""
    memory: Bytes = 0.0
    """Least memory of the device."""
    arch: tuple[Line, ...] = ()
    """Architectures of the device; empty = any."""
    never: tuple[Name, ...] = ()
    """Beginnings of names of devices that it is not for."""
    tp: Annotated[int, within(1, 1e6)] = 1
    """Least tensor degree as the engine counts it."""

    def suits(self, hardware: HardwareProfile) -> bool:
        """Whether it is for this device."""
        name = hardware.name.lower()
        right = not self.arch or hardware.arch in self.arch
        return right and hardware.usable_memory >= self.memory and not any(name.startswith(one) for one in self.never)


Cases = tuple[Case, ...]


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The engine's own all-reduce on one architecture: the largest message by number of GPUs."""

    arch: tuple[Line, ...] = ()
    """Architectures of the device; empty = any."""
    sizes: dict[str, Annotated[float, Rule(unit="bytes")]]
    """GPUs -> bytes."""


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """Batches for which a CUDA graph is captured."""

    grid: tuple[tuple[Count, Count], ...]
    """[from, step], ascending: sizes from ``from`` in steps of ``step`` until the next entry begins; a step of 0 doubles."""
    most: Cases
    """Largest size by card."""
    per_sequence: Positive = 1e9
    """The largest size is at most this times the largest batch of a rank."""
    own: bool = False
    """The largest size is captured itself where it is not on the grid."""

    def sizes(self, most: float) -> Floats:
        """All sizes up to ``most``."""
        found: list[float] = []
        ends = [one[0] for one in self.grid[1:]] + [most + 1.0]
        for (start, step), end in zip(self.grid, ends, strict=True):
            size = start
            while size < min(end, most + 1.0):
                found.append(size)
                size += step or size
        return np.unique(np.asarray([*found, *([most] if self.own else [])], dtype=np.float64))


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """How an engine decides on the room for its cache."""

    school: Annotated[str, one_of(ACCOUNTS)]
    """share_of_total: ``share`` of the memory less weights, peak and graphs (vLLM); reserve: all but a reserve computed from chunk, graphs
    and degrees (SGLang); share_of_free: ``share`` of what weights and the peak of a run leave (TensorRT-LLM)."""
    share: float = 0.0
    """Part of the memory, or of what is free."""
    graphs_inside: bool = False
    """Pools of graphs are taken out of the share; else they come out of what the share leaves."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine at one version. Rows and batches are those of one attention rank, unless a method says otherwise."""

    name: Name
    """vllm, sglang or trtllm."""
    version: str
    """As it was asked for; the newest known where none was."""
    note: str = ""
    """What was assumed of an unknown version."""
    vendors: tuple[Name, ...]
    """Of the devices it runs on."""
    max_batch: Cases
    """Default of the largest batch of an attention rank."""
    max_tokens: Cases
    """Default of the token budget of a step of an attention rank."""
    graphs: Graphs
    """CUDA graphs of decode."""
    all_reduce: tuple[Messages, ...]
    """Its own all-reduce; above: NCCL."""
    accounting: Accounting
    """Room of the cache."""
    mixes_prefill: bool
    """Prompts and decode share a step."""
    chunked_prefill: bool
    """Prompts are cut at the token budget by default."""
    prefix_cache: bool
    """Prefixes are kept by default."""
    admits: Annotated[str, one_of(ADMITS)]
    """all: a request enters when prompt and answer have room; input: when the prompt has, and sequences are pre-empted when it is full."""
    overlap_scheduler: bool
    """The host prepares a step while the GPU computes the one before."""
    host: Annotated[dict[str, Seconds], keys(HOST)]
    """Host times by name of HOST."""
    block_tokens: Count
    """Tokens of one block of the cache."""
    embedding: Annotated[str, one_of("split", "whole")] = "split"
    """Embedding table under attention data parallelism: split over tp, or whole on each rank."""
    fp8_cache_of: tuple[Name, ...] = ()
    """Formats of weights whose checkpoints get an fp8 cache by default."""
    sources: Mapping[str, str]
    """Fact -> where it was read, with the version it holds from."""

    def default_max_batch(self, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
        """Sequences in one step of one engine, over its attention ranks together."""
        return _of(self.max_batch, hardware, layout) * np.asarray(layout.attn_dp)

    def default_max_tokens(self, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
        """Token budget of one step of an attention rank."""
        return _of(self.max_tokens, hardware, layout)

    def largest_graph(self, layout: ServingLayout, hardware: HardwareProfile) -> Floats:
        """Largest captured batch of an attention rank."""
        rank = np.ceil(np.asarray(layout.max_batch) / np.asarray(layout.attn_dp))
        most = np.minimum(_of(self.graphs.most, hardware, layout), self.graphs.per_sequence * rank)
        if self.graphs.own:
            return most
        sizes = self.graphs.sizes(float(np.max(most)))
        return sizes[np.maximum(np.searchsorted(sizes, most, side="right") - 1, 0)]

    def captured(self, batch: object, layout: ServingLayout, hardware: HardwareProfile) -> NDArray[np.bool_]:
        """Where a decode batch of an attention rank runs inside a CUDA graph."""
        return np.asarray(batch) <= self.largest_graph(layout, hardware)  # type: ignore[no-any-return]

    def padded(self, batch: object, layout: ServingLayout, hardware: HardwareProfile) -> Floats:
        """A decode batch of an attention rank as the captured graphs pad it; as it is above the largest."""
        rows, largest = np.broadcast_arrays(np.asarray(batch, dtype=np.float64), self.largest_graph(layout, hardware))
        sizes = self.graphs.sizes(float(np.max(largest)))
        above = sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
        return np.where(rows <= largest, np.minimum(above, largest), rows)

    def all_reduce_limit(self, hardware: HardwareProfile, n: object) -> Floats:
        """Bytes up to which the engine's own all-reduce among ``n`` GPUs of a node is used; 0 where it has none."""
        table = next((one.sizes for one in self.all_reduce if not one.arch or hardware.arch in one.arch), {})
        gpus = np.asarray(n)
        found = np.zeros(gpus.shape)
        for number, size in table.items():
            found = np.where(gpus == int(number), size, found)
        return found

    def cache_dtype_default(self, weights: str) -> str:
        """Format of keys and values where none is asked for, by that of the weights."""
        if weights in self.fp8_cache_of:
            return "fp8"
        return weights if weights in CACHES and weights != "fp8" else "bf16"


def _of(cases: Cases, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
    """The value of the first case that holds; tp as the engine counts it: GPUs of a stage."""
    ranks = np.asarray(layout.ranks)
    found = np.full(ranks.shape, np.nan)
    for case in cases:
        if case.suits(hardware):
            found = np.where(np.isnan(found) & (ranks >= case.tp), case.value, found)
    return found


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One value of a fact from a version on."""

    since: Name
    """First version it holds for."""
    value: Any
    """As the field of Engine of the fact's name takes it."""
    source: Text
    """File and version where it was read."""


FACTS = tuple(
    name for name in Engine.__dataclass_fields__ if name not in ("name", "version", "note", "vendors", "sources")
)


def engine_names() -> list[str]:
    """All engines that are known."""
    return library.names("engines")


def load_engine(name: str) -> Engine:
    """An engine by "name" (its newest version) or "name@version".

    A version newer or older than those known takes the nearest, and the note says so. Raises UnknownNameError, PlannerError.
    """
    engine, _, version = name.strip().partition("@")
    if engine not in engine_names():
        raise UnknownNameError("engine", engine, engine_names())
    return _load(engine, version.strip())


@cache
def _load(name: str, version: str) -> Engine:
    path = library.find("engines", name)
    data = check_keys(library.read_yaml(path), ("name", "vendors", "newest", "oldest", "facts"), path.name)
    facts = check_keys(data["facts"], FACTS, f"{path.name}: facts")
    asked = _numbers(version) if version else _numbers(str(data["newest"]))
    if not asked:
        raise PlannerError(f"engine version '{version[:40]}' has no number; write {name}@{data['newest']}")
    note = ""
    if asked[:2] > _numbers(str(data["newest"]))[:2]:
        note = f"{name} {version} is not known; its defaults are those of {data['newest']}"
    elif asked < _numbers(str(data["oldest"])):
        note = f"{name} {version} is not known; its defaults are those of {data['oldest']}"
        asked = _numbers(str(data["oldest"]))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for fact, entries in facts.items():
        where = f"{path.name}: {fact}"
        history = [read(Entry, one, where) for one in entries]
        known = [one for one in history if _numbers(one.since) <= asked]
        if not known:
            raise PlannerError(f"{where}: no value for version {version}")
        values[fact], sources[fact] = known[-1].value, f"since {known[-1].since}: {known[-1].source}"
    whole = {
        "name": name, "version": version or str(data["newest"]), "note": note, "vendors": data["vendors"],
        "sources": sources, **values,
    }  # fmt: skip
    return read(Engine, whole, path.name)


def _numbers(version: str) -> tuple[int, ...]:
    """0.5.9.post1 -> (0, 5, 9); nothing where the text has no number with a dot."""
    found = re.search(r"\d+(?:\.\d+)+", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
