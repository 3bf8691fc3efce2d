"""Pickles of checkpoints read as data: whatever class or function they name becomes a record that does nothing.

Nothing is imported and nothing is called: ``find_class`` gives stand-ins alone. No torch.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from planner.errors import PlannerError

LARGEST = 2**31
"""Bytes of a pickle that is read."""
SAFE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict, ("builtins", "set"): set, ("builtins", "list"): list, ("builtins", "dict"): dict,
    ("torch", "Size"): tuple, ("builtins", "tuple"): tuple,
}  # fmt: skip
"""Plain containers, which do nothing either."""


class Record:
    """Stands for an object of a class, or for what a function would give; ``named`` says which."""

    named = ""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.fields: dict[str, Any] = {}
        self.state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> "Record":
        """As pickle makes objects, without ``__init__``."""
        made = object.__new__(cls)
        Record.__init__(made, *args)
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.fields = {name: one for name, one in state.items() if isinstance(name, str)}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.fields[str(key)] = value

    def append(self, value: Any) -> None:
        """An item of a list of its own."""
        self.args = (*self.args, value)

    def extend(self, values: Any) -> None:
        """Items of a list of its own."""
        self.args = (*self.args, *values)

    def add(self, value: Any) -> None:
        """An item of a set of its own."""
        self.append(value)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BufferedIOBase | io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A container, or a stand-in."""
        key = (module, name)
        if key in SAFE:
            return SAFE[key]
        if key not in self._known:
            self._known[key] = type("Record", (Record,), {"named": f"{module}.{name}"})
        return self._known[key]

    def persistent_load(self, pid: Any) -> Any:
        """A storage of torch: ("storage", class, key, place, elements)."""
        return pid


def read_pickle(path: Path) -> Any:
    """What a pickle holds, of torch.save its structure without the values. Raises PlannerError."""
    try:
        if path.stat().st_size > LARGEST and not zipfile.is_zipfile(path):
            raise PlannerError(f"{path}: a pickle of {path.stat().st_size} bytes is not read; at most {LARGEST}")
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                return _Reader(file).load()
        with zipfile.ZipFile(path) as archive:
            inside = next((one for one in archive.infolist() if one.filename.endswith("data.pkl")), None)
            if inside is None or inside.file_size > LARGEST:
                raise PlannerError(f"{path}: not written by torch.save")
            return _Reader(io.BytesIO(archive.read(inside))).load()
    except OSError as error:
        raise PlannerError(f"{path}: cannot be read ({error.strerror or error})") from error
    except PlannerError:
        raise
    except Exception as error:  # a pickle that is cut, or made to harm, fails in any way
        raise PlannerError(f"{path}: not a pickle that can be read ({type(error).__name__}: {str(error)[:100]})") from error


def tensor_of(value: Any) -> tuple[tuple[int, ...], str] | None:
    """(shape, dtype) of what stands for a tensor; None of anything else."""
    for _ in range(4):  # a parameter holds a tensor
        if not isinstance(value, Record):
            return None
        if value.named.endswith("_rebuild_tensor_v2") and len(value.args) >= 3:
            storage, shape = value.args[0], value.args[2]
            kind = storage[1] if isinstance(storage, tuple) and len(storage) == 5 else None
            name = getattr(kind, "named", "").rpartition(".")[2].removesuffix("Storage").lower()
            if isinstance(shape, tuple) and all(isinstance(one, int) for one in shape):
                return shape, STORAGES.get(name, name)
            return None
        if not value.args:
            return None
        value = value.args[0]
    return None


STORAGES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "long": "int64", "int": "int32",
    "short": "int16", "char": "int8", "byte": "uint8", "bool": "bool",
}  # fmt: skip
"""Name of a class of storages, without its end -> dtype."""
