"""Tables of a validation: predicted beside measured memory by rank, and the collectives of the worst one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

WORDS = {"optimizer_states": "optimizer states"}


def validation_tables(found: dict[str, Any]) -> Iterator[RenderableType]:
    """What ``plan validate`` prints of the content of validation.yaml."""
    ranks = found["ranks"]
    yield f"{found['plan']}: memory on fake tensors, priced for trainer {found['trainer']}, {found['num_gpus']} GPUs"
    for change in found["changes"]:
        yield f"changed to compare: {change}"
    for one in ranks:
        yield from _rank(one, worst=len(ranks) > 1 and one is ranks[0])
    yield _traffic(ranks[0])
    yield _collectives(ranks[0])
    yield from _verdict(found)


def _rank(one: dict[str, Any], *, worst: bool) -> Iterator[RenderableType]:
    from rich import box
    from rich.table import Table

    title = f"Rank {one['rank']}, pipeline stage {one['stage']}{', the worst' if worst else ''}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("GiB")
    for name in ("predicted", "measured", "error", "bound", "at the peak"):
        table.add_column(name, justify="right")
    for row in one["memory"]:
        error = (
            ""
            if row["error"] is None
            else f"{row['error']:+.1%}"
            if row["what"] != "weights"
            else f"{row['error']:+.2%}"
        )
        bound = "" if row["bound"] is None else f"{row['bound']:.1%}{'' if row['inside'] else ' missed'}"
        at_peak = one["at_peak_gib"].get(row["what"], sum(one["at_peak_gib"].values()))
        name = WORDS.get(row["what"], row["what"])
        table.add_row(name, f"{row['predicted_gib']:.3f}", f"{row['measured_gib']:.3f}", error, bound, f"{at_peak:.3f}")
    yield table
    more = one["receive_buffers_added_gib"]
    if more:
        yield f"{one['microbatches_run']} microbatches were run; the receive buffers of the others, {more:.3f} GiB, are added."


def _traffic(one: dict[str, Any]) -> RenderableType:
    """Bytes by operation and dimension, priced and issued."""
    from rich import box
    from rich.table import Table

    title = f"Bytes in collectives of rank {one['rank']}, {one['microbatches_run']} microbatches and one update"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("operation")
    table.add_column("dimension")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right")
    for row in one["traffic"]:
        error = (
            "not priced"
            if not row["predicted_bytes"]
            else "not issued"
            if row["error"] is None
            else f"{row['error']:+.1%}"
        )
        sizes = (format_bytes(row[name]) for name in ("predicted_bytes", "measured_bytes"))
        table.add_row(row["operation"], row["dimension"], *sizes, error)
    return table


def _collectives(one: dict[str, Any]) -> RenderableType:
    from rich import box
    from rich.table import Table

    title = f"Collectives of rank {one['rank']} in {one['microbatches_run']} microbatches and one update"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("operation")
    for name in ("ranks", "stride", "size", "times"):
        table.add_column(name, justify="right")
    for row in one["collectives"]:
        table.add_row(
            row["operation"], str(row["ranks"]), str(row["stride"]), format_bytes(row["bytes"]), str(row["times"])
        )
    return table


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    missed = [
        f"{WORDS.get(row['what'], row['what'])} of rank {one['rank']} by {row['error']:+.1%}"
        for one in found["ranks"]
        for row in one["memory"]
        if row["inside"] is False and row["error"] is not None
    ]
    yield f"outside of their bounds: {', '.join(missed)}" if missed else "all inside of their bounds"
