"""What an engine (vLLM, SGLang, TensorRT-LLM) does, as data of its version: profiles/engines/<name>.yaml.

A file holds one list per fact, oldest first, each entry with the version that it holds from (``since``), the value and its source.
An engine of a version takes of each fact the last entry that is not newer. Facts that depend on the card or on the number of GPUs
are lists of cases, of which the first that holds counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from typing import Annotated, Any

import numpy as np

from planner import library
from planner.arrays import Floats, NDArray
from planner.errors import PlannerError, UnknownNameError
from planner.hardware import HardwareProfile
from planner.record import record
from planner.schema import Name, Positive, Seconds, Text, check_keys, keys, one_of, read, value_of, within
from planner.serving.engine_facts import (
    DEGREES,
    FORMATS,
    GENERATIONS,
    HOST,
    HOST_WEIGHTS,
    KINDS,
    Accounting,
    Cases,
    Count,
    Fusion,
    Graphs,
    Messages,
    Reserve,
    Shortfall,
    by_card,
    generation,
    is_amd,
)
from planner.serving.serving_layout import ServingLayout


@record
class Engine:
    """One engine at one version. Rows and batches are those of one attention rank, unless a method says otherwise."""

    name: Name
    """vllm, sglang or trtllm."""
    version: str
    """As it was asked for; the newest known where none was."""
    note: str = ""
    """What was assumed of an unknown version."""
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
    reserve: Reserve = field(default_factory=Reserve)
    """What school "reserve" leaves free."""
    mixes_prefill: bool
    """Prompts and decode share a step."""
    chunked_prefill: bool
    """Prompts are cut at the token budget by default."""
    prefix_cache: bool
    """Prefixes are kept by default."""
    reserved_output: Annotated[float, within(0, 1)]
    """Part of the answer that must have room when a request is admitted: 1 = all, no sequence is ever pre-empted."""
    overlap_scheduler: bool
    """The host prepares a step while the GPU computes the one before."""
    host: Annotated[dict[str, Seconds], keys(HOST)]
    """Host times by name of HOST."""
    shortfall: Shortfall = field(default_factory=Shortfall)
    """Against the measured kernels."""
    block_tokens: Count
    """Tokens of one block of the cache."""
    frees_windows: bool
    """Layers with a window keep the window only; else they keep every token."""
    state_bytes: Positive
    """An element of the state of linear attention."""
    expert_tokens: Positive
    """Tokens that go through the experts at once at most."""
    early_remainder: bool
    """Layers that stages do not share evenly go to the first stages; else to those before the last, from behind."""
    fp8_cache_of: tuple[Name, ...] = ()
    """Formats of weights whose published checkpoints come with scales for an fp8 cache, which the engine then takes by default."""
    host_weights: Annotated[str, one_of(HOST_WEIGHTS)]
    """Weights in host memory: kernels read them over the link (streams), or the CPU computes their experts (computes)."""
    splits_blocks: bool
    """Scales of a block of 128 x 128 may be cut by the tensor degree."""
    degrees: tuple[Annotated[str, one_of(DEGREES)], ...]
    """Of DEGREES those that it has."""
    formats: Annotated[dict[str, tuple[Name, ...]], keys(FORMATS, required=False)]
    """Format -> the oldest generation of each vendor that runs it."""
    kinds: tuple[Annotated[str, one_of(KINDS)], ...]
    """Of KINDS those that it runs."""
    fusion: Fusion = field(default_factory=Fusion)
    """What kernels do beside their own work: quantise for the next, norms."""
    sources: Mapping[str, str]
    """Fact -> where it was read, with the version it holds from."""
    file: str = ""
    """A user's own file that it was read from: host times over those of a version; '' = as the library has it."""

    @property
    def label(self) -> str:
        """What plans call it: name@version, or the file."""
        return self.file or f"{self.name}@{self.version}"

    @property
    def vendors(self) -> tuple[str, ...]:
        """Of the devices that it has formats for."""
        generations = [one for least in self.formats.values() for one in least]
        return tuple(dict.fromkeys("AMD" if is_amd(one) else "NVIDIA" for one in generations))

    def fuses(self, weights: str, plain: bool, kernel: str) -> bool:
        """Whether this kernel of FUSING quantises the input of the product after it."""
        fused = self.fusion.quantised.get(weights)
        return fused is not None and (plain or fused.models == "all") and kernel in fused.kernels

    @property
    def admits(self) -> str:
        """all: a request enters when prompt and answer have room; input: when the prompt has, and sequences are pre-empted."""
        return "all" if self.reserved_output >= 1.0 else "input"

    def default_max_batch(self, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
        """Sequences in one step of one engine, over its attention ranks together."""
        return by_card(self.max_batch, hardware, layout.ranks) * np.asarray(layout.attn_dp)

    def default_max_tokens(self, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
        """Token budget of one step of an attention rank."""
        return by_card(self.max_tokens, hardware, layout.ranks)

    def largest_graph(self, layout: ServingLayout, hardware: HardwareProfile) -> Floats:
        """Largest captured batch of an attention rank."""
        rank = np.ceil(np.asarray(layout.max_batch) / np.asarray(layout.attn_dp))
        most = np.minimum(by_card(self.graphs.most, hardware, layout.ranks), self.graphs.per_sequence * rank)
        if self.graphs.own:
            return most
        sizes = self.graphs.sizes(float(np.max(most, initial=1.0)))
        return sizes[np.maximum(np.searchsorted(sizes, most, side="right") - 1, 0)]

    def number_of_graphs(self, layout: ServingLayout, hardware: HardwareProfile) -> Floats:
        """Captured batches."""
        most = self.largest_graph(layout, hardware)
        sizes = self.graphs.sizes(float(np.max(most, initial=1.0)))
        return np.asarray(np.searchsorted(sizes, most, side="right"), dtype=np.float64)

    def captured(self, batch: object, layout: ServingLayout, hardware: HardwareProfile) -> NDArray[np.bool_]:
        """Where a decode batch of an attention rank runs inside a CUDA graph."""
        return np.asarray(np.asarray(batch) <= self.largest_graph(layout, hardware))

    def padded(self, batch: object, layout: ServingLayout, hardware: HardwareProfile) -> Floats:
        """A decode batch of an attention rank as the captured graphs pad it; as it is above the largest."""
        rows, largest = np.broadcast_arrays(np.asarray(batch, dtype=np.float64), self.largest_graph(layout, hardware))
        sizes = self.graphs.sizes(2.0 * float(np.max(largest, initial=1.0)))
        above = sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
        return np.where(rows <= largest, np.minimum(above, largest), rows)

    def all_reduce_limit(self, hardware: HardwareProfile, n: object) -> Floats:
        """Bytes up to which the engine's own all-reduce among ``n`` GPUs of a node is used; 0 where it has none.

        More than two GPUs need a direct link between any two.  [vLLM and SGLang, custom_all_reduce.py: fully connected]
        """
        known = (hardware.arch, hardware.vendor)
        table = next(
            (one.sizes for one in self.all_reduce if not one.arch or any(name in one.arch for name in known)), {}
        )
        gpus = np.asarray(n)
        found = np.zeros(gpus.shape)
        for number, size in table.items():
            linked = int(number) <= max(hardware.scale_up_domain, 2)
            found = np.where((gpus == int(number)) & linked, size, found)
        return found

    def cache_dtype_default(self, weights: str) -> str:
        """Format of keys and values where none is asked for, by that of the weights."""
        if weights in self.fp8_cache_of:
            return "fp8"
        return weights if weights in ("bf16", "fp16") else "bf16"

    def prompt_rate(self, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
        """Rate of the kernels of prompts over that of the measured ones."""
        rate = by_card(self.shortfall.prompts, hardware, layout.ranks)
        return np.where(rate > 0.0, rate, 1.0)

    def spread_shortfall(self, hardware: HardwareProfile, layout: ServingLayout) -> Floats:
        """Seconds that a layer with experts takes longer than its kernels where attention is data parallel."""
        return np.where(np.asarray(layout.attn_dp) > 1, by_card(self.shortfall.spread, hardware, layout.ranks), 0.0)

    def start(self, hardware: HardwareProfile, layout: ServingLayout, weights: str) -> Floats:
        """Seconds that the first prompts of a server take longer."""
        return by_card(self.shortfall.start.get(weights, ()), hardware, layout.ranks)

    def product_rate(self, hardware: HardwareProfile, layout: ServingLayout, weights: str) -> Floats:
        """Rate of products of many rows in a format over that of the measured ones."""
        rate = by_card(self.shortfall.products.get(weights, ()), hardware, layout.ranks)
        return np.where(rate > 0.0, rate, 1.0)

    def runs(self, form: str, hardware: HardwareProfile) -> bool:
        """Whether a format of FORMATS runs on a device, natively or with weights that are expanded on the way."""
        return _is_since(self.formats.get(form, ()), hardware)

    def reduces_norms(self, hardware: HardwareProfile, plain: bool) -> bool:
        """Whether the all-reduce of a tensor group does the norm and the residual sum after it."""
        found = self.fusion.norms
        return (found.models == "all" or (plain and found.models == "plain")) and (
            not found.arch or generation(hardware) in found.arch
        )

    def overlaps_launches(self, hardware: HardwareProfile, weights: str) -> bool:
        """Whether kernels of layers of such weights are launched before the one before has ended: programmatic dependent launch."""
        waiting = generation(hardware) in self.graphs.waiting.get(weights, ())
        return not waiting and _is_since(self.graphs.dependent, hardware)


def _is_since(oldest: tuple[str, ...], hardware: HardwareProfile) -> bool:
    """Whether a device is of one of these generations or of a later one of its vendor."""
    own = generation(hardware)
    rank = GENERATIONS.index
    return any(one in GENERATIONS and is_amd(one) == is_amd(own) and rank(own) >= rank(one) for one in oldest if own)


@record
class Entry:
    """One value of a fact from a version on."""

    since: Name
    """First version it holds for."""
    value: Any
    """As the field of Engine of the fact's name takes it."""
    source: Text
    """File and version where it was read."""


VERSION_SIGNS = r"\d{1,4}(?:\.\d{1,4}){1,3}(?:(?:rc|\.post|a|b)\d{1,3})?"
"""A version of an engine, as its plans write it."""
NO_FACTS = ("name", "version", "note", "sources", "file")
FACTS = tuple(name for name in Engine.__dataclass_fields__ if name not in NO_FACTS)


def engine_names() -> list[str]:
    """All engines that are known."""
    return library.names("engines")


def load_engine(name: str) -> Engine:
    """An engine by "name" (its newest version), "name@version", or the path of a user's own YAML file.

    A version newer or older than those known takes the nearest, and the note says so. Raises UnknownNameError, PlannerError.
    """
    if library.is_file_name(name.strip()):
        return _own(name.strip())
    engine, _, version = name.strip().partition("@")
    if engine not in engine_names():
        raise UnknownNameError("engine", engine, engine_names())
    return _load(engine, _spelled(version.strip()))


def _spelled(version: str) -> str:
    """A version as plans write it, of what packages and images call it: v0.11.0, 0.11.0+cu128, 0.9.2.dev15 and latest."""
    found = re.search(VERSION_SIGNS, version)
    return found.group() if found else "" if version == "latest" else version


def _own(name: str) -> Engine:
    """A file of ``plan calibrate``: host times over those of the version that it extends. Raises PlannerError."""
    data = library.read_yaml(library.find("engines", name))
    data = dict(check_keys(data, ("extends", "host", "source"), name, required=("extends", "host")))
    base = value_of(Name, data["extends"], name, "extends")
    if library.is_file_name(base):
        raise PlannerError(f"{name}: it extends {base}; extend an engine of the library, like vllm@0.33")
    found = load_engine(base)
    stated = check_keys(data["host"], HOST, f"{name}: host")
    host = {**found.host, **{key: value_of(Seconds, one, f"{name}: host", key) for key, one in stated.items()}}
    source = value_of(Text, data.get("source", "the file itself"), name, "source")
    return replace(found, host=host, file=name, note=f"host times of {name}", sources={**found.sources, "host": source})


@cache
def _load(name: str, version: str) -> Engine:
    path = library.find("engines", name)
    data = check_keys(library.read_yaml(path), ("name", "newest", "oldest", "facts"), path.name)
    facts = check_keys(data["facts"], FACTS, f"{path.name}: facts")
    asked = _numbers(version) if version else _numbers(str(data["newest"]))
    if not asked:
        lacks = "is none like 1.2" if re.search(r"\d", version) else "has no number"
        raise PlannerError(f"engine version '{version[:40]}' {lacks}; write {name}@{data['newest']}")
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
        "name": name, "version": version or str(data["newest"]), "note": note,
        "sources": sources, **values,
    }  # fmt: skip
    return read(Engine, whole, path.name)


def _numbers(version: str) -> tuple[int, ...]:
    """0.5.9.post1 -> (0, 5, 9); nothing where the text has no number with a dot."""
    found = re.search(r"\d+(?:\.\d+)+", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
