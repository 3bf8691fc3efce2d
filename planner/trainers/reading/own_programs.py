"""A program of TRL, transformers or unsloth that a command starts, where its own calls say what it trains."""

import re
from pathlib import Path

from planner.trainers.reading.commands import Launch
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.own_classes import UNSLOTH as LOADS
from planner.trainers.reading.parsed_words import PARSERS
from planner.trainers.reading.programs import program_file, trainer_kind
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.training_arguments import HABITS, MODELS, TRL, UNSLOTH, parse
from planner.trainers.reading.training_scripts import settings_of
from planner.trainers.reading.unsloth_parts import scores_of_unsloth
from planner.trainers.reading.values import read_text

BUILT = re.compile(r"(?s)(?<!class )\b(SFT|DPO|Seq2Seq)?(TrainingArguments|Config)\(.*Trainer\(")
"""A program that builds a trainer: without options its values are its own."""
UNSLOTH_MODEL = re.compile(r"\bFast\w*Model\.from_pretrained\(")
PARSED = re.compile(rf"(?s)\A(?!.*\b(SFTConfig|DPOConfig|\w*TrainingArguments)\().*\b({'|'.join(PARSERS)})\(")
"""A program whose trainer's arguments are those of its command, as they are parsed."""


def is_of_unsloth(program: Path | None) -> bool:
    """Whether a program loads its model by unsloth."""
    return program is not None and UNSLOTH_MODEL.search(read_text(program)) is not None


def kind_of(path: Path, named: str, settings: Settings) -> str:
    """Whose trainer a program runs, a key of HABITS: by its text, but for what its options switch off."""
    program, calls = program_file(path, named), settings.calls
    if is_of_unsloth(program) if calls is None else not calls.isdisjoint(LOADS):
        return "unsloth"
    return "transformers" if calls == frozenset(("Trainer",)) else trainer_kind(path, named)


def in_one_process(found: Launch) -> tuple[str, ...]:
    """Note about a command without a launcher that sees several GPUs.  [transformers, training_args.py: _setup_devices]"""
    stated = found.num_gpus is not None or (found.sharding is not None and found.sharding.num_gpus is not None)
    if stated or (found.visible or 1) < 2 or found.program == "trl":
        return ()
    what = "priced with one process per GPU; with device_map its layers lie over them, without it is torch's DataParallel"
    return (f"one process sees {found.visible} GPUs: {what}",)


def of_program(path: Path, found: Launch, settings: Settings, named: str, said: Given) -> Reading | None:
    """The job of a program that is there, of unsloth or without options; None = its options say it. Raises PlannerError."""
    program = program_file(path, named)
    if program is None:
        return None
    if is_of_unsloth(program) and PARSED.match(read_text(program)) is None:  # its options are its own
        own, kind, notes = settings_of(program, said, {**_seen(program, found), **settings.data})
        asked = (found.node_gpus or 0) * (found.nodes or 1) or None  # of the batch system
        alone = asked if found.open_gpus else 1 if (found.visible or 1) == 1 else None
        gpus = said.num_gpus or found.num_gpus or alone
        texts = [read_text(path), read_text(program)] if kind == "unsloth" else []
        notes = (*notes, *scores_of_unsloth(texts, own.label(*MODELS)))
        return parse(own, UNSLOTH if kind == "unsloth" else TRL, gpus, found.sharding, named, notes)
    if not found.settings and not found.words and BUILT.search(read_text(program)):  # its values are its own
        own, kind, notes = settings_of(program, said, _seen(program, found))
        gpus = said.num_gpus or found.num_gpus or (1 if kind == "unsloth" or own.one_gpu else None)
        return parse(own, HABITS[kind], gpus, found.sharding, named, (*found.notes, *notes))
    return None


_NAMED = re.compile(r"[\"']([A-Z][A-Z0-9_]{1,60})[\"']")
"""How a program names a variable of its environment, whatever it reads it with."""


def _seen(program: Path, found: Launch) -> dict[str, str]:
    """Variables that a program reads and its command's script hands to it."""
    return {one: found.environment[one] for one in _NAMED.findall(read_text(program)) if one in found.environment}
