"""A file that starts servers, with what the user adds to it, as a serve plan."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from planner.assumption import Assumption
from planner.errors import PlannerError, shown
from planner.hardware import load_hardware
from planner.model import ModelSpec, load_model
from planner.record import record
from planner.serving.engine import Engine, load_engine
from planner.serving.readback.server_commands import FORM, Found, Server, find_servers
from planner.serving.readback.server_layouts import Stated, stated_by, weights_of
from planner.serving.serve_plan import EngineOptions, ServePlan
from planner.serving.serving_layout import CACHES, WEIGHTS, Precision, ServingLayout
from planner.serving.serving_rules import usual_batch, violations
from planner.serving.traffic import Lengths, Speculation, Traffic
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import read_text

ASKED = ("acceptance", "draft_parameters", "weights")
"""What --set answers that is no setting of an engine."""
DEFAULT_HARDWARE = "h100-sxm"
DEFAULT_INPUT, DEFAULT_OUTPUT, DEFAULT_CONCURRENCY = 1024, 256, 32
"""Load of a server whose file says none: stated as assumptions."""


@record
class ServeSaid:
    """What the user adds to the file; None = not said."""

    model: str | None = None
    hardware: str | None = None
    gpus: int | None = None
    engine: str | None = None
    """Engine with its version, where the file does not say it."""
    input: Lengths | None = None
    """Prompt tokens."""
    output: Lengths | None = None
    """Answer tokens, likewise."""
    concurrency: float | None = None
    rate: float | None = None


@record
class ServeRead:
    """The plan that a file says."""

    plan: ServePlan
    unread: tuple[str, ...]
    noise: tuple[str, ...]
    notes: tuple[str, ...]


TRAINS = (
    r"\btorchrun\b|\baccelerate launch\b|\bdeepspeed\s|\bmegatron\b|verl\.trainer|\w(Trainer|TrainingArguments)\(|\bSFTConfig\("
)
"""What stands in a file that trains, though it may start a server for its samples."""


def starts_servers(path: Path) -> bool:
    """Whether a file starts a server and no training."""
    text = read_text(path)
    return re.search(FORM, text) is not None and re.search(TRAINS, text) is None


def read_serving(path: Path, said: ServeSaid, given: Given) -> ServeRead:
    """The serve plan of a script, a command line or a manifest. Raises PlannerError with all that is still to be said."""
    found = find_servers(path, given)
    read = _Reader(path=path, said=said, given=given, found=found)
    plan = read.plan()
    if given.questions:
        ask(str(path), given.questions)
    given.require_used(str(path), ASKED)
    return ServeRead(plan=plan, unread=tuple(read.unread), noise=tuple(read.noise), notes=tuple(read.notes))


class _Reader:
    """One file on its way to a plan; assumptions and notes are collected."""

    def __init__(self, *, path: Path, said: ServeSaid, given: Given, found: Found) -> None:
        self.path, self.said, self.given, self.found = path, said, given, found
        self.assumptions: list[Assumption] = []
        self.unread: list[str] = []
        self.noise: list[str] = []
        self.notes: list[str] = list(found.notes)

    def assume(self, what: str, value: object, why: str, flag: str) -> None:
        """Something that neither the file nor the user says."""
        self.assumptions.append(Assumption(what=what, value=str(value), why=why, flag=flag))

    def settings(self, server: Server) -> Settings:
        """A server's settings; what is open in them is asked for."""
        filled = self.given.filled(server.settings)
        data = {key: value for key, value in filled.items() if key not in ASKED or key in server.settings}
        return Settings(self.path, data, said=self.given)

    def plan(self) -> ServePlan:
        """The plan; questions are left with ``given``."""
        servers = self._pools()
        first = servers[-1]
        model, model_text = self._model(first)
        engine = self._engine(first.engine)
        hardware = self.said.hardware or DEFAULT_HARDWARE
        if self.said.hardware is None:
            self.assume("hardware", hardware, "the file does not say it", "--hardware")
        profile = load_hardware(hardware)
        if not hardware.endswith((".yaml", ".yml")):
            hardware = profile.name  # what people call it is not what plans are compared by
        stated = [stated_by(one, model, self.settings(one)) for one in servers]
        layouts = [self._layout(one, part, engine, profile) for one, part in zip(servers, stated, strict=True)]
        for part in stated:
            self.unread += [text for text in part.unread if text not in self.unread]
            self.noise += [text for text in part.noise if text not in self.noise]
        used = sum(int(one.num_gpus) for one in layouts)
        options = {key: value for key, value in stated[-1].options.items() if value is not None}
        precision = self._precision(stated[-1], model_text, engine)
        for one in layouts:
            broken = violations(model, profile, engine, precision, replace(one, replicas=1))
            self.notes += [
                f"planner would refuse it: {text}"
                for text in broken
                if f"planner would refuse it: {text}" not in self.notes
            ]
        return ServePlan(
            model=model, hardware=hardware, gpus=self.said.gpus or used, engine=engine.label,
            precision=precision, layout=layouts[-1],
            prefill=layouts[0] if len(layouts) > 1 else None, traffic=self._traffic(stated[-1], model),
            options=self._options(options), assumptions=tuple(self.assumptions), why=f"read from {self.path.name}",
        )  # fmt: skip

    def _pools(self) -> list[Server]:
        """One server, or that of prompts and that of answers."""
        servers, roles = self.found.servers, [one.role for one in self.found.servers]
        if len(servers) == 1 and not roles[0]:
            return servers
        if sorted(roles) == ["decode", "prefill"]:
            return sorted(servers, key=lambda one: one.role != "prefill")
        if sorted(roles) == ["", "prefill"]:  # Dynamo's decode workers need no word
            return sorted(servers, key=lambda one: one.role != "prefill")
        if len(servers) == 1:
            missing = "decode" if roles[0] == "prefill" else "prefill"
            raise PlannerError(
                f"{self.path}: it starts {roles[0]} servers and no {missing} servers; import a file with both"
            )
        named = ", ".join(f"{one.copies} x {one.role or 'server'}" for one in servers)
        raise PlannerError(
            f"{self.path}: it starts servers with different settings ({named}); a plan holds one kind, or prefill and decode"
        )

    def _model(self, server: Server) -> tuple[ModelSpec, str]:
        text = next(
            (server.settings[key] for key in ("model", "model_path", "model_tag") if key in server.settings), ""
        )
        text = text if isinstance(text, str) else str(text)
        if self.said.model is not None:
            return load_model(self.said.model), text or self.said.model
        part = self.settings(server)
        name = part.label("model", "model_path", "model_tag")
        model, notes = named_model(name, self.path) if name else (None, ())
        if model is None:
            called = f"{shown(name)} is no preset" if name else "the file does not say it"
            raise PlannerError(
                f"{self.path}: which model? {called}; say --model with a preset, a config.json or a hub id"
            )
        self.notes += list(notes)
        return model, name

    def _engine(self, name: str) -> Engine:
        stated = self.said.engine or (f"{name}@{self.found.version}" if self.found.version else name)
        engine = load_engine(stated)
        if engine.name != name:
            raise PlannerError(f"{self.path}: it starts {name}, and --engine says {stated}")
        if engine.note:
            self.notes.append(engine.note)
        if "@" not in stated and not engine.file:
            self.assume(
                "engine",
                f"{engine.name}@{engine.version}",
                "the newest known; the file does not say its version",
                "--engine",
            )
        return engine

    def _layout(self, server: Server, stated: Stated, engine: Engine, hardware: Any) -> ServingLayout:
        degrees = {**stated.degrees, "replicas": stated.degrees.get("replicas", 1) * server.copies}
        start = ServingLayout(**degrees)
        tokens = int(engine.default_max_tokens(hardware, start))
        start = replace(start, max_tokens=stated.tokens or tokens)
        default = int(usual_batch(engine, hardware, start)), tokens
        for what, value, standard in (
            ("largest batch", stated.batch, default[0]),
            ("tokens of a step", stated.tokens, default[1]),
        ):
            if value is None and not any(one.what == what for one in self.assumptions):
                self.assume(what, standard, f"default of {engine.name} {engine.version} on {hardware.name}", "--set")
        return replace(start, max_batch=stated.batch or default[0])

    def _precision(self, stated: Stated, model_text: str, engine: Engine) -> Precision:
        weights = weights_of(stated, model_text, self.given, lambda one: self.given.questions.append(one))
        if weights not in WEIGHTS:
            raise PlannerError(f"weights {shown(weights)}; it must be one of {', '.join(WEIGHTS)}")
        cache = stated.cache or engine.cache_dtype_default(weights)
        if cache not in CACHES:
            self.unread.append(f"format of the cache {cache}: priced as fp8")
            cache = "fp8"
        if weights == "mxfp4" and "gpt-oss" in model_text.lower():
            return Precision(weights="bf16", experts="mxfp4", cache=cache)
        return Precision(weights=weights, cache=cache)

    def _options(self, options: dict[str, Any]) -> EngineOptions:
        share = options.get("memory_share")
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float))):
            raise PlannerError(f"{self.path}: the share of memory is {shown(share)}; it must be a number")
        known = {one.name for one in fields(EngineOptions)}
        try:
            return EngineOptions(**{key: value for key, value in options.items() if key in known})
        except PlannerError as error:
            raise PlannerError(f"{self.path}: {error}") from error

    # -------------------------------------------------------------------------------------------- load

    def _traffic(self, stated: Stated, model: ModelSpec) -> Traffic:
        bench = self.found.bench
        ends = {name: self._lengths(name, bench) for name in ("input", "output")}
        load, value = "concurrency", float(DEFAULT_CONCURRENCY)
        if self.said.rate is not None:
            load, value = "rate", self.said.rate
        elif self.said.concurrency is not None:
            value = self.said.concurrency
        elif isinstance(bench.get("max_concurrency"), int):
            value = float(bench["max_concurrency"])
        elif isinstance(bench.get("request_rate"), (int, float)) and math.isfinite(bench["request_rate"]):
            load, value = "rate", float(bench["request_rate"])
        elif bench and isinstance(bench.get("num_prompts"), int):
            load, value = "offline", float(bench["num_prompts"])
        else:
            self.assume("load", f"{value:g} requests at once", "the file does not say it", "--concurrency or --rate")
        return Traffic(
            input=ends["input"], output=ends["output"], load=load, value=value, speculation=self._speculation(stated),
            stream=float(stated.stream),
        )  # fmt: skip

    def _lengths(self, name: str, bench: dict[str, Any]) -> Lengths:
        stated = self.said.input if name == "input" else self.said.output
        if stated is not None:
            return stated
        size = bench.get(f"random_{name}_len")
        if isinstance(size, int) and size >= 1:
            return _drawn(size, _ratio(bench, name), bench["engine"])
        default = DEFAULT_INPUT if name == "input" else DEFAULT_OUTPUT
        self.assume(f"{name} tokens", default, "the file does not say them", f"--{name}-tokens")
        return Lengths.fixed(default)

    def _speculation(self, stated: Stated) -> Speculation | None:
        """Depth is the file's, acceptance the user's: it depends on the prompts."""
        if not stated.draft:
            return None
        values: dict[str, Any] = {}
        for name, about in (
            ("acceptance", "chance that a drafted token is accepted"),
            ("draft_parameters", "of the draft model"),
        ):
            given = self.given.setting(name)
            values[name] = stated.draft.get(name) if given is None else _number(given, f"--set {name}")
            if values[name] is None:
                self.given.questions.append(
                    Question(name=name, about=about, choices=("0.7",) if name == "acceptance" else ("1e9",))
                )
                values[name] = 0.5
        return Speculation(
            depth=min(int(stated.draft["depth"]), 64),
            acceptance=values["acceptance"],
            draft_parameters=values["draft_parameters"],
        )


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PlannerError(f"{what}={shown(text)}: it must be a number") from None


def _ratio(bench: dict[str, Any], name: str) -> float:
    ratio = bench.get("random_range_ratio", 0.0)
    ratio = ratio.get(name, 0.0) if isinstance(ratio, dict) else ratio
    return float(ratio) if isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 <= ratio <= 1 else 0.0


def _drawn(size: int, ratio: float, engine: str) -> Lengths:
    """Lengths as the benchmark draws them: vLLM from n (1 - r) to n (1 + r), SGLang from r n to n."""
    low, high = (size * (1 - ratio), size * (1 + ratio)) if engine == "vllm" else (size * ratio, float(size))
    low = max(low, 1.0)
    return Lengths.fixed(high) if low >= high else Lengths.uniform(low, high)
