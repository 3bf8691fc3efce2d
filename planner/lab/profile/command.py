"""``plan profile``: measure this machine, or many under torchrun or srun, and write a hardware profile."""

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from planner import library, units
from planner.cluster_file import ClusterFile
from planner.curves import COLLECTIVES
from planner.detect import PATIENT, asked_driver
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.lab.launch.gpus import Gpus, gpus_here, require_known, require_ranks
from planner.lab.launch.nccl import without_multicast
from planner.lab.launch.place import Place, commands, place_from
from planner.lab.launch.state import Bar, State
from planner.lab.launch.torchrun import InterruptedRunError, need_torch, run_here
from planner.lab.profile.points import PARTS, Settings
from planner.model import load_model
from planner.terminal.flags import completed, console, this_program

BUDGET = {"cpu": "1m", "cuda": "10m"}
MOST_ON_CPU = 64


@click.command()
@click.option("--output", type=click.Path(dir_okay=False), help="Profile to write, a YAML file.")
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="Model that decides what is measured; repeatable.",
    shell_complete=completed("model"),
)
@click.option("--budget", metavar="TIME", help="Time to measure, like 90s or 10m. [10m; 1m on a CPU]")
@click.option("--resume", is_flag=True, help="Go on with what an earlier run of the same --output has measured.")
@click.option("--ranks", type=int, metavar="N", help="Processes on this machine. [its GPUs; its cores, at most 8]")
@click.option("--only", "only", multiple=True, metavar="PART", help="collectives, compute or memory; repeatable. [all]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What to measure. [cuda where there is a GPU]")
@click.option(
    "--hardware", metavar="NAME", help="Profile for what is not measured. [by the name of the device]",
    shell_complete=completed("hardware"),
)  # fmt: skip
@click.option("--network-bandwidth", metavar="RATE", help="Line rate per GPU between nodes, like '400 Gb/s'.")
@click.option("--max-size", metavar="SIZE", help="Largest buffer of a collective, like '256 MiB'. [by the models]")
@click.option("--timeout", default="30s", metavar="TIME", help="A step that takes longer has hung. [30s]")
@click.option("--health", is_flag=True, help="No profile: pairs of GPUs and nodes, NICs, and the slow node by bisection.")
@click.option("--print-commands", is_flag=True, help="Print the torchrun and SLURM commands for --nodes and stop.")
@click.option("--nodes", type=int, default=2, metavar="N", help="Machines, for --print-commands. [2]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of a table.")
def profile(
    output: str | None, print_commands: bool, nodes: int, ranks: int | None, as_json: bool, **flags: Any
) -> None:
    """Measure the hardware and write a profile that --hardware uses.

    On one machine the processes are started with torchrun; for more, start the same command on every machine with torchrun or
    srun (--print-commands shows how). Collectives, operators and memory are measured, those first that matter most for the
    models; without a GPU the CPU is measured with gloo. Ctrl-C keeps what was measured, and --resume goes on.

    Where the GPUs of the machines differ, each kind gets its own profile next to --output, which is then a cluster file with the
    kinds and the links between them.

    \b
    Examples:
      plan profile --output my-node.yaml
      plan profile --output my-node.yaml --model llama-8b --budget 20m
      plan profile --output my-node.yaml --only collectives --resume
      plan profile --output laptop.yaml --device cpu --ranks 2 --budget 30s
      plan profile --output my-cluster.yaml --print-commands --nodes 4
      plan profile --health --output health.yaml
      plan --model llama-8b --gpus 8 --hardware my-node.yaml
    """
    if output is None:
        raise PlannerError("where to? Give --output FILE.yaml, the profile to write")
    if print_commands:
        default = _per_machine(flags) if ranks is None else ranks
        program = this_program({"--print-commands"}, {"--nodes", "--ranks"})
        click.echo(commands("profile", nodes, default, program, on_cpu=flags["device"] == "cpu"), nl=False)
        return
    place = place_from(os.environ)
    settings, gpus = _settings(output, flags)
    if settings.health:
        _checked(settings, place, ranks, gpus, as_json)
        return
    if place is None:
        written: HardwareProfile | ClusterFile | None = _from_here(settings, _ranks(ranks, gpus))
    else:
        written = _as_rank(settings, place)
    if isinstance(written, ClusterFile):
        _print_kinds(written, settings.output, as_json)
    elif written:
        summary, rows = _summary(written, settings.output), _rows(written)
        if as_json:
            click.echo(json.dumps({**summary, "curves": rows}, indent=1))
        else:
            _print(console(), summary, rows)


def _settings(output: str, flags: dict[str, Any]) -> tuple[Settings, Gpus]:
    """The flags, checked, and the GPUs that are measured; what needs no look at the machine comes first."""
    rate, size, budget = flags["network_bandwidth"], flags["max_size"], flags["budget"]
    settings = Settings(
        output=output, device="cpu", models=flags["models"], resume=flags["resume"], only=flags["only"] or PARTS,
        budget=seconds_of(budget or BUDGET["cpu"], "--budget"), timeout=seconds_of(flags["timeout"], "--timeout"),
        base=flags["hardware"], health=flags["health"], command=shlex.join(["plan", *sys.argv[1:]]),
        largest=None if size is None else units.parse(size, "bytes", what="--max-size"),
        network_bandwidth=None if rate is None else units.parse(rate, "bytes/s", what="--network-bandwidth"),
    )  # fmt: skip
    for name in settings.models:
        if load_model(name).linear:
            raise PlannerError(f"--model {name}: linear attention is not among what is measured; name a transformer")
    if settings.base:
        load_hardware(settings.base)
    library.require_folder(Path(output))
    need_torch()
    gpus = gpus_here(flags["device"])
    if not gpus.count:
        return settings, gpus
    if not settings.base and not settings.health:  # found out before anything is measured
        require_known(gpus)
    return replace(settings, device="cuda", budget=seconds_of(budget or BUDGET["cuda"], "--budget")), gpus


def seconds_of(text: str, flag: str) -> float:
    """``90s``, ``10m``, ``1h`` or what units.parse knows."""
    text = text.strip()
    return units.parse(f"{text[:-1]} min" if text[-1:] == "m" else text, "seconds", what=flag, like="90s or 10m")


def _per_machine(flags: Mapping[str, Any]) -> int:
    """Processes of each machine where nobody says how many: its GPUs; without any, as on a login node, those of the profile, else
    8, which is said."""
    if flags["device"] == "cpu":
        return default_on_cpu()
    here = len(asked_driver(PATIENT).names)
    if here:
        return here
    base = flags["hardware"]
    count = int(load_hardware(base).gpus_per_node) if base else 8
    click.echo(f"no GPU here: {count} per machine {f'as {base} has' if base else 'assumed'}; --ranks N says otherwise", err=True)
    return count


def default_on_cpu() -> int:
    """Processes on a processor: a power of two, at most its cores and 8."""
    return int(2 ** min((os.cpu_count() or 1).bit_length() - 1, 3))


def _ranks(ranks: int | None, gpus: Gpus) -> int:
    """Processes of this machine. Raises PlannerError."""
    if gpus.count:
        if ranks is not None and ranks >= 1:
            require_ranks(ranks, gpus)
        most, default = gpus.count, gpus.count
    else:
        most, default = MOST_ON_CPU, default_on_cpu()
    ranks = default if ranks is None else ranks
    if not 1 <= ranks <= most:
        cores = "" if gpus.count else f"; it has {os.cpu_count()} cores, and more ranks than those share them"
        raise PlannerError(f"--ranks {ranks}: the number of processes on this machine, from 1 to {most}{cores}")
    return ranks


def profile_here(settings: Settings, ranks: int, show: Callable[[State], object]) -> float:
    """Measures with ``ranks`` processes of this machine; the journal holds the result. Seconds that it took.

    Raises what ``run_here`` raises. No torch in this process.
    """
    with tempfile.TemporaryDirectory(prefix="plan-profile-") as name:
        return run_here("planner.lab.profile", json.dumps(vars(settings)), ranks, Path(name), show)


def _from_here(settings: Settings, ranks: int) -> HardwareProfile:
    """One machine: torchrun is started, the profile is made of the journal."""
    from planner.lab.profile.profile_file import write_profile

    def stamp() -> tuple[int, int] | None:
        """Of a file that is replaced when it is written."""
        path = settings.journal
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None

    before = stamp()
    try:
        with Bar() as bar:
            seconds = without_multicast(
                lambda again: profile_here(replace(settings, resume=True) if again else settings, ranks, bar.show)
            )
    except PlannerError as error:  # a journal that this run could not use holds nothing of it
        stopped = isinstance(error, InterruptedRunError)
        kept = [_kept(settings)] if stamp() != before else ["nothing was measured"] if stopped else []
        raise PlannerError("; ".join([str(error), *kept])) from error
    return write_profile(settings, seconds)


def _checked(settings: Settings, place: Place | None, ranks: int | None, gpus: Gpus, as_json: bool) -> None:
    """``--health``: measures, then rank 0 prints and draws what is in the file."""
    from planner.lab.profile import health_words

    with Bar(quiet=place is not None and place.rank != 0) as bar:
        if place is None:
            count = _ranks(ranks, gpus)
            without_multicast(lambda _: profile_here(settings, count, bar.show))
        else:
            from planner.lab.profile.health import work

            if work(settings, place, bar.show) is None:
                return
    found = library.read_yaml(Path(settings.output))["health"]
    picture = Path(settings.output).with_suffix(".png")
    drawn = health_words.draw(found, picture)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    out = console()
    for table in health_words.tables(found):
        out.print(table)
    for sentence in found["sentences"] or ["nothing stands out"]:
        out.print(sentence, soft_wrap=True, markup=False)
    out.print(f"wrote {settings.output}{f' and {picture}' if drawn else ''}", soft_wrap=True, markup=False)


def _kept(settings: Settings) -> str:
    return f"what was measured is kept in {settings.journal}; --resume goes on"


def _as_rank(settings: Settings, place: Place) -> HardwareProfile | ClusterFile | None:
    """One of many ranks that torchrun or srun started; the first one writes and reports. Ranks on different devices profile each
    kind, and a cluster file joins them."""
    from planner.lab.launch.meeting import UnlikeRanksError
    from planner.lab.profile.kinds import work_by_kind
    from planner.lab.profile.profile_file import write_profile
    from planner.lab.profile.worker import work

    begun = time.monotonic()
    with Bar(quiet=place.rank != 0) as bar:
        try:
            try:
                return work(settings, place, bar.show, lambda: write_profile(settings, time.monotonic() - begun))
            except UnlikeRanksError as unlike:
                return work_by_kind(settings, place, unlike, bar.show)
        except KeyboardInterrupt:
            raise PlannerError(f"stopped; {_kept(settings)}" if place.rank == 0 else "stopped") from None


# ------------------------------------------------------------------------------------------------ what it says


def _summary(profile: HardwareProfile, output: str) -> dict[str, Any]:
    """What a person wants to know first."""
    origin = profile.provenance
    assert origin is not None
    return {
        "file": output, "device": profile.device, "machine": origin.machine, "date": origin.date,
        **{name: origin.cost.get(name, 0.0) for name in ("seconds", "points", "left_out", "failed", "outliers")},
        "measured": dict(profile.measured), "notes": list(profile.notes),
        "sustained_bf16_flops": profile.sustained_flops("bf16"), "memory_bandwidth": profile.memory_bandwidth,
    }  # fmt: skip


def _print_kinds(cluster: ClusterFile, output: str, as_json: bool) -> None:
    """The kinds that were found, with their files."""
    if as_json:
        click.echo(json.dumps({"file": output, "cluster": cluster.to_dict()}, indent=1))
        return
    out = console()
    for one in cluster.nodes:
        nodes = units.plural(one.count, "node")
        out.print(f"{one.kind}: {nodes} of {one.gpus}, profile {one.hardware}", soft_wrap=True, markup=False)
    for link in cluster.links:
        rate = f"{link.bandwidth / units.GIGA:.4g} GB/s a node, {units.format_seconds(link.latency)}"
        out.print(f"{' to '.join(link.between)}: {rate}", soft_wrap=True, markup=False)
    out.print(f"wrote {output}; use it with --cluster {output}", soft_wrap=True, markup=False)


def _rows(profile: HardwareProfile) -> list[dict[str, Any]]:
    """One row per collective inside a node: latency and bus bandwidth of the largest group, spread and residual."""
    origin = profile.provenance
    assert origin is not None
    rows = []
    for op in COLLECTIVES:
        curve = profile.scale_up[op]
        off = sorted(
            values[0] for name, values in origin.residuals.items() if name.split()[:1] == [op] and isinstance(values, list)
        )  # fmt: skip
        rows.append({
            "op": op, "ranks": int(curve.groups[-1]), "latency": float(curve.latency()[-1]),
            "bus_bandwidth": float(curve.bus_bandwidth()[-1]), "largest": float(curve.sizes[-1]),
            "spread_percent": origin.spread.get(f"collective {op}"),
            "residual_percent": off[len(off) // 2] if off else None,
        })  # fmt: skip
    return rows


def _print(out: Any, summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The table, what was not measured, and how to use the file."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    if summary["measured"].get("scale_up") == "measured":
        title = "Collectives inside a node, largest group"
        table = Table("", title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for heading in ("ranks", "latency", "bus bandwidth", "spread", "fit off by"):
            table.add_column(heading, justify="right")
        for row in rows:
            percents = (row["spread_percent"], row["residual_percent"])
            table.add_row(
                row["op"], str(row["ranks"]), units.format_seconds(row["latency"]),
                f"{units.format_bytes(row['bus_bandwidth'])}/s", *("" if one is None else f"{one:.1f} %" for one in percents),
            )  # fmt: skip
        out.print(table)
    out.print(
        f"{summary['points']:.0f} points in {summary['seconds']:.0f} s, {summary['outliers']:.0f} outlying samples among "
        f"them, {summary['left_out']:.0f} points left out by the budget, {summary['failed']:.0f} failed",
        soft_wrap=True,
    )
    for note in summary["notes"]:
        out.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    out.print(f"wrote {summary['file']}; use it with --hardware {summary['file']}", soft_wrap=True, markup=False)
