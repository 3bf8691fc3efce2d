"""The training command in a shell script, and the GPUs that its launcher starts."""

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.trainers.megatron import engine_file
from planner.trainers.megatron.arguments import (
    Arguments,
    ask_for,
    ask_for_gaps,
    decides,
    mapping_of,
    of_mapping,
    of_sections,
    of_words,
)
from planner.trainers.megatron.sizes import is_other
from planner.trainers.reading.given import ARGUMENTS, CONFIG_FILE, Given, OtherStepError, Question, ask
from planner.trainers.reading.settings import beside
from planner.trainers.reading.shell import Command, Script, evaluate, is_open, options, words_of
from planner.trainers.reading.shell.expansion import Value
from planner.trainers.reading.shell.starting import gpus_on_node, included_gpus
from planner.trainers.reading.shell.text import CLOSE, shown_text
from planner.trainers.reading.steps import NOT_LM
from planner.trainers.reading.values import read_text

LEAST = 3
"""Arguments that decide something: fewer, and a command is no training."""
_PROGRAM = re.compile(r"\S*\.py")
_PER_NODE = ("nproc_per_node", "nproc-per-node", "num_gpus", "gpus-per-node", "ntasks-per-node")
_TORCHRUN = ("nproc_per_node", "nproc-per-node")
_NODES = ("nnodes", "num_nodes", "nodes", "N")
_WORLD = ("WORLD_SIZE", "NUM_GPUS", "TOTAL_GPUS", "N_GPUS", "NGPUS", "WORLD", "NPROC")
KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
"""Variables of Transformer Engine, which computes attention with scores in memory where both are 0."""
NOT_TRAINING = re.compile(r"(preprocess|convert|checkpoint|tools/|evaluat|generat|server|inference|export|/eval)")
LAUNCHERS = re.compile(
    r"nproc.per.node|nnodes|node.rank|master.(addr|port)|rdzv.*|max.restarts|tee|local.ranks.filter|log.dir|redirects|standalone|"
    r"jobid|label|container.*|mpi|export|kill.on.bad.exit|wait|hostfile|num.(nodes|gpus)|launcher|include|exclude|force.multi|"
    r"nrs|\w+.per.rs|rs.per.host|latency.priority|launch.distribution|bind|[a-zA-Z]|output|error|ntasks.*|gpus.*|nodes|gres|cpus.*|no.container.*|partition|account|time|job.name|exclusive|module|"
    r"ssh.port|no.ssh.check|save.pid|no.local.rank|(min|max).elastic.nodes|enable.each.rank.log|bind.cores?.(to.rank|list)"
)
"""Flags of launchers, not of the trainer."""


def of_script(text: str, where: str, given: Given, directory: Path | None) -> Arguments:
    """The arguments of the training that a script starts. Raises PlannerError."""
    script = evaluate(text, where, given.settings, directory)
    given.used.update(given.settings.keys() & script.variables.mentioned)
    commands = [Command(*_training(one)) for one in script.commands]
    counted = [(_deciding(one.words), one) for one in commands if _trains(one)]
    most = max((count for count, _ in counted), default=0)
    best = [one for count, one in counted if count == most or (any(one.under) and 2 * count >= most >= LEAST)]
    if most < LEAST:
        other = next((one.words[0] for one in commands if not _trains(one) and _deciding(one.words) >= LEAST), None)
        if other is not None:
            raise PlannerError(f"{where}: it starts {shown(other)}, which trains nothing")
        for one in (one for one in commands if _deciding(one.words)):
            _require_language_model(where, one.words[0])
        best = [one for one in [Command(_all_options(script))] if one.words] or best or [Command([])]
    best = [one for one in commands if any(word.startswith("--yaml-cfg") for word in one.words)] or best
    best = [one for one in best if not is_other(" ".join(one.words[:1]))] or best  # of a script for GPT, BERT and T5
    found = of_words(best[-1].words, where, script)
    _over_yaml(found, directory, given)
    _others(found, best, script)
    if not any(decides(name) for name in found):
        raise PlannerError(f"{where}: no training with arguments of Megatron-LM (--num-layers 32 ...) is started here")
    for name in [one for one in found if LAUNCHERS.fullmatch(one)]:
        del found[name]
    if all(script.variables.text(one) == "0" for one in KERNELS) and "attention_backend" not in found:
        found["attention_backend"] = "unfused"
        found.notes.append(f"attention unfused: {' and '.join(KERNELS)} are 0")
    found.program = best[-1].words[0] if _PROGRAM.fullmatch(best[-1].words[0] if best[-1].words else "") else ""
    _require_language_model(where, found.program)
    found.documents = [*(text for _, text in script.documents), *engine_file.edited(script, directory, found.notes)]
    launched = [one for one in script.commands if _deciding(one.words) >= min(most, LEAST)] or [Command([])]
    script.batch = dict(launched[-1].batch) or script.batch
    found.num_gpus = gpus_of(script, launched[-1].words) or (1 if alone(launched[-1]) else None)
    if found.num_gpus and one_process(launched[-1].words):
        found.notes.append("torchrun without --nproc_per_node starts one process on a node")
    if script.missing:
        found.notes.append(f"scripts that it reads and that are not here: {', '.join(dict.fromkeys(script.missing))}")
    if is_open(str(found.get("world_size"))):  # of mpirun or srun: how many GPUs is asked for once
        del found["world_size"]
    ask_for_gaps(found, script, _said(given))
    _one_for_arguments(found, script)
    return found


def _require_language_model(where: str, program: str) -> None:
    """Raises PlannerError for a program whose step is another one by its name: DPO of Megatron holds a second model."""
    words = re.split(r"[^a-z0-9]+", program.rpartition("/")[2].removesuffix(".py").lower())
    step = next((name for word in words if (name := {**NOT_LM, "dpo": "DPO", "distill": "distillation"}.get(word))), None)
    if step is not None:
        said = f"{program} trains with {step}, whose step is not modelled in Megatron; pre-training and fine-tuning are"
        raise OtherStepError(f"{where}: {said}")


def _over_yaml(found: Arguments, directory: Path | None, given: Given) -> None:
    """Takes the arguments of the YAML that --yaml-cfg names, in the place of the command's, which Megatron drops. One that is not
    there is asked for.  [megatron/training/arguments.py, parse_args: args = load_yaml(args.yaml_cfg)]"""
    named = found.pop("yaml_cfg", None)
    if named is None:
        return
    named = given.setting(CONFIG_FILE) or str(named)
    file = beside((directory or Path()) / "script", named.rpartition(CLOSE)[2].lstrip("/") if is_open(named) else named)
    if file is None:
        about = f"it names {shown(shown_text(named))}, which is not there; or import that file"
        ask(found.where, [Question(name=CONFIG_FILE, about=about, choices=("FILE",))])
    there = of_mapping(of_sections(mapping_of(read_text(file), str(file))), str(file), given)
    void = [found.spelled(name) for name, value in found.items() if decides(name) and there.get(name) != value]
    if void:
        found.notes.append(f"--yaml-cfg: {', '.join(void[:8])} of the command line: Megatron takes none beside the YAML")
    started = {name: value for name, value in found.items() if LAUNCHERS.fullmatch(name)}
    found.clear()
    found.questions.clear()
    found |= {**started, **there}


def _trains(command: Command) -> bool:
    """Whether a command may be a training, by its program."""
    program = " ".join(command.words[:1])
    return not NOT_TRAINING.search(program) or re.search(r"(^|/)(pre_?)?(post)?(fine_?)?(train|tune)\w*\.py$", program) is not None


def _one_for_arguments(found: Arguments, script: Script) -> None:
    """Variables that are arguments of the script are one question: how it is started."""
    waiting = [one for one in found.questions if one.name in script.variables.unset or one.name.isdigit()]
    if len(waiting) < 2 and not any(one.name.isdigit() for one in waiting):
        return
    known = ["|".join(dict.fromkeys(one.choices[:8])) for one in waiting]
    called = [f"{'$' * one.name.isdigit()}{one.name}{'=' * bool(few)}{few}" for one, few in zip(waiting, known, strict=True)]
    names = ", ".join(f"{name} ({one.about.split(',')[0]})" for name, one in zip(called[:12], waiting[:12], strict=True)) + (
        ", ..." if len(waiting) > 12 else ""
    )
    about = f"the words behind the script's name, in quotes; they decide {names}"
    found.questions = [Question(name=ARGUMENTS, about=about), *(one for one in found.questions if one not in waiting)]


def _said(given: Given) -> tuple[str, ...]:
    """Arguments that flags of the command line replace."""
    flags = {
        "seq_length": given.sequence_length, "global_batch_size": given.global_batch_size,
        "micro_batch_size": given.micro_batch_size, "vocab_size": given.model, "padded_vocab_size": given.model,
    }  # fmt: skip
    return tuple(name for name, value in flags.items() if value is not None)


def _others(found: Arguments, best: Sequence[Command], script: Script) -> None:
    """Other trainings of the script: under conditions one is asked for, one after the other the last one is read."""
    for one in best[:-1]:
        other = of_words(one.words, found.where, script)
        differs = sorted(name for name in {*found, *other} if decides(name) and found.get(name) != other.get(name))
        if not differs:
            continue
        names = [name for command in (one, best[-1]) for name in command.under if name]
        if names:
            ask_for(found, differs[0], tuple(names), script)
        else:
            found.notes.append(f"it starts {len(best)} trainings; the last one is read")
            return


def _training(command: Command) -> tuple[list[str], tuple[str, ...]]:
    """The words behind what launches the training: from the program on."""
    words = [one.text if not one.under else None for one in words_of(command.words)]
    place = next((i for i, word in enumerate(words) if word and _PROGRAM.fullmatch(word)), None)
    if place is None:
        return command.words, command.under
    program = words[place]
    place = next((i for i, word in enumerate(command.words) if str(program) in word), 0)
    rest = command.words[place]
    if rest != program:  # inside of a quoted block
        return [str(program), rest.partition(str(program))[2], *command.words[place + 1 :]], command.under
    return command.words[place:], command.under


def _deciding(words: Sequence[str]) -> int:
    return sum(decides(name.replace("-", "_")) for name, _, _ in options(words_of(words)))


def _all_options(script: Script) -> list[str]:
    """Options in arrays and texts of a script that starts nothing itself: it is read by another one. The list that says most
    goes before the others."""
    if "ARGUMENTS" in script.variables.values:  # as the export writes them
        return _words(script.variables.values["ARGUMENTS"])
    lists = [_words(value) for value in script.variables.values.values()]
    counted = sorted(((_deciding(words), words) for words in lists), key=lambda one: one[0])
    return [word for count, words in counted if count for word in words]


def _words(value: Value) -> list[str]:
    return [value] if isinstance(value, str) else value


def gpus_of(script: Script, words: Sequence[str]) -> int | None:
    """GPUs of the job: from the launcher's words, #SBATCH lines, or variables of usual names; None where they do not say it."""
    flags: dict[str, str] = {}
    for name, values, under in options(words_of(words)):
        if not under and values:
            flags.setdefault(name, values[0])
    names = {word.rpartition("/")[2] for one in words for word in one.split()}
    if names & {"mpirun", "mpiexec"} and (ranks := _first(flags, ("n", "np"))):
        return ranks * ((_first(flags, _TORCHRUN) or 1) if any(name in flags for name in _TORCHRUN) else 1)
    if "jsrun" in names and (sets := _first(flags, ("nrs", "n"))):
        return sets * (_first(flags, ("gpu_per_rs", "g")) or 1)  # resource sets of Summit
    if (count := included_gpus(flags.get("include", ""))) is not None:
        return count
    said = next((flags[name] for name in _TORCHRUN if name in flags), None)
    waits = said is not None and not _whole(said)  # of torchrun, which is one task a node: tasks say nothing of its processes
    each = 1 if one_process(words) else None
    per_node = gpus_on_node(script.batch) if waits else each or _first(flags, _PER_NODE) or _batch_gpus(script)
    nodes = _first(flags, _NODES) or _whole(script.batch.get("nodes"))
    actor = [_whole(flags.get(name)) for name in ("actor-num-nodes", "actor-num-gpus-per-node")]
    if all(actor):
        return prod(one for one in actor if one)
    single = any(name in flags for name in ("nproc_per_node", "nproc-per-node", "num_gpus", "standalone"))
    single = single or each is not None
    if per_node and (nodes or (single and not any(name in flags for name in _NODES))):
        return per_node * (nodes or 1)
    if _whole(script.batch.get("ntasks")) and not single:
        return _whole(script.batch["ntasks"])
    counts = [count for name in _WORLD if (count := _whole(script.variables.text(name)))]
    return next((count for count in counts if not (waits and count == nodes)), None)  # such a world counts nodes


def one_process(words: Sequence[str]) -> bool:
    """Whether torchrun starts a program without a number of processes: one on each node, by its default."""
    starts = r"(?:\S*/)?torchrun|torch\.distributed\.(?:run|launch)"
    place = next((i for i, word in enumerate(words) if re.fullmatch(starts, word)), None)
    if place is None or any(re.fullmatch(r"(?:\S*/)?srun", word) for word in words[:place]):
        return False
    until = next((i for i, word in enumerate(words) if i > place and _PROGRAM.fullmatch(word)), len(words))
    own = words[place + 1 : until]
    return until < len(words) and not any(is_open(word) or re.match(r"--?nproc|\$", word) for word in own)


def alone(command: Command) -> bool:
    """Whether python starts a program without a launcher, where one GPU is visible."""
    place = next((i for i, word in enumerate(command.words) if _PROGRAM.fullmatch(word)), 0)
    plain = all(re.fullmatch(r"(?:\S*/)?python[\d.]*|-[a-ln-zA-Z]", word) for word in command.words[:place])
    return place > 0 and plain and re.fullmatch(r"\s*\d+\s*", command.seen) is not None


def _batch_gpus(script: Script) -> int | None:
    """GPUs of a node that #SBATCH lines ask for."""
    tasks = _whole(script.batch.get("ntasks-per-node"))
    return gpus_on_node(script.batch) or (tasks if tasks and tasks > 1 else None)


def _first(flags: dict[str, str], names: Sequence[str]) -> int | None:
    return next((count for name in names if (count := _whole(flags.get(name)))), None)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[1-9]\d{0,6}", text) else None
