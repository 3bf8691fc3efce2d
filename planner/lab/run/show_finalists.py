"""Tables of ``plan validate --top``: finalists by measurement, and the command that makes the fastest the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from planner.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


def finalist_tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What is printed of the finalists in the content of a validation file."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    yield Text("Finalists, fastest measured first", style="bold")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "predicted"):
        table.add_column(name, justify="right")
    table.add_column("layout", overflow="fold")
    for name in ("step, predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["finalists"]:
        told, seen = row["predicted_seconds"], row["measured_seconds"]
        place = "" if row["measured_rank"] is None else str(row["measured_rank"])
        layout = row["layout"] + (" (the plan)" if row["own"] else "")
        if seen is None:
            table.add_row(
                place, str(row["predicted_rank"]), layout, format_seconds(told), row["outcome"].replace("_", " "), ""
            )
            continue
        cells = (format_seconds(told), format_seconds(seen), f"{told / seen - 1:+.1%}" if row["compared"] else "")
        table.add_row(place, str(row["predicted_rank"]), layout, *cells)
    yield table
    for row in found["finalists"]:
        if row["sentence"]:
            yield f"finalist {row['predicted_rank']}: {row['sentence']}"
    if any(row["measured_as"] == "replayed_step" for row in found["finalists"]):
        yield "steps are replayed from the processor time of their passes: the machine is not quiet"
    tau = found["kendall_tau"]
    if tau is not None:
        yield f"Kendall's tau of the predicted and the measured order: {tau:.2f} (1 = the same)"
    if found["caveat"]:
        yield found["caveat"]
    if found["choose"]:
        yield f"the fastest as a plan: {found['choose']}"
