"""Shared by commands: flags of the job and of the layout, the console, progress."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import click

from planner.errors import listed
from planner.keywords import flag_of
from planner.layout import BOOLEANS, NAMES, Layout
from planner.schema import fields_of
from planner.workload import (
    FROZEN_WEIGHTS,
    IMAGE_ENCODERS,
    LORA_TARGETS,
    LORA_WHOLE,
    OBJECTIVES,
    OPTIMIZERS,
    PRECISIONS,
)

if TYPE_CHECKING:  # rich is imported by the command that prints with it
    from rich.console import Console

WRITTEN = {
    "lora": "--lora-rank 16", "qlora": "--lora-rank 16 --frozen-weights nf4", "load-in-4bit": "--lora-rank 16 --frozen-weights nf4",
    "load-in-8bit": "--lora-rank 16 --frozen-weights int8", "dpo": "--objective dpo", "bf16": "--precision bf16",
    "fp16": "--precision fp16", "fp8": "--precision fp8", "fsdp": "--trainer fsdp", "deepspeed": "--trainer deepspeed",
    "megatron": "--trainer megatron",
    "flash-attention": "--option attention_kernel=fa2", "flash-attn": "--option attention_kernel=fa2",
}  # fmt: skip
"""Words of other tools that hold a value too: the flags with it, as they are typed here."""


class Result(Protocol):
    """What a command prints: a result of planner.api."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""

    def show(self, console: Console) -> None:
        """Print the tables."""


def option_meant(error: click.NoSuchOption, meant: Mapping[str, str]) -> click.UsageError:
    """The sentence that names the flag which was meant, with its help: the flag of the command that ``meant`` lists the word
    for; a command of plan files says that it takes one, where a flag of a job was given."""
    flags = {flag: one for one in error.ctx.command.params for flag in one.opts} if error.ctx else {}
    word = error.option_name.lstrip("-").replace("_", "-").lower()
    flag = next((flag for flag, words in meant.items() if word in words.split() and flag in flags), None)
    if flag is not None:
        help_text = getattr(flags[flag], "help", None) or ""
        like = f" Like: {WRITTEN[word]}" if word in WRITTEN else ""
        text = f"No such option '{error.option_name}'. Did you mean '{flag}'? {help_text}".rstrip() + like
    elif word == "check" and error.ctx is not None and error.ctx.info_name == "profile":
        text = "No such option '--check': plan first-day --output first-day measures and checks all of a machine in half an hour."
    elif error.option_name in ("--model", "--gpus") and takes_plan(error.ctx):
        text = f"No such option '{error.option_name}': the plan file says it. {plan_file_text(error.ctx)}"
    else:
        near = _flags_like(word, flags)
        text = f"{error.message} Did you mean {listed(near)}?" if near else error.message
    return click.UsageError(text, error.ctx)


def _flags_like(word: str, flags: Iterable[str]) -> list[str]:
    """Flags of a near name; without the dashes, which make any two short flags alike."""
    import difflib

    names = {flag.lstrip("-"): flag for flag in flags}
    return [names[name] for name in difflib.get_close_matches(word, names)]


def takes_plan(ctx: click.Context | None) -> bool:
    """Whether a command has a plan file as argument and can not do without."""
    arguments = [one for one in ctx.command.params if isinstance(one, click.Argument)] if ctx else []
    return any(one.required and (one.metavar or "").startswith("PLAN") for one in arguments)


def plan_file_text(ctx: click.Context | None) -> str:
    """How a plan file comes to be, in a sentence."""
    command = ctx.command_path if ctx else "plan report"
    return f"First plan --model llama-8b --gpus 8 --output plan.yaml, then {command} plan.yaml."


def command_meant(word: str, commands: Iterable[str], start: str) -> str:
    """What a word that is no command was meant for: a model of ``start``, or a command of a near name."""
    from planner.errors import nearest_first
    from planner.model_names import preset_called

    model = (word.split() or [""])[0]
    if len(model) <= 100 and preset_called(model):
        return f"It is a model: {start} --model {model} --gpus 8."
    return f"Nearest: {', '.join(nearest_first(word, commands)[:3])}."


class SearchGroup(click.Group):
    """A group whose default command is ``search``; ``meant``: its flags by what other tools call them."""

    def __init__(self, *args: Any, meant: Mapping[str, str], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.meant = meant

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise option_meant(error, self.meant) from None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] == "help":
            args = [*args[1:2], "--help"]
        if not args or args[0].startswith("-"):
            args = ["search", *args]
        elif args[0] not in self.commands:
            text = command_meant(args[0], self.commands, ctx.command_path)
            raise click.UsageError(f"No such command '{args[0]}'. {text}", ctx)
        return super().parse_args(ctx, args)


def layout_options(names: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Flags for fields of Layout, all optional: what is not given is None."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        kinds, _ = fields_of(Layout)
        for name in reversed(names):
            flag, text = flag_of(name), kinds[name].__metadata__[0]
            if name in NAMES:
                option = click.option(flag, type=click.Choice(list(NAMES[name].values())), help=text)
            elif name in BOOLEANS:
                option = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=text)
            elif name == "recompute_modules":
                option = click.option(flag, metavar="LIST", help=text)
            else:
                option = click.option(flag, type=int, metavar="N", help=text)
            function = option(function)
        return function

    return decorate


class Whole(click.types.IntParamType):
    """A whole number, also as people write large ones: 2,000."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Commas between thousands are left out."""
        plain = isinstance(value, str) and re.fullmatch(r"\d{1,3}(,\d{3})+", value.strip())
        return super().convert(value.replace(",", "") if plain else value, param, ctx)


JOB_FLAGS: tuple[tuple[str, Any, str, str], ...] = (
    ("model", str, "NAME", "Preset, config.json, directory or hub id ('plan models')."),
    ("gpus", Whole(), "N", "GPUs in the job."),
    ("nodes", Whole(), "N", "Nodes in place of --gpus: all their GPUs."),
    ("hardware", str, "NAME", "Profile or YAML file ('plan hardware'). [local GPU, else h100-sxm]"),
    ("trainer", str, "NAME", "Trainer, trainer@version or YAML file ('plan trainers'). [megatron]"),
    ("options", str, "NAME=VALUE", "Option of the trainer; may be repeated. [of its version]"),
    ("sequence_length", str, "S", "Tokens per sequence: 8192, 128k. [8192, or all that the model takes]"),
    ("global_batch_size", str, "B", "Sequences per optimizer step, or tokens: 512, 4M. [by model size]"),
    ("precision", str, "NAME", f"{listed(PRECISIONS)}. [bf16]"),
    ("optimizer", str, "NAME", f"{listed(OPTIMIZERS)}. [adam]"),
    ("lora_rank", int, "R", "Train low-rank adapters only; 0 = all weights."),
    ("lora_targets", str, "NAME", f"Layers with adapters: {listed(LORA_TARGETS)}. [all]"),
    ("lora_whole", str, "NAME", f"Tables trained as a whole beside adapters: {listed(LORA_WHOLE)}. [none]"),
    ("frozen_weights", str, "NAME", f"Frozen linear layers under adapters: {listed(FROZEN_WEIGHTS)}. [bf16]"),
    ("objective", str, "NAME", f"What is minimised: {listed(OBJECTIVES)}. [lm]"),
    ("document_length", int, "N", "Mean tokens of documents packed into a sequence. [one document]"),
    ("image_tokens", int, "N", "Tokens of a sequence that stand for images. [0: text only]"),
    ("image_encoder", str, "NAME", f"{listed(IMAGE_ENCODERS)}. [frozen]"),
    ("expert_imbalance", float, "X", "Tokens of the busiest expert rank over the mean. [of a trained router]"),
    ("intra_node", str, "LINK", "Link inside a node: pcie, 'PCIe 4.0 x8', nvlink, '200 GB/s'. [of the profile]"),
    ("network_bandwidth", str, "RATE", "Per GPU, one direction, like '400 Gb/s'. [of the profile]"),
)
"""Flags of the job: field of Request ('gpus': num_gpus), type, value and help."""
ALSO = {"network_bandwidth": ("--network",)}
"""Other spellings of a flag."""


CHOICES: dict[str, Iterable[str]] = {
    "precision": PRECISIONS, "optimizer": OPTIMIZERS, "lora_targets": LORA_TARGETS, "lora_whole": LORA_WHOLE,
    "frozen_weights": FROZEN_WEIGHTS, "objective": OBJECTIVES, "image_encoder": IMAGE_ENCODERS,
}  # fmt: skip


def completed(name: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """What a shell completes a flag of the job with: names of the library, or the values that it takes; files by themselves."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from planner import library
        from planner.model_names import aliases

        known = list(CHOICES.get(name, ()))
        if name in ("model", "hardware", "trainer", "engine"):
            known = library.names(name if name == "hardware" else f"{name}s") + (list(aliases()) if name == "model" else [])
        elif name == "launcher":
            from planner.trainers.bundle.launchers import LAUNCHERS

            known = [*LAUNCHERS]
        elif name == "target":
            from planner.serving.export.serving_folder import TARGETS as SERVING
            from planner.trainers.targets import TARGETS

            known = [*{*TARGETS, *SERVING}]
        found = [one for one in sorted(known) if one.startswith(incomplete.lower())]
        return [CompletionItem(one) for one in found] or [CompletionItem(incomplete, type="file")]

    return complete


def job_options(*, required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Flags that say what is trained and where; with ``required``, the model and the number of GPUs must be given."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for name, kind, value, text in reversed(JOB_FLAGS):
            needed = required and name == "model"
            function = click.option(
                flag_of(name), *ALSO.get(name, ()), name, required=needed, type=kind, metavar=value, help=text,
                multiple=name == "options", shell_complete=completed(name) if kind is str else None,
            )(function)  # fmt: skip
        return function

    return decorate


@contextlib.contextmanager
def progress(text: str, every: float | None = None) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error while a person waits; when piped a line in ``every`` seconds, without it nothing. The body may
    call it with further text."""
    if not sys.stderr.isatty():
        yield _lines(text, every) if every else lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield lambda more: status.update(f"{text}: {more}")


def _lines(text: str, every: float) -> Callable[[str], None]:
    """Says the last text as a line of its own, at most once in so many seconds."""
    last = time.monotonic()

    def say(more: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print(f"{text}: {more}", file=sys.stderr, flush=True)

    return say


def this_program(without: set[str], without_with_value: set[str]) -> list[str]:
    """This command as torchrun starts it, less some flags: the installed program, or the script of a checkout."""
    from pathlib import Path

    script, *rest = sys.argv
    arguments: list[str] = []
    skip = False
    for word in rest:
        flag, equals, _ = word.partition("=")
        if not skip and word not in without and flag not in without_with_value:
            arguments.append(word)
        skip = not skip and word in without_with_value and not equals
    return [str(Path(script).resolve()), *arguments] if script.endswith(".py") else ["--no-python", "plan", *arguments]


def console() -> Console:
    """Standard output; colours off and 140 columns wide when it is piped."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140, no_color=True)


def emit(result: Result, as_json: bool, indent: int = 2) -> None:
    """A result on standard output: as JSON, or as its tables."""
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=indent))
    else:
        result.show(console())


def print_part(out: Console, part: Any) -> None:
    """A table, or a sentence as it is: brackets are no markup, and where no person reads along its lines are not broken."""
    if isinstance(part, str):
        out.print(part, markup=False, soft_wrap=not out.is_terminal)
    else:
        out.print(part)
