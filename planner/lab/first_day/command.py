"""``plan first-day``: everything that a machine with GPUs has to say about the planner, in one command and one folder."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from planner import library
from planner.detect import processor
from planner.errors import PlannerError, printable
from planner.hardware import load_hardware
from planner.lab.first_day.all_steps import TINY, TINY_FILE, Step, dry_steps, steps_of
from planner.lab.first_day.findings import TEXT_FILE, VERSION, YAML_FILE, gathered, text_of
from planner.lab.first_day.runner import FINE, Day
from planner.lab.launch.gpus import gpus_here, require_known
from planner.lab.launch.place import place_from
from planner.lab.launch.torchrun import need_torch
from planner.lab.profile.command import seconds_of
from planner.lab.run.record import origin
from planner.record import record
from planner.terminal.flags import completed, console
from planner.trainers.bundle.quoting import one_line
from planner.units import format_seconds


@record
class Asked:
    """What the flags say, and the machine."""

    folder: Path
    device: str
    """"cpu" for the dry form."""
    name: str
    """Of the device, with their number."""
    gpus: int
    hardware: str
    """The library's profile of the GPUs; "" on a CPU."""
    budget: float
    """Seconds."""

    @property
    def steps(self) -> list[Step]:
        """What is done."""
        return dry_steps() if self.device == "cpu" else steps_of(self.gpus, self.hardware)


@click.command("first-day")
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder for everything, new.")
@click.option("--resume", is_flag=True, help="Go on in the folder: steps that were done are kept, the others are done again.")
@click.option("--budget", default="30m", metavar="TIME", help="Time for all steps; what does not fit is left out. [30m]")
@click.option(
    "--hardware", metavar="NAME", help="Library profile of the GPUs. [by the name of the device]",
    shell_complete=completed("hardware"),
)  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="cpu: a dry form with a tiny model, a minute or two. [cuda]")
@click.option("--print-commands", "--dry-run", "print_commands", is_flag=True, help="Print the steps and their commands and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on standard output.")
def first_day(output: Path, resume: bool, print_commands: bool, as_json: bool, **flags: Any) -> None:
    """Measure a machine with GPUs and compare the planner with it, within half an hour.

    One after the other, each as a process of its own with a limit of at most eight minutes: the state of the machine, a short
    hardware profile, products in fp8, a small and a medium plan that fit (found by the search with that profile), one rank of each
    against the driver's memory, all ranks of each, and pairs of GPUs. A step that crashes, hangs or runs out of memory is recorded
    with its log and the others go on. Ctrl-C keeps what is done, --resume goes on. Nothing is sent anywhere. Exit codes: 0 all
    steps were done, 1 some were not, 2 the input is wrong.

    \b
    Examples:
      plan first-day --output first-day
      plan first-day --output first-day --print-commands
      plan first-day --output first-day --resume
      plan first-day --output dry --device cpu
    """
    asked = _asked(output, flags)
    if print_commands:
        click.echo(_commands(asked), nl=False)
        return
    before = _before(asked.folder, resume)
    need_torch("plan first-day")
    _ready(asked)
    most = format_seconds(asked.budget)
    where = printable(str(output))
    print(f"{asked.name}: {len(asked.steps)} steps, at most {most} in all; {where} keeps what each finds", file=sys.stderr)
    for number, step in enumerate(asked.steps, 1):
        limit = format_seconds(step.limit)
        print(f"  {number:2} {step.name:12} at most {limit:6} {step.what}", file=sys.stderr, flush=True)
    begun = origin()

    def report(records: list[dict[str, Any]]) -> dict[str, Any]:
        summary = {
            "planner_first_day": VERSION, "command": shlex.join(["plan", *sys.argv[1:]]), **begun, "device": asked.name,
            "budget_seconds": asked.budget, "planned_steps": len(asked.steps), "steps": [dict(one) for one in records],
        }  # fmt: skip
        summary |= gathered(asked.folder, summary["steps"], asked.hardware, asked.gpus)
        library.write_whole(asked.folder / YAML_FILE, library.dump_yaml(json.loads(json.dumps(summary))))
        library.write_whole(asked.folder / TEXT_FILE, text_of(summary))
        return summary

    day = Day(folder=asked.folder, budget=asked.budget, gpus=asked.device != "cpu", before=before, report=report)
    records = day.run(asked.steps)
    summary = report(records)
    _print(summary, as_json)
    if len(records) < len(asked.steps) or any(one["outcome"] == "interrupted" for one in records):
        sys.exit(130)
    sys.exit(0 if all(one["outcome"] in FINE for one in records) else 1)


def _asked(output: Path, flags: dict[str, Any]) -> Asked:
    """The flags, checked. Raises PlannerError."""
    budget = seconds_of(flags["budget"], "--budget")
    if budget <= 0:
        raise PlannerError(f"--budget {flags['budget']}: it must be above zero")
    if output.exists() and not output.is_dir():
        raise PlannerError(f"--output {output} is a file; name a folder")
    library.require_folder(output)
    if place_from(os.environ) is not None:
        raise PlannerError("it is one process that starts the ranks itself; start it without torchrun or srun")
    if flags["hardware"]:
        load_hardware(flags["hardware"])
    folder = output.resolve()
    if flags["device"] == "cpu":
        return Asked(folder=folder, device="cpu", name=processor(), gpus=0, hardware="", budget=budget)
    gpus = gpus_here(flags["device"])
    if not gpus.count:
        raise PlannerError("there is no GPU here; --device cpu walks the same road with a tiny model on the CPU")
    hardware = flags["hardware"] or require_known(gpus)
    if library.is_file_name(hardware):
        hardware = str(Path(hardware).resolve())  # steps run in the folder
    name = f"{gpus.count} x {gpus.names[0]}"
    return Asked(folder=folder, device="cuda", name=name, gpus=gpus.count, hardware=hardware, budget=budget)


def _before(folder: Path, resume: bool) -> dict[str, dict[str, Any]]:
    """What an earlier run in this folder said of its steps, by name. Raises PlannerError for a folder that is not for this."""
    file = folder / YAML_FILE
    there = folder.is_dir() and any(folder.iterdir())
    if not resume:
        if there:
            raise PlannerError(f"--output {folder} is not empty; --resume goes on with what is there, or name a new folder")
        return {}
    if not there:
        raise PlannerError(f"--resume: there is nothing in {folder} to go on with; leave --resume out")
    if not file.exists():  # stopped in its first step, or a folder of something else
        raise PlannerError(f"--resume: there is no {YAML_FILE} in {folder}; name a new folder")
    data = library.read_yaml(file)
    library.version_of(data, "first_day", VERSION, where=str(file))
    steps = data.get("steps")
    if not isinstance(steps, list) or not all(isinstance(one, dict) and {"name", "outcome"} <= one.keys() for one in steps):
        raise PlannerError(f"{file}: steps must be a list of what first-day wrote; the file is damaged, name a new folder")
    return {str(one["name"]): one for one in steps}


def _ready(asked: Asked) -> None:
    """The folder, with the model of the dry form. Raises PlannerError."""
    try:
        asked.folder.mkdir(exist_ok=True)
    except OSError as error:
        raise PlannerError(f"--output {asked.folder}: it cannot be made ({error.strerror})") from error
    if asked.device == "cpu":
        library.write_whole(asked.folder / TINY_FILE, library.dump_yaml(TINY))


def _commands(asked: Asked) -> str:
    """The steps as a shell would do them, in the folder; what is tried after the first that fails stands behind ``||``."""
    lines = [f"# {one_line(asked.name)}; at most {format_seconds(asked.budget)} in all; in {shlex.quote(str(asked.folder))}:"]
    for step in asked.steps:
        lines.append(f"\n# {step.name}, at most {format_seconds(step.limit)}: {step.what}")
        lines.append(" ||\n  ".join(map(shlex.join, step.commands)))
    return "\n".join(lines) + "\n"


def _print(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary), flush=True)
        return
    from rich.markdown import Markdown

    console().print(Markdown(text_of(summary)))
