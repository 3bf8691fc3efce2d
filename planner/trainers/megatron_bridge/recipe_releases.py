"""Which release of Megatron-Bridge a program is for, and its recipes as that release has them.

A recipe of one name is another function in each release: what decides a plan is kept where it differs from today's.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.record import record
from planner.trainers.megatron_bridge.recipes import DECISIVE, imported, published
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.shell.text import gap
from planner.trainers.reading.values import read_text

Sign = tuple[str | None, str]
Known = Mapping[str, Mapping[str, Any]]
Made = Callable[[Given, Known], Mapping[str, Any]]


@record
class Releases:
    """Releases of a library whose recipes differ."""

    library: str
    names: tuple[str, ...]
    """Oldest first; the last, main, is what the published recipes are of."""
    containers: tuple[tuple[str, str], ...]
    """NeMo's containers up to this month -> the release in them."""
    pinned: re.Pattern[str]
    """How files name a version of the library."""
    of_numbers: Callable[[int, int, int], str]
    """The release of a version."""
    known_in: Callable[[str], Known]
    """The recipes of a release."""
    version_file: str = ""
    """The file of a checkout of the library that says its version; "" = none is known."""
    newest_with_words: str = ""
    """The last release whose recipes take arguments that later ones do not."""


RELEASES = ("0.2", "0.3.0", "0.3.1", "0.4", "0.5", "0.6", "main")
"""Releases whose recipes differ, oldest first; main is what the published recipes are of."""
SETTING = "recipe_version"
"""What a user says the release with."""
OF_CONTAINERS = (("25.12", "0.2"), ("26.02", "0.3.0"), ("26.03", "0.3.1"), ("26.05", "0.4"), ("26.07", "0.5"), ("26.09", "0.6"))
"""NeMo's containers up to this month -> the release in them.  [docs/releases/software-versions.md]"""
KEYWORDS = ("mock", "hf_path", "dir", "train_iters", "data_paths", "lr_warmup_iters", "precision_config", "enable_recompute",
            "global_batch_size", "micro_batch_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
            "context_parallel_size", "expert_model_parallel_size", "sequence_parallel")  # fmt: skip
"""Arguments of recipes that only releases up to 0.3.0 take."""
CONTAINER = re.compile(
    r"(?<![a-z])nemo(?!-?run)[a-z/_-]*(?: framework)?[-_: ]{1,2}(2[4-9])\.(0[1-9]|1[0-2])(\.0[1-9])?(?!\d)", re.IGNORECASE
)
PINNED = re.compile(
    r"megatron[-_ ]bridge(?:\.git)?(?:\[\w*\])?\s*(?:==|~=|@|:|-b|branch|tag|version)?\s*[rv]?(0\.\d+(?:\.\d+)?)(?![\d.])",
    re.IGNORECASE,
)
BESIDE = ("Dockerfile*", "*.dockerfile", "requirements*.txt", "pyproject.toml", "*.sh", "*.slurm", "*.sbatch", "README*.md")
"""Files beside a program, and in the folders above it, that may name the release."""
MOST_READ, MOST_ABOVE = 30, 4
DECIDES = (*(one for one in DECISIVE if re.fullmatch(
    r"model\.\w+_parallel(_size)?|model\.(seq_length|recompute_\w+|num_layers_in_\w+|account_for_\w+|mtp_num_layers)|train\.\w+"
    r"|mixed_precision(\.grad_reduce_in_fp32)?|ddp\.use_\w+|optimizer\.\w+|peft.*", one)),
    "plugin.grad_reduce_in_fp32", "nodes", "devices")  # fmt: skip
"""Settings in which a recipe of another release is another plan."""
ON = ("plugin.grad_reduce_in_fp32", "mixed_precision.grad_reduce_in_fp32", "ddp.use_distributed_optimizer",
      "optimizer.use_distributed_optimizer")  # fmt: skip
"""Those of them that are on where nothing is said."""
UNKNOWN = "?"
"""A value of an older recipe that its text does not tell."""


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of settings decides a plan, one length for model and data."""
    usual: tuple[Any, ...] = (None, "none", [])
    found = {one: settings[one] for one in DECIDES if settings.get(one) not in usual and (settings[one] is not False or one in ON)}
    length = settings.get("dataset.seq_length", settings.get("model.seq_length"))
    return {**found, "model.seq_length": length} if length is not None else found


def known_in(release: str) -> dict[str, Mapping[str, Any]]:
    """The published recipes as a release has them."""
    found = dict(published())
    for name, releases in _older().items():
        last = next((one for one in RELEASES[RELEASES.index(release) :] if one in releases), None)
        if last is not None and name in found:
            found[name] = {key: gap([key]) if value == UNKNOWN else value for key, value in releases[last].items()}
    return found


def chosen(said: Given, files: tuple[Path, ...], made: Made, of: Releases | None = None) -> tuple[Known, tuple[str, ...]]:
    """(The recipes of the release that files or their neighbours are for, notes about it). ``made``: the settings that a job has
    with recipes; what decides the release is asked for where it decides them and nothing shows it. Raises PlannerError."""
    of = of or BRIDGE
    asked = said.setting(SETTING)
    if asked is not None:
        release = _release_of(asked, of)
        return of.known_in(release), (f"recipes as {of.library} {release} has them, as is said",)
    quiet = replace(said, questions=[], used=set())
    try:
        results = _of_each(quiet, made, of)
    except PlannerError:  # what is wrong without any of them
        return of.known_in("main"), ()
    last = [one for one, after in pairwise(of.names) if results[one] != results[after]]
    if not last:
        return of.known_in("main"), ()
    found, sign = _shown(files, of)
    if found is not None:
        notes = [f"recipes as {of.library} {found} has them, by {sign}"]
        if results[found] != results["main"]:
            notes.append(f"{_different(results[found], results['main'])} of today's recipe")
        return of.known_in(found), tuple(notes)
    different = _different(results[last[-1]], results["main"])
    if all(name.startswith("peft.") for one in last for name in DECIDES if results[one].get(name) != results["main"].get(name)):
        return of.known_in("main"), (f"which release of {of.library} it is for nothing here shows: up to {last[-1]}, {different}",)
    about = f"release of {of.library}, which nothing here shows; up to {last[-1]}, {different}"
    said.questions.append(Question(name=SETTING, about=about, choices=(*last, "main")))
    return of.known_in("main"), ()


class _Looked(Mapping[str, Any]):
    """Settings of a recipe that say when they are looked at."""

    def __init__(self, name: str, settings: Mapping[str, Any], seen: dict[str, Mapping[str, Any]]) -> None:
        self.name, self.settings, self.seen = name, settings, seen

    def __getitem__(self, key: str) -> Any:
        self.seen[self.name] = self.settings
        return self.settings[key]

    def __iter__(self) -> Iterator[str]:
        self.seen[self.name] = self.settings
        return iter(self.settings)

    def __len__(self) -> int:
        self.seen[self.name] = self.settings
        return len(self.settings)


def _of_each(quiet: Given, made: Made, of: Releases) -> dict[str, dict[str, Any]]:
    """What decides the plan under each release. A program is read anew only where one of the recipes that it was seen to start from
    is another one: reading a large program takes seconds, and there are seven releases."""
    readings: list[tuple[set[str], dict[str, Mapping[str, Any]], dict[str, Any]]] = []  # names, what was looked at, what came of it
    results = {}
    for one in of.names:
        known = of.known_in(one)
        same = (result for names, seen, result in readings
                if names == set(known) and all(known[name] == settings for name, settings in seen.items()))  # fmt: skip
        found = next(same, None)
        if found is None:
            seen: dict[str, Mapping[str, Any]] = {}
            found = deciding(made(quiet, {name: _Looked(name, settings, seen) for name, settings in known.items()}))
            readings.append((set(known), seen, found))
        results[one] = found
    return results


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What is said otherwise, in a sentence: a=1 instead of 2."""
    def text(settings: Mapping[str, Any], name: str) -> str:
        return shown(str(settings.get(name, True if name in ON else 1 if name.endswith("_size") else "none"))).strip("'\"")

    names = [name for name in DECIDES if one.get(name) != other.get(name)]
    return ", ".join(f"{name}={text(one, name)} instead of {text(other, name)}" for name in names[:8])


@cache
def _older() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    data: Mapping[str, Any] = library.read_yaml(Path(__file__).with_name("older_recipes.yaml"))["recipes"]
    return data


def _release_of(text: str, of: Releases) -> str:
    """The release that a version of it, or of NeMo's container, means. Raises PlannerError."""
    found = re.fullmatch(r"(?:nemo[-_: ]?)?[rv]?(\d+)\.(\d+)(?:\.(\d+))?\S*", text.strip(), re.IGNORECASE)
    if text.strip().lower() in ("main", "today", "latest", "newest"):
        return "main"
    if found is None:
        raise PlannerError(f"--set {SETTING}={shown(text)}: a release of {of.library} is one of {', '.join(of.names)}")
    major, minor, patch = (int(one or 0) for one in found.groups())
    release = of.of_numbers(major, minor, patch) if major < 20 else _of_container(f"{major}.{minor:02}", patch, of)
    return release if release in of.names else "main"


def _of_container(month: str, patch: int, of: Releases) -> str:
    found = next((release for last, release in of.containers if month <= last), "main")
    return "0.3.1" if (found, patch) == ("0.3.0", 1) else found


def _of_bridge(major: int, minor: int, patch: int) -> str:
    return "0.2" if minor < 3 else f"0.3.{min(patch, 1)}" if minor == 3 else f"{major}.{minor}"


def _shown(files: tuple[Path, ...], of: Releases) -> Sign:
    """(The release that the files show, what shows it)."""
    release, sign = _own_checkout(files[0], of)
    if release is None:
        speaking = next((group for group in _groups(files) if _agreed(group, of)), ())
        release, sign = _agreed(speaking, of), next((one.name for one in speaking if _releases(one, of)), "")
    newest = of.newest_with_words
    older = next((word for one in files if one.suffix == ".py" for word in _first_words(one)), None) if newest else None
    if older is not None and (release is None or of.names.index(release) > of.names.index(newest)):
        return newest, f"the argument {older} of its recipe, which later ones do not take"
    return release, sign


def _groups(files: tuple[Path, ...]) -> Iterator[tuple[Path, ...]]:
    """Files that speak for a program, the nearest first: itself, what starts it, its folder, the folders above it."""
    for one in reversed(files):
        yield (one,)
    folder = files[-1].absolute().parent
    for one in (folder, *folder.parents[:MOST_ABOVE]):
        yield tuple(sorted({file for kind in BESIDE for file in one.glob(kind) if library.is_file(file)})[:MOST_READ])
        if (one / ".git").exists() or one == Path.home():
            return


def _releases(file: Path, of: Releases) -> set[str]:
    text = read_text(file)
    months = {_of_container(f"{one[1]}.{one[2]}", int((one[3] or ".0")[1:]), of) for one in CONTAINER.finditer(text)}
    return months | {_release_of(one[1], of) for one in of.pinned.finditer(text)}


def _agreed(files: tuple[Path, ...], of: Releases) -> str | None:
    """The one release that files name; None where they name none or several."""
    found = {release for one in files for release in _releases(one, of)}
    return found.pop() if len(found) == 1 else None


def _own_checkout(path: Path, of: Releases) -> Sign:
    """The release of the checkout of the library that a file is part of."""
    for folder in path.absolute().parents[:8]:
        file = folder / of.version_file
        if library.is_file(file):
            parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", read_text(file), re.MULTILINE))
            return _release_of(".".join(parts.get(one, "0") for one in ("MAJOR", "MINOR", "PATCH")), of), file.name
    return None, ""


def _first_words(file: Path) -> Iterator[str]:
    """Arguments that a program gives its recipe and that only the first releases take."""
    tree = library.parse_python(read_text(file), str(file))
    names = imported(tree)
    for call in (one for one in ast.walk(tree) if isinstance(one, ast.Call) and last_name(one.func) in names):
        yield from (one.arg for one in call.keywords if one.arg in KEYWORDS)


BRIDGE = Releases(
    library="Megatron-Bridge", names=RELEASES, containers=OF_CONTAINERS, pinned=PINNED, of_numbers=_of_bridge, known_in=known_in,
    version_file="src/megatron/bridge/package_info.py", newest_with_words="0.3.0",
)  # fmt: skip
