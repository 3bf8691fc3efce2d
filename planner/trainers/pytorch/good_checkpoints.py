"""Which checkpoints of a folder are whole. The standard library alone: this file also lies in the exported folder.

ROOT/step-00000120 holds what torch.distributed.checkpoint writes (.metadata, __RANK_0.distcp) and, written last and after all
of that is on the disk, MARKER with the step, the samples read and the size and CRC-32 of every file. Without the marker, or
with other sizes or sums, a checkpoint is torn: a run was ended while it wrote, or the storage has lost something.
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

MARKER = "complete.json"
"""Its presence says that the checkpoint was written to its end."""
CHUNK = 2**22
"""Bytes that are summed at once."""


def folder_of(root: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(root) / f"step-{step:08d}"


def checkpoints(root: str | Path) -> list[Path]:
    """Folders of checkpoints, torn ones too, the newest first."""
    with contextlib.suppress(OSError):
        found = [one for one in Path(root).iterdir() if re.fullmatch(r"step-\d{8,}", one.name) and one.is_dir()]
        return sorted(found, key=lambda one: int(one.name[5:]), reverse=True)
    return []


def size_and_sum(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    size = total = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
    return [size, total]


def synced(path: Path) -> None:
    """What a file or folder holds is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mark(folder: Path, facts: dict[str, Any], files: dict[str, list[int]]) -> None:
    """Says that a checkpoint is whole: the last thing that is written of it."""
    synced(folder)
    temporary = folder / f".{MARKER}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"version": 1, **facts, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MARKER)
    synced(folder)


def marker(folder: Path) -> dict[str, Any] | None:
    """What the marker of a checkpoint says; None of one that was not written to its end."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        good = isinstance(found["step"], int) and isinstance(found["samples"], int) and found["version"] == 1
        pairs = [(Path(name).name == name, len(pair) == 2 and all(isinstance(one, int) for one in pair))
                 for name, pair in found["files"].items()]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if good and pairs and all(map(all, pairs)) else None


def torn(folder: Path, rank: int = 0, world: int = 1, *, sums: bool = True) -> str:
    """Why a checkpoint is not whole; "" of one that is. Each rank of ``world`` looks at its share of the files."""
    found = marker(folder)
    if found is None:
        return "it was not written to its end"
    for name, (size, total) in sorted(found["files"].items())[rank::world]:
        try:
            there = (folder / name).stat().st_size
            if there != size:
                return f"{name} has {there} of {size} bytes"
            if sums and size_and_sum(folder / name)[1] != total:
                return f"the bytes of {name} are not those that were written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def last_good(root: str | Path, *, sums: bool = False) -> Path | None:
    """The newest whole checkpoint; None where there is none. Without ``sums`` only the sizes are looked at."""
    return next((one for one in checkpoints(root) if not torn(one, sums=sums)), None)


def remove(folder: Path) -> None:
    """Removes a checkpoint; its marker first, so that it is torn if this is cut short."""
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def forget(root: str | Path, keep: int) -> None:
    """Removes what is older than the ``keep`` newest whole checkpoints, and torn ones older than the newest whole one."""
    good = 0
    for folder in checkpoints(root):
        whole = not torn(folder, sums=False)
        good += whole
        if good > keep or (good and not whole):
            remove(folder)
