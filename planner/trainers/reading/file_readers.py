"""The program of a project that reads a file of settings whose form is the project's own."""

import re
from collections.abc import Iterator
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.given import CONFIG_FILE, Given, Question
from planner.trainers.reading.values import read_text

ENDINGS = (".yaml", ".yml", ".json", ".toml")
MARKS = (".git", "pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE")
"""What lies at the root of a project."""
PROGRAM = "program"
"""Setting that names the program where several read such a file."""
MOST_FILES, LARGEST, ABOVE, MOST_PROGRAMS = 600, 400_000, 4, 6
_TRAINS = re.compile(r"\b(?:SFT|DPO|Seq2Seq|Unsloth)?Trainer\(")
_READS = re.compile(r"\b(safe_load|full_load|yaml\.load|json\.loads?|toml(lib)?\.loads?|OmegaConf\.load|load_\w*config)\(")
_LEFT_OUT = re.compile(r"(^|/)(\.[^/]+|tests?|site-packages|node_modules|build|dist|third_party|venv|env)(/|$)")


def programs_of(path: Path, said: Given) -> list[Path]:
    """Programs of its project that train and read files like this one: those that something says read it, or all."""
    root = _root(path)
    found = [one for one in _files(root, ".py") if _TRAINS.search(text := read_text(one)) and _READS.search(text)]
    answer = said.setting(PROGRAM)
    if answer is not None:
        return [one for one in found if str(one.relative_to(root)) == answer] or found
    return (_named(path, root, found) or found) if len(found) > 1 else found


def which_program(path: Path, programs: list[Path]) -> Question:
    """Which of some programs reads a file."""
    root = _root(path)
    names = tuple(str(one.relative_to(root)) for one in programs)
    return Question(name=PROGRAM, about="which of its project's programs reads it", choices=names)


def _root(path: Path) -> Path:
    """The folder of the project that a file lies in; its own where nothing says."""
    folder = path.resolve().parent
    for one in (folder, *list(folder.parents)[:ABOVE]):
        if any((one / mark).exists() for mark in MARKS):
            return one
    return folder


def _files(root: Path, ending: str) -> Iterator[Path]:
    """Files of a project with an ending, in the order of their names."""
    every = (one for one in sorted(root.rglob(f"*{ending}")) if not _LEFT_OUT.search(str(one.relative_to(root))))
    for number, one in enumerate(every):
        if number >= MOST_FILES:
            return
        if library.is_file(one) and one.stat().st_size <= LARGEST:
            yield one


def _named(path: Path, root: Path, programs: list[Path]) -> list[Path]:
    """Those of some programs that name the file, or that a script or a guide starts with it; else those of its kind of training."""
    own = [one for one in programs if path.name in read_text(one)]
    if own:
        return own
    for guide in (*_files(root, ".sh"), *_files(root, ".md")):
        text = re.sub(r"\\\n", " ", read_text(guide))
        lines = [line for line in text.splitlines() if path.name in line]
        started = [one for one in programs if any(one.name in line or f".{one.stem} " in line for line in lines)]
        if started:
            return started
    kinds = [kind for kind in ("dpo", "sft", "pretrain") if kind in path.stem.lower()]
    return [one for one in programs if any(kind in one.stem.lower() for kind in kinds)]


def through(path: Path, said: Given) -> tuple[list[Path], Given]:
    """(programs, what is said, with the file they read) of a file whose form nobody knows; no programs = none reads it."""
    if path.suffix.lower() not in ENDINGS or CONFIG_FILE in said.settings:
        return [], said
    try:
        found = programs_of(path, said)[:MOST_PROGRAMS]
    except OSError as error:
        raise PlannerError(f"{path}: its project cannot be read: {error}") from error
    rest = {name: value for name, value in said.settings.items() if name != PROGRAM}
    return found, said.with_settings({**rest, CONFIG_FILE: str(path.resolve())})
