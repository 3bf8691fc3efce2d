"""The cheapest hardware for the terminal: the answer, a table of cards, why some have no plan, and the lists of their prices."""

from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.explain import layout_text
from planner.questions.what_if.changed_rows import Row
from planner.terminal.tables import fitted, seconds

NOT_SEARCHED = (
    ">= not searched: no plan on these can be the cheapest. By their computation alone, or by the fastest layout without a memory "
    "limit, they cost at least so much. Name cards with --hardware to plan each."
)
SPARE = ("~other prices", "~list")
"""Columns that are left out of a table that is too wide, the first of them first."""
ROOM_FOR_PLANS = 110
"""Characters of a line from which on plans stand in the table, else below it."""


def print_cheapest(console: Console, rows: Sequence[Row], base: Row, money: Callable[[float | None], str]) -> None:
    """``rows``: one per kind of hardware, by cost; ``base``: the job as it is."""
    console.print(Text(_answer(rows, base, money), style="bold"))
    console.print()
    within = console.width >= ROOM_FOR_PLANS
    console.print(_table(rows, console.width, money, plans=within))
    if not within:
        for row in rows:
            if row.fits and row.layout is not None:
                console.print(Text(f"{row.label}: {layout_text(row.layout)}"))
        console.print()
    if any(not row.searched for row in rows):
        console.print(Text(NOT_SEARCHED, style="dim"))
    _print_reasons(console, rows)


def print_price_lists(console: Console, rows: Sequence[Row]) -> None:
    """Where the prices of cards come from."""
    lists = _lists(rows)
    for key, (source, date) in zip(_letters(len(lists)), lists, strict=True):
        console.print(Text(f"list {key}: {source}{f', {date}' if date else ''}", style="dim"))


def _answer(rows: Sequence[Row], base: Row, money: Callable[[float | None], str]) -> str:
    """The cheapest in a sentence, against the job as it is."""
    best = next((row for row in rows if row.fits), None)
    if best is None or best.usd_per_million_tokens is None:
        return "No plan fits on any of them" if best is None else f"{best.label}: no price is known"
    text = f"Cheapest: {best.label}, {money(best.usd_per_million_tokens)} USD per million tokens"
    own = base.usd_per_million_tokens
    if own is None or best.hardware == base.hardware:
        return text + (", the hardware of the job as it is" if best.hardware == base.hardware else "")
    return f"{text}; {base.hardware} x {base.num_gpus}, the job as it is, costs {own / best.usd_per_million_tokens:.1f} times that"


def _lists(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The lists that prices come from, with their dates, in the order of the rows."""
    prices = [row.rates.price for row in rows if row.rates is not None and row.rates.price is not None]
    return list(dict.fromkeys((one.source, one.date) for one in prices))


def _letters(number: int) -> list[str]:
    """a to z, then numbers."""
    return [ascii_lowercase[n] if n < len(ascii_lowercase) else str(n + 1) for n in range(number)]


def _table(rows: Sequence[Row], width: int, money: Callable[[float | None], str], plans: bool) -> Table:
    """A row per card: what it costs, or costs at the least, and its plan."""
    lists = _lists(rows)
    key = dict(zip(lists, _letters(len(lists)), strict=True))
    cells = [_cells(row, key, money) for row in rows]
    columns = {name: [one[name] for one in cells] for name in cells[0] if plans or name != "plan"}
    found = fitted(columns, SPARE, width, title="Hardware by cost")
    for shown, row in zip(found.rows, rows, strict=True):
        first = row is next((one for one in rows if one.fits), None)
        shown.style = "bold" if first else "" if row.fits else "dim" if not row.searched else "red"
    return found


def _cells(row: Row, key: dict[tuple[str, str], str], money: Callable[[float | None], str]) -> dict[str, Any]:
    """By heading."""
    one, rates = row.prediction, row.rates
    price = None if rates is None else rates.price
    others = [] if rates is None else [each.usd_per_hour for each in rates.other_prices]
    least, dollars = row.least_step_time_s, row.least_usd_per_million_tokens
    fits = one is not None and row.fits
    return {
        "=hardware": row.label,
        ">USD/1M tok": money(row.usd_per_million_tokens) if fits else "-" if dollars is None else f">= {money(dollars)}",
        ">step": seconds(one.step_time_s) if fits and one else "no plan" if least is None else f">= {seconds(least)}",
        ">USD/h": "-" if price is None else money(price.usd_per_hour),
        "~other prices": "" if not others else _span(min(others), max(others), money),
        "~list": "" if price is None else key[price.source, price.date],
        "plan": layout_text(row.layout) if fits and row.layout else "" if row.searched else "not searched",
    }


def _span(least: float, largest: float, money: Callable[[float | None], str]) -> str:
    return money(least) if least == largest else f"{money(least)}-{money(largest)}"


def _print_reasons(console: Console, rows: Sequence[Row]) -> None:
    """Why some have no plan, or miss the goal; those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.searched and row.why and (not row.fits or row.missed):
            text = row.why.removeprefix(f"{row.hardware} ")
            reasons.setdefault(text, []).append(row.label)
    for text, labels in reasons.items():
        console.print(Text(f"{', '.join(labels)}: {text}", style="red"))
