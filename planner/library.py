"""Files: where those of the package are, and how any file is read and written.

Whatever stands in a file of a user, reading it ends in data or in one sentence: only regular files are read, of a size and a
nesting that a file of this kind can have. A file is written whole or not at all.
"""

import ast
import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import signal
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from planner import newer_python
from planner.errors import NoMappingError, PlannerError, UnknownNameError, shown

MOST_BYTES = 16 << 20
"""Longest file that is read."""
MOST_DEPTH = 64
"""Mappings and lists inside each other; the C parser of YAML overflows the stack at some ten thousand."""
MOST_VALUES = 1_000_000
"""Keys and values of a YAML file: some seconds and a gigabyte."""
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
BROKEN = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError)
"""What the reader of YAML raises; the last three after a !!tag."""
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a disk", stat.S_IFSOCK: "a socket",
}  # fmt: skip


_NOTHING = ("off", "")


class _Loader(_BASE):  # type: ignore[misc]
    """Refuses a key that is given twice with different values, of which YAML would silently take the last; null and false, which
    both leave a setting off, are no difference."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: dict[str, object] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            text = (value.tag, value.value) if isinstance(value, yaml.ScalarNode) else value
            text = _NOTHING if isinstance(text, tuple) and text[1].lower() in ("", "null", "~", "false", "no", "off") else text
            if isinstance(key.value, str) and seen.get(key.value, text) != text:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
            seen[str(key.value)] = text
        return super().construct_mapping(node, deep)


@cache
def profiles_directory() -> Path:
    """``profiles/`` of the checkout, or the copy installed inside the package."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "profiles", here.parent / "profiles"):
        if (candidate / "hardware").is_dir():
            return candidate
    raise PlannerError(f"the data files of planner are missing next to {here}; install the package again")


def names(kind: str) -> list[str]:
    """Names of all library files of one kind (hardware, models, trainers, runs), sorted."""
    return sorted(path.stem for path in (profiles_directory() / kind).glob("*.yaml"))


def is_file_name(name: str) -> bool:
    """Whether a name is the path of a user's own YAML file."""
    return name.endswith((".yaml", ".yml")) or os.sep in name


def find(kind: str, name: str) -> Path:
    """Path of a library file by name, or of a user's own YAML file by path. Raises UnknownNameError."""
    if is_file_name(name):
        path = Path(name)
        if not os.path.lexists(path) and len(name) < 200:
            raise PlannerError(f"no such file: {_told(path)}")
        regular_file(path)
        return path
    path = profiles_directory() / kind / f"{name}.yaml"
    if len(name) > 200 or not path.is_file():  # file systems refuse to look for longer names
        raise UnknownNameError({"models": "model", "trainers": "trainer"}.get(kind, kind), name, names(kind))
    return path


def read_text(path: Path, *, most: int = MOST_BYTES, errors: str = "strict") -> str:
    """Text of a regular file in UTF-8, with or without a byte order mark. Raises PlannerError.

    ``errors``: what is done about bytes that are not UTF-8, as ``bytes.decode`` takes it.
    """
    size = regular_file(path)
    try:
        with path.open("rb") as stream:
            found = stream.read(most + 1) if size <= most else b""
        if max(len(found), size) > most:
            raise PlannerError(f"{_told(path)} is larger than the {most >> 20} MiB that are read of such a file")
        return found.decode("utf-8-sig", errors)
    except OSError as error:
        raise PlannerError(f"{_told(path)}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise PlannerError(f"{_told(path)}: cannot be read (it is not text in UTF-8)") from error


def read_ends(path: Path, head: int, tail: int) -> str:
    """Text of a regular file, what is not UTF-8 replaced; of one that is longer the whole lines of its first ``head`` and of its
    last ``tail`` bytes. Raises PlannerError."""
    size = regular_file(path)
    try:
        with path.open("rb") as stream:
            found = stream.read(head + tail)
            if size > head + tail:
                stream.seek(size - tail)
                first = found[: found.rfind(b"\n", 0, head) + 1]
                found = first + stream.read(tail).partition(b"\n")[2]
    except OSError as error:
        raise PlannerError(f"{_told(path)}: cannot be read ({error.strerror})") from error
    return found.decode("utf-8-sig", "replace")


def fields_of_lines(text: str) -> list[list[str]]:
    """What stands on the lines of a text, parted by spaces, commas, semicolons or colons; empty lines and # comments left out."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [re.split(r"[\s,;:]+", line) for line in lines if line]


def regular_file(path: Path) -> int:
    """Bytes of a file. Raises PlannerError for what is no file: a pipe would be waited for, a device read without end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # too long a name, a folder that may not be entered, a null byte
        raise PlannerError(f"{_told(path)}: cannot be read ({getattr(error, 'strerror', error)})") from error
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise PlannerError(f"{_told(path)}: cannot be read (it is {kind}); give a regular file")
    return found.st_size


def _told(path: Path) -> str:
    """A path for a message, on one line."""
    return str(path) if str(path).isprintable() and len(str(path)) <= 400 else shown(str(path))


_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises PlannerError with file and line when it cannot be read."""
    if str(path).startswith((f"{profiles_directory()}{os.sep}", _PACKAGE)):
        found: dict[str, Any] = pickle.loads(_of_library(path, path.stat().st_mtime_ns))
        return found
    return parse_yaml(read_text(path), _told(path))


@cache
def _of_library(path: Path, _changed: int) -> bytes:
    """A file of the library or of the package, pickled: a question over all hardware reads the same relatives and trainers a
    hundred times, at some 4 ms each, an import the published recipes of a trainer, at 35 ms, and whoever reads one may change
    what it gets."""
    return pickle.dumps(parse_yaml(read_text(path), _told(path), scan=False))


def parse_yaml(text: str, where: str, *, scan: bool = True, last: bool = False) -> dict[str, Any]:
    """The mapping in a text in YAML; ``scan`` = look at its nesting and size first; ``last`` = of a key that is given twice the
    last value counts, as PyYAML takes it. Raises PlannerError."""
    try:
        if scan:
            _scan(text, where)
        data = yaml.load(text, Loader=_BASE if last else _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        if "nesting depth" in problem:  # the C parser's own limit, which it meets before the events are counted
            raise _too_deep(where) from error
        raise PlannerError(f"{where}{line}: {problem}") from error
    except BROKEN as error:
        raise PlannerError(f"{where}: not valid YAML ({str(error)[:200]})") from error
    if not isinstance(data, dict):
        raise NoMappingError(f"{where}: expected a mapping of keys to values, found {kind_of(data)}")
    return data


def require_folder(output: Path | None) -> None:
    """Before the work: raises PlannerError where the folder of a file to write is not there."""
    if output is not None and not output.resolve().parent.is_dir():
        raise PlannerError(f"--output {output}: there is no directory {output.resolve().parent}")


def _scan(text: str, where: str) -> None:
    """Raise PlannerError for what is nested too deep or has too many values: events are parsed without recursion."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_BASE)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_DEPTH:
                raise _too_deep(where)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if number > MOST_VALUES:
            raise PlannerError(f"{where}: more than {MOST_VALUES} keys and values; no file of planner has as many")


def parse_json(text: str, where: str) -> Any:
    """The data in a text in JSON. Raises PlannerError, also for a key that is given twice and for deep nesting."""
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise PlannerError(f"{where}: line {error.lineno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:  # a key twice, a number of thousands of digits
        raise PlannerError(f"{where}: JSON that cannot be read ({str(error).split(';')[0]})") from error
    require_shallow(data, where)
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key {shown(key)} is given twice")
        data[key] = value
    return data


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The data in a text in TOML. Raises PlannerError."""
    import tomllib  # only configurations of some trainers are written in it

    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlannerError(f"{where}: not a TOML file: {str(error)[:200]}") from error
    require_shallow(data, where)
    return data


def is_file(path: str | Path) -> bool:
    """Whether a file is there; of a name that no file system takes there is none, where Path.is_file raises OSError."""
    return os.path.isfile(path)


def parse_python(text: str, where: str) -> ast.Module:
    """The syntax tree of a text in Python, which is never run. Raises PlannerError."""
    try:
        with warnings.catch_warnings():  # on a script's escapes and literals, which are its author's
            warnings.simplefilter("ignore")
            tree = newer_python.parsed(text)
    except SyntaxError as error:
        raise PlannerError(f"{where}: line {error.lineno}: not Python{newer_python.VERSION}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, thousands of brackets
        raise PlannerError(f"{where}: not Python that can be read ({str(error)[:200] or 'nested too deep'})") from error
    require_shallow(tree, where, 4 * MOST_DEPTH)  # of a call its arguments, of these their values
    return tree


def require_shallow(data: Any, where: str, most: int = MOST_DEPTH) -> None:
    """Raise PlannerError for data, or a syntax tree, that is nested deeper than any file of planner."""
    level = [data]
    for _ in range(most + 1):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise _too_deep(where, most)


def _too_deep(where: str, most: int = MOST_DEPTH) -> PlannerError:
    return PlannerError(f"{where}: nested deeper than {most} levels; no file of planner is")


def _inside(data: Any) -> Iterable[Any]:
    if isinstance(data, ast.AST):
        return ast.iter_child_nodes(data)
    return data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()


def kind_of(data: object) -> str:
    """The type of plain data for a sentence: 'nothing' of an empty file."""
    return "nothing" if data is None else type(data).__name__


WRITTEN = {
    "planner_plan": ("a plan, as --output writes it", "plan estimate, what-if, report, compare, validate, export and others"),
    "planner_serve_plan": (
        "a serve plan, as --output of 'plan serve' writes it",
        "plan serve estimate, plan serve compare, plan serve what-if, plan report, export, validate and doctor",
    ),
    "planner_mixed_plan": (
        "a mixed plan, as --output of 'plan --cluster' writes it",
        "plan estimate, report, what-if, export, validate, resilience, reshape and watch",
    ),
    "planner_rl_plan": (
        "an RL plan, as --output of 'plan rl' writes it", "plan rl estimate, report, export, doctor and calibrate --rl",
    ),
    "planner_rl_factors": ("factors of RL phases, as 'plan calibrate --rl' writes them", "plan rl --calibrated"),
}  # fmt: skip
"""What a file is that has one of these keys, and the commands that take it."""


def other_kind(key: str, where: str) -> str:
    """The sentence on a file with this key of ``WRITTEN`` where another kind is asked for."""
    what, taken = WRITTEN[key]
    return f"{where} is {what}, and a file of another kind is asked for here; it is for {taken}"


def version_of(data: Mapping[str, Any], what: str, newest: int, *, where: str) -> int:
    """The format version of a plan or validation, under ``planner_<what>``. Raises PlannerError where it cannot be read."""
    version = data.get(f"planner_{what}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        if other := next((key for key in WRITTEN if key in data and key != f"planner_{what}"), ""):
            raise PlannerError(other_kind(other, where))
        kind = what.replace("_", " ").replace("rl ", "RL ")
        article = "an" if kind.startswith("RL") else "a"
        raise PlannerError(f"{where}: not {article} {kind} file: the key 'planner_{what}' with its version number is missing")
    if version > newest:
        raise PlannerError(
            f"{where}: the {what} has version {shown(version)}, this planner reads up to {newest}; update planner to read it"
        )
    return version


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text of plain data, keys in the order given."""
    return str(yaml.dump(data, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=140))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the body has ended: for the moment in which a file or folder is written."""
    if threading.current_thread() is not threading.main_thread():  # it interrupts the main thread alone
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all: temporary file in the same directory, then rename. Links are followed.

    Into what is no regular file (a device, a pipe) it is written as it stands. Raises PlannerError; the old file is then kept.
    """
    try:
        data = text.encode("utf-8") if isinstance(text, str) else text
        with uninterrupted():
            _write(path, data)
    except OSError as error:
        raise PlannerError(f"{_told(path)}: cannot be written ({error.strerror})") from error
    except UnicodeEncodeError as error:
        raise PlannerError(f"{_told(path)}: cannot be written ({error.reason})") from error
    except ValueError as error:
        raise PlannerError(f"{_told(path)}: cannot be written ({error})") from error


def _write(path: Path, data: bytes) -> None:
    """Bytes to where a path leads. Raises OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = 0
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a disk")
    # /dev/stdout is what the shell opened, which another file in its place would not be
    if mode and (not stat.S_ISREG(mode) or path.is_relative_to("/dev") or path.is_relative_to("/proc")):
        with path.open("wb") as stream:
            stream.write(data)
        return
    try:
        target = path.resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(6).hex()}")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
        if mode:
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
