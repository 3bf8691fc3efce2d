"""Tables of traces: the step part by part next to the prediction, the ranks, collectives, kernels."""

from rich.console import Console
from rich.text import Text

from planner.kineto.kernel_names import ATTENTION, FAMILIES, GEMM
from planner.kineto.plan_traces import bus_bandwidth
from planner.questions.doctor.traced import NAMES, Traced
from planner.terminal.tables import percent, seconds, table
from planner.units import MEGA, TERA

RANKS, COLLECTIVES, SIZES = 16, 12, 12
"""Rows that are printed of each table; --json has all."""


def print_traced(console: Console, found: Traced) -> None:
    """Everything that the traces show."""
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if not found.rows:
        return
    one = found.rank
    console.print(Text(f"Traced step, {one.trace.name}: {seconds(one.step_time)}", style="bold"), end="")
    console.print(
        f", mean of {len(one.steps.spans)} by {one.steps.how or 'nothing'}; GPU busy {percent(one.busy_share)}"
    )
    total = sum(row.predicted for row in found.rows), sum(row.measured or 0.0 for row in found.rows)
    rows = [
        (NAMES[row.part], seconds(row.predicted), "in communication" if row.measured is None else seconds(row.measured),
         "" if row.measured is None else _signed(row.off))
        for row in found.rows
    ]  # fmt: skip
    rows.append(("step", seconds(total[0]), seconds(total[1]), _signed(total[1] - total[0])))
    console.print(table("exposed part of the step", ">predicted", ">traced", ">difference", rows=rows))
    console.print(Text(found.sentence))
    _print_ranks(console, found)
    _print_collectives(console, found)
    _print_kernels(console, found)


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "-") + seconds(abs(value))


def _print_ranks(console: Console, found: Traced) -> None:
    rows = []
    for one in found.job.parts[:RANKS]:
        waits = found.job.waits.get(-1 if one.trace.rank is None else one.trace.rank)
        rows.append((
            one.trace.name, seconds(one.step_time), percent(one.busy_share), seconds(sum(one.compute.values())),
            seconds(sum(one.exposed.values())), seconds(sum(one.hidden.values())), seconds(one.idle_host), seconds(one.idle_other),
            "" if waits is None else seconds(waits),
        ))  # fmt: skip
    headings = (
        ">step",
        ">busy",
        ">compute",
        ">comm. exposed",
        ">hidden",
        ">waits for host",
        ">other idle",
        ">waits for ranks",
    )
    console.print(table("", *headings, rows=rows))
    if len(found.job.parts) > RANKS:
        console.print(f"{len(found.job.parts) - RANKS} further ranks: --json")


def _print_collectives(console: Console, found: Traced) -> None:
    rows = [
        (
            one.kind,
            one.op.replace("_", "-") or "unknown",
            str(one.size or ""),
            f"{one.calls:.0f}",
            seconds(one.total),
            seconds(one.exposed),
        )
        for one in found.rank.traffic[:COLLECTIVES]
    ]
    if rows:
        console.print(table("group", "collective", ">ranks", ">calls", ">runs", ">exposed", rows=rows))
    fast = [
        (one.kind, one.op.replace("_", "-"), str(one.size), f"{one.bytes / MEGA:.3g} MB",
         f"{bus_bandwidth(one, one.seconds):.3g} GB/s",
         "" if priced != priced else f"{bus_bandwidth(one, priced):.3g} GB/s")
        for one, priced in sorted(found.bandwidths, key=lambda pair: -pair[0].bytes)[:SIZES]
    ]  # fmt: skip
    if fast:
        console.print(
            table("group", "with nothing else running", ">ranks", ">size", ">bus bandwidth", ">of the plan", rows=fast)
        )


def _print_kernels(console: Console, found: Traced) -> None:
    one = found.rank
    shares = ", ".join(f"{name} {percent(value / one.step_time)}" for name, value in one.compute.items() if value)
    rate = f"; matrix products at {one.product_rate / TERA:.0f} TFLOP/s" if one.product_rate else ""
    both = one.compute[FAMILIES[GEMM]] + one.compute[FAMILIES[ATTENTION]]
    console.print(
        f"Of the step: {shares or 'no computation'}; matrix products and attention together {percent(both / one.step_time)}{rate}."
    )
    rows = [(name, family, seconds(time)) for name, family, time in one.top]
    console.print(table("longest kernels", "family", ">per step", rows=rows))
