"""Tables and pictures of ``plan resilience``."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from planner.costs import DAY, HOUR
from planner.elastic.availability import POLICIES, Replay
from planner.elastic.failure_answers import NAMES, PARTS
from planner.elastic.resilience import Resilience
from planner.terminal.pictures import new_figure, write_picture
from planner.terminal.tables import assumptions_table, percent, table
from planner.units import format_bytes, format_days, format_seconds, plural

HEADINGS = {
    "work": "work", "saves": "saves", "lost_work": "done again", "restarts": "new starts", "waiting": "waiting", "slower": "slower",
}  # fmt: skip
WIDE = 150
"""Columns from which the table of answers has room for whole names."""
CENTURY = 36_525.0
"""Days; what takes longer never ends."""
NARROW = 100
"""Columns below which goodput and shares are two tables."""
LINES = {"restart": "o-", "shrink": "o--", "replica_groups": "s-", "reroute": "^:"}
"""Marks and lines of the picture: equal answers lie on each other."""
SHORT = {"restart": "restart", "shrink": "shrink", "replica_groups": "replica groups", "reroute": "re-route"}


def spell(seconds: float) -> str:
    """A time in the unit that reads well."""
    if not math.isfinite(seconds):
        return "never"
    if seconds >= 2 * DAY:
        return format_days(seconds)
    if seconds >= 2 * HOUR:
        return f"{seconds / HOUR:.1f} h"
    return f"{seconds / 60.0:.1f} min" if seconds >= 120.0 else format_seconds(seconds)


def share(value: float) -> str:
    """A share of the time; what is there and rounds to nothing says so."""
    return "" if value == 0.0 else f"{100.0 * value:.2f} %" if value >= 5e-5 else "< 0.01 %"


def print_resilience(console: Console, found: Resilience) -> None:
    """Everything that was found."""
    job, asked, nodes = found.job, found.asked, found.nodes
    console.print(Text(f"{job.model} on {plural(nodes.nodes, 'node')}, {job.machines}", style="bold"))
    console.print(Text(job.layout_in_words))
    console.print(
        f"Failures: a node every {spell(nodes.node_mtbf)}, the job every {spell(nodes.mtbf)}"
        + (f"; {found.failures:.3g} expected in {asked.days:g} days of training." if math.isfinite(found.failures) else ".")
    )
    each = "step" if found.steps == 1 else f"{found.steps:,} steps"
    console.print(
        f"[bold]Save every {each}[/bold] ({spell(found.interval)}; Young's formula: {spell(found.young)}): "
        f"{format_bytes(job.times.size)} each; a save stops training for {format_seconds(job.times.stall)}"
        + (f" and is complete {format_seconds(job.times.behind)} later" if job.times.behind > 0 else "")
        + f". One failure costs {spell(found.lost)}."
    )
    best = found.answers[0]
    ends = math.isfinite(best.days)
    console.print(
        f"[bold]Best answer:[/bold] {NAMES[best.answer.key]}."
        if ends
        else f"[bold red]No answer ends:[/bold red] failures undo the work as fast as it is done, {asked.days:g} days of training "
        "are never reached."
    )
    names = NAMES if console.width >= WIDE else SHORT
    totals = [
        (names[one.answer.key], share(one.answer.goodput) if one.answer.shares else "", _days(one.days),
         _usd(one.usd if one.days < CENTURY else None))
        for one in found.answers
    ]  # fmt: skip
    shares = [tuple(share(one.answer.shares[name]) if one.answer.shares else "" for name in PARTS[1:]) for one in found.answers]
    headings = [f"~{HEADINGS[name]}" for name in PARTS[1:]]
    columns = ("=answer", ">goodput", "~days", ">USD")
    if console.width >= NARROW:
        console.print(table(*columns, *headings, rows=[(*a, *b) for a, b in zip(totals, shares, strict=True)]))
    else:
        console.print(table(*columns, rows=totals))
        console.print(table("=answer", *headings, rows=[(a[0], *b) for a, b in zip(totals, shares, strict=True)]))
    _print_kinds(console, found)
    for one in found.answers:
        if said := one.answer.why_not or one.answer.note:
            console.print(f"[dim]{SHORT[one.answer.key]}: {said}[/dim]")
    console.print(
        f"Spares: {plural(found.spares, 'node')} for a shortage less likely than {percent(asked.shortage)}; with "
        f"{nodes.spares} as given nodes are missing {share(found.shortage) or '0 %'} of the time."
    )
    parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in found.restart_parts.items())
    console.print(f"A restart takes {spell(sum(found.restart_parts.values()))}: {parts}.")
    _print_sweep(console, found)
    if found.replay is not None:
        print_replay(console, found.replay)
    console.print()
    console.print(assumptions_table(found.assumptions))


def _print_kinds(console: Console, found: Resilience) -> None:
    """Of several kinds of nodes what the failures of each cost."""
    if len(found.kinds) < 2:
        return
    rows = [
        (one.nodes.kind, f"{one.nodes.count}", spell(one.nodes.mtbf.seconds), f"{one.failures:.3g}", f"{one.nodes.spares}",
         f"{one.spares}", percent(one.without_one), percent(one.without_all) if one.without_all else "nothing fits")
        for one in found.kinds
    ]  # fmt: skip
    headings = ("=kind", ">nodes", "~one fails every", "~failures", "~spares", "~needed", "~rate without one", "~without all")
    console.print(table(*headings, rows=rows))
    if found.advice:
        console.print(Text(f"{found.advice}.", style="bold"))


def _days(days: float) -> str:
    return f"{days:,.1f}" if days < CENTURY else "never"


def _usd(usd: float | None) -> str:
    return "" if usd is None else f"{usd:,.0f}"


def _print_sweep(console: Console, found: Resilience) -> None:
    keys = [one.answer.key for one in found.answers if one.answer.shares]
    for title, name, points in (
        ("Goodput over the time between failures of a node", "mtbf_h", found.by_mtbf),
        ("Goodput over the number of nodes, with enough spares", "nodes", found.by_scale),
    ):
        rows = [
            (spell(one[name] * HOUR) if name == "mtbf_h" else f"{one[name]:,.0f}",
             *(percent(one[key]) if key in one else "" for key in keys))
            for one in (points[::2] if name == "mtbf_h" else points)
        ]  # fmt: skip
        if rows:
            console.print(table(">node fails every" if name == "mtbf_h" else ">nodes", *(f">{SHORT[key]}" for key in keys),
                                title=title, rows=rows))  # fmt: skip


def print_replay(console: Console, replay: Replay) -> None:
    """A trace and what each policy makes of it."""
    trace = replay.trace
    console.print()
    console.print(
        f"[bold]{escape(trace.name)}[/bold]: {trace.seconds / HOUR:.1f} h, {trace.mean:.1f} machines in the mean, "
        f"{trace.removed.sum():.0f} taken away: one machine stays {spell(trace.mtbf)}."
    )
    names = POLICIES if console.width >= NARROW else SHORT
    rows = [
        (names[one.policy], spell(one.work), percent(one.utilisation), f"{one.stops}",
         *(share(one.shares[name]) for name in ("work", "lost_work", "restarts", "waiting")))
        for one in replay.policies
    ]  # fmt: skip
    headings = ("policy", "~work of the plan", "~of what was held", "~stops", "~work", "~done again", "~new starts", "~waiting")
    console.print(table(*headings, rows=rows))


def draw(found: Resilience, path: Path) -> None:
    """Goodput over the time between failures and over the number of nodes; a replayed trace below. Raises PlannerError."""
    figure = new_figure(10.0, 4.2 if found.replay is None else 7.0, dpi=120)
    panels = figure.subplots(1 if found.replay is None else 2, 2, squeeze=False)
    for axes, name, points, label in (
        (panels[0][0], "mtbf_h", found.by_mtbf, "hours between failures of a node"),
        (panels[0][1], "nodes", found.by_scale, "nodes"),
    ):
        for key in NAMES:
            at = [(one[name], 100.0 * one[key]) for one in points if key in one]
            if at:
                axes.plot(*zip(*at, strict=True), LINES[key], label=SHORT[key], markersize=3)
        axes.set(xlabel=label, ylabel="goodput, %")
        axes.set_xscale("log", base=10 if name == "mtbf_h" else 2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.25)
    panels[0][0].axvline(found.nodes.node_mtbf / HOUR, color="0.5", linestyle=":")
    panels[0][0].legend(frameon=False)
    if found.replay is not None:
        minutes = found.replay.minutes
        hours = [one[0] / 60.0 for one in minutes]
        panels[1][0].step(hours, [one[1] for one in minutes], color="C0", linewidth=1)
        panels[1][0].set(xlabel="hours", ylabel="machines held")
        panels[1][0].yaxis.get_major_locator().set_params(integer=True)
        panels[1][1].step(hours, [100.0 * one[2] for one in minutes], color="C1", linewidth=1)
        panels[1][1].set(xlabel="hours", ylabel=f"rate, % of the plan ({SHORT[found.replay.policies[0].policy]})")
        for axes in panels[1]:
            axes.grid(alpha=0.25)
    figure.suptitle(f"{found.job.model}, {found.job.machines}", fontsize=10)
    write_picture(figure, path)
