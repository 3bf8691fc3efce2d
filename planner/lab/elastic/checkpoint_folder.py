"""A checkpoint folder recognised, and its layout read: names, shapes and shards of tensors, without torch or values.

    torch.distributed.checkpoint     .metadata, *.distcp; in step-* (torchtitan, the PyTorch export)
    Megatron torch_dist              latest_checkpointed_iteration.txt, iter_*/.metadata, common.pt
    Megatron torch                   latest_checkpointed_iteration.txt, iter_*/mp_rank_TT[_PPP]
    DeepSpeed                        latest, global_step*/zero_pp_rank_D_mp_rank_T_optim_states.pt, mp_rank_T_model_states.pt
    DeepSpeed universal              latest_universal, FOLDER/zero/NAME/fp32.pt
    safetensors                      model.safetensors.index.json or *.safetensors

[torch 2.13: distributed/checkpoint/metadata.py, filesystem.py; Megatron-LM core_r0.19: training/checkpointing.py; DeepSpeed:
checkpoint/constants.py, runtime/engine.py; safetensors: format in its README]
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.lab.elastic.inert_pickle import Record, read_pickle, tensor_of
from planner.record import record
from planner.trainers.pytorch.good_checkpoints import MARKER, torn
from planner.units import format_bytes

DCP, MEGATRON, MEGATRON_TORCH, DEEPSPEED, UNIVERSAL, SAFETENSORS = (
    "torch.distributed.checkpoint", "Megatron torch_dist", "Megatron torch", "DeepSpeed", "DeepSpeed universal", "safetensors"
)  # fmt: skip
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
"""Bytes of a value; of dtypes that are not named here, one."""
LONGEST_HEADER = 100_000_000
"""Bytes of a header of safetensors, as its own reader allows."""
OF_ZERO = r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
OF_MODEL = r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt"
OF_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32"}


@record
class Shard:
    """A box of a tensor as it lies in a file."""

    offsets: tuple[int, ...]
    """First index by dimension."""
    sizes: tuple[int, ...]
    """Extent by dimension."""
    file: str
    """Relative to the checkpoint."""
    length: int
    """Bytes in the file; 0 = not known."""


@record
class StoredTensor:
    """A tensor by its global name."""

    shape: tuple[int, ...]
    """The whole of it."""
    dtype: str
    """As torch names it, without ``torch.``."""
    shards: tuple[Shard, ...] = ()
    """Boxes that make it up; () = not known."""

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * BYTES.get(self.dtype, 1)


@record
class CheckpointFolder:
    """A checkpoint and who wrote it."""

    kind: str
    """One of the formats above."""
    path: Path
    """The folder of this one checkpoint."""
    step: int | None
    """Optimizer steps before it; None = it does not say."""
    size: int
    """Bytes of its files."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """By name; {} where the format keeps no list that can be read without its package."""
    degrees: dict[str, int] = field(default_factory=dict)
    """What file names say of the layout that wrote it: tp, pp, dp, files."""
    problem: str = ""
    """Why it is torn; "" = it is whole as far as can be seen without reading it."""


def recognise(folder: Path) -> CheckpointFolder:
    """The newest checkpoint of a folder, or the folder itself. Raises PlannerError where there is none."""
    if not folder.is_dir():
        raise PlannerError(f"{folder}: there is no such folder")
    for reader in (_dcp, _megatron, _universal, _deepspeed, _steps, _safetensors):
        if (found := reader(folder)) is not None:
            return found
    raise PlannerError(
        f"{folder} holds no checkpoint that is known: no .metadata (torch.distributed.checkpoint), no "
        "latest_checkpointed_iteration.txt (Megatron), no latest or global_step* (DeepSpeed), no *.safetensors"
    )


def held_by(folder: Path, say: Callable[[str], object]) -> tuple[float, int | None]:
    """(bytes of weights and states, step) of the newest checkpoint of a folder; ``say`` gets a line about it. Raises PlannerError
    where it is torn, or holds tensors of no size."""
    found = recognise(folder)
    if found.problem:
        raise PlannerError(f"{found.path} is torn: {found.problem}; give a whole checkpoint")
    held = float(sum(one.size for one in found.tensors.values()))
    size = held if found.kind in (DCP, MEGATRON, UNIVERSAL) and held else float(found.size)  # else of its files
    if size <= 0:
        raise PlannerError(f"{found.path} holds no bytes")
    degrees = "".join(f", {name} {count}" for name, count in found.degrees.items())
    say(f"{found.path}: {found.kind}, {len(found.tensors)} tensors, {format_bytes(size)}{degrees}")
    return size, found.step


def set_aside(root: Path) -> list[str]:
    """Renames torn checkpoints of torchtitan, which would be loaded: step-30 becomes torn-30, as it looks
    for step-N anywhere in a name. What is said of each."""
    said = []
    for one in sorted(root.glob("step-*")) if root.is_dir() else ():
        try:
            found = _dcp(one)
            problem = "" if found is None else found.problem  # without .metadata it is not loaded
        except PlannerError as error:
            problem = str(error)
        if problem:
            one.rename(one.with_name(f"torn-{one.name[5:]}"))
            said.append(f"checkpoint {one.name} is torn, set aside: {problem}")
    return said


def newest_step(root: Path) -> int:
    """The highest step of the checkpoints of torchtitan, Megatron or the PyTorch script, torn ones too; 0 = there are none."""
    names = [one.name for one in root.iterdir()] if root.is_dir() else []
    return max((int(found[1]) for name in names if (found := re.fullmatch(r"(?:step-|iter_)(\d+)", name))), default=0)


def _size(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def _newest(folder: Path, pattern: str) -> Path | None:
    """The subfolder whose number is the highest; the first group of the pattern is the number."""
    found = [(int(match[1]), one) for one in folder.iterdir() if one.is_dir() and (match := re.fullmatch(pattern, one.name))]
    return max(found)[1] if found else None


def _number(path: Path) -> int | None:
    found = re.search(r"(\d+)", path.name)
    return int(found[1]) if found else None


# ------------------------------------------------------------------------------------------------ torch.distributed.checkpoint


def _dcp(folder: Path) -> CheckpointFolder | None:
    if not (folder / ".metadata").is_file():
        return None
    tensors, ends = stored_tensors(folder / ".metadata")
    problem = ""
    for name, end in sorted(ends.items()):
        there = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if there < end:
            problem = problem or (f"{name} is missing" if there < 0 else f"{name} has {there} of at least {end} bytes")
    if (folder / MARKER).exists() or re.fullmatch(r"step-\d{8,}", folder.name):
        problem = problem or torn(folder, sums=False)
    kind = MEGATRON if (folder / "common.pt").is_file() or (folder / "metadata.json").is_file() else DCP
    degrees = {"files": len(ends)}
    return CheckpointFolder(kind=kind, path=folder, step=_number(folder), size=_size(folder), tensors=tensors,
                            degrees=degrees, problem=problem)  # fmt: skip


def stored_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    """(tensors by name, bytes that each file must have at least) of a .metadata. Raises PlannerError."""
    metadata = read_pickle(path)
    if not isinstance(metadata, Record) or not isinstance(metadata.fields.get("state_dict_metadata"), dict):
        raise PlannerError(f"{path}: not the metadata of torch.distributed.checkpoint")
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    ends: dict[str, int] = {}
    for index, info in _pairs(metadata.fields.get("storage_data")):
        file, start, length = (info.fields.get(name) for name in ("relative_path", "offset", "length"))
        name, offset = index.fields.get("fqn"), index.fields.get("offset")
        if not (isinstance(file, str) and isinstance(start, int) and isinstance(length, int) and isinstance(name, str)):
            raise PlannerError(f"{path}: not the metadata of torch.distributed.checkpoint")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise PlannerError(f"{path}: names the file {file}, which is not inside of the checkpoint")
        ends[file] = max(ends.get(file, 0), start + length)
        places[name, _ints(offset)] = (file, length)
    tensors = {}
    for name, one in metadata.fields["state_dict_metadata"].items():
        if not isinstance(one, Record) or not isinstance(one.fields.get("chunks"), list):
            continue  # an object, not a tensor
        chunks = [(_ints(each.fields.get("offsets")), _ints(each.fields.get("sizes"))) for each in one.fields["chunks"]]
        shards = tuple(
            Shard(offsets=at, sizes=sizes, file=file, length=length)
            for at, sizes in chunks for file, length in (places.get((name, at), ("", 0)),)
        )  # fmt: skip
        tensors[str(name)] = StoredTensor(shape=_ints(one.fields.get("size")), dtype=_dtype(one), shards=shards)
    return tensors, ends


def _pairs(value: Any) -> Iterator[tuple[Record, Record]]:
    for index, info in value.items() if isinstance(value, dict) else ():
        if isinstance(index, Record) and isinstance(info, Record):
            yield index, info


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple) and all(isinstance(one, int) for one in value) else ()


def _dtype(tensor: Record) -> str:
    """The first of TensorProperties' state; a dtype is pickled as the name of a global."""
    properties = tensor.fields.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    kind = state[0] if isinstance(state, tuple) and state else None
    return str(getattr(kind, "named", "")).rpartition(".")[2]


def _steps(folder: Path) -> CheckpointFolder | None:
    """step-* of torchtitan and of the PyTorch export: the newest one that is whole, else the newest."""
    found = sorted((one for one in folder.iterdir() if re.fullmatch(r"step-\d+", one.name)), key=lambda one: int(one.name[5:]))
    last = None
    for one in reversed(found):
        read = _dcp(one)
        if read is not None and not read.problem:
            return read
        last = last or read
    return last


# ------------------------------------------------------------------------------------------------ Megatron


def _megatron(folder: Path) -> CheckpointFolder | None:
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        text = library.read_text(tracker).strip()
        if not re.fullmatch(r"\d{1,12}|release", text):
            raise PlannerError(f"{tracker} says {text[:40]!r}; it must be the number of an iteration")
        one = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
        if not one.is_dir():
            raise PlannerError(f"{tracker} names iteration {text}, and there is no {one.name}")
    elif (newest := _newest(folder, r"iter_(\d+)")) is not None:
        one = newest
    else:
        one = folder
    if (found := _dcp(one)) is not None and one != folder:
        return found
    names = [re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(?:_\d+)?", each.name) for each in one.iterdir() if each.is_dir()]
    ranks = [match for match in names if match]
    if not ranks or not any((one / match[0]).glob("model_optim_rng.pt") for match in ranks):
        return None
    degrees = {"tp": 1 + max(int(match[1]) for match in ranks), "pp": 1 + max(int(match[2] or 0) for match in ranks)}
    return CheckpointFolder(kind=MEGATRON_TORCH, path=one, step=_number(one), size=_size(one), degrees=degrees)


# ------------------------------------------------------------------------------------------------ DeepSpeed


def _deepspeed(folder: Path) -> CheckpointFolder | None:
    one = _named_by(folder, "latest") or _newest(folder, r"global_step(\d+)") or folder
    files = {each.name: each for each in one.iterdir() if each.is_file()}
    shards, models = ([match for name in files if (match := re.fullmatch(one, name))] for one in (OF_ZERO, OF_MODEL))
    if not models:
        return None
    degrees = {"tp": 1 + max(int(match[1]) for match in models)}
    if shards:
        degrees["dp"] = 1 + max(int(match[1]) for match in shards)
    first = read_pickle(files[min(match[0] for match in models)])
    missing = degrees.get("dp", 1) * degrees["tp"] - len(shards) if shards else 0
    return CheckpointFolder(
        kind=DEEPSPEED, path=one, step=_number(one), size=_size(one), tensors=_of_deepspeed(first), degrees=degrees,
        problem=f"{missing} of its optim_states files are missing" if missing > 0 else "",
    )  # fmt: skip


def _named_by(folder: Path, file: str) -> Path | None:
    if not (folder / file).is_file():
        return None
    name = library.read_text(folder / file).strip()
    if not name or Path(name).name != name or not (folder / name).is_dir():
        raise PlannerError(f"{folder / file} names {name[:60]!r}, and there is no such folder")
    return folder / name


def _of_deepspeed(state: Any) -> dict[str, StoredTensor]:
    """Names and shapes: param_shapes of ZeRO (whole tensors), else the module's own."""
    if not isinstance(state, dict):
        return {}
    shapes = state.get("param_shapes")
    if isinstance(shapes, list) and shapes:
        return {str(name): StoredTensor(shape=_ints(shape), dtype="float32")
                for group in shapes if isinstance(group, dict) for name, shape in group.items()}  # fmt: skip
    module = state.get("module")
    found = {name: tensor_of(one) for name, one in module.items()} if isinstance(module, dict) else {}
    return {str(name): StoredTensor(shape=one[0], dtype=one[1]) for name, one in found.items() if one is not None}


def _universal(folder: Path) -> CheckpointFolder | None:
    one = _named_by(folder, "latest_universal") or folder
    if not (one / "zero").is_dir():
        return None
    tensors = {}
    for weights in sorted((one / "zero").glob("*/fp32.pt")):
        for state in sorted(weights.parent.glob("*.pt")):
            value = read_pickle(state)
            found = tensor_of(value.get("param")) if isinstance(value, dict) else None
            if found is not None:
                place, size = str(state.relative_to(one)), state.stat().st_size
                shard = Shard(offsets=(0,) * len(found[0]), sizes=found[0], file=place, length=size)
                name = f"{state.parent.name}.{state.stem}"
                tensors[name] = StoredTensor(shape=found[0], dtype=found[1], shards=(shard,))
    return CheckpointFolder(kind=UNIVERSAL, path=one, step=_number(one), size=_size(one), tensors=tensors)


# ------------------------------------------------------------------------------------------------ safetensors


def _safetensors(folder: Path) -> CheckpointFolder | None:
    files = sorted(folder.glob("*.safetensors"))
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if not files and index is None:
        return None
    tensors = {name: one for path in files for name, one in _header(path)}
    problem = ""
    if index is not None:
        data = library.parse_json(library.read_text(index, most=LONGEST_HEADER), str(index))
        named = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(named, dict):
            raise PlannerError(f"{index}: has no weight_map")
        there = {path.name for path in files}
        missing = sorted({str(one) for one in named.values()} - there)
        problem = f"{missing[0]} is missing" if missing else ""
        lost = sorted(set(named) - set(tensors))
        problem = problem or (f"{lost[0]} is in no file" if lost else "")
    return CheckpointFolder(kind=SAFETENSORS, path=folder, step=None, size=_size(folder), tensors=tensors,
                            degrees={"files": len(files)}, problem=problem)  # fmt: skip


def _header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Eight bytes with the length of a JSON header, which has dtype, shape and place of each tensor."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEADER + 1
        if length > LONGEST_HEADER:
            raise PlannerError(f"{path}: not a file of safetensors")
        try:
            data = json.loads(file.read(length))
        except ValueError as error:
            raise PlannerError(f"{path}: not a file of safetensors") from error
    for name, one in data.items() if isinstance(data, dict) else ():
        if name == "__metadata__" or not isinstance(one, dict):
            continue
        shape, place, dtype = _list(one.get("shape")), _list(one.get("data_offsets")), str(one.get("dtype", ""))
        if len(place) != 2:
            raise PlannerError(f"{path}: {name} has no place in the file")
        shard = Shard(offsets=(0,) * len(shape), sizes=shape, file=path.name, length=place[1] - place[0])
        yield str(name), StoredTensor(shape=shape, dtype=OF_SAFETENSORS.get(dtype, dtype), shards=(shard,))


def _list(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) and all(isinstance(one, int) for one in value) else ()


