"""What a user asks of serving, with its defaults said aloud: model, GPUs, engines, formats, traffic, limits and what is fixed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from planner.assumption import Assumption
from planner.costs import Rates, rates_of
from planner.errors import PlannerError, UnknownNameError, listed, shown
from planner.hardware import OVER, HardwareProfile, load_hardware
from planner.hardware.asked import hardware_asked
from planner.keywords import flag_of
from planner.model import ModelSpec, load_model
from planner.record import record
from planner.serving.engine import Engine, engine_names, load_engine
from planner.serving.priced_table import Task
from planner.serving.published import Published, alternatives, precision_text, published
from planner.serving.served import Served
from planner.serving.serving_inputs import (
    PERCENTILES,
    lengths_text,
    read_concurrency,
    read_lengths,
    read_rate,
    read_seconds,
    read_share,
    read_speculation,
)
from planner.serving.serving_layout import CACHES, WEIGHTS, Precision, ServingLayout
from planner.serving.serving_rules import longest_of, too_long
from planner.serving.traffic import Lengths, Limits, Traffic, longest_request
from planner.units import format_seconds, parse, plural

INPUT, OUTPUT = 2048.0, 256.0
"""Tokens where none are given: a chat with some context. [Azure's 2023 trace of conversations: 1,155 in, 211 out on average]"""
SPREAD = 0.2
"""Lengths said as one number vary by this part of it, as benchmarks draw them (InferenceX: 0.8 to 1 of the longest): equal
lengths keep requests in step with each other, which no traffic does."""
LARGEST_CLUSTER = 2**16
"""GPUs that a search is asked about at most."""
ANY_NUMBER = 1024
"""GPUs looked at where the question is how many are needed."""
PINNED = tuple(one.name for one in dataclasses.fields(ServingLayout))
WEIGHT_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "awq": "int4", "gptq": "int4", "w4a16": "int4", "w8a8": "int8",
    "fp4": "nvfp4",
    "fp8_e4m3": "fp8", "modelopt_fp8": "fp8", "modelopt_fp4": "nvfp4", "block_fp8": "fp8_block",
}  # fmt: skip
"""Formats by what engines call them."""
LOADS = ("concurrency", "rate", "offline", "static")


@record
class ServeRequest:
    """What a user said; None = not said."""

    model: str | ModelSpec | None = None
    gpus: int | None = None
    nodes: int | None = None
    hardware: str | None = None
    intra_node: str | None = None
    network_bandwidth: str | float | None = None
    engine: str | None = None
    weights: str | None = None
    cache: str | None = None
    input: Any = None
    output: Any = None
    ttft: Any = None
    tpot: Any = None
    percentile: str | None = None
    rate: Any = None
    concurrency: Any = None
    offline: Any = None
    """Requests that are all there from the start."""
    static: Any = None
    """One fixed batch."""
    prefix_hit: Any = None
    speculation: Any = None
    disaggregated: bool | None = None
    """Two pools alone (True), or none (False)."""
    price: float | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ServingLayout that are fixed."""
    prefill: str | None = None
    """The pool of prompts of a stated deployment, like tp=4,replicas=2."""
    fixed: Precision | None = None
    """A whole format, in place of ``weights`` and ``cache``."""
    any_number: bool = False
    """The number of GPUs is what is asked for."""


@record
class Question:
    """A request with its defaults."""

    model: ModelSpec
    hardware: HardwareProfile
    hardware_name: str
    engines: tuple[Engine, ...]
    precision: Precision
    """As published, or as asked for."""
    others: tuple[Precision, ...]
    """Quantised alternatives; none where a format is asked for."""
    task: Task
    disaggregated: bool | None
    rates: Rates
    assumptions: tuple[Assumption, ...]
    request: ServeRequest

    @property
    def gpus(self) -> int:
        """GPUs that may be used."""
        return self.task.gpus

    def served(self, precision: Precision | None = None) -> list[Served]:
        """The model behind every engine, in a format."""
        return [
            Served(model=self.model, hardware=self.hardware, engine=one, precision=precision or self._cached(one))
            for one in self.engines
        ]

    def _cached(self, engine: Engine) -> Precision:
        """The main format with the engine's own cache where none is asked for."""
        if self.request.cache is not None or self.request.fixed is not None:
            return self.precision
        return dataclasses.replace(self.precision, cache=engine.cache_dtype_default(self.precision.weights))


def ask(request: ServeRequest) -> Question:
    """Load what is named, choose what is not, and say so. Raises PlannerError."""
    assumed: list[Assumption] = []
    if request.model is None:
        raise PlannerError("which model? --model is missing")
    model = load_model(request.model) if isinstance(request.model, str) else request.model
    name = hardware_asked(request.hardware, assumed)
    if request.intra_node is not None:
        name = f"{name.partition(OVER)[0]}{OVER}{request.intra_node}"
    hardware = load_hardware(name)
    if request.network_bandwidth is not None:
        hardware = dataclasses.replace(hardware, network_bandwidth=_bandwidth(request.network_bandwidth))
    engines = _engines(request, assumed)
    precision, others = _precision(request, model, hardware, engines, assumed)
    limits = Limits(
        ttft=read_seconds(request.ttft, "--ttft"),
        tpot=read_seconds(request.tpot, "--tpot"),
        percentile=_percentile(request),
    )
    traffic, loaded = _traffic(request, model, assumed)
    task = Task(
        gpus=_gpus(request, hardware), traffic=traffic, loaded=loaded, limits=limits, pins=layout_pins(request.layout)
    )
    _require_room(task)
    return Question(
        model=model, hardware=hardware, hardware_name=name, engines=engines, precision=precision, others=others, task=task,
        disaggregated=request.disaggregated, rates=rates_of(hardware, price=request.price), assumptions=tuple(assumed),
        request=request,
    )  # fmt: skip


def layout_pins(said: Mapping[str, Any]) -> dict[str, int]:
    """Fields of a layout that were given. Raises PlannerError."""
    found = {}
    for name, value in said.items():
        if value is None:
            continue
        flag = flag_of(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
            raise PlannerError(f"{flag} is {shown(value)}; it must be a whole number from 1 to {2**20}")
        found[name] = value
    return found


def _gpus(request: ServeRequest, hardware: HardwareProfile) -> int:
    gpus = request.gpus
    if request.nodes is not None:
        counted = request.nodes * int(hardware.gpus_per_node)
        if gpus not in (None, counted):
            raise PlannerError(
                f"{request.nodes} nodes of {hardware.name} have {counted} GPUs, not {gpus}; leave --nodes or --gpus out"
            )
        gpus = counted
    if gpus is None:
        if not request.any_number:
            raise PlannerError("how many GPUs? --gpus is missing; with --rate, --fewest-gpus finds their number")
        return ANY_NUMBER
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= LARGEST_CLUSTER:
        raise PlannerError(f"--gpus is {shown(gpus)}; it must be a whole number from 1 to {LARGEST_CLUSTER}")
    return gpus


def _require_room(task: Task) -> None:
    """The degrees that are fixed fit on the GPUs."""
    names = [name for name in ("tp", "attn_dp", "pp", "replicas") if task.pins.get(name, 1) > 1]
    needed = math.prod(task.pins[name] for name in names)
    if needed > task.gpus:
        degrees = " x ".join(f"{name} {task.pins[name]}" for name in names)
        raise PlannerError(
            f"{degrees} needs {needed} GPUs and there are {task.gpus}; lower a degree, or give more --gpus"
        )


def _bandwidth(value: str | float) -> float:
    found = parse(value, "bytes/s", what="--network-bandwidth") if isinstance(value, str) else float(value)
    if found <= 0:
        raise PlannerError("--network-bandwidth must be above zero")
    return found


def _engines(request: ServeRequest, assumed: list[Assumption]) -> tuple[Engine, ...]:
    """Those named, separated by commas; all at their newest version where none is."""
    said = [one.strip() for one in (request.engine or "").split(",") if one.strip()]
    if not said:
        every = tuple(load_engine(one) for one in engine_names())
        text = ", ".join(f"{one.name} {one.version}" for one in every)
        assumed.append(Assumption("engines", text, "the newest versions known", "--engine NAME@VERSION"))
        return every
    names = {"tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "trt-llm": "trtllm", "trt_llm": "trtllm"}
    found: list[Engine] = []
    for one in said:
        name, at, version = one.lower().partition("@")
        engine = load_engine(one if one.endswith((".yaml", ".yml")) else f"{names.get(name, name)}{at}{version}")
        if engine.label in [other.label for other in found]:
            continue
        if engine.note:
            assumed.append(
                Assumption("engine", f"{engine.name} {engine.version}", engine.note, "--engine NAME@VERSION")
            )
        found.append(engine)
    return tuple(found)


def _precision(
    request: ServeRequest, model: ModelSpec, hardware: HardwareProfile, engines: Sequence[Engine], assumed: list[Assumption]
) -> tuple[Precision, tuple[Precision, ...]]:
    """The main format, and the quantised ones to compare it with."""
    if request.fixed is not None:
        said = {"weights": request.weights, "cache": request.cache}
        kept = {
            name: _format(text, WEIGHTS if name == "weights" else CACHES, f"--{name}")
            for name, text in said.items()
            if text
        }
        changed = {**kept, **({"experts": "", "attention": ""} if "weights" in kept else {})}
        return dataclasses.replace(request.fixed, **changed), ()
    usual = _loaded(published(model), hardware, engines)
    cache = None if request.cache is None else _format(request.cache, CACHES, "--cache")
    if request.weights is not None and request.weights != "auto":
        found = Precision(weights=_format(request.weights, WEIGHTS, "--weights"))
        return dataclasses.replace(found, cache=cache or found.cache), ()
    found = dataclasses.replace(usual.precision, cache=cache or usual.precision.cache)
    assumed.append(Assumption("weights", precision_text(usual.precision), usual.why, "--weights"))
    if cache is None:
        assumed.append(Assumption("cache", found.cache, "no flag: what engines take for these weights", "--cache fp8"))
    others = [one for one in alternatives(found, hardware) if cache is None or one.cache == cache]
    return found, tuple(others)


def _loaded(usual: Published, hardware: HardwareProfile, engines: Sequence[Engine]) -> Published:
    """The published format as engines load it: bf16 as fp16 on a device without bf16.  [vllm/config/model.py, _resolve_auto_dtype;
    sglang, maybe_downgrade_dtype_for_legacy_gpu]"""
    if usual.precision != Precision() or any(one.runs("bf16", hardware) for one in engines):
        return usual
    if not any(one.runs("fp16", hardware) for one in engines):
        return usual
    why = f"{hardware.name} has no bf16: engines load such weights as fp16 there"
    return dataclasses.replace(usual, precision=Precision(weights="fp16"), why=why)


def _format(text: str, known: tuple[str, ...], flag: str) -> str:
    name = str(text).strip().lower().replace("-", "_")
    name = WEIGHT_NAMES.get(name, name)
    if name == "auto":
        return "bf16"
    if name not in known:
        raise UnknownNameError(f"{flag} format", str(text), known)
    return name


def _percentile(request: ServeRequest) -> str:
    name = request.percentile or "mean"
    name = "p50" if name == "median" else name if name in PERCENTILES else f"p{name}"
    if name not in PERCENTILES:
        raise PlannerError(f"--percentile is {shown(request.percentile)}; it must be {listed(PERCENTILES)}")
    return name


def _lengths(request: ServeRequest, model: ModelSpec, assumed: list[Assumption]) -> dict[str, Lengths]:
    """Of ``input`` and ``output``: one number spreads around its mean as far as the context of the model allows."""
    asked: dict[str, Any] = {}
    for name, usual in (("input", INPUT), ("output", OUTPUT)):
        if getattr(request, name) is None:
            assumed.append(Assumption(name, f"{usual:.0f} tokens", "a chat with some context", f"--{name}"))
        asked[name] = usual if getattr(request, name) is None else getattr(request, name)
    exact = {name: read_lengths(said, f"--{name}") for name, said in asked.items()}
    mean = exact["input"].mean + exact["output"].mean
    spread = max(min(SPREAD, longest_of(model) / mean - 1.0), 0.0)
    lengths = {name: read_lengths(said, f"--{name}", spread) for name, said in asked.items()}
    if varied := [name for name in lengths if lengths[name] != exact[name]]:
        text = f"uniform, {1 - spread:.2g} to {1 + spread:.2g} times the mean"
        assumed.append(
            Assumption("lengths", text, "one number is a mean", ", ".join(f"--{name} fixed:N" for name in varied))
        )
    if lengths["output"].mean < 2.0:
        raise PlannerError(
            f"--output is {lengths['output'].mean:g} token; it must be 2 or more: an answer of one token has no "
            "time per output token"
        )
    if long := too_long(model, longest_request(lengths["input"], lengths["output"])):
        raise PlannerError(long)
    return lengths


def _traffic(request: ServeRequest, model: ModelSpec, assumed: list[Assumption]) -> tuple[Traffic, bool]:
    """Lengths and load; and whether a load was given."""
    lengths = _lengths(request, model, assumed)
    given = {name: getattr(request, name) for name in LOADS if getattr(request, name) is not None}
    if len(given) > 1:
        raise PlannerError(f"{' and '.join(f'--{name}' for name in given)} are two loads; give one")
    load, value = "concurrency", 1.0
    for load, said in given.items():
        value = read_rate(said) if load == "rate" else read_concurrency(said, f"--{load}")
    hit = 0.0 if request.prefix_hit is None else read_share(request.prefix_hit, "--prefix-hit")
    speculation = read_speculation(request.speculation)
    return Traffic(
        input=lengths["input"], output=lengths["output"], load=load, value=value, prefix_hit=hit, speculation=speculation
    ), bool(given)


def traffic_text(traffic: Traffic, loaded: bool) -> str:
    """Traffic in one line."""
    words = [f"{lengths_text(traffic.input)} tokens in", f"{lengths_text(traffic.output)} out"]
    if loaded:
        words.append({
            "concurrency": f"{plural(traffic.value, 'request')} in flight", "rate": f"{traffic.value:g} requests/s",
            "offline": f"{plural(traffic.value, 'request')} at once", "static": f"one batch of {traffic.value:,.0f}",
        }[traffic.load])  # fmt: skip
    words += [f"{100 * traffic.prefix_hit:g} % of prompts from the prefix cache"] if traffic.prefix_hit else []
    if one := traffic.speculation:
        words.append(f"{one.depth} tokens drafted of which each is accepted with {one.acceptance:g}")
    return ", ".join(words)


def limits_text(limits: Limits) -> str:
    """Limits in one line; '' without any."""
    said = [
        f"{name} at most {format_seconds(value)}"
        for name, value in (("TTFT", limits.ttft), ("TPOT", limits.tpot))
        if math.isfinite(value)
    ]
    return f"{' and '.join(said)} ({limits.percentile})" if said else ""
