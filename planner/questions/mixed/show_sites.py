"""What crosses between sites, on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from planner.mixed.local_updates import LocalUpdate
from planner.mixed.site_report import SiteReport
from planner.terminal.tables import percent, seconds, table
from planner.units import KILO, format_bytes

METHODS = {"diloco": "DiLoCo", "streaming_diloco": "streaming DiLoCo", "local_sgd": "local SGD"}


def print_sites(console: Console, report: SiteReport) -> None:
    """Tables of what crosses, what would hide or shrink it, and of local updates."""
    shown = table("link", "=dimension", ">per step", ">busy", ">exposed", ">$/1,000 steps", title="Between the sites")
    for one in report.traffic:
        shown.add_row(
            escape(" - ".join(one.between)), one.dimension, format_bytes(one.bytes_per_step), seconds(one.seconds),
            seconds(one.exposed), f"{KILO * one.usd_per_step:,.2f}",
        )  # fmt: skip
    console.print(shown)
    for flight in report.in_flight:
        console.print(
            f"Pipeline {flight.pipeline + 1} waits for its sends, {seconds(flight.blocking)} a step; with sends that overlap "
            f"{seconds(flight.overlapped)}, and with {flight.extra} more microbatches in flight before the link "
            f"{seconds(flight.hidden)}, for {format_bytes(flight.memory)} of each GPU there.",
            soft_wrap=not console.is_terminal,
        )
    if report.reductions:
        ways = table("=gradients every step", ">sent per site", ">on the link", ">kernels")
        for number, way in enumerate(report.reductions):
            priced = " (priced)" if number == 0 and report.outer is None else ""
            ways.add_row(escape(way.name) + priced, format_bytes(way.bytes_per_step), seconds(way.seconds), seconds(way.kernels))
        console.print(ways)
    if report.local:
        _print_local(console, report)
    for note in report.notes:
        console.print(Text(note, style="dim"), soft_wrap=not console.is_terminal)


def _print_local(console: Console, report: SiteReport) -> None:
    """Utilisation by interval and width."""
    widths = sorted({one.bits for one in report.local}, reverse=True)
    shown = table("=local updates", *(f">{bits} bits" for bits in widths), title="Share of time in training")
    by: dict[tuple[str, int], dict[int, LocalUpdate]] = {}
    for one in report.local:
        by.setdefault((one.method, one.every), {})[one.bits] = one
    for (method, every), row in by.items():
        cells = [percent(row[bits].utilisation) if bits in row else "-" for bits in widths]
        shown.add_row(f"{METHODS[method]}, every {f'{every} steps' if every > 1 else 'step'}", *cells)
    console.print(shown)
    if report.outer is not None:
        own = report.outer
        console.print(
            f"{METHODS[own.method]} every {own.every} steps with {own.bits} bits: an average takes {seconds(own.average)}, a step "
            f"{seconds(own.step)} with its part of it; {percent(own.utilisation)} of the time is training.",
            soft_wrap=not console.is_terminal,
        )
    console.print(
        f"Local updates keep {format_bytes(report.outer_memory)} on every site: a copy of the weights and the outer momentum.",
        soft_wrap=not console.is_terminal,
    )
