"""Little's law as a check of rows: requests in flight = requests/s x seconds of one, whatever the server does."""

from __future__ import annotations

from planner.serving.runs.run_schema import ServingRow
from planner.units import KILO

LOW, HIGH = 0.6, 1.15
"""Throughput over in flight x output / latency that is believed: a run of few waves fills and drains at the ends, and medians
stand for means; no server yields more than what is in flight."""


def broken(row: ServingRow) -> str:
    """What a closed loop's figures say that cannot be; '' = nothing, or they do not suffice to tell."""
    flight, output = row.get("load.value"), row.get("load.osl")
    rate = row.measured.get("tokens_per_s_total_output")
    if row.get("load.kind") != "concurrency" or not flight or not output or not rate:
        return ""
    ratio = row.get("load.range_ratio")
    output *= 1.0 if ratio is None else (1.0 + ratio) / 2.0
    seconds = _seconds(row, output)
    if not seconds:
        return ""
    implied = flight * output / seconds
    if LOW <= rate / implied <= HIGH:
        return ""
    return (
        f"breaks Little's law: {rate:,.0f} output tokens/s, but {flight:g} requests in flight of {output:,.0f} tokens in "
        f"{seconds:.1f} s are {implied:,.0f}"
    )


def _seconds(row: ServingRow, output: float) -> float | None:
    """Seconds of a request: as measured, or first token and the others."""
    for statistic in ("mean", "unstated", "p50"):
        if whole := row.measured.get(f"e2e_ms.{statistic}"):
            return whole / KILO
        first, other = (row.measured.get(f"{name}.{statistic}") for name in ("ttft_ms", "tpot_ms"))
        if first and other:
            return (first + (output - 1.0) * other) / KILO
    return None
