"""Little's law as a check of rows: requests in flight = requests/s x seconds of one, whatever the server does."""

from __future__ import annotations

from planner.serving.runs.run_schema import ServingRow
from planner.units import KILO

LOW, HIGH = 0.6, 1.15
"""Throughput over in flight x output / latency that is believed: a run of few waves fills and drains at the ends, and medians
stand for means; no server yields more than what is in flight."""
LEAST_WAVES, WAVE_SPREAD, MOST_PROMPT = 5.0, 0.1, 8.0
"""Waves from which the sign is no chance, how near the first token must come to their mean, and prompt over answer at most."""


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


def all_at_once(row: ServingRow, waves: float | None) -> str:
    """Whether a closed loop was none; '' = no sign of it.

    Of W N prompts that are all sent at once to a server that runs B of them, the k-th wave waits k answers: mean TTFT is
    (W - 1) / 2 times the decode of an answer, whatever B and N are. Where that is what was measured the batch limit B of the server
    decides all of the row, and the row does not state it. Long prompts and short answers may wait as long for other reasons.
    """
    output, prompt = row.get("load.osl"), row.get("load.isl")
    first, token = (
        row.measured.get(f"{name}.mean", row.measured.get(f"{name}.unstated", 0.0)) for name in ("ttft_ms", "tpot_ms")
    )
    closed = (
        row.get("load.kind") == "concurrency" and not row.get("decode") and waves is not None and waves >= LEAST_WAVES
    )
    if not closed or not waves or not output or not first or not token or (prompt or 0.0) > MOST_PROMPT * output:
        return ""
    ratio = row.get("load.range_ratio")
    answer = (output * (1.0 if ratio is None else (1.0 + ratio) / 2.0) - 1.0) * token
    if answer <= 0.0 or abs(first / answer / ((waves - 1.0) / 2.0) - 1.0) > WAVE_SPREAD:
        return ""
    return (
        f"no closed loop: the first token takes {first / answer:.1f} times the answer, as where all {waves:g} waves are sent at "
        "once to a server with a batch limit, which is not stated"
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
