"""transformers: scripts that run a Trainer with its arguments as options, like run_clm.py, and those arguments in YAML or JSON."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.commands import Launch, launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.loading import BY_PEFT
from planner.trainers.reading.own_code import take_program
from planner.trainers.reading.own_programs import in_one_process, kind_of, of_program
from planner.trainers.reading.programs import program_file, require_loop
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.settings_files import require_no_sections
from planner.trainers.reading.training_arguments import (
    BATCHES,
    HABITS,
    TRANSFORMERS,
    UNSLOTH,
    parse,
    says_both,
)
from planner.trainers.reading.values import read_text

TRAINS = re.compile(r"(^|_)(model|batch|bsz|mbs|seq|len|length|block|lr|learning|epochs?|deepspeed|bf16|fp16|output|steps)(_|$)")
"""Words of which a command that trains has one."""
OF_TRL = re.compile(r"\b(SFT|DPO)Trainer\b")
"""What a program that trains with TRL names, whatever the program is called."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        data = _flat(file_settings(path, "arguments of transformers"))
        require_no_sections(path, data)
        if not any(one in data for one in BATCHES):
            raise PlannerError(f"{path}: it has no arguments of transformers' Trainer")
        given = Settings(path, said.filled(data), said=said)
        return parse(given, TRANSFORMERS, said.num_gpus)
    found = launched(path, said, r"\S+\.py|[\w.]*train[\w.]*", modules=True)
    settings = with_files(path, found, said)
    settings.data = _flat(dict(settings.data))
    if (own := of_program(path, found, settings, found.program, said)) is not None:
        return own
    program = program_file(path, found.program)
    if program is None and found.program.endswith("unsloth-cli.py"):
        raise PlannerError(f"{path}: {found.program[:200]} is not there, whose defaults are its own; import it with the program")
    take_program(settings, path, found.program, said.num_gpus or found.num_gpus)
    if all(settings.data.get(one, settings.usual.get(one)) is None for one in BATCHES) and not says_both(settings):
        require_loop(path, found.program)
        _require_known_words(path, program, found)
        settings.ask(Question(name=BATCHES[0], about=f"sequences per GPU and forward pass of {found.program}"))
    gpus = said.num_gpus or found.num_gpus
    ours = program is not None and OF_TRL.search(read_text(program)) is not None
    kind = kind_of(path, found.program, settings)
    habits = UNSLOTH if kind == "unsloth" else replace(HABITS[kind if ours else "transformers"], own=True)
    return parse(settings, habits, gpus, found.sharding, found.program, (*found.notes, *in_one_process(found)))


def _require_known_words(path: Path, file: Path | None, found: Launch) -> None:
    """Raises PlannerError for a program that is not there, of whose words none is one that programs of transformers have."""
    if file is None and found.settings and not any(TRAINS.search(one) for one in found.settings):
        what = "is not there, and its command has no word of a training"
        raise PlannerError(f"{path}: its program {found.program[:200]} {what}; import the program")


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    """Arguments that stand in sections of their own, as the programs of GLM have them: training_args, and peft_config of PEFT."""
    training, adapters = data.get("training_args"), data.get("peft_config")
    found = {**data, **(training if isinstance(training, dict) else {})}
    if isinstance(adapters, dict):
        names = {"r": "lora_r", "target_modules": "lora_target_modules", "peft_type": "train_mode"}
        found |= {"train_mode": "lora", "lora_target_modules": BY_PEFT}
        found |= {names.get(name, name): value for name, value in adapters.items()}
    return {name: value for name, value in found.items() if name not in ("training_args", "peft_config")}
