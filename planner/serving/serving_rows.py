"""Deployments as lines of a table and as plans: every number once, for tables, JSON, the page and Python alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from planner.costs import Rates, kwh_per_million_tokens, rates_of, usd_per_million_tokens
from planner.hardware import load_hardware
from planner.model import ModelSpec
from planner.record import record
from planner.serving.intervals import bar, kind_of, range_of
from planner.serving.priced_table import Choice
from planner.serving.published import precision_text
from planner.serving.result import ServingEstimate
from planner.serving.serve_plan import LATENCIES, ServePlan, ServePrediction, predict_serving
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_question import Question

DEFINITIONS = (
    "TTFT: time to first token, queue and client included. TPOT: time per output token after the first, (e2e - TTFT) / (O - 1).",
    "tok/s: output tokens; of a GPU: over all GPUs of all pools, idle ones too; of a user: 1 / TPOT. load: requests in "
    "flight, or those "
    "that arrive; holds: requests of this length that run at once, by cache and batch limit. Dollars and energy: of those "
    "GPUs all the time.",
)
"""What the headings of the tables mean, where tools differ."""


@record
class ServeRow:
    """One deployment in numbers, seconds, GiB, dollars."""

    purpose: str
    engine: str
    layout: str
    precision: str
    gpus: int
    """That are paid for."""
    load: str
    """Requests in flight, or requests/s, as it was meant."""
    concurrency: float | None
    """Requests in flight, by Little's law where a rate was asked; None where the queue grows for ever."""
    requests_per_second: float
    """0, and no latencies, where it does not start."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    tokens_per_second_per_user: float | None
    figure: str
    """mean, p50, p90 or p99: what ttft_s and tpot_s are."""
    ttft_s: float | None
    tpot_s: float | None
    memory_gib: float
    memory_limit_gib: float
    holds: float
    """Requests of this length that the cache of the whole deployment holds."""
    preemption: float
    communication_share: float
    """Of a decode step."""
    fits: bool
    keeps_up: bool
    """Not more arrives than leaves."""
    limits_kept: bool
    usd_per_million_output: float | None
    usd_per_million_total: float | None
    kwh_per_million_output: float | None


def row_of_plan(plan: ServePlan, rates: Rates, purpose: str = "") -> ServeRow:
    """The line of a priced plan."""
    found = plan.prediction
    assert found is not None, "a plan without a prediction has no line"
    ttft, tpot = (found.latency(name, plan.limits.percentile) for name in ("ttft", "tpot"))
    mean, e2e = found.latency("tpot"), found.latency("e2e")
    running = found.fits and found.output_tokens_per_second > 0 and math.isfinite(e2e)
    output = found.output_tokens_per_second if found.fits else 0.0
    step = sum(found.step_s.values())
    return ServeRow(
        purpose=purpose, engine=plan.engine.replace("@", " "), layout=plan_layout_text(plan),
        precision=precision_text(plan.precision),
        gpus=plan.gpus, load=load_text(plan), concurrency=found.requests_per_second * e2e if running else None,
        requests_per_second=found.requests_per_second if found.fits else 0.0, tokens_per_second=output,
        tokens_per_second_per_gpu=output / plan.gpus,
        tokens_per_second_per_user=1.0 / mean if found.fits and 0 < mean < math.inf else None, figure=plan.limits.percentile,
        ttft_s=ttft if found.fits and math.isfinite(ttft) else None, tpot_s=tpot if found.fits and math.isfinite(tpot) else None,
        memory_gib=found.memory_peak_gib, memory_limit_gib=found.memory_limit_gib,
        holds=found.max_concurrency if found.fits else 0.0, preemption=found.preemption,
        communication_share=found.step_s["communication"] / step if step else 0.0, fits=found.fits,
        keeps_up=plan.keeps_up, limits_kept=plan.keeps_limits,
        **_money(rates, plan.gpus, output, found.total_tokens_per_second),
    )  # fmt: skip


def _money(rates: Rates, gpus: int, output: float, total: float) -> dict[str, float | None]:
    if not output > 0:
        return {"usd_per_million_output": None, "usd_per_million_total": None, "kwh_per_million_output": None}
    return {
        "usd_per_million_output": usd_per_million_tokens(rates, gpus, output),
        "usd_per_million_total": usd_per_million_tokens(rates, gpus, total),
        "kwh_per_million_output": kwh_per_million_tokens(rates, gpus, output),
    }


def rates_of_plan(plan: ServePlan, price: float | None = None) -> Rates:
    """What a GPU of a plan costs and draws: of several kinds the mean over its stages; ``price``: dollars per GPU-hour instead."""
    known = [one.usd_per_gpu_hour for one in plan.stages]
    if price is not None or not known or None in known:
        return rates_of(load_hardware(plan.hardware), price=price)
    found = rates_of(load_hardware(plan.hardware), price=sum(one or 0.0 for one in known) / len(known))
    mean = replace(found.basis[0], source="the mean over the stages, by their kinds of nodes")
    return replace(found, basis=(mean, *found.basis[1:]))


def load_text(plan: ServePlan) -> str:
    """The load in a word: 256, 5/s."""
    value = plan.traffic.value
    return f"{value:.4g}/s" if plan.traffic.load == "rate" else f"{value:,.0f}"


def degrees_text(layout: ServingLayout) -> str:
    """Degrees of one engine: tp 4, pp 2, attention dp 8, ep 8."""
    names = {"tp": "tp", "pp": "pp", "attn_dp": "dp", "ep": "ep", "moe_tp": "moe-tp", "dcp": "dcp"}
    words = [
        f"{word} {value}" for name, word in names.items() if (value := int(getattr(layout, name))) > 1 or name == "tp"
    ]
    on_host = 100 - int(layout.gpu_weights)
    return " ".join([*words, *([f"{on_host} % on host"] if on_host else [])])


def layout_text(layout: ServingLayout) -> str:
    """A whole pool: tp 4 pp 2, 2 of them."""
    return degrees_text(layout) + (f" x {int(layout.replicas)}" if int(layout.replicas) > 1 else "")


def plan_layout_text(plan: ServePlan) -> str:
    """Both pools where there are two."""
    if plan.stages:
        return f"{layout_text(plan.layout)} ({', '.join(f'{one.layers} on {one.kind}' for one in plan.stages)})"
    if plan.prefill is None:
        return layout_text(plan.layout)
    return f"{layout_text(plan.prefill)} -> {layout_text(plan.layout)}"


RANGED = {
    "ttft": "ttft_ms.mean", "tpot": "tpot_ms.mean", "itl": "itl_ms.mean", "e2e": "latency_s.mean",
    "requests_per_second": "request_per_s",
    "output_tokens_per_second": "tokens_per_s_output", "total_tokens_per_second": "tokens_per_s_total",
}  # fmt: skip
"""Quantities with an interval, and what tables of measured runs call them."""


def with_ranges(found: ServingEstimate, model: ModelSpec, load: str, pools: bool) -> ServePrediction:
    """Plain numbers of one deployment, with where nine of ten measured ones would lie, by runs of its kind."""
    plain = predict_serving(found)
    if not plain.fits:
        return plain
    waits = (plain.waiting or 0.0) > 0.5 or plain.saturated
    kind = kind_of("disaggregated" if pools else load, model.is_moe, waits)
    values = {name: plain.latency(name) if name in LATENCIES else getattr(plain, name) for name in RANGED}
    ranges = {name: range_of(RANGED[name], kind, value) for name, value in values.items() if math.isfinite(value)}
    one = bar(RANGED["tpot"], kind)
    basis = f"residuals of {one.runs:,} measured runs of {one.families} families of model, device and engine like this ({kind})"
    return replace(plain, ranges=ranges, ranges_basis=basis)


def plan_of(question: Question, one: Choice, why: str = "", gpus: int | None = None, chosen_for: str = "") -> ServePlan:
    """A deployment as a plan of the question's GPUs, or of ``gpus``; ``chosen_for``: where its load is the search's own."""
    engine = one.served.engine
    return ServePlan(
        model=question.model, hardware=question.hardware_name, gpus=gpus or question.gpus, engine=engine.label,
        precision=one.served.precision, layout=one.layout, prefill=one.prefill, traffic=one.traffic, limits=one.limits,
        prediction=with_ranges(one.found, question.model, one.traffic.load, one.prefill is not None),
        assumptions=question.assumptions, why=why, chosen_for=chosen_for,
    )  # fmt: skip


def row_data(row: ServeRow) -> dict[str, Any]:
    """Plain data of a line."""
    return dict(vars(row))
