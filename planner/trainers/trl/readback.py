"""TRL: the YAML of a recipe (trl sft --config, alignment-handbook), scripts that run sft.py or dpo.py, and scripts and notebooks in
Python that build an SFTTrainer, a DPOTrainer or transformers' own Trainer."""

import dataclasses
import re
from os.path import commonpath
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.file_readers import PROGRAM as PROGRAM_OF_RECIPE
from planner.trainers.reading.given import CONFIG_FILE, Given, OtherStepError, Question
from planner.trainers.reading.guides import Guide, over_recipe, started
from planner.trainers.reading.lengths import is_gone
from planner.trainers.reading.modules import own_model
from planner.trainers.reading.own_code import take_program
from planner.trainers.reading.own_programs import in_one_process, kind_of, of_program
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.shell.text import gap
from planner.trainers.reading.training_arguments import BATCHES, HABITS, LENGTHS, MODELS, TRL, Habits, parse
from planner.trainers.reading.training_scripts import OPEN, OfItsCommandError, builds_in_modules, settings_of
from planner.trainers.reading.unsloth_parts import scores_of_unsloth
from planner.trainers.reading.values import read_text
from planner.trainers.trl.launches import of_old_program, of_options

PROGRAM = r"(?:\S*/)?(?:\w*_)?(?:sft|dpo|cpt)(?:_\w+)?\.py|trl|trl\.scripts\.(?:sft|dpo)"

TRAINS = re.compile(
    r"learning_rate|lr|warmup\w*|num_train_epochs|max_steps|output_dir|dataset(_name|_mixer|_mixture)?|(per_device_|per_gpu_|micro_|train_)\w*|gradient_\w+"
    r"|use_peft|lora_\w+|max_(seq_|prompt_)?length|bf16|fp16|deepspeed|fsdp\w*|optim\w*|packing|beta|batch_size\w*|epochs|num_epochs"
)
"""Arguments of which every recipe of a training has one."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    suffix = path.suffix.lower()
    if suffix in (".py", ".ipynb"):
        try:
            settings, kind, notes = settings_of(path, said)
        except OfItsCommandError:
            if suffix == ".ipynb" or CONFIG_FILE in said.settings:  # tried as what may read that file
                raise
            return _of_any_command(path, said)
        gpus = said.num_gpus or (1 if kind == "unsloth" or settings.one_gpu else None)
        notes = (*notes, *scores_of_unsloth([read_text(path)] if kind == "unsloth" else [], settings.label(*MODELS)))
        return parse(settings, HABITS[kind], gpus, notes=notes)
    if suffix in (".yaml", ".yml", ".json"):
        read, notes = over_recipe(path, file_settings(path, "a recipe of TRL"), said)
        data = said.filled(read)
        if not any(one in data for one in (*MODELS, *BATCHES, "model")):
            _require_no_launcher(path)
            raise PlannerError(f"{path}: its settings stand in sections of its own, and none is one of TRL's")
        if not any(TRAINS.fullmatch(one) for one in data):
            raise PlannerError(f"{path}: it names a model and no argument of a training beside it; import what reads it")
        if isinstance(data.get("model"), str) and not any(one in data for one in MODELS):
            raise PlannerError(f"{path}: it says model where a recipe of TRL says {MODELS[0]}: a program of its own reads it")
        if (text := said.setting("gradient_checkpointing")) is not None:
            data["gradient_checkpointing"] = text
        data.pop(PROGRAM_OF_RECIPE, None)
        settings, habits, gpus, told = _through_program(path, data, said)
        split = of_options(path, data, said) if "accelerate_config" in data else None
        return _of_own_words(parse(settings, habits, gpus, split, notes=(*notes, *told)), data, said, settings)
    found = launched(path, said, PROGRAM)
    script = found.words[0] if found.program == "trl" and found.words else found.program
    settings = with_files(path, found, said)
    if found.program != "trl" and (own := of_program(path, found, settings, script, said)) is not None:
        return own
    old = of_old_program(settings, script)
    take_program(settings, path, script, said.num_gpus or found.num_gpus)
    settings.data = dict(settings.data)
    split = (of_options(path, settings.data, said) if found.program == "trl" else None) or found.sharding
    habits, gpus = old or HABITS[kind_of(path, script, settings)], said.num_gpus or found.num_gpus
    return parse(settings, habits, gpus, split, script, (*found.notes, *in_one_process(found), *_of_own_model(path, script)))


def _of_any_command(path: Path, said: Given) -> Reading:
    """The job of a program whose command stands elsewhere: what a command of it says is asked for."""
    names = (*OPEN, "optim", *(("use_peft",) if re.search(r"\bget_peft_config\(", read_text(path)) else ()))
    settings = Settings(path, said.filled({name: gap([name]) for name in names}), said=said)
    take_program(settings, path, path.name, said.num_gpus)
    if said.model is not None:  # in the place of a default
        settings.usual = {name: value for name, value in settings.usual.items() if name not in MODELS}
    if said.sequence_length is None and not any(one in said.settings for one in LENGTHS):
        settings.late.append(NEEDED["sequence_length"])
    habits = dataclasses.replace(HABITS[kind_of(path, path.name, settings)], own=True)
    note = "its command stands elsewhere: what is not asked for is at the defaults of its arguments"
    return parse(settings, habits, said.num_gpus, notes=(note, *_of_own_model(path, path.name)))


def _through_program(path: Path, data: dict[str, Any], said: Given) -> tuple[Settings, Habits, int | None, tuple[str, ...]]:
    """(Settings of a recipe as the program that starts it takes them, its habits, its GPUs, notes); those of TRL's own scripts
    where none is known."""
    plain, given = Settings(path, data, said=said), Settings(path, data, said=said)
    found, told = _program(path, plain, said)
    file = program_file(path, found.program) if found is not None else None
    if found is None or file is None:
        return plain, TRL, said.num_gpus, told
    try:
        take_program(given, path, str(file), said.num_gpus)
        wrong = "" if given.calls else "it builds no trainer that is known here"
    except PlannerError as error:
        wrong = str(error).rpartition(": ")[2]
    if wrong:
        return plain, TRL, said.num_gpus, (*told, f"its program {file.name} is not read: {wrong}")
    kind = kind_of(path, str(file), given)
    if found.document and not told and HABITS[kind] != TRL:
        told = (f"read as {file.name} takes it, with which a command in {found.document} starts it",)
    gpus = said.num_gpus or (1 if kind == "unsloth" else None)
    scores = scores_of_unsloth([read_text(path), read_text(file)] if kind == "unsloth" else [], given.label(*MODELS))
    return given, HABITS[kind], gpus, (*told, *scores, *_of_own_model(path, str(file)))


OWN = re.compile(r"\b(?!(?:SFT|DPO|Seq2Seq)?Trainer\b)[A-Z]\w*Trainer\b|\bFast\w*Model\.")
"""What a program has that does something else with a recipe than TRL's own."""


def _program(path: Path, given: Settings, said: Given) -> tuple[Guide | None, tuple[str, ...]]:
    """(The program that starts a recipe, a note where that is not sure); of several that may be it one is asked for."""
    found, likely = started(path)
    if (named := said.setting(PROGRAM_OF_RECIPE)) is not None:
        if program_file(path, named) is None:
            raise PlannerError(f"--set {PROGRAM_OF_RECIPE}={shown(named)}: there is no such file near {path}")
        return Guide(file="", document="", program=named), ()
    if found is not None or not any(OWN.search(read_text(Path(one))) for one in likely):
        return found, ()
    (first, only), *others = likely.items()
    if not others:
        return only, (f"as {only.document} starts other recipes of this folder with {Path(first).name}",)
    folder = Path(commonpath([path.resolve(), *likely]))
    about = "which program starts it: its project starts other recipes of its folder with these"
    given.ask(Question(name=PROGRAM_OF_RECIPE, about=about, choices=tuple(str(Path(one).relative_to(folder)) for one in likely)))
    return None, ()


def _of_own_model(path: Path, program: str) -> tuple[str, ...]:
    """Note about a program that loads a class of its project for the model."""
    file = program_file(path, program) if program else None
    if file is None or (named := own_model(file)) is None:
        return ()
    what = "a class of its project: what its layers keep that transformers' do not is not in the plan, which may be too low"
    return (f"{file.name} loads {named}, {what}",)


def in_modules(path: Path) -> bool:
    """Whether a program builds a trainer in modules of its project, where its text says nothing of one."""
    return builds_in_modules(path)


def _of_own_words(found: Reading, data: dict[str, Any], said: Given, given: Settings) -> Reading:
    """The same, with a question for the length where a program of its own reads a file, whose length is another than TRL's: it
    names neither length nor model and has words that TRL does not know, or its length is a word that the TRL which its project pins
    has no more, and no program of it is read."""
    length = next((one for one in LENGTHS if data.get(one) is not None), "")
    gone = given.calls is None and length not in said.settings and is_gone(given.path, length)
    named = length or any(data.get(one) is not None for one in (*MODELS, "model"))
    if said.sequence_length is not None or not (gone or (found.unread and not named)):
        return found
    word, whose = (length, "the TRL that its project pins") if gone else (found.unread[0].partition(" = ")[0], "TRL")
    about = f"{word} is no word of {whose}: a program of its own reads this file, and cuts where it likes"
    return dataclasses.replace(found, questions=(*found.questions, dataclasses.replace(NEEDED["sequence_length"], about=about)))


def _require_no_launcher(path: Path) -> None:
    """Raises OtherStepError for a job of a scheduler, whose settings are the words of a command in it."""
    if (started := re.search(r"accelerate +launch|torchrun +|deepspeed +\S+\.py|python3? +\S+\.py", read_text(path))) is not None:
        what = f"it is the job of a scheduler that starts {shown(started[0].strip())}"
        raise OtherStepError(f"{path}: {what}; write that command into a script and import it")
