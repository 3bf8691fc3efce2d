"""Tables of ``plan watch``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from planner.questions.resilience.show import spell
from planner.questions.watch.watched import Costed, Watched
from planner.terminal.tables import assumptions_table, percent, seconds, table
from planner.units import plural

KINDS = {
    "slow_rank": "slow rank", "slow_node": "slow node", "slow_stage": "slow stage", "slow_link": "slow link",
    "expert_imbalance": "uneven experts", "throttled": "throttled GPU", "broken": "driver error", "narrow_bus": "narrow bus",
}  # fmt: skip
LONGEST = 400
"""Letters of a new plan; one of many pipelines is longer."""
WIDE = 110
"""Columns from which the table of what could be done has room for how."""
SHOWN = 8
"""Findings in the table, the most expensive first."""


def parts(found: Watched, width: int) -> Iterator[RenderableType]:
    """What is shown, from above; ``width``: columns of the terminal."""
    yield Text(found.title, style="bold")
    yield Text(found.layout)
    low, high = found.interval
    planned = f"planned {seconds(found.planned)}, nine of ten runs {seconds(low)} to {seconds(high)}"
    step = "no step time was read" if found.measured is None else f"step {seconds(found.measured)}"
    at = found.seen.at
    reached = "" if at is None else f"at step {at:,}, {plural(at * found.batch, 'sample')}; "
    yield Text(f"{reached}{step}; {planned}; read: {', '.join(found.seen.sources)}")
    if found.findings:
        more = f", {len(found.findings) - SHOWN} more" if len(found.findings) > SHOWN else ""
        yield table("what", "who", "measured", ">costs", "~USD a day", rows=[_row(one) for one in found.findings[:SHOWN]])
        dollars = "" if found.usd_per_day is None else f", {found.usd_per_day:,.0f} USD a day"
        yield Text(f"Together {percent(found.loss)} of each step{dollars}{more}.")
    yield from _actions(found, width)
    for one in found.findings[:1]:
        if one.check:
            yield Text(f"Check: {one.check}")
    if found.skipped:
        yield Text(f"Not looked at: {found.skipped}.")
    yield Text.assemble(("Verdict: ", "bold"), found.verdict)


def _actions(found: Watched, width: int) -> Iterator[RenderableType]:
    """What could be done; in a narrow terminal how stands below."""
    if not found.actions:
        return
    wide = width >= WIDE
    rows = [
        (one.what.partition(":")[0], percent(one.gain), spell(one.cost),
         "never" if one.pays_after is None else spell(one.pays_after), "yes" if one.pays else "no", *([one.how] if wide else []))
        for one in found.actions
    ]  # fmt: skip
    headings = ("what could be done", ">gains", "~stands still", "~repaid after", "pays", *(["how"] if wide else []))
    yield table(*headings, rows=rows)
    for one in found.actions:
        name, _, more = one.what.partition(":")
        said = [more.strip()[:LONGEST], "" if wide else one.how]
        if one.pays and any(said):
            yield Text(f"{name}: {'; '.join(each for each in said if each)}")


def _row(one: Costed) -> tuple[str, ...]:
    usd = "" if one.usd_per_day is None or not one.loss else f"{one.usd_per_day:,.0f}"
    return KINDS[one.found.kind], one.found.who, one.found.evidence, percent(one.loss) if one.loss else "", usd


def print_watched(console: Console, found: Watched) -> None:
    """Print all of it."""
    for one in parts(found, console.width):
        console.print(one)
    if found.assumptions:
        console.print()
        console.print(assumptions_table(found.assumptions))
