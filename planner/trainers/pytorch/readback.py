"""Programs in Python that train in a loop of their own: over FSDP, FSDP2 or DDP of torch, or over the engine of DeepSpeed."""

import ast
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading import lengths
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.loading import UNDATED
from planner.trainers.reading.own_classes import DECODERS, model_loads, owner
from planner.trainers.reading.own_parts import default_dtype, other_sizes, parts_of
from planner.trainers.reading.programs import trains_with
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import WithModules
from planner.trainers.reading.script_parts import OF_ANOTHER, builds_a_model, made_elsewhere, on_cpus, trained, turned
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
from planner.trainers.reading.wrapped_loops import DECIDING, loop_of, notes_of_loop


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if (library := trains_with(read_text(path))) is not None:
        raise PlannerError(f"{path}: a program of {library}, of whose programs this one is not read; 'plan estimate' takes its job")
    program = WithModules(path, said)
    notes = notes_of_loop(program, loop := loop_of(program))
    require_known_adapters(program)
    require_language_model(program)
    loads = trained(program, model_loads(program))
    data = model_arguments(program, loads, False, notes)
    engine = loop["wrapped"] == "deepspeed" and loop.get("mixed_precision") in ("bf16", "fp16")  # casts all weights
    data |= {} if loads or builds_a_model(program) else {**made_elsewhere(said), **({"torch_dtype": None} if engine else {})}
    data |= {} if loads else _built(program)
    data |= parts_of(program, (), loads) | adapters(program, False) | on_cpus(program) | lengths.said(program, notes)
    put_checkpointing(program, said, loop, False)
    if program.defaults:
        notes.append(f"options of the script at their defaults: {', '.join(dict.fromkeys(program.defaults))}")
    settings = Settings(path, said.filled(data), said=said)
    settings.late += [*loop.pop("loop_questions"), *own_steps(program, said), *other_sizes(program, said)]
    settings.late += [OF_ANOTHER] if settings.data.get("torch_dtype") == gap(["torch_dtype"]) else []
    settings.usual = loop
    settings.asked |= {one for one in said.settings if loop["wrapped"] == "deepspeed" and DECIDING.fullmatch(one)}
    return parse(settings, TRANSFORMERS, said.num_gpus, Sharding(), notes=tuple(notes))


def _built(program: WithModules) -> dict[str, Any]:
    """A model that is made from a configuration: its name, and the dtype of its new weights; from_config takes that of the file by
    itself since transformers 4.46.  [modeling_utils.py: _from_config]"""
    named = [one for one in program.calls("from_pretrained") if owner(one).endswith("Config") and one.args]
    classes = {last_name(one.func) for one in ast.walk(program.tree) if isinstance(one, ast.Call)}
    made = program.calls("from_config", *(one for one in classes if one.endswith(DECODERS)))
    if not made:
        return {}
    words = program.keywords(made[0])
    dtype = words.get("torch_dtype", words.get("dtype"))
    found = {"dtype": dtype} if isinstance(dtype, str) else {}
    found |= turned(program, made[0]) | default_dtype(program, found)
    unsaid = {UNDATED: True} if named and last_name(made[0].func) == "from_config" and "dtype" not in found else {}
    return {**found, **unsaid, **({"model_name_or_path": program.value(named[0].args[0])} if len(named) == 1 else {})}
