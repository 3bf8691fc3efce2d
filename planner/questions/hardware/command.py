"""``plan hardware``: the profiles of the library, what one says, where two differ, and a picture of the curves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from planner.errors import PlannerError
from planner.terminal.flags import console


class HardwareGroup(click.Group):
    """Without a word it lists; the name of a profile alone means ``show``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from planner import library

            try:
                library.find("hardware", args[0])
            except PlannerError as error:
                from planner.errors import nearest_first

                nearest = nearest_first(args[0], self.commands)[0]
                raise PlannerError(f"{error}; or did you mean the command '{nearest}'?") from error
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=HardwareGroup, invoke_without_command=True)
@click.pass_context
def hardware(ctx: click.Context) -> None:
    """List the hardware profiles, or look into them.

    \b
    Examples:
      plan hardware
      plan hardware show h100-sxm
      plan hardware diff h100-sxm my-cluster.yaml
      plan hardware plot h200-sxm -o h200.png
    """
    if ctx.invoked_subcommand is None:
        from planner.terminal.library_tables import hardware_table

        console().print(hardware_table())


@hardware.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def show(name: str, as_json: bool) -> None:
    """What a profile says: figures read off its curves, where they come from, and what is assumed.

    \b
    Examples:
      plan hardware show h100-sxm
      plan hardware show my-cluster.yaml --json
    """
    from planner.hardware import load_hardware
    from planner.questions.hardware.show import in_words, shown_profile
    from planner.units import MICRO, format_seconds

    data = shown_profile(load_hardware(name))
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    from rich.markup import escape

    out = console()
    out.print(
        f"[bold]{escape(data['name'])}[/bold]  {escape(data['device'])}, {escape(data['vendor'])} {escape(data['arch'])}"
    )
    out.print(_table(("family", "figure", "value"), [
        (one["family"], one["name"], in_words(one["value"], one["unit"])) for one in data["figures"]
    ]))  # fmt: skip
    if data["collectives"]:
        out.print(
            "Collectives as measured: latency, largest bandwidths, spread (half the 95 % interval), outliers, fit off by"
        )
        out.print(_table(("operation", "ranks", "latency", "algorithm", "bus", "out", "fit"), [
            (f"{row['op']} {row['dtype']}", _ranks(row),
             f"{format_seconds(row['latency_s'])} ± {row['latency_percent']:.0f} %", _rate(row["algorithm_bandwidth"]),
             f"{_rate(row['bus_bandwidth'])} ± {row['bandwidth_percent']:.0f} %", str(row["outliers"]),
             "-" if row["fit_percent"] is None else f"{row['fit_percent']:.1f} %")
            for row in data["collectives"]
        ]))  # fmt: skip
    out.print("Curves")
    for family, how in data["measured"].items():
        out.print(f"  {family}: {escape(how)}")
    if data["layers"]:
        out.print("Whole layers, and the sum of their operators by these curves")
        out.print(_table(("layer", "whole", "operators", "difference"), [
            (f"{row['pass']} {row['dtype']}, hidden {row['hidden']}, ffn {row['ffn']}, {row['batch']} x {row['seq']} tokens",
             format_seconds(row["whole_us"] * MICRO), format_seconds(row["operators_us"] * MICRO),
             _percent(row["error_percent"]))
            for row in data["layers"]
        ]))  # fmt: skip
    if data["points"]:
        out.print("Points: " + ", ".join(f"{count} {family}" for family, count in data["points"].items()))
    if data["provenance"]:
        out.print("Measured")
        for key, value in data["provenance"].items():
            if key == "notes":
                continue
            out.print(f"  {key}: {escape(_one_line(value))}")
    notes = [*data["notes"], *((data["provenance"] or {}).get("notes", ()))]
    if notes:
        out.print("Notes")
        for note in notes:
            out.print(f"  - {escape(note)}")
    if data["unverified"]:
        out.print(f"Not checked in a document: {', '.join(data['unverified'])}")


@hardware.command()
@click.argument("first")
@click.argument("second")
@click.option("--all", "everything", is_flag=True, help="Show all differences, not the 30 largest.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def diff(first: str, second: str, everything: bool, as_json: bool) -> None:
    """Where two profiles differ by more than chance: a slow link, a throttled card, another driver.

    What both have measured is compared point by point, by family, group of ranks and curve, against the drift within each run
    and the scatter of points and curves; of twenty comparisons of two runs of one machine, one lists anything. Other figures
    count as different beyond their spread, at least 2 percent.

    \b
    Examples:
      plan hardware diff yesterday.yaml today.yaml
      plan hardware diff h100-sxm my-cluster.yaml --all
    """
    from dataclasses import asdict

    from planner.hardware import load_hardware
    from planner.questions.hardware.diff import CHANCE, assumed, differences
    from planner.questions.hardware.show import in_words

    one_profile, other_profile = load_hardware(first), load_hardware(second)
    found, compared = differences(one_profile, other_profile)
    left_out = sorted(assumed(one_profile) | assumed(other_profile))
    if as_json:
        rows = [{**asdict(one), "verdict": one.verdict} for one in found]
        click.echo(
            json.dumps(
                {
                    "first": first,
                    "second": second,
                    "compared": compared,
                    "chance": CHANCE,
                    "not_compared": left_out,
                    "differences": rows,
                },
                indent=2,
            )
        )
        return
    out = console()
    if left_out:
        out.print(f"Not compared, as one of the two assumes it: {', '.join(left_out)}")
    if not found:
        out.print(f"No difference beyond chance in {compared} comparisons.")
        return
    listed = found if everything else found[:30]
    out.print(_table(("family", "figure", "first", "second", "difference", "chance", "second is"), [
        (one.family, one.name, in_words(one.first, one.unit), in_words(one.second, one.unit), _percent(one.percent),
         f"{one.spread:.1f} %", one.verdict)
        for one in listed
    ]))  # fmt: skip
    more = f"; the {len(found) - len(listed)} smaller ones with --all" if len(listed) < len(found) else ""
    out.print(f"{len(found)} of {compared} comparisons differ by more than chance{more}.")


@hardware.command()
@click.argument("name")
@click.option("--output", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Picture to write: .png, .svg or .pdf.")  # fmt: skip
def plot(name: str, output: Path) -> None:
    """Draw the curves: bus bandwidth by size and group, GEMM rate by size, roofline.

    \b
    Examples:
      plan hardware plot h100-sxm -o h100.png
    """
    from planner.hardware import load_hardware
    from planner.questions.hardware.show import plot as draw

    if output.suffix not in (".png", ".svg", ".pdf"):
        raise PlannerError(f"{output}: name a picture that ends in .png, .svg or .pdf")
    draw(load_hardware(name), output)
    click.echo(f"wrote {output}", err=True)


def _percent(value: float) -> str:
    return f"{value:+.1f} %" if math.isfinite(value) else "-"


def _rate(value: float) -> str:
    from planner.questions.hardware.show import in_words

    return in_words(float(f"{value:.3g}"), "bytes/s")


def _ranks(row: dict[str, Any]) -> str:
    """``4`` or ``4, 2 apart, 2 nodes``."""
    more = [f"{row['stride']} apart"] if row["stride"] != 1 else []
    return ", ".join([str(row["n"]), *more, *([f"{row['nodes']} nodes"] if row["nodes"] != 1 else [])])


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_one_line(one)}" for key, one in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    right = {
        "value",
        "whole",
        "operators",
        "first",
        "second",
        "difference",
        "chance",
        "latency",
        "algorithm",
        "bus",
        "out",
        "fit",
    }
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
