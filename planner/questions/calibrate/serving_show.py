"""What benchmarks say of an engine's host, on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from planner.questions.calibrate.serving_fit import ServingFit
from planner.terminal.tables import seconds, table


def print_serving_fit(console: Console, found: ServingFit) -> None:
    """Host times before and after, runs before and after, what was not written."""
    names = {
        "step": "a step", "sequence": "a sequence in it", "streamed": "of that, the response with its token",
        "relayed": "its token from stage to stage", "launch": "a kernel outside a graph", "exposed": "of that, idle on the GPU",
        "response": "a response of the server", "prompt_token": "a prompt token", "first_token": "a request before its first token",
    }  # fmt: skip
    lines = [
        (names[name], seconds(before), seconds(found.engine.host[name])) for name, before in found.base.host.items()
    ]
    console.print(
        table(
            "host time of",
            ">before",
            ">fitted",
            title=f"{found.base.label}, host x {found.host:.2f} ({found.host_range[0]:.2f} to {found.host_range[1]:.2f})",
            rows=lines,
        )
    )

    def error(value: float, measured: float) -> str:
        return f"{seconds(value)} ({100 * (value / measured - 1):+.1f} %)"

    rows = [
        (one, seconds(measured), error(before, measured), error(after, measured))
        for one, measured, before, after in found.rows
    ]
    console.print(table("run", ">TPOT", ">predicted before", ">predicted after", rows=rows))
    for note in found.notes:
        console.print(Text(f"{note[:1].upper()}{note[1:]}.", style="yellow"))
