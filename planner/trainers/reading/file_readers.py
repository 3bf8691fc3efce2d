"""The program of a project that reads a file of settings whose form is the project's own."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.given import CONFIG_FILE, Given, Question
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import project_root

ENDINGS = (".yaml", ".yml", ".json", ".toml")
PROGRAM = "program"
"""Setting that names the program where several read such a file."""
MOST_FILES, MOST_ENTRIES, LARGEST, MOST_PROGRAMS = 600, 20_000, 400_000, 6
_TRAINS = re.compile(r"\b(?:SFT|DPO|Seq2Seq|Unsloth)?Trainer\(")
_READS = re.compile(r"\b(safe_load|full_load|yaml\.load|json\.loads?|toml(lib)?\.loads?|OmegaConf\.load|load_\w*config)\(")
_MAIN = re.compile(r"__name__ *== *[\"']__main__[\"']")
_BEGINS = re.compile(r"\b(?:\w+\.)?(?:load|read|parse|get)_\w*(?:config|cfg|yaml|settings)\w*\(|safe_load|OmegaConf\.load")
"""Programs whose file of settings and whose trainer are read and built in modules."""
_LEFT_OUT = re.compile(r"\..+|tests?|site-packages|node_modules|build|dist|third_party|venv|env|__pycache__")
"""Folders without programs of the project."""


def programs_of(path: Path, said: Given) -> list[Path]:
    """Programs of its project that train and read files like this one: those that something says read it, or all."""
    root = project_root(path)
    texts = {one: read_text(one) for one in _files(root, ".py")}
    found = [one for one, text in texts.items() if _TRAINS.search(text) and _READS.search(text)]
    if not found:  # the parts stand in modules
        trained = any(_TRAINS.search(text) for text in texts.values())
        found = [one for one, text in texts.items() if trained and _MAIN.search(text) and _BEGINS.search(text)]
    answer = said.setting(PROGRAM)
    if answer is not None:
        return [one for one in found if str(one.relative_to(root)) == answer] or found
    return (_named(path, root, found) or found) if len(found) > 1 else found


def which_program(path: Path, programs: list[Path]) -> Question:
    """Which of some programs reads a file."""
    root = project_root(path)
    names = tuple(str(one.relative_to(root)) for one in programs)
    return Question(name=PROGRAM, about="which of its project's programs reads it", choices=names)


def _files(root: Path, ending: str) -> Iterator[Path]:
    """Files of a project with an ending, in the order of their names; of a large folder its first ones."""
    seen = found = 0
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(one for one in inner if not _LEFT_OUT.fullmatch(one))
        seen += len(inner) + len(names)
        for one in (Path(folder) / name for name in sorted(names) if name.endswith(ending)):
            if found < MOST_FILES and library.is_file(one) and one.stat().st_size <= LARGEST:
                found += 1
                yield one
        if seen > MOST_ENTRIES or found >= MOST_FILES:
            return


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
