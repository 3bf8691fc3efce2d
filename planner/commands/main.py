"""The command line: ``plan --model llama-70b --gpus 8`` and its companions."""

import contextlib
import errno
import gc
import importlib
import keyword
import os
import signal
import sys
import threading
from typing import Any, NoReturn

import click

from planner.errors import PlannerError, printable

COMMANDS = {
    "search": ("commands.plans", "Search every legal layout, print the best plans (default)."),
    "estimate": ("commands.plans", "Price one explicit layout, with the whole breakdown."),
    "serve": ("questions.serve.command", "How to serve a model: the best deployments, one priced, compared, changed."),
    "rl": ("questions.rl.command", "RL post-training: where to train and where to generate, the step by phase."),
    "report": ("questions.report.command", "A plan as one page to look at; also Markdown, JSON, a trace, pictures."),
    "compare": ("questions.compare.command", "Plan files side by side: what differs, and what each difference does."),
    "what-if": ("questions.what_if.command", "The same job with one thing changed; fewest GPUs, cheapest hardware."),
    "sensitivity": (
        "questions.sensitivity.command", "Which measured number the choice hangs on; which plans count as equal.",
    ),
    "doctor": (
        "questions.doctor.command",
        "What was measured against a plan: what would explain the gap, and the check that shows it.",
    ),
    "reshape": ("questions.reshape.command", "The best plan on another number of GPUs, the move counted."),
    "resilience": (
        "questions.resilience.command", "What failures cost: when to save, goodput, spares, the best answer to a failure.",
    ),
    "watch": ("questions.watch.command", "What holds a running job up: slow rank, link, experts; and what would pay."),
    "export": ("commands.files", "Write a plan as a folder that a trainer runs."),
    "import": ("commands.files", "Read a trainer's configuration as a plan."),
    "profile": ("lab.profile.command", "Measure this machine and write a hardware profile."),
    "validate": ("lab.run.command", "Run a plan, or its memory alone, and compare with the prediction."),
    "run": ("lab.elastic.command", "Train a plan to its end: checkpoints, failures, fewer and more GPUs."),
    "first-day": ("lab.first_day.command", "All of that on a machine with GPUs, in half an hour, into one folder."),
    "calibrate": ("questions.calibrate.command", "Correct a hardware profile with your own measured runs."),
    "accuracy": ("questions.accuracy.command", "Predict published runs and print the errors."),
    "models": ("commands.plans", "List the model presets."),
    "hardware": ("questions.hardware.command", "List the hardware profiles, or look into them."),
    "trainers": ("commands.plans", "List the trainers."),
}  # fmt: skip
"""Command -> module of planner that holds it, imported when it is asked for; and its line in ``plan --help``."""
STOPPED = 130
"""Exit code after Ctrl-C."""


LIKE = {
    "search": "plan --model llama-70b --gpus 8",
    "import": "plan import run.sh --output today.yaml",
    "compare": "plan compare today.yaml plan.yaml",
    "calibrate": "plan calibrate a.yaml b.yaml c.yaml --output my-cluster.yaml", "first-day": "plan first-day --output first-day",
}
"""Said where a file or a flag is missing, of commands whose files are no plans, or several."""
MEANT = {
    "--model": "m model-name model-id model-path model-name-or-path",
    "--sequence-length": "context context-length ctx seq seq-len seq-length seqlen max-length max-seq-length cutoff-len",
    "--global-batch-size": "batch batch-size gbs global-batch train-batch-size",
    "--micro-batch-size": "mbs micro-batch per-device-train-batch-size per-device-batch-size",
    "--gpus": "g gpu n-gpus num-gpus ngpus world-size num-processes devices",
    "--nodes": "nnodes num-nodes n-nodes",
    "--dp": "data-parallel data-parallel-size", "--zero": "zero-stage stage", "--vpp": "vp virtual-pipeline",
    "--intra-node": "interconnect nvlink", "--network-bandwidth": "bandwidth infiniband ib",
    "--option": "flash-attention flash-attn attn-implementation attention",
    "--tp": "tensor-parallel tensor-parallel-size tensor-model-parallel-size",
    "--pp": "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size",
    "--cp": "context-parallel context-parallel-size", "--ep": "expert-parallel expert-model-parallel-size",
    "--hardware": "device accelerator card", "--trainer": "framework backend engine fsdp deepspeed megatron",
    "--precision": "dtype bf16 fp8 fp16 mixed-precision", "--lora-rank": "lora lora-r", "--objective": "dpo loss",
    "--frozen-weights": "qlora load-in-4bit load-in-8bit quantization bnb-4bit-quant-type",
    "--recompute": "checkpointing gradient-checkpointing activation-checkpointing ac",
    "--offload-optimizer": "offload cpu-offload optimizer-offload", "--output": "o out save",
}  # fmt: skip
"""Flags by what other tools call them; where somebody types such a word, the flag is named."""


class SentenceError(click.ClickException):
    """A PlannerError as the command line shows it: one sentence, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.secho("error: ", fg="red", bold=True, err=True, nl=False)
        click.echo(printable(self.message), err=True)


class PlanGroup(click.Group):
    """A group whose default command is the search: ``plan --model M --gpus N``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"planner.{COMMANDS[cmd_name][0]}")
        name = cmd_name.replace("-", "_")
        found: click.Command = getattr(module, f"{name}_" if keyword.iskeyword(name) else name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] == "help":
            args = [*args[1:2], "--help"]
        if args == ["version"]:
            args = ["--version"]
        if args and args[0] not in COMMANDS and args[0] not in ("-h", "--help", "--version"):
            if not args[0].startswith("-"):
                from planner.terminal.flags import command_meant

                raise click.UsageError(f"No such command '{args[0]}'. {command_meant(args[0], COMMANDS, 'plan')}", ctx)
            args = ["search", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Commands, and where none was typed the flags of the search."""
        search = self.get_command(ctx, "search")
        found = super().shell_complete(ctx, incomplete)
        if search is not None and incomplete.startswith("-"):
            found += search.shell_complete(click.Context(search, parent=ctx), incomplete)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from planner.terminal.flags import option_meant

            raise option_meant(error, MEANT) from None
        except click.MissingParameter as error:
            from planner.terminal.flags import plan_file_text, takes_plan

            if error.ctx is not None and error.ctx.parent is ctx and (like := LIKE.get(error.ctx.info_name or "")):
                raise click.UsageError(f"{error.format_message()} It is used like: {like}", error.ctx) from None
            if isinstance(error.param, click.Option) and error.param.help:
                raise click.UsageError(f"{error.format_message()} {error.param.help}", error.ctx) from None
            if not (isinstance(error.param, click.Argument) and takes_plan(error.ctx)):
                raise
            raise click.UsageError(f"{error.format_message()} {plan_file_text(error.ctx)}", error.ctx) from None
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


@click.group(cls=PlanGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
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


def main_entry(leave: Any = signal.SIG_DFL) -> NoReturn:
    """Run the command of this process and exit with its code: 130 after Ctrl-C, 2 when its output cannot be written.

    ``leave``: what Ctrl-C does while the process ends.
    """
    interrupted: list[int] = []
    running = [True]

    def interrupt(number: int, frame: Any) -> None:
        if running:
            interrupted.append(number)
            raise KeyboardInterrupt
        os._exit(STOPPED)

    def lost(unraisable: Any) -> None:
        """An interrupt inside a callback, out of which Python raises nothing, comes again a moment later. Pipes of workers that
        break while the process ends are no news: everything is written by then."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            if running or not issubclass(unraisable.exc_type, OSError):
                sys.__unraisablehook__(unraisable)
        elif running:
            threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]).start()

    sys.unraisablehook = lost
    signal.signal(signal.SIGINT, interrupt)
    try:
        code = _run()
        running.clear()
    except BaseException:  # an import that is interrupted ends in an error of its own
        running.clear()
        if not interrupted:
            raise
    signal.signal(signal.SIGINT, leave)
    gc.freeze()  # Python looks for garbage once more as it ends: 35 ms over all that is imported, and the process goes anyway
    sys.exit(_closed(STOPPED if interrupted else code))


def _run() -> int:
    """The command with the arguments of the process; its exit code."""
    try:
        code = main(prog_name="plan", standalone_mode=False)
    except click.Abort:
        return STOPPED
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return error.exit_code
    except OSError as error:  # what reads or writes a file raises PlannerError: this is standard output
        return _unwritten(error)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return code if isinstance(code, int) else 0


def _closed(code: int) -> int:
    """The exit code once what was printed is written: a full disk behind ``>`` shows only now."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may Python fail on it at its end
        return code or _unwritten(error)
    return code


def _unwritten(error: OSError) -> int:
    """Say that standard output cannot be written. A reader that has seen enough is told nothing."""
    if error.errno == errno.EPIPE:
        return 1
    with contextlib.suppress(OSError):
        click.echo(f"error: {error.filename or 'standard output'}: {error.strerror}", err=True)
    return 2
