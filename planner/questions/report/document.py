"""The report of a plan as one document: every number once, for the page, Markdown, JSON and pictures alike."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from planner import library
from planner.costs import LEFT_OUT
from planner.record import record
from planner.schema import plain
from planner.terminal.tables import percent, seconds
from planner.units import format_count

FILE = "plan.yaml"
"""What the plan is called in the commands, and when it is saved from the page."""
FORMAT = 1
"""Version of the document as JSON."""
PAGE_ALONE = ("left_out", "file", "reasons")
"""Words of the page alone."""
DIGITS = 6
"""Significant digits of a number of the document; more are noise and make the page large."""
TABLE_ROWS = 120
"""Rows of a chart that its table shows."""

Value = float | int | str | bool | None


def rounded(value: Value) -> Value:
    """A number with DIGITS significant digits; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def shown(value: Value, kind: str) -> str:
    """A value for people, with its unit."""
    if value is None or value == "":
        return "-"
    if kind in ("text", "flag") or isinstance(value, str):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    if kind == "seconds":
        return "0 s" if value == 0 else seconds(value) if value > 0 else f"-{seconds(-value)}"
    if kind == "share":
        return percent(value)
    if kind == "signed_share":
        return f"{100 * value:+.1f} %"
    if kind == "gib":
        return f"{value:,.1f} GiB" if value >= 0.05 or value == 0 else "< 0.1 GiB"
    if kind == "rate":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if kind == "count":
        return f"{value:,.0f}"
    return format_count(value) if value >= 10_000 else f"{value:.4g}"


@record
class Column:
    """One column of the rows behind a chart."""

    key: str
    """Its name in the rows."""
    title: str
    """Heading, with the unit where it has one."""
    kind: str
    """seconds, share (a part of 1), signed_share, gib, rate (tokens/s), count (a whole number), number, text or flag."""
    in_table: bool = True
    """The table for people shows it."""


def columns(text: str) -> tuple[Column, ...]:
    """Columns from words 'key kind title, key kind title ...': without a title the key, '-' before it: not in the table."""
    found = []
    for one in text.split(","):
        key, kind, *title = one.split()
        name = key.removeprefix("-")
        found.append(Column(key=name, title=" ".join(title) or name, kind=kind, in_table=name == key))
    return tuple(found)


@dataclass(frozen=True)
class Chart:
    """One picture: what it says in a sentence, and the rows that it draws. Numbers are rounded once, so that all formats show
    the same."""

    name: str
    """What --chart calls it; its drawing is of the same name in charts.yaml.j2."""
    title: str
    reading: str
    """What the picture shows, computed from its numbers."""
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Value, ...]]
    """What is drawn, one mark or more for each row."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers that it draws: limits, the plan's own value."""
    notes: tuple[str, ...] = ()
    """What is left out or rough."""
    table: Sequence[tuple[Value, ...]] | None = None
    """Rows of the table where they are not those of the picture."""
    table_columns: tuple[Column, ...] = ()
    """Columns of that table."""
    short: str = ""
    """Title in the contents."""
    docs: str = ""
    """Page of docs/ and its section that say how the numbers are made."""

    def __post_init__(self) -> None:
        for name in ("rows", "table"):
            rows = getattr(self, name)
            if rows is not None:
                object.__setattr__(self, name, tuple(tuple(map(rounded, row)) for row in rows))
        object.__setattr__(self, "facts", {key: rounded(value) for key, value in self.facts.items()})

    @property
    def table_rows(self) -> Sequence[tuple[Value, ...]]:
        """Rows of the table behind the chart."""
        return self.rows if self.table is None else self.table

    def cells(self) -> tuple[list[Column], list[list[str]]]:
        """The columns of the table behind the chart in which anything stands, and their cells for people."""
        rows = self.table_rows[:TABLE_ROWS]
        shown_columns = [
            (column, [shown(row[at], column.kind) for row in rows])
            for at, column in enumerate(self.table_columns or self.columns) if column.in_table
        ]  # fmt: skip
        used = [(column, cells) for column, cells in shown_columns if set(cells) - {"-"}]
        return [column for column, _ in used], [list(row) for row in zip(*(cells for _, cells in used), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = {
            "name": self.name, "title": self.title, "reading": self.reading, "notes": list(self.notes),
            "docs": self.docs,
            "facts": dict(self.facts), "columns": [column.key for column in self.columns],
            "units": {column.key: column.kind for column in self.columns}, "rows": [list(row) for row in self.rows],
        }  # fmt: skip
        if self.table is not None:
            data["table"] = {
                "columns": [column.key for column in self.table_columns],
                "rows": [list(row) for row in self.table],
            }
        return data


@cache
def _texts() -> dict[str, Any]:
    return library.read_yaml(Path(__file__).with_name("charts.yaml"))


def chart(name: str, reading: str, rows: Sequence[tuple[Value, ...]], notes: Sequence[str] = (), **more: Any) -> Chart:
    """A chart with the title, columns and notes of charts.yaml; ``more``: its facts, and its table where that has other rows."""
    said = _texts()[name]
    facts = more.get("facts", {})
    named: dict[str, Any] = {"columns": columns(said["columns"].format(**facts)), "notes": (*notes, *said.get("notes", ()))}
    if "table" in more:
        named["table_columns"] = columns(said.get("table", said["columns"]).format(**facts))
    title = said["title"].format(**facts)
    named |= {"short": said.get("short", title), "docs": said.get("docs", "")}
    return Chart(name=name, title=title, reading=reading, rows=rows, **{**named, **more})


@dataclass(frozen=True)
class Figure:
    """One number of the heading, rounded."""

    label: str
    value: Value
    kind: str
    note: str
    """What it means or where it comes from, in a few words."""
    text: str = ""
    """The value for people, with its unit."""
    alarm: bool = False
    """It speaks against the plan."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text or shown(self.value, self.kind))
        object.__setattr__(self, "value", rounded(self.value))


@record
class Document:
    """Everything that a report says about one plan."""

    title: str
    """Model, GPUs."""
    job: str
    """The job in one line."""
    layout: str
    """The layout in one line."""
    fits: bool
    verdict: str
    """The answer first: what happens if this plan is run."""
    notices: tuple[str, ...]
    """What a reader must know before anything else."""
    figures: tuple[Figure, ...]
    why: tuple[str, ...]
    """Why this layout, sentence by sentence."""
    alternatives: Chart
    """The best plans of a search of the same job."""
    charts: tuple[Chart, ...]
    assumptions: tuple[Mapping[str, str], ...]
    basis: tuple[Mapping[str, str], ...]
    """Rates of the costs, each with its source."""
    plan: Mapping[str, Any]
    """The plan as a plan file holds it, priced again."""
    version: str
    """Of the planner."""
    date: str
    """Day on which the report was made, UTC."""
    run: tuple[Mapping[str, str], ...]
    """How to run the plan: what each command does, and the command."""
    rates: Mapping[str, float | None]
    """What the costs follow from: tokens, tokens_per_step, step_s, gpus, usd_per_gpu_hour, kwh_per_gpu_hour; empty where
    no number of tokens decides them."""
    left_out: str = "; ".join(LEFT_OUT)
    """What the costs leave out."""
    file: str = FILE
    """What the plan is called when it is saved."""
    reasons: str = "Why this layout"
    """Heading of ``why``."""

    def chart(self, name: str) -> Chart:
        """One chart by its name."""
        return next(one for one in self.charts if one.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --format json."""
        data = {name: plain(value) for name, value in vars(self).items() if name not in ("version", *PAGE_ALONE)}
        return {"planner_report": FORMAT, "planner": self.version, **data}


def today() -> dict[str, str]:
    """Version of the planner and date of a document."""
    try:
        version = metadata.version("planner")
    except metadata.PackageNotFoundError:
        version = ""
    return {"version": version, "date": datetime.now(UTC).strftime("%Y-%m-%d")}
