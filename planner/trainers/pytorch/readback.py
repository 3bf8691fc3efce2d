"""Programs in Python that train in a loop of their own: over FSDP, FSDP2 or DDP of torch, or over the engine of DeepSpeed."""

from pathlib import Path

from planner.errors import PlannerError
from planner.trainers.reading import lengths
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.own_classes import model_loads
from planner.trainers.reading.own_parts import other_sizes, parts_of
from planner.trainers.reading.programs import trains_with
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import WithModules
from planner.trainers.reading.script_parts import OF_ANOTHER, builds_a_model, made_elsewhere, on_cpus, trained
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.sharding import Sharding
from planner.trainers.reading.shell.text import gap
from planner.trainers.reading.training_arguments import TRANSFORMERS, parse
from planner.trainers.reading.training_scripts import (
    adapters,
    model_arguments,
    own_steps,
    put_checkpointing,
    require_known_adapters,
    require_language_model,
)
from planner.trainers.reading.values import read_text
from planner.trainers.reading.wrapped_loops import loop_of, require_known_loop, wraps_of


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if (library := trains_with(read_text(path))) is not None:
        raise PlannerError(f"{path}: a program of {library}, of whose programs this one is not read; 'plan estimate' takes its job")
    program = WithModules(path, said)
    loop, wraps = loop_of(program), wraps_of(program)
    if "wrapped" not in loop:
        raise PlannerError(f"{path}: no loop of its own over FSDP, DDP or deepspeed.initialize may run here")
    require_known_loop(program, wraps)
    require_known_adapters(program)
    require_language_model(program)
    name, line = last_name(wraps[0].func), wraps[0].lineno
    notes = [f"the training loop is the program's own ({name}, line {line}): read by the calls that it makes; what else its functions do is not"]
    loads = trained(program, model_loads(program))
    data = model_arguments(program, loads, False, notes)
    data |= {} if loads or builds_a_model(program) else made_elsewhere(said)
    data |= parts_of(program, (), loads) | adapters(program, False) | on_cpus(program) | lengths.said(program, notes)
    put_checkpointing(program, said, loop, False)
    if program.defaults:
        notes.append(f"options of the script at their defaults: {', '.join(dict.fromkeys(program.defaults))}")
    settings = Settings(path, said.filled(data), said=said)
    settings.late += [*loop.pop("loop_questions"), *own_steps(program, said), *other_sizes(program, said)]
    settings.late += [OF_ANOTHER] if settings.data.get("torch_dtype") == gap(["torch_dtype"]) else []
    settings.usual = loop
    return parse(settings, TRANSFORMERS, said.num_gpus, Sharding(), notes=tuple(notes))
