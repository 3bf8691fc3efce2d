"""Why a deployment is the best, what binds it, and by how much others miss."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from planner.serving.priced_table import Choice
from planner.serving.result import StepTime
from planner.serving.serving_rows import layout_text
from planner.units import GIB, format_seconds

PART_TEXT = {
    "linear": "matrix products", "attention": "attention", "experts": "experts", "memory_bound": "norms and activations",
    "communication": "communication", "head": "head and sampling", "host": "host work", "draft": "drafted tokens",
}  # fmt: skip
ONE = ("attention", "communication", "host")
"""Parts that take; the others take."""
TIED = 0.1
"""Deployments that differ by less count as equal: about the median error of predicted throughput in families that were left out."""
HELD_TEXT = {
    "weights": "weights",
    "draft": "draft model",
    "activations": "activations",
    "graphs": "CUDA graphs",
    "reserve": "context and reserve",
}
"""What a GPU holds in addition to the cache."""
SMALLEST = 0.05 * GIB
"""What is less is left out of a sentence."""
NEAR = 0.97
"""What reaches this part of a limit is bound by it."""
SMALL = 0.005
"""Parts of a step below this share are not worth a word."""


def why_first(first: Choice, second: Choice | None, equal: int = 0) -> str:
    """What binds the best deployment, how many after it count as ``equal``, and what the runner-up pays for."""
    sentences = [binding(first)]
    if equal:
        which = "The next counts" if equal == 1 else f"The next {equal} count"
        sentences.append(
            f"{which} as equal: less than {100 * TIED:.0f} % apart, which is within the error of predictions."
        )
    if second is not None:
        sentences.append(against(first, second))
    return " ".join(one for one in sentences if one)


def binding(one: Choice) -> str:
    """What keeps a deployment from more: a limit, the cache, its speed."""
    ttft, tpot = (_number(latency.of(one.limits.percentile)) for latency in (one.found.ttft, one.found.tpot))
    for name, value, limit in (("TTFT", ttft, one.limits.ttft), ("TPOT", tpot, one.limits.tpot)):
        if np.isfinite(limit) and value >= NEAR**3 * limit:
            return f"{name} {format_seconds(value)} is all but its limit of {format_seconds(limit)}: more load would break it."
    most = _number(one.found.max_concurrency)
    if one.traffic.load == "concurrency" and one.traffic.value >= 0.9 * most:
        limit = _number(one.layout.max_batch)
        if most >= limit * _number(one.layout.replicas):
            return f"The batch is full: an engine runs {limit:,.0f} requests at most (--max-batch)."
        return f"The cache is full: it holds {most:,.0f} requests of this length."
    share, name = max((_number(getattr(one.found.step, part.name)), part.name) for part in fields(StepTime))
    total = _number(one.found.step.total)
    return (
        f"{takes(name).capitalize()} {100 * share / total:.0f} % of a decode step of {format_seconds(total)}."
        if total
        else ""
    )


def takes(part: str) -> str:
    """The part of a step and its verb."""
    return f"{PART_TEXT[part]} {'takes' if part in ONE else 'take'}"


def name_of(one: Choice) -> str:
    """Engine and split in words."""
    pools = layout_text(one.layout)
    return f"{one.served.engine.name} {pools if one.prefill is None else f'{layout_text(one.prefill)} -> {pools}'}"


def against(first: Choice, second: Choice) -> str:
    """The runner-up in numbers: how far behind, and which part of its step costs more of the time."""
    gap = first.total / second.total - 1.0 if second.total > 0 else 0.0
    faster = first.user / second.user - 1.0
    less, slower = _percent(-gap / (1.0 + gap)), _percent(-faster / (1.0 + faster))
    said = f"Runner-up: {name_of(second)}, {less} tokens/s and {slower} per user"
    mine, theirs = _shares(first), _shares(second)
    share, name = max((theirs[part] - mine[part], part) for part in mine)
    if share > SMALL:
        said += f"; {takes(name)} {100 * theirs[name]:.0f} % of its step against {100 * mine[name]:.0f} %"
    return f"{said}."


def _percent(change: float) -> str:
    return "the same" if abs(change) < 0.0005 else f"{100 * change:+.1f} %"


def _shares(one: Choice) -> dict[str, float]:
    total = _number(one.found.step.total) or 1.0
    return {part.name: _number(getattr(one.found.step, part.name)) / total for part in fields(StepTime)}


def disaggregated_text(loaded: bool, together: Choice, apart: Choice) -> str:
    """The best pair of pools against the best deployment without, under the same limits and load."""
    names = f"the best pair of pools, {name_of(apart)},"
    missing = [misses(one) for one in (together, apart)]
    if all(missing):
        return f"Disaggregated: {names} does no better: {missing[1]}."
    if missing[1]:
        return f"Disaggregated: {names} {missing[1]}; aggregated keeps the limits."
    if missing[0]:
        why = missing[0] if missing[0].startswith("does not") else f"does not: {missing[0]}"
        return f"Disaggregated: {names} keeps the limits; the best aggregated one, {name_of(together)}, {why}."
    times, rates = (
        [_number(one.found.e2e.mean) for one in (apart, together)],
        [one.total for one in (apart, together)],
    )
    mine, theirs = times if loaded else rates
    what = "time of a request" if loaded else "tokens/s"
    word = "counts as equal" if abs(mine / theirs - 1.0) < TIED else "wins" if (mine < theirs) == loaded else "loses"
    return f"Disaggregated {word}: {names} has {_percent(mine / theirs - 1.0)} {what} against {name_of(together)}."


def misses(one: Choice) -> str:
    """By how much a deployment misses: memory first, then that it keeps up, then limits."""
    found = one.found
    if not bool(np.all(np.asarray(found.fits))):
        memory = found.memory
        parts = {name: _number(getattr(memory, name)) for name in HELD_TEXT}
        short = sum(parts.values()) - memory.usable
        largest = ", ".join(
            f"{HELD_TEXT[name]} {size / GIB:.1f} GiB"
            for name, size in sorted(parts.items(), key=lambda pair: -pair[1])
            if size >= SMALLEST
        )
        if short > 0:
            return f"does not start: {short / GIB:.1f} GiB too much for {memory.usable / GIB:.1f} GiB ({largest})"
        return (
            f"does not start: {_number(memory.cache) / GIB:.1f} GiB of cache hold no request of this length ({largest})"
        )
    if one.traffic.load == "rate" and bool(np.all(np.asarray(found.saturated))):
        asked, answered = one.traffic.value, _number(found.requests_per_second)
        few = 100.0 * (1.0 - answered / asked)
        return f"does not keep up with {asked:g} requests/s: it answers {answered:.3g}, {few:.2g} % too few"
    said = []
    for name, latency, limit in (("TTFT", found.ttft, one.limits.ttft), ("TPOT", found.tpot, one.limits.tpot)):
        value = _number(latency.of(one.limits.percentile))
        if value > limit:
            above = f"{value / limit:.2f} times" if value >= 1.1 * limit else f"{100.0 * (value / limit - 1.0):.2g} % above"
            said.append(f"{name} {format_seconds(value)} is {above} the limit of {format_seconds(limit)}")
    return " and ".join(said)


def _number(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])
