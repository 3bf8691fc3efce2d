"""Versions of libraries that a project pins: defaults change between them."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from planner import library
from planner.trainers.reading.values import read_text

MARKS = (".git", "pyproject.toml", "setup.py", "requirements.txt", "LICENSE")
"""What lies at the root of a project."""
WEAK_MARKS = ("README.md",)
"""What lies there too, and in other folders of projects."""
ABOVE = 4
NAMES = ("requirements*.txt", "*/requirements*.txt", "pyproject.toml", "setup.py", "setup.cfg", "*env*.y*ml")
"""Where projects say what they are installed with."""
INSTALL = ("Dockerfile*", "install*.sh", "setup*.sh", "README.md")
"""Where they say how, as a script does that installs what it starts: a command of pip, since what else is named is advice."""
_COMMAND = re.compile(r"(?m)^[^#\n]*\b(?:pip3?|uv|(?:micro)?mamba|conda)\b[^\n]{0,80}\binstall\b(?:[^\n\\]|\\\n|\\.)*")
"""A command that installs, to the end of its last line: no prose, and none behind #."""
_NUMBER = r"(\d{1,9}(?:\.\d{1,9}){1,3})(?![\w.])"
"""A tag of a release."""
LARGEST = 400_000
MODULES = {"ms_swift": "swift", "llama_factory": "llamafactory"}
"""Packages whose folder has another name."""
SAID_IN = ("__init__.py", "version.py", "_version.py", "extras/env.py", "VERSION", "version/version")
BESIDE_IT = ("version.txt", "pyproject.toml", "setup.py", "../pyproject.toml", "../setup.py")
"""Where the source of a package says its version: within its folder, and beside it, where the package is named."""
_RELEASE = r"(\d+(?:\.\d+){1,3})(?:[._]?(dev|rc|a|b)\d*)?"
SAYS = re.compile(rf"(?m)^[ \t]*(?:__version__|VERSION|version)\b[^=\n]{{0,40}}=[ \t]*[\"']{_RELEASE}\b")
BARE = re.compile(rf"\s*v?{_RELEASE}(?:\+\w+)?\s*")
"""What a file says that says a version in code, and one that is nothing else."""


def pinned(path: Path, package: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(lowest, highest) version of a package that the project around a file allows, () = no bound; None = it does not say."""
    if (found := _of_source(path, package)) is not None:
        return found
    for file in _files(path):
        commands = file.resolve() == path.resolve() or any(file.match(one) for one in INSTALL)
        if (found := _in_text(read_text(file), package, commands)) is not None:
            return found
    return None


def installs(path: Path, *packages: str) -> bool:
    """Whether the project around a file names one of some packages where it says what it needs."""
    names = "|".join(map(re.escape, packages))
    return any(re.search(rf"(?<![\w-])({names})(?![\w-])", read_text(one)) for one in _files(path))


def _of_source(path: Path, package: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The version of a package whose source lies around a file, as in a fork of it: the one before it and itself while it is in
    development; None = it does not lie there, or does not say."""
    module = package.lower().replace("-", "_")
    module = MODULES.get(module, module)
    homes = (up / way / module for up in path.resolve().parents[: 2 * ABOVE] for way in ("", "src", package, f"{package}/src"))
    named = rf"(?is)(?:\[(?:project|tool\.poetry)\]|\bsetup\()(?:(?!\n\[).)*?\bname\s*=\s*[\"']{re.escape(package)}[\"']"
    for home in (one for one in homes if library.is_file(one / "__init__.py")):
        within = [read_text(file) for one in SAID_IN if library.is_file(file := home / one)]
        beside = [read_text(file) for one in BESIDE_IT if library.is_file(file := home.parent / one)]
        texts = (*within, *(text for text in beside if BARE.fullmatch(text) or re.search(named, text)))
        for said in filter(None, (BARE.fullmatch(text) or SAYS.search(text) for text in texts)):
            version = tuple(map(int, said[1].split(".")))
            return _below(version) if said[2] else version, version
    return None


@lru_cache(maxsize=32)
def _in_text(text: str, package: str, commands: bool) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What one text says, ``commands``: by commands alone. An import asks a dozen times about the same files and two packages."""
    bounds = r"((?:(?:==|~=|>=|<=|<|>)\s*[\d.]{1,60}(?:\.\*)?[\s,\"']*)+)"
    name, branch = re.escape(package), rf"clone [^\n]{{0,80}}(?:-b|--branch)[ =]v?{_NUMBER}"
    other = rf"\b(?:clone\b|(?:cd|pushd|WORKDIR) +(?!(?:\S{{0,200}}/)?[\"']?{name}\b))"  # of another folder
    later = rf"\b(?:(?!{other})[^\0]){{0,300}}?\bgit checkout (?:tags/)?v?{_NUMBER}"
    git = re.compile(rf"{branch}[^\n]{{0,120}}/{name}\b|/{name}(?:\.git)?(?:@v?{_NUMBER}|{later})")
    if (tag := git.search(text)) is not None:
        version = tuple(map(int, next(filter(None, tag.groups())).split(".")))
        return version, version
    text = "\n".join(_COMMAND.findall(text)) if commands else text
    found = re.search(rf"(?<![\w.-]){name}(?:\[[^\]\n]{{0,80}}\])?[\"' ]*{bounds}", text)
    if found is None:
        return None
    low: tuple[int, ...] = ()
    high: tuple[int, ...] = ()
    for mark, number in re.findall(r"(==|~=|>=|<=|<|>)\s*([\d.]{1,60})", found[1]):
        version = tuple(int(one) for one in number.split(".") if one)
        low = version if mark in ("==", "~=", ">=", ">") else low
        if mark == "<":
            high = _below(version) if version else high
        elif mark == "~=" or number.endswith("."):  # ==0.3.*
            high = (*version[: -1 if mark == "~=" else None], 10**6)
        elif mark in ("==", "<="):
            high = version
    return low, high


def _below(version: tuple[int, ...]) -> tuple[int, ...]:
    """The last version before one: 0.3 with any patch before 0.4, and before 0.4.0."""
    last = max((place for place, number in enumerate(version) if number), default=0)
    return (*version[:last], version[last] - 1, 10**6)


def project_root(path: Path) -> Path:
    """The folder of the project that a file lies in; its own where nothing says."""
    folder = path.resolve().parent
    for marks in (MARKS, WEAK_MARKS):
        for one in (folder, *list(folder.parents)[:ABOVE]):
            if any((one / mark).exists() for mark in marks):
                return one
    return folder


def _files(path: Path) -> Iterator[Path]:
    """Files that may say versions, the nearest first: a script may install what it starts."""
    root, folder = project_root(path), path.resolve().parent
    if library.is_file(path) and path.stat().st_size <= LARGEST:
        yield path
    for one in (folder, *list(folder.parents)[:ABOVE]):
        for name in (*NAMES, *INSTALL):
            for file in sorted(one.glob(name))[:4]:
                if library.is_file(file) and file.stat().st_size <= LARGEST:
                    yield file
        if one == root:
            return


def newer(path: Path, package: str, version: tuple[int, ...]) -> bool | None:
    """Whether the project around a file takes a package from ``version`` on; None = it does not say, or allows both."""
    bounds = pinned(path, package)
    if bounds is None:
        return None
    low, high = bounds
    if low >= version:
        return True
    return False if high and high < version else None


BESIDE = ("*.sh", "*.py", "*.y*ml", "Dockerfile*", "README.md")
"""Where the version of an image stands, or a comment names one: files in the folder of a script."""


def named_version(path: Path, package: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(lowest, highest) version of a package that the project pins, or that the file or one in its folder names, as the tag of an
    image does; None = none is named."""
    if (found := pinned(path, package)) is not None:
        return found
    name = re.escape(package).replace(r"\-", "[-_]?")
    expression = rf"(?i)(?<![a-z]){name}[`\"')|]*(?:\s?[|:=@_ -]{{1,3}}\s?)?v?(\d{{1,2}}(?:\.\d{{1,3}}){{1,2}})(?![\w.]*\d)"
    files = [path, *(file for one in BESIDE for file in sorted(path.resolve().parent.glob(one))[:8])]
    texts = (read_text(one) for one in files if library.is_file(one) and one.stat().st_size <= LARGEST)
    named = [tuple(map(int, number.split("."))) for text in texts for number in re.findall(expression, text)]
    return (min(named), max(named)) if named else None
