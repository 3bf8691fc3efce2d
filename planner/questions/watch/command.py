"""``plan watch``: what holds a running job up, and whether another plan would pay."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from planner.errors import PlannerError
from planner.terminal.flags import console, emit, progress


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("logs", nargs=-1, metavar="[LOG ...]", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url", metavar="URL", help="Prometheus server, or an exporter's /metrics (DCGM, own metrics of ranks).")
@click.option("--once", is_flag=True, help="Look once and stop, for cron; the default where no person looks.")
@click.option("--every", type=click.FloatRange(1.0, 86400.0), default=10.0, metavar="S", help="Seconds between two looks. [10]")
@click.option("--remaining", metavar="TIME", help="Training that is left, like 3days: what a change must pay for itself in. [24h]")
@click.option("--spares", type=int, metavar="N", help="Nodes that wait. [of the cluster file, else 0]")
@click.option("--price", type=float, metavar="USD", help="Dollars per GPU-hour. [of the cluster file, else the profile]")
@click.option(
    "--cluster", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Cluster file: storage, spares, price.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the best new plan, or order of experts, that pays (.yaml or .json); looks once.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables; looks once.")
def watch(
    file: Path, logs: tuple[Path, ...], url: str | None, once: bool, every: float, as_json: bool, output: Path | None, **flags: Any
) -> None:
    """What holds a running job up: slow rank, node, stage or link, throttled GPU, uneven experts; its cost, and what would pay.

    PLAN is the plan that runs. LOGs are training logs (Megatron, torchtitan, DeepSpeed, nanotron, transformers), CSV tables with a
    column rank and seconds (step_s, compute_s, comm_s, wait_s, expert_tokens; node; peer: a pair of ranks), with layer, expert and
    tokens, CSV of nvidia-smi --query-gpu, or what 'dcgmi dmon -e 100,112,150,155' prints (one file for each node). A slow rank
    shows in compute_s: the step itself is as long on all of them. Nothing is changed: commands are printed.

    \b
    Examples:
      plan watch plan.yaml train.log
      plan watch plan.yaml ranks.csv gpus.csv --once --json
      plan watch plan.yaml ranks.csv --once --output next.yaml
      plan watch plan.yaml --url http://prometheus:9090 --every 30
    """
    from planner import api

    def look(**more: Any) -> Any:
        return api.watch(file, *logs, url=url, **flags, **more)

    if once or as_json or output is not None or not sys.stdout.isatty():
        with progress("looking") as say:
            found = look(progress=say)
        emit(found, as_json)
        if output is not None:
            what = found.save(output)
            click.echo(f"wrote {output}: {what}" if what else f"{output} was not written: no new plan pays", err=True)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    out = console()
    with Live(Text("looking"), console=out, refresh_per_second=2) as live:
        found, number = None, 0
        first = {"progress": lambda what: live.update(Text(f"looking: {what}"))}
        while True:
            number += 1
            when = f"look {number}, {time.strftime('%H:%M:%S')}; the next in {every:g} s, Ctrl-C ends"
            try:
                found = look(before=found, **({} if found else first))
                live.update(Group(*found.parts(out.width), Text(when, style="dim")))
            except PlannerError as error:  # a log that is being written, an endpoint that starts: said, and looked at again
                live.update(Group(Text(str(error)), Text(when, style="dim")))
            time.sleep(every)
