"""The report of a serve plan: the same document, page and formats as of a training, with the charts of a deployment."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from planner.costs import Rates
from planner.errors import PlannerError
from planner.questions.report.document import Chart, Document, Figure, Value, chart, columns, shown, today
from planner.questions.report.show import written
from planner.questions.serve.show import LATENCY_TEXT, MEMORY_TEXT
from planner.serving.candidates import loads
from planner.serving.engine import engine_names
from planner.serving.plan_pricing import price_again, priced_at
from planner.serving.serve_plan import MEMORY_PARTS, STEP_PARTS, ServePlan, ServePrediction
from planner.serving.serving_answer import Answered, answer
from planner.serving.serving_changes import request_of_plan
from planner.serving.serving_question import ServeRequest, ask, limits_text, traffic_text
from planner.serving.serving_reasons import PART_TEXT, takes
from planner.serving.serving_rows import DEFINITIONS, ServeRow, plan_layout_text, rates_of_plan, row_of_plan
from planner.serving.traffic import Traffic

LEFT_OUT = "dollars: storage, traffic, idle hours, taxes and discounts; energy: hosts, network, cooling, and pauses below the limit"
FILE = "serve.yaml"
MOST_LOADS = 14
"""Loads at which the deployment is shown."""


def build_serving(plan: ServePlan, price: float | None, progress: Callable[[str], None]) -> Document:
    """The whole report of a serve plan, priced again. Raises PlannerError where it breaks a rule of its engine."""
    plan = price_again(plan)
    found = plan.prediction
    assert found is not None
    rates = rates_of_plan(plan, price)
    row = row_of_plan(plan, rates)
    progress("searching")
    searched = _search(plan, progress)
    charts = [
        *([_front_chart(plan, row, searched, rates)] if searched else []),
        _load_chart(plan),
        _step_chart(found),
        _memory_chart(found),
    ]
    limits = limits_text(plan.limits)
    return Document(
        title=f"{plan.model.name} served on {plan.gpus:,} x {plan.hardware_text}",
        job=f"{traffic_text(plan.traffic, True)}{', ' + limits if limits else ''}",
        layout=f"{row.engine}, {plan_layout_text(plan)}, {row.precision}", fits=row.limits_kept, verdict=_verdict(plan, row),
        notices=() if row.limits_kept else (plan.why or "It does not serve what is asked.",), figures=tuple(_figures(row, found)),
        why=tuple(one for one in (plan.why, *DEFINITIONS) if one), reasons="Why this deployment",
        alternatives=_alternatives(plan, searched, rates),
        charts=tuple(charts), assumptions=tuple(vars(one) for one in plan.assumptions),
        basis=tuple(dict(vars(one)) for one in rates.basis),
        plan=plan.to_dict(), **today(), run=tuple(_commands(plan)), rates={},
        left_out=LEFT_OUT, file=FILE,
    )  # fmt: skip


def _search(plan: ServePlan, progress: Callable[[str], None]) -> Answered | None:
    """The question of the plan at open loads, its own engine and the others; None of stages on several kinds, and where nothing is
    legal any more."""
    if plan.stages:
        return None
    others = [one for one in engine_names() if one != plan.engine_name]
    said = vars(request_of_plan(plan)) | {plan.traffic.load: None, "engine": ",".join([plan.engine, *others])}
    with suppress(PlannerError):
        return answer(ask(ServeRequest(**said)), 3, progress)
    return None


def _verdict(plan: ServePlan, row: ServeRow) -> str:
    """One sentence: what happens if this is run."""
    found = plan.prediction
    assert found is not None
    if not found.fits:
        return f"This plan does not start on GPUs of {shown(found.memory_limit_gib, 'gib')}."
    if not row.keeps_up:
        return f"This plan does not keep up with {row.load}: its queue grows for ever."
    ends = (found.ranges or {}).get("tpot")
    interval = f" ({shown(ends[0], 'seconds')} to {shown(ends[1], 'seconds')} in nine of ten runs)" if ends else ""
    return (
        f"{row.layout[:1].upper()}{row.layout[1:]} answers {shown(row.tokens_per_second, 'rate')} tokens/s, the first token after "
        f"{shown(found.latency('ttft'), 'seconds')} and then one every {shown(found.latency('tpot'), 'seconds')}{interval}."
    )


def _figures(row: ServeRow, found: ServePrediction) -> list[Figure]:
    """The numbers of the heading."""
    figures = [
        Figure("Tokens/s of a GPU", row.tokens_per_second_per_gpu, "rate", f"output, of {row.gpus:,} GPUs"),
        Figure("Tokens/s of a user", row.tokens_per_second_per_user, "rate", "1 / TPOT, the first token excluded"),
        Figure("Requests/s", row.requests_per_second, "number", "finished, whole deployment"),
    ]
    for name in ("ttft", "tpot"):
        mean, tail = (found.latency(name, one) for one in ("mean", "p99"))
        figures.append(Figure(
            LATENCY_TEXT[name].capitalize(), mean if math.isfinite(mean) else None, "seconds",
            f"mean; p99 {shown(tail, 'seconds') if math.isfinite(tail) else 'without end'}", alarm=not row.limits_kept,
        ))  # fmt: skip
    figures.append(Figure("Requests at once", found.max_concurrency, "count", "of this length, by cache and batch limit"))
    figures.append(
        Figure(
            "Memory",
            row.memory_gib,
            "gib",
            f"of {shown(row.memory_limit_gib, 'gib')} of the fullest GPU",
            alarm=not row.fits,
        )
    )
    if row.usd_per_million_output is not None and row.usd_per_million_total is not None:
        usd = row.usd_per_million_output
        note = f"output tokens; in and out ${row.usd_per_million_total:.3g}"
        figures.append(
            Figure(
                "Cost of a million",
                row.usd_per_million_output,
                "number",
                note,
                text=f"${usd:.3g}" if usd < 1 else f"${usd:,.2f}",
            )
        )
    if row.kwh_per_million_output is not None:
        figures.append(Figure(
            "Energy of a million", row.kwh_per_million_output, "number", "output tokens, at most: every GPU at its limit",
            text=f"{row.kwh_per_million_output:.3g} kWh",
        ))  # fmt: skip
    return figures


def _point(row: ServeRow, group: str) -> tuple[Value, ...]:
    return (
        group, row.tokens_per_second_per_user, row.tokens_per_second_per_gpu, row.engine, row.layout, row.load, row.ttft_s,
        row.tpot_s,
        row.usd_per_million_output,
    )  # fmt: skip


def _front_chart(plan: ServePlan, mine: ServeRow, searched: Answered, rates: Rates) -> Chart:
    rows = [_point(row_of_plan(one, rates), one.engine_name) for one in searched.front]
    rows.append(_point(mine, "this plan"))
    first = searched.front[0] if searched.front else plan
    last = searched.front[-1] if searched.front else plan
    ends = [row_of_plan(one, rates) for one in (first, last)]
    reading = (
        f"From {shown(ends[0].tokens_per_second_per_user, 'rate')} tokens/s of a user ({ends[0].layout}) to "
        f"{shown(ends[1].tokens_per_second_per_gpu, 'rate')} tokens/s of a GPU ({ends[1].layout}); this plan has "
        f"{shown(mine.tokens_per_second_per_user, 'rate')} and {shown(mine.tokens_per_second_per_gpu, 'rate')}."
    )
    return chart("serve-front", reading, rows)


def _load_chart(plan: ServePlan) -> Chart:
    """The deployment at other loads: requests in flight up to what its cache holds, or shares of the rate."""
    found = plan.prediction
    assert found is not None
    rate, mine = plan.traffic.load == "rate", plan.traffic.value
    unit = "requests/s" if rate else "requests in flight"
    if rate:
        values = {round(mine * share, 6) for share in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3)}
    else:
        grid = [float(one) for one in loads(max(found.max_concurrency, mine), 2)]
        keep = np.unique(np.linspace(0, len(grid) - 1, min(MOST_LOADS, len(grid))).round().astype(int))
        values = {*(grid[at] for at in keep), mine}
    rows: list[tuple[Value, ...]] = []
    for value in sorted(values):
        one = priced_at(plan, _at(plan, value))
        ttft, tpot, total = (float(np.asarray(x)) for x in (one.ttft.mean, one.tpot.mean, one.output_tokens_per_second))
        if all(map(math.isfinite, (ttft, tpot, total))) and not (rate and bool(np.all(np.asarray(one.saturated)))):
            rows.append((value, ttft, tpot, total / plan.gpus, value == mine))
    reading = "It keeps up with none of these loads."
    if rows:
        (less, _, fast, few, _), (more, _, slow, many, _) = rows[0], rows[-1]
        reading = (
            f"From {less:g} to {more:g} {unit}, TPOT goes from {shown(fast, 'seconds')} to {shown(slow, 'seconds')} and throughput "
            f"from {shown(few, 'rate')} to {shown(many, 'rate')} tokens/s of a GPU. The dashed line is this plan's load."
        )
    return chart("serve-load", reading, rows, facts={"unit": unit})


def _at(plan: ServePlan, value: float) -> Traffic:
    """The traffic at another load."""
    load = plan.traffic.load if plan.traffic.load == "rate" else "concurrency"
    return replace(plan.traffic, load=load, value=value)


def _step_chart(found: ServePrediction) -> Chart:
    total = sum(found.step_s.values()) or 1.0
    rows: list[tuple[Value, ...]] = [
        (PART_TEXT[one], found.step_s[one], found.step_s[one] / total) for one in STEP_PARTS if found.step_s[one] > 0
    ]
    largest = max(STEP_PARTS, key=lambda part: found.step_s[part])
    share = shown(found.step_s[largest] / total, "share")
    reading = f"{takes(largest).capitalize()} {share} of a decode step of {shown(total, 'seconds')}."
    return chart("serve-step", reading, rows)


def _memory_chart(found: ServePrediction) -> Chart:
    rows, start = list[tuple[Value, ...]](), 0.0
    for name in MEMORY_PARTS:
        size = found.memory_gib[name]
        if size > 0:
            rows.append((MEMORY_TEXT[name], size, size / found.memory_limit_gib, start, start + size))
            start += size
    cache = found.memory_gib["cache"]
    reading = (
        f"Weights take {shown(found.memory_gib['weights'], 'gib')}; {shown(max(cache, 0.0), 'gib')} are left for the cache, "
        f"{found.cache_tokens:,.0f} tokens of one engine. The red line is what a GPU has."
    )
    return chart("serve-memory", reading, rows, facts={"limit_gib": found.memory_limit_gib})


def _alternatives(plan: ServePlan, searched: Answered | None, rates: Rates) -> Chart:
    """The best deployments of a search of the same question at open loads."""
    rows: list[tuple[Value, ...]] = []
    for one, purpose in zip(searched.best, searched.purposes, strict=True) if searched else ():
        row = row_of_plan(one, rates)
        rows.append((
            purpose, row.engine, row.layout, row.load, row.tokens_per_second_per_gpu, row.tokens_per_second_per_user, row.ttft_s,
            row.tpot_s, row.usd_per_million_output,
        ))  # fmt: skip
    said = (
        "for text, engine text, layout text split, load text, each rate tok/s of a GPU, user rate tok/s of a user, "
        "ttft_s seconds TTFT, tpot_s seconds TPOT, usd number $/M output"
    )
    return Chart(
        name="alternatives",
        title="Best deployments",
        reading="",
        columns=columns(said),
        rows=rows,
    )


def _commands(plan: ServePlan) -> list[dict[str, str]]:
    """How to go on from the saved plan."""
    found = {"Write it for the engine": f"plan export {FILE} --to {plan.engine_name} --output run/"}
    if not plan.stages:
        found["Other hardware, the best deployment each"] = f"plan serve what-if {FILE} --hardware h200-sxm,b200-sxm"
    found["Compare your own measurement with it"] = f"plan doctor {FILE} --measured bench.json"
    return [{"what": what, "command": command} for what, command in found.items()]


def serve_report(
    plan: ServePlan, kind: str, name: str | None, price: float | None, progress: Callable[[str], None]
) -> str | bytes:
    """The report of a serve plan in one of the formats, with the name of a chart for a picture. Raises PlannerError."""
    return written("serve plan", (kind, name), lambda: build_serving(plan, price, progress), progress)
