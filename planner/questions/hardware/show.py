"""Tables of ``plan hardware``: one profile, and where two differ."""

import math
from typing import Any

from rich.console import Console
from rich.markup import escape

from planner import units
from planner.questions.hardware.diff import ProfileDiff
from planner.terminal.tables import table

MOST = 30
"""Differences that are listed unless all are asked for."""


def in_words(value: float, unit: str) -> str:
    """A figure with its unit."""
    if unit == "bytes":
        return units.format_bytes(value)
    if unit == "bytes/s":
        return f"{value / units.GIGA:.4g} GB/s"
    if unit == "FLOP/s":
        return f"{value / units.TERA:.4g} TFLOP/s" if value >= units.TERA else f"{value / units.GIGA:.4g} GFLOP/s"
    return units.format_seconds(value) if unit == "seconds" else f"{value:.3g}"


def print_profile(out: Console, data: dict[str, Any]) -> None:
    """A profile as ``numbers.shown_profile`` gives it."""
    device, source = data["device"], data["provenance"] or {}
    out.print(f"[bold]{escape(data['name'])}[/bold]  {escape(device)}, {escape(data['vendor'])} {escape(data['arch'])}")
    figures = ((one["family"], one["name"], in_words(one["value"], one["unit"])) for one in data["figures"])
    out.print(table("family", "figure", "~value", rows=figures))
    _print_collectives(out, data["collectives"])
    out.print("Curves")
    for family, how in data["measured"].items():
        out.print(f"  {family}: {escape(how)}")
    _print_layers(out, data["layers"])
    if data["points"]:
        out.print("Points: " + ", ".join(f"{count} {family}" for family, count in data["points"].items()))
    if source:
        out.print("Measured")
        for key, value in source.items():
            if key != "notes":
                out.print(f"  {key}: {escape(_one_line(value))}")
    notes = [*data["notes"], *source.get("notes", ())]
    if notes:
        out.print("Notes")
        for note in notes:
            out.print(f"  - {escape(note)}")
    if data["unverified"]:
        out.print(f"Not checked in a document: {', '.join(data['unverified'])}")


def _print_collectives(out: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    cells = (
        (f"{row['op']} {row['dtype']}", _ranks(row),
         f"{units.format_seconds(row['latency_s'])} ± {row['latency_percent']:.0f} %", _rate(row["algorithm_bandwidth"]),
         f"{_rate(row['bus_bandwidth'])} ± {row['bandwidth_percent']:.0f} %", str(row["outliers"]),
         "-" if row["fit_percent"] is None else f"{row['fit_percent']:.1f} %")
        for row in rows
    )  # fmt: skip
    out.print(
        "Collectives as measured: latency, largest bandwidths, spread (half the 95 % interval), outliers, fit off by"
    )
    out.print(table("operation", "ranks", "~latency", "~algorithm", "~bus", "~out", "~fit", rows=cells))


def _print_layers(out: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    cells = (
        (f"{row['pass']} {row['dtype']}, hidden {row['hidden']}, ffn {row['ffn']}, {row['batch']} x {row['seq']} tokens",
         units.format_seconds(row["whole_us"] * units.MICRO), units.format_seconds(row["operators_us"] * units.MICRO),
         _percent(row["error_percent"]))
        for row in rows
    )  # fmt: skip
    out.print("Whole layers, and the sum of their operators by these curves")
    out.print(table("layer", "~whole", "~operators", "~difference", rows=cells))


def print_diff(out: Console, found: ProfileDiff, everything: bool) -> None:
    """The differences, the largest first."""
    if found.not_compared:
        out.print(f"Not compared, as one of the two assumes it: {', '.join(found.not_compared)}")
    count = len(found.differences)
    if not count:
        out.print(f"No difference beyond chance in {found.compared} comparisons.")
        return
    rows = (
        (one.family, one.name, in_words(one.first, one.unit), in_words(one.second, one.unit), _percent(one.percent),
         f"{one.spread:.1f} %", one.verdict)
        for one in found.differences[: None if everything else MOST]
    )  # fmt: skip
    headings = ("family", "figure", "~first", "~second", "~difference", "~chance", "second is")
    out.print(table(*headings, rows=rows))
    more = "" if everything or count <= MOST else f"; the {count - MOST} smaller ones with --all"
    out.print(f"{count} of {found.compared} comparisons differ by more than chance{more}.")


def _percent(value: float) -> str:
    return f"{value:+.1f} %" if math.isfinite(value) else "-"


def _rate(value: float) -> str:
    return in_words(float(f"{value:.3g}"), "bytes/s")


def _ranks(row: dict[str, Any]) -> str:
    """``4`` or ``4, 2 apart, 2 nodes``."""
    more = [f"{row['stride']} apart"] if row["stride"] != 1 else []
    return ", ".join([str(row["n"]), *more, *([f"{row['nodes']} nodes"] if row["nodes"] != 1 else [])])


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_one_line(one)}" for key, one in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
