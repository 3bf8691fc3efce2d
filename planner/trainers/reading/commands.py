"""A command that starts a training, out of a script: its launcher, its settings, the files that it names."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.record import record
from planner.trainers.reading.accelerate_file import accelerate, file_of, of_accelerate
from planner.trainers.reading.given import (
    CONFIG_FILE,
    MODEL_OF_FILE,
    WHICH_TRAINING,
    Given,
    Question,
    ask,
    note_of_several,
)
from planner.trainers.reading.launch_options import overlaid
from planner.trainers.reading.programs import argument_files, program_file
from planner.trainers.reading.python_text import shell_of_cells
from planner.trainers.reading.settings import Settings, beside, file_settings, parsed, rooted
from planner.trainers.reading.sharding import Sharding, preset
from planner.trainers.reading.shell import Command, Script, evaluate, is_open, options, words_of
from planner.trainers.reading.shell.built_in import bare_programs
from planner.trainers.reading.shell.starting import gpus_on_node, hosts_gpus, included_gpus
from planner.trainers.reading.shell.text import Word, gap, roots, shown_text
from planner.trainers.reading.values import read_text


@record
class Launch:
    """One command that trains."""

    program: str
    """The word that was looked for."""
    settings: dict[str, Any]
    """Options of the program by name, with underscores; an unknown value is a text with gaps."""
    words: list[str]
    """Words of the program before its first option, and those that are no values of options: files, a=b."""
    sharding: Sharding | None
    """What its launcher says; None = nothing."""
    num_gpus: int | None
    """Processes, where launcher and variables say how many."""
    visible: int | None = None
    """GPUs that the script shows to each node; None = all."""
    node_gpus: int | None = None
    """GPUs of a node that the options of a batch system ask for."""
    nodes: int | None = None
    """Nodes that they ask for."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Files that the script writes before."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script hands to what it starts."""
    open_gpus: bool = False
    """A variable that nobody here knows says how many processes a node has."""
    notes: tuple[str, ...] = ()


@dataclass
class _Launcher:
    """Options of what starts the processes."""

    given: dict[str, list[str]] = field(default_factory=dict)

    def text(self, *names: str) -> str | None:
        """The value of an option, under any of its names."""
        return next((self.given[name][0] for name in names if self.given.get(name)), None)

    def number(self, *names: str) -> int | None:
        """The same as a whole number; None where it is not one."""
        text = self.text(*names)
        return int(text) if text is not None and re.fullmatch(r"\d{1,6}", text) else None


def launched(path: Path, said: Given, program: str, mode: str = "", modules: bool = False) -> Launch:
    """The first command of a script that has a word like ``program``, followed by one like ``mode``; ``modules``: or any that -m
    names. Raises PlannerError when there is none."""
    text = shell_of_cells(path) if path.suffix.lower() == ".ipynb" else read_text(path)
    text = re.sub(r"^([ \t]*)[!%](?=[A-Za-z])", r"\1", text, flags=re.MULTILINE)  # cells of notebooks
    script = evaluate(text, str(path), said.settings, path.parent)
    said.choices.update(script.choices)
    for name in said.settings:
        if re.search(rf"\b{re.escape(name)}\b", text):
            said.used.add(name)
    found = _training([*script.commands, *bare_programs(script)], program, mode, modules)
    found = found or _training(_kept(script), program, mode, modules)
    if modules:  # a batch makes it a training, whatever its program is called
        batches = [one for one in script.commands if _batch_place(one) >= 0]
        known = [one for one in found if _batch_place(one[0]) >= 0]
        found = known or [(one, _batch_place(one)) for one in batches] or [one for one in found if _may_train(one[0].words[one[1]])]
    if not found:
        raise PlannerError(f"{path}: no command that trains was found in this script")
    said.trainings[:] = [" ".join(one.words[at:]) for one, at in found]
    first, place = found[which_training(path, said) - 1]
    differ = [] if said.setting(WHICH_TRAINING) else [one for one, at in found[1:] if one.words[at:] != first.words[place:]]
    waiting = next((name for one in (first, *differ) for name in one.under if name), None)
    if differ and waiting:
        about = f"which of the {len(found)} trainings of the script it starts"
        ask(str(path), [Question(name=waiting, about=about, choices=tuple(script.choices.get(waiting, ())))])
    if re.search(r"\$[@*]", text) and not any(re.search(r"^-|[=.]", word) or roots(word) for word in first.words[place + 1 :]):
        raise PlannerError(f"{path}: all arguments come from who calls this script ($@); import the script that calls it")
    _as_it_runs(script, first)
    return _launch(path, first.words, place, script, note_of_several(said), said)


def which_training(path: Path, said: Given) -> int:
    """The number of the command that is read, of those that train. Raises PlannerError."""
    text = said.setting(WHICH_TRAINING)
    number = 1 if text is None else _count(text) or 0
    if not 0 < number <= len(said.trainings):
        raise PlannerError(f"--set {WHICH_TRAINING}={shown(text)}: {path} has {len(said.trainings)} commands that train")
    return number


def _as_it_runs(script: Script, command: Command) -> None:
    """Takes back what a script changes of the GPUs it shows and of its job behind a command."""
    if command in script.commands:
        script.batch, script.variables.values["CUDA_VISIBLE_DEVICES"] = dict(command.batch), command.seen


def _training(commands: Iterable[Command], program: str, mode: str, modules: bool) -> list[tuple[Command, int]]:
    """Commands that start a training, with the place of the program."""
    found = []
    for command in commands:
        words = [*command.words, ""]
        named = (i for i, word in enumerate(words[:-1]) if re.fullmatch(program, word) or (modules and _is_module(words, i)))
        fits = (i for i in named if re.fullmatch(mode or ".*", words[i + 1]))
        place = next(fits, None)
        asks = any(one in ("pip", "git", "echo", "which", "type") for one in command.words[: place or 0])  # command -v: is it there
        if place is not None and not asks and command.words[max(place - 2, 0) : place] != ["command", "-v"]:
            found.append((command, place))
    return found


def _may_train(program: str) -> bool:
    """Whether a program may be a training, by its name."""
    name = program.rpartition("/")[2].lower()
    return _ELSE.search(name) is None or _TRAINS.search(name) is not None


_ELSE = re.compile(
    r"download|prefetch|monitor|scrape|convert|preproc|prepare|infer|generat|(^|[/_.])eval|merge|upload|plot|compare|vllm|serv(e|ing)|bench|smoke|tokeniz|pytest"
    r"|unittest|(^|[/_.])get_"
)
_TRAINS = re.compile(r"train|tun(e|ing)|sft|dpo|lora")
"""Words of programs that do something else, and of those that train all the same."""


def _batch_place(command: Command) -> int:
    """Place of the last word before the options of a command that says a batch per GPU; -1 = it says none."""
    if not any(word.startswith("--per_device_train_batch_size") for word in command.words):
        return -1
    return max(next((i for i, word in enumerate(command.words) if word.startswith("-")), 0) - 1, 0)


def _kept(script: Script) -> list[Command]:
    """Commands that a script only keeps in variables: another one starts them."""
    texts = (one for one in script.variables.values.values() if isinstance(one, str) and " --" in one)
    return [Command([one.text for one in words_of([text])]) for text in texts]


def _is_module(words: list[str], place: int) -> bool:
    """Whether -m names it, and it is no launcher."""
    launcher = re.match(r"(torch\.distributed|accelerate|deepspeed|torchrun|pip|ensurepip|venv|virtualenv)\b", words[place])
    return place > 0 and words[place - 1] in ("-m", "--module") and launcher is None


def _launch(path: Path, words: list[str], place: int, script: Script, notes: tuple[str, ...], said: Given) -> Launch:
    after = list(words_of(words[place + 1 :]))
    for before, word in pairwise(after):
        if word.text == gap([]) and not before.text.startswith("-"):
            raise PlannerError(f"{path}: a part of its training command is the output of another command, which is not run; "
                               "write the arguments there, or import a script with them")  # fmt: skip
    launcher = _Launcher({name.replace("-", "_"): values for name, values, _ in options(words_of(words[:place]))})
    if "accelerate" not in words[:place]:  # which sets them anew
        launcher.given = {**_of_environment(script), **launcher.given}
    first = next((i for i, word in enumerate(after) if word.text.startswith("-")), len(after))
    settings = _settings(after)
    strategy = script.variables.text("FSDP_SHARDING_STRATEGY") or ""
    if "fsdp" in settings and re.fullmatch(r"[1-5]|\w*_SHARD\w*", strategy):  # what accelerate takes from the environment
        settings.setdefault("fsdp_config", {"sharding_strategy": strategy})
    if script.variables.text("CUDA_VISIBLE_DEVICES") == "-1":
        settings.setdefault("use_cpu", True)
    loose = [word.text for word in after[:first]] + [one.text for one in after[first:] if re.match(r"[+~]*[\w./@]+=", one.text)]
    return Launch(
        program=words[place], settings=settings, words=loose, sharding=_sharding(path, launcher, settings, said, script),
        num_gpus=_gpus(words[:place], launcher, script), visible=None if _nodes_open(launcher) else _visible(script), notes=notes,
        environment={one: script.variables.text(one) or text for one, text in script.exported.items()},
        open_gpus=is_open(launcher.text("nproc_per_node") or ""),
        written=dict(script.documents), node_gpus=gpus_on_node(script.batch), nodes=_count(script.batch.get("nodes")),
    )  # fmt: skip


def _of_environment(script: Script) -> dict[str, list[str]]:
    """Options of accelerate by the variables in which it hands them on, set by the script.  [accelerate, utils/launch.py]"""
    names = {"ACCELERATE_MIXED_PRECISION": "mixed_precision", "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
             "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage"}  # fmt: skip
    texts = {one: script.variables.text(one) or "" for one in script.variables.values}
    kept = {one: text for one, text in texts.items() if text and not is_open(text)}
    on = [one for one in ("fsdp", "deepspeed") if kept.get(f"ACCELERATE_USE_{one.upper()}", "").lower() in ("true", "1")]
    said = {names[one]: [text] for one, text in kept.items() if one in names and ("ZERO" not in one or "deepspeed" in on)}
    fsdp = {one.lower(): [text] for one, text in kept.items() if one.startswith("FSDP_") and "fsdp" in on}
    return {**said, **fsdp, **{f"use_{one}": [] for one in on}}


def _settings(after: Iterable[Word]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values, under in options(after):
        kept = [one for one in values if not re.match(r"[+~]*[\w./@]+=", one)] if len(values) > 1 else values
        value: Any = True if not kept else parsed(kept[0]) if len(kept) == 1 else [parsed(one) for one in kept]
        found[_plain(name.replace("-", "_"))] = gap(under) if under else value
    return found


def _plain(name: str) -> str:
    """An argument of transformers or peft, without the dataclass it is in: training_args.bf16, peft_config.r."""
    inner = re.fullmatch(r"(?:(peft_config|lora_config)|\w*arg(?:s|uments))\.(\w+)", name)
    if inner is None:
        return name
    return f"lora_{inner[2]}" if inner[1] and not inner[2].startswith(("lora_", "use_", "modules_")) else inner[2]


def _visible(script: Script) -> int | None:
    text = script.variables.text("CUDA_VISIBLE_DEVICES") or script.variables.text("ASCEND_RT_VISIBLE_DEVICES")
    return len([one for one in text.split(",") if one.strip()]) if text and not is_open(text) else None


def _gpus(before: list[str], launcher: _Launcher, script: Script) -> int | None:
    """Processes of the job."""
    names = [Path(one).name for one in before]
    several = {"srun", "mpirun", "mpiexec", "torchrun"} & set(names)
    seen = _visible(script)
    if is_open(launcher.text("nnodes", "num_nodes", "num_machines") or ""):
        return None
    nodes = launcher.number("nnodes", "num_nodes", "num_machines") or _variable(script, "NNODES") or 1
    if "deepspeed" in before:
        if (hosts := launcher.text("include")) and (count := included_gpus(hosts)):
            return count
        if (file := launcher.text("hostfile")) and launcher.number("num_nodes") is None:
            return _of_hosts(file, script)
        each = launcher.number("num_gpus") or seen
        return each * nodes if each else None
    if (total := launcher.number("num_processes")) is not None:
        return total or None  # of 0 processes: asked for
    if "accelerate" in before:
        return None
    text = launcher.text("nproc_per_node")
    each = launcher.number("nproc_per_node") or (seen if text in ("gpu", "auto") else None)
    if each is None and is_open(script.variables.text("NNODES") or ""):  # NNODES=$WORLD_SIZE: the environment says it
        return None
    each = each or _variable(script, "NPROC_PER_NODE")
    if each is None and {"mpirun", "mpiexec"} & set(names) and (ranks := launcher.number("np", "n")):
        return ranks
    asked = (gpus_on_node(script.batch) or 0) * (_count(script.batch.get("nodes", "1")) or 0)
    if each is None and (asked == 1 or ("srun" in names and asked and asked == _variable(script, "SLURM_NTASKS"))):
        return asked  # whatever starts it has no others, or each of its tasks has one
    if each is None and not several and (not before or any(one.startswith("python") for one in names)):
        return 1 if seen == 1 else None
    return each * nodes if each else None


def _nodes_open(launcher: _Launcher) -> bool:
    """Whether nobody here knows on how many nodes it starts: a host file or a variable says it."""
    hosts = launcher.text("hostfile") is not None and launcher.number("num_nodes") is None
    return hosts or is_open(launcher.text("nnodes", "num_nodes", "num_machines") or "")


def _of_hosts(name: str, script: Script) -> int | None:
    """GPUs of a host file that lies beside the script, or that it writes; None where it is not there."""
    file = None if is_open(name) else beside(Path(script.variables.where), name, (Path(name).suffix.lower(),))
    text = dict(script.documents).get(name) or (read_text(file) if file is not None else "")
    return hosts_gpus(text)


def processes(script: Script, command: Command) -> int | None:
    """Processes that a command starts, where launcher and variables say how many."""
    after = ["", *command.words[1:], ""]  # -m torch.distributed.run is a launcher itself
    place = next((i for i, word in enumerate(command.words) if word.endswith(".py")
                  or (word in ("-m", "--module") and not after[i + 1].startswith("torch.distributed."))), 0)  # fmt: skip
    before = command.words[:place]
    _as_it_runs(script, command)
    found = _gpus(before, _Launcher({name.replace("-", "_"): values for name, values, _ in options(words_of(before))}), script)
    tasks, nodes = _count(script.batch.get("ntasks-per-node")), _count(script.batch.get("nodes"))
    alone = "srun" in before and not any("torch" in one for one in before)  # each task is a process of the job
    return tasks * nodes if found is None and alone and tasks and nodes and tasks > 1 else found


def _count(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[1-9]\d{0,5}", text) else None


def _variable(script: Script, name: str) -> int | None:
    text = script.variables.text(name) or ""
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


SHARDS = ("deepspeed", "fsdp", "fsdp_config")
"""Arguments of the program itself that shard it, whatever its launcher says."""


def _sharding(path: Path, launcher: _Launcher, settings: dict[str, Any], said: Given, script: Script) -> Sharding | None:
    """What options of accelerate say."""
    file, kinds = launcher.text("config_file"), {"use_deepspeed", "zero_stage", "deepspeed_config_file"} & launcher.given.keys()
    named = launcher.text("deepspeed_config_file")
    if file is not None:
        there = None if is_open(file) else file_of(path, file, dict(script.documents))
        if there is None:
            settings.setdefault("accelerate", shown_text(file))
            return None
        found = accelerate(there, launcher.given, said)
        if "use_deepspeed" in kinds and len(kinds) == 1 and accelerate(there).kind == "ddp":  # the flag wins, without a stage
            settings.setdefault("deepspeed", "--use_deepspeed")
            return dataclasses.replace(found, kind="ddp", fields={"zero": 0})
        return found
    if named is not None and beside(path, named) is None and preset(named) is None:  # asked for with the rest
        settings.setdefault("deepspeed", named)
        if (precision := launcher.text("mixed_precision")) in ("bf16", "fp16"):
            settings.setdefault(precision, True)
        return None
    several = "multi_gpu" in launcher.given and not any(name in settings for name in SHARDS)
    others = {"use_fsdp", "use_megatron_lm", "cpu", "tpu", "mixed_precision", "dynamo_backend"} & launcher.given.keys()
    if kinds or several or others:
        data = overlaid({"distributed_type": "DEEPSPEED" if kinds else "MULTI_GPU", "mixed_precision": None}, launcher.given)
        found = of_accelerate(path, data, said)
        return dataclasses.replace(found, num_gpus=None, gpus_per_node=None)  # counted where the command is read
    return None


_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
"""What --set says of the shell, whose words the command has by now."""


_MODEL = re.compile(r"(^|_)model(_name|_path|_id|$)|checkpoint_dir")
"""Options that name the model."""


def _file_of(value: Any) -> str:
    """The file that an option names; what a variable adds behind it may be options, and is none."""
    return str(value[0]) if isinstance(value, list) and value else str(value)


PLACES = ("USER", "LOGNAME", "HOME", "PWD", "TMPDIR", "SLURM_JOB_ID")
"""Variables that name a place of the machine: a word with no other variable is no file of settings, unless it ends like one."""


def _require_named(path: Path, words: list[str], said: Given) -> None:
    """Asks for the file of settings that a variable names."""
    for word in (one for one in words if is_open(one) and "=" not in one):
        if roots(word) and {*roots(word)} <= {*PLACES} and not word.endswith((".yaml", ".yml", ".json")):
            continue
        name = next(iter(roots(word)), CONFIG_FILE)
        about = "the file of settings that its command names"
        ask(str(path), [Question(name=name, about=about, choices=tuple(said.choices.get(name, ())) or ("FILE",))])


def _require_written(path: Path, name: str, text: str, said: Given) -> None:
    """Asks for what decides which lines the script writes into a file."""
    lines = (one.strip() for one in text.splitlines() if is_open(one))
    for line in (one for one in lines if one == gap(roots(one))):
        waits = next(iter(roots(line)), CONFIG_FILE)
        about = f"what the script writes into {shown(shown_text(name))}"
        ask(str(path), [Question(name=waits, about=about, choices=tuple(said.choices.get(waits, ())) or ("FILE",))])


def with_files(path: Path, found: Launch, said: Given, options_that_name: tuple[str, ...] = ("config",)) -> Settings:
    """Settings of a command over those of the YAML files that it names. Raises PlannerError where one is not there."""
    named = [_file_of(found.settings.pop(one)) for one in options_that_name if one in found.settings]
    named += [word for word in found.words if word.endswith((".yaml", ".yml", ".json")) and "=" not in word]
    parsed_from = argument_files(program_file(path, found.program), found.settings) if not named else {}
    named += [found.settings.pop(name, value) for name, value in parsed_from.items()]
    if not named:
        _require_named(path, found.words, said)
    data: dict[str, Any] = {}
    for name in named:
        if name in found.written and name.endswith((".yaml", ".yml")) and said.settings.get(CONFIG_FILE) is None:
            _require_written(path, name, found.written[name], said)
            data |= library.parse_yaml(found.written[name], f"{path}: {name}")
            continue
        file = beside(path, said.setting(CONFIG_FILE) or rooted(name))
        if file is None:
            about = f"it names {shown(shown_text(name)) if name else 'one by arguments'}, which is not there; or import that file"
            waiting = [Question(name=CONFIG_FILE, about=about, choices=("FILE",))]
            if isinstance(found.settings.get("accelerate"), str):  # asked for in the same sentence
                waiting.append(Question(name="accelerate", about="the configuration that launches it", choices=("FILE",)))
            if said.model is None and options_that_name == ("config",) and not any(map(_MODEL.search, found.settings)):
                waiting.append(MODEL_OF_FILE)
            ask(str(path), waiting)
        data |= file_settings(file, "settings of a training")
    data |= {key.lstrip("+~"): parsed(value) for key, _, value in (word.partition("=") for word in found.words if "=" in word)}
    given = {**data, **found.settings}
    if (engine := found.written.get(str(given.get("deepspeed")).removeprefix("./"))) is not None:
        given["deepspeed"] = library.parse_json(engine, f"{path}: {given['deepspeed']}")
    keys = {name: value for name, value in said.settings.items() if name in given or not _VARIABLE.fullmatch(name)}
    return Settings(path, said.with_settings(keys).filled(given), said=said)
