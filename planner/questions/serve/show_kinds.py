"""Deployments on several kinds of nodes, on the terminal and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner import units
from planner.errors import PlannerError
from planner.questions.serve.show import money, number, time
from planner.serving.kinds_rows import APART, PIPELINE, KindsAnswer, KindsRow
from planner.serving.serving_question import limits_text, traffic_text
from planner.terminal.tables import assumptions_table, fitted, percent, table


class ServedKinds:
    """Ways to serve on the nodes of a cluster file."""

    def __init__(self, found: KindsAnswer) -> None:
        self.found = found

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        found = self.found
        return {
            "model": found.question.model.name, "serves": found.kept, "notes": list(found.notes),
            "ways": [
                {**{name: value for name, value in vars(row).items() if name not in ("shares", "plan")}, "text": row.text,
                 "shares": [dict(vars(one)) for one in row.shares]}
                for row in found.rows
            ],
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the plan of a pipeline over several kinds. Raises PlannerError where none is shown."""
        plan = next((row.plan for row in self.found.rows if row.plan is not None), None)
        if plan is None:
            best = self.found.rows[0]
            one = best.shares[0]
            raise PlannerError(
                f"the best way is {best.text}, of which each kind is a plan of its own: plan serve --hardware {one.hardware} "
                f"--gpus {one.gpus} --output FILE; only a pipeline over several kinds is written here"
            )
        plan.save(path)

    def show(self, console: Console) -> None:
        """A line for each way, then who holds what in the first and in each way with several kinds."""
        found, task = self.found, self.found.question.task
        limits = f", {limits_text(task.limits)}" if task.limited else ""
        console.print(f"[bold]{escape(found.question.model.name)}[/bold], {traffic_text(task.traffic, task.loaded)}{limits}")
        mark = "" if task.limits.percentile == "mean" else f" {task.limits.percentile}"
        shown = table(
            "way", ">req/s", ">tok/s", f">TTFT{mark}", f">TPOT{mark}", ">$/h", ">$/M out", title="Ways to use the nodes"
        )
        for row in found.rows:
            style = "red" if not row.limits_kept else "" if shown.row_count else "bold"
            shown.add_row(
                escape(row.text), f"{row.requests_per_second:.3g}", number(row.tokens_per_second), time(row.ttft_s),
                time(row.tpot_s), money(row.usd_per_hour), money(row.usd_per_million_output), style=style,
            )  # fmt: skip
        console.print(shown)
        console.print(_who_does_what(found.rows, console.width))
        for text in [*map(_link_text, found.rows), *found.notes]:
            if text:
                console.print(escape(text), soft_wrap=not console.is_terminal)
        if not found.kept:
            console.print(Text("No way keeps the limits.", style="red"))
        console.print(assumptions_table(found.question.assumptions))


def _who_does_what(rows: Sequence[KindsRow], width: int) -> Table:
    """A line for each kind of each way; site and engine may be left out where all have the same."""
    lines = [
        (row.text if one is row.shares[0] else "", f"{one.kind} ({one.role})" if one.role != "all" else one.kind, one.site,
         str(one.gpus), one.engine, one.layout, percent(one.routed))
        for row in rows for one in row.shares
    ]  # fmt: skip
    columns = dict(zip(("way", "kind", "=site", ">GPUs", "=engine", "layout", ">routed"), zip(*lines, strict=True), strict=True))
    spare = [name for name in ("=site", "=engine") if len(set(columns[name])) == 1]
    return fitted(columns, spare, width, "Who does what", least=12)


def _link_text(row: KindsRow) -> str:
    """What passes between two kinds, and how a pipeline is cut, in a sentence."""
    cut = f"{row.cut_by}={','.join(map(str, row.cut))}" if row.what == PIPELINE else ""
    if row.what not in (APART, PIPELINE) or row.link_bandwidth is None:
        return cut and f"{row.text}: {cut}."
    used, most = row.link_bytes_per_second / units.GIGA, row.link_bandwidth / units.GIGA
    what = f"{cut}; {used:.3g} GB/s" if cut else f"{used:.3g} GB/s of cache"
    return f"{row.text}: {what} over a link of {most:.3g} GB/s."


def print_kinds(console: Console, found: ServedKinds) -> None:
    """Print them."""
    found.show(console)
