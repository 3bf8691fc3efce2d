"""The command line: ``plan --model llama-70b --gpus 8`` and its companions."""

from __future__ import annotations

import importlib
import keyword
from typing import Any

import click

from planner.errors import PlannerError
from planner.terminal.flags import SentenceError

COMMANDS = {
    "search": "commands.search", "estimate": "commands.estimate", "report": "questions.report.command",
    "compare": "questions.compare.command", "what-if": "questions.what_if.command",
    "sensitivity": "questions.sensitivity.command", "doctor": "questions.doctor.command", "export": "commands.export",
    "import": "commands.import_", "profile": "lab.profile.command", "validate": "lab.run.command",
    "calibrate": "questions.calibrate.command", "accuracy": "questions.accuracy.command", "models": "commands.library",
    "hardware": "questions.hardware.command", "trainers": "commands.library",
}  # fmt: skip
"""Command -> module of planner that holds it; imported when it is asked for."""


class PlanGroup(click.Group):
    """A group whose default command is the search: ``plan --model M --gpus N``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"planner.{COMMANDS[cmd_name]}")
        name = cmd_name.replace("-", "_")
        found: click.Command = getattr(module, f"{name}_" if keyword.iskeyword(name) else name)
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in COMMANDS and args[0] not in ("--help", "--version"):
            looks_like_command = not args[0].startswith("-")
            if looks_like_command:
                from planner.errors import nearest_first

                nearest = ", ".join(nearest_first(args[0], COMMANDS)[:3])
                raise click.UsageError(f"No such command '{args[0]}'. Nearest: {nearest}.", ctx)
            args = ["search", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PlannerError as error:
            raise SentenceError(str(error)) from error


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value:
        return
    from importlib import metadata

    try:
        version = metadata.version("planner")
    except metadata.PackageNotFoundError:
        version = "of a checkout that is not installed"
    click.echo(f"plan {version}")
    ctx.exit()


@click.group(cls=PlanGroup, context_settings={"help_option_names": ["--help"], "max_content_width": 120})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Plan how to split the training of a language model over GPUs, and what it will cost.

    \b
    Examples:
      plan --model llama-70b --gpus 8
      plan --model deepseek-v3 --gpus 2048 --hardware h100-sxm --output plan.yaml
      plan --model ./config.json --gpus 64 --sequence-length 32768 --tp 8
      plan estimate --model llama-8b --gpus 8 --tp 2 --recompute full
      plan what-if plan.yaml --network x2 --gpus 64..512
      plan sensitivity plan.yaml
      plan accuracy
      plan calibrate my-runs.yaml --hardware h100-sxm --output my-cluster.yaml

    Without a command this is `plan search`; `plan search --help` lists all its flags. Exit codes: 0 a plan was found,
    1 nothing fits, 2 the input is wrong.
    """


def main_entry() -> None:
    """Entry point of the installed command."""
    main(prog_name="plan")
