"""A profile that was just measured, for the terminal: how fast each collective and product is, and how sure that is."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planner import units
from planner.curves import COLLECTIVES
from planner.hardware import HardwareProfile


def profile_summary(profile: HardwareProfile, output: str) -> dict[str, Any]:
    """What a person wants to know first."""
    origin = profile.provenance
    assert origin is not None
    return {
        "file": output, "device": profile.device, "machine": origin.machine, "date": origin.date,
        **{name: origin.cost.get(name, 0.0) for name in ("seconds", "points", "left_out", "failed", "outliers")},
        "measured": dict(profile.measured), "notes": list(profile.notes),
        "sustained_bf16_flops": profile.sustained_flops("bf16"), "memory_bandwidth": profile.memory_bandwidth,
    }  # fmt: skip


def profile_rows(profile: HardwareProfile) -> list[dict[str, Any]]:
    """One row per collective inside a node: latency and bus bandwidth of the largest group, spread and residual."""
    origin = profile.provenance
    assert origin is not None
    rows = []
    for op in COLLECTIVES:
        curve = profile.scale_up[op]
        group = int(curve.groups[-1])
        medians = sorted(
            values[0] for name, values in origin.residuals.items()
            if name.split()[:1] == [op] and isinstance(values, list)
        )  # fmt: skip
        rows.append({
            "op": op, "ranks": group, "latency": float(curve.latency()[-1]),
            "bus_bandwidth": float(curve.bus_bandwidth()[-1]), "largest": float(curve.sizes[-1]),
            "spread_percent": origin.spread.get(f"collective {op}"),
            "residual_percent": medians[len(medians) // 2] if medians else None,
        })  # fmt: skip
    return rows


def print_profile(console: Console, summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The table, what was not measured, and how to use the file."""
    if summary["measured"].get("scale_up") == "measured":
        table = Table(
            title="Collectives inside a node, largest group", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
        )
        table.add_column("")
        for heading in ("ranks", "latency", "bus bandwidth", "spread", "fit off by"):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(
                row["op"], str(row["ranks"]), units.format_seconds(row["latency"]),
                f"{units.format_bytes(row['bus_bandwidth'])}/s", *(_percent(row[f"{name}_percent"])
                for name in ("spread", "residual")),
            )  # fmt: skip
        console.print(table)
    console.print(
        f"{summary['points']:.0f} points in {summary['seconds']:.0f} s, {summary['outliers']:.0f} outlying samples among "
        f"them, {summary['left_out']:.0f} points left out by the budget, {summary['failed']:.0f} failed",
        soft_wrap=True,
    )
    for note in summary["notes"]:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    console.print(f"wrote {summary['file']}; use it with --hardware {summary['file']}", soft_wrap=True, markup=False)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} %"
