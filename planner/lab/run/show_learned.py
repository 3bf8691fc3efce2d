"""What validations teach, for the terminal: the likeliest mechanism of a miss, a trainer's run, finalists by measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.lab.run.show import table
from planner.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


def learned_lines(found: Mapping[str, Any], file: Path | None) -> Iterator[str]:
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
    """What a trainer measured of a plan and what was predicted, from the content of validation.yaml."""
    device = (found["device"] or {}).get("name") or "a GPU that the log does not name"
    yield f"{found['plan']}: {found['why']}; {found['num_gpus']} x {device}"
    rows, rates = [], found["rates"] or {}
    for row in found["times"]:
        low, high, *seconds = map(format_seconds, (*row["interval"], row["predicted_seconds"], row["measured_seconds"]))
        name = f"{row['what']} (spread {row['spread']:.1%})"
        rows.append([name, *seconds, f"{row['error']:+.1%}", f"{low} to {high}{_missed(row)}"])
    for row in (row for rank in found["ranks"] for row in rank["memory"]):
        sizes = (f"{row[name]:.2f} GiB" for name in ("predicted_gib", "measured_gib"))
        low, high = (f"{bound:.1f}" for bound in row["interval"])
        rows.append([f"peak {row['what']}", *sizes, f"{row['error']:+.1%}", f"{low} to {high} GiB{_missed(row)}"])
    for what, form in (("tokens_per_second", "{:,.0f}"), ("mfu", "{:.1%}")):
        if rates.get(what) and rates[what]["measured"]:
            predicted, measured = rates[what]["predicted"], rates[what]["measured"]
            both = (form.format(predicted), form.format(measured))
            rows.append([what.replace("_", " "), *both, f"{predicted / measured - 1:+.1%}", ""])
    if rows:
        yield from table("", ("", "predicted", "measured", "error", "nine of ten runs"), rows, no_wrap=True)
    steps, loss = found["steps"], rates.get("loss")
    chance = f"random weights begin near {rates['loss_of_chance']:.2f}" if loss else ""
    yield f"{steps['measured']} steps after {steps['warm']} that do not count" + (
        f"; loss {loss[0]:.4f} to {loss[1]:.4f} ({chance})" if loss else ""
    )
    if found.get("log"):
        yield f"log: {found['log']}"


def _missed(row: Mapping[str, Any]) -> str:
    return "" if row["inside"] else ", missed"


def finalist_tables(found: Mapping[str, Any], file: Path | None) -> Iterator[RenderableType]:
    """The finalists in the content of a validation file, fastest first; what each teaches; the command that plans the fastest."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    yield Text("Finalists, fastest measured first", style="bold")
    shown = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "predicted"):
        shown.add_column(name, justify="right")
    shown.add_column("layout", overflow="fold")
    for name in ("step, predicted", "measured", "error"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in found["finalists"]:
        predicted, measured = row["predicted_seconds"], row["measured_seconds"]
        place = "" if row["measured_rank"] is None else str(row["measured_rank"])
        layout = row["layout"] + (" (the plan)" if row["own"] else "")
        said = row["outcome"].replace("_", " ") if measured is None else format_seconds(measured)
        error = f"{predicted / measured - 1:+.1%}" if measured is not None and row["compared"] else ""
        shown.add_row(place, str(row["predicted_rank"]), layout, format_seconds(predicted), said, error)
    yield shown
    for row in found["finalists"]:
        if row["sentence"]:
            yield f"finalist {row['predicted_rank']}: {row['sentence']}"
    if any(row["measured_as"] == "replayed_step" for row in found["finalists"]):
        yield "steps are replayed from the processor time of their passes: the machine is not quiet"
    if found["kendall_tau"] is not None:
        tau = f"{found['kendall_tau']:.2f} (1 = the same)"
        yield f"Kendall's tau of the predicted and the measured order: {tau}"
    if found["caveat"]:
        yield found["caveat"]
    if found["choose"]:
        yield f"the fastest as a plan: {found['choose']}"
    for one in found["validations"]:
        for line in learned_lines(one, file):
            yield f"finalist {one['predicted_rank']}: {line}"
