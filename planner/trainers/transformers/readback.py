"""transformers: scripts that run a Trainer with its arguments as options, like run_clm.py, and those arguments in YAML or JSON."""

from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.own_code import take_program
from planner.trainers.reading.programs import require_loop
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.training_arguments import BATCHES, TRANSFORMERS, parse, says_both


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        data = _flat(file_settings(path, "arguments of transformers"))
        if not any(one in data for one in BATCHES):
            raise PlannerError(f"{path}: it has no arguments of transformers' Trainer")
        given = Settings(path, said.filled(data), said=said)
        return parse(given, TRANSFORMERS, said.num_gpus)
    found = launched(path, said, r"\S+\.py|[\w.]*train[\w.]*", modules=True)
    settings = with_files(path, found, said)
    take_program(settings, path, found.program)
    if all(settings.get(one) is None for one in BATCHES) and not says_both(settings):
        require_loop(path, found.program)
        settings.ask(Question(name=BATCHES[0], about=f"sequences per GPU and forward pass of {found.program}"))
    several = found.num_gpus is None and (found.visible or 1) > 1
    notes = (f"one process sees {found.visible} GPUs: priced with one process per GPU",) if several else ()
    return parse(settings, TRANSFORMERS, said.num_gpus or found.num_gpus, found.sharding, found.program, notes)


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    """Arguments that stand in sections of their own, as the programs of GLM have them: training_args, and peft_config of PEFT."""
    training, adapters = data.get("training_args"), data.get("peft_config")
    found = {**data, **(training if isinstance(training, dict) else {})}
    if isinstance(adapters, dict):
        names = {"r": "lora_r", "target_modules": "lora_target_modules", "peft_type": "train_mode"}
        found |= {"train_mode": "lora", **{names.get(name, name): value for name, value in adapters.items()}}
    return {name: value for name, value in found.items() if name not in ("training_args", "peft_config")}
