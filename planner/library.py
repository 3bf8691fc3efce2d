"""Where the data files are, and how a YAML file is read: one clear sentence when it is broken."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from planner.errors import PlannerError, UnknownNameError, shown

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_BASE):  # type: ignore[misc]
    """Refuses a key that is given twice: YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


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
        try:
            found = path.is_file()
        except OSError as error:  # too long a name, a directory that may not be entered
            raise PlannerError(f"{shown(name)}: cannot be read ({error.strerror})") from error
        if not found:
            raise PlannerError(f"no such file: {name}")
        return path
    path = profiles_directory() / kind / f"{name}.yaml"
    if len(name) > 200 or not path.is_file():  # file systems refuse to look for longer names
        raise UnknownNameError({"models": "model", "trainers": "trainer"}.get(kind, kind), name, names(kind))
    return path


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises PlannerError with file and line when it cannot be read."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise PlannerError(f"{path}{where}: {problem}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerError(f"{path}: cannot be read ({error})") from error
    except (ValueError, RecursionError, LookupError, AttributeError) as error:  # the last two: after !!tag
        raise PlannerError(f"{path}: not valid YAML ({error})") from error
    if not isinstance(data, dict):
        raise PlannerError(f"{path}: expected a mapping of keys to values, found {type(data).__name__}")
    return data


def version_of(data: Mapping[str, Any], what: str, newest: int, *, where: str) -> int:
    """The format version of a plan or validation, under ``planner_<what>``. Raises PlannerError where it cannot be read."""
    version = data.get(f"planner_{what}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise PlannerError(f"{where}: not a {what} file: the key 'planner_{what}' with its version number is missing")
    if version > newest:
        raise PlannerError(
            f"{where}: the {what} has version {version}, this planner reads up to {newest}; update planner to read it"
        )
    return version


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text of plain data, keys in the order given."""
    return str(yaml.dump(data, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=140))


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all: temporary file in the same directory, then rename."""
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with temporary.open("xb") as stream:
            stream.write(text.encode("utf-8") if isinstance(text, str) else text)
        os.replace(temporary, path)
    except OSError as error:
        raise PlannerError(f"{path}: cannot be written ({error.strerror})") from error
    except UnicodeEncodeError as error:
        raise PlannerError(f"{path}: cannot be written ({error.reason})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
