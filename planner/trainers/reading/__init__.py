"""Readers of what people run today: a trainer's configuration becomes a plan."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from planner import library
from planner.errors import PlannerError, UnknownNameError
from planner.trainers import SERVERS, having, load
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.file_readers import through, which_program
from planner.trainers.reading.given import (
    CONFIG_FILE,
    Given,
    OpenQuestionsError,
    OtherMachineError,
    OtherStepError,
    Question,
    ask,
)
from planner.trainers.reading.machines import by_batch, of_modal, on_modal, other_machines
from planner.trainers.reading.programs import MOST_PROGRAMS, program_file, started_with, starts_a_trainer, trains_with
from planner.trainers.reading.python_text import shell_of_cells
from planner.trainers.reading.settings import beside
from planner.trainers.reading.settled import ask_what_else_is_open, refuse_what_stays
from planner.trainers.reading.several import compared
from planner.trainers.reading.shell import ends_early, evaluate
from planner.trainers.reading.shell.built_in import bare_programs
from planner.trainers.reading.shell.text import is_open, roots, shown_text
from planner.trainers.reading.values import read_text
from planner.trainers.reading.workflows import script_of


def read(path: Path, name: str | None = None, given: Given | None = None) -> Reading:
    """The configuration in a file, by the named reader or by the first that knows its form; ``given`` is what the user says
    beside it. Raises PlannerError."""
    readers = dict(sorted(having("readback").items(), key=lambda one: _place(one[1])))
    if name is not None and name not in readers:
        raise UnknownNameError("reader", name, [*readers, *SERVERS])
    path = script_of(path) or path
    text = read_text(path)
    if written := OWN_FILE.search(text):
        raise PlannerError(library.other_kind(written[1], str(path)))
    said = given or Given()
    said = _counted(path, text, said if said.num_gpus else dataclasses.replace(said, num_gpus=of_modal(path)[1]))
    said.used.update(name for name, value in said.settings.items() if value == "false" and _named(name, text))
    commands = _commands(path, text, said)
    if filled := _by_its_file(commands, said):
        said = said.with_settings({**filled, **said.settings})
        commands = _commands(path, text, said)
    run, whole = _lines(commands, MOST_WORDS), _lines(commands, MOST_ARGUMENTS)
    first = [one for one in readers if run and getattr(readers[one], "READ_FIRST", False)]
    shown = IN_A_FILE.sub("", text) if _ending(path, text) in SHELL else text
    fits = [one for one in readers if _looks_like(readers[one].FORM, path, f"{shown}\n{run}" if one in first else shown)]
    if set(fits) <= {"transformers", "trl"} and _ending(path, text) in SHELL:  # whose words may be those of comments
        plain = re.sub(r"^[ \t]*#(?!!).*", "", text, flags=re.MULTILINE)
        fits = [one for one in fits if _looks_like(readers[one].FORM, path, plain)]
    general = fits == ["transformers"]  # by a launcher's name, which any trainer may have
    if (not fits or general) and (started := f"{_started(path, text)}\n{whole}".strip()):
        fits = [one for one in readers if _looks_like(readers[one].FORM, path, started)] or fits
    if run and (named := next((one for one in FOLLOWED if started_with(path, whole, one)), None)):
        fits = [FOLLOWED[named]]
    if (own_program := next((one for one in readers if _starts(readers[one], path, f"{run}\n{text}")), None)) is not None:
        fits = [own_program]
    hands_on = load("trl", "dumped")
    bare = not fits and path.suffix == ".ipynb" and hands_on.starts(text) is None
    cells = shell_of_cells(path) if bare else ""  # a notebook may be no more than a script
    fits = fits or [one for one in readers if cells and _looks_like(readers[one].FORM, path.with_suffix(".sh"), cells)]
    if (not fits or (fits[0] == "llama-factory" and not OF_LLAMA_FACTORY.search(whole))) and starts_a_trainer(path, whole or cells):
        fits = ["transformers"]
    alone = path.suffix == ".py" and "__main__" in text and trains_with(text) is None
    if set(fits) <= {"pytorch"} and alone and load("trl", "readback").in_modules(path):
        fits = ["trl"]
    if name or fits:
        try:
            found = _collected(path, load(name or fits[0], "readback").read, said)
        except (OpenQuestionsError, OtherStepError):
            raise
        except PlannerError:
            if name or (own := _through_its_program(path, said)) is None:
                raise
            return own
        said.require_used(str(path))
        return found
    if (own := _through_its_program(path, said)) is not None:
        return own
    if _ending(path, text) in ("py", "ipynb") and (named := hands_on.starts(text)) is not None:
        found = _collected(path, lambda file, given: hands_on.read(file, named, given), said)
        said.require_used(str(path))
        return found
    if _ending(path, text) == "py" and (trained := trains_with(text)) is not None:
        raise PlannerError(f"{path}: a program of {trained}, of whose programs this one is not read; 'plan estimate' takes its job")
    raise PlannerError(f"{path}: looks like no configuration of {', '.join([*readers, *SERVERS])}; say which with --from")


def _place(reader: object) -> tuple[bool, bool]:
    """What its form is tried after: those that say READ_FIRST, and before those that say READ_LAST."""
    return not getattr(reader, "READ_FIRST", False), getattr(reader, "READ_LAST", False)


IN_A_FILE = re.compile(r"^(model_name_or_path|per_device_train_batch_size)\s*:.*", re.MULTILINE)
"""Lines of a script that stand in a file which it writes, for whatever program."""
OWN_FILE = re.compile(rf"^({'|'.join(library.WRITTEN)}): *\d+$", re.MULTILINE)
"""What the planner itself wrote is read already."""


def _named(name: str, text: str) -> bool:
    """Whether a file has an option of that name: without it nothing changes where another answer chose a branch that lacks it."""
    return re.search(rf"--{re.escape(name).replace('_', '[-_]')}\b", text) is not None


def _counted(path: Path, text: str, said: Given) -> Given:
    """What is said, with the number of GPUs for the variable that a script of one node takes it from: its branches follow."""
    named = OWN_NUMBER.search(text) if said.num_gpus and _ending(path, text) in SHELL else None
    if named is None or named[1] in said.settings or NODES.search(text):
        return said
    said.used.add(named[1])
    return said.with_settings({**said.settings, named[1]: str(said.num_gpus)})


OF_LLAMA_FACTORY = re.compile(
    r"llama-?factory|\blmf\b|train_bash|--(stage|finetuning_type|cutoff_len)\b|train(\.py)?\s+\S+\.(ya?ml|json)\b"
)
"""Words of its commands, beside src/train.py, which other projects have too, and which has no file as an option of its own."""
FOLLOWED = {"Megatron-Bridge": "megatron-bridge", "NeMo": "nemo"}
"""Libraries whose programs are followed under the options of the command that starts them -> their reader."""
OWN_NUMBER = re.compile(
    r"^[ \t]*(?:export +)?((?:NUM_|N_?)?(?:GPUS?|PROC(?:ESSE)?S?)(?:_NUM|_COUNT)?)=[\"']?\$\{\1:-\d+\}", re.MULTILINE
)
"""NUM_GPUS=${NUM_GPUS:-8}: what the user is free to say, and --gpus says."""
NODES = re.compile(r"nnodes|num_?nodes|num_machines|nhosts", re.IGNORECASE)
"""Words of scripts for several nodes, where such a number is that of a node."""


def _starts(reader: object, path: Path, run: str) -> bool:
    """Whether a script starts a program in Python that this reader knows, whose options it lays over what the program says."""
    if not getattr(reader, "PROGRAMS", False) or _ending(path, run.lstrip("\n")) not in SHELL:
        return False
    files = (program_file(path, one) for one in list(dict.fromkeys(re.findall(r"[^\s=]{1,200}\.py(?=\s|$)", run)))[:MOST_PROGRAMS])
    return any(_looks_like(reader.FORM, one, read_text(one)) for one in files if one is not None)  # type: ignore[attr-defined]


MOST_WORDS, MOST_ARGUMENTS = 12, 400
"""Words of a command in which its program stands, and with what it is given."""


def _commands(path: Path, text: str, said: Given) -> list[list[str]]:
    """Words of the commands of a script with the values of its variables; none for what is no script."""
    if _ending(path, text) not in SHELL:
        return []
    try:
        script = evaluate(text, str(path), said.settings, path.parent)
        return [one.words for one in (*script.commands, *bare_programs(script))]
    except PlannerError:
        return []


def _by_its_file(commands: list[list[str]], said: Given) -> dict[str, str]:
    """Variables in the name of the file of settings that a command names, by the file that the user says in its place: TASK of
    recipes/$TASK/config.yaml, which may decide the program too."""
    file = said.settings.get(CONFIG_FILE, "")
    open_ = {one for words in commands for one in words if file and is_open(one) and one.endswith((".yaml", ".yml", ".json"))}
    for word in sorted(open_, key=len, reverse=True):  # the one that says most
        names = roots(word)
        place = re.escape(shown_text(word).rpartition("=")[2])
        for name in names:
            place = place.replace(re.escape(f"${{{name}}}"), "([^/]*)", 1)
        found = re.search(rf"(?:^|/){place}$", file)
        if found is not None and len(found.groups()) == len(names) == len([one for one in names if one.isupper()]):
            said.used.update(names)
            return dict(zip(names, found.groups(), strict=True))
    return {}


def _lines(commands: list[list[str]], most: int) -> str:
    """Commands one a line, ``most`` words of each."""
    return "\n".join(" ".join(words[:most]) for words in commands)


def _through_its_program(path: Path, said: Given) -> Reading | None:
    """A file of settings in a form of its own, as the program of its project takes it that reads it; None = there is none. Where
    several programs take it as different jobs, which of them is meant is asked."""
    programs, given = through(path, said)
    found: dict[Path, Reading] = {}
    wrong: PlannerError | None = None
    for one in programs:
        given.questions.clear()
        given.used.discard(CONFIG_FILE)
        try:
            reading = _collected(one, load("trl", "readback").read, given)
        except PlannerError as error:
            wrong = wrong or (error if CONFIG_FILE in given.used else None)
            continue
        if CONFIG_FILE in given.used:
            note = f"read as {one.name} takes it, which reads such files"
            found[one] = dataclasses.replace(reading, notes=(note, *reading.notes))
    if not found:
        if wrong is not None:
            raise wrong
        return None
    first, *others = found.values()
    if any(dataclasses.replace(one, notes=first.notes, unread=first.unread) != first for one in others):
        first = dataclasses.replace(first, questions=(which_program(path, list(found)), *first.questions))
    given.used.add(CONFIG_FILE)  # by one of them
    given.require_used(str(path))
    return first


def _started(path: Path, text: str) -> str:
    """Texts of the scripts beside it that a script starts."""
    start = r"(?:\b(?:bash|sh|(?:sbatch|qsub|srun)(?:[ \t]++-\S++(?:[ \t]++\d++)?+)*+)\s++|^[ \t]*+(?:\w+=\S*+[ \t]++)*+)"
    names = re.findall(rf"{start}([\w./-]{{1,200}}\.(?:sh|bash|slurm|sbatch))\b", text, re.MULTILINE)
    files = [beside(path, one, (".sh", ".bash", ".slurm", ".sbatch")) for one in list(dict.fromkeys(names))[:8]]
    return "\n".join(read_text(one) for one in files if one is not None and one.resolve() != path.resolve())


def _collected(path: Path, reader: Callable[[Path, Given], Reading], said: Given) -> Reading:
    """What a reader finds, with the questions that it left on the way; a question goes before what its answer may mend."""
    try:
        found = reader(path, said)
    except OpenQuestionsError as error:
        questions = _once([*said.questions, *error.questions])
        refuse_what_stays(path, said, questions)
        ask(str(path), questions)
    except OtherMachineError:  # which no answer changes
        raise
    except PlannerError as error:
        refuse_what_stays(path, said, said.questions)
        ask_what_else_is_open(path, reader, said, error)
        if said.questions:
            ask(str(path), said.questions)
        raise
    found = on_modal(path, by_batch(path, compared(path, reader, said, found)))
    questions = _once([*said.questions, *found.questions])
    refuse_what_stays(path, said, questions)
    text = read_text(path)
    ends = (ENDS_EARLY,) * (_ending(path, text) in SHELL and ends_early(text))
    return dataclasses.replace(found, questions=tuple(questions), notes=(*found.notes, *other_machines(path, found), *ends))


ENDS_EARLY = (
    "a blank behind \\, an empty line or a comment between options ends the command in a shell; what follows is read as if it "
    "did not"
)


def _once(questions: Sequence[Question]) -> list[Question]:
    return list({one.name: one for one in questions}.values())


SHELL = ("sh", "bash", "slurm", "sbatch")
"""Endings of shell scripts: what reads one reads all."""


def _ending(path: Path, text: str) -> str:
    """The ending of a file's name; 'sh' of one whose first line says that a shell runs it, like job.slrm."""
    return "sh" if re.match(r"#!.{0,40}\b(ba|z|k)?sh\b", text) else path.suffix.removeprefix(".").lower()


def _looks_like(form: tuple[str, str], path: Path, text: str) -> bool:
    endings, expression = form[0].split(), form[1]
    ending = _ending(path, text)
    fits = "any" in endings or ending in endings or (ending in SHELL and "sh" in endings)
    return fits and re.search(expression, text, re.MULTILINE) is not None
