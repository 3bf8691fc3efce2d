"""Results of benchmarks: of one's own runs, of ``vllm bench serve``, of ``sglang.bench_serving`` and of InferenceX.

One's own are written with the names of ``vllm bench serve``, so that its tools read them: *_ms in milliseconds, rates per second.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.errors import PlannerError, shown
from planner.record import record
from planner.serving.measure.load_driver import Drive, Driven
from planner.serving.serve_plan import FIGURES, LATENCIES, ServePlan
from planner.units import MILLI

WORDS = {"ttft": ("ttft",), "tpot": ("tpot",), "itl": ("itl",), "e2e": ("e2el", "e2e_latency", "e2e")}
"""Words for a latency in the files, the first is written."""
FIGURE_WORDS = {"mean": ("mean",), "p50": ("median", "p50"), "p90": ("p90",), "p99": ("p99",)}
RATES = {
    "requests_per_second": ("request_throughput",), "output_tokens_per_second": ("output_throughput",),
    "total_tokens_per_second": ("total_token_throughput", "total_throughput"),
}  # fmt: skip
PER_GPU = {"output_tokens_per_second": "output_tput_per_gpu", "total_tokens_per_second": "tput_per_gpu"}
"""InferenceX: rates per GPU, latencies in seconds."""
LARGEST = 1e10
"""No latency in milliseconds and no rate is larger."""


@record
class BenchResult:
    """What was measured, in the quantities of a prediction: seconds and rates of the whole deployment."""

    source: str
    """File, and whose it is."""
    latencies: Mapping[str, Mapping[str, float]]
    """Seconds by LATENCIES and FIGURES, those that are there."""
    rates: Mapping[str, float]
    completed: int | None = None
    failed: int = 0
    load: tuple[str, float] | None = None
    """concurrency or rate with its value, where the file says it."""
    lengths: tuple[float, float] | None = None
    """Mean tokens of prompts and answers as they were."""
    stopped: str = ""
    """Why it ended early."""
    details: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """All quantities by name: ttft.mean, ..., requests_per_second, ..."""
        found = {f"{name}.{figure}": value for name, row in self.latencies.items() for figure, value in row.items()}
        return {**found, **self.rates}


def result_of(run: Driven, asked: Drive) -> BenchResult:
    """The figures of one's own run. Raises PlannerError when nothing was answered."""
    done = run.done
    if not done:
        why = next((one.error for one in run.answers if one.error), run.stopped or "no request was sent")
        raise PlannerError(f"{asked.address}: none of {run.asked} requests was answered ({why})")
    tpots = [one.tpot for one in done if one.tpot is not None]
    rows = {
        "ttft": [one.ttft for one in done], "tpot": tpots, "itl": [gap for one in done for gap in one.gaps],
        "e2e": [one.latency for one in done],
    }  # fmt: skip
    tokens = sum(one.input_tokens for one in done), sum(one.output_tokens for one in done)
    duration = max(run.duration, 1e-9)
    return BenchResult(
        source=f"{asked.address}, {run.form.model}",
        latencies={name: figures(values) for name, values in rows.items() if values},
        rates={
            "requests_per_second": len(done) / duration, "output_tokens_per_second": tokens[1] / duration,
            "total_tokens_per_second": sum(tokens) / duration,
        },
        completed=len(done), failed=len(run.answers) - len(done), load=_load_of(asked), stopped=run.stopped,
        lengths=(tokens[0] / len(done), tokens[1] / len(done)),
    )  # fmt: skip


def figures(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, with linear interpolation as numpy and vLLM take them."""
    found = np.percentile(np.asarray(values, dtype=np.float64), [50, 90, 99])
    return dict(zip(FIGURES, (float(np.mean(values)), *map(float, found)), strict=True))


def _load_of(asked: Drive) -> tuple[str, float] | None:
    return (
        (asked.traffic.load, asked.traffic.value) if asked.traffic.load in ("concurrency", "rate", "static") else None
    )


def written(result: BenchResult, run: Driven, asked: Drive, plan: ServePlan) -> str:
    """One's own run as JSON."""
    data: dict[str, Any] = {
        "backend": "plan validate", "model_id": run.form.model, "num_prompts": run.asked, "completed": result.completed,
        "failed": result.failed, "duration": run.duration, "stopped": result.stopped or None,
        "request_rate": asked.traffic.value if asked.traffic.load == "rate" else "inf",
        "max_concurrency": asked.traffic.value if asked.traffic.load in ("concurrency", "static") else None,
        "max_concurrent_requests": run.most_at_once,
        "total_input_tokens": sum(one.input_tokens for one in run.done),
        "total_output_tokens": sum(one.output_tokens for one in run.done),
    }  # fmt: skip
    data |= {names[0]: result.rates[rate] for rate, names in RATES.items()}
    for name, row in result.latencies.items():
        data |= {f"{FIGURE_WORDS[figure][0]}_{WORDS[name][0]}_ms": value / MILLI for figure, value in row.items()}
    data["errors"] = list(dict.fromkeys(one.error for one in run.answers if one.error))[:20]
    data["per_request"] = [
        {"ttft": one.ttft, "latency": one.latency, "input": one.input_tokens, "output": one.output_tokens} for one in run.done
    ]  # fmt: skip
    data["plan"] = plan.to_dict()
    return json.dumps(data, indent=1) + "\n"


# ------------------------------------------------------------------------------------------------ files of others


def read_bench(path: Path, gpus: int) -> BenchResult:
    """A result in JSON, or the last line of JSON lines; ``gpus`` of the plan, for rates per GPU. Raises PlannerError."""
    text = library.read_text(path)
    lines = [line for line in text.splitlines() if line.strip()]
    single = text.lstrip().startswith(("{", "[")) and len(lines) != 1
    try:
        data = (
            library.parse_json(text, str(path)) if single else library.parse_json(lines[-1] if lines else "", str(path))
        )
    except PlannerError:
        if len(lines) < 2:
            raise
        data = library.parse_json(lines[-1], str(path))
    if isinstance(data, list):
        data = data[-1] if len(data) == 1 else data
    if not isinstance(data, dict):
        raise PlannerError(f"{path}: expected the result of one benchmark as a mapping, found {type(data).__name__}")
    return bench_of_data(data, str(path), gpus)


def bench_of_data(data: Mapping[str, Any], where: str, gpus: int) -> BenchResult:
    """A result from plain data. Raises PlannerError when it holds no latency and no rate."""
    milliseconds = any(key.endswith("_ms") for key in data)
    latencies = {name: row for name in LATENCIES if (row := _row(data, name, milliseconds, where))}
    rates = {name: value for name, words in RATES.items() if (value := _number(data, words, where)) is not None}
    for name, word in PER_GPU.items():
        if name not in rates and (value := _number(data, (word,), where)) is not None:
            rates[name] = value * (_count(data.get("num_gpus")) or gpus)
    if not latencies and not rates:
        known = "mean_ttft_ms, mean_tpot_ms, request_throughput, ..."
        raise PlannerError(
            f"{where}: no result of a benchmark was found in it: it needs {known} as vllm bench serve writes them"
        )
    failed = _count(data.get("failed")) or len([one for one in _list(data.get("errors")) if one])
    return BenchResult(
        source=where, latencies=latencies, rates=rates, completed=_count(data.get("completed")) or None, failed=failed,
        load=_load(data), lengths=_lengths(data), stopped=str(data.get("stopped") or "")[:200],
    )  # fmt: skip


def _row(data: Mapping[str, Any], name: str, milliseconds: bool, where: str) -> dict[str, float]:
    """Seconds of one latency by figure."""
    found: dict[str, float] = {}
    for figure, words in FIGURE_WORDS.items():
        ending = "_ms" if milliseconds else ""
        value = _number(data, [f"{one}_{word}{ending}" for one in words for word in WORDS[name]], where)
        if value is None and figure == "p90":
            value = _percentile(data, name, milliseconds)
        if value is not None:
            found[figure] = value * MILLI if milliseconds else value
    return {one: value for one, value in found.items() if value > 0.0}


def _percentile(data: Mapping[str, Any], name: str, milliseconds: bool) -> float | None:
    """The 90th from a list of single values, where the file has one."""
    values = data.get({"ttft": "ttfts", "e2e": "latencies"}.get(name, ""))
    numbers = [
        one
        for one in _list(values)
        if isinstance(one, (int, float)) and not isinstance(one, bool) and math.isfinite(one) and one > 0
    ]
    return float(np.percentile(numbers, 90)) / (MILLI if milliseconds else 1.0) if numbers else None


def _number(data: Mapping[str, Any], names: Iterable[str], where: str) -> float | None:
    """The first of the names that is there. Raises PlannerError for what is no number."""
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, str) and re.fullmatch(r"[\d.]{1,30}(e-?\d{1,3})?", value):
            value = float(value) if value.count(".") < 2 else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
            raise PlannerError(f"{where}: {name} is {shown(value)}; it must be a number that is not negative")
        return float(value)
    return None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9 else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _load(data: Mapping[str, Any]) -> tuple[str, float] | None:
    for name in ("max_concurrency", "conc", "concurrency_limit"):
        value = data.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9:
            return "concurrency", float(value)
    rate = data.get("request_rate")
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < 1e9:
        return "rate", float(rate)
    return None


def _lengths(data: Mapping[str, Any]) -> tuple[float, float] | None:
    """Mean tokens of a prompt and of an answer."""
    done = _count(data.get("completed"))
    totals = _count(data.get("total_input_tokens")), _count(data.get("total_output_tokens"))
    if done and all(totals):
        return totals[0] / done, totals[1] / done
    asked = _count(data.get("isl")), _count(data.get("osl"))
    return (float(asked[0]), float(asked[1])) if all(asked) else None
