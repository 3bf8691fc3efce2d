"""What a validation teaches, for the terminal: the likeliest mechanism of a miss, and what calibration can do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from planner.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


def learned_lines(found: Mapping[str, Any], file: str | None) -> Iterator[str]:
    """Lines below the tables of one validation; ``file`` is where it is written, None = nowhere."""
    likeliest = found.get("likeliest")
    for one in [likeliest, *likeliest.get("also", ())] if likeliest else ():
        yield one["sentence"]
        if one.get("check"):
            yield f"  what tells: {one['check']}"
    if found.get("run") is not None and file is not None:
        hardware = found["run"]["hardware"]["gpu"]
        yield (
            f"what was measured corrects the profile, with at least two validations of other layouts: plan calibrate {file} "
            f"MORE.yaml --hardware {hardware} --output my-cluster.yaml"
        )
    elif found.get("no_run") and found.get("rung") in ("full", "truncated", "trainer"):
        yield f"nothing for plan calibrate: {found['no_run']}"


def trainer_tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What a trainer measured of a plan beside the prediction, from the content of validation.yaml."""
    from rich import box
    from rich.table import Table

    device = found["device"] or {}
    yield f"{found['plan']}: {found['why']}; {found['num_gpus']} x {device.get('name') or 'a GPU that the log does not name'}"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("predicted", "measured", "error", "nine of ten runs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["times"]:
        cells = (
            format_seconds(row["predicted_seconds"]),
            format_seconds(row["measured_seconds"]),
            f"{row['error']:+.1%}",
        )
        low, high = (format_seconds(bound) for bound in row["interval"])
        table.add_row(f"{row['what']} (spread {row['spread']:.1%})", *cells, f"{low} to {high}{_missed(row)}")
    for row in (row for rank in found["ranks"] for row in rank["memory"]):
        cells = (f"{row['predicted_gib']:.2f} GiB", f"{row['measured_gib']:.2f} GiB", f"{row['error']:+.1%}")
        low, high = (f"{bound:.1f}" for bound in row["interval"])
        table.add_row(f"peak {row['what']}", *cells, f"{low} to {high} GiB{_missed(row)}")
    rates = found["rates"] or {}
    for what, form in (("tokens_per_second", "{:,.0f}"), ("mfu", "{:.1%}")):
        if rates.get(what) and rates[what]["measured"]:
            told, seen = rates[what]["predicted"], rates[what]["measured"]
            table.add_row(what.replace("_", " "), form.format(told), form.format(seen), f"{told / seen - 1:+.1%}", "")
    if table.row_count:
        yield table
    steps = found["steps"]
    yield f"{steps['measured']} steps after {steps['warm']} that do not count" + (
        f"; loss {rates['loss'][0]:.4f} to {rates['loss'][1]:.4f} (random weights begin near {rates['loss_of_chance']:.2f})"
        if rates.get("loss")
        else ""
    )
    if found.get("log"):
        yield f"log: {found['log']}"


def _missed(row: Mapping[str, Any]) -> str:
    return "" if row["inside"] else ", missed"
