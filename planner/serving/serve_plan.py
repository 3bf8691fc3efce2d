"""Serve plan: a deployment with its traffic, its estimate and what was assumed; to YAML and back.

    planner_serve_plan: 1
    model: {...}                      # as in the plan of a training
    hardware: h100-sxm
    gpus: 8
    engine: vllm@0.33
    precision: {weights: fp8, cache: fp8}
    layout: {tp: 4, replicas: 2}      # of the decode pool where there is a prefill pool; what is left out is the default
    prefill: null                     # or the layout of a pool that computes prompts alone
    traffic: {input: 2048, output: [205, 256], load: concurrency, value: 64}
    limits: {ttft: 0.5, percentile: p99}
    options: {memory_share: 0.9}
    estimate: {...}
    why: ...
    assumptions: [...]

Lengths are a number (all equal), two (uniform between them), or a mapping of mean, squared and longest. Seconds everywhere.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from planner import library
from planner import model as models
from planner.assumption import Assumption
from planner.errors import PlannerError
from planner.model import ModelSpec
from planner.record import record
from planner.schema import (
    Count,
    Name,
    Number,
    Rule,
    Text,
    check,
    check_keys,
    keys,
    one_of,
    plain,
    plain_fields,
    read,
    value_of,
    within,
)
from planner.serving.engine import VERSION_SIGNS, load_engine
from planner.serving.result import Quantiles, ServingEstimate, ServingMemory, StepTime
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.traffic import Lengths, Limits, Traffic, longest_request
from planner.units import GIB

KIND = "serve_plan"
VERSION = 1
"""Format of serve plans. A file of another format is refused."""
ENGINES = ("vllm", "sglang", "trtllm")
FIGURES = tuple(one.name for one in fields(Quantiles))
"""mean, p50, p90, p99."""
LATENCIES = ("ttft", "tpot", "itl", "e2e")
STEP_PARTS = tuple(one.name for one in fields(StepTime))
MEMORY_PARTS = ("weights", "draft", "activations", "graphs", "reserve", "cache")
RANGED = (*LATENCIES, "requests_per_second", "output_tokens_per_second", "total_tokens_per_second")
"""Quantities that may have an interval; of latencies that of the mean."""
Figure = Number | None
"""None: it has no end, as a queue that grows for ever."""
EngineName = Annotated[
    str,
    Rule(
        signs=re.compile(
            rf"({'|'.join(ENGINES)})(@{VERSION_SIGNS})?|[\w./ +-]{{1,200}}\.ya?ml"
        ),
        says=f"one of {', '.join(ENGINES)}, with @ and a version if one is meant, like vllm@0.33; or a YAML file",
    ),
]


@record
class EngineOptions:
    """What the engine is given other than its default; None = its default."""

    memory_share: Annotated[float, within(0.01, 1.0)] | None = None
    """Share of device memory in the engine's own sense: vLLM of the total, SGLang weights and cache of the total, TensorRT-LLM
    of what is free."""
    max_length: Annotated[int, within(2, 1e8)] | None = None
    """Tokens of a sequence, prompt and answer, at most."""
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    eager: bool = False
    """No CUDA graphs."""

    def __post_init__(self) -> None:
        check(self)


@record
class ServePrediction:
    """An estimate of one deployment as plain numbers."""

    ttft_s: Annotated[dict[str, Figure], keys(FIGURES)]
    """Time to first token."""
    tpot_s: Annotated[dict[str, Figure], keys(FIGURES)]
    """Time per output token after the first."""
    itl_s: Annotated[dict[str, Figure], keys(FIGURES)]
    """Gap between two tokens."""
    e2e_s: Annotated[dict[str, Figure], keys(FIGURES)]
    """Whole request."""
    requests_per_second: Number
    output_tokens_per_second: Number
    total_tokens_per_second: Number
    running: Figure
    """Sequences that one engine decodes at once, mean."""
    waiting: Figure
    """Requests that wait at one engine, mean."""
    step_s: Annotated[dict[str, Number], keys(STEP_PARTS)]
    """The mean decode step by part."""
    memory_gib: Annotated[dict[str, Number], keys(MEMORY_PARTS)]
    """GiB of the fullest GPU by part."""
    memory_limit_gib: Number
    """What the runtime reports as usable."""
    cache_tokens: Number
    """Tokens that the cache of one engine holds."""
    max_concurrency: Number
    """Requests of this length that the cache of the whole deployment holds at once."""
    preemption: Number
    """Chance that a step finds the cache full."""
    saturated: bool
    fits: bool
    ranges: Annotated[dict[str, tuple[Number, Number]], keys(RANGED, required=False)] | None = None
    """Nine of ten measured runs lie within."""
    ranges_basis: str = ""
    """Which runs those were."""

    @property
    def memory_peak_gib(self) -> float:
        """What the engine takes of the fullest GPU, or would take: a cache below zero is what is missing."""
        return sum(size for size in self.memory_gib.values() if size > 0)

    def latency(self, name: str, figure: str = "mean") -> float:
        """Seconds of one of LATENCIES; infinite where it has no end."""
        value = getattr(self, f"{name}_s")[figure]
        return math.inf if value is None else float(value)


def _at(value: Any, index: int) -> float:
    """One candidate of a column; a number stands for all."""
    column = np.asarray(value, dtype=np.float64)
    return float(column if column.ndim == 0 else column[index])


def _figure(value: Any, index: int) -> float | None:
    found = _at(value, index)
    return found if math.isfinite(found) else None


def predict_serving(
    found: ServingEstimate,
    index: int = 0,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    ranges_basis: str = "",
) -> ServePrediction:
    """Plain numbers of one candidate of an estimate; ``ranges`` of some of RANGED, seconds and rates."""
    memory: ServingMemory = found.memory
    return ServePrediction(
        **{f"{name}_s": {one: _figure(getattr(found, name).of(one), index) for one in FIGURES} for name in LATENCIES},
        requests_per_second=_at(found.requests_per_second, index),
        output_tokens_per_second=_at(found.output_tokens_per_second, index),
        total_tokens_per_second=_at(found.total_tokens_per_second, index),
        running=_figure(found.running, index),
        waiting=_figure(found.waiting, index),
        step_s={name: _at(getattr(found.step, name), index) for name in STEP_PARTS},
        memory_gib={name: _at(getattr(memory, name), index) / GIB for name in MEMORY_PARTS},
        memory_limit_gib=_at(memory.usable, index) / GIB,
        cache_tokens=_at(memory.capacity, index),
        max_concurrency=_at(found.max_concurrency, index),
        preemption=_at(found.preemption, index),
        saturated=bool(_at(found.saturated, index)),
        fits=bool(_at(found.fits, index)),
        ranges=None if ranges is None else {name: (float(low), float(high)) for name, (low, high) in ranges.items()},
        ranges_basis=ranges_basis,
    )


@record
class ServeStage:
    """One pipeline stage of a deployment whose stages stand on several kinds of nodes."""

    kind: Name
    """Nodes of the cluster file."""
    hardware: Name
    """Library name or path of their profile."""
    layers: Count
    gpus_per_node: Count
    usd_per_gpu_hour: Number | None = None
    link_bandwidth: Number | None = None
    """Bytes/s to the next stage where that is of another kind, of all engines together; None = only their own cards bound it."""
    link_latency: Number = 0.0
    """Seconds, one way."""


@record
class ServePlan:
    """One deployment of one model, with everything needed to price, export or measure it again."""

    model: ModelSpec
    hardware: Name
    """Library name or path of the hardware profile."""
    gpus: Count
    """GPUs that were asked for; the layout may leave some idle."""
    engine: EngineName
    """Engine and version, like vllm@0.33."""
    precision: Precision
    layout: ServingLayout
    """Aggregated: of the whole deployment. Disaggregated: of the decode pool."""
    traffic: Traffic
    prefill: ServingLayout | None = None
    """Disaggregated: of the pool that computes the prompts."""
    limits: Limits = field(default_factory=Limits)
    options: EngineOptions = field(default_factory=EngineOptions)
    prediction: ServePrediction | None = None
    """None in a plan that was read from a command line and not priced yet."""
    assumptions: tuple[Assumption, ...] = ()
    why: Text = ""
    """Why this layout and not the next."""
    chosen_for: Annotated[str, one_of("", "offline", "balanced", "interactive", "limits")] = ""
    """What the load was chosen for by a search; empty: it was asked for."""
    stages: tuple[ServeStage, ...] = ()
    """Of each engine, first stage first, where they stand on several kinds; empty: all on ``hardware``, cut by the engine."""

    def __post_init__(self) -> None:
        if self.limits.percentile not in FIGURES:
            raise PlannerError(f"percentile is {self.limits.percentile!r}; it must be one of {', '.join(FIGURES)}")
        for name, layout in self.pools().items():
            if any(not isinstance(value, (int, np.integer)) for value in vars(layout).values()):
                raise PlannerError(f"the {name} layout holds columns; a plan holds one deployment")
        held = sum(one.layers for one in self.stages)
        if self.stages and (len(self.stages) != self.layout.pp or held != self.model.num_layers or self.prefill is not None):
            raise PlannerError(
                f"the {len(self.stages)} stages hold {held} layers; they must be the {self.layout.pp} of one pool with all "
                f"{self.model.num_layers}"
            )
        if self.num_gpus > self.gpus:
            parts = " + ".join(str(one.num_gpus) for one in self.pools().values())
            raise PlannerError(
                f"the layout takes {parts} GPUs, the plan has {self.gpus}; give it more, or fewer replicas"
            )

    def pools(self) -> dict[str, ServingLayout]:
        """Layouts by what they do: {'both': ...}, or {'prefill': ..., 'decode': ...}."""
        return {"both": self.layout} if self.prefill is None else {"prefill": self.prefill, "decode": self.layout}

    @property
    def num_gpus(self) -> int:
        """GPUs that the layout takes, all pools and replicas."""
        return sum(int(one.num_gpus) for one in self.pools().values())

    @property
    def hardware_text(self) -> str:
        """The kinds of GPU in words."""
        return " and ".join(dict.fromkeys(one.hardware for one in self.stages)) or self.hardware

    def require_one_kind(self, what: str) -> None:
        """Raise PlannerError for stages on several kinds, which ``what`` does not take."""
        if self.stages:
            raise PlannerError(f"{what} takes deployments on one kind of GPU; ask 'plan serve --cluster' again for this one")

    @property
    def engine_name(self) -> str:
        """The engine without its version."""
        return load_engine(self.engine).name if self.engine.endswith((".yaml", ".yml")) else self.engine.partition("@")[0]

    @property
    def keeps_up(self) -> bool:
        """No more arrives than leaves."""
        assert self.prediction is not None
        return self.traffic.load != "rate" or not self.prediction.saturated

    @property
    def keeps_limits(self) -> bool:
        """It starts, keeps up, and keeps its limits."""
        found, limits = self.prediction, self.limits
        assert found is not None
        ttft, tpot = (found.latency(name, limits.percentile) for name in ("ttft", "tpot"))
        return found.fits and self.keeps_up and ttft <= limits.ttft and tpot <= limits.tpot

    @property
    def longest(self) -> int:
        """Tokens that a sequence may grow to: what the engine is given, or the longest prompt and answer."""
        return self.options.max_length or longest_request(self.traffic.input, self.traffic.output)

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the form of a serve plan."""
        return {
            f"planner_{KIND}": VERSION,
            "model": models.to_dict(self.model),
            "hardware": self.hardware,
            "gpus": self.gpus,
            "engine": self.engine,
            "precision": plain(self.precision),
            "layout": _layout_data(self.layout),
            "prefill": None if self.prefill is None else _layout_data(self.prefill),
            "traffic": {
                **plain_fields(self.traffic),
                "input": lengths_data(self.traffic.input),
                "output": lengths_data(self.traffic.output),
            },
            "limits": plain_fields(self.limits),
            "options": plain_fields(self.options),
            "estimate": None if self.prediction is None else plain(self.prediction),
            "why": self.why,
            "chosen_for": self.chosen_for,
            "assumptions": plain(self.assumptions),
            **({"stages": plain(self.stages)} if self.stages else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "serve plan") -> "ServePlan":
        """A serve plan from plain data. Raises PlannerError with the place, the key and what would be right."""
        version = library.version_of(data, KIND, VERSION, where=where)
        known = (f"planner_{KIND}", *(one.name if one.name != "prediction" else "estimate" for one in fields(cls)))
        needed = ("model", "hardware", "gpus", "engine", "precision", "layout", "traffic")
        found = dict(check_keys(data, known, where, required=needed, hint="; the file is damaged or cut off"))
        del found[f"planner_{KIND}"], version
        found["model"] = models.from_dict(found["model"], where=f"{where}: model")
        found["traffic"] = traffic_from(found["traffic"], f"{where}: traffic")
        for name in ("layout", "prefill"):
            if found.get(name) is not None or name == "layout":
                found[name] = layout_from(found[name], f"{where}: {name}")
        if "estimate" in found:
            found["prediction"] = value_of(ServePrediction | None, found.pop("estimate"), where, "estimate")
        return read(cls, found, where)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        library.write_whole(path, library.dump_yaml(self.to_dict()))


def load_serve_plan(path: Path) -> ServePlan:
    """Read a serve plan. Raises PlannerError with file and key when it is damaged, or newer than this planner."""
    return ServePlan.from_dict(library.read_yaml(path), where=str(path))


def traffic_from(data: object, where: str) -> Traffic:
    """Traffic from plain data, its lengths in any of their forms. Raises PlannerError."""
    found = dict(check_keys(data, [one.name for one in fields(Traffic)], where, required=("input", "output")))
    for name in ("input", "output"):
        found[name] = lengths_from(found[name], f"{where}: {name}")
    return read(Traffic, found, where)


def lengths_from(data: object, where: str) -> Lengths:
    """Lengths from a number, two numbers, or mean, squared and longest. Raises PlannerError."""
    if isinstance(data, Mapping):
        return read(Lengths, data, where)
    ends: list[Any] = list(data) if isinstance(data, (list, tuple)) else [data, data]
    if len(ends) != 2 or any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in ends):
        raise PlannerError(
            f"{where}: give a number of tokens, the smallest and the largest, or mean, squared and longest"
        )
    low, high = ends
    if not 1 <= low <= high <= 1e8:
        raise PlannerError(f"{where}: lengths go from {low} to {high}; they must rise, from 1 to 1e8 tokens")
    return Lengths.fixed(low) if low == high else Lengths.uniform(low, high)


def uniform_ends(lengths: Lengths) -> tuple[float, float] | None:
    """Smallest and largest of lengths that are all equal or uniform; None of any other distribution."""
    low, high = 2.0 * lengths.mean - lengths.longest, lengths.longest
    squared = (low**2 + low * high + high**2) / 3.0
    return (low, high) if low >= 1 and abs(squared / lengths.squared - 1.0) < 1e-6 else None


def lengths_data(lengths: Lengths) -> Any:
    """Lengths in the shortest of their forms."""
    ends = uniform_ends(lengths)
    if ends is None:
        return plain(lengths)
    whole = [int(one) if one == int(one) else one for one in ends]
    return whole[0] if whole[0] == whole[1] else whole


def layout_from(data: object, where: str) -> ServingLayout:
    """One layout from a mapping of its fields. Raises PlannerError."""
    found = check_keys(data, [one.name for one in fields(ServingLayout)], where)
    return ServingLayout(**{name: value_of(_DEGREE, value, where, name) for name, value in found.items()})


_DEGREE = Annotated[int, within(1, 1e8)]


def _layout_data(layout: ServingLayout) -> dict[str, int]:
    return {name: int(value) for name, value in vars(layout).items()}
